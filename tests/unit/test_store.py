"""Stores keep their contract in memory and on disk; the one on disk grows, is shared, and fails as it says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.state import store as store_module
from penstock.state.segments import segment_table
from penstock.state.store import DUES, LmdbStore, MemoryStore, Store, pack_dues, unpack_dues
from penstock.testing import StoreContract

KIB, MIB = 1 << 10, 1 << 20
ROW = b"\0\1" + b"000042"


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestLmdbStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LmdbStore(tmp_path / "made" / "when needed")
        yield store
        store.close()


class TestLmdbStoreThatMustGrow(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        monkeypatch.setattr(store_module, "_FIRST_MAP_BYTES", 64 * KIB)
        store = LmdbStore(tmp_path)
        yield store
        store.close()


def filled(store: Store, epoch: int, rows: int = 5000) -> Store:
    """Write rows of about 1 KiB that tell their epoch."""
    keys = [b"\0\1%06d" % i for i in range(rows)]
    store.apply([segment_table(keys, [b"%d" % epoch * 1000] * rows)], epoch)
    return store


@pytest.mark.parametrize("dues", [(None, None), (0, None), (None, 0), (5, 7), (1 << 62, 1)])
def test_due_times_are_unpacked_as_packed(dues: tuple[int | None, int | None]) -> None:
    assert unpack_dues(pack_dues(*dues)) == dues


def test_lmdb_store_is_there_when_opened_again(tmp_path: Path) -> None:
    filled(LmdbStore(tmp_path), 3).close()
    store = LmdbStore(tmp_path)
    assert store.epoch == 3
    assert store.get_many([ROW]) == [b"3" * 1000]


def test_lmdb_store_grows_beyond_its_first_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_FIRST_MAP_BYTES", 64 * KIB)
    store = LmdbStore(tmp_path)
    for epoch in range(4):
        filled(store, epoch)
        assert store.epoch == epoch
        assert len(list(store.scan(b"", DUES))) == 5000
    assert (tmp_path / "data.mdb").stat().st_size > 100 * 64 * KIB


def test_lmdb_store_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_FIRST_MAP_BYTES", 64 * KIB)
    monkeypatch.setattr(store_module, "_MAX_MAP_BYTES", MIB)
    store = LmdbStore(tmp_path)
    store.apply([segment_table([b"\0\1a"], [b"1"])], 1)
    with pytest.raises(StorageError, match="use more partitions"):
        filled(store, 2)
    assert (store.epoch, store.get_many([b"\0\1a"])) == (1, [b"1"])


def test_shortened_lmdb_store_is_not_opened(tmp_path: Path) -> None:
    filled(LmdbStore(tmp_path), 1).close()
    whole = (tmp_path / "data.mdb").read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 8192):
        (tmp_path / "data.mdb").write_bytes(whole[:size])
        with pytest.raises(lmdb.CorruptedError, match="is shorter than"):
            LmdbStore(tmp_path)


def test_readers_of_killed_processes_are_forgotten(tmp_path: Path) -> None:
    """What a reader sees stays in the file: one that was killed would let it grow for ever."""
    filled(LmdbStore(tmp_path), 1).close()
    with Other(tmp_path, 64 * MIB) as living, Other(tmp_path, 64 * MIB) as reading:
        assert living.tell("answer = store.epoch") == "1"
        assert reading.tell("rows = store.scan(b'', b'\\xfd'); next(rows)") == "done"
        reading.kill()
        # As long as one process has the store open, the table of readers stays as it is.
        store = LmdbStore(tmp_path)
        assert f" {reading.pid} " not in store._env.readers()
        assert f" {living.pid} " in store._env.readers()
        store.close()


_OTHER = """
import sys
from pathlib import Path
from penstock.errors import StorageError
from penstock.state import store as store_module
from penstock.state.segments import segment_table
from penstock.state.store import LmdbStore
store_module._FIRST_MAP_BYTES = int(sys.argv[2])
ROW = bytes([0, 1]) + b"000042"
def apply(epoch, rows):
    keys = [bytes([0, 1]) + b"%06d" % i for i in range(rows)]
    store.apply([segment_table(keys, [b"%d" % epoch * 1000] * rows)], epoch)
def refused(epoch, rows):
    try:
        apply(epoch, rows)
    except StorageError as error:
        return "make room" in str(error)
store = LmdbStore(Path(sys.argv[1]))
for line in sys.stdin:
    answer = "done"
    exec(line)
    print(answer, flush=True)
"""


class Other:
    """Another process that has the same store open and does what it is told."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OTHER, str(folder), str(map_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def apply(self, epoch: int, rows: int = 5000) -> str:
        return self.tell(f"apply({epoch}, {rows})")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate()


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    store = filled(LmdbStore(tmp_path), 1)
    with Other(tmp_path, store_module._FIRST_MAP_BYTES) as other:
        assert other.tell("answer = store.epoch, len(list(store.scan(b'', b'\\xfd')))") == "(1, 5000)"
        assert other.apply(2) == "done"
        assert (store.epoch, store.get_many([ROW])) == (2, [b"2" * 1000])
        filled(store, 3)
        assert other.tell("answer = store.epoch, store.get_many([ROW])[0][:2]") == "(3, b'33')"


def test_store_that_another_process_made_larger_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FIRST_MAP_BYTES", 256 * KIB)
    store = filled(LmdbStore(tmp_path), 1, rows=10)
    with Other(tmp_path, 256 * KIB) as other:
        assert other.apply(2) == "done"
        assert store.get_many([ROW]) == [b"2" * 1000]
        assert other.apply(3, rows=20_000) == "done"
        assert len(list(store.scan(b"", DUES))) == 20_000
        assert other.apply(4, rows=60_000) == "done"
        filled(store, 5)
        assert other.tell("answer = store.epoch") == "5"


def test_writer_that_was_killed_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = filled(LmdbStore(tmp_path), 1)
    with Other(tmp_path, store_module._FIRST_MAP_BYTES) as other:
        assert other.tell("txn = store._env.begin(write=True); txn.put(ROW, b'half')") == "done"
        other.kill()
    assert store.get_many([ROW]) == [b"1" * 1000]
    filled(store, 2)
    assert (store.epoch, store.get_many([ROW])) == (2, [b"2" * 1000])


def test_store_that_may_not_grow_says_so_and_stays_as_it_was(tmp_path: Path) -> None:
    with Other(tmp_path, 64 * MIB) as other:
        assert other.apply(1, rows=100) == "done"
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, resource.RLIM_INFINITY))"
        assert other.tell(limit.format(MIB)) == "done"
        assert other.tell("answer = refused(2, 5000)") == "True"
        assert other.tell("answer = store.epoch, len(list(store.scan(b'', b'\\xfd')))") == "(1, 100)"
        assert other.tell(limit.format(64 * MIB)) == "done"
        assert other.apply(2) == "done"
        assert other.tell("answer = store.epoch, len(list(store.scan(b'', b'\\xfd')))") == "(2, 5000)"


def test_full_disk_is_a_storage_error_and_the_store_stays_as_it_was(small_disk: Path) -> None:
    store = filled(LmdbStore(small_disk / "store"), 1, rows=100)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * MIB)
    for _ in range(2):
        with pytest.raises(StorageError, match="make room"):
            filled(store, 2, rows=900)
        assert (store.epoch, len(list(store.scan(b"", DUES)))) == (1, 100)
    filler.unlink()
    filled(store, 2, rows=900)
    assert (store.epoch, len(list(store.scan(b"", DUES)))) == (2, 900)
    store.close()


_ON_FULL_DISK = """
import sys
from pathlib import Path
from penstock.errors import StorageError
from penstock.state.replica import DiskShelf

shelf = DiskShelf(Path(sys.argv[1]), "1")
try:
    shelf.fresh("step", 0, iter([]), 0)
except StorageError as error:
    print(error)
"""


def test_a_store_cannot_be_opened_on_a_full_disk_and_says_so(small_disk: Path) -> None:
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert "make room on its disk" in printed(_ON_FULL_DISK, small_disk / "local")


_LIMITED = """
import resource, sys
from pathlib import Path
from penstock.errors import StorageError
from penstock.state.segments import segment_table
from penstock.state.replica import DiskShelf

folder, partitions, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
used = 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")))
limit = used + (160 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
shelf = DiskShelf(folder, "1")
try:
    for partition in range(partitions):
        store = shelf.fresh("step", partition, iter(()), 0)
        for epoch in range(rows // 100):
            keys = [b"\\0\\1%08d" % i for i in range(100 * epoch, 100 * epoch + 100)]
            store.apply([segment_table(keys, [b"%08d" % partition * 1000] * 100)], epoch + 1)
    for partition in range(partitions):
        store = shelf.open("step", partition)
        assert len(list(store.scan(b"", b"\\xf0"))) == rows
        assert store.get_many([keys[-1]]) == [b"%08d" % partition * 1000]
    shelf.close()
    print("sealed", len(list(folder.rglob("seal.json"))))
except StorageError as error:
    print(error)
"""


def printed(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own, whose allocators take little ahead."""
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def limited(folder: Path, partitions: int, rows: int) -> str:
    """What a process says that may have 160 MiB of addresses more than it has, with so many rows of 8 kB."""
    return printed(_LIMITED, folder, partitions, rows)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits addresses")
def test_stores_that_are_larger_together_than_the_addresses_of_a_process_are_written_and_read(tmp_path: Path) -> None:
    assert limited(tmp_path, partitions=8, rows=4_000) == "sealed 8\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits addresses")
def test_a_store_that_is_larger_than_the_addresses_of_a_process_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    said = limited(tmp_path, partitions=1, rows=40_000)
    assert "bytes of addresses, too many where a process may have" in said
    assert "use more partitions, or raise the limit of memory (spark.executor.pyspark.memory" in said


_CRAMPED = """
import resource, sys
from pathlib import Path
from penstock.errors import StorageError
from penstock.state.segments import segment_table
from penstock.state.store import LmdbStore

store = LmdbStore(Path(sys.argv[1]))
keys = [b"\\0\\1%08d" % i for i in range(100_000)]
for epoch in range(1, 101):
    store.apply([segment_table(keys[1000 * epoch - 1000 : 1000 * epoch], [b"v" * 400] * 1000)], epoch)
touched = segment_table(keys[::10], [b"w" * 400] * len(keys[::10]))
used = 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")))
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
try:
    store.apply([touched], 101)
except StorageError as error:
    print(store.epoch, error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.apply([touched], 101)
print(store.epoch, sum(value[:1] == b"w" for _, value in store.scan(b"", b"\\xf0")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits addresses")
def test_too_little_memory_for_a_transaction_is_an_error_with_a_remedy_and_leaves_the_store_as_it_was(
    tmp_path: Path,
) -> None:
    refused, done = printed(_CRAMPED, tmp_path).splitlines()
    assert refused.startswith("100 the local store")
    assert "raise the limit of memory" in refused
    assert done == "101 10000"


_SCATTERED = """
import sys
from pathlib import Path
from penstock.state.segments import segment_table
from penstock.state.store import MANY_ROWS, LmdbStore

def anonymous_bytes():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))

store = LmdbStore(Path(sys.argv[1]))
keys = [b"\\0\\1%08d" % i for i in range(10 * MANY_ROWS)]
for epoch in range(10):
    part = keys[MANY_ROWS * epoch : MANY_ROWS * (epoch + 1)]
    store.apply([segment_table(part, [b"v" * 400] * len(part))], epoch + 1)
before = anonymous_bytes()
store.apply([segment_table(keys[::10], [b"w" * 400] * MANY_ROWS)], 11)
print(store.epoch, len(list(store.scan(b"", b"\\xf0"))), (anonymous_bytes() - before) / MANY_ROWS)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much memory is no file's")
def test_the_memory_of_pages_that_a_large_transaction_changed_is_given_back(tmp_path: Path) -> None:
    epoch, rows, bytes_of_a_row = printed(_SCATTERED, tmp_path).split()
    assert (epoch, rows) == ("11", "163840")
    assert float(bytes_of_a_row) < 2_000  # each changed a page of 4,096
