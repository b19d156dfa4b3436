"""`Application.run()` on Spark: sessions, signals, restarts, and when to stop."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

from pyspark.sql import SparkSession

from penstock.clock import Clock
from penstock.epochs.records import EpochRecord
from penstock.errors import ConflictError, InvalidError, PenstockError
from penstock.runner import Run
from penstock.spark.query import Places, Query
from penstock.spark.session import open_session, tune

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Until:
    """When a run ends by itself: at the end of its input, after so many events, after so much time; or never."""

    caught_up: bool
    count: int | None
    timeout: timedelta | None


@dataclass(slots=True)
class Progress:
    """What a run has done so far."""

    events: int = 0
    epochs: int = 0

    def add(self, record: EpochRecord) -> None:
        """Count an epoch."""
        self.events += record.counts.read
        self.epochs += 1


def run_on_spark(
    name: str,
    start: Callable[[], Run],
    places: Places,
    limit: int,
    master: str,
    spark: SparkSession | None,
    trigger: timedelta,
    until: Until,
    restarts: int,
    stop: threading.Event,
    clock: Clock,
) -> None:
    """Run until told to stop, or until the end that was asked for; start again after failures, so many times."""
    session = spark or open_session(master, name)
    if spark is not None:
        tune(spark)
    progress, first_failure = Progress(), None
    deadline_ms = None if until.timeout is None else clock.now_ms() + until.timeout // timedelta(milliseconds=1)
    try:
        with _signals(stop):
            for attempt in range(restarts + 1):
                try:
                    _run_once(start(), session, places, limit, trigger, until, stop, clock, deadline_ms, progress)
                    return
                except (ConflictError, InvalidError):
                    raise
                except PenstockError as error:
                    first_failure = first_failure or error
                    if attempt == restarts:
                        raise first_failure from None
                    pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
                    log.warning("%s; starting again in %.0f s (%d of %d)", error, pause, attempt + 1, restarts)
                    if stop.wait(pause):
                        return
    finally:
        if spark is None:
            session.stop()


def _run_once(
    run: Run,
    session: SparkSession,
    places: Places,
    limit: int,
    trigger: timedelta,
    until: Until,
    stop: threading.Event,
    clock: Clock,
    deadline_ms: int | None,
    progress: Progress,
) -> None:
    query = Query(session, run, places, limit, progress.add)

    def done() -> bool:
        if stop.is_set() or (deadline_ms is not None and clock.now_ms() >= deadline_ms):
            return True
        if until.count is not None and progress.events >= until.count:
            return True
        return until.caught_up and is_caught_up(run)

    try:
        query.start(trigger)
        query.wait(done)
    finally:
        query.close()


def is_caught_up(run: Run) -> bool:
    """Whether the sources hold nothing that is not committed."""
    positions = run.positions()
    return not any(topic.log.slices(positions[step], 1)[0] for step, topic in run.program.topics().items())


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """While this lasts, SIGINT and SIGTERM mean: stop after the epoch under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        log.info("%s: stopping after the epoch under way", signal.Signals(number).name)
        stop.set()

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


UntilWord = Literal["caught-up"]
