"""Embedded topics as a streaming source of Spark's: its offsets are positions, its rows are descriptors.

Invariants:
- No event passes through the source: a row tells the task of one partition which slices of the topics to read.
- The epoch record alone says how far topics were read. Each query begins there, so its own log lives only as long as
  it does, and need not agree with anything after a crash.
"""

import base64
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.dataframe import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from penstock.epochs.records import EpochRecord
from penstock.spark.engine import Given, SparkRunner
from penstock.spark.packing import pack
from penstock.spark.query import EpochQuery
from penstock.spark.stage import SCHEMA, SLICES, Slices, pack_slices
from penstock.topics import Position, TopicLog

_READING = "reading"


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
        """The rows that stages take in."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> "TopicReader":  # noqa: N802 - the name is Spark's
        """The reader of what the options hold."""
        return TopicReader(cloudpickle.loads(base64.b64decode(self.options[_READING])))


@dataclass(slots=True)
class Descriptors(InputPartition):
    """What the task of one partition is to read, by the ids of steps."""

    partition: int
    slices: Slices


class TopicReader(DataSourceStreamReader):
    """Turns positions into descriptors, as many events at once as an epoch takes in."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - the name is Spark's
        """Behind the last committed epoch."""
        return offset_of(self._reading.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """The most that an epoch takes in of each topic."""
        return ReadMaxRows(self._reading.limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - as above
        """Behind the events of the next epoch."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._reading.limit
        begin = positions_of(start)
        return offset_of({name: log.slices(begin[name], most)[1] for name, log in self._reading.logs.items()})

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - the name is Spark's
        """Behind the last event of each topic."""
        return offset_of({name: log.end() for name, log in self._reading.logs.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The same slices for each partition, of which its task reads its own key groups."""
        if start == end:
            return []
        begin, behind = positions_of(start), positions_of(end)
        slices = {
            self._reading.steps[name]: tuple(log.slices(begin[name], behind[name].offset - begin[name].offset)[0])
            for name, log in self._reading.logs.items()
        }
        return [Descriptors(partition, slices) for partition in range(self._reading.partitions)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, bytes]]:
        """One row: the descriptors of a partition."""
        assert isinstance(partition, Descriptors), f"{partition!r} is none of partitions()"
        yield partition.partition, SLICES, pack_slices(partition.slices)


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
    """The streaming query over all topics of an application."""

    def __init__(
        self, spark: SparkSession, runner: SparkRunner, limit: int, on_epoch: Callable[[EpochRecord], None]
    ) -> None:
        program = runner.run.program
        topics = program.topics()
        reading = Reading(
            {name: topic.log for name, topic in topics.items()},
            {step.name: step.id for step in program.steps if step.name in topics},
            runner.run.positions(),
            limit,
            program.partitions,
        )
        spark.dataSource.register(TopicSource)
        reader = spark.readStream.format(TopicSource.name())
        rows = reader.option(_READING, base64.b64encode(pack(reading)).decode()).load()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-query-"))
        self._on_epoch = on_epoch
        super().__init__(runner, rows, self._folder.as_uri(), "topics")

    def stop(self) -> None:
        """Stop between two epochs, and leave no log behind."""
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_in(self, rows: DataFrame, number: int) -> None:
        logged = (self._folder / "offsets" / str(number)).read_bytes().splitlines()
        ends = positions_of(msgspec.json.decode(logged[-1]))
        self._on_epoch(self._runner.epoch(Given(rows, positions=ends, in_place=True)))
