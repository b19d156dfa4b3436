"""The coordinator: carries the protocol out on storage. It belongs to one run and lives on the driver.

Invariants:
- Before it commits, it looks whether a newer run has claimed the application; if so it stops.
- It goes on to the next epoch only when every sink has published the last one.
- Old records go before the files they name, so a crash while collecting leaves orphans and never a broken record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from penstock import names
from penstock.clock import Clock, IdFactory
from penstock.epochs.compaction import runs_to_compact
from penstock.epochs.protocol import (
    Committed,
    Complete,
    Lost,
    Overtaken,
    Refuse,
    Retained,
    RunAgain,
    check_answers,
    decide_commit,
    decide_epoch,
    decide_owner,
    incompatible,
    what_to_collect,
    what_to_forget,
)
from penstock.epochs.records import (
    FORMAT_VERSION,
    Changes,
    ControlRow,
    Counts,
    EpochRecord,
    Format,
    OutboxRef,
    Segments,
    View,
    after,
    fold,
    pack,
    unpack,
)
from penstock.errors import ConflictError, CorruptionError, InvalidError, MissingError
from penstock.process import Owner, this_process
from penstock.state.keys import KEY_GROUPS
from penstock.storage import Storage, settle
from penstock.topics import Position

FULL_EVERY = 50
MAX_CLAIM_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the coordinator needs to know of a plan: its stages, its partitions, its stateful steps and their forms."""

    stages: int
    partitions: int
    steps: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the tasks of one epoch need: the state they start from, the times that hold, and what to compact."""

    epoch: int
    view: View
    oldest_epoch: int
    clock_ms: int
    watermark_ms: int | None
    compact: Segments
    compacts: bool


class Claim(msgspec.Struct, frozen=True):
    """A run's claim on the application."""

    run: int
    id: str
    owner: Owner


class Coordinator:
    """Opens the history of an application, assigns epochs, commits them and has them published."""

    def __init__(
        self,
        storage: Storage,
        shape: PlanShape,
        clock: Clock,
        ids: IdFactory,
        snapshots: timedelta,
        retain: int,
    ) -> None:
        self._storage = storage
        self._shape = shape
        self._clock = clock
        self._ids = ids
        self._snapshot_ms = snapshots // timedelta(milliseconds=1)
        self._retain = retain
        self.history = open_format(storage, ids).history
        self.run = claim_run(storage, ids).run
        self._retained = load_retained(storage, self.history)
        self.view = fold(self._retained.oldest, self._retained.records)
        if reason := incompatible(self.view, shape.steps, shape.partitions):
            raise InvalidError(reason)

    @property
    def last(self) -> EpochRecord | None:
        """The record of the last committed epoch, if there is one."""
        return self._retained.records[-1] if self._retained.records else None

    def assign(self, epoch: int) -> Assignment | None:
        """What to run for an epoch; None if it is committed already and needs at most publishing."""
        decision = decide_epoch(epoch, self.view.epoch)
        if isinstance(decision, Refuse):
            raise InvalidError(decision.reason)
        if epoch <= self.view.epoch:
            return None
        clock_ms = max(self._clock.now_ms(), self.view.clock_ms)
        compacts = clock_ms - self.view.compacted_ms >= self._snapshot_ms
        runs = runs_to_compact(self.view, compacts)
        oldest = self._retained.oldest.epoch
        return Assignment(epoch, self.view, oldest, clock_ms, self.view.watermark_ms, runs, compacts)

    def check(self, rows: Sequence[ControlRow]) -> Complete | RunAgain:
        """Whether the tasks' answers make up an epoch."""
        return check_answers(rows, self._shape.stages, self._shape.partitions)

    def commit(
        self,
        assignment: Assignment,
        complete: Complete,
        positions: Mapping[str, Position],
        sinks: Mapping[str, Position],
    ) -> EpochRecord:
        """Commit an epoch; returns the record that stands, which may be an older run's (see Overtaken)."""
        self._stop_if_owned_by_another()
        ours = self._record(assignment, complete, positions, sinks)
        name = names.epoch_record(ours.epoch)
        stands = unpack(name, settle(self._storage, name, pack(ours)), EpochRecord, ours.epoch - 1)
        decision = decide_commit(ours, stands)
        if isinstance(decision, Lost):
            raise ConflictError(decision.reason)
        record = decision.record if isinstance(decision, Overtaken) else ours
        self.view = after(self.view, record)
        self._retained = Retained(self._retained.oldest, (*self._retained.records, record))
        return record

    def publish(self, record: EpochRecord, publish: Callable[[str, EpochRecord], None]) -> None:
        """Have each sink publish an epoch that it has not, and mark it; then tidy up if it is time."""
        for sink in sorted({ref.sink for ref in record.outbox}):
            mark = names.published(sink, record.epoch)
            if not self._is_published(mark):
                publish(sink, record)
                settle(self._storage, mark, b"")
        if (record.epoch + 1) % FULL_EVERY == 0:
            self.collect()

    def collect(self) -> None:
        """Write a full record, forget epochs that are no longer retained, delete what none of the rest names."""
        settle(self._storage, names.full_record(self.view.epoch), pack(self.view))
        oldest = self._newest_full_before(max(0, self.view.epoch - self._retain))
        if oldest is not None and oldest.epoch > self._retained.oldest.epoch:
            behind = tuple(r for r in self._retained.records if r.epoch > oldest.epoch)
            self._retained = Retained(oldest, behind)
            self._forget(oldest.epoch)
        files = [name for folder in (names.SEGMENTS, names.OUTBOX) for name in self._storage.list(folder)]
        self._storage.delete(what_to_collect(files, self._retained.names(), self.view.epoch))

    def end(self) -> None:
        """Say that this run ended by itself."""
        settle(self._storage, names.ended(self.run), b"")

    def _forget(self, oldest: int) -> None:
        self._storage.delete(what_to_forget(self._storage.list(names.EPOCHS), oldest))
        self._storage.delete(what_to_forget(self._storage.list(names.PUBLISHED), oldest))
        self._storage.delete(what_to_forget(self._storage.list(names.RUNS), self.run))

    def _newest_full_before(self, epoch: int) -> View | None:
        fulls = [n for n in self._storage.list(names.EPOCHS) if n.endswith(names.FULL_SUFFIX) and names.number_of(n) <= epoch]
        return unpack(fulls[-1], self._storage.read(fulls[-1]), View) if fulls else None

    def _stop_if_owned_by_another(self) -> None:
        newer = self._storage.list(names.RUNS, after=names.ended(self.run))
        newest = max((names.number_of(name) for name in newer), default=self.run)
        decision = decide_owner(self.run, newest)
        if isinstance(decision, Lost):
            raise ConflictError(decision.reason)
        assert isinstance(decision, Committed)

    def _is_published(self, mark: str) -> bool:
        try:
            self._storage.read(mark)
        except MissingError:
            return False
        return True

    def _record(
        self,
        assignment: Assignment,
        complete: Complete,
        positions: Mapping[str, Position],
        sinks: Mapping[str, Position],
    ) -> EpochRecord:
        counts, highest = Counts(), dict(self.view.highest_ms)
        changes: list[Changes] = []
        outbox: list[OutboxRef] = []
        for row in complete.rows:
            counts += row.counts
            outbox.extend(row.outbox)
            for source, high in row.highest_ms.items():
                highest[source] = max(high, highest.get(source, high))
            for step in sorted({*row.deltas, *row.compacted}):
                changes.append(Changes(step, row.partition, row.deltas.get(step), row.compacted.get(step)))
        return EpochRecord(
            epoch=assignment.epoch,
            history=self.history,
            run=self.run,
            write_id=self._ids(),
            clock_ms=assignment.clock_ms,
            watermark_ms=assignment.watermark_ms,
            compacted_ms=assignment.clock_ms if assignment.compacts else self.view.compacted_ms,
            partitions=self._shape.partitions,
            steps=dict(self._shape.steps),
            positions=dict(positions),
            highest_ms=highest,
            changes=tuple(changes),
            outbox=tuple(outbox),
            sinks=dict(sinks),
            counts=counts,
        )


def open_format(storage: Storage, ids: IdFactory) -> Format:
    """The format of the stored application; written if nothing is stored yet."""
    try:
        data = storage.read(names.FORMAT)
    except MissingError:
        if storage.list(names.EPOCHS):
            raise CorruptionError(names.FORMAT, "it is missing, but there are epochs") from None
        data = settle(storage, names.FORMAT, pack(Format(FORMAT_VERSION, KEY_GROUPS, ids())))
    found = unpack(names.FORMAT, data, Format)
    if (found.version, found.key_groups) != (FORMAT_VERSION, KEY_GROUPS):
        raise InvalidError(
            f"the stored state has format {found.version} with {found.key_groups} key groups, this version of Penstock "
            f"reads format {FORMAT_VERSION} with {KEY_GROUPS}; use the version that wrote it"
        )
    return found


def newest_claim(storage: Storage) -> Claim | None:
    """The newest run that claimed the application."""
    claims = [name for name in storage.list(names.RUNS) if name.endswith(".json")]
    return msgspec.json.decode(storage.read(claims[-1]), type=Claim) if claims else None


def claim_run(storage: Storage, ids: IdFactory) -> Claim:
    """Claim the application for a new run: from now on every older one stops at its next commit."""
    newest = newest_claim(storage)
    number = 1 if newest is None else newest.run + 1
    for run in range(number, number + MAX_CLAIM_ATTEMPTS):
        ours = Claim(run, ids(), this_process())
        data = msgspec.json.encode(ours)
        if settle(storage, names.run(run), data) == data:
            return ours
    raise ConflictError(f"{MAX_CLAIM_ATTEMPTS} other runs were started at the same moment; start only one")


def load_retained(storage: Storage, history: str) -> Retained:
    """All epochs that can still be read, verified: none is missing in between, each follows the one before."""
    found = storage.list(names.EPOCHS)
    fulls = [name for name in found if name.endswith(names.FULL_SUFFIX)]
    oldest = unpack(fulls[0], storage.read(fulls[0]), View) if fulls else View(history)
    numbers = sorted(names.number_of(name) for name in found if not name.endswith(names.FULL_SUFFIX))
    if fulls and numbers and numbers[0] == 0:
        oldest = View(history)  # nothing was forgotten yet: every epoch is there from the first on
    behind = [number for number in numbers if number > oldest.epoch]
    records: list[EpochRecord] = []
    for expected, number in enumerate(behind, oldest.epoch + 1):
        if number != expected:
            raise CorruptionError(names.epoch_record(expected), f"it is missing, but epoch {number} is there", expected - 1)
        name = names.epoch_record(number)
        records.append(unpack(name, storage.read(name), EpochRecord, number - 1))
    retained = Retained(oldest, tuple(records))
    _check_marks(storage, oldest.epoch + len(records), fulls)
    return retained


def _check_marks(storage: Storage, last: int, fulls: Sequence[str]) -> None:
    """The last record itself may be lost: then something that came after its commit is still there."""
    witnesses = [*storage.list(names.PUBLISHED), *fulls]
    newest = max((names.number_of(name) for name in witnesses), default=last)
    if newest > last:
        raise CorruptionError(names.epoch_record(newest), "it is missing, but was committed", last)
