"""Streaming DataFrames as sources: `foreachBatch` hands each batch to an epoch, which commits it with its state.

Invariants:
- An epoch record holds the number and the offsets of the batch that it took in. A batch that was committed before a
  crash is not computed again; one that does not follow the last is refused.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType, DataType, StringType, TimestampType

from penstock import names
from penstock.epochs.protocol import Publish, Refuse, decide_batch
from penstock.epochs.records import EpochRecord, SparkBatch
from penstock.errors import InvalidError, StorageError
from penstock.plan import FrameColumns
from penstock.spark.engine import Given, Places, SparkRunner
from penstock.spark.ingest import Ingest, Parcelling
from penstock.spark.lag import Lag
from penstock.spark.parcels import SCHEMA
from penstock.spark.query import EpochQuery, Host
from penstock.state.keys import KEY_GROUPS

_TAGS: dict[DataType, bytes] = {StringType(): b"\x02", BinaryType(): b"\x01"}
"""What the canonical forms of keys begin with whose partition Spark can work out itself."""


def columns_of(frame: DataFrame, columns: FrameColumns) -> DataFrame:
    """What an event is made of: key, value, and time and order where there are columns of them."""
    for name in (columns.key, columns.timestamp, columns.order):
        if name is not None and name not in frame.columns:
            raise InvalidError(f"the DataFrame has no column {name!r}; it has {', '.join(frame.columns)}")
    value = columns.value
    names_ = frame.columns if value is None else value
    content = F.col(value) if isinstance(value, str) else F.struct(*names_)
    chosen = {
        "key": F.col(columns.key) if columns.key else F.lit(None).cast("string"),
        "value": content.cast("binary") if columns.encoded else content,
    }
    if columns.timestamp is not None:
        chosen["timestamp_ms"] = _milliseconds(frame, columns.timestamp)
    if columns.order is not None:
        chosen["order"] = F.col(columns.order).cast("long")
    return frame.select(*(column.alias(name) for name, column in chosen.items()))


def _milliseconds(frame: DataFrame, column: str) -> Any:
    is_time = isinstance(frame.schema[column].dataType, TimestampType)
    return F.unix_millis(F.col(column)) if is_time else F.col(column).cast("long")


def placed(rows: DataFrame, partitions: int) -> DataFrame:
    """The rows of a batch, each brought to the partition of its key by Spark, as state/keys.py says where that is.

    Rows without an order have that in which Spark read them.
    """
    key = F.col("key")
    escaped = F.replace(key.cast("string"), F.lit("\x01"), F.lit("\x01\x02"))
    escaped = F.replace(escaped, F.lit("\x00"), F.lit("\x01\x01"))
    form = F.concat(F.lit(_TAGS[rows.schema["key"].dataType]), escaped.cast("binary"), F.lit(b"\x00"))
    group = F.pmod(F.xxhash64(form), F.lit(KEY_GROUPS))
    partition = F.floor(((group + 1) * partitions - 1) / KEY_GROUPS).cast("int")
    if "order" not in rows.columns:
        rows = rows.withColumn("order", F.monotonically_increasing_id())
    rows = rows.withColumn("partition", F.when(key.isNull(), F.lit(0)).otherwise(partition))
    # Spark measures a batch of rows anew with each row and column that it adds: none comes along that is not needed.
    return rows.repartitionById(partitions, "partition").drop("partition")


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
        chosen = {step: columns_of(frame, columns) for step, (frame, columns) in frames.items()}
        ingests = {step: Ingest(step, columns.encoded) for step, (_, columns) in frames.items()}
        self._placed: Ingest | None = None
        rows, *more = chosen.values()
        if not more and rows.schema["key"].dataType in _TAGS:
            (self._placed,) = ingests.values()
        else:
            parts = [
                one.mapInArrow(Parcelling(ingests[step], runner.partitions), SCHEMA) for step, one in chosen.items()
            ]
            rows = runner.first_stage(reduce(DataFrame.unionByName, parts), in_place=False)
        super().__init__(runner, host, rows, places.checkpoint, "frames")
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
        if self._placed is not None:
            there = placed(rows, self._runner.partitions)
            rows = self._runner.first_stage(there, in_place=True, ingest=self._placed)
        record = self._runner.epoch(Given(rows, batch))
        if record.batch != batch:
            raise StorageError(f"epoch {record.epoch} was committed by another run with other events; start again")
        return record

    def _offsets(self, number: int) -> str:
        """What Spark has logged as the offsets of a batch, without the line of times and settings before them."""
        text = self._storage.read(f"{names.SPARK}/offsets/{number}").decode()
        return "\n".join(text.splitlines()[2:])
