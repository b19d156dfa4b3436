"""sink: a function is called with what each committed epoch sends, and never with anything else."""

import pytest

from penstock import InvalidError, LogicError
from penstock.testing import Crash, FaultyStorage


class Calls:
    """A function for sink() that keeps what it was called with."""

    def __init__(self, fail_times=0):
        self.calls = []
        self.fail_times = fail_times

    def __call__(self, epoch, partition, events):
        if self.fail_times:
            self.fail_times -= 1
            raise OSError("the database is away")
        self.calls.append((epoch, partition, [(e.key, e.value, e.timestamp_ms, e.headers) for e in events]))

    def values(self):
        return [value for _, _, events in self.calls for _, value, _, _ in events]


def test_the_function_is_called_for_each_epoch_and_partition_with_events(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    calls = Calls()
    app.dataframe(app.topic("in")).sink(calls, name="calls")
    pipeline.run(app, {"in": [(f"k{n}", n) for n in range(40)]}, epochs=2)
    assert sorted(calls.values()) == list(range(40))
    assert {epoch for epoch, _, _ in calls.calls} == {0, 1}
    assert len({(epoch, partition) for epoch, partition, _ in calls.calls}) == len(calls.calls)
    assert {partition for _, partition, _ in calls.calls} == set(range(partitions))


def test_an_epoch_without_events_calls_nothing(pipeline):
    app = pipeline.application()
    calls = Calls()
    app.dataframe(app.topic("in")).sink(calls, name="calls")
    pipeline.run(app, {"in": []}, epochs=3)
    assert calls.calls == []


def test_keys_keep_their_type_and_events_their_time_and_headers(pipeline):
    app = pipeline.application(partitions=1)
    calls = Calls()
    stream = app.dataframe(app.topic("in"))
    stream.key_by("tuples", lambda n: (n, "x")).sink(calls, name="calls")
    driver = pipeline.start(app)
    driver.send("in", 1, timestamp_ms=7, headers=(("h", b"x"),))
    driver.epoch()
    assert calls.calls == [(0, 0, [((1, "x"), 1, 7, (("h", b"x"),))])]


def test_an_event_without_a_key_has_none(pipeline):
    app = pipeline.application()
    calls = Calls()
    app.dataframe(app.topic("in")).sink(calls, name="calls")
    pipeline.run(app, {"in": [(None, 1)]})
    assert [events[0][0] for _, _, events in calls.calls] == [None]


def test_values_wait_in_the_codec_that_was_asked_for(pipeline):
    app = pipeline.application()
    calls = Calls()
    app.dataframe(app.topic("in")).map(lambda n: (n, b"raw")).sink(calls, name="calls", value="msgpack")
    pipeline.run(app, {"in": [("a", 1)]})
    assert calls.values() == [[1, b"raw"]]


def test_nothing_reaches_the_function_before_its_epoch_is_committed(pipeline):
    app = pipeline.application()
    calls = Calls()
    stream = app.dataframe(app.topic("in"))
    stream.sink(calls, name="calls")
    stream.map(lambda n: 1 // n)
    with pytest.raises(LogicError):
        pipeline.run(app, {"in": [("a", 1), ("a", 0)]})
    assert calls.calls == []


def run_with_crash(pipeline, at, after):
    """An epoch of a sink, with a crash at one write of the protocol, then a restart; what the function was given."""
    app = pipeline.application(f"crash-{at}-{after}", partitions=2)
    calls = Calls()
    counter = iter(range(1000))
    stream = app.dataframe(app.topic("in")).map(lambda n: [n, next(counter)])  # not deterministic
    stream.sink(calls, name="calls")
    driver = pipeline.start(app)
    inner = driver._storage
    for n in range(4):
        driver.send("in", n, key=f"k{n}")
    faulty = FaultyStorage(inner, **{"die_after" if after else "die_before": at})
    died = False
    try:
        driver.restart(storage=faulty)
        driver.epoch()
    except Crash:
        died = True
    driver.crash()
    driver.restart(storage=inner)
    if driver.view.epoch < 0:
        driver.epoch()
    return calls, died


@pytest.mark.in_process("a storage that fails in this process")
@pytest.mark.parametrize("after", [False, True])
def test_after_a_crash_the_function_is_called_again_with_the_same_content_or_not_at_all(pipeline, after):
    for at in range(1, 100):
        calls, died = run_with_crash(pipeline, at, after)
        by_place = {}
        for epoch, partition, events in calls.calls:
            assert by_place.setdefault((epoch, partition), events) == events, f"write {at}"
        assert sorted(value[0] for events in by_place.values() for _, value, _, _ in events) == [0, 1, 2, 3], at
        if not died:
            break
    else:
        pytest.fail("the protocol has no end")
    assert at > 4


def test_a_function_that_fails_is_called_again_before_anything_new_is_run(pipeline):
    app = pipeline.application(partitions=1)
    calls = Calls(fail_times=2)
    app.dataframe(app.topic("in")).sink(calls, name="calls")
    driver = pipeline.start(app)
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError, match=r"step 'calls'(.|\n)*OSError: the database is away"):
        driver.epoch()
    driver.send("in", 2, key="a")
    with pytest.raises(LogicError):
        driver.epoch()
    driver.epoch()
    driver.epoch()
    assert [(epoch, [value for _, value, _, _ in events]) for epoch, _, events in calls.calls] == [(0, [1]), (1, [2])]


def test_a_function_that_fails_is_called_again_by_the_next_run(pipeline):
    app = pipeline.application(partitions=1)
    calls = Calls(fail_times=1)
    app.dataframe(app.topic("in")).sink(calls, name="calls")
    driver = pipeline.start(app)
    driver.send("in", 1, key="a")
    with pytest.raises(LogicError):
        driver.epoch()
    driver.crash()
    driver.restart()
    assert calls.values() == [1]


def test_what_a_sink_changes_in_an_event_reaches_nobody(pipeline):
    app = pipeline.application(partitions=1)
    stream = app.dataframe(app.topic("in"))
    stream.sink(lambda epoch, partition, events: [e.value.clear() for e in events], name="spoil")
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", {"n": 1})]}).values("out") == [{"n": 1}]


def test_a_sink_must_be_a_function(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).sink("print")
