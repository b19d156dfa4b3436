"""`run(streaming_query=True)`: a streaming query of Spark's brings the events of topics; nothing else is different."""

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock import Application, CorruptionError, LogicError, StatefulLogic
from penstock.clock import SystemClock
from penstock.epochs.records import EpochRecord, pack, unpack
from penstock.names import epoch_record
from penstock.spark import running, source
from penstock.storage import Storage, open_storage
from penstock.topics import Position

GROUP = "query"
LONG = timedelta(seconds=60)
KEYS = 3


@pytest.fixture(autouse=True)
def _travels_whole(request: pytest.FixtureRequest) -> None:
    """Workers cannot import a test's module."""
    cloudpickle.register_pickle_by_value(request.module)


def add(key: Any, n: int, total: int) -> tuple[int, int]:
    return total + n, total + n


def application(folder: Path, **settings: Any) -> Application:
    return Application(GROUP, folder / "topics", folder / "state", folder / "local", partitions=2, **settings)


def summing(app: Application, function: Any = add) -> Application:
    app.dataframe(app.topic("numbers")).stateful_map("sum", function, default=0).to_topic(app.topic("sums"))
    return app


def send(app: Application, numbers: range) -> None:
    with app.topic("numbers").producer() as send_one:
        for n in numbers:
            send_one(n, key=f"k{n % KEYS}", timestamp_ms=n)


def sums(app: Application) -> dict[Any, list[int]]:
    """What was sent on, by key and in order."""
    found: dict[Any, list[int]] = {}
    for event in app.topic("sums").read():
        found.setdefault(event.key, []).append(event.value)
    return found


def running_sums(end: int) -> dict[str, list[int]]:
    """What the sums of the numbers from 0 to before the end are."""
    of_key = {f"k{key}": range(key, end, KEYS) for key in range(KEYS)}
    return {key: [sum(of[: place + 1]) for place in range(len(of))] for key, of in of_key.items() if of}


def records(folder: Path) -> list[EpochRecord]:
    storage = open_storage(folder / "state" / GROUP)
    stored = [name for name in storage.list("epochs/") if not name.endswith(".full.json")]
    return [unpack(name, storage.read(name), EpochRecord) for name in sorted(stored)]


def read(folder: Path) -> list[int]:
    """How many events each epoch read."""
    return [record.counts.read for record in records(folder)]


def when(condition: Callable[[], bool], then: Callable[[], Any]) -> threading.Thread:
    """Beside a run, do something as soon as something is so."""

    def watch() -> None:
        pause = threading.Event()
        while not condition():
            pause.wait(0.01)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_loop_and_query_take_turns_and_nothing_is_lost_or_doubled(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=4))
    for turn, by_query in enumerate([False, True, False, True]):
        send(app, range(10 * turn, 10 * turn + 10))
        app.run(until="caught-up", spark=spark, streaming_query=by_query)
        assert sums(app) == running_sums(10 * turn + 10)
    assert read(tmp_path) == [4, 4, 2] * 4


def count_up(key: Any, n: int, seen: int) -> tuple[int, int]:
    return seen + 1, seen + 1


def test_there_may_be_several_stages_and_the_count_of_events_ends_a_run(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "IDLE_SECONDS", 2.0)  # the query itself must see that the run is over
    app = application(tmp_path, max_events_per_epoch=4)
    stream = app.dataframe(app.topic("numbers")).stateful_map("sum", add, default=0).key_by("together", lambda n: "all")
    stream.stateful_map("count", count_up, default=0).to_topic(app.topic("sums"))
    send(app, range(20))
    app.run(count=8, spark=spark, streaming_query=True)
    assert sums(app) == {"all": list(range(1, 9))}, "no batch is begun that was not asked for"


class Heard(StreamingQueryListener):
    """Notes what Spark tells of queries."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows = 0
        self.ended = threading.Event()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - the name is Spark\'s
        self.names.append(event.name)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - the name is Spark\'s
        self.rows += event.progress.numInputRows

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - the name is Spark\'s
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - the name is Spark\'s
        self.ended.set()


def test_spark_shows_the_query_by_name_with_its_events_and_may_stop_it(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=30))
    send(app, range(900))
    heard, active = Heard(), list[str]()

    def look_and_stop() -> None:
        for query in spark.streams.active:
            active.append(query.name)
            query.stop()

    spark.streams.addListener(heard)
    try:
        looking = when(lambda: heard.rows > 0, look_and_stop)
        app.run(spark=spark, streaming_query=True, timeout=LONG)
        looking.join()
        assert heard.ended.wait(60)
    finally:
        spark.streams.removeListener(heard)
    assert active == heard.names == ["query, run 1: topics"]
    assert heard.rows % 30 == 0
    assert 0 < app.topic("sums").end() < 900
    assert set(read(tmp_path)) == {30}
    assert spark.streams.active == []


def test_a_function_that_fails_is_told_as_in_the_loop(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: Any, n: int, total: int) -> tuple[int, int]:
        if n == 7:
            raise ConnectionError("nobody answers")
        return total + n, total + n

    logs: list[str] = []

    class Noted(source.TemporaryDirectory[str]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            logs.append(self.name)

    monkeypatch.setattr(source, "TemporaryDirectory", Noted)
    app = summing(application(tmp_path), fail)
    send(app, range(10))
    said: list[str] = []
    for by_query in (False, True):
        with pytest.raises(
            LogicError, match=r"step 'sum', function .*fail.*key 'k1', topic 'numbers', offset"
        ) as error:
            app.run(until="caught-up", spark=spark, streaming_query=by_query)
        assert isinstance(error.value.__cause__, ConnectionError)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert [Path(folder).exists() for folder in logs] == [False], "a query leaves no log"
    assert spark.streams.active == []


def test_a_segment_that_only_the_source_has_met_yet_is_told_in_a_sentence(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path))
    send(app, range(5))
    second = tmp_path / "topics" / "numbers" / f"{app.topic('numbers').end():020d}.parquet"
    send(app, range(5, 10))
    send(app, range(10, 15))
    damaged = bytearray(second.read_bytes())
    damaged[-20] ^= 1
    second.unlink()
    second.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"its footer does not match its checksum; .*bring the object") as error:
        app.run(until="caught-up", spark=spark, streaming_query=True)
    assert len(str(error.value).splitlines()) == 1
    assert error.value.name == f"numbers/{second.name}"
    assert records(tmp_path) == []


def test_a_topic_and_a_frame_feed_one_state(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    frame = spark.readStream.schema("key string, n long").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    app = application(tmp_path, max_events_per_epoch=4)
    rows = app.dataframe(frame, key="key", value="n", order="n")
    rows.concat(app.dataframe(app.topic("numbers"))).stateful_map("sum", add, default=0).to_topic(app.topic("sums"))
    for turn, by_query in enumerate([False, True]):
        for file in range(2):
            (tmp_path / "in" / f"{turn}-{file}.json").write_text(json.dumps({"key": "k0", "n": 1000}) + "\n")
        send(app, range(10 * turn, 10 * turn + 10))
        app.run(until="caught-up", spark=spark, streaming_query=by_query)
    found = sums(app)
    assert {key: of[-1] for key, of in found.items()} == {"k0": 4000 + 63, "k1": 70, "k2": 57}
    assert sum(map(len, found.values())) == 24
    ends = [record.positions["from numbers"].offset for record in records(tmp_path)]
    assert all(0 <= there - here <= 4 for here, there in pairwise([0, *ends]))
    assert ends[-1] == 20


def test_files_that_arrive_later_are_seen_by_the_source(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    app = application(tmp_path)
    app.files(tmp_path / "in", key=lambda n: "k").stateful_map("sum", add, default=0).to_topic(app.topic("sums"))
    (tmp_path / "in" / "a.json").write_text("1\n2\n")
    adding = when(lambda: app.topic("sums").end() == 2, lambda: (tmp_path / "in" / "b.json").write_text("3\n"))
    stopping = when(lambda: app.topic("sums").end() == 3, app.stop)
    app.run(spark=spark, streaming_query=True, timeout=LONG)
    adding.join()
    stopping.join()
    assert sums(app) == {"k": [1, 3, 6]}


class Late(StatefulLogic):
    """Sends an event on at once, and once more when a timer fires: in an epoch that no event has brought."""

    def on_data(self, event: Any, state: Any, emit: Any) -> Any:
        emit(event.value)
        self.timers.at_processing_time(event.value)
        return event.value

    def on_timer(self, key: Any, state: Any, timer: Any, emit: Any) -> Any:
        emit(-state)
        return state


class Ahead:
    """A clock that is ahead of the system's."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return SystemClock().now_ms() + self.ahead_ms

    def go_on(self) -> None:
        self.ahead_ms = 120_000


def test_epochs_for_timers_come_between_batches(spark: Any, tmp_path: Path) -> None:
    clock = Ahead()
    app = application(tmp_path, clock=clock)
    app.dataframe(app.topic("numbers")).stateful_op("late", Late()).to_topic(app.topic("sums"))
    soon = clock.now_ms() + 60_000
    send(app, range(soon, soon + 1))
    steps = [
        when(lambda: app.topic("sums").end() == 1, clock.go_on),
        when(lambda: app.topic("sums").end() == 2, lambda: send(app, range(3))),
        when(lambda: app.topic("sums").end() == 8, app.stop),
    ]
    app.run(spark=spark, streaming_query=True, timeout=10 * LONG)  # as that clock has it
    for step in steps:
        step.join()
    assert sorted(value for of in sums(app).values() for value in of) == sorted([soon, -soon, 0, 1, 2, 0, -1, -2])
    batches = [epoch for epoch, events in enumerate(read(tmp_path)) if events]
    assert [read(tmp_path)[epoch] for epoch in batches] == [1, 3]
    assert batches[1] > batches[0] + 1, "an epoch between them fired the first timer"


def test_a_query_stopped_from_sparks_side_in_the_middle_of_an_epoch_loses_nothing(spark: Any, tmp_path: Path) -> None:
    def wait(key: Any, n: int, total: int) -> tuple[int, int]:
        if n == 4 and not (tmp_path / "stopped").exists():
            (tmp_path / "within").touch()
            threading.Event().wait(60)
        return total + n, total + n

    app = summing(application(tmp_path), wait)
    send(app, range(9))

    def stop() -> None:
        (tmp_path / "stopped").touch()
        for query in spark.streams.active:
            query.stop()

    stopping = when((tmp_path / "within").exists, stop)
    app.run(spark=spark, streaming_query=True, timeout=LONG)
    stopping.join()
    assert records(tmp_path) == []
    assert not (tmp_path / "state" / GROUP / "runs" / f"{1:020d}.ended").exists(), "tasks may still be under way"
    app.run(until="caught-up", spark=spark)
    assert sums(app) == running_sums(9)


def test_an_epoch_that_fails_while_the_run_stops_is_told_all_the_same(spark: Any, tmp_path: Path) -> None:
    def fail_late(key: Any, n: int, total: int) -> tuple[int, int]:
        (tmp_path / "within").touch()
        while not (tmp_path / "stopped").exists():
            threading.Event().wait(0.01)
        raise ConnectionError("nobody answers")

    app = summing(application(tmp_path), fail_late)
    send(app, range(1))

    def stop() -> None:
        app.stop()
        (tmp_path / "stopped").touch()

    stopping = when((tmp_path / "within").exists, stop)
    with pytest.raises(LogicError, match="nobody answers"):
        app.run(spark=spark, streaming_query=True, timeout=LONG)
    stopping.join()


class OlderRun:
    """A storage in which run 1 commits the first epoch of the next run in the last moment, with fewer events."""

    def __init__(self, inner: Storage) -> None:
        self.read, self.list, self.delete = inner.read, inner.list, inner.delete
        self._inner = inner

    def create(self, name: str, data: bytes) -> bool:
        if name == epoch_record(0):
            ours = unpack(name, data, EpochRecord)
            older = msgspec.structs.replace(ours, run=1, write_id="older", positions={"from numbers": Position(0, 2)})
            self._inner.create(name, pack(older))
        return self._inner.create(name, data)


def test_behind_an_epoch_that_another_run_committed_a_query_begins_anew(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = summing(application(tmp_path))
    app.run(until="caught-up", spark=spark)
    send(app, range(5))
    app._state = OlderRun(app._state)
    app.run(until="caught-up", spark=spark, streaming_query=True, restarts=1, timeout=LONG)
    assert "epoch 0 was committed by another run with other events; start again; starting again in 1 s" in caplog.text
    assert read(tmp_path)[1:] == [3], "what the other run has not read"
