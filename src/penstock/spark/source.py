"""The streaming source: turns what is new in embedded topics into descriptors, one row for each partition.

Spark asks how far the topics reach, plans a batch between two positions, and starts one task per partition. The rows
of the topics themselves never pass through the JVM: a task reads its own slices.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from penstock.clock import SystemClock
from penstock.storage import open_storage, sub
from penstock.topics import Position, Slice, TopicLog

NAME = "penstock"
SCHEMA = "partition int, descriptor binary"
TICK = "tick"


class SourceOptions(msgspec.Struct, frozen=True):
    """What the source is told: the topics by the names of their steps, from where, and how much at once."""

    broker: str
    topics: dict[str, str]
    start: dict[str, Position]
    partitions: int
    limit: int
    tick_ms: int | None


class Descriptor(msgspec.Struct, frozen=True):
    """What a task of the first stage is to read, and how far the whole epoch reads: by the names of the steps."""

    partition: int
    slices: dict[str, tuple[Slice, ...]]
    positions: dict[str, Position]


class TopicsSource(DataSource):
    """All embedded topics that an application reads, as one streaming source."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return NAME

    def schema(self) -> str:
        """One descriptor for each partition."""
        return SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The reader that Spark plans batches with."""
        return TopicsReader(msgspec.json.decode(self.options["options"], type=SourceOptions))


class _Part(InputPartition):
    def __init__(self, descriptor: bytes) -> None:
        super().__init__(descriptor)


class TopicsReader(DataSourceStreamReader):
    """Plans batches over the logs of topics. Offsets are positions by step, and a count of ticks if there are timers."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._clock = SystemClock()
        self._logs: dict[str, TopicLog] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where the last committed epoch ended."""
        return {**_as_offset(self._options.start), TICK: 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far an epoch from `start` on may read."""
        return {**_as_offset(self._walk(_as_positions(start))[1]), TICK: self._tick(start)}

    def _tick(self, start: Mapping[str, Any]) -> int:
        interval = self._options.tick_ms
        return int(start[TICK]) if interval is None else max(int(start[TICK]), self._clock.now_ms() // interval)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One descriptor for each partition: all of them read the same slices, each its own key groups of them."""
        slices = self._between(_as_positions(start), _as_positions(end))
        everyone = range(self._options.partitions)
        return [_Part(msgspec.json.encode(Descriptor(p, slices, _as_positions(end)))) for p in everyone]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, bytes]]:
        """The descriptor itself."""
        found = msgspec.json.decode(partition.value, type=Descriptor)
        yield found.partition, partition.value

    def _walk(self, start: Mapping[str, Position]) -> tuple[dict[str, tuple[Slice, ...]], dict[str, Position]]:
        slices: dict[str, tuple[Slice, ...]] = {}
        ends: dict[str, Position] = {}
        for step, log in self._open().items():
            found, ends[step] = log.slices(start[step], self._options.limit)
            slices[step] = tuple(found)
        return slices, ends

    def _between(self, start: Mapping[str, Position], end: Mapping[str, Position]) -> dict[str, tuple[Slice, ...]]:
        logs = self._open()
        return {
            step: tuple(logs[step].slices(start[step], end[step].offset - start[step].offset)[0]) for step in logs
        }

    def _open(self) -> dict[str, TopicLog]:
        if self._logs is None:
            broker = open_storage(self._options.broker)
            self._logs = {step: TopicLog(sub(broker, name), name) for step, name in self._options.topics.items()}
        return self._logs


def _as_offset(positions: Mapping[str, Position]) -> dict[str, Any]:
    return {step: f"{at.segment} {at.offset}" for step, at in positions.items()}


def _as_positions(offset: Mapping[str, Any]) -> dict[str, Position]:
    return {step: Position(*map(int, text.split())) for step, text in offset.items() if step != TICK}
