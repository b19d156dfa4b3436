"""One stage on Spark: what a Python worker does with the rows of its partition.

A worker process keeps program and replicas between tasks.
"""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.core.broadcast import Broadcast

from penstock.clock import random_ids
from penstock.errors import PenstockError
from penstock.exchange import SCHEMA as EXCHANGE
from penstock.spark.ingest import Ingest
from penstock.spark.parcels import control_note, failed_note, opened, parcels
from penstock.spark.work import DESCRIPTORS, Slices, told, unpack_slices
from penstock.state.keys import group_range
from penstock.state.replica import DiskShelf, MemoryShelf, Replicas
from penstock.storage import Storage
from penstock.task import Program, TaskInput, TaskResult, run_task


@dataclass(frozen=True, slots=True)
class Worker:
    """What every task of a run knows; sent to the workers once."""

    program: Program
    storage: Storage
    local_dir: Path | None
    run: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a worker process keeps between the tasks of a run."""

    worker: Worker
    replicas: Replicas


_kept: dict[str, _Kept] = {}
_ids = random_ids()


@dataclass(frozen=True, slots=True)
class StageTask:
    """The function that Spark runs on each partition of a stage in an epoch."""

    run: str
    worker: "Broadcast[bytes]"
    stage: int
    ingest: Ingest | None = None
    """What makes events of rows that Spark itself has brought to their partitions."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage; give its events for later stages, its control row, and the notes that came along."""
        kept = self._keep()
        work, partition = told()
        try:
            rows, described, notes = self._received(batches, group_range(partition, kept.worker.program.partitions))
            yield from notes
            slices = {**work.slices, **described} if self.stage == 0 else {}
            given = TaskInput(self.stage, partition, slices, rows)
            result = run_task(kept.worker.program, work.assignment, given, kept.worker.storage, kept.replicas, _ids)
        except PenstockError as error:
            yield failed_note(error)
            return
        yield from _answer(kept.worker.program, given, result)

    def _received(
        self, batches: Iterable[pa.RecordBatch], groups: range
    ) -> tuple[pa.Table, Slices, list[pa.RecordBatch]]:
        """The events that came to a task, descriptors of events, and the notes that only pass through.

        The input of the first stage has none of them where the driver itself says what to read.
        """
        if self.ingest is not None:
            return self.ingest.events(batches, groups), {}, []
        events, notes = [EXCHANGE.empty_table()], []
        described: Slices = {}
        for batch in batches:
            if DESCRIPTORS in batch.schema.names:
                for row in batch.column(DESCRIPTORS).to_pylist():
                    described |= unpack_slices(row)
            if "kind" not in batch.schema.names:
                continue
            found, passing = opened(batch)
            events += found
            notes.append(passing)
        return pa.concat_tables(events), described, notes

    def _keep(self) -> _Kept:
        """The program and the replicas of this run, made when this process first serves it."""
        found = _kept.get(self.run)
        if found is None:
            worker: Worker = cloudpickle.loads(self.worker.value)
            folder = worker.local_dir
            shelf = MemoryShelf() if folder is None else DiskShelf(folder, f"{worker.run:020d}")
            _kept.clear()  # a process serves one run at a time
            found = _kept[self.run] = _Kept(worker, Replicas(worker.storage, shelf))
            # Spark's daemon looks for garbage after each task: all that was imported, 40 ms of it, and for nothing.
            gc.freeze()
        return found


def _answer(program: Program, given: TaskInput, result: TaskResult) -> Iterator[pa.RecordBatch]:
    later = sorted({entry for stage in program.stages[given.stage + 1 :] for entry in stage.entries})
    assert given.rows is not None
    # Rows of a step that not the next stage but a later one needs come along through this one.
    along = given.rows.filter(pa.array(np.isin(given.rows.column("step").to_numpy(), later)))
    sent = pa.concat_tables([result.outgoing, along])
    yield from parcels(sent, program.partitions)
    yield control_note(result.control)
