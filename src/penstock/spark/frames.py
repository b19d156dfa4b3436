"""Streaming DataFrames as sources: `foreachBatch` hands each batch to an epoch, which commits it with its state.

Invariants:
- An epoch record holds the number and the offsets of the batch that it took in. A batch that was committed before a
  crash is not computed again; one that does not follow the last is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import TimestampType

from penstock import names
from penstock.epochs.protocol import Publish, Refuse, decide_batch
from penstock.epochs.records import EpochRecord, SparkBatch
from penstock.errors import InvalidError, PenstockError, StorageError
from penstock.exchange import SCHEMA as EXCHANGE
from penstock.plan import FrameColumns
from penstock.spark.engine import Given, Places, SparkRunner
from penstock.spark.lag import Lag
from penstock.spark.query import EpochQuery, Host
from penstock.spark.stage import PARCEL_BYTES, PARCEL_EVENTS, SCHEMA, failed_note, parcels
from penstock.state.codec import value_codec
from penstock.state.keys import encode_key, encode_text_keys, key_groups
from penstock.topics import HEADERS_TYPE

ROWS_PER_TASK_BITS = 33
_VALUES = value_codec("msgpack")


@dataclass(frozen=True, slots=True)
class Ingest:
    """Turns rows of a DataFrame into rows of an exchange, in a Python worker."""

    step: int
    partitions: int
    encoded: bool
    ordered: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows with their keys in canonical form, in parcels for their partitions."""
        sent = 0
        for table in _gathered(batches):
            try:
                rows = self._rows(table, sent)
            except PenstockError as error:
                yield failed_note(error)
                return
            sent += rows.num_rows
            yield from parcels(rows, self.partitions)

    def _rows(self, table: pa.Table, sent: int) -> pa.Table:
        count = table.num_rows
        sequence = np.arange(sent, sent + count)
        keys, groups = _canonical(table.column("key").combine_chunks())
        values = table.column("value").combine_chunks()
        if not self.encoded:
            values = pa.array([_VALUES.checked_encode(value) for value in values.to_pylist()], pa.binary())
        return pa.Table.from_arrays(
            [
                pa.array(np.full(count, self.step, np.int32)),
                pa.array(groups),
                keys,
                values.cast(pa.binary()),
                table.column("timestamp_ms"),
                pa.nulls(count, HEADERS_TYPE),
                pa.array(np.full(count, self.step, np.int32)),
                table.column("order").fill_null(-1) if self.ordered else pa.array(sequence + _first_order()),
                pa.array(sequence),
            ],
            schema=EXCHANGE,
        )


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same rows in fewer tables: Spark's batches are short, and each table costs something whatever its length."""
    found: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        found.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= PARCEL_EVENTS or size_bytes >= PARCEL_BYTES:
            yield pa.Table.from_batches(found)
            found, rows, size_bytes = [], 0, 0
    if found:
        yield pa.Table.from_batches(found)


def _first_order() -> int:
    """Where the numbers of this task's rows begin, so that rows have an order where nobody gave them one."""
    context = TaskContext.get()
    assert context is not None, "rows are ingested in a task"
    return context.partitionId() << ROWS_PER_TASK_BITS


def _canonical(keys: pa.Array) -> tuple[pa.Array, Any]:
    """The canonical forms of a column of keys, and their groups; no key stays none, in the first group."""
    encoded = keys.dictionary_encode()
    distinct = encoded.dictionary
    if pa.types.is_null(keys.type):
        return pa.nulls(len(keys), pa.binary()), np.zeros(len(keys), np.uint16)
    if pa.types.is_string(distinct.type):
        forms = encode_text_keys(distinct)
    else:
        forms = pa.array([encode_key(key) for key in distinct.to_pylist()], pa.binary())
    groups = np.append(key_groups(forms.to_pylist()), np.uint16(0))
    places = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return forms.take(encoded.indices), groups[places]


def rows_of(frame: DataFrame, step: int, columns: FrameColumns, partitions: int) -> DataFrame:
    """A streaming DataFrame as rows of an exchange."""
    for name in (columns.key, columns.timestamp, columns.order):
        if name is not None and name not in frame.columns:
            raise InvalidError(f"the DataFrame has no column {name!r}; it has {', '.join(frame.columns)}")
    value = columns.value
    names_ = frame.columns if value is None else value
    content = F.col(value) if isinstance(value, str) else F.struct(*names_)
    chosen = frame.select(
        (F.col(columns.key) if columns.key else F.lit(None).cast("string")).alias("key"),
        (content.cast("binary") if columns.encoded else content).alias("value"),
        _milliseconds(frame, columns.timestamp).alias("timestamp_ms"),
        (F.col(columns.order).cast("long") if columns.order else F.lit(None).cast("long")).alias("order"),
    )
    ingest = Ingest(step, partitions, columns.encoded, columns.order is not None)
    return chosen.mapInArrow(ingest, SCHEMA)


def _milliseconds(frame: DataFrame, column: str | None) -> Any:
    if column is None:
        return F.unix_millis(F.current_timestamp())
    if isinstance(frame.schema[column].dataType, TimestampType):
        return F.unix_millis(F.col(column))
    return F.col(column).cast("long")


class FrameQuery(EpochQuery):
    """The streaming query over all DataFrames of an application."""

    def __init__(
        self,
        spark: SparkSession,
        runner: SparkRunner,
        host: Host,
        frames: Mapping[int, tuple[DataFrame, FrameColumns]],
        places: Places,
    ) -> None:
        parts = [rows_of(df, step, columns, runner.partitions) for step, (df, columns) in frames.items()]
        staged = runner.first_stage(reduce(DataFrame.unionByName, parts), in_place=False)
        super().__init__(runner, host, staged, places.checkpoint, "frames")
        self._spark = spark
        self._storage = places.storage
        self._lag: Lag | None = None

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        """Let Spark begin, and listen to how far it is."""
        query = super().start(trigger)
        self._lag = Lag(str(query.runId))
        self._spark.streams.addListener(self._lag)
        return query

    @property
    def events_behind(self) -> int | None:
        """How many events the sources hold that are not taken in; None if they do not tell."""
        return None if self._lag is None else self._lag.events

    def stop(self) -> None:
        """Stop between two epochs, and listen no more."""
        try:
            super().stop()
        finally:
            if self._lag is not None:
                self._spark.streams.removeListener(self._lag)

    def _take_in(self, rows: DataFrame, number: int) -> EpochRecord | None:
        batch = SparkBatch(number, self._offsets(number))
        decision = decide_batch(batch, self._runner.run.coordinator.view.batch)
        if isinstance(decision, Refuse):
            raise InvalidError(decision.reason)
        if isinstance(decision, Publish):
            return None  # the run published its last epoch when it started
        record = self._runner.epoch(Given(rows, batch))
        if record.batch != batch:
            raise StorageError(f"epoch {record.epoch} was committed by another run with other events; start again")
        return record

    def _offsets(self, number: int) -> str:
        """What Spark has logged as the offsets of a batch, without the line of times and settings before them."""
        text = self._storage.read(f"{names.SPARK}/offsets/{number}").decode()
        return "\n".join(text.splitlines()[2:])
