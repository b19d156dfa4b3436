"""stateful_op: a StatefulLogic with all its hooks, except timers (test_timers.py)."""

from datetime import timedelta

import pytest

from penstock import Event, InvalidError, LogicError, StatefulLogic
from penstock.testing import ManualClock

SECOND = 1000


def start(pipeline, logic, **settings):
    stateful_op = {name: settings.pop(name) for name in ("default", "state") if name in settings}
    app = pipeline.application(**settings)
    app.dataframe(app.topic("in")).stateful_op("step", logic, **stateful_op).to_topic(app.topic("out"))
    return pipeline.start(app)


def values(driver):
    return [event.value for event in driver.received("out")]


class Repeat(StatefulLogic):
    """Emits each number as often as it says."""

    def on_data(self, event, state, emit):
        for _ in range(event.value):
            emit(event.value)


class Total(StatefulLogic):
    def on_data(self, event, state, emit):
        return (state or 0) + event.value


def test_on_data_emits_none_one_or_many(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Repeat()).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", n) for n in (0, 1, 3, 0)]}).values("out") == [1, 3, 3, 3]
    assert dict(pipeline.state("step")) == {}


@pytest.mark.parametrize("epochs", [1, 3])
def test_what_on_data_returns_is_the_next_state(pipeline, epochs):
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Total())
    pipeline.run(app, {"in": [("a", 1), ("b", 2), ("a", 3)]}, epochs=epochs)
    assert dict(pipeline.state("step")) == {"a": 4, "b": 2}


def test_the_event_has_key_value_time_headers_topic_and_offset(pipeline):
    class Show(StatefulLogic):
        def on_data(self, event, state, emit):
            emit([event.key, event.value, event.timestamp_ms, len(event.headers), event.topic, event.offset])

    driver = start(pipeline, Show())
    driver.send("in", 1, key="a", timestamp_ms=5, headers=(("h", b"x"),))
    driver.send("in", 2, key="a", timestamp_ms=6)
    driver.epoch()
    assert values(driver) == [["a", 1, 5, 1, "in", 0], ["a", 2, 6, 0, "in", 1]]


def test_emitted_events_keep_key_time_and_headers_unless_told_otherwise(pipeline):
    class Emit(StatefulLogic):
        def on_data(self, event, state, emit):
            emit("kept")
            emit("same key", key=event.key)
            emit("later", timestamp_ms=event.timestamp_ms + 1)
            emit("other", headers=(("new", b"2"),))
            emit("without", headers=())

    driver = start(pipeline, Emit())
    driver.send("in", 0, key="a", timestamp_ms=5, headers=(("old", b"1"),))
    driver.epoch()
    old = (("old", b"1"),)
    assert [(e.key, e.value, e.timestamp_ms, e.headers) for e in driver.received("out")] == [
        ("a", "kept", 5, old),
        ("a", "same key", 5, old),
        ("a", "later", 6, old),
        ("a", "other", 5, (("new", b"2"),)),
        ("a", "without", 5, ()),
    ]


def test_an_emitted_value_is_as_it_was_when_it_was_emitted(pipeline):
    class Grow(StatefulLogic):
        def on_data(self, event, state, emit):
            for n in range(3):
                state.append(n)
                emit(state)
            return state

    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Grow(), default=[]).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", 0)]})
    assert outputs.values("out") == [[0], [0, 1], [0, 1, 2]]
    assert dict(pipeline.state("step")) == {"a": [0, 1, 2]}


@pytest.mark.parametrize("default", [{"n": 0}, lambda: {"n": 0}])
def test_each_key_has_a_default_of_its_own(pipeline, default):
    class Count(StatefulLogic):
        def on_data(self, event, state, emit):
            state["n"] += 1
            return state

    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Count(), default=default)
    pipeline.run(app, {"in": [("a", 0), ("b", 0), ("a", 0)]})
    assert dict(pipeline.state("step")) == {"a": {"n": 2}, "b": {"n": 1}}


@pytest.mark.parametrize("key", ["b", 1, b"a", ("a",)])
def test_another_key_is_refused_with_the_remedy(pipeline, key):
    class Stray(StatefulLogic):
        def on_data(self, event, state, emit):
            emit(1, key=key)

    driver = start(pipeline, Stray(), partitions=1)
    driver.send("in", 0, key="a")
    with pytest.raises(LogicError, match=r"key 'a'(.|\n)*keeps the key of its input: change it afterwards with key_by"):
        driver.epoch()


def test_a_time_before_the_watermark_is_refused_with_the_remedy(pipeline):
    class Back(StatefulLogic):
        def on_data(self, event, state, emit):
            emit(event.value, timestamp_ms=event.value)

    driver = start(pipeline, Back())
    driver.send("in", 100, key="a", timestamp_ms=100)
    driver.epoch()
    driver.send("in", 100, key="a", timestamp_ms=200)
    driver.epoch()
    driver.send("in", 199, key="a", timestamp_ms=300)
    with pytest.raises(LogicError, match=r"timestamp_ms=199, which is before the watermark 200"):
        driver.epoch()
    assert values(driver) == [100, 100]


def test_a_late_event_can_be_sent_on_with_its_own_time(pipeline):
    class Same(StatefulLogic):
        def on_data(self, event, state, emit):
            emit(event.value)
            emit(event.value, timestamp_ms=event.timestamp_ms)

    driver = start(pipeline, Same())
    for time in (100, 5):
        driver.send("in", time, key="a", timestamp_ms=time)
        driver.epoch()
    assert [event.timestamp_ms for event in driver.received("out")] == [100, 100, 5, 5]


@pytest.mark.parametrize(
    "given",
    [
        {"timestamp_ms": 1.5},
        {"timestamp_ms": True},
        {"timestamp_ms": 1 << 64},
        {"headers": {"a": b"b"}},
        {"headers": (("a", "text"),)},
        {"key": [1]},
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_event(pipeline, given):
    class Bad(StatefulLogic):
        def on_data(self, event, state, emit):
            emit(event.value, **(given if event.value == 1 else {}))

    driver = start(pipeline, Bad(), on_error="skip")
    for n in range(3):
        driver.send("in", n, key="a")
    driver.epoch()
    assert values(driver) == [0, 2]
    assert driver.counts.skipped == 1


class Report(Total):
    def on_epoch(self, watermark_ms, states, emit):
        for key, total in states.items():
            emit([watermark_ms, total], key=key)


def test_on_epoch_sees_all_keys_of_the_partition_also_those_without_events(pipeline, partitions):
    driver = start(pipeline, Report(), partitions=partitions)
    for time, key in ((10, "a"), (20, "b"), (30, "a")):
        driver.send("in", 1, key=key, timestamp_ms=time)
        driver.epoch()
    seen = sorted((event.key, *event.value) for event in driver.received("out") if event.value[0] is not None)
    assert seen == [("a", 10, 1), ("a", 20, 2), ("b", 10, 1), ("b", 20, 1)]


def test_on_epoch_runs_in_each_epoch_even_an_empty_one(pipeline):
    class Tick(Total):
        def on_epoch(self, watermark_ms, states, emit):
            for key in states:
                states[key] += 100

    driver = start(pipeline, Tick())
    driver.send("in", 1, key="a")
    for _ in range(3):
        driver.epoch()
    assert dict(driver.state("step")) == {"a": 301}


def test_on_epoch_must_give_a_key(pipeline):
    class Lost(Total):
        def on_epoch(self, watermark_ms, states, emit):
            emit("hello")

    driver = start(pipeline, Lost(), on_error="skip")
    with pytest.raises(LogicError, match=r"step 'step', function .*on_epoch(.|\n)*needs a key here"):
        driver.epoch()


def test_events_of_on_epoch_have_the_time_of_the_watermark(pipeline):
    driver = start(pipeline, Report())
    driver.send("in", 1, key="a", timestamp_ms=7)
    driver.epoch()
    driver.epoch()
    assert [(e.value, e.timestamp_ms) for e in driver.received("out")] == [([None, 1], 0), ([7, 1], 7)]


def test_a_step_behind_gets_what_on_epoch_emits_in_the_same_epoch_under_a_key_it_has_not_seen(pipeline):
    """The key has a state, but no event in this epoch, so steps behind meet it only at the end."""
    app = pipeline.application(partitions=1)

    def count(value, state):
        state.set("n", state.get("n", 0) + 1)
        return state.get("n")

    class ReportTwice(Report):
        def on_data(self, event, state, emit):
            emit("at once")
            return super().on_data(event, state, emit)

    stream = app.dataframe(app.topic("in")).stateful_op("step", ReportTwice())
    stream.apply(count, stateful=True).stateful_map("last", lambda k, n, s: (n, n)).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    for keys in ("abc", "d", "b", ""):
        for key in keys:
            driver.send("in", 1, key=key)
        driver.epoch()
    assert driver.state("count") == {"a": {"n": 5}, "b": {"n": 6}, "c": {"n": 5}, "d": {"n": 4}}
    assert dict(driver.state("last")) == {"a": 5, "b": 6, "c": 5, "d": 4}


class Scheduled(Total):
    schedule = timedelta(seconds=10)

    def on_schedule(self, states, emit):
        for key, total in states.items():
            emit(total, key=key)


def test_on_schedule_runs_once_in_each_interval(pipeline):
    driver = start(pipeline, Scheduled())
    driver.send("in", 5, key="a")
    runs = []
    for _ in range(13):
        driver.epoch()
        runs.append(len(values(driver)))
        driver.advance_time(timedelta(seconds=4))
    # epochs at 0, 4, 8, 12, ... seconds: the first at or behind 10, 20, 30 and 40 runs it
    assert runs == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]


def test_on_schedule_runs_once_for_several_intervals_that_passed(pipeline):
    driver = start(pipeline, Scheduled())
    driver.send("in", 5, key="a")
    driver.epoch()
    driver.advance_time(timedelta(minutes=5))
    driver.epoch()
    driver.epoch()
    assert values(driver) == [5]


def test_on_schedule_does_not_run_in_the_very_first_epoch_whatever_the_clock_says(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Scheduled()).to_topic(app.topic("out"))
    driver = pipeline.start(app, clock=ManualClock(1_700_000_000_000))
    driver.send("in", 5, key="a")
    driver.epoch()
    assert values(driver) == []


def test_on_schedule_keeps_its_pace_through_a_restart(pipeline):
    driver = start(pipeline, Scheduled())
    driver.send("in", 5, key="a")
    for _ in range(4):
        driver.epoch()
        driver.crash()
        driver.restart()
        driver.advance_time(5 * SECOND)
    assert values(driver) == [5]


def test_a_clock_that_goes_back_breaks_nothing(pipeline):
    driver = start(pipeline, Scheduled())
    driver.send("in", 5, key="a")
    for delta in (25, -20, 15, -100, 101):
        driver.epoch()
        driver.advance_time(delta * SECOND)
    driver.epoch()
    assert values(driver) == [5]  # at 25; then never before 30 again
    driver.advance_time(9 * SECOND)
    driver.epoch()
    assert values(driver) == [5, 5]


class OnStates(StatefulLogic):
    """Keeps what it is sent, and runs a function on all states at the end of the epochs in which "go" is sent."""

    def __init__(self, fn):
        self.fn = fn

    def on_data(self, event, state, emit):
        return event.value

    def on_epoch(self, watermark_ms, states, emit):
        if "go" in states:
            self.fn(states)


def on_states(pipeline, fn, state="json"):
    """The states behind a function of them: a, b, c from an epoch before, d and go from this one, c changed in it."""
    driver = start(pipeline, OnStates(fn), partitions=1, state=state)
    for key in "abc":
        driver.send("in", [key], key=key)
    driver.epoch()
    for key in ("d", "c", "go"):
        driver.send("in", [key, "new"], key=key)
    driver.epoch()
    return dict(driver.state("step"))


OLD = {"a": ["a"], "b": ["b"], "c": ["c", "new"], "d": ["d", "new"], "go": ["go", "new"]}


@pytest.mark.in_process("the function fills a dict of this process")
def test_states_are_a_mapping_of_all_keys(pipeline):
    seen = {}

    def look(states):
        seen.update(all=dict(states), length=len(states), missing=states.get("zz"), has=("a" in states, "z" in states))
        with pytest.raises(KeyError):
            states["zz"]
        with pytest.raises(KeyError):
            del states["zz"]

    assert on_states(pipeline, look) == OLD
    assert seen == {"all": OLD, "length": 5, "missing": None, "has": (True, False)}


def test_states_are_copies_until_they_are_set(pipeline):
    def spoil(states):
        for key in states:
            states[key].append("spoilt")

    assert on_states(pipeline, spoil) == OLD


@pytest.mark.parametrize("how", ["del", "none", "pop"])
def test_states_can_be_dropped(pipeline, how):
    def drop(states):
        for key in ("a", "c", "d"):
            if how == "del":
                del states[key]
            elif how == "none":
                states[key] = None
            else:
                states.pop(key)
        assert sorted(states) == ["b", "go"]
        assert len(states) == 2

    assert on_states(pipeline, drop) == {"b": ["b"], "go": ["go", "new"]}


def test_states_can_be_set_also_of_keys_that_are_new(pipeline):
    def put(states):
        states["a"] = 1
        states["new"] = 2
        states.setdefault("b", 3)
        assert states["new"] == 2
        assert sorted(states) == ["a", "b", "c", "d", "go", "new"]

    assert on_states(pipeline, put) == OLD | {"a": 1, "new": 2}


def test_states_can_be_changed_while_they_are_iterated(pipeline):
    def rotate(states):
        for key, state in states.items():
            states[key] = [*state, "seen"]
            states[f"{key}!"] = "made"
            if key == "a":
                states.pop("d", None)

    left = on_states(pipeline, rotate)
    assert left["a"] == ["a", "seen"]
    assert "d" not in left or left["d"] == ["d", "new", "seen"]
    assert left["b!"] == "made"


@pytest.mark.in_process("the function fills a set of this process")
@pytest.mark.parametrize("victim", ["a", "b", "c", "d", "go"])
def test_a_state_dropped_while_iterating_is_not_met_any_more(pipeline, victim):
    met = []

    def drop_first(states):
        for key, _ in states.items():
            states.pop(victim, None)
            met.append(key)

    left = on_states(pipeline, drop_first)
    assert victim not in left
    assert met.count(victim) <= 1
    assert set(met) | {victim} == set(OLD)


def test_clearing_all_states(pipeline):
    assert on_states(pipeline, lambda states: states.clear()) == {}


def test_states_can_be_iterated_with_a_dropped_key_in_between(pipeline):
    def drop_all(states):
        for key in states:
            del states[key]

    assert on_states(pipeline, drop_all) == {}


def test_a_key_of_another_partition_is_refused(pipeline):
    def stray(states):
        for n in range(100):
            states[f"key {n}"] = 1

    driver = start(pipeline, OnStates(stray), partitions=7)
    driver.send("in", 1, key="go")
    with pytest.raises(LogicError, match="belongs to another partition"):
        driver.epoch()


def test_something_that_is_no_key_is_refused(pipeline):
    with pytest.raises(LogicError, match="cannot be a key"):
        on_states(pipeline, lambda states: states[[1]])


def test_state_that_cannot_be_stored_is_refused_in_on_epoch(pipeline):
    with pytest.raises(LogicError, match="cannot be written"):
        on_states(pipeline, lambda states: states.update(a=float("nan")))


@pytest.mark.parametrize("what", ["timers", "list_state", "map_state"])
def test_what_belongs_to_a_key_is_refused_where_there_is_none(pipeline, what):
    class Lost(Total):
        def on_epoch(self, watermark_ms, states, emit):
            found = getattr(self, what)
            found("x")

    driver = start(pipeline, Lost())
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match="belong to a key"):
        driver.epoch()


def test_large_lists_and_maps_beside_the_state(pipeline):
    class Both(StatefulLogic):
        def on_data(self, event, state, emit):
            self.list_state("all").append(event.value)
            counts = self.map_state("counts")
            counts[event.value] = counts.get(event.value, 0) + 1
            emit([list(self.list_state("all")), dict(counts)])

    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Both()).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", "x"), ("b", "y"), ("a", "x")]}, epochs=3)
    assert outputs.of_key("out", "a") == [[["x"], {"x": 1}], [["x", "x"], {"x": 2}]]
    assert outputs.of_key("out", "b") == [[["y"], {"y": 1}]]


def test_only_the_one_logic_of_the_plan_is_shared_and_nothing_kept_in_it(pipeline):
    logic = Report()
    driver = start(pipeline, logic)
    driver.send("in", 1, key="a")
    driver.epoch()
    assert vars(logic) == {}


@pytest.mark.parametrize("logic", [Total, StatefulLogic(), lambda event: event, None])
def test_what_is_no_logic_is_refused_when_the_plan_is_built(pipeline, logic):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="instance of a subclass of StatefulLogic with on_data"):
        app.dataframe(app.topic("in")).stateful_op("step", logic)


def test_a_default_that_cannot_be_stored_is_refused_when_the_plan_is_built(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="cannot be written"):
        app.dataframe(app.topic("in")).stateful_op("step", Total(), default=b"x")


@pytest.mark.parametrize("schedule", [10, timedelta(0), timedelta(seconds=-1)])
def test_a_schedule_that_is_no_interval_is_refused_when_the_plan_is_built(pipeline, schedule):
    logic = Total()
    logic.schedule = schedule
    app = pipeline.application()
    with pytest.raises(InvalidError, match="schedule"):
        app.dataframe(app.topic("in")).stateful_op("step", logic)


def test_an_event_without_a_key_is_told_how_to_get_one(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Total())
    with pytest.raises(LogicError, match=r"has no key(.|\n)*key_by"):
        pipeline.run(app, {"in": [Event(None, 1, 0)]})
