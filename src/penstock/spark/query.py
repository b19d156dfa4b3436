"""The streaming query: Spark plans and schedules, `foreachBatch` carries the protocol out on the driver.

Invariants:
- One Spark job per epoch computes; what it returns are control rows, so nothing is computed twice.
- Where the sources were read up to is in the epoch record, together with the state: a query starts from there, and
  Spark's own checkpoint lives only as long as the query.
- A query stops between two epochs, never within one, unless it fails.
"""

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock import errors
from penstock.epochs.coordinator import Assignment
from penstock.epochs.records import EpochRecord
from penstock.errors import CorruptionError, InvalidError, PenstockError, StorageError
from penstock.logic import StatefulLogic
from penstock.plan import StatefulOp
from penstock.runner import Answers, Run
from penstock.spark.session import log_file
from penstock.spark.source import NAME, SourceOptions, TopicsSource
from penstock.spark.stage import SCHEMA, Failed, StageTask, Worker, read_answers
from penstock.state.replica import DiskShelf
from penstock.storage import Storage

log = logging.getLogger(__name__)

TICK_MS = 1000
WAKE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run on Spark finds things."""

    broker: str
    storage: Storage
    local_dir: Path | None


class _StoppedError(Exception):
    """Ends a batch that Spark had planned when the query was already to stop: it is planned again by the next run."""


class Query:
    """One run of an application on Spark."""

    def __init__(self, spark: SparkSession, run: Run, places: Places, limit: int, on_epoch: Callable[[EpochRecord], None]) -> None:
        self._spark = spark
        self._run = run
        self._places = places
        self._limit = limit
        self._on_epoch = on_epoch
        self._first_epoch = run.coordinator.view.epoch + 1
        self._changed = threading.Condition()
        self._busy = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._checkpoint = Path(tempfile.mkdtemp(prefix="penstock-query-"))
        self._id = f"{run.coordinator.history}-{run.coordinator.run}"
        folder = None if places.local_dir is None else places.local_dir / run.coordinator.history
        self._worker = Worker(run.program, places.storage, folder, run.coordinator.run)
        self._shared = spark.sparkContext.broadcast(_packed(self._worker))
        self._query: StreamingQuery | None = None

    def start(self, trigger: timedelta) -> None:
        """Let Spark begin."""
        self._spark.dataSource.register(TopicsSource)
        reader = self._spark.readStream.format(NAME).option("options", msgspec.json.encode(self._options()).decode())
        writer = reader.load().writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        milliseconds = trigger // timedelta(milliseconds=1)
        self._query = writer.trigger(processingTime=f"{milliseconds} milliseconds").start()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` holds between two epochs, or the query fails; then stop it."""
        assert self._query is not None, "start() comes first"
        with self._changed:
            while not (self._failure is None and not self._busy and done()):
                if self._failure is not None or not self._query.isActive:
                    break
                self._changed.wait(WAKE_SECONDS)
            self._stopping = True
        self._query.stop()
        if self._failure is not None:
            raise self._failure
        failed = self._query.exception()
        if failed is not None and _StoppedError.__name__ not in str(failed):
            raise _spark_error(failed)

    def close(self) -> None:
        """Give back what the query took; the run has ended by itself if it had no failure."""
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._shared.unpersist()
        if self._failure is None:
            self._seal()
            self._run.coordinator.end()

    def _options(self) -> SourceOptions:
        topics = {step: topic.name for step, topic in self._run.program.topics().items()}
        start, partitions = self._run.positions(), self._run.program.partitions
        return SourceOptions(self._places.broker, topics, start, partitions, self._limit, self._tick_ms())

    def _tick_ms(self) -> int | None:
        """Epochs come without new events only if some logic waits for a time."""
        logics = [step.work.logic for step in self._run.program.steps if isinstance(step.work, StatefulOp)]
        hooks = ("on_timer", "on_schedule")
        waits = any(getattr(type(one), hook) is not getattr(StatefulLogic, hook) for one in logics for hook in hooks)
        return TICK_MS if waits else None

    def _batch(self, descriptors: DataFrame, batch: int) -> None:
        with self._changed:
            if self._stopping:
                raise _StoppedError
            self._busy = True
        try:
            record = self._run.perform(self._first_epoch + batch, lambda one: self._execute(descriptors, one))
            if record is not None:
                self._on_epoch(record)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _execute(self, descriptors: DataFrame, assignment: Assignment) -> Answers:
        """The one job of an epoch: all stages, with a shuffle by partition between each two."""
        packed = msgspec.msgpack.encode(assignment)
        rows, program = descriptors, self._run.program
        for stage in program.stages:
            if stage.index:
                rows = rows.repartitionById(program.partitions, rows["partition"])
            rows = rows.mapInArrow(StageTask(self._id, self._shared, stage.index, packed), SCHEMA)
        try:
            collected = rows.select("kind", "value").collect()
        except Exception as error:
            raise _spark_error(error) from None
        controls, positions, failures = read_answers((row[0], bytes(row[1])) for row in collected)
        if failures:
            raise _error_of(failures[0])
        return Answers(controls, positions)

    def _seal(self) -> None:
        """Let the next run trust the replicas that the workers of this machine kept."""
        if self._worker.local_dir is None:
            return
        shelf = DiskShelf(self._worker.local_dir, f"{self._worker.run:020d}")
        for step in self._run.program.steps:
            for partition in range(self._run.program.partitions):
                if step.state is not None:
                    shelf.open(step.name, partition)
        shelf.close()


def _packed(worker: Worker) -> bytes:
    """The program as it travels to the workers: functions of the main module by value, others by their names."""
    try:
        packed: bytes = cloudpickle.dumps(worker)
    except Exception as error:
        raise InvalidError(
            f"the functions of this application cannot be sent to Spark's workers ({error}); let them use no open files, "
            f"locks or connections from outside"
        ) from error
    return packed


def _error_of(failed: Failed) -> PenstockError:
    """The error that ended a task, made anew on the driver."""
    if failed.kind == CorruptionError.__name__:
        return CorruptionError(failed.name, failed.found, failed.last_good_epoch)
    kind: type[PenstockError] = getattr(errors, failed.kind, PenstockError)
    return kind(failed.message)


def _spark_error(error: BaseException) -> StorageError:
    """What Spark said, in a sentence."""
    said = [line for line in str(error).splitlines() if line.strip()]
    detail = log_file()
    try:
        with detail.open("a") as file:
            file.write(f"{error}\n")
    except OSError:
        log.debug("%s cannot be written", detail)
    reason = said[0][:300] if said else type(error).__name__
    return StorageError(
        f"Spark could not finish the epoch: {reason}. Nothing was committed, so nothing is lost; start again. "
        f"Everything Spark said is in {detail}"
    )
