"""Compaction keeps what holds, keeps the segments few, and costs what is written rather than what is there."""

import math
import random

import pytest

from penstock.epochs.compaction import MAX_SEGMENTS, choose_run, compact, runs_to_compact
from penstock.epochs.records import View
from penstock.errors import CorruptionError
from penstock.state.segments import SegmentRef, read_segment, segment_table, write_segment
from penstock.storage import Storage, open_storage


@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ([], 0),
        ([5], 0),
        ([7, 7], 0),
        ([1000, 10], 1),
        ([10, 1000], 0),
        ([1000, 10, 5], 2),
        ([1000, 10, 5, 5], 1),
        ([1000, 10, 8, 2], 1),
        ([1000, 500, 499, 1], 0),
        ([100, 60, 50], 0),
        ([100, 60, 30], 2),
        ([1000, 0, 0], 1),
        ([5, 5, 5, 10_000, 3_000, 1], 0),
    ],
)
def test_run_begins_at_the_oldest_segment_that_the_newer_ones_outweigh(sizes: list[int], start: int) -> None:
    assert choose_run(sizes) == start


def shapes() -> dict[str, list[int]]:
    noise = random.Random(7)
    return {
        "all of one size": [1_000] * 3_000,
        "of any size": [noise.randint(1, 10_000) for _ in range(3_000)],
        "many small, few large": [10 ** noise.choice([0, 0, 0, 0, 1, 2, 5]) for _ in range(3_000)],
        "one large, then small": [1_000_000] + [1] * 3_000,
        "ever smaller": list(range(3_000, 0, -1)),
        "ever larger": list(range(1, 3_001)),
        "empty ones among them": [noise.choice([0, 0, 100]) for _ in range(3_000)],
    }


@pytest.mark.parametrize("due_every", [1, 2, 7, 50, 10_000])
@pytest.mark.parametrize("shape", shapes())
def test_segments_stay_few_and_work_follows_what_is_written(shape: str, due_every: int) -> None:
    """Rows are all of different keys here, so nothing becomes smaller by merging: the worst case."""
    stack: list[int] = []
    written = rewritten = 0
    for epoch, size in enumerate(shapes()[shape]):
        refs = tuple(SegmentRef(str(i), 0, 0, False, rows, 0, "") for i, rows in enumerate(stack))
        view = View("h", segments={"sum": {0: refs}})
        run = runs_to_compact(view, epoch % due_every == 0).get("sum", {}).get(0, ())
        if run:
            merged = sum(ref.rows for ref in run)
            stack = [*stack[: len(stack) - len(run)], merged]
            rewritten += merged
        stack.append(size)
        written += size
        assert len(stack) <= MAX_SEGMENTS
        if epoch % due_every == 0:
            assert len(stack) <= math.log2(written + 1) + 3
    assert sum(stack) == written
    assert rewritten <= written * (math.log2(written) + 1)


def test_large_snapshot_is_left_alone_while_changes_are_few() -> None:
    stack, rewritten = [1_000_000], 0
    for _ in range(1_000):
        start = choose_run(stack)
        rewritten += sum(stack[start:]) if len(stack) - start > 1 else 0
        stack = [*stack[:start], sum(stack[start:]), 1]
    assert rewritten < 20_000
    assert stack[0] == 1_000_000


def refs(*sizes: int) -> tuple[SegmentRef, ...]:
    return tuple(SegmentRef(f"s{i}", i, i, False, rows, 0, "") for i, rows in enumerate(sizes))


def test_runs_are_chosen_where_it_is_due() -> None:
    view = View(
        "h", segments={"sum": {0: refs(5, 5), 1: refs(1000, 1), 2: refs(7), 3: ()}, "other": {1: refs(9, 3, 3)}}
    )
    assert runs_to_compact(view, due=True) == {"sum": {0: refs(5, 5)}, "other": {1: refs(9, 3, 3)[1:]}}
    assert runs_to_compact(view, due=False) == {}


def test_runs_are_chosen_where_there_are_too_many_even_if_it_is_not_due() -> None:
    view = View("h", segments={"sum": {0: refs(*[1] * MAX_SEGMENTS), 1: refs(*[1] * (MAX_SEGMENTS - 1))}})
    assert runs_to_compact(view, due=False) == {"sum": {0: refs(*[1] * MAX_SEGMENTS)}}


def stored(storage: Storage, epoch: int, rows: dict[bytes, bytes | None], snapshot: bool = False) -> SegmentRef:
    keys = sorted(rows)
    table = segment_table(keys, [rows[key] for key in keys])
    name = f"segments/sum/00000/{epoch:020d}-{len(rows)}{snapshot}.parquet"
    return write_segment(storage, name, [table], range(epoch, epoch + 1), snapshot)


def rows_of(storage: Storage, ref: SegmentRef) -> dict[bytes, bytes | None]:
    return {
        key: value
        for table in read_segment(storage, ref)
        for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True)
    }


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://compaction-{random.getrandbits(64)}")


RUN: list[dict[bytes, bytes | None]] = [
    {b"a": b"1", b"b": b"1", b"c": b"1"},
    {b"b": None, b"c": b"2"},
    {b"c": b"3", b"d": None},
]


@pytest.mark.parametrize("snapshot", [True, False])
def test_newest_rows_stay_and_deleted_ones_go_only_in_a_snapshot(storage: Storage, snapshot: bool) -> None:
    run = [stored(storage, epoch, rows) for epoch, rows in enumerate(RUN, 4)]
    found = compact(storage, "segments/sum/00000/00000000000000000007-m.parquet", run, snapshot, 0)
    expected: dict[bytes, bytes | None] = {b"a": b"1", b"c": b"3"}
    assert rows_of(storage, found.segment) == (expected if snapshot else {**expected, b"b": None, b"d": None})
    assert found.replaced == tuple(ref.name for ref in run)
    assert (found.segment.first_epoch, found.segment.last_epoch, found.segment.snapshot) == (4, 6, snapshot)
    assert found.segment.rows == len(rows_of(storage, found.segment))


def test_compaction_of_everything_deleted_is_an_empty_snapshot(storage: Storage) -> None:
    run = [stored(storage, 0, {b"a": b"1"}), stored(storage, 1, {b"a": None})]
    found = compact(storage, "segments/sum/00000/00000000000000000002-m.parquet", run, True, 0)
    assert (found.segment.rows, rows_of(storage, found.segment)) == (0, {})


def test_damaged_segment_stops_compaction(storage: Storage) -> None:
    run = [stored(storage, 3, {b"a": b"1"}), stored(storage, 4, {b"a": None})]
    storage.delete([run[1].name])
    with pytest.raises(CorruptionError) as caught:
        compact(storage, "segments/sum/00000/00000000000000000005-m.parquet", run, True, 0)
    assert (caught.value.name, caught.value.last_good_epoch) == (run[1].name, 3)
    assert storage.list("") == [run[0].name]
