"""One stage on Spark: what a Python worker does with the rows of its partition.

Rows between stages are parcels of events for later stages, or notes: control rows of tasks that are done, which travel
along to the end, and failures. A parcel holds thousands of events for one partition, so that Spark, which handles rows
one by one, has few of them to handle. A worker process keeps program and replicas between tasks.
"""

import base64
import gc
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
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
from penstock.topic_log import in_order
from penstock.topics import Slice

PARCEL, CONTROL, FAILED = 0, 1, 2
SCHEMA = "partition int, kind int, value binary"
_ROWS = pa.schema([("partition", pa.int32()), ("kind", pa.int32()), ("value", pa.binary())])
PARCEL_BYTES = 4 << 20
PARCEL_EVENTS = 64 * 1024
_PACKED = pa.ipc.IpcWriteOptions(compression="lz4")  # bytes are copied many times on their way through Spark
WORK = "penstock.work"
"""The local property of Spark's in which tasks find what the epoch is about."""
DESCRIPTORS = "descriptors"
"""The column of a batch of topics: a row tells the task of a partition what to read."""

Slices = dict[int, tuple[Slice, ...]]
"""What to read of the topics, by the ids of the steps that read them."""
_slices = msgspec.msgpack.Decoder(Slices)


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
    slices: Slices


def pack_work(work: EpochWork) -> str:
    """What the tasks of an epoch are told, as a property that Spark sends along with each of them.

    Not as part of the function that they run: that stays the same, so Spark plans it once and not in each epoch.
    """
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(work), level=1)).decode()


def unpack_work(text: str | None) -> EpochWork:
    """The inverse of pack_work."""
    assert text is not None, "the driver tells every task of an epoch what it is about"
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=EpochWork)


def pack_slices(slices: Slices) -> bytes:
    """What a task is to read of the topics, as a row has it."""
    return msgspec.msgpack.encode(slices)


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
        rows, described, notes = _received(batches)
        yield from notes
        slices = {**work.slices, **described} if self.stage == 0 else {}
        given = TaskInput(self.stage, context.partitionId(), slices, rows)
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


def _received(batches: Iterable[pa.RecordBatch]) -> tuple[pa.Table, Slices, list[pa.RecordBatch]]:
    """The events that came to a task, descriptors of events, and the notes that only pass through.

    The input of the first stage has none of them where the driver itself says what to read.
    """
    events, notes = [EXCHANGE.empty_table()], []
    described: Slices = {}
    for batch in batches:
        if DESCRIPTORS in batch.schema.names:
            for row in batch.column(DESCRIPTORS).to_pylist():
                described |= _slices.decode(row)
        if "kind" not in batch.schema.names:
            continue
        kinds = batch.column("kind").to_numpy()
        values = batch.column("value")
        events += [
            pa.ipc.open_stream(values[i].as_buffer()).read_all() for i in np.flatnonzero(kinds == PARCEL).tolist()
        ]
        notes.append(batch.filter(pa.array(kinds != PARCEL)))
    return pa.concat_tables(events), described, notes


def _answer(program: Program, given: TaskInput, result: TaskResult) -> Iterator[pa.RecordBatch]:
    later = sorted({entry for stage in program.stages[given.stage + 1 :] for entry in stage.entries})
    assert given.rows is not None
    # Rows of a step that not the next stage but a later one needs come along through this one.
    along = given.rows.filter(pa.array(np.isin(given.rows.column("step").to_numpy(), later)))
    sent = pa.concat_tables([result.outgoing, along])
    yield from parcels(sent, program.partitions)
    yield _note(CONTROL, msgspec.json.encode(result.control))


def parcels(sent: pa.Table, partitions: int) -> Iterator[pa.RecordBatch]:
    """Rows of an exchange, packed together by the partition that they belong to."""
    if not sent.num_rows:
        return
    partition = ((sent.column("key_group").to_numpy().astype(np.int64) + 1) * partitions - 1) // KEY_GROUPS
    if partitions > 1:
        order = np.argsort(partition, kind="stable")
        sent, partition = in_order(sent, order), partition[order]
    # Keys and headers are taken to be small; the sizes need not be exact.
    size = np.cumsum(pc.binary_length(sent.column("value")).to_numpy())
    numbers = np.stack([partition, size // PARCEL_BYTES, np.arange(len(partition)) // PARCEL_EVENTS])
    starts = [0, *(np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).any(axis=0)) + 1).tolist(), len(partition)]
    for start, end in pairwise(starts):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, EXCHANGE, options=_PACKED) as writer:
            writer.write_table(sent.slice(start, end - start))
        yield _row(int(partition[start]), PARCEL, sink.getvalue().to_pybytes())


def _row(partition: int, kind: int, value: bytes) -> pa.RecordBatch:
    columns = [pa.array([partition], pa.int32()), pa.array([kind], pa.int32()), pa.array([value], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_ROWS)


def _note(kind: int, value: bytes) -> pa.RecordBatch:
    """A row that is no parcel. It goes to partition 0, which passes it on."""
    return _row(0, kind, value)


def failed_note(error: PenstockError) -> pa.RecordBatch:
    """The row that tells the driver of an error."""
    return _note(FAILED, msgspec.json.encode(as_failed(error)))


def as_failed(error: PenstockError) -> Failed:
    """An error as it travels."""
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
