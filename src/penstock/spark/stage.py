"""One stage on Spark: what a Python worker does with the rows of its partition.

Rows between stages are events for later stages, or notes: control rows of tasks that are done, which travel along to
the end, and failures. A worker process keeps program and replicas between tasks.
"""

import base64
import gc
import zlib
from collections.abc import Iterable, Iterator, Mapping
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
from penstock.spark.packing import pack_error
from penstock.state.keys import KEY_GROUPS
from penstock.state.replica import DiskShelf, MemoryShelf, Replicas
from penstock.storage import Storage
from penstock.task import Program, TaskInput, TaskResult, run_task
from penstock.topics import Slice

EVENT, CONTROL, FAILED = 0, 1, 2
SCHEMA = (
    "partition int, kind int, step int, key_group int, key binary, value binary, timestamp_ms long, "
    "headers array<struct<name: string, value: binary>>, source int, offset long, sequence long"
)
_ROWS = pa.schema(
    [("partition", pa.int32()), ("kind", pa.int32()), *EXCHANGE.set(1, pa.field("key_group", pa.int32()))]
)
ROWS_PER_BATCH = 64 * 1024
WORK = "penstock.work"
"""The local property of Spark's in which tasks find what the epoch is about."""


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
    cause: bytes = b""


class EpochWork(msgspec.Struct, frozen=True):
    """What the tasks of one epoch are told: the state they start from, and what to read of the topics."""

    assignment: Assignment
    slices: dict[int, tuple[Slice, ...]]


def pack_work(work: EpochWork) -> str:
    """What the tasks of an epoch are told, as a property that Spark sends along with each of them.

    Not as part of the function that they run: that stays the same, so Spark plans it once and not in each epoch.
    """
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(work), level=1)).decode()


def unpack_work(text: str | None) -> EpochWork:
    """The inverse of pack_work."""
    assert text is not None, "the driver tells every task of an epoch what it is about"
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=EpochWork)


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

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage; give its events for later stages, its control row, and the notes that came along."""
        kept = self._keep()
        context = TaskContext.get()
        assert context is not None, "a stage runs in a task"
        work = unpack_work(context.getLocalProperty(WORK))
        rows, notes = _received(batches)
        if notes.num_rows:
            yield from notes.to_batches()
        given = TaskInput(self.stage, context.partitionId(), work.slices if self.stage == 0 else {}, rows)
        try:
            result = run_task(kept.worker.program, work.assignment, given, kept.worker.storage, kept.replicas, _ids)
        except PenstockError as error:
            yield failed_note(error)
            return
        yield from _answer(kept.worker.program, given, result)

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


def _received(batches: Iterable[pa.RecordBatch]) -> tuple[pa.Table, pa.Table]:
    """The events that came to a task, and the notes that only pass through. The first stage's input has neither."""
    parts = [batch for batch in batches if "kind" in batch.schema.names]
    table = pa.Table.from_batches(parts, _ROWS)
    events = pa.array(table.column("kind").to_numpy() == EVENT)
    mine = table.filter(events).drop_columns(["partition", "kind"]).cast(EXCHANGE)
    return mine, table.filter(pa.array(table.column("kind").to_numpy() != EVENT))


def _answer(program: Program, given: TaskInput, result: TaskResult) -> Iterator[pa.RecordBatch]:
    later = sorted({entry for stage in program.stages[given.stage + 1 :] for entry in stage.entries})
    assert given.rows is not None
    # Rows of a step that not the next stage but a later one needs come along through this one.
    along = given.rows.filter(pa.array(np.isin(given.rows.column("step").to_numpy(), later)))
    sent = pa.concat_tables([result.outgoing, along])
    if sent.num_rows:
        yield from addressed(sent, program.partitions).to_batches(ROWS_PER_BATCH)
    yield _note(CONTROL, msgspec.json.encode(result.control))


def addressed(sent: pa.Table, partitions: int) -> pa.Table:
    """Rows of an exchange with the partition that each belongs to."""
    groups = sent.column("key_group").to_numpy().astype(np.int32)
    partition = ((groups + 1) * partitions - 1) // KEY_GROUPS
    kinds = np.full(len(groups), EVENT, np.int32)
    sent = sent.set_column(1, "key_group", pa.array(groups))
    return sent.add_column(0, "partition", pa.array(partition)).add_column(1, "kind", pa.array(kinds)).cast(_ROWS)


def _note(kind: int, value: bytes) -> pa.RecordBatch:
    """A row that is no event. It goes to partition 0, which passes it on."""
    row: dict[str, Any] = dict.fromkeys(_ROWS.names)
    return pa.RecordBatch.from_pylist([{**row, "partition": 0, "kind": kind, "value": value}], _ROWS)


def failed_note(error: PenstockError) -> pa.RecordBatch:
    """The row that tells the driver of an error."""
    return _note(FAILED, msgspec.json.encode(_failed(error)))


def _failed(error: PenstockError) -> Failed:
    if isinstance(error, CorruptionError):
        return Failed(type(error).__name__, str(error), error.name, error.found, error.last_good_epoch)
    return Failed(type(error).__name__, str(error), cause=pack_error(error.__cause__))


def read_notes(rows: Iterable[tuple[int, bytes]]) -> tuple[list[ControlRow], list[Failed]]:
    """What the last stage returned: control rows, and failures."""
    found: Mapping[int, list[bytes]] = {CONTROL: [], FAILED: []}
    for kind, value in rows:
        found[kind].append(value)
    controls = [msgspec.json.decode(value, type=ControlRow) for value in found[CONTROL]]
    return controls, [msgspec.json.decode(value, type=Failed) for value in found[FAILED]]
