"""Replicas: local, disposable stores that follow the segments of a partition.

Invariants:
- A replica holds committed epochs only, and says which.
- A replica is trusted by the run that made it, until the machine is started anew. Another run trusts it only if it was
  sealed (its run ended by itself), for this very partition, and its bytes are still those that were sealed. Anything
  else is dropped and restored from segments.
- A replica appears under its name whole: it is restored beside it and renamed.
- What two processes of a run do to one partition cannot mix. Who finds that another one put a new replica in place of
  the one that it has open goes over to that one with its next task. Until then it goes on with the old one, whose files
  live as long as it has them open, and which is as right as the new one: both hold the committed rows of the epoch that
  they name. If both write into the same one, the later of the two changes nothing (see `Store.apply`).
"""

import fcntl
import logging
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb
import msgspec
import pyarrow as pa
import xxhash

from penstock.errors import StorageError
from penstock.names import as_part
from penstock.process import this_boot
from penstock.state.segments import SegmentRef, read_segment
from penstock.state.store import NO_EPOCH, LmdbStore, MemoryStore, Store, address_limit
from penstock.storage import Storage

log = logging.getLogger(__name__)

SEAL = "seal.json"
DATA = "data.mdb"
MAX_WAIT_S = 600
"""How long a process waits for another one that restores the same partition."""

_LOCK = "lock"
_LOCK_PAUSE_S = 0.02
_HASH_CHUNK_BYTES = 1 << 24


class _Seal(msgspec.Struct, frozen=True):
    history: str
    step: str
    partition: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Behind:
    """What a replica lacks: segments to apply in order, and whether it must start empty."""

    afresh: bool
    missing: tuple[SegmentRef, ...]


def what_is_missing(replica_epoch: int, segments: Sequence[SegmentRef]) -> Behind:
    """Decide how to bring a replica to the state that these segments make up.

    A merged segment may hold epochs that the replica has: writing them again changes nothing. Not so a snapshot, which
    no longer says what was deleted: it needs an empty replica.

    >>> what_is_missing(NO_EPOCH, [])
    Behind(afresh=False, missing=())
    """
    missing = tuple(ref for ref in segments if ref.last_epoch > replica_epoch)
    if any(ref.snapshot for ref in missing):
        return Behind(True, tuple(segments))
    return Behind(False, missing)


class Shelf(Protocol):
    """Where the replicas of one run are kept.

    A store that `open` or `fresh` gave out is used until the next call of either for the same replica, or for another
    partition: a task is about one.
    """

    def open(self, step: str, partition: int) -> Store | None:
        """The replica of a partition if there is one that can be trusted."""
        ...

    def fresh(self, step: str, partition: int, tables: Iterator[pa.Table], epoch: int) -> Store:
        """A new replica with just these rows, in place of whatever was there."""
        ...

    def close(self) -> None:
        """The run ends by itself: let the next one trust what is here."""
        ...


def _fill(store: Store, tables: Iterator[pa.Table], epoch: int) -> None:
    # Row group by row group, so that memory stays flat; nobody sees the store before it is complete.
    for rows in tables:
        store.apply([rows], NO_EPOCH)
    store.apply([], epoch)


class MemoryShelf:
    """Replicas in this process's memory: gone with it."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, int], Store] = {}

    def open(self, step: str, partition: int) -> Store | None:
        """The replica of a partition if there is one."""
        return self._stores.get((step, partition))

    def fresh(self, step: str, partition: int, tables: Iterator[pa.Table], epoch: int) -> Store:
        """A new replica with just these rows."""
        store = MemoryStore()
        _fill(store, tables, epoch)
        self._stores[step, partition] = store
        return store

    def close(self) -> None:
        """Forget everything."""
        self._stores.clear()


class _Open(NamedTuple):
    store: LmdbStore
    file: tuple[int, int]


class DiskShelf:
    """Replicas as LMDB environments under a folder, shared by the processes of a machine.

    The folder belongs to one history and is named by it. A process has at most one shelf for it. Where addresses are
    limited, that keeps open no more than the replicas of one partition.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._name = f"{run}-{this_boot()}"
        self._open: dict[tuple[str, int], _Open] = {}
        self._used: set[tuple[str, int]] = set()

    def open(self, step: str, partition: int) -> Store | None:
        """The replica of a partition if there is one of this run, or a sealed one that is undamaged."""
        mine = self._mine(step, partition)
        self._make_room(partition)
        known = self._open.get((step, partition))
        if known is not None:
            if known.file == _file_id(mine):
                return known.store
            log.warning("local replica %s was removed or replaced by another process", mine)
            self._forget(step, partition)
        with _alone(mine.parent):
            try:
                found = mine.exists() or self._adopt(step, partition)
                return self._opened(step, partition) if found else None
            except (lmdb.Error, OSError) as error:
                log.warning("local replica %s is damaged (%s); it will be restored", mine, error)
                return None

    def fresh(self, step: str, partition: int, tables: Iterator[pa.Table], epoch: int) -> Store:
        """A new replica with just these rows; other processes see it when it is complete."""
        self._make_room(partition)
        self._forget(step, partition)
        mine = self._mine(step, partition)
        with _alone(mine.parent):
            try:
                beside = Path(tempfile.mkdtemp(prefix="new-", dir=mine.parent))
                store = LmdbStore(beside)
                try:
                    _fill(store, tables, epoch)
                finally:
                    store.close()
                if mine.exists():
                    mine.rename(Path(tempfile.mkdtemp(prefix="old-", dir=mine.parent)) / mine.name)
                beside.rename(mine)
                return self._opened(step, partition)
            except (lmdb.Error, OSError) as error:
                raise StorageError(
                    f"the local replica {mine} cannot be restored ({error}); make room on its disk, and try again"
                ) from error
            finally:
                _remove(_others(mine))

    def close(self) -> None:
        """Close and seal every replica of this run that this process has used."""
        for step, partition in sorted(self._used):
            self._forget(step, partition)
            mine = self._mine(step, partition)
            try:
                with _alone(mine.parent):
                    (mine / SEAL).write_bytes(msgspec.json.encode(self._measure(step, partition, mine)))
            except (OSError, StorageError) as error:
                log.warning("local replica %s cannot be sealed (%s); the next run will restore it", mine, error)

    def abandon(self) -> None:
        """The run has died in a process that lives on: let go of files, and leave them as they are."""
        for step, partition in list(self._open):
            self._forget(step, partition)

    def _mine(self, step: str, partition: int) -> Path:
        return self._folder / as_part(step) / f"{partition:05d}" / self._name

    def _opened(self, step: str, partition: int) -> Store:
        mine = self._mine(step, partition)
        store = LmdbStore(mine)
        file = _file_id(mine)
        assert file is not None, "LMDB makes its file when it is opened"
        self._open[step, partition] = _Open(store, file)
        self._used.add((step, partition))
        return store

    def _make_room(self, partition: int) -> None:
        """Give the addresses of other partitions back, where there are few: a task needs only those of its own."""
        if address_limit() is not None:
            for step, other in [place for place in self._open if place[1] != partition]:
                self._forget(step, other)

    def _forget(self, step: str, partition: int) -> None:
        known = self._open.pop((step, partition), None)
        if known is not None:
            known.store.close()

    def _adopt(self, step: str, partition: int) -> bool:
        """Take over a sealed replica of an earlier run; remove all others."""
        mine = self._mine(step, partition)
        others = _others(mine)
        good = [other for other in others if self._is_intact(step, partition, other)]
        if good:
            (good[-1] / SEAL).unlink()
            good[-1].rename(mine)
        _remove(others)
        return bool(good)

    def _is_intact(self, step: str, partition: int, folder: Path) -> bool:
        """Whether a replica of another run was sealed for this partition and has not changed since."""
        try:
            seal = msgspec.json.decode((folder / SEAL).read_bytes(), type=_Seal)
            found = self._measure(step, partition, folder)
        except FileNotFoundError:
            log.info("local replica %s was not sealed; it will be restored", folder)
            return False
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("local replica %s is damaged (%s); it will be restored", folder, error)
            return False
        if found != seal:
            log.warning("local replica %s is damaged (it is not what was sealed); it will be restored", folder)
        return found == seal

    def _measure(self, step: str, partition: int, folder: Path) -> _Seal:
        digest = xxhash.xxh3_64()
        with (folder / DATA).open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
            return _Seal(self._folder.name, step, partition, file.tell(), digest.hexdigest())


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """While no other process opens, adopts or restores the replica of a partition; a lock ends with its process."""
    deadline = time.monotonic() + MAX_WAIT_S
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = (place / _LOCK).open("wb")
    except OSError as error:
        raise StorageError(f"no local replica can be kept in {place} ({error}); choose another local_dir") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise StorageError(f"another process holds {place / _LOCK} for too long; end it") from error
                time.sleep(_LOCK_PAUSE_S)
        yield


def _file_id(folder: Path) -> tuple[int, int] | None:
    """What tells the file of a replica from another one under the same name; None if there is none."""
    try:
        found = (folder / DATA).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _others(mine: Path) -> list[Path]:
    """What else is in the place of a replica: those of earlier runs, and what killed processes left."""
    with suppress(OSError):
        return sorted(path for path in mine.parent.iterdir() if path.name not in (mine.name, _LOCK))
    return []


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas that one process of a run uses."""

    storage: Storage
    shelf: Shelf = field(default_factory=MemoryShelf)

    def at(self, step: str, partition: int, epoch: int, segments: Sequence[SegmentRef], oldest_epoch: int = 0) -> Store:
        """The store of a partition as of a committed epoch: caught up by deltas, or restored from segments.

        `oldest_epoch` is the oldest one still retained: a damaged segment's error offers no epoch before it.
        """
        store = self.shelf.open(step, partition)
        try:
            if store is not None and self._caught_up(store, epoch, segments, oldest_epoch):
                return store
        except lmdb.Error as error:
            log.warning("local replica of %s %d is damaged (%s); it will be restored", step, partition, error)
        rows = (rows for ref in segments for rows in read_segment(self.storage, ref, oldest_epoch))
        return self.shelf.fresh(step, partition, rows, epoch)

    def _caught_up(self, store: Store, epoch: int, segments: Sequence[SegmentRef], oldest_epoch: int) -> bool:
        """Bring a store to an epoch; False if it must be restored for that."""
        at = store.epoch
        behind = what_is_missing(at, segments)
        if behind.afresh:
            return False
        # Segment by segment, so that memory stays flat: each leads from a committed epoch to a committed epoch.
        for ref in behind.missing:
            store.apply(read_segment(self.storage, ref, oldest_epoch), ref.last_epoch)
        if at < epoch:
            store.apply([], epoch)
        return store.epoch == epoch  # it may have been ahead, or another process may have gone further meanwhile
