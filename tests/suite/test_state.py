"""State: named values of one key."""

from datetime import timedelta

import pytest

from penstock import LogicError
from penstock.state.keys import row_prefix
from penstock.state.replica import MemoryShelf, Replicas

SECOND = timedelta(seconds=1)


def start(pipeline, fn, state="json", **settings):
    app = pipeline.application(**settings)
    stream = app.dataframe(app.topic("in")).apply(fn, stateful=True, name="step", state=state)
    stream.to_topic(app.topic("out"))
    return pipeline.start(app)


def values(driver):
    return [event.value for event in driver.received("out")]


def commands(value, state):
    """Does what an event says, and returns what each command gave."""
    found = []
    for verb, *rest in value:
        if verb == "set" and len(rest) == 3:
            found.append(state.set(rest[0], rest[1], ttl=timedelta(milliseconds=rest[2])))
        else:
            found.append(getattr(state, verb)(*rest))
    return found


def run(driver, *given, key="a", time=0):
    driver.send("in", list(given), key=key, timestamp_ms=time)
    driver.epoch()
    return values(driver)[-1]


def stored_rows(driver, step="step"):
    """Every row that the store of a step holds, restored from its segments."""
    rows = []
    for partition, refs in driver.view.segments.get(step, {}).items():
        store = Replicas(driver._storage, MemoryShelf()).at(step, partition, driver.view.epoch, refs)
        rows.extend(store.scan(b"", b"\xff" * 9))
    return rows


def test_get_set_delete_exists_and_keys(pipeline):
    driver = start(pipeline, commands)
    assert run(driver, ["get", "x"], ["get", "x", 7], ["exists", "x"], ["keys"]) == [None, 7, False, []]
    assert run(driver, ["set", "x", 1], ["get", "x", 7], ["exists", "x"], ["keys"]) == [None, 1, True, ["x"]]
    assert run(driver, ["get", "x"], ["set", "b", 2], ["keys"], ["set", "x", 3]) == [1, None, ["b", "x"], None]
    assert run(driver, ["delete", "x"], ["get", "x"], ["exists", "x"], ["keys"]) == [None, None, False, ["b"]]
    assert run(driver, ["keys"], ["delete", "never set"], ["get", "b"]) == [["b"], None, 2]
    assert driver.state("step") == {"a": {"b": 2}}


def test_set_after_delete_and_delete_after_set_in_one_event(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1], ["set", "y", 1])
    run(driver, ["delete", "x"], ["set", "x", 2], ["set", "y", 2], ["delete", "y"])
    assert driver.state("step") == {"a": {"x": 2}}


def test_a_name_deleted_without_being_read_is_gone(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1])
    run(driver, ["delete", "x"])
    assert driver.state("step") == {}
    assert stored_rows(driver) == []


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}, 0.0, -0.5, 1 << 70, "é", {"a": [None, {"b": 1}]}])
def test_any_json_value_comes_back(pipeline, value):
    driver = start(pipeline, lambda v, state: [state.exists("x"), state.get("x", "none"), state.set("x", value)])
    assert run(driver, []) == [False, "none", None]
    assert run(driver, []) == [True, value, None]
    assert driver.state("step") == {"a": {"x": value}}


def test_values_are_copied_in_and_out(pipeline):
    kept = []

    def spoil(value, state):
        found = state.get("x", [])
        found.append("changed after get")
        again = state.get("x", [])
        mine = [*again, value]
        state.set("x", mine)
        mine.append("changed after set")
        for old in kept:
            old.append("changed later")
        kept.append(mine)
        return state.get("x")

    driver = start(pipeline, spoil)
    for n in range(3):
        driver.send("in", n, key="a")
    driver.epoch()
    driver.send("in", 3, key="a")
    driver.epoch()
    assert values(driver) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_default_that_can_change_is_the_callers_own(pipeline):
    default = []

    def spoil(value, state):
        state.get("x", default).append(value)
        return state.exists("x")

    driver = start(pipeline, spoil)
    assert run(driver) is False
    assert driver.state("step") == {}


@pytest.mark.parametrize("bad", [float("nan"), [float("inf")], b"raw", object()], ids=str)
def test_a_value_that_cannot_be_stored_is_refused_where_it_is_set(pipeline, bad):
    driver = start(pipeline, lambda value, state: state.set("x", bad))
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match=r"step 'step'.*key 'a'.*cannot be written(.|\n)*state.set"):
        driver.epoch()


@pytest.mark.parametrize("name", ["", "x" * 65, "a\0b", 7, None])
@pytest.mark.parametrize("verb", ["get", "set", "delete", "exists", "list", "map"])
def test_names_are_validated_and_the_message_says_how(pipeline, verb, name):
    def use(value, state):
        return getattr(state, verb)(*((name, 1) if verb == "set" else (name,)))

    driver = start(pipeline, use)
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match=r"cannot name a piece of state: a name is a text of 1 to 64 bytes"):
        driver.epoch()


@pytest.mark.parametrize("name", ["x" * 64, " ", "a/b", "é", "key", "%"])
def test_any_other_name_is_fine(pipeline, name):
    driver = start(pipeline, lambda value, state: state.set(name, value))
    run(driver, 1)
    assert driver.state("step") == {"a": {name: [1]}}


def test_one_name_may_be_a_value_a_list_and_a_map(pipeline):
    def three(value, state):
        state.set("x", 1)
        state.list("x").append(2)
        state.map("x")["k"] = 3
        return [state.get("x"), list(state.list("x")), dict(state.map("x")), state.keys()]

    assert run(start(pipeline, three)) == [1, [2], {"k": 3}, ["x"]]


def test_ttl_hides_a_value_once_event_time_has_moved_on(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1, 1000], time=5000)
    assert run(driver, ["get", "x"], ["exists", "x"], ["keys"], time=5999) == [1, True, ["x"]]
    assert run(driver, ["get", "x"], ["exists", "x"], ["keys"], time=6000) == [None, False, []]


def test_ttl_counts_from_the_event_that_set_it_also_within_an_epoch(pipeline):
    driver = start(pipeline, commands)
    for time, what in ((0, ["set", "x", 1, 10]), (9, ["get", "x"]), (10, ["get", "x"]), (11, ["set", "x", 2, 10])):
        driver.send("in", [what], key="a", timestamp_ms=time)
    driver.send("in", [["get", "x"]], key="a", timestamp_ms=20)
    driver.epoch()
    assert values(driver) == [[None], [1], [None], [None], [2]]


def test_ttl_is_renewed_or_taken_off_by_setting_again(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1, 10], ["set", "y", 1, 10], time=0)
    run(driver, ["set", "x", 1, 10], ["set", "y", 1], time=5)
    assert run(driver, ["get", "x"], ["get", "y"], time=12) == [1, 1]
    assert run(driver, ["get", "x"], ["get", "y"], time=15) == [None, 1]
    for time in (1000, 1001, 1002):
        run(driver, ["get", "y"], time=time)
    assert driver.state("step") == {"a": {"y": 1}}


@pytest.mark.parametrize("count", [1, 50])
def test_what_expired_is_really_removed_also_of_keys_without_events(pipeline, count, partitions):
    driver = start(pipeline, commands, partitions=partitions)
    for n in range(count):
        driver.send("in", [["set", "x", "secret", 1000], ["set", "y", "kept"]], key=f"k{n}", timestamp_ms=0)
    driver.epoch()
    assert sum(b"secret" in data for _, data in stored_rows(driver)) == count
    run(driver, key="other", time=999)
    driver.epoch()
    assert sum(b"secret" in data for _, data in stored_rows(driver)) == count
    run(driver, key="other", time=1000)
    driver.epoch()
    rows = stored_rows(driver)
    assert sum(b"secret" in data for _, data in rows) == 0
    assert len(rows) == count  # the values of y, and no row of the index of times
    assert dict(driver.state("step")) == {f"k{n}": {"y": "kept"} for n in range(count)}


def test_what_expired_can_be_set_again(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1, 10], time=0)
    run(driver, ["get", "x"], ["set", "x", 2, 1000], time=10)
    for _ in range(3):
        driver.epoch()
    assert run(driver, ["get", "x"], time=20) == [2]


def test_ttl_lives_through_a_crash_and_in_a_store_on_disk(pipeline, tmp_path):
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(commands, stateful=True, name="step").to_topic(app.topic("out"))
    driver = pipeline.start(app, local_dir=tmp_path / "disk")
    run(driver, ["set", "x", 1, 10], time=0)
    driver.crash()
    driver.restart()
    assert run(driver, ["get", "x"], time=9) == [1]
    driver.crash()
    driver.restart()
    assert run(driver, ["get", "x"], time=10) == [None]
    driver.epoch()
    assert stored_rows(driver) == []


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(microseconds=10), -SECOND, 10, "1s"])
def test_a_ttl_that_is_no_positive_interval_is_refused(pipeline, ttl):
    driver = start(pipeline, lambda value, state: state.set("x", 1, ttl=ttl))
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match="ttl"):
        driver.epoch()


def test_an_epoch_that_changes_nothing_writes_no_segment(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1], ["set", "y", [1]])
    before = driver.view.segments
    run(driver, ["get", "x"], ["get", "y"], ["set", "x", 1], ["set", "y", [1]], ["keys"])
    assert driver.view.segments == before


def test_each_row_of_a_key_begins_with_its_form(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", 1], key="a")
    [(row, _)] = stored_rows(driver)
    assert row.startswith(row_prefix(b"\x02a\x00"))


def test_a_value_that_a_late_event_sets_and_that_has_expired_already_replaces_the_old_one_by_nothing(pipeline):
    driver = start(pipeline, commands)
    run(driver, ["set", "x", "old"], time=1000)
    run(driver, ["set", "x", "late", 10], time=0)
    assert driver.state("step") == {}
    assert stored_rows(driver) == []
