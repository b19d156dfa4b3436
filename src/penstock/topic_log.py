"""The log of an embedded topic: an append-only row of checked Parquet segments, in a folder or an object store.

Invariants:
- Offsets are dense: a segment is named by its first offset, so the name of the next one is known without listing.
- A segment is created if absent and never changed: two writers cannot take one offset.
- Rows of a segment are sorted by key group, stably: the events of a key stand in the order in which they were sent.
- A segment says who wrote it: writing the same again is recognised, and is no second copy.
- The end of the log is told from a segment that is missing: nothing is passed over in silence.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import CorruptionError, MissingError, StorageError
from penstock.parquet import CheckedFile, open_parquet, write_parquet
from penstock.storage import Storage, settle

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEADERS_TYPE = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("key_group", pa.uint16()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp_ms", pa.int64()),
        ("headers", HEADERS_TYPE),
    ]
)
_HEADER_NAMES = SCHEMA.names.index("headers")  # where the names of headers are among the columns of a file
ORIGIN = "penstock.origin"
ROWS_PER_GROUP = 8 * 1024
MAX_ROW_GROUPS = 64
MAX_APPEND_ATTEMPTS = 10_000
PROBES_PER_LISTING = 100
MAX_KNOWN_SEGMENTS = 1_000
_SEGMENT_NAME = re.compile(r"[0-9]{20}\.parquet")


class Position(msgspec.Struct, frozen=True):
    """How far a topic was read: the next offset, and the segment that holds it or that it would begin."""

    segment: int = 0
    offset: int = 0


class Slice(msgspec.Struct, frozen=True):
    """The descriptor of events to read: the offsets from start to before end, all of one segment."""

    segment: int
    start: int
    end: int


class LogSegment(msgspec.Struct, frozen=True):
    """What following a log learns of a segment: its first offset, its rows, and who wrote it."""

    first: int
    rows: int
    origin: str
    checksum: str

    @property
    def end(self) -> int:
        """The offset behind its last event, where the next segment begins."""
        return self.first + self.rows


def group_order(table: pa.Table) -> npt.NDArray[np.int64] | None:
    """The order of rows by key group, in which rows of one key group stay as they are; None if they are in it."""
    groups = table.column("key_group").to_numpy()
    if len(groups) < 2 or bool((groups[1:] >= groups[:-1]).all()):
        return None
    return np.argsort(groups, kind="stable")


def in_order(table: pa.Table, order: npt.NDArray[np.int64]) -> pa.Table:
    """All rows in another order. A column of nothing has it already: headers, mostly, and they take long to move."""
    at = pa.array(order)
    columns = [column if column.null_count == len(column) else column.take(at) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def topic_segment(table: pa.Table, origin: str) -> tuple[pa.Buffer, str]:
    """The bytes of a topic segment with these rows, and its checksum. `origin` names the writer and this write."""
    assert table.num_rows > 0, "a segment is named by its first offset, so it has one"
    order = group_order(table)
    return write_parquet(_in_row_groups(table if order is None else in_order(table, order)), {ORIGIN: origin})


def _in_row_groups(rows: pa.Table) -> list[pa.Table]:
    """Sorted rows, cut where partitions would be if their number is a power of two: so a task reads only its own.

    A row group has `ROWS_PER_GROUP` rows or more, on average: each costs something however few rows it has.
    """
    groups = rows.column("key_group").to_numpy().astype(np.int64)
    first, last = int(groups[0]), int(groups[-1])
    parts = min(MAX_ROW_GROUPS, max(1, rows.num_rows // ROWS_PER_GROUP))
    width = 1 << ((last - first) // parts).bit_length()
    bounds = range((first // width + 1) * width, last + 1, width)
    edges = [0, *np.searchsorted(groups, np.asarray(bounds, np.int64)).tolist(), rows.num_rows]
    return [rows.slice(start, end - start) for start, end in pairwise(edges) if start < end]


class TopicLog:
    """The log of one topic, as bytes: who reads and writes keys and values is `Topic`.

    A segment that is missing in the middle would look like the end of the log. So the folder is listed when the end is
    met for the first time, and then once in `PROBES_PER_LISTING` times, or as many as it has segments: a gap cannot go
    unnoticed, polling an idle topic costs one small request, and listing costs no more as the topic grows.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._end: int | None = None  # the furthest end that this object has seen
        self._probes_left = 0  # so often may the end be met before the folder is listed again
        self._segments_seen = 0
        self._known: dict[int, LogSegment] = {}  # segments never change, so what was learnt of one holds

    def segments(self, position: Position | None = None) -> Iterator[LogSegment]:
        """The segments from a position on. Costs what is there from the position on, not what came before."""
        if position is None:
            yield from self.segments_from(0)
            return
        at, begun = position, False
        while True:
            segment = self._segment(at)
            if segment is None and self._is_end(at.segment, begun):
                return
            # Where there is more behind, another writer may have been faster than the first look.
            segment = segment or self._segment(at)
            if segment is None:
                raise self._missing(at.segment, "later segments are there")
            yield segment
            at, begun = Position(segment.end, segment.end), True

    def segments_from(self, offset: int) -> Iterator[LogSegment]:
        """The segments from the one on that holds an offset, or from the oldest on if that is later."""
        listed = self._firsts()
        at = max((first for first in listed if first <= offset), default=listed[0] if listed else 0)
        while (segment := self._segment(Position(at, at))) is not None:
            yield segment
            at = segment.end
        if listed and at <= listed[-1]:
            raise self._missing(at, f"{self._file(listed[-1])} is there")

    def slices(self, position: Position, limit: int) -> tuple[list[Slice], Position]:
        """What is new from a position on, at most `limit` events of it, and the position behind that."""
        assert limit >= 0, f"{limit} events cannot be asked for"
        found: list[Slice] = []
        at, left = position, limit
        if left == 0:
            return found, at
        for segment in self.segments(position):
            end = min(segment.end, at.offset + left)
            found.append(Slice(segment.first, at.offset, end))
            left -= end - at.offset
            at = Position(end if end == segment.end else segment.first, end)
            if left == 0:
                break
        return found, at

    def end(self) -> Position:
        """The position behind the last event."""
        if self._end is None:
            self._end = max(self._firsts(), default=0)
        for segment in self.segments(Position(self._end, self._end)):
            self._end = segment.end
        return Position(self._end, self._end)

    def require(self, end: int) -> None:
        """Raise CorruptionError unless there are events up to this offset."""
        found = self.end().offset
        if found < end:
            raise self._missing(found, f"events up to offset {end} were published")

    def append(self, data: "Buffer", rows: int) -> int:
        """Append a segment; returns its first offset. Other writers may append at the same time."""
        for _ in range(MAX_APPEND_ATTEMPTS):
            first = self.end().offset
            if settle(self._storage, self._file(first), data) == data:
                self._end = first + rows
                return first
        raise self._overtaken()

    def append_once(self, data: "Buffer", origin: str, checksum: str, since: Position) -> int:
        """Append a segment unless its origin stands in the log from `since` on already; returns its first offset."""
        at = since
        for _ in range(MAX_APPEND_ATTEMPTS):
            for segment in self.segments(at):
                at = Position(segment.end, segment.end)
                if segment.origin != origin:
                    continue
                if segment.checksum == checksum:
                    return segment.first
                raise CorruptionError(self._path(segment.first), f"{origin} was published with another content before")
            # Only what stands right behind everything looked at can be ours: so no second copy comes to be, even if
            # another process publishes the very same segment at this moment.
            if settle(self._storage, self._file(at.offset), data) == data:
                return at.offset
        raise self._overtaken()

    def read(self, part: Slice, groups: range | None = None) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """The rows of a slice (only those of a range of key groups) and their offsets, in order of offset."""
        file = self._open(part.segment)
        if file is None:
            raise self._missing(part.segment, "it was there before")
        first_row, last_row = part.start - part.segment, part.end - part.segment
        if last_row > file.rows:
            raise self._too_short(part.segment, file.rows, part.end)
        wanted, skipped = _row_groups(file, first_row, last_row, groups)
        if not wanted:
            return SCHEMA.empty_table(), np.empty(0, np.int64)
        table = _rows(file, wanted)
        low, high = max(0, first_row - skipped), min(table.num_rows, last_row - skipped)
        if groups is not None:
            column = table.column("key_group").to_numpy()
            low = max(low, int(np.searchsorted(column, groups.start, "left")))
            high = min(high, int(np.searchsorted(column, groups.stop - 1, "right")))
        count = max(0, high - low)
        return table.slice(low, count), np.arange(count, dtype=np.int64) + (part.segment + skipped + low)

    def _segment(self, at: Position) -> LogSegment | None:
        """The segment at a position, verified; None where the log ends or has a gap."""
        segment = self._known.get(at.segment) or self._learn(at.segment)
        if segment is None:
            if at.offset > at.segment:
                raise self._missing(at.segment, f"it was read up to offset {at.offset} before")
            return None
        if at.offset >= segment.end:
            raise self._too_short(at.segment, segment.rows, at.offset + 1)
        return segment

    def _learn(self, first: int) -> LogSegment | None:
        file = self._open(first)
        if file is None:
            return None
        if len(self._known) >= MAX_KNOWN_SEGMENTS:
            self._known.clear()
        self._segments_seen += 1
        learnt = self._known[first] = LogSegment(first, file.rows, file.note(ORIGIN) or "", file.checksum)
        return learnt

    def _is_end(self, first: int, begun: bool) -> bool:
        """Whether the log ends before `first`, where no segment was found; looked at only from time to time."""
        if self._probes_left > 0:
            self._probes_left -= 1
            return True
        self._probes_left = max(PROBES_PER_LISTING, self._segments_seen) - 1
        if begun or first == 0:
            return not self._firsts(after=first)
        listed = self._firsts()
        before = max((one for one in listed if one < first), default=0)
        ends = self._segment(Position(before, before))
        if ends is None or ends.end != first:
            raise self._missing(first, f"the topic was read up to offset {first} before")
        return listed[-1] < first

    def _firsts(self, after: int | None = None) -> list[int]:
        """The first offsets of all segments (behind one), by listing; files that are not ours are passed over."""
        names = self._storage.list("", "" if after is None else self._file(after))
        firsts = [int(name[:20]) for name in names if _SEGMENT_NAME.fullmatch(name)]
        self._segments_seen = max(self._segments_seen, len(firsts))
        return firsts

    def _missing(self, first: int, why: str) -> CorruptionError:
        return CorruptionError(self._path(first), f"it is missing, but {why}")

    def _too_short(self, first: int, rows: int, end: int) -> CorruptionError:
        return CorruptionError(self._path(first), f"it holds {rows} events, but should reach to offset {end} at least")

    def _overtaken(self) -> StorageError:
        return StorageError(
            f"topic {self._name!r}: {MAX_APPEND_ATTEMPTS} appends in a row were overtaken by other writers; try again"
        )

    def _file(self, first: int) -> str:
        return f"{first:020d}.parquet"

    def _path(self, first: int) -> str:
        return f"{self._name}/{self._file(first)}"

    def _open(self, first: int) -> CheckedFile | None:
        name = self._file(first)
        try:
            return open_parquet(self._path(first), lambda start, end: self._storage.read(name, start, end))
        except MissingError:
            return None


def _rows(file: CheckedFile, wanted: list[int]) -> pa.Table:
    """Some row groups. Headers are read only where there are some: rows tell slowly that they have none."""
    if _may_have_headers(file, wanted):
        return file.read(wanted).cast(SCHEMA)
    table = file.read(wanted, [name for name in SCHEMA.names if name != "headers"])
    return table.append_column("headers", pa.nulls(table.num_rows, HEADERS_TYPE)).cast(SCHEMA)


def _may_have_headers(file: CheckedFile, wanted: list[int]) -> bool:
    parts = [file.metadata.row_group(index).column(_HEADER_NAMES) for index in wanted]
    return any(part.statistics is None or part.statistics.null_count < part.num_values for part in parts)


def _row_groups(file: CheckedFile, first: int, last: int, groups: range | None) -> tuple[list[int], int]:
    """Which row groups hold the rows from first to before last of these key groups, and how many rows stand before."""
    wanted: list[int] = []
    row, skipped = 0, 0
    for index in range(file.metadata.num_row_groups):
        part = file.metadata.row_group(index)
        stats = part.column(0).statistics
        inside = row < last and row + part.num_rows > first
        if groups is not None and stats is not None and stats.has_min_max:
            inside = inside and stats.min < groups.stop and stats.max >= groups.start
        if inside:
            wanted.append(index)
        elif not wanted:
            skipped = row + part.num_rows
        row += part.num_rows
    return wanted, skipped
