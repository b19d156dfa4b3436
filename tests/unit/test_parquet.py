"""Checked Parquet: a changed byte is found, or changes nothing; and everybody else can read the files."""

import re
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import parquet
from penstock.errors import CorruptionError
from penstock.parquet import CHECK, TAIL_BYTES, CheckedFile, open_parquet, read_parquet, write_parquet

ROWS = pa.table({"key": pa.array([b"a", b"b", b"c"]), "value": pa.array([b'{"n":1}', None, b"" * 3])})
MORE = pa.table({"key": pa.array([b"d", b"e"]), "value": pa.array([b"4", b"5" * 40])})


def written(tables: Iterable[pa.Table], metadata: Mapping[str, str] | None = None) -> tuple[bytes, str]:
    data, checksum = write_parquet(tables, metadata)
    return bytes(data), checksum


class Source:
    """Bytes that remember which parts of them were read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int | None]] = []

    def __call__(self, start: int, end: int | None) -> bytes:
        self.reads.append((start, end))
        return self.data[start:end]


def opened(data: bytes) -> CheckedFile:
    return open_parquet("a file", Source(data))


def large(groups: int = 4, rows: int = 3000) -> list[pa.Table]:
    """Tables whose file is larger than the tail that the first read takes: the values are hard to compress."""
    values = [[b"%x" % pow(3, 1000 + g * rows + i, (1 << 127) - 1) for i in range(rows)] for g in range(groups)]
    return [pa.table({"value": pa.array(part, pa.binary())}) for part in values]


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_every_flipped_byte_is_found(bit: int) -> None:
    data, checksum = written([ROWS, MORE], {"writer": "me"})
    whole = pa.concat_tables([ROWS, MORE])
    found = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        try:
            assert read_parquet("a file", damaged, checksum) == whole, f"byte {at}"
        except CorruptionError as error:
            found += error.name == "a file"
    assert found == len(data)


def test_verify_finds_every_flipped_byte() -> None:
    data, _ = written([ROWS, MORE])
    opened(data).verify()
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises(CorruptionError, match="a file"):
            opened(damaged).verify()


def test_truncated_file_is_found_at_every_length() -> None:
    data, _ = written([ROWS, MORE])
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            read_parquet("a file", data[:length])


def test_bytes_behind_the_end_are_found() -> None:
    data, _ = written([ROWS])
    for tail in (b"\0", b"PAR1", b"\0\0\0\0PAR1", data[4:-1]):
        with pytest.raises(CorruptionError):
            read_parquet("a file", data + tail)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no parquet at all", b"\xff\xff\xff\xffPAR1", b"\0" * 100 + b"PAR1"])
def test_garbage_is_no_file(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        read_parquet("a file", data)


def test_parquet_of_others_is_not_taken_for_ours() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(ROWS, sink)
    with pytest.raises(CorruptionError, match="holds no checksum"):
        read_parquet("a file", sink.getvalue().to_pybytes())


def test_damage_in_large_files_is_found() -> None:
    tables = large()
    data, _ = written(tables)
    assert len(data) > 3 * TAIL_BYTES
    for at in range(4, len(data), 997):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(CorruptionError):
            opened(damaged).read()
    for length in range(0, len(data), 9973):
        with pytest.raises(CorruptionError):
            opened(data[:length]).read()


def test_row_group_lost_behind_the_open_is_found() -> None:
    data, _ = written(large())
    source = Source(data)
    file = open_parquet("a file", source)
    source.data = data[: len(data) // 2]
    with pytest.raises(CorruptionError, match="bytes where at least"):
        file.read()


def test_row_groups_are_read_one_by_one() -> None:
    tables = large()
    source = Source(written(tables)[0])
    file = open_parquet("a file", source)
    assert file.metadata.num_row_groups == len(tables)
    for index, table in enumerate(tables):
        assert file.read([index]) == table
    assert file.read([1, 2]) == pa.concat_tables(tables[1:3])
    assert file.read(columns=["value"]) == pa.concat_tables(tables)
    assert file.rows == sum(table.num_rows for table in tables)
    # One read for the tail, then one for each question, and no byte of a row group that was not asked for.
    first, last = (file.metadata.row_group(i).column(0).data_page_offset for i in (1, 2))
    assert len(source.reads) == 1 + len(tables) + 2
    assert source.reads[2] == (first, last)


def test_damage_elsewhere_does_not_hide_an_intact_row_group() -> None:
    tables = large()
    data = bytearray(written(tables)[0])
    data[10] ^= 1
    file = opened(bytes(data))
    assert file.read([3]) == tables[3]
    with pytest.raises(CorruptionError, match="row group 0 does not match"):
        file.read([0])


def test_small_file_is_read_once() -> None:
    source = Source(written([ROWS, MORE])[0])
    assert open_parquet("a file", source).read([1]) == MORE
    assert source.reads == [(-TAIL_BYTES, None)]


def test_footer_longer_than_the_tail_is_read_again() -> None:
    tables = [pa.table({"n": [i]}) for i in range(700)]
    data, _ = written(tables, {"note": "x" * TAIL_BYTES})
    source = Source(data)
    file = open_parquet("a file", source)
    assert file.read() == pa.concat_tables(tables)
    assert source.reads[0] == (-TAIL_BYTES, None)
    assert source.reads[1][0] < -TAIL_BYTES


@pytest.mark.parametrize("size", [TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1])
def test_file_of_about_the_tail_is_read(size: int) -> None:
    bare = len(written([ROWS], {"note": "x" * 60_000})[0])
    data, _ = written([ROWS], {"note": "x" * (60_000 + size - bare)})
    assert len(data) == size
    assert opened(data).read() == ROWS


# The digests of two row groups take 48 bytes, and 48 is the character 0: the first draft took the length for a digest.
@pytest.mark.parametrize("groups", [0, 1, 2, 3, 4, 5, 6, 7, 127, 128, 383, 384])
def test_any_number_of_row_groups_is_sealed(groups: int) -> None:
    tables = [pa.table({"n": [i]}) for i in range(groups)]
    data, checksum = written([pa.table({"n": pa.array([], pa.int64())}), *tables])
    file = opened(data)
    assert (file.rows, file.metadata.num_row_groups, file.checksum) == (groups, groups, checksum)
    assert file.read().column("n").to_pylist() == list(range(groups))


def test_table_of_more_rows_than_a_row_group_takes_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_ROWS_PER_GROUP", 4)
    table = pa.table({"n": list(range(11))})
    file = opened(written([table])[0])
    assert [file.read([i]).num_rows for i in range(file.metadata.num_row_groups)] == [4, 4, 3]
    assert file.read() == table


def test_arrow_takes_as_many_rows_into_a_row_group_as_we_give() -> None:
    table = pa.table({"n": pa.nulls(parquet.MAX_ROWS_PER_GROUP + 1, pa.int64())})
    file = opened(written([table])[0])
    assert file.metadata.num_row_groups == 2
    assert file.rows == table.num_rows


def test_other_file_than_the_committed_one_is_refused() -> None:
    data, checksum = written([ROWS])
    _, other = written([MORE])
    assert read_parquet("a file", data, checksum) == ROWS
    with pytest.raises(CorruptionError, match=f"its checksum is {checksum}, but {other} was committed"):
        read_parquet("a file", data, other)


def test_checksum_depends_on_rows_and_notes() -> None:
    files = [written([ROWS]), written([MORE]), written([ROWS], {"a": "b"}), written([ROWS])]
    assert len({checksum for _, checksum in files}) == 3
    assert files[0] == files[3]


def test_notes_are_read_back() -> None:
    file = opened(written([ROWS], {"writer": "ünï", "other": f"{CHECK}0000 " * 3})[0])
    assert file.note("writer") == "ünï"
    assert file.note("other") == f"{CHECK}0000 " * 3
    assert file.note("absent") is None


def test_any_parquet_reader_reads_them() -> None:
    data, _ = written([ROWS, MORE], {"writer": "me"})
    assert pq.read_table(pa.BufferReader(data)) == pa.concat_tables([ROWS, MORE])
    assert pq.read_metadata(pa.BufferReader(data)).metadata[b"writer"] == b"me"


def test_digests_cover_every_byte_behind_the_magic() -> None:
    data, _ = written([ROWS, MORE])
    file = opened(data)
    columns = [file.metadata.row_group(g).column(c) for g in range(2) for c in range(2)]
    assert not any(column.has_dictionary_page or column.statistics for column in columns)
    edge = len(parquet.MAGIC)
    for column in columns:
        assert column.data_page_offset == edge
        edge += column.total_compressed_size
    assert edge == len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert re.search(rb"xxh3:[0-9a-f]{48}", data[edge:])


def test_statistics_of_key_groups_are_kept() -> None:
    table = pa.table({"key_group": pa.array([3, 9], pa.uint16()), "key": [b"a", b"b"]})
    columns = opened(written([table])[0]).metadata.row_group(0)
    assert (columns.column(0).statistics.min, columns.column(0).statistics.max) == (3, 9)
    assert columns.column(1).statistics is None
