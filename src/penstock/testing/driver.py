"""The test driver: an application in this process, on memory, under a clock that the test moves."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.application import Application, start
from penstock.epochs.coordinator import Coordinator
from penstock.epochs.records import Counts, EpochRecord, View
from penstock.errors import InvalidError
from penstock.events import Event, Headers
from penstock.plan import Call, Plan, Step
from penstock.runner import Run
from penstock.state.codec import Codec, value_codec
from penstock.state.key_codecs import key_codec
from penstock.state.query import StepState
from penstock.state.replica import DiskShelf, MemoryShelf, Replicas, Shelf
from penstock.storage import Storage, memory_storage, open_storage, sub
from penstock.testing.clock import ManualClock, seeded_ids
from penstock.testing.faults import Crash
from penstock.topics import Producer, Topic, TopicLog

if TYPE_CHECKING:
    from penstock.spark.engine import SparkRunner

CRASH = object()
"""A mark among the items of `TestDriver.send_all`: the run dies when it reads the item behind the mark, once."""

_MARK = b"\x00crash:"


class _Runner(Protocol):
    """A run under way, in this process or on Spark."""

    @property
    def coordinator(self) -> Coordinator: ...

    def epoch(self) -> EpochRecord: ...

    def close(self) -> None: ...


class TestDriver:
    """Runs an application in this process, with the task code that runs on Spark, and without touching its folders.

    Events and state live in memory unless you give storages; time stands still until `advance_time`. `crash()` lets
    the run die as SIGKILL would, `restart()` starts the next one on what is durable.

    With a `SparkSession` as `spark` the tasks are executed by Spark, and everything else is the same. Events and state
    then live in a temporary folder, unless you give storages that Spark's workers can reach.

    >>> from penstock import Application
    >>> from penstock.testing import TestDriver
    >>> app = Application("sums")
    >>> numbers = app.dataframe(app.topic("numbers"))
    >>> numbers.stateful_map("sum", lambda key, n, total: (total + n, total + n), default=0).to_topic(app.topic("sums"))
    >>> driver = TestDriver(app)
    >>> driver.send("numbers", 1, key="a")
    >>> driver.send("numbers", 2, key="a")
    >>> driver.epoch()
    >>> driver.crash()
    >>> driver.restart()
    >>> driver.send("numbers", 3, key="a")
    >>> driver.epoch()
    >>> [event.value for event in driver.received("sums")], driver.state("sum")["a"]
    ([1, 3, 6], 6)
    """

    __test__ = False  # pytest would take the name for that of a test class

    def __init__(
        self,
        app: Application,
        *,
        storage: Storage | None = None,
        topics: Storage | None = None,
        local_dir: str | Path | None = None,
        clock: ManualClock | None = None,
        seed: int = 0,
        spark: Any = None,
    ) -> None:
        self._app = app
        self._spark = spark
        folder = None if spark is None else self._temporary_folder()
        self._storage = storage or (open_storage(folder / "state") if folder else memory_storage())
        self._topic_storage = topics or (open_storage(folder / "topics") if folder else memory_storage())
        own_dir = folder / "local" if folder else None
        self._local_dir = own_dir if local_dir is None else Path(local_dir)
        self.clock = clock or ManualClock()
        self._ids = seeded_ids(seed)
        self._topics: dict[tuple[str, bool], Topic] = {}
        self._fired: set[bytes] = set()
        self._marks = count()
        self._marked: set[str] = set()
        self._runner: _Runner | None = None
        self._on_disk: DiskShelf | None = None
        self.restart()

    def send(
        self,
        topic: str | Topic,
        value: Any,
        key: Any = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Append one event to a topic; without a timestamp it gets the time of the driver's clock."""
        if value is CRASH:
            raise InvalidError("CRASH is no value but a mark among values: give it to send_all()")
        with self._topic(topic).producer() as send:
            send(value, key=key, timestamp_ms=timestamp_ms, headers=headers)

    def producer(self, topic: str | Topic) -> Producer:
        """A producer of a topic, for many events at once: they become one segment."""
        return self._topic(topic).producer()

    def send_all(self, topic: str | Topic, values: Iterable[Any], key: Callable[[Any], Any] | Any = None) -> None:
        """Append many events; `key` is one key or a function of the value.

        `CRASH` among them marks a place to die; not on Spark, whose workers cannot take the test with them.
        """
        name = self._topic(topic).name
        for value in values:
            if value is CRASH:
                if self._spark is not None:
                    raise InvalidError("CRASH kills a run in this process only; on Spark, kill a worker or the driver")
                self._marked.add(name)
                continue
            own = key(value) if callable(key) else key
            if name in self._marked:
                self._marked.remove(name)
                self._send_marked(self._topic(topic), value, own)
            else:
                self.send(topic, value, own)

    def epoch(self) -> None:
        """Run one epoch with what is new, commit and publish it. Raises what stops a run; a Crash needs `restart()`."""
        runner = self._running()
        try:
            runner.epoch()
        except Crash:
            self.crash()
            raise

    def received(self, topic: str | Topic) -> list[Event]:
        """All events of a topic so far."""
        return list(self._made(self._topic(topic).name, armed=False).read())

    def state(self, step: str) -> StepState:
        """The committed state of a step: a mapping from key to state (for `State`, to a dict of its names)."""
        found = next((s for s in self._app.plan.steps if s.name == step and s.state is not None), None)
        if found is None:
            known = ", ".join(sorted(self._app.plan.stateful_steps())) or "none"
            raise InvalidError(f"there is no stateful step {step!r}; there are: {known}")
        return self._read_state(found, self._running().coordinator.view)

    @property
    def counts(self) -> Counts:
        """How many events were read, written, skipped and put aside in all committed epochs."""
        return self._running().coordinator.view.counts

    @property
    def view(self) -> View:
        """The application as of the last committed epoch."""
        return self._running().coordinator.view

    def advance_time(self, delta: timedelta | int) -> None:
        """Move the clock by so much (an int: milliseconds)."""
        self.clock.advance(delta)

    def crash(self) -> None:
        """Let the run die: what is not durable is gone."""
        self._runner = None
        if self._on_disk is not None:
            self._on_disk.abandon()

    def restart(self, storage: Storage | None = None, topics: Storage | None = None) -> None:
        """Start the next run on what is durable, possibly on other storages; a run under way ends properly first."""
        if self._runner is not None:
            self.close()
        self._storage = storage or self._storage
        if topics is not None:
            self._topic_storage = topics
        self._topics.clear()
        plan = self._app.plan.with_topics(lambda topic: self._topic(topic))
        if self._spark is None:
            self._runner = start(self._app, plan, self._storage, self._shelf, self._open_log, self.clock, self._ids)
        else:
            self._runner = self._start_on_spark(plan)

    def close(self) -> None:
        """End the run properly."""
        self._running().close()
        self._runner = None

    def _start_on_spark(self, plan: Plan) -> _Runner:
        from penstock.spark.engine import Places, SparkRunner

        self._app.check_plan()
        settings = self._app.settings
        run = Run(plan, settings, self._storage, self._open_log, self.clock, self._ids)
        local = None if self._local_dir is None else self._local_dir.absolute() / self._app.consumer_group
        return _OnSpark(SparkRunner(self._spark, run, Places(self._storage, local), settings.max_events_per_epoch))

    def _temporary_folder(self) -> Path:
        """A folder that is gone when this driver is."""
        folder = tempfile.mkdtemp(prefix="penstock-test-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _running(self) -> _Runner:
        if self._runner is None:
            raise InvalidError("the run of this driver has crashed or was closed; call restart()")
        return self._runner

    def _topic(self, topic: str | Topic) -> Topic:
        name = topic if isinstance(topic, str) else topic.name
        place = name, name in self._app.topics
        if place not in self._topics:
            self._topics[place] = self._made(name, armed=True)
        return self._topics[place]

    def _made(self, name: str, armed: bool) -> Topic:
        """A topic as the application opened it, or of bytes if it did not; `armed`: crash marks in it work."""
        known = self._app.topics.get(name)
        key, value = (key_codec("bytes"), value_codec("bytes")) if known is None else (known.key, known.value)
        if self._spark is None:
            value = self._dying(value, armed)
        return Topic(name, key, value, sub(self._topic_storage, name), self.clock, self._ids)

    def _open_log(self, name: str) -> TopicLog:
        return self._topic(name).log

    def _shelf(self, history: str, run: int) -> Shelf:
        if self._local_dir is None:
            return MemoryShelf()
        self._on_disk = DiskShelf(self._local_dir / self._app.consumer_group / history, f"{run:020d}")
        return self._on_disk

    def _read_state(self, step: Step, view: View) -> StepState:
        replicas = Replicas(self._storage, MemoryShelf())
        parts = range(self._app.settings.partitions)
        stores = [replicas.at(step.name, part, view.epoch, view.of(step.name, part)) for part in parts]
        assert step.state is not None
        return StepState(stores, step.state, isinstance(step.work, Call))

    def _send_marked(self, topic: Topic, value: Any, key: Any) -> None:
        mark = _MARK + b"%d\x00" % next(self._marks)
        raw = Topic(
            topic.name, topic.key, value_codec("bytes"), sub(self._topic_storage, topic.name), self.clock, self._ids
        )
        with raw.producer() as send:
            send(mark + topic.value.encode(value), key=key)

    def _dying(self, codec: Codec, armed: bool) -> Codec:
        """The codec, but reading a marked value kills the run the first time, if the marks are armed."""

        def decode(data: bytes) -> Any:
            if not data.startswith(_MARK):
                return codec.decode(data)
            end = data.index(b"\x00", 1) + 1
            if armed and data[:end] not in self._fired:
                self._fired.add(data[:end])
                raise Crash(f"the crash mark before {data[end:]!r}")
            return codec.decode(data[end:])

        return replace(codec, decode=decode, spec=None)


@dataclass(frozen=True, slots=True)
class _OnSpark:
    """A run on Spark, as the driver uses it."""

    runner: "SparkRunner"

    @property
    def coordinator(self) -> Coordinator:
        return self.runner.run.coordinator

    def epoch(self) -> EpochRecord:
        return self.runner.epoch()

    def close(self) -> None:
        self.runner.close(ended=True)
