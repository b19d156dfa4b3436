"""KEY_A stores a value; KEY_B cannot see it, in any handle."""

from datetime import timedelta

import pytest

from penstock import StatefulLogic

KEYS = [
    *("1", b"1", 1, 1.0, True, "True", b"True", "1.0", 0, False, 0.0, ""),
    *((), (1,), (True,), ("1",), (1, 1), ((1,), 1), ((1, 1),), (((1,),), 1), ("1", "1"), ("11",), ("1\x00", "1")),
    *("a", "A", "a\x00", "a\x01", "\x00", b"\x00", "KEY_A", "KEY_B", "KEY_A\x00KEY_B"),
]
PAIRS = [("KEY_A", "KEY_B"), ("a", "a\x00"), (1, True), (1, 1.0), ("1", b"1"), ((1,), 1), ("a", "ab"), ("", "\x00")]


def use_state(value, state):
    found = [state.get("x"), state.exists("x"), state.keys()]
    if value == "write":
        state.set("x", 1)
    return found


def use_list(value, state):
    found = [list(state.list("x")), len(state.list("x"))]
    if value == "write":
        state.list("x").append(1)
    if value == "clear":
        state.list("x").clear()
    return found


def use_map(value, state):
    found = [dict(state.map("x")), len(state.map("x")), "KEY_A" in state.map("x")]
    if value == "write":
        state.map("x")["KEY_A"] = 1
    if value == "clear":
        state.map("x").clear()
    return found


def use_ttl(value, state):
    found = [state.get("x"), state.exists("x"), state.keys()]
    if value == "write":
        state.set("x", 1, ttl=timedelta(hours=1))
    return found


class UseLogic(StatefulLogic):
    """The state, a list, a map and a timer of a key."""

    def on_data(self, event, state, emit):
        emit([state, list(self.list_state("x")), dict(self.map_state("x"))])
        if event.value == "write":
            self.list_state("x").append(1)
            self.map_state("x")["k"] = 1
            self.timers.at_processing_time(10)
            return 1
        if event.value == "clear":
            self.timers.cancel()
        return state

    def on_timer(self, key, state, timer, emit):
        emit(["timer", repr(key)])
        return state


HANDLES = {
    "State": lambda stream: stream.apply(use_state, stateful=True),
    "State with ttl": lambda stream: stream.apply(use_ttl, stateful=True),
    "ListState": lambda stream: stream.apply(use_list, stateful=True),
    "MapState": lambda stream: stream.apply(use_map, stateful=True),
    "stateful_map": lambda stream: stream.stateful_map("s", lambda k, v, s: (s, 1 if v == "write" else s)),
    "stateful_op": lambda stream: stream.stateful_op("s", UseLogic()),
}
NOTHING = {
    "State": [None, False, []],
    "State with ttl": [None, False, []],
    "ListState": [[], 0],
    "MapState": [{}, 0, False],
    "stateful_map": None,
    "stateful_op": [None, [], {}],
}


@pytest.mark.parametrize("epochs", ["one epoch", "two epochs"])
@pytest.mark.parametrize(("key_a", "key_b"), PAIRS, ids=map(repr, PAIRS))
@pytest.mark.parametrize("handle", HANDLES)
def test_what_one_key_stores_another_cannot_see_nor_clear(pipeline, handle, key_a, key_b, epochs):
    app = pipeline.application(partitions=1)
    HANDLES[handle](app.dataframe(app.topic("in", key="canonical"))).to_topic(app.topic("out", key="canonical"))
    driver = pipeline.start(app)
    for key, value in ((key_a, "write"), (key_b, "look"), (key_b, "clear"), (key_a, "look")):
        driver.send("in", value, key=key)
        if epochs == "two epochs":
            driver.epoch()
    driver.epoch()
    received = (
        [event for event in driver.received("out") if event.value[:1] != ["timer"]]
        if handle != "stateful_map"
        else driver.received("out")
    )
    seen_by_b = [event.value for event in received if repr(event.key) == repr(key_b)]
    seen_by_a = [event.value for event in received if repr(event.key) == repr(key_a)]
    assert seen_by_b == [NOTHING[handle], NOTHING[handle]]
    assert seen_by_a[0] == NOTHING[handle]
    assert seen_by_a[1] != NOTHING[handle]


def test_a_timer_wakes_its_own_key_only(pipeline):
    for key_a, key_b in PAIRS:
        app = pipeline.application()
        app.dataframe(app.topic("in", key="canonical")).stateful_op("s", UseLogic()).to_topic(
            app.topic("out", key="canonical")
        )
        driver = pipeline.start(app)
        driver.send("in", "write", key=key_a)
        driver.send("in", "clear", key=key_b)
        driver.epoch()
        driver.advance_time(10)
        driver.epoch()
        assert [event.value[1] for event in driver.received("out") if event.value[0] == "timer"] == [repr(key_a)]


def test_in_the_mapping_of_all_states_keys_are_told_apart_by_type(pipeline):
    class Look(StatefulLogic):
        def on_data(self, event, state, emit):
            return repr(event.key)

        def on_epoch(self, watermark_ms, states, emit):
            assert sorted(map(repr, states)) == sorted(states.values())
            for key, state in states.items():
                assert state == repr(key)
                assert states[key] == repr(key)
                emit(state, key=key)

    app = pipeline.application(partitions=1)
    stream = app.dataframe(app.topic("in", key="canonical")).stateful_op("s", Look())
    stream.to_topic(app.topic("out", key="canonical"))
    outputs = pipeline.run(app, {"in": [(key, 0) for key in KEYS]})
    assert sorted(outputs.values("out")) == sorted(map(repr, KEYS))


@pytest.mark.parametrize("how", ["topic", "key_by"])
def test_every_key_has_a_state_of_its_own_and_keeps_its_type(pipeline, partitions, how):
    app = pipeline.application(partitions=partitions)

    def count(value, state):
        state.set("n", state.get("n", 0) + 1)
        return value

    if how == "topic":
        stream = app.dataframe(app.topic("in", key="canonical"))
        items = [(key, index) for index, key in enumerate(KEYS)] * 2
    else:
        stream = app.dataframe(app.topic("in")).key_by("by", lambda index: KEYS[index])
        items = [("x", index) for index in range(len(KEYS))] * 2
    stream = stream.apply(count, stateful=True).stateful_map("last", lambda k, v, s: (v, repr(k)))
    stream.to_topic(app.topic("out", key="canonical"))
    outputs = pipeline.run(app, {"in": items}, epochs=2)
    for step, of in (("count", lambda key: {"n": 2}), ("last", repr)):
        state = pipeline.state(step)
        assert sorted(map(repr, state)) == sorted(map(repr, KEYS))
        assert len(state) == len(KEYS)
        for key in KEYS:
            assert key in state
            assert state[key] == of(key)
    assert sorted(repr(event.key) for event in outputs["out"]) == sorted(map(repr, KEYS + KEYS))


def test_negative_zero_is_the_key_zero(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in", key="canonical")).stateful_map("n", lambda k, v, s: (v, s + 1), default=0)
    pipeline.run(app, {"in": [(0.0, 0), (-0.0, 0)]})
    assert dict(pipeline.state("n")) == {0.0: 2}
