"""Errors of the user's code and data: what each policy does, what the message says, and what is left behind."""

import traceback
from dataclasses import dataclass
from datetime import timedelta

import pytest

from penstock import DeadLetter, Event, Failure, InvalidError, LogicError, StatefulLogic
from penstock.state.codec import value_codec
from penstock.state.key_codecs import key_codec
from penstock.testing import CRASH, Crash


@dataclass
class Order:
    amount: int


class BoomError(Exception):
    """What the functions of these tests fail with."""


def check(value):
    """Fails for the values that a test calls bad."""
    if value == "bad":
        raise BoomError("no luck")
    return value


def stateful(value, state, *rest):
    state.set("n", state.get("n", 0) + 1)
    check(value)
    return value


class CheckLogic(StatefulLogic):
    def on_data(self, event, state, emit):
        emit("half")
        emit(check(event.value))
        return (state or 0) + 1


# Each operator kind with a function that fails for "bad"; the step is called "step".
OPERATORS = {
    "apply": lambda s: s.apply(check, name="step"),
    "apply expand": lambda s: s.apply(lambda v: [check(v)], expand=True, name="step"),
    "apply expand generator": lambda s: s.apply(lambda v: (check(x) for x in [v]), expand=True, name="step"),
    "apply metadata": lambda s: s.apply(lambda v, k, t, h: check(v), metadata=True, name="step"),
    "apply stateful": lambda s: s.apply(stateful, stateful=True, name="step"),
    "apply all": lambda s: s.apply(
        lambda v, k, t, h, st: [stateful(v, st)], stateful=True, metadata=True, expand=True, name="step"
    ),
    "update": lambda s: s.update(check, name="step"),
    "update stateful": lambda s: s.update(stateful, stateful=True, name="step"),
    "filter": lambda s: s.filter(check, name="step"),
    "filter stateful": lambda s: s.filter(stateful, stateful=True, name="step"),
    "map": lambda s: s.map(check, name="step"),
    "flat_map": lambda s: s.flat_map(lambda v: [check(v)], name="step"),
    "inspect": lambda s: s.inspect("step", check),
    "key_by": lambda s: s.key_by("step", lambda v: check(v) and "k"),
    "group_by": lambda s: s.group_by(lambda v: check(v) and "k", name="step"),
    "stateful_map": lambda s: s.stateful_map("step", lambda k, v, n: (check(v), n + 1), default=0),
    "stateful_op": lambda s: s.stateful_op("step", CheckLogic()).filter(lambda v: v != "half"),
    "filter behind map": lambda s: (
        s.map(lambda v: {"v": v}).filter(lambda v: check(v["v"]), name="step").map(lambda v: v["v"])
    ),
}
STATEFUL = {"apply stateful", "apply all", "update stateful", "filter stateful", "stateful_map", "stateful_op"}


def build(pipeline, operator, **settings):
    app = pipeline.application(**settings)
    stream = OPERATORS[operator](app.dataframe(app.topic("in")))
    stream.to_topic(app.topic("out"))
    return app


def counted(pipeline):
    """How many events the state of the step has seen."""
    state = dict(pipeline.state("step"))["a"]
    return state["n"] if isinstance(state, dict) else state


PLACES = {
    "first": ["bad", "b", "c"],
    "middle": ["a", "bad", "c"],
    "last": ["a", "b", "bad"],
    "all": ["bad", "bad", "bad"],
    "all but one": ["bad", "b", "bad"],
    "neighbours": ["a", "bad", "bad", "d"],
}


def items(values):
    return [("a", value) for value in values]


@pytest.mark.parametrize("operator", OPERATORS)
def test_under_fail_nothing_is_committed_and_the_message_says_where(pipeline, operator):
    app = build(pipeline, operator)
    with pytest.raises(LogicError) as caught:
        pipeline.run(app, {"in": items(["a", "b", "bad", "d"])})
    message = str(caught.value)
    assert message.startswith("step 'step', function ")
    assert "(test_errors.py:" in message
    assert ", key 'a', topic 'in', offset 2: " in message
    assert "BoomError: no luck" in message
    assert "in check" in message
    assert 'raise BoomError("no luck")' in message
    assert "src/penstock" not in message
    assert "operators.py" not in message
    assert "on_error=" in message
    assert isinstance(caught.value.__cause__, BoomError)
    driver = pipeline.started
    assert driver.view.epoch == -1
    assert driver.received("out") == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_under_skip_the_event_is_left_out_and_counted(pipeline, operator, place):
    values = PLACES[place]
    good = [value for value in values if value != "bad"]
    app = build(pipeline, operator, on_error="skip")
    outputs = pipeline.run(app, {"in": items(values)})
    assert outputs.values("out") == good
    counts = pipeline.counts
    assert (counts.read, counts.written, counts.skipped, counts.dead) == (
        len(values),
        len(good),
        len(values) - len(good),
        0,
    )
    if operator in STATEFUL:
        assert counted(pipeline) == len(good) if good else dict(pipeline.state("step")) == {}


@pytest.mark.parametrize("operator", OPERATORS)
def test_under_dead_letter_the_original_is_put_aside(pipeline, operator):
    app = build(pipeline, operator, on_error=DeadLetter("broken"))
    sent = [Event("a", "x", 1), Event("a", "bad", 2, (("trace", b"t1"),)), Event("a", "y", 3)]
    outputs = pipeline.run(app, {"in": sent})
    assert outputs.values("out") == ["x", "y"]
    [letter] = outputs["broken"]
    assert (letter.key, letter.value, letter.timestamp_ms) == (b"a", b'"bad"', 2)
    headers = dict(letter.headers)
    assert headers["trace"] == b"t1"
    assert headers["penstock.error"].endswith(b"BoomError: no luck")
    assert headers["penstock.step"] == b"step"
    assert b"(test_errors.py:" in headers["penstock.function"]
    assert headers["penstock.topic"] == b"in"
    assert headers["penstock.offset"] == b"1"
    assert headers["penstock.key"] == b"'a'"
    counts = pipeline.counts
    assert (counts.read, counts.written, counts.skipped, counts.dead) == (3, 2, 0, 1)


@pytest.mark.in_process("the callback fills a list of this process")
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_callback_decides_per_event(pipeline, operator):
    asked = []

    def decide(failure):
        assert isinstance(failure, Failure)
        asked.append((failure.step, failure.key, failure.topic, failure.offset, type(failure.error)))
        return ["skip", DeadLetter("one"), DeadLetter("two")][len(asked) - 1]

    app = build(pipeline, operator, on_error=decide)
    outputs = pipeline.run(app, {"in": items(["bad", "x", "bad", "bad", "y"])})
    assert outputs.values("out") == ["x", "y"]
    assert asked == [("step", "a", "in", offset, BoomError) for offset in (0, 2, 3)]
    assert [dict(letter.headers)["penstock.offset"] for topic in ("one", "two") for letter in outputs[topic]] == [
        b"2",
        b"3",
    ]
    counts = pipeline.counts
    assert (counts.skipped, counts.dead) == (1, 2)


def test_a_callback_may_decide_to_fail(pipeline):
    app = build(pipeline, "map", on_error=lambda failure: "fail")
    with pytest.raises(LogicError, match="step 'step'"):
        pipeline.run(app, {"in": items(["bad"])})


@pytest.mark.parametrize("answer", [None, True, "ignore", DeadLetter])
def test_a_callback_that_answers_something_else_is_told_what_to_answer(pipeline, answer):
    app = build(pipeline, "map", on_error=lambda failure: answer)
    with pytest.raises(InvalidError, match=r'it decides "fail", "skip" or DeadLetter\(topic\)'):
        pipeline.run(app, {"in": items(["bad"])})


def test_a_callback_that_fails_itself_is_named(pipeline):
    def decide(failure):
        return 1 // 0

    app = build(pipeline, "map", on_error=decide)
    with pytest.raises(
        LogicError, match=r"callback .*decide \(test_errors.py:\d+\) failed: ZeroDivisionError"
    ) as caught:
        pipeline.run(app, {"in": items(["bad"])})
    assert "step 'step'" in str(caught.value)


@pytest.mark.parametrize("policy", ["ignore", None, 7, DeadLetter])
def test_a_policy_that_is_none_is_refused(pipeline, policy):
    with pytest.raises(InvalidError, match="on_error is"):
        pipeline.application(on_error=policy)


@pytest.mark.parametrize("name", ["", "a/b", ".x", 7, "x" * 300])
def test_the_topic_of_a_dead_letter_needs_a_name_that_a_topic_can_have(name):
    with pytest.raises(InvalidError, match="the topic of a DeadLetter"):
        DeadLetter(name)


def test_the_message_says_it_all_of_a_nested_function(pipeline):
    def outer(value):
        def inner():
            return {}["missing"]

        return inner()

    app = pipeline.application()
    app.dataframe(app.topic("in")).map(outer)
    with pytest.raises(LogicError) as caught:
        pipeline.run(app, {"in": items(["x"])})
    message = str(caught.value)
    assert "in outer" in message
    assert "in inner" in message
    assert "KeyError: 'missing'" in message
    shown = "".join(traceback.format_exception(caught.value))
    assert "in inner" in shown


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def test_odd_errors_are_reported_too(pipeline):
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail(value):
        raise {"odd": OddError(), "surrogate": ValueError("\ud800"), "repr": KeyError(NoRepr())}[value]

    app = pipeline.application(on_error=DeadLetter("broken"))
    app.dataframe(app.topic("in")).map(fail)
    outputs = pipeline.run(app, {"in": items(["odd", "surrogate", "repr"])})
    assert len(outputs["broken"]) == 3


@pytest.mark.in_process("on Spark it ends a worker, not the run; tests/spark kills workers")
def test_a_system_exit_is_no_error_of_the_data(pipeline):
    def leave(value):
        raise SystemExit(3)

    app = pipeline.application(on_error="skip")
    app.dataframe(app.topic("in")).map(leave)
    with pytest.raises(SystemExit):
        pipeline.run(app, {"in": items(["x"])})


# --- data that cannot be read or written ------------------------------------------------------------------------------


def send_raw(driver, topic, *events):
    """Events as bytes, into a topic that the application reads in another way."""
    raw = type(driver._topic(topic))(
        topic, RAW_KEY, RAW_VALUE, driver._topic(topic).log._storage, driver.clock, driver._ids
    )
    with raw.producer() as send:
        for key, value in events:
            send(value, key=key, timestamp_ms=0)


RAW_KEY, RAW_VALUE = key_codec("str"), value_codec("bytes")
POLICIES = {"skip": "skip", "dead-letter": DeadLetter("broken"), "callback": lambda failure: DeadLetter("broken")}


def read_badly(pipeline, codec, raw, policy, key="str"):
    app = pipeline.application(on_error=policy)
    app.dataframe(app.topic("in", value=codec, key=key)).map(repr).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    send_raw(driver, "in", *raw)
    driver.epoch()
    return driver


BAD_VALUES = {"json": b"{half", "msgpack": b"\xc1", "str": b"\xff\xfe", Order: b'{"amount":"three"}'}
GOOD_VALUES = {"json": b"1", "msgpack": b"\x01", "str": b"1", Order: b'{"amount":1}'}


@pytest.mark.parametrize("codec", BAD_VALUES, ids=str)
def test_a_value_that_cannot_be_decoded_fails_with_key_topic_and_offset(pipeline, codec):
    with pytest.raises(LogicError, match=r"step 'from in', function decode, key 'k', topic 'in', offset 1.*cannot be"):
        read_badly(pipeline, codec, [("k", GOOD_VALUES[codec]), ("k", BAD_VALUES[codec])], "fail")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", BAD_VALUES, ids=str)
def test_a_value_that_cannot_be_decoded_is_subject_to_the_policy(pipeline, codec, policy):
    good, bad = GOOD_VALUES[codec], BAD_VALUES[codec]
    driver = read_badly(pipeline, codec, [("k", bad), ("k", good), ("k", bad), ("k", good)], POLICIES[policy])
    assert len(driver.received("out")) == 2
    put_aside = [letter.value for letter in driver.received("broken")]
    assert put_aside == ([] if policy == "skip" else [bad, bad])
    assert driver.counts.read == 4
    assert driver.counts.skipped + driver.counts.dead == 2


def bad_keys(pipeline, policy, operator):
    """A topic of int keys, in which somebody wrote texts."""
    app = pipeline.application(on_error=policy)
    stream = app.dataframe(app.topic("in", key="int"))
    stream = stream.apply(lambda v, k, t, h: [k, v], metadata=True) if operator == "metadata" else stream
    stream.stateful_map("n", lambda k, v, n: (v, n + 1), default=0).to_topic(app.topic("out", key="int"))
    driver = pipeline.start(app)
    send_raw(driver, "in", ("seven", b"1"), ("x", b"2"))
    driver.send("in", 3, key=7)
    return driver


@pytest.mark.parametrize("operator", ["plain", "metadata"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_that_cannot_be_decoded_is_subject_to_the_policy(pipeline, policy, operator):
    driver = bad_keys(pipeline, POLICIES[policy], operator)
    driver.send("in", 4)
    driver.epoch()
    assert [event.key for event in driver.received("out")] == [7]
    assert dict(driver.state("n")) == {7: 1}
    letters = driver.received("broken")
    assert sorted((letter.key, letter.value) for letter in letters if letter.key) == (
        [] if policy == "skip" else [(b"seven", b"1"), (b"x", b"2")]
    )
    assert driver.counts.read == 4
    assert driver.counts.skipped + driver.counts.dead == 3  # two keys that cannot be read, and one that is missing


def test_a_key_that_cannot_be_decoded_fails_with_topic_and_offset(pipeline):
    driver = bad_keys(pipeline, "fail", "plain")
    with pytest.raises(
        LogicError, match=r"step 'from in', function decode, topic 'in', offset \d.*cannot be read as int"
    ):
        driver.epoch()


def test_keys_written_with_another_codec_are_told_from_broken_ones(pipeline):
    app = pipeline.application(on_error="skip")
    app.dataframe(app.topic("in", key="int")).to_topic(app.topic("out", key="int"))
    driver = pipeline.start(app)
    send_raw(driver, "in", ("7", b"1"))
    with pytest.raises(InvalidError, match="open the topic with the key codec that it was written with"):
        driver.epoch()


STATEFUL_STEPS = {
    "State": lambda s: s.apply(lambda v, state: v, stateful=True, name="step"),
    "State with metadata": lambda s: s.filter(
        lambda v, k, t, h, state: True, stateful=True, metadata=True, name="step"
    ),
    "stateful_map": lambda s: s.stateful_map("step", lambda k, v, state: (v, 1)),
    "stateful_op": lambda s: s.stateful_op("step", Passing()),
}


class Passing(StatefulLogic):
    def on_data(self, event, state, emit):
        emit(event.value)
        return 1


@pytest.mark.parametrize("step", STATEFUL_STEPS)
def test_a_missing_key_at_a_stateful_step_is_subject_to_the_policy(pipeline, step):
    app = pipeline.application(on_error=DeadLetter("broken"))
    STATEFUL_STEPS[step](app.dataframe(app.topic("in"))).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [(None, 1), ("a", 2), (None, 3)]})
    assert outputs.values("out") == [2]
    assert [letter.value for letter in outputs["broken"]] == [b"1", b"3"]
    assert {letter.key for letter in outputs["broken"]} == {None}


BAD_KEYS = {"None": None, "list": [1], "dict": {}, "set": {1}, "nan": float("nan"), "long": "x" * 500, "half": "\ud800"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_new_key_that_cannot_be_one_is_subject_to_the_policy(pipeline, kind, policy):
    app = pipeline.application(on_error=POLICIES[policy])
    stream = app.dataframe(app.topic("in")).key_by("by", lambda n: BAD_KEYS[kind] if n == 1 else "k")
    stream.to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": items([0, 1, 2])})
    assert outputs.values("out") == [0, 2]
    assert [letter.value for letter in outputs["broken"]] == ([] if policy == "skip" else [b"1"])


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_new_key_that_cannot_be_one_fails_with_the_remedy(pipeline, kind):
    app = pipeline.application()
    app.dataframe(app.topic("in")).key_by("by", lambda n: BAD_KEYS[kind])
    with pytest.raises(LogicError, match=r"step 'by', function .*<lambda> \(test_errors.py:\d+\), key 'a', topic 'in'"):
        pipeline.run(app, {"in": items([0])})


BAD_OUTPUTS = {
    "to_topic": lambda s, app: s.to_topic(app.topic("out")),
    "to_topic with a type": lambda s, app: s.map(lambda v: {"amount": v}).to_topic(app.topic("out", value=Order)),
    "to_topic with a key": lambda s, app: s.map(lambda v: 1).to_topic(app.topic("out"), key=lambda v: "k"),
    "sink": lambda s, app: s.sink(lambda epoch, partition, events: None, name="sink"),
    "key_by": lambda s, app: s.key_by("by", lambda v: "k", value="json").to_topic(app.topic("out")),
}


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("output", ["to_topic", "to_topic with a type", "sink", "key_by"])
def test_a_value_that_cannot_be_encoded_is_subject_to_the_policy(pipeline, output, place):
    app = pipeline.application(on_error=DeadLetter("broken"))
    stream = app.dataframe(app.topic("in")).map(lambda v: object() if v == "bad" else 7)
    BAD_OUTPUTS[output](stream, app)
    outputs = pipeline.run(app, {"in": items(PLACES[place])})
    assert [letter.value for letter in outputs["broken"]] == [b'"bad"']
    counts = pipeline.counts
    assert (counts.read, counts.written, counts.dead) == (3, 2, 1)


# --- what is left of an event that failed -----------------------------------------------------------------------------


def half_way(value, state):
    """Changes everything there is, and fails in the middle."""
    before = [state.get("v"), list(state.list("l")), dict(state.map("m")), state.keys()]
    state.set("v", value)
    state.set(f"name {value}", [value])
    state.delete("old")
    state.list("l").append(value)
    state.list("l").append(value)
    state.list("l").pop_first()
    state.map("m")[value] = value
    state.map("m").pop("x", None)
    check(value)
    state.set("w", value)
    return before


def good_only(values):
    """What half_way leaves when it is given the good values alone."""
    return [value for value in values if value != "bad"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_an_event_that_fails_half_way_leaves_nothing_in_any_handle(pipeline, place, epochs, policy):
    values = ["x", *PLACES[place], "y"]
    results = []
    for name, given, error in (("faulty", values, POLICIES[policy]), ("clean", good_only(values), "fail")):
        app = pipeline.application(name, on_error=error)
        app.dataframe(app.topic("in")).apply(half_way, stateful=True, name="step").to_topic(app.topic("out"))
        pipeline.started = None
        outputs = pipeline.run(app, {"in": items(given)}, epochs=epochs)
        results.append((outputs.values("out"), dict(pipeline.state("step"))))
    assert results[0] == results[1]


class HalfWay(StatefulLogic):
    """The same with emitted events and timers."""

    def on_data(self, event, state, emit):
        emit(["before", event.value])
        self.list_state("l").append(event.value)
        self.map_state("m")[event.value] = 1
        self.timers.at_processing_time(1000, event.value)
        self.timers.cancel("x")
        self.timers.at_processing_time(1000 + len(event.value), "moved")
        check(event.value)
        emit(["after", list(self.list_state("l")), dict(self.map_state("m"))])
        return [*(state or []), event.value]

    def on_timer(self, key, state, timer, emit):
        emit(["timer", timer.name, timer.time_ms])
        return state


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", PLACES)
def test_a_logic_that_fails_half_way_leaves_no_events_no_timers_and_no_state(pipeline, place, policy):
    values = ["x", *PLACES[place], "yy"]
    results = []
    for name, given, error in (("faulty", values, POLICIES[policy]), ("clean", good_only(values), "fail")):
        app = pipeline.application(name, on_error=error)
        app.dataframe(app.topic("in")).stateful_op("step", HalfWay()).to_topic(app.topic("out"))
        driver = pipeline.start(app)
        for value in given:
            driver.send("in", value, key="a")
        driver.epoch()
        driver.advance_time(5000)
        driver.epoch()
        results.append(([event.value for event in driver.received("out")], dict(driver.state("step"))))
    assert results[0] == results[1]


@pytest.mark.parametrize("place", PLACES)
def test_ttl_of_a_value_is_as_before_when_the_event_that_changed_it_fails(pipeline, place):
    def touch(value, state):
        seen = state.get("x")
        state.set("x", value, ttl=timedelta(milliseconds=5 if value == "bad" else 1000))
        check(value)
        return seen

    app = pipeline.application(on_error="skip")
    app.dataframe(app.topic("in")).apply(touch, stateful=True, name="step").to_topic(app.topic("out"))
    values = ["x", *PLACES[place], "y"]
    outputs = pipeline.run(app, {"in": [("a", value, 10 * n) for n, value in enumerate(values)]}, epochs=2)
    assert outputs.values("out") == [None, *good_only(values)[:-1]]


def test_only_the_step_that_failed_is_undone(pipeline):
    """What earlier steps did with the event stands, and its other branches go on."""
    app = pipeline.application(on_error="skip")
    stream = app.dataframe(app.topic("in")).apply(stateful_count, stateful=True, name="before")
    stream.map(check).to_topic(app.topic("checked"))
    stream.to_topic(app.topic("all"))
    outputs = pipeline.run(app, {"in": items(["x", "bad", "y"])})
    assert outputs.values("checked") == ["x", "y"]
    assert outputs.values("all") == ["x", "bad", "y"]
    assert dict(pipeline.state("before")) == {"a": {"n": 3}}


def stateful_count(value, state):
    state.set("n", state.get("n", 0) + 1)
    return value


def test_of_an_event_that_became_many_only_those_that_fail_are_left_out(pipeline):
    app = pipeline.application(on_error=DeadLetter("broken"))
    stream = app.dataframe(app.topic("in")).flat_map(str.split).key_by("k", lambda v: "k").map(check, name="step")
    stream.to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": items(["a bad b", "bad bad"])})
    assert outputs.values("out") == ["a", "b"]
    assert [letter.value for letter in outputs["broken"]] == [b'"a bad b"', b'"bad bad"', b'"bad bad"']


# --- dead letters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 3])
def test_dead_letters_hold_the_original_bytes_also_behind_changes_of_the_key(pipeline, partitions, hops):
    app = pipeline.application(on_error=DeadLetter("broken"), partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    for hop in range(hops):
        stream = stream.key_by(f"by {hop}", lambda v, hop=hop: v["n"] % (3 + hop)).map(lambda v: {**v, "more": 1})
    stream.filter(lambda v: v["n"] % 10 != 7 or check("bad"), name="step").to_topic(app.topic("out"))
    sent = [Event(f"k{n % 9}", {"n": n}, n, (("h", b"%d" % n),)) for n in range(100)]
    outputs = pipeline.run(app, {"in": sent}, epochs=2)
    letters = {
        (letter.key, letter.value, letter.timestamp_ms, dict(letter.headers)["h"]) for letter in outputs["broken"]
    }
    assert letters == {(b"k%d" % (n % 9), b'{"n":%d}' % n, n, b"%d" % n) for n in range(7, 100, 10)}
    assert len(outputs["broken"]) == 10
    assert len(outputs["out"]) == 90


def test_dead_letters_can_be_read_as_a_topic_of_bytes(pipeline):
    app = pipeline.application(on_error=DeadLetter("broken"), partitions=4)
    app.dataframe(app.topic("in")).map(check)
    again = app.dataframe(app.topic("broken", key="bytes", value="bytes"))
    again.stateful_map("count", lambda k, v, n: (n + 1, n + 1), default=0)
    pipeline.run(app, {"in": [(f"k{n}", "bad") for n in range(20)] + [(None, 1)]})
    pipeline.run(app, {})
    assert dict(pipeline.state("count")) == {b"k%d" % n: 1 for n in range(20)}


@pytest.mark.in_process("CRASH marks; tests/spark/test_kill.py kills processes")
def test_dead_letters_are_published_exactly_once_through_a_crash(pipeline):
    app = pipeline.application(on_error=DeadLetter("broken"), partitions=2)
    app.dataframe(app.topic("in")).map(check, name="step").to_topic(app.topic("out"))
    driver = pipeline.start(app)
    driver.send_all("in", ["a", "bad", CRASH, "b", "bad"], key="k")
    with pytest.raises(Crash):
        driver.epoch()
    driver.restart()
    driver.epoch()
    driver.crash()
    driver.restart()
    driver.epoch()
    assert [event.value for event in driver.received("out")] == ["a", "b"]
    assert [letter.value for letter in driver.received("broken")] == [b'"bad"', b'"bad"']
    assert driver.counts.dead == 2


@pytest.mark.in_process("CRASH marks; tests/spark/test_kill.py kills processes")
def test_a_dead_letter_holds_what_was_sent_behind_a_crash_mark_too(pipeline):
    app = pipeline.application(on_error=DeadLetter("broken"))
    app.dataframe(app.topic("in")).map(check, name="step")
    driver = pipeline.start(app)
    driver.send_all("in", [CRASH, "bad"], key="k")
    with pytest.raises(Crash):
        driver.epoch()
    driver.restart()
    driver.epoch()
    assert [letter.value for letter in driver.received("broken")] == [b'"bad"']


class FailingTimer(StatefulLogic):
    def on_data(self, event, state, emit):
        self.timers.at_processing_time(0)
        return 1

    def on_timer(self, key, state, timer, emit):
        check("bad")


def test_a_timer_that_fails_leaves_a_letter_without_an_event(pipeline):
    app = pipeline.application(on_error=DeadLetter("broken"))
    app.dataframe(app.topic("in")).stateful_op("step", FailingTimer())
    [letter] = pipeline.run(app, {"in": items(["x"])})["broken"]
    headers = dict(letter.headers)
    assert (letter.key, letter.value) == (None, b"")
    assert headers["penstock.step"] == b"step"
    assert headers["penstock.key"] == b"'a'"
    assert headers["penstock.error"].endswith(b"BoomError: no luck")


def test_an_event_of_a_timer_that_fails_further_on_leaves_a_letter_without_an_event(pipeline):
    class Ring(FailingTimer):
        def on_timer(self, key, state, timer, emit):
            emit("bad")

    app = pipeline.application(on_error=DeadLetter("broken"))
    stream = app.dataframe(app.topic("in")).stateful_op("step", Ring())
    stream.key_by("k", lambda v: "k").map(check, name="behind")
    [letter] = pipeline.run(app, {"in": items(["x"])})["broken"]
    assert letter.value == b""
    assert dict(letter.headers)["penstock.step"] == b"behind"


def test_an_error_in_on_epoch_fails_under_every_policy(pipeline):
    class Broken(Passing):
        def on_epoch(self, watermark_ms, states, emit):
            check("bad")

    for n, policy in enumerate(POLICIES.values()):
        app = pipeline.application(f"group {n}", on_error=policy)
        app.dataframe(app.topic("in")).stateful_op("step", Broken())
        with pytest.raises(LogicError, match=r"step 'step', function .*on_epoch \(test_errors.py:\d+\): .*BoomError"):
            pipeline.start(app).epoch()


@pytest.mark.in_process("the test changes what the function sees while the run lives")
def test_after_an_error_the_same_run_can_go_on(pipeline):
    """Nothing of the epoch was committed, so it is simply run again."""
    mood = ["bad"]
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_map("n", lambda k, v, n: (check(mood[0]), n + 1), default=0)
    driver = pipeline.start(app)
    driver.send("in", 1, key="a")
    for _ in range(2):
        with pytest.raises(LogicError):
            driver.epoch()
    mood[0] = "good"
    driver.epoch()
    assert dict(driver.state("n")) == {"a": 1}
