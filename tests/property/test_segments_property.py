"""Merging segments is what updating a dict is, however the rows are divided into row groups."""

from collections.abc import Iterator

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.state.segments import SCHEMA, merge_rows, segment_table

Row = tuple[bytes | None, int | None, int | None]
Rows = dict[bytes, Row]

KEYS = st.binary(min_size=1, max_size=3).map(lambda rest: b"\x00\x01" + rest)
DUES = st.none() | st.integers(0, 10)
ROWS = st.tuples(st.none() | st.binary(max_size=3), DUES, DUES)
RUNS = st.lists(st.dictionaries(KEYS, ROWS, max_size=20), max_size=6)


def in_groups(rows: Rows, size: int) -> Iterator[pa.Table]:
    keys = sorted(rows)
    for start in range(0, len(keys), size):
        part = keys[start : start + size]
        values, event_due_ms, clock_due_ms = zip(*(rows[key] for key in part), strict=True)
        yield segment_table(part, values, event_due_ms, clock_due_ms)


@given(RUNS, st.integers(1, 7), st.booleans())
def test_merge_equals_updating_a_dict(runs: list[Rows], size: int, snapshot: bool) -> None:
    expected: Rows = {}
    for rows in runs:
        expected |= rows
    if snapshot:
        expected = {key: row for key, row in expected.items() if row[0] is not None}
    merged = pa.concat_tables(merge_rows([in_groups(rows, size) for rows in runs], snapshot))
    assert merged.schema == SCHEMA
    columns = [merged.column(name).to_pylist() for name in SCHEMA.names]
    assert list(zip(*columns, strict=True)) == [(key, *expected[key]) for key in sorted(expected)]


@given(RUNS.filter(len), st.data())
def test_merging_in_two_goes_is_merging_at_once(runs: list[Rows], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(runs) - 1))
    end = data.draw(st.integers(start + 1, len(runs)))
    tables = [in_groups(rows, 3) for rows in runs]
    once = pa.concat_tables(merge_rows([in_groups(rows, 3) for rows in runs], snapshot=True))
    part = merge_rows(tables[start:end], snapshot=start == 0)
    assert pa.concat_tables(merge_rows([*tables[:start], part, *tables[end:]], snapshot=True)).equals(once)
