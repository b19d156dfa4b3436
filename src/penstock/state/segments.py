"""Segments: immutable, sorted, checked files of state rows.

A row has a key (two bytes of key group, the key, the part of its state), a value (null: the row is deleted) and, for
rows that time removes or wakes, the time when they are due.

Invariants:
- Rows are sorted by key as bytes, hence by key group; a key stands once.
- A segment is never changed. What replaces it has another name.
- In a snapshot there are no deleted rows: nothing older is left for them to hide.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import CorruptionError, MissingError
from penstock.names import number_of
from penstock.parquet import open_parquet, write_parquet
from penstock.storage import Storage, settle

SCHEMA = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("event_due_ms", pa.int64()), ("clock_due_ms", pa.int64())]
)
ROWS_PER_GROUP = 128 * 1024
BYTES_PER_GROUP = 64 << 20
"""A row group is what is held in memory at once; it ends at whichever of the two comes first."""


class SegmentRef(msgspec.Struct, frozen=True):
    """A segment as an epoch record names it: the epochs whose writes it holds, and how to know it again."""

    name: str
    first_epoch: int
    last_epoch: int
    snapshot: bool
    rows: int
    size_bytes: int
    checksum: str


def segment_table(
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
    event_due_ms: Sequence[int | None] | None = None,
    clock_due_ms: Sequence[int | None] | None = None,
) -> pa.Table:
    """Rows, already sorted by key, as a table.

    >>> segment_table([b"\\0\\1a", b"\\0\\1b"], [b"1", None]).column("value").to_pylist()
    [b'1', None]
    """
    count = len(keys)
    dues = [
        pa.nulls(count, pa.int64()) if due is None else pa.array(due, pa.int64())
        for due in (event_due_ms, clock_due_ms)
    ]
    return pa.Table.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary()), *dues], schema=SCHEMA)


def write_segment(storage: Storage, name: str, tables: Iterable[pa.Table], epochs: range, snapshot: bool) -> SegmentRef:
    """Store sorted rows durably under a name of their own."""
    rows = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal rows
        for table in _regrouped(tables):
            rows += table.num_rows
            yield table

    data, checksum = write_parquet(counted())
    won = settle(storage, name, data)
    assert won == data, f"the name {name} was given to two attempts"
    return SegmentRef(name, epochs[0], epochs[-1], snapshot, rows, len(data), checksum)


def _regrouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of the size of a row group: small ones are joined, large ones divided."""
    held: list[pa.Table] = [SCHEMA.empty_table()]
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) < ROWS_PER_GROUP and sum(t.nbytes for t in held) < BYTES_PER_GROUP:
            continue
        whole = pa.concat_tables(held)
        per_group = max(1, min(ROWS_PER_GROUP, whole.num_rows * BYTES_PER_GROUP // whole.nbytes))
        full = whole.num_rows // per_group * per_group
        yield from (whole.slice(start, per_group) for start in range(0, full, per_group))
        held = [whole.slice(full)]
    yield pa.concat_tables(held)


def read_segment(storage: Storage, ref: SegmentRef, oldest_epoch: int = 0) -> Iterator[pa.Table]:
    """The rows of a segment in order, row group by row group, each verified before it is given out.

    The error for a damaged one offers the last epoch that was committed without it, if that is still retained.
    """
    before = number_of(ref.name) - 1
    last_good_epoch = before if before >= oldest_epoch else None
    try:
        file = open_parquet(ref.name, lambda start, end: storage.read(ref.name, start, end))
        if file.checksum != ref.checksum:
            raise CorruptionError(ref.name, f"its checksum is {file.checksum}, but {ref.checksum} was committed")
        for index in range(file.metadata.num_row_groups):
            yield file.read([index]).cast(SCHEMA)
    except MissingError as error:
        raise CorruptionError(ref.name, "it is missing", last_good_epoch) from error
    except CorruptionError as error:
        raise CorruptionError(ref.name, error.found, last_good_epoch) from error


def merge_rows(runs: Sequence[Iterator[pa.Table]], snapshot: bool) -> Iterator[pa.Table]:
    """One sorted stream of rows from several, oldest first; of rows with one key the newest stays.

    Holds about one row group of each run in memory, however long the runs are. The tables are of any size, the first is
    empty: also of no rows at all one knows the columns.

    >>> old, new = segment_table([b"\\0\\1a", b"\\0\\1b"], [b"1", b"2"]), segment_table([b"\\0\\1b"], [None])
    >>> pa.concat_tables(merge_rows([iter([old]), iter([new])], snapshot=True)).column("key").to_pylist()
    [b'\\x00\\x01a']
    """
    yield SCHEMA.empty_table()
    heads = [_next_rows(run) for run in runs]
    while live := [(i, head) for i, head in enumerate(heads) if head is not None]:
        # Every run is complete up to the smallest of the last keys at hand, so that much can be merged.
        limit = min(head.column("key")[-1].as_py() for _, head in live)
        window = []
        for i, head in live:
            cut = _position_after(head.column("key"), limit)
            window.append(head.slice(0, cut))
            heads[i] = head.slice(cut) if cut < head.num_rows else _next_rows(runs[i])
        merged = newest_rows(pa.concat_tables(window))
        yield merged.filter(pc.is_valid(merged.column("value"))) if snapshot else merged


def _next_rows(run: Iterator[pa.Table]) -> pa.Table | None:
    return next((table for table in run if table.num_rows), None)


def _position_after(keys: pa.ChunkedArray, limit: bytes) -> int:
    return bisect_right(range(len(keys)), limit, key=lambda i: keys[i].as_py())


def newest_rows(table: pa.Table) -> pa.Table:
    """Rows sorted by key; of several with one key, the one that stood last.

    >>> newest_rows(segment_table([b"\\0\\1b", b"\\0\\1a", b"\\0\\1b"], [b"1", b"2", b"3"])).column("value").to_pylist()
    [b'2', b'3']
    """
    table = table.combine_chunks()
    if table.num_rows < 2:
        return table
    keys = table.column("key").combine_chunks()
    order = pc.array_sort_indices(keys)  # stable: rows of one key stay in the order they have
    keys = keys.take(order)
    last = pa.concat_arrays([pc.not_equal(keys[:-1], keys[1:]), pa.array([True])])
    return table.take(order.filter(last))
