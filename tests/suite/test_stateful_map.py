"""stateful_map: an output and a new state for each event."""

from dataclasses import dataclass, field

import msgspec
import pytest

from penstock import Codec, InvalidError, LogicError
from penstock.testing import TestDriver


@dataclass
class Account:
    balance: int = 0
    history: list[int] = field(default_factory=list)


class Point(msgspec.Struct, frozen=True):
    x: int


def run_one_key(pipeline, fn, values, default=None, state="json", epochs=1):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).stateful_map("step", fn, default=default, state=state)
    stream.to_topic(app.topic("out"))
    return pipeline.run(app, {"in": [("a", value) for value in values]}, epochs=epochs)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_the_new_state_comes_with_the_next_event(pipeline, epochs):
    outputs = run_one_key(pipeline, lambda k, n, s: ([k, n, s], s + n), [1, 2, 3, 4], default=0, epochs=epochs)
    assert outputs.values("out") == [["a", 1, 0], ["a", 2, 1], ["a", 3, 3], ["a", 4, 6]]
    assert dict(pipeline.state("step")) == {"a": 10}


def test_without_a_default_the_state_of_a_new_key_is_none(pipeline):
    outputs = run_one_key(pipeline, lambda k, n, s: (s, n), [1, 2])
    assert outputs.values("out") == [None, 1]


@pytest.mark.parametrize("epochs", [1, 3])
def test_none_drops_the_state(pipeline, epochs):
    outputs = run_one_key(pipeline, lambda k, n, s: (s, n or None), [1, 0, 2], default=-1, epochs=epochs)
    assert outputs.values("out") == [-1, 1, -1]
    assert dict(pipeline.state("step")) == {"a": 2}


def test_what_was_dropped_is_gone(pipeline):
    run_one_key(pipeline, lambda k, n, s: (s, n or None), [1, 0], epochs=2)
    assert dict(pipeline.state("step")) == {}
    assert "a" not in pipeline.state("step")


def test_state_that_is_false_is_kept(pipeline):
    outputs = run_one_key(pipeline, lambda k, v, s: (s, v), [0, False, "", [], {}, 1], default="none", epochs=2)
    assert outputs.values("out") == ["none", 0, False, "", [], {}]


@pytest.mark.parametrize("default", [[], list])
def test_keys_do_not_share_a_default_that_can_change(pipeline, default):
    app = pipeline.application()

    def collect(key, value, seen):
        seen.append(value)
        return list(seen), seen

    app.dataframe(app.topic("in")).stateful_map("seen", collect, default=default)
    pipeline.run(app, {"in": [("a", 1), ("b", 2), ("a", 3), ("c", 4)]})
    assert dict(pipeline.state("seen")) == {"a": [1, 3], "b": [2], "c": [4]}
    assert default in ([], list)


def test_a_default_that_was_changed_but_not_returned_is_not_kept(pipeline):
    def spoil(key, value, seen):
        seen.append(value)
        return list(seen), None

    assert run_one_key(pipeline, spoil, [1, 2], default=[]).values("out") == [[1], [2]]


def test_the_state_may_be_the_output_too(pipeline):
    app = pipeline.application()

    def add(key, value, state):
        state[value] = state.get(value, 0) + 1
        return state, state

    stream = app.dataframe(app.topic("in")).stateful_map("step", add, default=dict)
    stream.update(lambda output: output.update(spoilt=True)).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", "x"), ("a", "y"), ("a", "x")]})
    assert outputs.values("out") == [
        {"x": 1, "spoilt": True},
        {"x": 1, "y": 1, "spoilt": True},
        {"x": 2, "y": 1, "spoilt": True},
    ]
    assert dict(pipeline.state("step")) == {"a": {"x": 2, "y": 1}}


def test_state_changed_after_it_was_returned_is_as_it_was_returned(pipeline):
    kept = []

    def keep(key, value, state):
        for old in kept:
            old.append("late")
        kept.append([*state, value])
        return len(state), kept[-1]

    assert run_one_key(pipeline, keep, [1, 2, 3], default=[]).values("out") == [0, 1, 2]
    assert dict(pipeline.state("step")) == {"a": [1, 2, 3]}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_tuple_comes_back_as_a_list_in_json_and_as_a_tuple_by_its_type(pipeline, epochs):
    def pair(key, value, state):
        return repr(state), (value, "x")

    assert run_one_key(pipeline, pair, [1, 2], epochs=epochs).values("out") == ["None", "[1, 'x']"]
    other = type(pipeline)(pipeline._folder / "typed")
    typed = run_one_key(other, pair, [1, 2], state=tuple[int, str], default=(0, ""), epochs=epochs)
    assert typed.values("out") == ["(0, '')", "(1, 'x')"]


@pytest.mark.parametrize("default", [Account(), Account])
@pytest.mark.parametrize("epochs", [1, 3])
def test_state_may_be_a_dataclass(pipeline, default, epochs):
    def book(key, amount, account):
        assert isinstance(account, Account)
        account.balance += amount
        account.history.append(amount)
        return account.balance, account

    outputs = run_one_key(pipeline, book, [5, 6, 7], default=default, state=Account, epochs=epochs)
    assert outputs.values("out") == [5, 11, 18]
    assert dict(pipeline.state("step")) == {"a": Account(18, [5, 6, 7])}
    assert default in (Account(), Account)


@pytest.mark.in_process("a Struct of the test itself cannot travel; tests/spark/test_run.py shows what is said")
def test_state_may_be_a_struct(pipeline):
    outputs = run_one_key(
        pipeline, lambda k, n, p: (p.x, Point(p.x + n)), [1, 2, 3], default=Point(0), state=Point, epochs=3
    )
    assert outputs.values("out") == [0, 1, 3]
    assert dict(pipeline.state("step")) == {"a": Point(6)}


@pytest.mark.parametrize("state", ["msgpack", "bytes"])
def test_state_may_be_bytes_with_a_codec_that_has_them(pipeline, state):
    def grow(key, value, data):
        data += bytes([value])
        return data.hex(), data

    assert run_one_key(pipeline, grow, [1, 255], default=b"", state=state, epochs=2).values("out") == ["01", "01ff"]
    assert dict(pipeline.state("step")) == {"a": b"\x01\xff"}


def test_state_may_have_a_codec_of_its_own(pipeline):
    hexadecimal = Codec("hex", lambda number: b"%x" % number, lambda data: int(data, 16), frozenset({int}))
    outputs = run_one_key(pipeline, lambda k, n, s: (s, s + n), [250, 5], default=0, state=hexadecimal, epochs=2)
    assert outputs.values("out") == [0, 250]
    assert dict(pipeline.state("step")) == {"a": 255}


def test_state_of_many_keys_in_many_epochs(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    app.dataframe(app.topic("in")).stateful_map("sum", lambda k, n, s: (s + n, s + n), default=0)
    items = [(f"k{n % 97}", n) for n in range(2000)]
    pipeline.run(app, {"in": items}, epochs=7)
    assert dict(pipeline.state("sum")) == {f"k{k}": sum(range(k, 2000, 97)) for k in range(97)}


def test_a_default_that_cannot_be_stored_is_refused_when_the_plan_is_built(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="cannot be written"):
        app.dataframe(app.topic("in")).stateful_map("step", lambda k, v, s: (v, s), default=b"raw")


def test_a_function_that_does_not_return_a_pair_is_told_what_to_return(pipeline):
    with pytest.raises(LogicError, match=r"step 'step'(.|\n)*\(output, new state\)"):
        run_one_key(pipeline, lambda k, v, s: v, [1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), [float("nan")], object()])
def test_state_that_cannot_be_stored_is_an_error_of_the_event_that_made_it(pipeline, bad):
    app = pipeline.application(on_error="skip")
    stream = app.dataframe(app.topic("in")).stateful_map("step", lambda k, v, s: (v, bad if v == 1 else v))
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 0), ("a", 1), ("a", 2)]}).values("out") == [0, 2]
    assert pipeline.counts.skipped == 1
    assert dict(pipeline.state("step")) == {"a": 2}


@pytest.mark.parametrize("bad", ["\ud800", 1 << 70])
def test_state_that_proves_unfit_at_the_end_names_step_and_key(pipeline, bad):
    with pytest.raises(InvalidError, match=r"step 'step'.*key 'a'"):
        run_one_key(pipeline, lambda k, v, s: (v, bad), [1], state="msgpack")


def test_an_event_without_a_key_is_told_how_to_get_one(pipeline, tmp_path):
    for local_dir in (None, tmp_path / "disk"):
        app = pipeline.application()
        app.dataframe(app.topic("in")).stateful_map("step", lambda k, v, s: (v, s))
        driver = TestDriver(app, local_dir=local_dir)
        driver.send("in", 1)
        with pytest.raises(LogicError, match=r"step 'step'(.|\n)*has no key(.|\n)*key_by"):
            driver.epoch()
