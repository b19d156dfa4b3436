"""The coordinator: carries the protocol out on storage. It belongs to one run and lives on the driver.

Invariants:
- Before and after it commits, it looks whether a newer run has claimed the application; if so it stops, and leaves
  publishing to that one: a run that was asleep for long cannot publish an epoch that was decided otherwise meanwhile.
- It goes on to the next epoch only when every sink has published the last one.
- Old records go before the files they name, so a crash while collecting leaves orphans and never a broken record.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from penstock import names
from penstock.clock import Clock, IdFactory
from penstock.epochs.compaction import runs_to_compact
from penstock.epochs.protocol import (
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
    SparkBatch,
    View,
    after,
    fold,
    pack,
    unpack,
)
from penstock.errors import ConflictError, CorruptionError, InvalidError, MissingError
from penstock.process import Owner, this_process
from penstock.state.keys import KEY_GROUPS
from penstock.state.store import NO_EPOCH
from penstock.storage import Storage, settle
from penstock.topics import Position

FULL_EVERY = 50
MAX_CLAIM_ATTEMPTS = 100
MAX_LOAD_ATTEMPTS = 5
_OURS = re.compile(r"(.*/)?[0-9]{20}(|\.json|\.full\.json|\.ended|-[^/]*\.parquet)")


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
        self._refuse_if_incompatible()

    @property
    def last(self) -> EpochRecord | None:
        """The record of the last committed epoch, if there is one."""
        return self._retained.records[-1] if self._retained.records else None

    @property
    def records(self) -> tuple[EpochRecord, ...]:
        """The records of all epochs behind the oldest that is retained."""
        return self._retained.records

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
        oldest = max(0, self._retained.oldest.epoch)
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
        batch: SparkBatch | None = None,
    ) -> EpochRecord:
        """Commit an epoch; returns the record that stands, which may be an older run's (see Overtaken)."""
        assert assignment.epoch == self.view.epoch + 1, f"epoch {assignment.epoch} was assigned before another commit"
        self._stop_if_owned_by_another()
        ours = self._record(assignment, complete, positions, sinks, batch)
        name = names.epoch_record(ours.epoch)
        stands = unpack(name, settle(self._storage, name, pack(ours)), EpochRecord, ours.epoch - 1)
        decision = decide_commit(ours, stands)
        if isinstance(decision, Lost):
            raise ConflictError(decision.reason)
        self._stop_if_owned_by_another()
        record = decision.record if isinstance(decision, Overtaken) else ours
        self.view = after(self.view, record)
        self._retained = Retained(self._retained.oldest, (*self._retained.records, record))
        self._refuse_if_incompatible()
        return record

    def publish(self, record: EpochRecord, publish: Callable[[str, EpochRecord], None]) -> None:
        """Have each sink publish an epoch that it has not, and mark it; then tidy up if it is time."""
        for sink in sorted({ref.sink for ref in record.outbox}):
            mark = names.published(sink, record.epoch)
            if not self._is_published(mark):
                with self.owning():
                    publish(sink, record)
                settle(self._storage, mark, b"")
        if (record.epoch + 1) % FULL_EVERY == 0:
            self.collect()

    def collect(self) -> None:
        """Write a full record, forget epochs that are no longer retained, delete what none of the rest names."""
        if self.view.epoch == NO_EPOCH:
            return
        name = names.full_record(self.view.epoch)
        if unpack(name, settle(self._storage, name, pack(self.view)), View) != self.view:
            raise CorruptionError(name, "it differs from what the records add up to", self.view.epoch)
        # The record of the last epoch is always kept: after a crash it says what to publish.
        oldest = self._newest_full_before(self.view.epoch - max(1, self._retain))
        if oldest is not None and oldest.epoch > max(0, self._retained.oldest.epoch):
            behind = tuple(r for r in self._retained.records if r.epoch > oldest.epoch)
            self._retained = Retained(oldest, behind)
            self._forget(oldest.epoch)
        files = [name for folder in (names.SEGMENTS, names.OUTBOX) for name in _listed(self._storage, folder)]
        self._storage.delete(what_to_collect(files, self._retained.names(), self.view.epoch))

    @contextmanager
    def owning(self) -> Iterator[None]:
        """What is found missing in here is a conflict, if a newer run owns the application and has tidied up."""
        try:
            yield
        except (CorruptionError, MissingError):
            self._stop_if_owned_by_another()
            raise

    def end(self) -> None:
        """Say that this run ended by itself."""
        settle(self._storage, names.ended(self.run), b"")

    def _forget(self, oldest: int) -> None:
        self._storage.delete(what_to_forget(_listed(self._storage, names.EPOCHS), oldest))
        self._storage.delete(what_to_forget(_listed(self._storage, names.PUBLISHED), oldest))
        self._storage.delete(what_to_forget(_listed(self._storage, names.RUNS), self.run))

    def _newest_full_before(self, epoch: int) -> View | None:
        fulls = [number for number in _epochs(self._storage)[1] if number <= epoch]
        try:
            return _full_view(self._storage, fulls[-1], self.history) if fulls else None
        except MissingError:  # a newer run has just forgotten it, and tidies up itself
            return None

    def _refuse_if_incompatible(self) -> None:
        if reason := incompatible(self.view, self._shape.steps, self._shape.partitions):
            raise InvalidError(reason)

    def _stop_if_owned_by_another(self) -> None:
        # The listing begins right before our own claim.
        claims = _listed(self._storage, names.RUNS, after=names.ended(self.run))
        decision = decide_owner(self.run, max(map(names.number_of, claims), default=0))
        if isinstance(decision, Lost):
            raise ConflictError(decision.reason)

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
        batch: SparkBatch | None,
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
            batch=batch,
        )


def history_of(storage: Storage) -> str | None:
    """The history that is stored; None if there is none, or nothing that can be read."""
    try:
        return unpack(names.FORMAT, storage.read(names.FORMAT), Format).history
    except (MissingError, CorruptionError):
        return None


def open_format(storage: Storage, ids: IdFactory) -> Format:
    """The format of the stored application; written if nothing is stored yet."""
    try:
        data = storage.read(names.FORMAT)
    except MissingError:
        if _listed(storage, names.EPOCHS):
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
    for _ in range(MAX_CLAIM_ATTEMPTS):
        claims = [name for name in _listed(storage, names.RUNS) if name.endswith(".json")]
        if not claims:
            return None
        try:
            return msgspec.json.decode(storage.read(claims[-1]), type=Claim)
        except MissingError:  # a newer run has claimed it meanwhile, and forgotten the older ones
            continue
        except msgspec.DecodeError as error:
            raise CorruptionError(claims[-1], f"it cannot be read ({error})") from error
    raise ConflictError(f"{MAX_CLAIM_ATTEMPTS} other runs were started at the same moment; start only one")


def claim_run(storage: Storage, ids: IdFactory) -> Claim:
    """Claim the application for a new run: from now on every older one stops at its next commit."""
    number = max(map(names.number_of, _listed(storage, names.RUNS)), default=0) + 1
    for run in range(number, number + MAX_CLAIM_ATTEMPTS):
        ours = Claim(run, ids(), this_process())
        data = msgspec.json.encode(ours)
        if settle(storage, names.run(run), data) == data:
            return ours
    raise ConflictError(f"{MAX_CLAIM_ATTEMPTS} other runs were started at the same moment; start only one")


def load_retained(storage: Storage, history: str) -> Retained:
    """All epochs that can still be read, verified: none is missing in between, each follows the one before."""
    for _ in range(MAX_LOAD_ATTEMPTS - 1):
        try:
            return _load(storage, history)
        except MissingError:  # an older run that is still under way forgets old epochs at this moment
            continue
    return _load(storage, history)


def _load(storage: Storage, history: str) -> Retained:
    # Witnesses of a commit are listed before the records, lest one that is added at this moment seem to be missing.
    witnesses = [*_listed(storage, names.PUBLISHED), *_listed(storage, names.EPOCHS)]
    newest = max(map(names.number_of, witnesses), default=NO_EPOCH)
    numbers, fulls = _epochs(storage)
    # Epochs are forgotten from the first on, so if the first two are there, all are. (Not the first alone: that may be
    # the late work of a run that slept for long, as may be a full record without the record of its epoch.)
    whole = numbers[:2] in ([0], [0, 1]) or not fulls
    oldest = View(history) if whole else _full_view(storage, fulls[0], history)
    records: list[EpochRecord] = []
    for expected, number in enumerate((n for n in numbers if n > oldest.epoch), oldest.epoch + 1):
        if number != expected:
            raise _lost(expected, number)
        name = names.epoch_record(number)
        record = unpack(name, storage.read(name), EpochRecord, number - 1)
        if (record.epoch, record.history) != (number, history):
            found = f"it is epoch {record.epoch} of history {record.history}, not epoch {number} of {history}"
            raise CorruptionError(name, found, number - 1 if number else None)
        records.append(record)
    last = oldest.epoch + len(records)
    if newest > last:
        raise _lost(last + 1, newest)
    return Retained(oldest, tuple(records))


def _lost(missing: int, there: int) -> CorruptionError:
    found = f"it is missing, but epoch {there} was committed"
    return CorruptionError(names.epoch_record(missing), found, missing - 1 if missing else None)


def _full_view(storage: Storage, epoch: int, history: str) -> View:
    name = names.full_record(epoch)
    view = unpack(name, storage.read(name), View)
    if (view.epoch, view.history) != (epoch, history):
        raise CorruptionError(name, f"it is epoch {view.epoch} of history {view.history}, not {epoch} of {history}")
    return view


def _epochs(storage: Storage) -> tuple[list[int], list[int]]:
    """The epochs that have a record, and those of them that have a full record too."""
    listed = set(_listed(storage, names.EPOCHS))
    numbers = sorted({names.number_of(name) for name in listed})
    committed = [number for number in numbers if names.epoch_record(number) in listed]
    return committed, [number for number in committed if names.full_record(number) in listed]


def _listed(storage: Storage, folder: str, after: str = "") -> list[str]:
    """What is in a folder, without files that are not ours."""
    return [name for name in storage.list(folder, after) if _OURS.fullmatch(name)]
