"""What travels between stages, as rows that Spark shuffles: parcels of events, and notes.

A parcel holds thousands of events for one partition, so that Spark, which handles rows one by one, has few of them to
handle. Notes are the control rows of tasks that are done, which travel along to the end, and failures.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from penstock.epochs.records import ControlRow
from penstock.errors import CorruptionError, PenstockError
from penstock.exchange import SCHEMA as EXCHANGE
from penstock.spark.packing import pack_error
from penstock.state.keys import KEY_GROUPS
from penstock.topic_log import in_order

PARCEL, CONTROL, FAILED = 0, 1, 2
SCHEMA = "partition int, kind int, value binary"
_ROWS = pa.schema([("partition", pa.int32()), ("kind", pa.int32()), ("value", pa.binary())])
PARCEL_BYTES = 4 << 20
PARCEL_EVENTS = 64 * 1024
_PACKED = pa.ipc.IpcWriteOptions(compression="lz4")  # bytes are copied many times on their way through Spark


class Failed(msgspec.Struct, frozen=True):
    """An error of Penstock's that ended a task, as it travels to the driver."""

    kind: str
    message: str
    name: str = ""
    found: str = ""
    last_good_epoch: int | None = None
    cause: bytes = b""


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


def opened(batch: pa.RecordBatch) -> tuple[list[pa.Table], pa.RecordBatch]:
    """The events of all parcels of a batch, and its notes."""
    kinds, values = batch.column("kind").to_numpy(), batch.column("value")
    events = [pa.ipc.open_stream(values[i].as_buffer()).read_all() for i in np.flatnonzero(kinds == PARCEL).tolist()]
    return events, batch.filter(pa.array(kinds != PARCEL))


def _row(partition: int, kind: int, value: bytes) -> pa.RecordBatch:
    columns = [pa.array([partition], pa.int32()), pa.array([kind], pa.int32()), pa.array([value], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_ROWS)


def _note(kind: int, value: bytes) -> pa.RecordBatch:
    """A row that is no parcel. It goes to partition 0, which passes it on."""
    return _row(0, kind, value)


def control_note(control: ControlRow) -> pa.RecordBatch:
    """The row that brings a control row to the driver."""
    return _note(CONTROL, msgspec.json.encode(control))


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
