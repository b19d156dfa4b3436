"""Segments keep rows in order, merge so that the newest row stays, and say what is wrong when they are damaged."""

from collections.abc import Iterator
from itertools import count, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import names
from penstock.errors import CorruptionError
from penstock.state import segments
from penstock.state.segments import SCHEMA, SegmentRef, merge_rows, newest_rows, read_segment, segment_table
from penstock.storage import Storage, open_storage
from penstock.testing import FaultyStorage

Rows = dict[bytes, bytes | None]
_numbers = count()


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://segments-{next(_numbers)}")


def row_key(number: int) -> bytes:
    return b"\x00\x07key-%05d" % number


def table_of(rows: Rows) -> pa.Table:
    return segment_table(sorted(rows), [rows[key] for key in sorted(rows)])


def rows_of(tables: Iterator[pa.Table]) -> Rows:
    """The rows of a stream, having checked that it is sorted and has each key once."""
    whole = pa.concat_tables([SCHEMA.empty_table(), *tables])
    keys = whole.column("key").to_pylist()
    assert all(a < b for a, b in pairwise(keys))
    return dict(zip(keys, whole.column("value").to_pylist(), strict=True))


def write(storage: Storage, rows: Rows, epoch: int = 7, snapshot: bool = False) -> SegmentRef:
    name = names.segment("totals", 3, epoch, f"attempt{next(_numbers)}")
    return segments.write_segment(storage, name, [table_of(rows)], range(epoch, epoch + 1), snapshot)


def merged(runs: list[Rows], snapshot: bool = False) -> Rows:
    return rows_of(merge_rows([iter([table_of(rows)]) for rows in runs], snapshot))


def test_what_is_written_is_read(storage: Storage) -> None:
    table = segment_table([b"\0\1a", b"\0\1b", b"\0\2a"], [b"1", None, b""], [5, None, None], [None, None, 9])
    name = names.segment("totals", 3, 8, "a1")
    ref = segments.write_segment(storage, name, [table], range(5, 9), snapshot=False)
    assert pa.concat_tables(read_segment(storage, ref)) == table
    assert (ref.name, ref.first_epoch, ref.last_epoch, ref.snapshot, ref.rows) == (name, 5, 8, False, 3)
    assert ref.size_bytes == len(storage.read(name))


def test_any_tool_reads_a_segment(storage: Storage) -> None:
    ref = write(storage, {b"\0\1a": b'{"total":1}', b"\0\1b": None})
    found = pq.read_table(pa.BufferReader(storage.read(ref.name)))
    assert found.column_names == ["key", "value", "event_due_ms", "clock_due_ms"]
    assert found.column("value").to_pylist() == [b'{"total":1}', None]


def test_segment_without_rows_is_read(storage: Storage) -> None:
    ref = write(storage, {})
    assert ref.rows == 0
    assert rows_of(read_segment(storage, ref)) == {}
    assert rows_of(merge_rows([read_segment(storage, ref)], snapshot=True)) == {}


def test_lost_answer_of_the_write_is_settled(storage: Storage) -> None:
    ref = write(FaultyStorage(storage, lose_answer=1), {b"\0\1a": b"1"})
    assert rows_of(read_segment(storage, ref)) == {b"\0\1a": b"1"}


def test_rows_are_divided_into_row_groups(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ROWS_PER_GROUP", 10)
    rows = {row_key(i): b"%d" % i for i in range(35)}
    ref = write(storage, rows)
    assert [t.num_rows for t in read_segment(storage, ref)] == [10, 10, 10, 5]
    assert rows_of(read_segment(storage, ref)) == rows
    assert ref.rows == 35


def test_small_tables_are_joined_into_row_groups(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ROWS_PER_GROUP", 10)
    rows = {row_key(i): b"%d" % i for i in range(25)}
    tables = [table_of(dict(list(rows.items())[start : start + 3])) for start in range(0, 25, 3)]
    ref = segments.write_segment(storage, names.segment("s", 0, 1, "a"), tables, range(1, 2), False)
    assert [t.num_rows for t in read_segment(storage, ref)] == [10, 10, 5]
    assert rows_of(read_segment(storage, ref)) == rows


def test_row_groups_of_large_values_have_fewer_rows(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BYTES_PER_GROUP", 10_000)
    rows = {row_key(i): b"%d" % i * 1000 for i in range(10)}
    tables = list(read_segment(storage, ref := write(storage, rows)))
    assert len(tables) >= 2
    assert all(table.nbytes <= 10_000 for table in tables)
    assert rows_of(read_segment(storage, ref)) == rows


def test_value_larger_than_a_row_group_is_kept(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BYTES_PER_GROUP", 1000)
    rows = {row_key(i): b"%d" % i * 5000 for i in range(3)}
    assert rows_of(read_segment(storage, write(storage, rows))) == rows


def test_newest_row_wins() -> None:
    assert merged([{b"\0\1a": b"1", b"\0\1b": b"1"}, {b"\0\1a": b"2"}, {b"\0\1a": b"3", b"\0\1c": b"3"}]) == {
        b"\0\1a": b"3",
        b"\0\1b": b"1",
        b"\0\1c": b"3",
    }


def test_newest_row_brings_its_own_due_times() -> None:
    old = segment_table([b"\0\1a"], [b"1"], [100], [200])
    new = segment_table([b"\0\1a"], [b"2"], None, [300])
    assert pa.concat_tables(merge_rows([iter([old]), iter([new])], snapshot=True)) == new


def test_tombstone_stays_in_a_merged_delta() -> None:
    assert merged([{b"\0\1a": b"1"}, {b"\0\1a": None}]) == {b"\0\1a": None}


def test_tombstone_goes_from_a_snapshot() -> None:
    runs: list[Rows] = [{b"\0\1a": b"1", b"\0\1b": b"1"}, {b"\0\1a": None, b"\0\1x": None}]
    assert merged(runs, snapshot=True) == {b"\0\1b": b"1"}


def test_row_written_again_after_its_tombstone_is_there() -> None:
    assert merged([{b"\0\1a": b"1"}, {b"\0\1a": None}, {b"\0\1a": b"3"}], snapshot=True) == {b"\0\1a": b"3"}


def test_nothing_merges_to_nothing() -> None:
    for snapshot in (True, False):
        assert rows_of(merge_rows([], snapshot)) == {}
        assert rows_of(merge_rows([iter([]), iter([SCHEMA.empty_table()])], snapshot)) == {}


def test_newest_rows_are_sorted_by_key() -> None:
    table = segment_table([b"c", b"a", b"c", b"b", b"a"], [b"1", b"2", b"3", None, b"5"])
    assert newest_rows(table) == segment_table([b"a", b"b", b"c"], [b"5", None, b"3"])


def test_many_row_groups_merge_as_one(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ROWS_PER_GROUP", 7)
    runs: list[Rows] = [
        {row_key(i): b"old %d" % i for i in range(100)},
        {row_key(i): None for i in range(0, 100, 3)},
        {row_key(i): b"new %d" % i for i in range(50, 130, 5)},
    ]
    refs = [write(storage, rows, epoch) for epoch, rows in enumerate(runs)]
    expected = runs[0] | runs[1] | runs[2]
    assert rows_of(merge_rows([read_segment(storage, ref) for ref in refs], False)) == expected
    live = {key: value for key, value in expected.items() if value is not None}
    assert rows_of(merge_rows([read_segment(storage, ref) for ref in refs], True)) == live


def test_merge_reads_a_run_only_as_far_as_it_must() -> None:
    read = [0, 0]

    def run(number: int, start: int) -> Iterator[pa.Table]:
        for group in range(50):
            read[number] += 1
            yield table_of({row_key(start + group * 10 + i): b"" for i in range(10)})

    merging = merge_rows([run(0, 0), run(1, 5)], snapshot=False)
    seen = 0
    for table in merging:
        seen += table.num_rows
        # Beyond what was given out, at most two row groups of each run were read: the head, and the one behind it.
        assert max(read) * 10 <= seen + 30
    assert read == [50, 50]


NAME = names.segment("totals", 3, 7, "a1")


def damaged(storage: Storage, data: bytes | None) -> Storage:
    """A storage that has other bytes under NAME, or none."""
    other = open_storage(f"memory://segments-{next(_numbers)}")
    if data is not None:
        other.create(NAME, data)
    return other


@pytest.fixture
def ref(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> SegmentRef:
    monkeypatch.setattr(segments, "ROWS_PER_GROUP", 2)
    rows = {row_key(i): b"%d" % i for i in range(5)}
    return segments.write_segment(storage, NAME, [table_of(rows)], range(7, 8), False)


@pytest.mark.parametrize(("oldest", "offered"), [(0, 6), (6, 6), (7, None), (9, None)])
def test_missing_segment_offers_the_last_good_epoch(
    storage: Storage, ref: SegmentRef, oldest: int, offered: int | None
) -> None:
    with pytest.raises(CorruptionError, match="it is missing") as caught:
        rows_of(read_segment(damaged(storage, None), ref, oldest))
    assert (caught.value.name, caught.value.last_good_epoch) == (NAME, offered)


def test_segment_of_the_first_epoch_offers_none(storage: Storage) -> None:
    ref = write(storage, {b"\0\1a": b"1"}, epoch=0)
    storage.delete([ref.name])
    with pytest.raises(CorruptionError) as caught:
        rows_of(read_segment(storage, ref))
    assert caught.value.last_good_epoch is None


def test_every_damage_is_named_and_no_row_of_it_is_given_out(storage: Storage, ref: SegmentRef) -> None:
    data = storage.read(NAME)
    whole = rows_of(read_segment(storage, ref))
    wrecks = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(4, len(data), 3)]
    wrecks += [data[:length] for length in range(0, len(data), 7)]
    for wreck in wrecks:
        given: Rows = {}
        tables = read_segment(damaged(storage, wreck), ref)
        with pytest.raises(CorruptionError) as caught:
            given.update(row for table in tables for row in rows_of(iter([table])).items())
        assert (caught.value.name, caught.value.last_good_epoch) == (NAME, 6)
        assert given.items() <= whole.items()
        assert given != whole


def test_other_segment_under_the_name_is_refused(storage: Storage, ref: SegmentRef) -> None:
    other = write(storage, {b"\0\1z": b"other"})
    with pytest.raises(CorruptionError, match="was committed") as caught:
        rows_of(read_segment(damaged(storage, storage.read(other.name)), ref))
    assert (caught.value.name, caught.value.last_good_epoch) == (NAME, 6)


def test_storage_that_fails_is_no_damage(ref: SegmentRef, storage: Storage) -> None:
    class Unreachable(FaultyStorage):
        def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            raise TimeoutError("nobody answers")

    with pytest.raises(TimeoutError):
        rows_of(read_segment(Unreachable(storage), ref))
