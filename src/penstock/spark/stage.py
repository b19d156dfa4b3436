"""One stage on Spark: what a Python worker does with the rows of its partition.

Rows between stages are of three kinds: events for the next stage, control rows of tasks that are done (they travel
along to the end), and descriptors, which only the first stage sees. A worker keeps program and replicas between tasks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.core.broadcast import Broadcast

from penstock.clock import random_ids
from penstock.epochs.coordinator import Assignment
from penstock.epochs.records import ControlRow
from penstock.errors import CorruptionError, PenstockError
from penstock.exchange import SCHEMA as EXCHANGE
from penstock.spark.source import Descriptor
from penstock.state.keys import KEY_GROUPS
from penstock.state.replica import DiskShelf, MemoryShelf, Replicas
from penstock.storage import Storage
from penstock.task import Program, TaskInput, TaskResult, run_task
from penstock.topics import Position

EVENT, CONTROL, FAILED, POSITIONS = 0, 1, 2, 3
SCHEMA = (
    "partition int, kind int, step int, key_group int, key binary, value binary, timestamp_ms long, "
    "headers array<struct<name: string, value: binary>>, source int, offset long, sequence long"
)
_ROWS = pa.schema(
    [("partition", pa.int32()), ("kind", pa.int32()), *EXCHANGE.set(1, pa.field("key_group", pa.int32()))]
)
ROWS_PER_BATCH = 64 * 1024


@dataclass(frozen=True, slots=True)
class Worker:
    """What every task of a run knows; sent to the workers once."""

    program: Program
    storage: Storage
    local_dir: Path | None
    run: int


class Failed(msgspec.Struct, frozen=True):
    """An error of Penstock's that ended a task, as it travels to the driver."""

    kind: str
    message: str
    name: str = ""
    found: str = ""
    last_good_epoch: int | None = None


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
    assignment: bytes

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage; give its events for later stages, its control row, and those that came along."""
        kept = self._keep()
        worker = kept.worker
        assignment = msgspec.msgpack.decode(self.assignment, type=Assignment)
        rows = pa.Table.from_batches(batches) if self.stage else None
        passed = None if rows is None else rows.filter(pa.array(rows.column("kind").to_numpy() != EVENT))
        if passed is not None and passed.num_rows:
            yield from passed.to_batches()
        try:
            given, positions = self._given(worker.program, rows, batches)
            result = run_task(worker.program, assignment, given, worker.storage, kept.replicas, _ids)
        except PenstockError as error:
            yield _note(-1, FAILED, msgspec.json.encode(_failed(error)))
            return
        yield from self._answer(worker.program, given, result, positions)

    def _keep(self) -> _Kept:
        """The program and the replicas of this run, made when this process first serves it."""
        found = _kept.get(self.run)
        if found is None:
            worker: Worker = cloudpickle.loads(self.worker.value)
            folder = worker.local_dir
            shelf = MemoryShelf() if folder is None else DiskShelf(folder, f"{worker.run:020d}")
            _kept.clear()  # a process serves one run at a time
            found = _kept[self.run] = _Kept(worker, Replicas(worker.storage, shelf))
        return found

    def _given(
        self, program: Program, rows: pa.Table | None, batches: Iterable[pa.RecordBatch]
    ) -> tuple[TaskInput, dict[str, Position]]:
        if rows is None:
            return self._described(program, batches)
        partition = TaskContext.get().partitionId()  # type: ignore[union-attr]
        events = rows.filter(pa.array(rows.column("kind").to_numpy() == EVENT)).drop_columns(["partition", "kind"])
        return TaskInput(self.stage, partition, {}, events.cast(EXCHANGE)), {}

    def _described(
        self, program: Program, batches: Iterable[pa.RecordBatch]
    ) -> tuple[TaskInput, dict[str, Position]]:
        [raw] = [value for batch in batches for value in batch.column("descriptor").to_pylist()]
        found = msgspec.json.decode(raw, type=Descriptor)
        ids = {step.name: step.id for step in program.steps}
        slices = {ids[name]: parts for name, parts in found.slices.items()}
        empty = EXCHANGE.empty_table()
        return TaskInput(0, found.partition, slices, empty), found.positions

    def _answer(
        self, program: Program, given: TaskInput, result: TaskResult, positions: dict[str, Position]
    ) -> Iterator[pa.RecordBatch]:
        # Rows of a step that a later stage but the next needs come along through the next one.
        sent = result.outgoing
        if given.rows is not None and self.stage:
            later = _needed_later(program, self.stage)
            sent = pa.concat_tables([sent, given.rows.filter(pa.array(np.isin(given.rows.column("step"), later)))])
        if sent.num_rows and self.stage + 1 < len(program.stages):
            yield from _addressed(sent, program.partitions).to_batches(ROWS_PER_BATCH)
        if self.stage == 0 and given.partition == 0:
            yield _note(0, POSITIONS, msgspec.json.encode(positions))
        yield _note(given.partition, CONTROL, msgspec.json.encode(result.control))


def _needed_later(program: Program, stage: int) -> list[int]:
    return sorted({entry for later in program.stages[stage + 1 :] for entry in later.entries})


def _addressed(sent: pa.Table, partitions: int) -> pa.Table:
    """Rows of an exchange with the partition that each belongs to."""
    groups = sent.column("key_group").to_numpy().astype(np.int32)
    partition = ((groups + 1) * partitions - 1) // KEY_GROUPS
    kinds = np.full(len(groups), EVENT, np.int32)
    sent = sent.set_column(1, "key_group", pa.array(groups))
    return sent.add_column(0, "partition", pa.array(partition)).add_column(1, "kind", pa.array(kinds)).cast(_ROWS)


def _note(partition: int, kind: int, value: bytes) -> pa.RecordBatch:
    """A row that is no event."""
    row: dict[str, Any] = {name: None for name in _ROWS.names}
    return pa.RecordBatch.from_pylist([{**row, "partition": max(0, partition), "kind": kind, "value": value}], _ROWS)


def _failed(error: PenstockError) -> Failed:
    if isinstance(error, CorruptionError):
        return Failed(type(error).__name__, str(error), error.name, error.found, error.last_good_epoch)
    return Failed(type(error).__name__, str(error))


def read_answers(rows: Iterable[Any]) -> tuple[list[ControlRow], dict[str, Position], list[Failed]]:
    """What the last stage returned: control rows, how far the sources were read, failures."""
    controls: list[ControlRow] = []
    positions: dict[str, Position] = {}
    failures: list[Failed] = []
    for kind, value in rows:
        if kind == CONTROL:
            controls.append(msgspec.json.decode(value, type=ControlRow))
        elif kind == POSITIONS:
            positions = msgspec.json.decode(value, type=dict[str, Position])
        else:
            failures.append(msgspec.json.decode(value, type=Failed))
    return controls, positions, failures
