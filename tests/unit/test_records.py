"""Epoch records come back as they were written or not at all, and add up to the view that later epochs start from."""

from pathlib import Path

import msgspec
import pytest

from penstock.epochs.records import (
    Changes,
    Compacted,
    Counts,
    EpochRecord,
    Format,
    OutboxRef,
    SparkBatch,
    View,
    after,
    fold,
    next_watermark,
    pack,
    unpack,
)
from penstock.errors import CorruptionError
from penstock.state.segments import SegmentRef
from penstock.state.store import NO_EPOCH
from penstock.topics import Position

STORED = Path(__file__).parent / "stored"


def segment(name: str, epoch: int = 0, rows: int = 1) -> SegmentRef:
    return SegmentRef(name, epoch, epoch, False, rows, 100, "0123456789abcdef")


def record(epoch: int, *changes: Changes, **more: object) -> EpochRecord:
    fields = {
        "epoch": epoch,
        "history": "h",
        "run": 1,
        "write_id": f"w{epoch}",
        "clock_ms": 1_000 * epoch,
        "watermark_ms": None,
        "compacted_ms": 0,
        "partitions": 2,
        "steps": {"sum": "json"},
        "positions": {},
        "highest_ms": {},
        "changes": changes,
        "outbox": (),
        "sinks": {},
        "counts": Counts(),
    }
    return EpochRecord(**{**fields, **more})


FORMAT = Format(1, 4096, "00112233445566778899aabbccddeeff")
RECORD = EpochRecord(
    epoch=42,
    history="00112233445566778899aabbccddeeff",
    run=3,
    write_id="ffeeddccbbaa99887766554433221100",
    clock_ms=1_700_000_000_000,
    watermark_ms=1_699_999_999_000,
    compacted_ms=1_699_999_990_000,
    partitions=4,
    steps={"running total": "json", "Größe/%": "json:int"},
    positions={"from orders": Position(1_000, 1_234)},
    highest_ms={"from orders": 1_699_999_999_500},
    changes=(
        Changes("running total", 0, SegmentRef("segments/a", 42, 42, False, 7, 900, "0123456789abcdef"), None),
        Changes(
            "running total",
            3,
            None,
            Compacted(
                SegmentRef("segments/b", 0, 41, True, 70, 9_000, "fedcba9876543210"), ("segments/c", "segments/d")
            ),
        ),
    ),
    outbox=(OutboxRef("to totals", 0, 3, "outbox/e", 5, 600, "0011223344556677"),),
    sinks={"to totals": Position(77, 77)},
    counts=Counts(read=10, written=5, skipped=1, dead=2),
)
VIEW = View(
    history="00112233445566778899aabbccddeeff",
    epoch=49,
    clock_ms=1_700_000_000_000,
    compacted_ms=1_699_999_990_000,
    partitions=4,
    watermark_ms=None,
    steps={"running total": "json"},
    positions={"from orders": Position(1_000, 1_234)},
    highest_ms={},
    segments={"running total": {0: (SegmentRef("segments/a", 42, 42, False, 7, 900, "0123456789abcdef"),), 3: ()}},
    counts=Counts(read=100),
)
BATCH = SparkBatch(42, '{"batchWatermarkMs":0}')
GOLDEN = {
    "format.json": FORMAT,
    "epoch.json": msgspec.structs.replace(RECORD, batch=BATCH),
    "full.json": msgspec.structs.replace(VIEW, batch=BATCH),
}
BEFORE = {"epoch-without-batch.json": RECORD, "full-without-batch.json": VIEW}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_stored_keeps_its_form_to_the_byte(name: str) -> None:
    """If this fails, old state has become unreadable: change the code back."""
    data = (STORED / name).read_bytes()
    found = unpack(name, data, type(GOLDEN[name]))
    assert found == GOLDEN[name]
    assert pack(found) == data


@pytest.mark.parametrize("name", BEFORE)
def test_what_was_stored_before_a_field_came_to_be_is_still_read(name: str) -> None:
    """If this fails, old state has become unreadable: give new fields a default, and keep the old ones."""
    assert unpack(name, (STORED / name).read_bytes(), type(BEFORE[name])) == BEFORE[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_every_flipped_bit_is_noticed(name: str) -> None:
    data = pack(GOLDEN[name])
    for at in range(len(data)):
        for bit in range(8):
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(CorruptionError) as caught:
                unpack("epochs/42.json", flipped, type(GOLDEN[name]), 41)
            assert (caught.value.name, caught.value.last_good_epoch) == ("epochs/42.json", 41)


def test_every_other_length_is_noticed() -> None:
    data = pack(RECORD)
    for other in [*(data[:end] for end in range(len(data))), data + b" ", data + b"\x00", b" " + data]:
        with pytest.raises(CorruptionError):
            unpack("epochs/42.json", other, EpochRecord)


def test_before_the_first_epoch_there_is_no_good_one() -> None:
    with pytest.raises(CorruptionError) as caught:
        unpack("epochs/0.json", b"", EpochRecord, NO_EPOCH)
    assert caught.value.last_good_epoch is None


def test_something_else_with_a_good_checksum_is_not_taken_for_a_record() -> None:
    with pytest.raises(CorruptionError, match="cannot be read"):
        unpack("epochs/42.json", pack(FORMAT), EpochRecord)


def test_deltas_line_up_behind_each_other() -> None:
    a, b, c = segment("a"), segment("b", 1), segment("c", 2)
    view = fold(
        View("h"),
        [
            record(0, Changes("sum", 0, a, None)),
            record(1, Changes("sum", 0, b, None), Changes("sum", 1, c, None)),
            record(2),
        ],
    )
    assert view.segments == {"sum": {0: (a, b), 1: (c,)}}
    assert view.of("sum", 0) == (a, b)
    assert view.of("sum", 9) == view.of("other", 0) == ()
    assert view.names() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("replaced", "left"),
    [(("a", "b"), ["m", "c", "d", "new"]), (("b", "c", "d"), ["a", "m", "new"]), (("c",), ["a", "b", "m", "d", "new"])],
)
def test_compaction_replaces_neighbours_in_place_before_the_new_delta(
    replaced: tuple[str, ...], left: list[str]
) -> None:
    refs = tuple(segment(name) for name in "abcd")
    view = View("h", epoch=6, segments={"sum": {0: refs}, "other": {0: refs[:1]}})
    change = Changes("sum", 0, segment("new", 7), Compacted(segment("m"), replaced))
    found = after(view, record(7, change))
    assert [ref.name for ref in found.of("sum", 0)] == left
    assert found.of("other", 0) == refs[:1]
    assert view.of("sum", 0) == refs


def test_compaction_of_what_are_no_neighbours_is_our_mistake() -> None:
    view = View("h", epoch=6, segments={"sum": {0: tuple(segment(name) for name in "abc")}})
    with pytest.raises(AssertionError):
        after(view, record(7, Changes("sum", 0, None, Compacted(segment("m"), ("a", "c")))))


def test_record_that_does_not_follow_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        after(View("h", epoch=6), record(8))


def test_view_keeps_what_later_records_do_not_speak_of() -> None:
    first = record(
        0, positions={"a": Position(1, 2)}, highest_ms={"a": 5}, steps={"old": "json"}, counts=Counts(1, 2, 3, 4)
    )
    second = record(
        1, positions={"b": Position(3, 3)}, highest_ms={"b": 7}, counts=Counts(1, 1, 1, 1), partitions=8, compacted_ms=9
    )
    view = fold(View("h"), [first, second])
    assert view.positions == {"a": Position(1, 2), "b": Position(3, 3)}
    assert view.steps == {"old": "json", "sum": "json"}
    assert view.counts == Counts(2, 3, 4, 5)
    assert (view.epoch, view.clock_ms, view.partitions, view.compacted_ms) == (1, 1_000, 8, 9)
    assert (view.highest_ms, view.watermark_ms) == ({"a": 5, "b": 7}, 5)


def test_view_keeps_the_last_batch_of_spark() -> None:
    batches = [None, SparkBatch(0, "a"), None, SparkBatch(1, "b"), None]
    views = [fold(View("h"), [record(n, batch=batch) for n, batch in enumerate(batches[:end])]) for end in range(6)]
    assert [view.batch for view in views] == [None, None, batches[1], batches[1], batches[3], batches[3]]


@pytest.mark.parametrize(
    ("before", "highest", "expected"),
    [
        (None, {}, None),
        (3, {}, 3),
        (None, {"a": 5}, 5),
        (None, {"a": 5, "b": 9}, 5),
        (4, {"a": 5, "b": 9}, 5),
        (7, {"a": 5, "b": 9}, 7),
        (None, {"a": -5}, -5),
    ],
)
def test_watermark_is_the_slowest_source_and_never_goes_back(
    before: int | None, highest: dict[str, int], expected: int | None
) -> None:
    assert next_watermark(before, highest) == expected
