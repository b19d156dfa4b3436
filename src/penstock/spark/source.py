"""Embedded topics as a streaming source of Spark's: its offsets are positions, its rows are descriptors.

Invariants:
- No event passes through the source: a row tells the task of one partition which slices of the topics to read.
- The epoch record alone says how far topics were read. Each query begins there, so its own log lives only as long as
  it does, and need not agree with anything after a crash.
- A batch is taken in only where the last epoch ended: whoever else committed one meanwhile, nothing is read twice.
"""

import base64
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.dataframe import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from penstock.epochs.records import EpochRecord
from penstock.errors import PenstockError, StorageError
from penstock.spark.engine import Given, SparkRunner, carried
from penstock.spark.packing import pack
from penstock.spark.query import EpochQuery, Host
from penstock.spark.work import DESCRIPTORS, Slices, pack_slices
from penstock.topics import Position, TopicLog

ROWS_AT_ONCE = 64 * 1024
_READING = "reading"
_ROWS = pa.schema([(DESCRIPTORS, pa.binary())])


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read: logs by the names of their steps, those steps' ids, from where, and how much at once at most."""

    logs: Mapping[str, TopicLog]
    steps: Mapping[str, int]
    start: Mapping[str, Position]
    limit: int
    partitions: int


class TopicSource(DataSource):
    """The source, as Spark makes it in its planner process: options are all that it is given."""

    @classmethod
    def name(cls) -> str:
        """Under which `readStream.format` finds it."""
        return "penstock"

    def schema(self) -> str:
        """Descriptors."""
        return f"{DESCRIPTORS} binary"

    def streamReader(self, schema: StructType) -> "TopicReader":  # noqa: N802 - the name is Spark's
        """The reader of what the options hold."""
        return TopicReader(cloudpickle.loads(base64.b64decode(self.options[_READING])))


@dataclass(slots=True)
class Descriptors(InputPartition):
    """What the task of one partition is to read, by the ids of steps; `events`: as how many Spark is to count it."""

    slices: Slices
    events: int


class TopicReader(DataSourceStreamReader):
    """Turns positions into descriptors, as many events at once as an epoch takes in."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._latest = dict(reading.start)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - the name is Spark's
        """Behind the last committed epoch."""
        return offset_of(self._reading.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """The most that an epoch takes in of each topic."""
        return ReadMaxRows(self._reading.limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - as above
        """Behind the events of the next epoch."""
        assert limit == self.getDefaultReadLimit(), f"{limit} belongs to a trigger that is never asked for"
        begin, most = positions_of(start), self._reading.limit
        ends: dict[str, Position] = {}
        with _carrying():
            for name, log in self._reading.logs.items():
                ends[name] = end = log.slices(begin[name], most)[1]
                # Less than was asked for is all there is: the end of the topic needs no second look.
                self._latest[name] = end if end.offset < begin[name].offset + most else log.end()
        return offset_of(ends)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - the name is Spark's
        """Behind the last event of each topic."""
        return offset_of(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The same slices for each partition, of which its task reads its own key groups."""
        begin, behind = positions_of(start), positions_of(end)
        counts = {name: behind[name].offset - begin[name].offset for name in self._reading.logs}
        total, partitions = sum(counts.values()), self._reading.partitions
        if not total:
            return []
        with _carrying():
            slices = {
                self._reading.steps[name]: tuple(log.slices(begin[name], counts[name])[0])
                for name, log in self._reading.logs.items()
            }
        described = sum(one.end - one.start for parts in slices.values() for one in parts)
        assert described == total, f"{described} events are described, {total} are between {start} and {end}"
        shares = [total * place // partitions for place in range(partitions + 1)]
        return [Descriptors(slices, there - here) for here, there in pairwise(shares)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A row of descriptors; and others, without content and soon dropped, by which Spark counts the events."""
        assert isinstance(partition, Descriptors), f"{partition!r} is none of partitions()"
        yield _row_batch(pa.array([pack_slices(partition.slices)], pa.binary()))
        for first in range(1, partition.events, ROWS_AT_ONCE):
            yield _row_batch(pa.nulls(min(ROWS_AT_ONCE, partition.events - first), pa.binary()))

    def stop(self) -> None:
        """The planner process ends: that Spark has hung up is nothing to print a traceback for."""
        sys.stderr = None


def _row_batch(rows: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows], schema=_ROWS)


@contextmanager
def _carrying() -> Iterator[None]:
    """Between the planner process and the driver there are only words: let them carry an error of ours."""
    try:
        yield
    except PenstockError as error:
        raise RuntimeError(carried(error)) from None


def offset_of(positions: Mapping[str, Position]) -> dict[str, Any]:
    """Positions as an offset of Spark's.

    >>> offset_of({"from orders": Position(4, 7)})
    {'from orders': {'segment': 4, 'offset': 7}}
    """
    return {name: msgspec.to_builtins(position) for name, position in positions.items()}


def positions_of(offset: Any) -> dict[str, Position]:
    """The inverse of offset_of."""
    return msgspec.convert(offset, dict[str, Position])


class TopicQuery(EpochQuery):
    """The streaming query over all topics of an application, at most `limit` events of each in a batch."""

    def __init__(self, spark: SparkSession, runner: SparkRunner, host: Host, limit: int) -> None:
        program = runner.run.program
        topics = program.topics()
        self._reached = runner.run.positions()
        reading = Reading(
            logs={name: topic.log for name, topic in topics.items()},
            steps={step.name: step.id for step in program.steps if step.name in topics},
            start=self._reached,
            limit=limit,
            partitions=runner.partitions,
        )
        spark.dataSource.register(TopicSource)
        source = spark.readStream.format(TopicSource.name())
        rows = source.option(_READING, base64.b64encode(pack(reading)).decode()).load()
        staged = runner.first_stage(rows.where(rows[DESCRIPTORS].isNotNull()), in_place=True)
        self._log = TemporaryDirectory(prefix="penstock-query-", ignore_cleanup_errors=True)
        super().__init__(runner, host, staged, Path(self._log.name).as_uri(), "topics")

    def stop(self) -> None:
        """Stop between two epochs, and leave no log behind."""
        try:
            super().stop()
        finally:
            self._log.cleanup()

    def _take_in(self, rows: DataFrame, number: int) -> EpochRecord:
        self._agree()
        logged = (Path(self._log.name) / "offsets" / str(number)).read_bytes().splitlines()
        ends = positions_of(msgspec.json.decode(logged[-1]))
        record = self._runner.epoch(Given(rows, positions=ends))
        self._reached = ends
        self._agree()
        return record

    def _agree(self) -> None:
        """Raise StorageError unless the last batch ends where the last epoch does."""
        coordinator = self._runner.run.coordinator
        if self._runner.run.positions() != self._reached:
            raise StorageError(
                f"epoch {coordinator.view.epoch} was committed by another run with other events; start again"
            )
