"""The protocol's decisions: pure functions of what was read, returning what to do as values.

Invariants:
- An epoch runs only on the state of the epoch right before it.
- An epoch that was committed is never computed again, only published again.
- A run that sees a newer one stops. Of two that race for one epoch one wins, and the other learns who.
- Nothing that a retained epoch names is ever collected, nor anything that a commit may still name.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from penstock.epochs.records import ControlRow, EpochRecord, SparkBatch, View
from penstock.names import number_of


@dataclass(frozen=True, slots=True)
class Run:
    """Compute the epoch on the state of the one before it."""


@dataclass(frozen=True, slots=True)
class Publish:
    """The epoch is committed: publish it again where it is not marked as published."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The epoch can be neither run nor published; the reason says how to go on."""

    reason: str


def decide_epoch(asked: int, last_committed: int) -> Run | Publish | Refuse:
    """What to do when asked for an epoch.

    >>> decide_epoch(7, 6), decide_epoch(6, 6)
    (Run(), Publish())
    """
    if asked <= last_committed:
        return Publish()
    if asked == last_committed + 1:
        return Run()
    return Refuse(
        f"epoch {asked} was asked for, but epoch {last_committed + 1} is the next one here: the state and the source's "
        f"own checkpoint do not belong together; start again with clear_state(), or with another state_dir"
    )


def decide_batch(asked: SparkBatch, last: SparkBatch | None) -> Run | Publish | Refuse:
    """What to do with a batch of a streaming query, given the last one that an epoch took in.

    >>> decide_batch(SparkBatch(0, "{}"), None), decide_batch(SparkBatch(3, "b"), SparkBatch(3, "b"))
    (Run(), Publish())
    """
    if asked == last:
        return Publish()
    expected = 0 if last is None else last.id + 1
    if asked.id == expected:
        return Run()
    same = last is not None and asked.id == last.id
    found = f"batch {asked.id} with other offsets than were committed" if same else f"batch {asked.id}"
    return Refuse(
        f"Spark brings {found}, but batch {expected} comes next here: the state and Spark's checkpoint do not belong "
        f"together; bring the right checkpoint back, or start again with clear_state() or another state_dir"
    )


@dataclass(frozen=True, slots=True)
class Complete:
    """Each partition of each stage answered once."""

    rows: tuple[ControlRow, ...]


@dataclass(frozen=True, slots=True)
class RunAgain:
    """The answers do not add up; nothing was committed, so the epoch can run again."""

    reason: str


def check_answers(rows: Sequence[ControlRow], stages: int, partitions: int) -> Complete | RunAgain:
    """Whether there is exactly one answer for each (stage, partition); the same one twice counts once."""
    answers: dict[tuple[int, int], list[ControlRow]] = {(s, p): [] for s in range(stages) for p in range(partitions)}
    for row in rows:
        given = answers.get((row.stage, row.partition))
        if given is None:
            return RunAgain(f"stage {row.stage}, partition {row.partition} answered, but does not exist")
        if row not in given:
            given.append(row)
    for (stage, partition), given in answers.items():
        if len(given) != 1:
            return RunAgain(f"stage {stage}, partition {partition} gave {len(given)} different answers instead of one")
    return Complete(tuple(row for given in answers.values() for row in given))


@dataclass(frozen=True, slots=True)
class Committed:
    """Our record stands."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """An older run committed this epoch at the last moment: its record holds, go on behind it."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class Lost:
    """A newer run owns the application."""

    reason: str


def decide_commit(ours: EpochRecord, stands: EpochRecord) -> Committed | Overtaken | Lost:
    """Who committed an epoch, from our record and the one that stands; a lost answer shows as our own write id."""
    if stands.write_id == ours.write_id and stands.run == ours.run:
        return Committed()
    if stands.history != ours.history:
        return Lost(
            f"epoch {ours.epoch} belongs to another history: the state was cleared and begun anew while run {ours.run} "
            f"was under way; run {ours.run} stops here: start the application again"
        )
    if stands.run < ours.run:
        return Overtaken(stands)
    return Lost(owned_by(stands.run, ours.run))


def owned_by(newer: int, ours: int) -> str:
    """The sentence with which a run stops because of another."""
    return (
        f"run {newer} of this application was started while run {ours} was under way and owns its state now; "
        f"run {ours} stops here, and nothing is lost: run only one at a time"
    )


@dataclass(frozen=True, slots=True)
class Ours:
    """No newer run has claimed the application."""


def decide_owner(ours: int, newest: int) -> Ours | Lost:
    """Whether we still own the application, given the newest run whose claim is there (0: there is none).

    >>> decide_owner(7, 7)
    Ours()
    """
    if newest < ours:
        return Lost(
            f"the claim of run {ours} is gone: the state was deleted while it was under way; run {ours} stops here: "
            f"start the application again"
        )
    return Ours() if newest == ours else Lost(owned_by(newest, ours))


@dataclass(frozen=True, slots=True)
class Retained:
    """The epochs that can still be read: the view as of the oldest, and the records behind it."""

    oldest: View
    records: tuple[EpochRecord, ...]

    def names(self) -> set[str]:
        """Every stored object that one of these epochs names."""
        named = self.oldest.names()
        for record in self.records:
            for change in record.changes:
                named.update(ref.name for ref in (change.delta,) if ref is not None)
                named.update(c.segment.name for c in (change.compacted,) if c is not None)
            named.update(ref.name for ref in record.outbox)
        return named


def what_to_collect(names: Iterable[str], named: Set[str], last_committed: int) -> list[str]:
    """Of segments and outbox files, those that nothing retained names and no commit can name any more.

    What belongs to an epoch that is not committed yet may be just being written, and stays.
    """
    return [name for name in names if name not in named and number_of(name) <= last_committed]


def what_to_forget(names: Iterable[str], oldest: int) -> list[str]:
    """Of names that begin with an epoch (records, marks), those of epochs before the oldest retained; oldest first."""
    return sorted(name for name in names if number_of(name) < oldest)


def incompatible(view: View, steps: Mapping[str, str], partitions: int) -> str | None:
    """Why a plan cannot go on with stored state, and what to do; None if it can."""
    if view.partitions and view.partitions != partitions:
        return (
            f"the state has {view.partitions} partitions, the application asks for {partitions}; "
            f"go on with partitions={view.partitions}, or start again with clear_state()"
        )
    for step, stored in view.steps.items():
        asked = steps.get(step)
        if asked is not None and asked != stored:
            return (
                f"the state of step {step!r} was written as {stored}, the plan reads it as {asked}; "
                f"keep the old form, give the step another name, or start again with clear_state()"
            )
    return None
