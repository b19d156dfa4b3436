"""Timers: they fire once, in order of time, and belong to their key."""

from datetime import timedelta

import pytest

from penstock import InvalidError, LogicError, StatefulLogic


def start(pipeline, logic, **settings):
    """The events go out under one key, since a topic keeps the order of events of one key only."""
    app = pipeline.application(**settings)
    stream = app.dataframe(app.topic("in")).stateful_op("step", logic)
    stream.key_by("together", lambda value: "all").to_topic(app.topic("out"))
    return pipeline.start(app)


def values(driver):
    return [event.value for event in driver.received("out")]


class Commands(StatefulLogic):
    """Does with timers what an event says, and emits [name, time] when one fires."""

    def on_data(self, event, state, emit):
        for verb, *rest in event.value:
            if verb == "event":
                self.timers.at_event_time(*rest)
            elif verb == "clock":
                self.timers.at_processing_time(*rest)
            elif verb == "cancel":
                self.timers.cancel(*rest)
            elif verb == "fail":
                raise ValueError(*rest)
        return (state or 0) + 1

    def on_timer(self, key, state, timer, emit):
        emit([key, timer.name, timer.time_ms, timer.clock, state])
        return state


def send(driver, *commands, key="a", time=0):
    driver.send("in", list(commands), key=key, timestamp_ms=time)


def test_an_event_time_timer_fires_when_the_watermark_has_reached_it(pipeline, partitions):
    driver = start(pipeline, Commands(), partitions=partitions)
    send(driver, ["event", 100])
    driver.epoch()
    for time in (99, 100):
        send(driver, key="other", time=time)
        driver.epoch()
        assert values(driver) == []
    driver.epoch()
    assert values(driver) == [["a", "timer", 100, "event", 1]]
    driver.epoch()
    assert len(values(driver)) == 1


def test_a_processing_time_timer_fires_in_the_first_epoch_at_or_after_its_time(pipeline):
    driver = start(pipeline, Commands())
    send(driver, ["clock", 100])
    driver.epoch()
    driver.advance_time(99)
    driver.epoch()
    assert values(driver) == []
    driver.advance_time(timedelta(milliseconds=1))
    driver.epoch()
    driver.epoch()
    assert values(driver) == [["a", "timer", 100, "processing", 1]]


def test_a_timer_whose_time_has_come_already_fires_in_the_same_epoch(pipeline):
    driver = start(pipeline, Commands())
    driver.advance_time(50)
    send(driver, ["clock", 50], time=10)
    driver.epoch()
    send(driver, ["event", 10], time=10)
    driver.epoch()
    assert values(driver) == [["a", "timer", 50, "processing", 1], ["a", "timer", 10, "event", 2]]


def test_timers_fire_in_order_of_time(pipeline):
    driver = start(pipeline, Commands(), partitions=1)
    for n in (5, 3, 4, 1, 2):
        send(driver, ["event", n * 10, f"t{n}"], key=f"k{n % 2}")
    driver.epoch()
    send(driver, time=100)
    driver.epoch()
    driver.epoch()
    assert [value[2] for value in values(driver)] == [10, 20, 30, 40, 50]


def test_a_name_has_one_timer_the_last_one_set(pipeline):
    driver = start(pipeline, Commands())
    send(driver, ["clock", 10], ["clock", 30], ["clock", 20, "other"], ["event", 5, "other"])
    driver.epoch()
    send(driver, ["clock", 40])
    driver.epoch()
    for _ in range(5):
        driver.advance_time(10)
        driver.epoch()
    assert values(driver) == [["a", "timer", 40, "processing", 2]]


@pytest.mark.parametrize("together", [True, False])
def test_a_cancelled_timer_does_not_fire(pipeline, together):
    driver = start(pipeline, Commands())
    if together:
        send(driver, ["clock", 10], ["cancel"], ["cancel", "never set"])
    else:
        send(driver, ["clock", 10])
        driver.epoch()
        send(driver, ["cancel"])
        driver.epoch()
    driver.advance_time(100)
    driver.epoch()
    driver.epoch()
    assert values(driver) == []


def test_timers_of_one_name_of_two_keys_are_two(pipeline):
    driver = start(pipeline, Commands(), partitions=1)
    send(driver, ["clock", 10], key="a")
    send(driver, ["clock", 20], key="b")
    send(driver, ["cancel"], key="c")
    driver.epoch()
    driver.advance_time(15)
    driver.epoch()
    assert [value[0] for value in values(driver)] == ["a"]
    driver.advance_time(15)
    driver.epoch()
    assert [value[0] for value in values(driver)] == ["a", "b"]


def test_timers_live_through_a_crash_and_fire_once(pipeline):
    driver = start(pipeline, Commands())
    send(driver, ["clock", 10], ["event", 5, "e"])
    driver.epoch()
    driver.crash()
    driver.restart()
    driver.advance_time(10)
    send(driver, time=5)
    driver.epoch()
    driver.crash()
    driver.restart()
    driver.epoch()
    driver.epoch()
    assert sorted(value[1] for value in values(driver)) == ["e", "timer"]


class Chain(StatefulLogic):
    """A timer that sets the next one, ten milliseconds later, until the state is used up."""

    def on_data(self, event, state, emit):
        self.timers.at_processing_time(0)
        return event.value

    def on_timer(self, key, state, timer, emit):
        emit(timer.time_ms)
        if state > 1:
            self.timers.at_processing_time(timer.time_ms + 10)
        return state - 1


def test_a_timer_may_set_itself_again(pipeline):
    driver = start(pipeline, Chain())
    driver.send("in", 4, key="a")
    for _ in range(6):
        driver.epoch()
        driver.advance_time(10)
    assert values(driver) == [0, 10, 20, 30]
    assert dict(driver.state("step")) == {"a": 0}


def test_timers_that_were_missed_fire_one_after_the_other_in_one_epoch(pipeline):
    driver = start(pipeline, Chain())
    driver.advance_time(1000)
    driver.send("in", 4, key="a")
    driver.epoch()
    assert values(driver) == [0, 10, 20, 30]


def test_timers_that_set_themselves_again_keep_the_order_of_time_between_keys(pipeline):
    driver = start(pipeline, Chain(), partitions=1)
    driver.advance_time(1000)
    for key in ("a", "b"):
        driver.send("in", 3, key=key)
    driver.epoch()
    assert values(driver) == [0, 0, 10, 10, 20, 20]


def test_a_timer_that_never_stops_does_not_hold_the_epoch_up(pipeline):
    class Restless(Chain):
        def on_timer(self, key, state, timer, emit):
            self.timers.at_processing_time(0)
            return state + 1

    driver = start(pipeline, Restless())
    driver.send("in", 0, key="a")
    driver.epoch()
    first = dict(driver.state("step"))["a"]
    driver.epoch()
    assert 0 < first < dict(driver.state("step"))["a"]


class Rival(StatefulLogic):
    """Two timers of one key; the first to fire does something to the second."""

    def __init__(self, act):
        self.act = act

    def on_data(self, event, state, emit):
        self.timers.at_processing_time(10, "first")
        self.timers.at_processing_time(20, "second")
        return 0

    def on_timer(self, key, state, timer, emit):
        emit([timer.name, timer.time_ms])
        if timer.name == "first" and state == 0:
            self.act(self.timers)
        return 1


@pytest.mark.parametrize(
    ("act", "fired"),
    [
        (lambda timers: timers.cancel("second"), [["first", 10]]),
        (lambda timers: timers.at_processing_time(5000, "second"), [["first", 10]]),
        (lambda timers: timers.at_processing_time(30, "second"), [["first", 10], ["second", 30]]),
        (lambda timers: timers.at_processing_time(15, "first"), [["first", 10], ["first", 15], ["second", 20]]),
        (lambda timers: timers.at_event_time(20, "second"), [["first", 10]]),
    ],
    ids=["cancelled", "moved far", "moved a little", "set again before it", "moved to event time"],
)
def test_a_timer_may_change_another_one_of_its_key_that_was_about_to_fire(pipeline, act, fired):
    driver = start(pipeline, Rival(act))
    driver.send("in", 0, key="a")
    driver.epoch()
    driver.advance_time(100)
    driver.epoch()
    assert values(driver) == fired


def test_a_timer_that_was_moved_fires_at_its_new_place_in_the_order_of_time(pipeline):
    def act(timers):
        timers.at_processing_time(30, "second")
        timers.at_processing_time(25, "third")

    driver = start(pipeline, Rival(act))
    driver.send("in", 0, key="a")
    driver.epoch()
    driver.advance_time(100)
    driver.epoch()
    assert values(driver) == [["first", 10], ["third", 25], ["second", 30]]


def test_a_timer_may_drop_the_state_and_meet_the_default(pipeline):
    class Expire(StatefulLogic):
        def on_data(self, event, state, emit):
            self.timers.at_processing_time(10, "one")
            self.timers.at_processing_time(20, "two")
            return event.value

        def on_timer(self, key, state, timer, emit):
            emit(state)

    driver = start(pipeline, Expire())
    driver.send("in", 7, key="a")
    driver.epoch()
    driver.advance_time(100)
    driver.epoch()
    assert values(driver) == [7, None]
    assert dict(driver.state("step")) == {}


def test_without_on_timer_the_state_stays(pipeline):
    class Quiet(StatefulLogic):
        def on_data(self, event, state, emit):
            self.timers.at_processing_time(0)
            return event.value

    driver = start(pipeline, Quiet())
    driver.send("in", 7, key="a")
    driver.epoch()
    assert dict(driver.state("step")) == {"a": 7}


def test_the_event_of_a_timer_goes_through_the_stateful_steps_behind(pipeline):
    """The key of the timer has no event in this epoch: the steps behind meet it only at the end."""
    app = pipeline.application(partitions=1)

    class AtOnce(Commands):
        def on_data(self, event, state, emit):
            emit(["at once"])
            return super().on_data(event, state, emit)

    def count(value, state):
        state.set("n", state.get("n", 0) + 1)
        return [value[0], state.get("n")]

    stream = app.dataframe(app.topic("in")).stateful_op("step", AtOnce())
    stream.apply(count, stateful=True).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    for n in range(5):
        send(driver, ["clock", 10 + n], key=f"k{n}")
    driver.epoch()
    send(driver, ["clock", 0], key="x")
    driver.advance_time(11)
    driver.epoch()
    driver.advance_time(100)
    driver.epoch()
    assert sorted(v for v in values(driver) if v[0] != "at once") == [[f"k{n}", 2] for n in range(5)] + [["x", 2]]


def test_the_event_of_a_timer_goes_through_a_key_by(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).stateful_op("step", Commands()).key_by("name", lambda value: value[1])
    stream.stateful_map("count", lambda k, v, n: (n + 1, n + 1), default=0).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    for key in "abc":
        send(driver, ["clock", 10, "x"], key=key)
    driver.epoch()
    driver.advance_time(10)
    driver.epoch()
    assert dict(driver.state("count")) == {"x": 3}


def test_an_event_of_a_timer_has_the_time_of_the_watermark_and_no_headers(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).stateful_op("step", Commands()).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    driver.send("in", [["event", 50]], key="a", timestamp_ms=70, headers=(("h", b"x"),))
    driver.epoch()
    driver.epoch()
    [event] = driver.received("out")
    assert (event.key, event.timestamp_ms, event.headers) == ("a", 70, ())


def test_a_clock_that_goes_back_fires_no_timer_twice(pipeline):
    driver = start(pipeline, Chain())
    driver.advance_time(100)
    driver.send("in", 2, key="a")
    driver.epoch()
    driver.advance_time(-1000)
    driver.epoch()
    driver.advance_time(2000)
    driver.epoch()
    assert values(driver) == [0, 10]


def test_a_timer_before_1970_fires_at_once(pipeline):
    driver = start(pipeline, Commands())
    send(driver, ["clock", -5])
    driver.epoch()
    driver.epoch()
    assert len(values(driver)) == 1


@pytest.mark.parametrize("time", [1.5, "10", None, True, 1 << 63])
def test_a_time_that_is_no_whole_number_of_milliseconds_is_refused(pipeline, time):
    driver = start(pipeline, Commands())
    send(driver, ["clock", time])
    with pytest.raises(LogicError, match="whole number of milliseconds"):
        driver.epoch()


@pytest.mark.parametrize("name", ["", "x" * 65, "a\0b", 7])
def test_names_of_timers_are_validated(pipeline, name):
    driver = start(pipeline, Commands())
    send(driver, ["clock", 10, name])
    with pytest.raises(LogicError, match="cannot name a piece of state"):
        driver.epoch()


def test_an_error_in_on_timer_names_step_function_and_key(pipeline):
    class Broken(Chain):
        def on_timer(self, key, state, timer, emit):
            raise ValueError("no luck")

    driver = start(pipeline, Broken())
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match=r"step 'step', function .*on_timer.*key 'a'.*ValueError: no luck"):
        driver.epoch()
    with pytest.raises(InvalidError):
        driver.epoch()


def test_an_error_in_on_timer_may_be_skipped_and_leaves_nothing(pipeline):
    class Broken(Chain):
        def on_timer(self, key, state, timer, emit):
            emit("half")
            self.list_state("l").append(1)
            self.timers.at_processing_time(0, "another")
            raise ValueError("no luck")

    driver = start(pipeline, Broken(), on_error="skip")
    driver.send("in", 1, key="a")
    driver.epoch()
    driver.epoch()
    assert values(driver) == []
    assert driver.counts.skipped == 1
    assert dict(driver.state("step")) == {"a": 1}
