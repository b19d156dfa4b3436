"""The application: its topics, its plan, and where its state lives."""

import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from penstock import names
from penstock.clock import Clock, IdFactory, SystemClock, random_ids
from penstock.epochs.coordinator import claim_run, history_of, newest_claim, open_format
from penstock.errors import ConflictError, InvalidError, LogicError, PenstockError
from penstock.failures import ErrorPolicy, check_policy
from penstock.plan import Frame, FrameColumns, Plan, Source, ToTopic, check_name
from penstock.process import is_running
from penstock.runner import MAX_EVENTS_PER_EPOCH, Run, Runner, Settings
from penstock.sources import SUFFIXES, Feed, FileFormat, FilesFeed, IterableFeed
from penstock.state.codec import value_codec
from penstock.state.key_codecs import key_codec
from penstock.state.keys import KEY_GROUPS
from penstock.state.replica import DiskShelf, MemoryShelf, Shelf
from penstock.storage import Storage, open_storage, settle, sub
from penstock.stream import Stream
from penstock.topics import Topic, TopicLog

log = logging.getLogger(__name__)

DEFAULT_SNAPSHOTS = timedelta(seconds=10)
DEFAULT_PARTITIONS = 4
DEFAULT_RETAIN = 100
STORES = ("lmdb", "memory")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(,[\w.-]+:\d+)*")


class Application:
    """Topics, a plan, and where both events and state live.

    `consumer_group` names the application; `broker_address` is where its topics live and `state_dir` where its state
    does: a folder, `s3://`, `gs://`, `az://` or `memory://name`. `local_dir` is a folder for local replicas (a folder
    for temporary files by default), `store` what they are (`"lmdb"` on disk, `"memory"`). `snapshots` is the interval
    at which changes are compacted, `retain` the number of past epochs that can still be read, `partitions` the number
    of pieces that the state is cut into. `on_error` is what happens to events that fail.

    >>> from penstock import Application
    >>> from penstock.testing import TestDriver
    >>> app = Application("totals", state_dir="state")
    >>> orders, totals = app.topic("orders"), app.topic("totals")
    >>> def running_total(value, state):
    ...     total = state.get("total", default=0) + value["amount"]
    ...     state.set("total", total)
    ...     return {**value, "total": total}
    >>> app.dataframe(orders).apply(running_total, stateful=True).to_topic(totals)
    >>> driver = TestDriver(app)
    >>> driver.send("orders", {"amount": 3}, key="anna")
    >>> driver.send("orders", {"amount": 4}, key="anna")
    >>> driver.epoch()
    >>> [event.value for event in driver.received("totals")]
    [{'amount': 3, 'total': 3}, {'amount': 4, 'total': 7}]
    """

    def __init__(
        self,
        consumer_group: str,
        broker_address: str | Path = "topics",
        state_dir: str | Path = "state",
        local_dir: str | Path | None = None,
        snapshots: timedelta = DEFAULT_SNAPSHOTS,
        on_error: ErrorPolicy = "fail",
        partitions: int = DEFAULT_PARTITIONS,
        retain: int = DEFAULT_RETAIN,
        store: str = "lmdb",
        max_events_per_epoch: int = MAX_EVENTS_PER_EPOCH,
        clock: Clock | None = None,
        ids: IdFactory | None = None,
    ) -> None:
        check_name("consumer_group", consumer_group)
        _check_number("partitions", partitions, 1, KEY_GROUPS)
        _check_number("retain", retain, 1, 1_000_000)
        _check_number("max_events_per_epoch", max_events_per_epoch, 1, 1_000_000_000)
        if not isinstance(snapshots, timedelta) or snapshots <= timedelta(0):
            raise InvalidError(f"snapshots is {snapshots!r}; it is an interval such as timedelta(seconds=10)")
        if store not in STORES:
            raise InvalidError(f"store is {store!r}; it is one of {', '.join(map(repr, STORES))}")
        self.consumer_group = consumer_group
        self.plan = Plan()
        self.settings = Settings(partitions, snapshots, retain, check_policy(on_error), max_events_per_epoch)
        self._clock = clock or SystemClock()
        self._ids = ids or random_ids()
        _check_address("broker_address", broker_address)
        _check_address("state_dir", state_dir)
        self._addresses = {"broker_address": str(broker_address), "state_dir": str(state_dir)}
        self._stop = threading.Event()
        self._broker = open_storage(broker_address)
        self._state = sub(open_storage(state_dir), consumer_group)
        self._local_dir = Path(local_dir) if local_dir else Path(tempfile.gettempdir()) / "penstock"
        self._store = store
        self._topics: dict[str, Topic] = {}
        self._frames: dict[int, tuple[Any, FrameColumns]] = {}

    @property
    def topics(self) -> dict[str, Topic]:
        """The topics opened so far, by name."""
        return dict(self._topics)

    def topic(self, name: str, key: Any = "str", value: Any = "json") -> Topic:
        """A topic, with the codecs of its keys and values; it comes to be with the first event.

        `key` is "str", "bytes", "int", "json" or "canonical" (any key comes back as it was); `value` is "json",
        "msgpack", "bytes", "str" or a type (a dataclass, a `msgspec.Struct`, …) that is validated on reading.
        """
        check_name("a topic's name", name)
        keys, values = key_codec(key), value_codec(value)
        known = self._topics.get(name)
        if known is not None and (known.key, known.value.name, known.value.spec) != (keys, values.name, values.spec):
            raise InvalidError(
                f"topic {name!r} was opened with key={known.key.name!r} and value={known.value.name!r} before, now "
                f"with key={keys.name!r} and value={values.name!r}; a topic has one codec for each"
            )
        if known is None:
            known = Topic(name, keys, values, sub(self._broker, name), self._clock, self._ids)
            self._topics[name] = known
        return known

    def dataframe(
        self,
        source: Any,
        key: str | None = None,
        value: str | list[str] | None = None,
        timestamp: str | None = None,
        order: str | None = None,
        codec: Any = None,
        name: str | None = None,
    ) -> Stream:
        """The stream of a topic's events from its first on, or of the rows of a streaming DataFrame of Spark's.

        Of a DataFrame, `key` names the column of keys; `value` the column or columns of values (all, as a dict, if not
        given; with `codec`, one column of text or bytes that is decoded with it); `timestamp` a column of timestamps
        or milliseconds (without: the time of the epoch); `order` a column by which the events of one key are ordered
        within a batch, such as Kafka's offset. Such an application runs on Spark only.
        """
        if isinstance(source, Topic):
            return self._read(source, None)
        if not getattr(source, "isStreaming", False):
            raise InvalidError(
                f"dataframe() was given {source!r}; it needs a topic, app.dataframe(app.topic(name)), or a streaming "
                f"DataFrame, spark.readStream..."
            )
        columns = FrameColumns(key, value, timestamp, order, codec is not None)
        step = self.plan.add(name, "from DataFrame", Frame(value_codec("msgpack" if codec is None else codec)))
        self._frames[step.id] = (source, columns)
        return Stream(self.plan, step)

    def from_iterable(self, name: str, items: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Stream:
        """The stream of a small, finite input: values or `Event`s, kept in a topic of that name, each read once.

        >>> from penstock.testing import TestDriver
        >>> app = Application("numbers")
        >>> app.from_iterable("numbers", range(4)).map(lambda n: n * n).to_topic(app.topic("squares"))
        >>> driver = TestDriver(app)
        >>> driver.epoch()
        >>> [event.value for event in driver.received("squares")]
        [0, 1, 4, 9]
        """
        return self._read(self.topic(name), IterableFeed(name, list(items), key))

    def files(
        self,
        path: str | Path,
        format: FileFormat = "json",
        key: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Stream:
        """The stream of the rows of all files in a folder: JSON lines, CSV (texts) or Parquet, by the order of names.

        Files that are added later are read later; a file must not change once it is there. The rows are kept in a
        topic, called `name` or after the folder.
        """
        if format not in SUFFIXES:
            raise InvalidError(f"files() was given format={format!r}; it is one of {', '.join(map(repr, SUFFIXES))}")
        topic = self.topic(name or f"files {Path(str(path)).name}")
        return self._read(topic, FilesFeed(open_storage(path), str(path), format, key))

    def _read(self, topic: Topic, feed: Feed | None) -> Stream:
        for step in self.plan.steps:
            if isinstance(step.work, Source) and step.work.topic is topic:
                return Stream(self.plan, step)
        return Stream(self.plan, self.plan.add(None, f"from {topic.name}", Source(topic, feed)))

    def clear_state(self, force: bool = False) -> None:
        """Delete the application's state, so that it starts again from the beginning of its topics.

        Refused while the application runs. A run on another machine that died without a word cannot be told from one
        that lives; `force=True` says that it is dead. If it is not, it stops at its next commit.
        """
        newest = newest_claim(self._state)
        if newest is not None and not force and names.ended(newest.run) not in self._state.list(names.RUNS):
            alive = is_running(newest.owner)
            if alive is not False:
                where = f"process {newest.owner.pid} on {newest.owner.host}"
                hint = "stop it first" if alive else "if it is dead, call clear_state(force=True)"
                raise ConflictError(
                    f"application {self.consumer_group!r} is running ({where}, run {newest.run}); {hint}"
                )
        history = history_of(self._state)
        claim = claim_run(self._state, self._ids)
        # The format goes first: should this be cut short, what is left is refused as damaged, and never misread.
        self._state.delete([names.FORMAT])
        self._state.delete([name for name in self._state.list("") if name != names.run(claim.run)])
        settle(self._state, names.ended(claim.run), b"")
        if history is not None:  # and no other: another application of this name may have its replicas here too
            shutil.rmtree(self._local_dir / self.consumer_group / history, ignore_errors=True)

    def run(
        self,
        until: Literal["caught-up"] | None = None,
        count: int | None = None,
        timeout: timedelta | None = None,
        restarts: int = 0,
        master: str = "local[*]",
        spark: Any = None,
        trigger: timedelta = timedelta(0),
        streaming_query: bool = False,
    ) -> None:
        """Run on Spark until SIGINT, SIGTERM or `stop()`, and then to the end of the epoch under way.

        `until="caught-up"` ends when the input does, `count` after so many events, `timeout` after so much time.
        After a failure it is started again up to `restarts` times, with growing pauses. `master` is Spark's (a
        session is made for the run), or `spark` is a `SparkSession` of yours. Epochs follow each other at once, or at
        the interval `trigger`. A second run of the same application takes over: the first stops, saying so.
        `streaming_query=True` lets a streaming query of Spark's bring the events of topics, so that Spark's own page
        and listeners show them; each epoch takes a little longer. (Streaming DataFrames always come that way.)
        """
        from penstock.spark.engine import Places
        from penstock.spark.running import Job, milliseconds, run_on_spark

        self.check_plan()
        if until not in (None, "caught-up"):
            raise InvalidError(f'until is {until!r}; it is "caught-up" or not given')
        for what, address in self._addresses.items():
            if address.startswith("memory://"):
                raise InvalidError(
                    f"{what} is {address!r}, but Spark's workers are other processes and cannot see the memory of this "
                    f"one; use a folder or an object store"
                )
        self._check_storage()
        self._stop.clear()
        local = None if self._store == "memory" else self._local_dir.absolute() / self.consumer_group
        job = Job(
            name=self.consumer_group,
            start=lambda: Run(self.plan, self.settings, self._state, self._open_log, self._clock, self._ids),
            places=Places(self._state, local, self._checkpoint()),
            frames=self._frames,
            streaming_query=streaming_query,
            limit=self.settings.max_events_per_epoch,
            trigger_ms=milliseconds(trigger) or 0,
            until_caught_up=until == "caught-up",
            count=count,
            timeout_ms=milliseconds(timeout),
            restarts=restarts,
            stop=self._stop,
            clock=self._clock,
        )
        try:
            run_on_spark(job, master, spark)
        except PenstockError as error:
            log.debug("the run failed", exc_info=True)
            # Frames of ours would hide those of the user's function, which the message has.
            raise error.with_traceback(None) from error.__cause__ if isinstance(error, LogicError) else None

    def _check_storage(self) -> None:
        """Raise what is wrong with the places of state and topics, before Spark takes its time to start."""
        for what, address in self._addresses.items():
            if "://" not in address:
                _check_folder(what, Path(address))
        open_format(self._state, self._ids)
        for step in self.plan.steps:
            if isinstance(step.work, Source) and step.work.feed is None and not step.work.topic.log.end().offset:
                where = self._addresses["broker_address"]
                log.warning("topic %r in %s has no events yet; the run begins when it has", step.work.topic.name, where)

    def _checkpoint(self) -> str:
        """Where Spark keeps the log of a streaming query: beside the state, so that they live and die together."""
        state_dir = self._addresses["state_dir"]
        base = state_dir if "://" in state_dir else str(Path(state_dir).absolute())
        return f"{base.rstrip('/')}/{self.consumer_group}/{names.SPARK}"

    def stop(self) -> None:
        """Let `run()`, in whichever thread it is, end after the epoch under way."""
        self._stop.set()

    def runner(self) -> Runner:
        """Start a run of this application in this process, without Spark: for learning, and for small things."""
        return start(self, self.plan, self._state, self._shelf, self._open_log, self._clock, self._ids)

    def check_plan(self) -> None:
        """Raise InvalidError if the plan cannot be run: it has no steps, or topics that this application does not."""
        if not self.plan.steps:
            raise InvalidError("the application has no steps; begin with app.dataframe(app.topic(name))")
        for step in self.plan.steps:
            if (
                isinstance(step.work, Source | ToTopic)
                and self._topics.get(step.work.topic.name) is not step.work.topic
            ):
                raise InvalidError(
                    f"step {step.name!r} uses a topic {step.work.topic.name!r} of another application; open it in this "
                    f"one: app.topic({step.work.topic.name!r})"
                )

    def _open_log(self, name: str) -> TopicLog:
        return self._topics[name].log if name in self._topics else self.topic(name, key="bytes", value="bytes").log

    def _shelf(self, history: str, run: int) -> Shelf:
        if self._store == "memory":
            return MemoryShelf()
        return DiskShelf(self._local_dir / self.consumer_group / history, f"{run:020d}")


def start(
    app: Application,
    plan: Plan,
    storage: Storage,
    shelf: Callable[[str, int], Shelf],
    open_log: Callable[[str], TopicLog],
    clock: Clock,
    ids: IdFactory,
) -> Runner:
    """Start a run of an application's plan in this process, with these replicas, topics, clock and ids."""
    app.check_plan()
    if any(isinstance(step.work, Frame) for step in plan.steps):
        raise InvalidError("the application reads a DataFrame of Spark's, so it runs on Spark only: app.run()")
    run = Run(plan, app.settings, storage, open_log, clock, ids)
    replicas = shelf(run.coordinator.history, run.coordinator.run)
    return Runner(run, storage, replicas, ids, app.settings.max_events_per_epoch)


def _check_address(what: str, address: str | Path) -> None:
    if not str(address):
        raise InvalidError(f"{what} is {address!r}; it is a folder, or a URL such as s3://bucket/folder")
    if what == "broker_address" and _HOST_AND_PORT.fullmatch(str(address)):
        raise InvalidError(
            f"{what} is {str(address)!r}, the address of a Kafka broker; topics on Kafka cannot be opened yet: give a "
            f'folder or a URL, and read Kafka with app.dataframe(spark.readStream.format("kafka")...)'
        )


def _check_folder(what: str, folder: Path) -> None:
    """Raise InvalidError if there can be no folder here, or one that cannot be used."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InvalidError(
            f"{what} is {str(folder)!r}, but {str(there)!r} is a file; give a folder, or a URL such as s3://bucket/folder"
        )
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidError(
            f"{what} is {str(folder)!r}, but {str(there)!r} may not be read and written here; change its permissions, "
            f"or give another folder"
        )


def _check_number(what: str, number: Any, low: int, high: int) -> None:
    if number.__class__ is not int or not low <= number <= high:
        raise InvalidError(f"{what} is {number!r}; it is a whole number from {low} to {high}")
