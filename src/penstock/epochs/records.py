"""Epoch records: what is stored of an epoch, and the view of the application that they add up to.

Invariants:
- The creation of `epochs/N.json` is the commit of epoch N. Nothing else is.
- A record says what its epoch changed; the records of all epochs up to N, or a full record and those behind it, make
  up the view as of N.
- A stored record carries a checksum of itself and is verified whenever it is read.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import xxhash

from penstock.errors import CorruptionError
from penstock.state.segments import SegmentRef
from penstock.state.store import NO_EPOCH
from penstock.topics import Position

FORMAT_VERSION = 1

Segments = dict[str, dict[int, tuple[SegmentRef, ...]]]
"""The segments of each partition of each step, oldest first."""


class Counts(msgspec.Struct, frozen=True):
    """How many events a task or an epoch read, sent to sinks, skipped because of an error, and put aside for one."""

    read: int = 0
    written: int = 0
    skipped: int = 0
    dead: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.read + other.read, self.written + other.written, self.skipped + other.skipped, self.dead + other.dead
        )


class OutboxRef(msgspec.Struct, frozen=True):
    """What one partition gave to a sink in an epoch."""

    sink: str
    stage: int
    partition: int
    name: str
    rows: int
    size_bytes: int
    checksum: str


class Compacted(msgspec.Struct, frozen=True):
    """A run of segments that one segment now stands for."""

    segment: SegmentRef
    replaced: tuple[str, ...]


class ControlRow(msgspec.Struct, frozen=True):
    """What a task returns: the names of all it wrote, and what it counted. Nothing of it holds before the commit."""

    stage: int
    partition: int
    deltas: dict[str, SegmentRef]
    compacted: dict[str, Compacted]
    outbox: tuple[OutboxRef, ...]
    highest_ms: dict[str, int]
    counts: Counts


class Changes(msgspec.Struct, frozen=True):
    """What an epoch changed in the segments of one partition: first compaction, then the epoch's own delta."""

    step: str
    partition: int
    delta: SegmentRef | None
    compacted: Compacted | None


class SparkBatch(msgspec.Struct, frozen=True):
    """A batch of a streaming query of Spark's that an epoch took in: its number, and its offsets as Spark logs them."""

    id: int
    offsets: str


class EpochRecord(msgspec.Struct, frozen=True):
    """What one epoch did. `clock_ms` is the processing time of the whole epoch; `watermark_ms` held while it ran."""

    epoch: int
    history: str
    run: int
    write_id: str
    clock_ms: int
    watermark_ms: int | None
    compacted_ms: int
    partitions: int
    steps: dict[str, str]
    positions: dict[str, Position]
    highest_ms: dict[str, int]
    changes: tuple[Changes, ...]
    outbox: tuple[OutboxRef, ...]
    sinks: dict[str, Position]
    counts: Counts
    batch: SparkBatch | None = None


class View(msgspec.Struct, frozen=True):
    """The application as of an epoch: everything that later epochs need to know of all before them."""

    history: str
    epoch: int = NO_EPOCH
    clock_ms: int = 0
    compacted_ms: int = 0
    partitions: int = 0
    watermark_ms: int | None = None
    steps: dict[str, str] = {}
    positions: dict[str, Position] = {}
    highest_ms: dict[str, int] = {}
    segments: Segments = {}
    counts: Counts = Counts()
    batch: SparkBatch | None = None

    def of(self, step: str, partition: int) -> tuple[SegmentRef, ...]:
        """The segments of one partition of a step, oldest first."""
        return self.segments.get(step, {}).get(partition, ())

    def names(self) -> set[str]:
        """The names of all segments."""
        return {ref.name for parts in self.segments.values() for refs in parts.values() for ref in refs}


def after(view: View, record: EpochRecord) -> View:
    """The view as of a record, from the view as of the epoch before it."""
    assert record.epoch == view.epoch + 1, f"record {record.epoch} does not follow epoch {view.epoch}"
    segments = dict(view.segments)
    for change in record.changes:
        parts = segments[change.step] = dict(segments.get(change.step, {}))
        refs = _compacted(parts.get(change.partition, ()), change.compacted)
        parts[change.partition] = refs if change.delta is None else (*refs, change.delta)
    highest = {**view.highest_ms, **record.highest_ms}
    return View(
        history=record.history,
        epoch=record.epoch,
        clock_ms=record.clock_ms,
        compacted_ms=record.compacted_ms,
        partitions=record.partitions,
        watermark_ms=next_watermark(view.watermark_ms, highest),
        steps={**view.steps, **record.steps},
        positions={**view.positions, **record.positions},
        highest_ms=highest,
        segments=segments,
        counts=view.counts + record.counts,
        batch=record.batch or view.batch,
    )


def _compacted(refs: tuple[SegmentRef, ...], compacted: Compacted | None) -> tuple[SegmentRef, ...]:
    if compacted is None:
        return refs
    names = [ref.name for ref in refs]
    start = names.index(compacted.replaced[0])
    end = start + len(compacted.replaced)
    assert tuple(names[start:end]) == compacted.replaced, "a compaction replaces neighbours, in order"
    return (*refs[:start], compacted.segment, *refs[end:])


def next_watermark(before_ms: int | None, highest_ms: Mapping[str, int]) -> int | None:
    """The watermark that the next epoch runs under: the slowest source's highest event time, never going back.

    >>> next_watermark(None, {}), next_watermark(None, {"a": 5, "b": 9}), next_watermark(7, {"a": 5, "b": 9})
    (None, 5, 7)
    """
    if not highest_ms:
        return before_ms
    slowest = min(highest_ms.values())
    return slowest if before_ms is None else max(before_ms, slowest)


class Format(msgspec.Struct, frozen=True):
    """The first thing stored: what all the rest is to be read as, and which history this is."""

    version: int
    key_groups: int
    history: str


Stored = TypeVar("Stored", Format, EpochRecord, View)


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    body: msgspec.Raw


def pack(value: Format | EpochRecord | View) -> bytes:
    """A record as stored: JSON, with a checksum of its body."""
    body = msgspec.json.encode(value)
    return b'{"checksum":"%s","body":%s}' % (xxhash.xxh3_64_hexdigest(body).encode(), body)


def unpack(name: str, data: bytes, kind: type[Stored], last_good_epoch: int | None = None) -> Stored:
    """The inverse of pack; CorruptionError if the bytes are not those that were packed."""
    if last_good_epoch == NO_EPOCH:
        last_good_epoch = None
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.body)
        if xxhash.xxh3_64_hexdigest(body) != envelope.checksum or data != b'{"checksum":"%s","body":%s}' % (
            envelope.checksum.encode(),
            body,
        ):
            raise CorruptionError(name, "it does not match its checksum", last_good_epoch)
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError(name, f"it cannot be read ({error})", last_good_epoch) from error


def fold(view: View, records: Iterable[EpochRecord]) -> View:
    """The view after several records in a row."""
    for record in records:
        view = after(view, record)
    return view
