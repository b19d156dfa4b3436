"""Replicas: local, disposable stores that follow the segments of a partition.

Invariants:
- A replica holds committed epochs only, and says which.
- A replica is trusted by the run that made it. Another run trusts it only if it was sealed (its run ended by itself)
  and its bytes are still those that were sealed. Anything else is dropped and restored from segments.
- A replica appears under its name whole: it is restored beside it and renamed.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import lmdb
import msgspec
import pyarrow as pa
import xxhash

from penstock.state.segments import SegmentRef, read_segment
from penstock.state.store import NO_EPOCH, LmdbStore, MemoryStore, Store
from penstock.storage import Storage

log = logging.getLogger(__name__)

SEAL = "seal.json"
DATA = "data.mdb"
_HASH_CHUNK_BYTES = 1 << 24


class _Seal(msgspec.Struct, frozen=True):
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
    if any(ref.snapshot and ref.first_epoch <= replica_epoch for ref in missing):
        return Behind(True, tuple(segments))
    return Behind(False, missing)


class Shelf(Protocol):
    """Where the replicas of one run are kept."""

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


class DiskShelf:
    """Replicas as LMDB environments under a folder, shared by the processes of a machine."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._stores: dict[tuple[str, int], LmdbStore] = {}

    def open(self, step: str, partition: int) -> Store | None:
        """The replica of a partition if there is one of this run, or a sealed one that is undamaged."""
        known = self._stores.get((step, partition))
        if known is not None:
            return known
        place = self._place(step, partition)
        mine = place / self._run
        if not mine.exists() and not self._adopt(place, mine):
            return None
        try:
            store = LmdbStore(mine)
        except lmdb.Error as error:
            log.warning("local replica %s is damaged (%s); it will be restored", mine, error)
            return None
        self._stores[step, partition] = store
        return store

    def fresh(self, step: str, partition: int, tables: Iterator[pa.Table], epoch: int) -> Store:
        """A new replica with just these rows; other processes see it when it is complete."""
        known = self._stores.pop((step, partition), None)
        if known is not None:
            known.close()
        place = self._place(step, partition)
        mine, beside = place / self._run, place / f"{self._run}.new"
        shutil.rmtree(beside, ignore_errors=True)
        store = LmdbStore(beside)
        try:
            _fill(store, tables, epoch)
        finally:
            store.close()
        shutil.rmtree(mine, ignore_errors=True)
        beside.rename(mine)
        self._stores[step, partition] = opened = LmdbStore(mine)
        return opened

    def close(self) -> None:
        """Close and seal every replica of this run that this process has open."""
        for (step, partition), store in self._stores.items():
            store.close()
            mine = self._place(step, partition) / self._run
            (mine / SEAL).write_bytes(msgspec.json.encode(_measure(mine / DATA)))
        self._stores.clear()

    def _place(self, step: str, partition: int) -> Path:
        return self._folder / quote(step, safe=" ") / f"{partition:05d}"

    def _adopt(self, place: Path, mine: Path) -> bool:
        """Take over a sealed replica of an earlier run; remove all others."""
        others = sorted(place.iterdir()) if place.exists() else []
        good = [other for other in others if _is_intact(other)]
        if good:
            (good[-1] / SEAL).unlink()
            good[-1].rename(mine)
        for other in others:
            shutil.rmtree(other, ignore_errors=True)
        return bool(good)


def _measure(data: Path) -> _Seal:
    digest = xxhash.xxh3_64()
    with data.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return _Seal(data.stat().st_size, digest.hexdigest())


def _is_intact(folder: Path) -> bool:
    """Whether a replica of another run was sealed and has not changed since."""
    try:
        seal = msgspec.json.decode((folder / SEAL).read_bytes(), type=_Seal)
        found = _measure(folder / DATA)
    except FileNotFoundError:
        log.info("local replica %s was not sealed; it will be restored", folder)
        return False
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("local replica %s is damaged (%s); it will be restored", folder, error)
        return False
    if found != seal:
        log.warning("local replica %s is damaged (it is not what was sealed); it will be restored", folder)
        return False
    return True


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
            if store is not None and (at := store.epoch) <= epoch:
                behind = what_is_missing(at, segments)
                if not behind.afresh:
                    store.apply(_rows(self.storage, behind.missing, oldest_epoch), epoch)
                    return store
        except lmdb.Error as error:
            log.warning(
                "local replica of %s, partition %d, is damaged (%s); it will be restored", step, partition, error
            )
        return self.shelf.fresh(step, partition, _rows(self.storage, segments, oldest_epoch), epoch)


def _rows(storage: Storage, segments: Sequence[SegmentRef], oldest_epoch: int) -> Iterator[pa.Table]:
    for ref in segments:
        yield from read_segment(storage, ref, oldest_epoch)
