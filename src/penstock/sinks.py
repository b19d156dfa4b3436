"""Sinks: how the outbox of a committed epoch reaches the world.

A sink may be asked to publish the same epoch again, never a different one: what it gets was decided by the commit.
Topics take it exactly once, since a segment of the outbox names its origin; a function of the user's is called again
after a crash with the same epoch, partition and events.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.epochs.records import EpochRecord, OutboxRef
from penstock.errors import CorruptionError, MissingError
from penstock.events import Event
from penstock.failures import DEAD_LETTER
from penstock.parquet import CheckedFile, open_parquet
from penstock.plan import Step, ToFunction, ToTopic
from penstock.state.codec import key_codec
from penstock.storage import Storage
from penstock.topics import ORIGIN, Position, Topic, TopicLog, read_headers

FUNCTION_KEYS = key_codec("canonical")
"""How the outbox of a function keeps keys: in a form that any key comes back from."""


def outbox_origin(history: str, sink: str, epoch: int, stage: int, partition: int) -> str:
    """Who wrote a segment of the outbox, told apart from every other for all time."""
    return f"{history} {sink} {epoch} {stage} {partition}"


@dataclass(frozen=True, slots=True)
class Sinks:
    """All sinks of a plan, on the driver."""

    storage: Storage
    steps: Mapping[str, Step]
    open_topic: Callable[[str], TopicLog]

    def positions(self) -> dict[str, Position]:
        """How far each sink's topic reaches now: what is published later stands behind this."""
        return {name: self._log(name).end() for name, step in self.steps.items() if isinstance(step.work, ToTopic)}

    def publish(self, sink: str, record: EpochRecord) -> None:
        """Bring what an epoch has for a sink to where it belongs."""
        for ref in record.outbox:
            if ref.sink != sink:
                continue
            data, file = self._verified(ref, record.epoch)
            step = self.steps.get(sink)
            if step is not None and isinstance(step.work, ToFunction):
                step.work.fn(record.epoch, ref.partition, list(_events(file.read(), step.work)))
            else:
                origin = file.note(ORIGIN) or ""
                self._log(sink).append_once(data, origin, ref.checksum, record.sinks.get(sink, Position()))

    def _log(self, sink: str) -> TopicLog:
        step = self.steps.get(sink)
        if step is not None and isinstance(step.work, ToTopic):
            return step.work.topic.log
        assert sink.startswith(DEAD_LETTER), f"{sink} is no sink of this plan"
        return self.open_topic(sink.removeprefix(DEAD_LETTER))

    def _verified(self, ref: OutboxRef, epoch: int) -> tuple[bytes, CheckedFile]:
        try:
            data = self.storage.read(ref.name)
            file = open_parquet(ref.name, lambda start, end: data[start:end])
            if file.checksum != ref.checksum:
                raise CorruptionError(ref.name, f"its checksum is {file.checksum}, but {ref.checksum} was committed")
            file.verify()
        except MissingError as error:
            raise CorruptionError(ref.name, "it is missing", epoch - 1) from error
        except CorruptionError as error:
            raise CorruptionError(ref.name, error.found, epoch - 1) from error
        return data, file


def _events(table: pa.Table, work: ToFunction) -> Iterator[Event]:
    headers = read_headers(table.column("headers"))
    columns = (table.column(name).to_pylist() for name in ("key", "value", "timestamp_ms"))
    for index, (key, value, timestamp_ms) in enumerate(zip(*columns, strict=True)):
        decoded: Any = None if key is None else FUNCTION_KEYS.decode(key)
        yield Event(decoded, work.value.decode(value), timestamp_ms, headers[index] if headers else ())


def topics_of(steps: Mapping[str, Step]) -> dict[str, Topic]:
    """The topics that sinks write to, by name."""
    return {s.work.topic.name: s.work.topic for s in steps.values() if isinstance(s.work, ToTopic)}
