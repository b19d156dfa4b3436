"""The protocol's decisions, as tables: what was read, and what follows from it."""

import msgspec
import pytest

from penstock.epochs.protocol import (
    Committed,
    Complete,
    Lost,
    Ours,
    Overtaken,
    Publish,
    Refuse,
    Retained,
    Run,
    RunAgain,
    check_answers,
    decide_batch,
    decide_commit,
    decide_epoch,
    decide_owner,
    incompatible,
    what_to_collect,
    what_to_forget,
)
from penstock.epochs.records import Changes, Compacted, ControlRow, Counts, EpochRecord, OutboxRef, SparkBatch, View
from penstock.names import epoch_record, full_record, outbox, published, run, segment
from penstock.state.segments import SegmentRef


@pytest.mark.parametrize(
    ("asked", "last", "expected"),
    [
        (0, -1, Run()),
        (7, 6, Run()),
        (6, 6, Publish()),
        (0, 6, Publish()),
    ],
    ids=["the first epoch is run", "the next one is run", "the last one is published again", "so is an older one"],
)
def test_epoch_is_run_or_published(asked: int, last: int, expected: Run | Publish) -> None:
    assert decide_epoch(asked, last) == expected


@pytest.mark.parametrize(("asked", "last"), [(1, -1), (8, 6), (100, 6)])
def test_epoch_out_of_order_is_refused_with_the_one_expected_and_the_remedy(asked: int, last: int) -> None:
    decision = decide_epoch(asked, last)
    assert isinstance(decision, Refuse)
    for words in (
        f"epoch {asked} was asked for",
        f"epoch {last + 1} is the next",
        "clear_state()",
        "another state_dir",
    ):
        assert words in decision.reason


@pytest.mark.parametrize(
    ("asked", "last", "expected"),
    [
        (SparkBatch(0, "a"), None, Run()),
        (SparkBatch(4, "b"), SparkBatch(3, "a"), Run()),
        (SparkBatch(3, "a"), SparkBatch(3, "a"), Publish()),
    ],
    ids=["the first batch is run", "the next one is run", "the last one again is published again"],
)
def test_batch_is_run_or_published(asked: SparkBatch, last: SparkBatch | None, expected: Run | Publish) -> None:
    assert decide_batch(asked, last) == expected


@pytest.mark.parametrize(
    ("asked", "last", "said"),
    [
        (SparkBatch(1, "a"), None, ["brings batch 1,", "batch 0 comes next"]),
        (SparkBatch(0, "a"), SparkBatch(3, "a"), ["brings batch 0,", "batch 4 comes next"]),
        (SparkBatch(5, "a"), SparkBatch(3, "a"), ["brings batch 5,", "batch 4 comes next"]),
        (SparkBatch(3, "b"), SparkBatch(3, "a"), ["brings batch 3 with other offsets", "batch 4 comes next"]),
    ],
    ids=["not the first", "an old checkpoint", "one too far", "other offsets"],
)
def test_batch_of_another_checkpoint_is_refused(asked: SparkBatch, last: SparkBatch | None, said: list[str]) -> None:
    decision = decide_batch(asked, last)
    assert isinstance(decision, Refuse)
    for words in [*said, "bring the right checkpoint back", "clear_state()"]:
        assert words in decision.reason


def answer(stage: int, partition: int, read: int = 0) -> ControlRow:
    return ControlRow(stage, partition, {}, {}, (), {}, Counts(read=read))


ALL = tuple(answer(stage, partition) for stage in range(2) for partition in range(3))


@pytest.mark.parametrize(
    "rows",
    [ALL, ALL[::-1], (*ALL, *ALL), (*ALL, answer(1, 2))],
    ids=["all there", "in any order", "each twice", "one twice"],
)
def test_one_answer_for_each_partition_of_each_stage_completes_an_epoch(rows: tuple[ControlRow, ...]) -> None:
    assert check_answers(rows, 2, 3) == Complete(ALL)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((), "stage 0, partition 0 gave 0 different answers"),
        (ALL[:-1], "stage 1, partition 2 gave 0 different answers"),
        ((*ALL, answer(0, 1, read=5)), "stage 0, partition 1 gave 2 different answers"),
        ((*ALL, answer(0, 3)), "stage 0, partition 3 answered, but does not exist"),
        ((*ALL, answer(2, 0)), "stage 2, partition 0 answered, but does not exist"),
    ],
    ids=["none", "one is missing", "two that differ", "an unknown partition", "an unknown stage"],
)
def test_answers_that_do_not_add_up_make_the_epoch_run_again(rows: tuple[ControlRow, ...], reason: str) -> None:
    decision = check_answers(rows, 2, 3)
    assert isinstance(decision, RunAgain)
    assert reason in decision.reason


def test_many_answers_are_checked_in_no_time() -> None:
    rows = [answer(stage, partition) for stage in range(4) for partition in range(4096)]
    assert isinstance(check_answers(rows, 4, 4096), Complete)


def record(**more: object) -> EpochRecord:
    whole = EpochRecord(7, "h", 3, "w", 0, None, 0, 1, {}, {}, {}, (), (), {}, Counts())
    return msgspec.structs.replace(whole, **more)


def test_commit_stands_when_our_own_record_is_found() -> None:
    assert decide_commit(record(), record()) == Committed()


def test_commit_is_overtaken_when_an_older_run_was_faster() -> None:
    older = record(run=2, write_id="other")
    assert decide_commit(record(), older) == Overtaken(older)


@pytest.mark.parametrize("run", [3, 4])
def test_commit_is_lost_when_a_newer_run_was_faster(run: int) -> None:
    decision = decide_commit(record(), record(run=run, write_id="other"))
    assert isinstance(decision, Lost)
    assert f"run {run} of this application was started while run 3 was under way" in decision.reason


@pytest.mark.parametrize("run", [2, 4])
def test_commit_is_lost_when_another_history_stands_there(run: int) -> None:
    decision = decide_commit(record(), record(run=run, write_id="other", history="new"))
    assert isinstance(decision, Lost)
    assert "the state was cleared" in decision.reason


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (3, None),
        (4, "run 4 of this application was started while run 3 was under way and owns its state now"),
        (0, "the claim of run 3 is gone"),
        (2, "the claim of run 3 is gone"),
    ],
    ids=["we are the newest", "there is a newer one", "all claims are gone", "our claim is gone"],
)
def test_owner_is_the_newest_run(newest: int, expected: str | None) -> None:
    decision = decide_owner(3, newest)
    if expected is None:
        assert decision == Ours()
    else:
        assert isinstance(decision, Lost)
        assert expected in decision.reason


def ref(name: str) -> SegmentRef:
    return SegmentRef(name, 0, 0, False, 1, 1, "")


def test_retained_epochs_name_their_segments_and_outboxes_and_what_they_replaced() -> None:
    oldest = View("h", epoch=4, segments={"sum": {0: (ref("a"), ref("b"))}})
    records = (
        record(epoch=5, changes=(Changes("sum", 0, ref("c"), Compacted(ref("m"), ("a", "b"))),)),
        record(epoch=6, changes=(), outbox=(OutboxRef("to x", 0, 0, "o", 1, 1, ""),)),
    )
    assert Retained(oldest, records).names() == {"a", "b", "c", "m", "o"}


@pytest.mark.parametrize(
    ("name", "collected"),
    [
        (segment("sum", 0, 5, "named"), False),
        (segment("sum", 0, 5, "orphan"), True),
        (segment("sum", 0, 9, "orphan"), True),
        (segment("sum", 0, 10, "being written"), False),
        (outbox("to x", 3, 9, "orphan"), True),
        (outbox("to x", 3, 11, "being written"), False),
    ],
)
def test_files_are_collected_when_nothing_names_them_and_nothing_can_any_more(name: str, collected: bool) -> None:
    named = {segment("sum", 0, 5, "named")}
    assert what_to_collect([name], named, last_committed=9) == ([name] if collected else [])


def test_epochs_are_forgotten_before_the_oldest_and_from_the_first_on() -> None:
    names = [
        epoch_record(7),
        epoch_record(5),
        full_record(5),
        epoch_record(4),
        full_record(4),
        epoch_record(3),
        published("to x", 2),
        published("to x", 5),
        run(1),
    ]
    forgotten = what_to_forget(names, 5)
    assert set(forgotten) == {epoch_record(4), full_record(4), epoch_record(3), published("to x", 2), run(1)}
    of_epochs = [name for name in forgotten if name.startswith("epochs/")]
    assert of_epochs == [epoch_record(3), full_record(4), epoch_record(4)]


@pytest.mark.parametrize(
    ("view", "steps", "partitions"),
    [
        (View("h"), {"sum": "json"}, 4),
        (View("h", partitions=4, steps={"sum": "json"}), {"sum": "json"}, 4),
        (View("h", partitions=4, steps={"sum": "json"}), {"other": "json:int"}, 4),
        (View("h", partitions=4, steps={}), {"sum": "json"}, 4),
    ],
    ids=["nothing is stored", "all is as before", "a step has gone and another come", "a step has come"],
)
def test_plan_goes_on_with_state_that_fits(view: View, steps: dict[str, str], partitions: int) -> None:
    assert incompatible(view, steps, partitions) is None


@pytest.mark.parametrize(
    ("steps", "partitions", "said"),
    [
        ({"sum": "json"}, 8, ["has 4 partitions", "asks for 8", "partitions=4", "clear_state()"]),
        (
            {"sum": "json:int"},
            4,
            ["'sum'", "written as json,", "reads it as json:int", "another name", "clear_state()"],
        ),
    ],
    ids=["other partitions", "another form of a step"],
)
def test_plan_that_does_not_fit_is_refused_with_the_remedy(
    steps: dict[str, str], partitions: int, said: list[str]
) -> None:
    reason = incompatible(View("h", partitions=4, steps={"sum": "json"}), steps, partitions)
    assert reason is not None
    for words in said:
        assert words in reason
