"""The runner on Spark: one job per epoch, whose result is control rows.

Invariants:
- One Spark job per epoch computes; nothing is computed twice, and no row of an embedded topic passes through the JVM.
- How far the topics were read is in the epoch record, together with the state: there is no second log to agree with.
"""

import base64
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession

from penstock import errors
from penstock.clock import random_ids
from penstock.epochs.coordinator import Assignment
from penstock.epochs.records import EpochRecord, SparkBatch
from penstock.errors import CorruptionError, InvalidError, PenstockError, StorageError
from penstock.logic import StatefulLogic
from penstock.plan import StatefulOp
from penstock.runner import Answers, Run
from penstock.spark.ingest import Ingest
from penstock.spark.packing import pack, unpack_error
from penstock.spark.parcels import SCHEMA, Failed, as_failed, read_notes
from penstock.spark.session import log_file, reason_of
from penstock.spark.stage import StageTask, Worker
from penstock.spark.work import WORK, EpochWork, pack_work
from penstock.state.replica import DiskShelf
from penstock.storage import Storage
from penstock.topics import Position

log = logging.getLogger(__name__)

_CARRIED = re.compile(r"<penstock ([A-Za-z0-9+/=]+)>")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run on Spark finds its state, and where its workers keep replicas (None: in their memory)."""

    storage: Storage
    local_dir: Path | None
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """What a batch of a streaming query brings to an epoch: what the first stage makes of its rows (nothing has run
    yet), and what the record is to say of them: the `batch` of DataFrames, or the `positions` behind those of topics.
    """

    staged: DataFrame
    batch: SparkBatch | None = None
    positions: Mapping[str, Position] = field(default_factory=dict)


class SparkRunner:
    """A run whose tasks are executed by Spark. `limit`: so many new events of each topic an epoch reads by itself."""

    def __init__(self, spark: SparkSession, run: Run, places: Places, limit: int) -> None:
        self.run = run
        self.alone = threading.RLock()  # held by whoever runs an epoch
        self._spark = spark
        self._limit = limit
        coordinator = run.coordinator
        folder = None if places.local_dir is None else places.local_dir / coordinator.history
        self._worker = Worker(run.program, places.storage, folder, coordinator.run)
        self._id = random_ids()()  # not the history and the run: those of a copied state are the same
        self._shared = spark.sparkContext.broadcast(_packed(self._worker))
        self._planned: DataFrame | None = None

    @property
    def partitions(self) -> int:
        """Into how many partitions every stage is cut."""
        return self.run.program.partitions

    def epoch(self, given: Given | None = None) -> EpochRecord:
        """Run, commit and publish one epoch with what is new in the topics, and what a batch of a query brings."""
        epoch = self.run.coordinator.view.epoch + 1
        record = self.run.perform(epoch, lambda assignment: self._execute(assignment, given))
        assert record is not None, "the next epoch is never committed already"
        return record

    def waits_for_time(self) -> bool:
        """Whether some logic has timers or a schedule, so that epochs must come even without new events."""
        logics = [step.work.logic for step in self.run.program.steps if isinstance(step.work, StatefulOp)]
        hooks = ("on_timer", "on_schedule")
        return any(getattr(type(one), hook) is not getattr(StatefulLogic, hook) for one in logics for hook in hooks)

    def close(self, ended: bool) -> None:
        """Give back what the run took; `ended`: it ended by itself, so the next one may trust what it leaves."""
        self._shared.unpersist()
        if ended:
            self._seal()
            self.run.coordinator.end()

    def _execute(self, assignment: Assignment, given: Given | None) -> Answers:
        """The one job of an epoch: all stages, with a shuffle by partition between each two."""
        new = self.run.new_events(self._limit)
        context = self._spark.sparkContext
        context.setLocalProperty(WORK, pack_work(EpochWork(assignment, dict(new.slices))))
        try:
            collected = (self._of_topics() if given is None else self._finished(given.staged)).collect()
        except Exception as error:
            raise spark_error(error, assignment.epoch) from None
        finally:
            context.setLocalProperty(WORK, None)  # type: ignore[arg-type]
        controls, failures = read_notes((row[0], bytes(row[1])) for row in collected if row[0])
        if failures:
            raise _error_of(failures[0])
        if given is None:
            return Answers(controls, new.positions)
        return Answers(controls, {**new.positions, **given.positions}, given.batch)

    def first_stage(self, rows: DataFrame, in_place: bool, ingest: Ingest | None = None) -> DataFrame:
        """The first stage over some rows, which are brought to their partitions first if they are not in place.

        `ingest` makes events of rows that are those of a DataFrame.
        """
        if not in_place:
            rows = rows.repartitionById(self.partitions, rows["partition"])
        return rows.mapInArrow(StageTask(self._id, self._shared, 0, ingest), SCHEMA)

    def _of_topics(self) -> DataFrame:
        """The job of an epoch that reads topics only; it is the same in every epoch, so it is planned once."""
        if self._planned is None:
            rows = self._spark.range(0, self.partitions, 1, self.partitions)
            self._planned = self._finished(self.first_stage(rows, in_place=True))
        # A plan with a shuffle must be new each time: Spark would take what it shuffled before for the answer.
        return self._planned if len(self.run.program.stages) == 1 else self._planned.alias("epoch")

    def _finished(self, staged: DataFrame) -> DataFrame:
        """All later stages behind the first, with a shuffle by partition before each."""
        for stage in self.run.program.stages[1:]:
            there = staged.repartitionById(self.partitions, staged["partition"])
            staged = there.mapInArrow(StageTask(self._id, self._shared, stage.index), SCHEMA)
        return staged.select("kind", "value")

    def _seal(self) -> None:
        """Let the next run trust the replicas that the workers of this machine kept."""
        if self._worker.local_dir is None:
            return
        shelf = DiskShelf(self._worker.local_dir, f"{self._worker.run:020d}")
        for step in self.run.program.steps:
            for partition in range(self.run.program.partitions):
                if step.state is not None:
                    shelf.open(step.name, partition)
        shelf.close()


def tasks_under_way(spark: SparkSession) -> tuple[int, int] | None:
    """How many tasks of the jobs that run now are done, and how many there are; None if Spark does not say."""
    try:
        tracker = spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getActiveJobsIds()]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    except Exception:  # the session is just being stopped
        return None
    known = [stage for stage in stages if stage is not None]
    return sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)


def _packed(worker: Worker) -> bytes:
    """The program as it travels to the workers: functions of the main module by value, others by their names."""
    try:
        return pack(worker)
    except InvalidError:
        raise
    except Exception as error:
        raise InvalidError(
            f"the functions of this application cannot be sent to Spark's workers ({error}); let them use no open "
            f"files, locks or connections from outside"
        ) from error


def _error_of(failed: Failed) -> PenstockError:
    """The error that ended a task, made anew on the driver."""
    if failed.kind == CorruptionError.__name__:
        return CorruptionError(failed.name, failed.found, failed.last_good_epoch)
    kind: type[PenstockError] = getattr(errors, failed.kind, PenstockError)
    error = kind(failed.message)
    error.__cause__ = unpack_error(failed.cause)
    return error


def carried(error: PenstockError) -> str:
    """An error as words, for where Spark passes on nothing else; `spark_error` finds it in all that Spark says.

    >>> spark_error(Exception(f"... {carried(CorruptionError('orders/7', 'it is cut'))} ..."), 3).found
    'it is cut'
    """
    return f"<penstock {base64.b64encode(msgspec.json.encode(as_failed(error))).decode()}>"


def spark_error(error: Exception, epoch: int) -> PenstockError:
    """What Spark said, in a sentence; all of it goes to the log file. If it carries an error of ours, that one."""
    ours = _CARRIED.search(str(error))
    if ours is not None:
        return _error_of(msgspec.json.decode(base64.b64decode(ours[1]), type=Failed))
    file = log_file()
    try:
        with file.open("a") as out:
            out.write(f"{error}\n")
    except OSError as full:
        log.warning("%s cannot be written (%s)", file, full)
    return StorageError(
        f"Spark could not finish epoch {epoch}: {reason_of(error)}. It was not committed, so nothing is lost; start "
        f"again. All that Spark said is in {file}"
    )
