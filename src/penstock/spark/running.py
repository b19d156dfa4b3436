"""`Application.run()` on Spark: sessions, signals, restarts, and when to stop."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from pyspark.sql import SparkSession

from penstock.clock import Clock
from penstock.epochs.records import EpochRecord
from penstock.errors import ConflictError, InvalidError, LogicError, PenstockError
from penstock.plan import FrameColumns
from penstock.runner import Run
from penstock.spark.engine import Places, SparkRunner, tasks_under_way
from penstock.spark.frames import FrameQuery
from penstock.spark.query import EpochQuery, Host
from penstock.spark.session import close_session, open_session, tune
from penstock.spark.source import TopicQuery
from penstock.spark.view import ENDED, FAILED, STOPPED, Watch, watching

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
IDLE_SECONDS = 0.02
TICK_MS = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """What is to run, where, and when it ends: how a run starts, where things are, how much an epoch takes at most."""

    name: str
    start: Callable[[], Run]
    places: Places
    limit: int
    trigger_ms: int
    until_caught_up: bool
    count: int | None
    timeout_ms: int | None
    restarts: int
    stop: threading.Event
    clock: Clock
    frames: Mapping[int, tuple[Any, FrameColumns]]
    streaming_query: bool


@dataclass(slots=True)
class Progress:
    """What a run has done so far, and who is told of it."""

    watch: Watch
    events: int = 0
    epochs: int = 0
    last_epoch_ms: int = 0

    def add(self, record: EpochRecord, now_ms: int) -> None:
        """Count an epoch."""
        self.events += record.counts.read
        self.epochs += 1
        self.last_epoch_ms = now_ms
        self.watch.add(record)


def run_on_spark(job: Job, master: str, spark: SparkSession | None) -> None:
    """Run until told to stop, or until the end that was asked for; start again after failures, so many times."""
    with watching(job.name, job.clock) as watch, _signals(job.stop, watch) as listen:
        session = spark or open_session(master, job.name)
        listen()  # a new session listens to SIGINT itself, and would end in the middle of an epoch
        try:
            tune(session)
            _run_again(job, session, Progress(watch))
            watch.end(STOPPED if job.stop.is_set() else ENDED)
        except BaseException:
            watch.end(FAILED)
            raise
        finally:
            if spark is None:
                close_session(session)


def _run_again(job: Job, session: SparkSession, progress: Progress) -> None:
    """Run; after a failure that may pass, pause and run again, as often as was asked for."""
    deadline_ms = None if job.timeout_ms is None else job.clock.now_ms() + job.timeout_ms
    first_failure: PenstockError | None = None
    for attempt in range(job.restarts + 1):
        try:
            _run_once(job, session, deadline_ms, progress)
            return
        except PenstockError as error:
            first_failure = first_failure or error
            if not _may_pass(error):
                raise
            if attempt == job.restarts:
                raise first_failure from first_failure.__cause__
            pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
            progress.watch.doing(f"starting again in {pause:.0f} s")
            log.warning("%s; starting again in %.0f s (%d of %d)", error, pause, attempt + 1, job.restarts)
            if job.stop.wait(pause):
                return


def _may_pass(error: PenstockError) -> bool:
    """Whether a failure may be gone at the next start. A function that fails may have asked a service that was down."""
    return isinstance(error, LogicError) or not isinstance(error, ConflictError | InvalidError)


def _run_once(job: Job, session: SparkSession, deadline_ms: int | None, progress: Progress) -> None:
    runner = SparkRunner(session, job.start(), job.places, 0 if job.streaming_query else job.limit)
    host = Host(
        name=f"{job.name}, run {runner.run.coordinator.run}",
        is_over=lambda: _is_over(job, deadline_ms, progress),
        on_epoch=lambda record: progress.add(record, job.clock.now_ms()),
    )
    ended = False
    try:
        with ExitStack() as queries:
            started = _start_queries(job, session, runner, host, queries, progress)
            _go_on(job, runner, started, host, progress)
        for query in started:
            query.check()  # the epoch that was under way when the run was over may have failed
        ended = not any(query.was_cut for query in started)
    finally:
        runner.close(ended)


def _start_queries(
    job: Job, session: SparkSession, runner: SparkRunner, host: Host, queries: ExitStack, progress: Progress
) -> list[EpochQuery]:
    """Start the streaming queries that a run needs, to be stopped at its end: often none."""
    interval = {"processingTime": f"{job.trigger_ms} milliseconds"}
    frames = FrameQuery(session, runner, host, job.frames, job.places) if job.frames else None
    progress.watch.follow(
        runner.run, lambda: tasks_under_way(session), lambda: 0 if frames is None else frames.events_behind
    )
    started: list[EpochQuery] = []
    if frames is not None:
        queries.callback(frames.stop)
        frames.start({"availableNow": True} if job.until_caught_up else interval)
        started.append(frames)
    if job.streaming_query and runner.run.program.topics():
        topics = TopicQuery(session, runner, host, job.limit)
        queries.callback(topics.stop)
        topics.start(interval)
        started.append(topics)
    return started


def _go_on(job: Job, runner: SparkRunner, queries: Sequence[EpochQuery], host: Host, progress: Progress) -> None:
    """Run the epochs that no query brings, until the run is over."""
    ticks = runner.waits_for_time()
    while not host.is_over():
        if not all(query.is_active for query in queries if not query.ends_by_itself):
            log.info("a streaming query was stopped from outside, so the run ends")
            return
        more_to_come = any(query.is_active for query in queries if query.ends_by_itself)
        with runner.alone:
            progress.watch.look()
            idle = runner.run.is_caught_up()
            if idle and job.until_caught_up and not more_to_come:
                return
            waited_ms = job.clock.now_ms() - progress.last_epoch_ms
            due = (ticks and waited_ms >= TICK_MS) or not (idle or job.streaming_query)
            if waited_ms >= job.trigger_ms and due:
                host.on_epoch(runner.epoch())
                continue
        job.stop.wait(IDLE_SECONDS)


def _is_over(job: Job, deadline_ms: int | None, progress: Progress) -> bool:
    """Whether the run was told to stop, or has reached the end that was asked for."""
    if job.stop.is_set() or (deadline_ms is not None and job.clock.now_ms() >= deadline_ms):
        return True
    return job.count is not None and progress.events >= job.count


@contextmanager
def _signals(stop: threading.Event, watch: Watch) -> Iterator[Callable[[], None]]:
    """While this lasts, SIGINT and SIGTERM mean: stop after the epoch under way; a second SIGINT means at once.

    Gives a function that takes the signals back from whoever has taken them meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        log.info("%s: stopping after the epoch under way", signal.Signals(number).name)
        watch.doing("stopping after the epoch under way")
        stop.set()

    def listen() -> None:
        for number in before:
            signal.signal(number, on_signal)

    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listen()
    try:
        yield listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def milliseconds(interval: timedelta | None) -> int | None:
    """An interval in whole milliseconds."""
    return None if interval is None else interval // timedelta(milliseconds=1)
