"""MapState: a mapping under one key, one row for each entry."""

import random

import pytest

from penstock import LogicError


def start(pipeline, fn, **settings):
    app = pipeline.application(**settings)
    app.dataframe(app.topic("in")).apply(fn, stateful=True, name="step").to_topic(app.topic("out"))
    return pipeline.start(app)


def run(driver, value=None, key="a"):
    driver.send("in", value, key=key)
    driver.epoch()
    return driver.received("out")[-1].value


def delta_rows(driver, step="step"):
    """How many rows the last epoch wrote."""
    epoch = driver.view.epoch
    refs = [ref for parts in driver.view.segments.get(step, {}).values() for ref in parts]
    return sum(ref.rows for ref in refs if ref.first_epoch == ref.last_epoch == epoch)


def test_it_is_a_mapping(pipeline):
    def use(value, state):
        m = state.map("m")
        m["b"] = 1
        m.update(a=2, c=3)
        m.setdefault("a", 9)
        m["c"] += 1
        found = [m["a"], m.get("zz"), m.get("zz", 5), "b" in m, "zz" in m, len(m), list(m), list(m.items())]
        return [*found, m.pop("b"), m.pop("b", "none"), sorted(m.values()), bool(m), dict(m)]

    assert run(start(pipeline, use)) == [
        *[2, None, 5, True, False, 3, ["a", "b", "c"], [["a", 2], ["b", 1], ["c", 4]]],
        *[1, "none", [2, 4], True, {"a": 2, "c": 4}],
    ]


def test_it_lives_on_and_counts_right_over_epochs(pipeline):
    def use(value, state):
        m = state.map("m")
        for key, item in value:
            if item is None:
                del m[key]
            else:
                m[key] = item
        return [len(m), dict(m)]

    driver = start(pipeline, use)
    assert run(driver, [["x", 1], ["y", 2]]) == [2, {"x": 1, "y": 2}]
    assert run(driver, [["x", 3], ["y", None], ["z", 4]]) == [2, {"x": 3, "z": 4}]
    assert run(driver, [["x", None], ["x", 5], ["z", None]]) == [1, {"x": 5}]
    assert run(driver, [["x", None]]) == [0, {}]
    assert driver.state("step") == {}


def test_a_value_of_none_is_a_value(pipeline):
    driver = start(
        pipeline, lambda v, state: [state.map("m").update(x=None), "x" in state.map("m"), len(state.map("m"))]
    )
    assert run(driver) == [None, True, 1]


def test_a_missing_entry_is_a_key_error(pipeline):
    with pytest.raises(LogicError, match="KeyError: 'zz'"):
        run(start(pipeline, lambda v, state: state.map("m")["zz"]))
    with pytest.raises(LogicError, match="KeyError: 'zz'"):
        run(start(pipeline, lambda v, state: state.map("m").pop("zz")))


def test_entries_of_all_kinds_of_keys_are_apart_and_in_order(pipeline):
    keys = ["1", b"1", 1, 1.0, True, False, 0, -5, 300, ("a", 1), ("a", 1.0), (("a",), 1), ""]

    def use(value, state):
        m = state.map("m")
        for key in keys:
            m[key] = repr(key)
        assert [repr(key) for key in m] == [m[key] for key in m]
        return [len(m), sorted(map(repr, m))]

    assert run(start(pipeline, use)) == [len(keys), sorted(map(repr, keys))]


@pytest.mark.parametrize("key", [None, [1], float("nan"), {}])
def test_what_is_no_key_is_refused(pipeline, key):
    with pytest.raises(LogicError, match="cannot be a key"):
        run(start(pipeline, lambda v, state: state.map("m").get(key)))


def test_a_key_that_is_too_long_is_refused_with_the_remedy(pipeline):
    with pytest.raises(LogicError, match=r"use a? ?shorter"):
        run(start(pipeline, lambda v, state: state.map("m" * 60).update({"x" * 390: 1})), key="k" * 300)


def test_values_are_copied_in_and_out(pipeline):
    def spoil(value, state):
        mine = [1]
        state.map("m")["x"] = mine
        mine.append("spoilt")
        state.map("m")["x"].append("spoilt")
        return dict(state.map("m"))

    assert run(start(pipeline, spoil)) == {"x": [1]}


def test_a_map_may_change_while_it_is_iterated(pipeline):
    def use(value, state):
        m = state.map("m")
        for n in range(value, value + 3):
            m[n] = n
        seen = []
        for key in m:
            seen.append(key)
            m[100 + key] = "new"
            m.pop(value + 1, None)
        return [seen, len(m), sorted(m)]

    driver = start(pipeline, use)
    assert run(driver, 0) == [[0, 2], 4, [0, 2, 100, 102]]
    seen, length, keys = run(driver, 10)
    assert length == len(keys)
    assert 11 not in seen
    assert 11 not in keys


def test_maps_of_two_names_and_keys_are_apart(pipeline):
    def use(value, state):
        state.map("a")["b"] = value
        state.map("ab")[""] = -value
        return [dict(state.map("a")), dict(state.map("ab")), dict(state.map("b"))]

    driver = start(pipeline, use)
    assert run(driver, 1, key="k") == [{"b": 1}, {"": -1}, {}]
    assert run(driver, 2, key="l") == [{"b": 2}, {"": -2}, {}]


def test_clear_removes_every_entry(pipeline):
    def use(value, state):
        m = state.map("m")
        m.update({str(n): n for n in range(value)})
        state.map("other")["x"] = 1
        m.clear()
        return len(m)

    driver = start(pipeline, use)
    assert run(driver, 5) == 0
    assert driver.state("step") == {"a": {"other": {"x": 1}}}


@pytest.mark.parametrize("disk", [False, True])
def test_changing_one_of_many_entries_writes_that_entry(pipeline, tmp_path, disk):
    def use(value, state):
        m = state.map("m")
        for key in range(*value):
            m[key] = key
        return len(m)

    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(use, stateful=True, name="step").to_topic(app.topic("out"))
    driver = pipeline.start(app, local_dir=tmp_path / "disk" if disk else None)
    assert run(driver, [0, 200_000]) == 200_000
    assert run(driver, [-1, 0]) == 200_001  # a new entry: it, and how many there are
    assert delta_rows(driver) <= 3


def test_overwriting_one_of_many_entries_writes_one_row(pipeline):
    driver = start(pipeline, lambda value, state: state.map("m").update(value))
    run(driver, {str(n): 0 for n in range(1000)})
    run(driver, {"7": 1})
    assert delta_rows(driver) == 1


def test_a_random_life_of_a_map(pipeline, tmp_path):
    """Against a dict, over epochs and restarts, on a store on disk."""

    def use(value, state):
        m = state.map("m")
        for key, item in value:
            if item is None:
                m.pop(key, None)
            else:
                m[key] = item
        return [dict(m), len(m)]

    rng = random.Random(11)
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(use, stateful=True, name="step").to_topic(app.topic("out"))
    driver = pipeline.start(app, local_dir=tmp_path / "disk")
    oracle: dict[str, int] = {}
    for n in range(60):
        todo = [[str(rng.randrange(12)), rng.choice([None, n, n + 1])] for _ in range(rng.randrange(6))]
        for key, item in todo:
            oracle.pop(key, None) if item is None else oracle.__setitem__(key, item)
        assert run(driver, todo) == [oracle, len(oracle)]
        if n % 7 == 0:
            driver.crash()
            driver.restart()
