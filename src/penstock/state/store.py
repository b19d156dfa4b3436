"""Stores: open key-value maps, each holding one partition of one step as of an epoch.

Invariants:
- `apply` is atomic: after a crash a store holds all rows of an epoch and its number, or neither.
- The epoch of a store never goes back: rows that come late, from a task that was given up, change nothing.
- Rows that are due at some time are also found in order of that time, under reserved keys that the store keeps itself.
- A store is disposable: what it holds can be restored from segments, so nothing here waits for a disk.
"""

import mmap
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import StorageError

NO_EPOCH = -1
DUES = b"\xfd"  # + row key -> both due times
EVENT_DUE = b"\xfe"  # + due time + row key
CLOCK_DUE = b"\xff"
"""Key groups are below 4096, so no row key begins with one of these."""

MAX_ROW_KEY_BYTES = 490
MANY_ROWS = 16 * 1024
_EPOCH_KEY = b"\x00"
_FIRST_ROW = b"\x00\x00"  # behind the key of the epoch, not behind any row
_NEVER = (1 << 63) - 1
_FIRST_MAP_BYTES = 1 << 34  # addresses, not memory or disk; so few stores ever need more
_MAX_MAP_BYTES = 1 << 44
_MORE_MEMORY = "use more partitions, or raise the limit of memory (spark.executor.pyspark.memory, ulimit -v)"
_MAPS_IN_LIMIT = 64  # where addresses are limited, a store begins with this part of them, and grows in small steps
_LOCK_FILE_BYTES = 8192  # of LMDB's 126 readers
_MANY_WRITES = 1000  # from here on one sort is cheaper than many insertions


_Get = Callable[[bytes], bytes | None]


class Store(Protocol):
    """An open map of one partition. What `apply` was given is what `get_many` and `scan` find."""

    @property
    def epoch(self) -> int:
        """The last epoch applied, or NO_EPOCH."""
        ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none. Fastest when the keys are sorted."""
        ...

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows with start <= key < end, in order of key. Nothing is applied while it is iterated."""
        ...

    def apply(self, tables: Iterable[pa.Table], epoch: int) -> None:
        """Write rows (a null value deletes), and note the epoch, atomically; if it has that epoch already, do nothing.

        Within a table a key stands once; of several tables the last one holds. A store that was given only NO_EPOCH so
        far takes that any number of times: so it is filled part by part, before anybody sees it.
        """
        ...

    def close(self) -> None:
        """Let go of files. The store is not used afterwards."""
        ...


def pack_dues(event_ms: int | None, clock_ms: int | None) -> bytes:
    """The two due times of a row as bytes. A time before 1970 is as good as 0: it is due at once.

    >>> unpack_dues(pack_dues(5, None))
    (5, None)
    """
    return _time(event_ms) + _time(clock_ms)


def unpack_dues(data: bytes) -> tuple[int | None, int | None]:
    """The inverse of pack_dues."""
    event_ms, clock_ms = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:16], "big")
    return (None if event_ms == _NEVER else event_ms, None if clock_ms == _NEVER else clock_ms)


def _time(ms: int | None) -> bytes:
    return (_NEVER if ms is None else max(0, ms)).to_bytes(8, "big")


def due_key(index: bytes, due_ms: int, key: bytes = b"") -> bytes:
    """Where a row that is due stands in an index (EVENT_DUE or CLOCK_DUE)."""
    return index + _time(due_ms) + key


def due_rows(store: Store, index: bytes, until_ms: int) -> list[tuple[int, bytes]]:
    """The rows due at or before a time: (due time, row key), earliest first.

    >>> from penstock.state.segments import segment_table
    >>> store = MemoryStore()
    >>> store.apply([segment_table([b"\\0\\1a", b"\\0\\1b"], [b"", b""], event_due_ms=[9, 5])], 0)
    >>> due_rows(store, EVENT_DUE, until_ms=8)
    [(5, b'\\x00\\x01b')]
    """
    found = store.scan(index, due_key(index, until_ms + 1))
    return [(int.from_bytes(key[1:9], "big"), key[9:]) for key, _ in found]


def _index_writes(rows: pa.Table, get: _Get, timed: bool) -> Iterator[tuple[bytes, bytes | None]]:
    """What changes in the reserved keys when these rows are written; `timed` says whether any row there is due."""
    dues = [rows.column(name) for name in ("event_due_ms", "clock_due_ms")]
    if not timed and all(column.null_count == len(column) for column in dues):
        return
    for key, event_ms, clock_ms in zip(_list(rows.column("key")), *(c.to_pylist() for c in dues), strict=True):
        old = get(DUES + key)
        new = None if event_ms is None and clock_ms is None else pack_dues(event_ms, clock_ms)
        if old == new:
            continue
        if old is not None:
            yield from ((index_key, None) for index_key in _index_keys(key, old))
        if new is not None:
            yield from ((index_key, b"") for index_key in _index_keys(key, new))
        yield DUES + key, new


def _index_keys(key: bytes, dues: bytes) -> list[bytes]:
    """Where a row with these due times stands in the indexes."""
    times = zip((EVENT_DUE, CLOCK_DUE), unpack_dues(dues), strict=True)
    return [due_key(index, due, key) for index, due in times if due is not None]


def _list(column: pa.ChunkedArray) -> list[bytes]:
    return cast("list[bytes]", column.to_numpy().tolist())


def _is_late(have: int, epoch: int) -> bool:
    """Whether a store that has an epoch has no use for the rows of another."""
    return have != NO_EPOCH and epoch <= have


class MemoryStore:
    """A store in this process's memory: for tests, and for state that is small and quickly restored."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes] = {}
        self._sorted: list[bytes] = []
        self.epoch = NO_EPOCH

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""
        return list(map(self._rows.get, keys))

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows with start <= key < end, in order of key."""
        keys = self._sorted[bisect_left(self._sorted, start) : bisect_left(self._sorted, end)]
        return ((key, self._rows[key]) for key in keys)

    def apply(self, tables: Iterable[pa.Table], epoch: int) -> None:
        """Write rows and note the epoch."""
        kept = list(tables)
        if _is_late(self.epoch, epoch):
            return
        for rows in kept:
            timed = self._sorted[-1:] >= [DUES]
            index = list(_index_writes(rows, self._rows.get, timed))
            self._write(list(zip(_list(rows.column("key")), _list(rows.column("value")), strict=True)))
            self._write(index)
        self.epoch = epoch

    def _write(self, writes: Sequence[tuple[bytes, bytes | None]]) -> None:
        for key, value in writes:
            if value is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = value
        if len(writes) > _MANY_WRITES:
            self._sorted = sorted(self._rows)
            return
        for key, _ in writes:
            at = bisect_left(self._sorted, key)
            known = self._sorted[at : at + 1] == [key]
            if key in self._rows and not known:
                self._sorted.insert(at, key)
            elif key not in self._rows and known:
                del self._sorted[at]

    def close(self) -> None:
        """Forget everything."""
        self._rows, self._sorted, self.epoch = {}, [], NO_EPOCH


def address_limit() -> int | None:
    """How many bytes of addresses this process may use, mapped files included; None if any number.

    `ulimit -v` sets it, and in Spark's Python workers `spark.executor.pyspark.memory`.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _first_map(limit: int | None, file_bytes: int) -> int:
    """How large a map to open a store with.

    >>> _first_map(None, 100) == _FIRST_MAP_BYTES, _first_map(1 << 29, 1 << 20) >> 20
    (True, 9)
    """
    if limit is None:
        return max(_FIRST_MAP_BYTES, 2 * file_bytes)
    return _in_pages(min(_FIRST_MAP_BYTES, limit // _MAPS_IN_LIMIT) + file_bytes)


def _larger_map(limit: int | None, size: int) -> int:
    """How large a map is to become when it is full."""
    return 2 * size if limit is None else _in_pages(size + max(size // 4, limit // _MAPS_IN_LIMIT))


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _check_addresses(folder: str, size: int, held: int = 0) -> None:
    """Raise StorageError if a map would not find addresses in place of the one held: LMDB would not survive that.

    There must be some to spare, or whoever asks for memory next would not survive either.
    """
    limit = address_limit()
    if limit is None or size <= held:
        return
    try:
        mmap.mmap(-1, size - held + limit // _MAPS_IN_LIMIT).close()
    except OSError as error:
        raise StorageError(
            f"the local store {folder} needs {size} bytes of addresses, too many where a process may have {limit}; "
            f"{_MORE_MEMORY}"
        ) from error


class LmdbStore:
    """A store on local disk, larger than memory, shared by the processes of a machine.

    It is written without waiting for the disk: it survives the death of processes, and whoever opens it after the
    death of a machine must not trust it (see replica.py). A process opens a folder once, and not before it forks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write_lock_file(folder)
        size = _first_map(address_limit(), _file_bytes(folder))
        _check_addresses(str(folder), size)
        self._env = _opened(str(folder), size)
        self._env.reader_check()  # what killed processes were reading would stay in the file for ever
        # To read behind the end of the file would end the process. (Rarely, the last pages were freed before they were
        # ever written; such a store is restored for nothing.)
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if _file_bytes(folder) < needed and self._env.info()["last_txnid"]:
            self._env.close()
            raise lmdb.CorruptedError(f"{folder} is shorter than the {needed} bytes that were written to it")

    def _begin(self, write: bool = False) -> lmdb.Transaction:
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:  # another process of this machine made the map larger
            path, held = self._env.path(), self._env.info()["map_size"]
            _check_addresses(path, 2 * _file_bytes(Path(path)), held)
            self._env.set_mapsize(0)
            return self._env.begin(write=write)

    @property
    def epoch(self) -> int:
        """The last epoch applied, or NO_EPOCH."""
        with self._begin() as txn:
            return _epoch_of(txn)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""
        with self._begin() as txn, txn.cursor() as cursor:  # a cursor is quicker where the next key is near
            return list(map(cast("_Get", cursor.get), keys))

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows with start <= key < end, in order of key."""
        with self._begin() as txn, txn.cursor() as cursor:
            if not cursor.set_range(max(start, _FIRST_ROW)):
                return
            for key, value in cast("Iterator[tuple[bytes, bytes]]", cursor):
                if key >= end:
                    return
                yield key, value

    def apply(self, tables: Iterable[pa.Table], epoch: int) -> None:
        """Write rows and note the epoch in one transaction."""
        kept = list(tables)
        while not self._has_applied(kept, epoch):
            self._grow()
        if sum(rows.num_rows for rows in kept) >= MANY_ROWS:
            # LMDB keeps the memory of all pages that a transaction has changed, for the next one: up to 4 KiB a row.
            path, size = self._env.path(), self._env.info()["map_size"]
            self._env.close()
            self._env = _opened(path, size)

    def _has_applied(self, tables: Sequence[pa.Table], epoch: int) -> bool:
        """Write rows and the epoch, or nothing if the map is too small."""
        try:
            with self._begin(write=True) as txn:
                if not _is_late(_epoch_of(txn), epoch):
                    for rows in tables:
                        _write(txn, rows)
                    txn.put(_EPOCH_KEY, b"%d" % epoch)
        except lmdb.MapFullError:
            return False
        except lmdb.MemoryError as error:
            raise StorageError(
                f"the local store {self._env.path()} cannot be written ({error}); {_MORE_MEMORY}"
            ) from error
        except lmdb.Error as error:
            if type(error) not in (lmdb.Error, lmdb.DiskError):
                raise  # the errors of other types are about the store itself, these about where it is
            raise StorageError(
                f"the local store {self._env.path()} cannot be written ({error}); make room on its disk"
            ) from error
        return True

    def _grow(self) -> None:
        held = self._env.info()["map_size"]
        size = _larger_map(address_limit(), held)
        if size > _MAX_MAP_BYTES:
            raise StorageError(
                f"the local store {self._env.path()} has reached {_MAX_MAP_BYTES} bytes; use more partitions"
            )
        _check_addresses(self._env.path(), size, held)
        self._env.set_mapsize(size)

    def close(self) -> None:
        """Close the files of the store in this process."""
        self._env.close()


def _write_lock_file(folder: Path) -> None:
    """See to it that the file through which processes agree has room on the disk.

    LMDB gives it a length only, and writes to it as to memory: on a full disk that would end the process by a signal.
    """
    with (folder / "lock.mdb").open("ab") as file:
        file.write(bytes(max(0, _LOCK_FILE_BYTES - file.tell())))


def _opened(folder: str, size: int) -> lmdb.Environment:
    # No writemap, although it is quicker: a full disk would end the process by a signal.
    return lmdb.open(folder, map_size=size, sync=False, metasync=False, readahead=False, max_spare_txns=1)


def _epoch_of(txn: lmdb.Transaction) -> int:
    found = txn.get(_EPOCH_KEY)
    return NO_EPOCH if found is None else int(found)


def _write(txn: lmdb.Transaction, rows: pa.Table) -> None:
    with txn.cursor() as cursor:
        timed = cursor.set_range(DUES)
        index = list(_index_writes(rows, cast("_Get", txn.get), timed))
        values = rows.column("value")
        if values.null_count:
            for key in _list(rows.filter(pc.is_null(values)).column("key")):
                txn.delete(key)
            rows = rows.filter(pc.is_valid(values))
        # Not a list of pairs: a million tuples at once keep the garbage collector busy for longer than the writing.
        cursor.putmulti(zip(_list(rows.column("key")), _list(rows.column("value")), strict=True))
        for key, value in index:
            if value is None:
                txn.delete(key)
            else:
                txn.put(key, value)


def _file_bytes(folder: Path) -> int:
    data = folder / "data.mdb"
    return data.stat().st_size if data.exists() else 0
