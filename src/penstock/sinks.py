"""Sinks: how the outbox of a committed epoch reaches the world.

A sink may be asked to publish the same epoch again, never a different one: what it gets was decided by the commit.
Topics take it exactly once, since a segment of the outbox names its origin; a function of the user's is called again
after a crash with the same epoch, partition and events.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.epochs.records import EpochRecord, OutboxRef
from penstock.errors import CorruptionError, InvalidError, MissingError
from penstock.events import Event
from penstock.failures import unpublished
from penstock.files import write_epoch
from penstock.parquet import CheckedFile, open_parquet
from penstock.plan import DEAD_LETTER, Step, ToFiles, ToFunction, ToTopic
from penstock.state.codec import Codec
from penstock.state.key_codecs import key_codec
from penstock.storage import Storage
from penstock.topics import ORIGIN, Position, TopicLog, read_headers

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

    def positions(self, sinks: Iterable[str]) -> dict[str, Position]:
        """How far the topics of these sinks reach now: what is published later stands behind this."""
        logs = {sink: self._log(sink) for sink in sorted(sinks)}
        return {sink: log.end() for sink, log in logs.items() if log is not None}

    def publish(self, sink: str, record: EpochRecord) -> None:
        """Bring what an epoch has for a sink to where it belongs."""
        if sink not in self.steps and not sink.startswith(DEAD_LETTER):
            raise InvalidError(
                f"epoch {record.epoch} is committed, but what it has for {sink!r} is not published, and the plan has "
                f"no such sink any more; start once with the sink, and take it out afterwards"
            )
        # One after the other: memory that one took is there for the next, and need not be asked for again.
        parts = ((ref, *self._verified(ref, record.epoch)) for ref in record.outbox if ref.sink == sink)
        work = self.steps[sink].work if sink in self.steps else None
        log = self._log(sink)
        if isinstance(work, ToFiles):
            events = [event for _, _, file in parts for event in _events(file.read(), work.value)]
            write_epoch(work.folder, f"{record.epoch:020d}-{record.history[:8]}", work.format, events)
        elif isinstance(work, ToFunction):
            for ref, _, file in parts:
                events = list(_events(file.read(), work.value))
                try:
                    work.fn(record.epoch, ref.partition, events)
                except Exception as error:
                    raise unpublished(sink, work.fn, error, record.epoch, ref.partition) from error
        elif log is not None:
            for ref, data, file in parts:
                log.append_once(data, file.note(ORIGIN) or "", ref.checksum, record.sinks.get(sink, Position()))

    def check(self, records: Iterable[EpochRecord]) -> None:
        """Make sure that what these epochs published still stands: the last segment of a topic has none to miss it."""
        ends: dict[str, int] = {}
        for record in records:
            for sink, since in record.sinks.items():
                ends[sink] = since.offset + sum(ref.rows for ref in record.outbox if ref.sink == sink)
        for sink, end in ends.items():
            log = self._log(sink) if sink in self.steps else None
            if log is not None:
                log.require(end)

    def _log(self, sink: str) -> TopicLog | None:
        """The log that a sink appends to; None for a sink that is no topic."""
        step = self.steps.get(sink)
        if step is not None:
            return step.work.topic.log if isinstance(step.work, ToTopic) else None
        assert sink.startswith(DEAD_LETTER), f"{sink} is no sink of this plan, and was let through"
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


def _events(table: pa.Table, codec: Codec) -> Iterator[Event]:
    headers = read_headers(table.column("headers"))
    columns = (table.column(name).to_pylist() for name in ("key", "value", "timestamp_ms"))
    for index, (key, value, timestamp_ms) in enumerate(zip(*columns, strict=True)):
        decoded: Any = None if key is None else FUNCTION_KEYS.decode(key)
        yield Event(decoded, codec.decode(value), timestamp_ms, headers[index] if headers else ())
