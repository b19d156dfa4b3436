"""Replicas follow the segments, are taken over when they can be trusted, and are restored when not."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import msgspec
import pyarrow as pa
import pytest

from penstock import names
from penstock.errors import CorruptionError, StorageError
from penstock.state import replica
from penstock.state.replica import DATA, SEAL, Behind, DiskShelf, MemoryShelf, Replicas, Shelf, what_is_missing
from penstock.state.segments import SegmentRef, merge_rows, read_segment, segment_table, write_segment
from penstock.state.store import DUES, EVENT_DUE, NO_EPOCH, Store, due_rows
from penstock.storage import Storage, open_storage
from penstock.testing import FaultyStorage

Rows = dict[bytes, bytes | None]


def row_key(number: int) -> bytes:
    return b"\x00\x07" + b"%04d" % number


class Counting(FaultyStorage):
    """A storage that knows which objects were read."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.read_names: set[str] = set()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.read_names.add(name)
        return super().read(name, start, end)


class History:
    """The committed segments of one partition, and what the state was at each epoch."""

    def __init__(self, folder: Path, step: str = "totals", partition: int = 3) -> None:
        self.storage = Counting(open_storage(folder))
        self.step, self.partition = step, partition
        self.segments: list[SegmentRef] = []
        self.states: list[Rows] = []

    @property
    def epoch(self) -> int:
        return len(self.states) - 1

    def commit(self, rows: Rows | None = None) -> None:
        epoch = len(self.states)
        if rows is None:
            rows = {row_key(i): b"%d of epoch %d of %d" % (i, epoch, self.partition) for i in range(epoch, 300, 7)}
            rows |= {row_key(i): None for i in range(epoch + 1, 300, 11)}
        self.states.append({k: v for k, v in ((self.states or [{}])[-1] | rows).items() if v is not None})
        keys = sorted(rows)
        due = [None if rows[key] is None else epoch for key in keys]
        self._write([segment_table(keys, [rows[key] for key in keys], due)], range(epoch, epoch + 1), False)

    def _write(self, tables: list[pa.Table], epochs: range, snapshot: bool) -> None:
        name = names.segment(self.step, self.partition, self.epoch, f"a{self.storage.writes}")
        self.segments.append(write_segment(self.storage, name, tables, epochs, snapshot))

    def compact(self, start: int, snapshot: bool) -> None:
        run, self.segments = self.segments[start:], self.segments[:start]
        rows = list(merge_rows([read_segment(self.storage, ref) for ref in run], snapshot))
        self._write(rows, range(run[0].first_epoch, run[-1].last_epoch + 1), snapshot)

    def at(self, shelf: Shelf, epoch: int | None = None) -> Store:
        """The replica at an epoch, having checked that it holds what it must; notes which segments were read for it."""
        epoch = self.epoch if epoch is None else epoch
        refs = [ref for ref in self.segments if ref.last_epoch <= epoch]
        self.storage.read_names.clear()
        store = Replicas(self.storage, shelf).at(self.step, self.partition, epoch, refs)
        expected = self.states[epoch] if epoch >= 0 else {}
        assert store.epoch == epoch
        assert dict(store.scan(b"", DUES)) == expected
        assert store.get_many(sorted(expected)) == [expected[key] for key in sorted(expected)]
        assert sorted(key for _, key in due_rows(store, EVENT_DUE, epoch)) == sorted(expected)
        return store

    @property
    def read(self) -> list[bool]:
        """Of each segment whether it was read since the last question began."""
        return [ref.name in self.storage.read_names for ref in self.segments]


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path / "storage")
    for _ in range(4):
        history.commit()
    return history


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local" / "history-1"


@pytest.fixture(params=["memory", "disk"])
def shelf(request: pytest.FixtureRequest, local: Path) -> Shelf:
    return MemoryShelf() if request.param == "memory" else DiskShelf(local, "1")


def ref(first: int, last: int, snapshot: bool = False) -> SegmentRef:
    return SegmentRef(f"{first}-{last}", first, last, snapshot, 1, 1, "")


DELTAS = (ref(0, 0), ref(1, 1), ref(2, 2))
MERGED = (ref(0, 0), ref(1, 3), ref(4, 4))
SNAPSHOT = (ref(0, 3, True), ref(4, 4))


@pytest.mark.parametrize(
    ("epoch", "segments", "expected"),
    [
        (NO_EPOCH, (), Behind(False, ())),
        (5, (), Behind(False, ())),
        (NO_EPOCH, DELTAS, Behind(False, DELTAS)),
        (0, DELTAS, Behind(False, DELTAS[1:])),
        (1, DELTAS, Behind(False, DELTAS[2:])),
        (2, DELTAS, Behind(False, ())),
        (9, DELTAS, Behind(False, ())),
        # A merged delta is written again as a whole, as long as the replica lacks some of it.
        (0, MERGED, Behind(False, MERGED[1:])),
        (2, MERGED, Behind(False, MERGED[1:])),
        (3, MERGED, Behind(False, MERGED[2:])),
        # A snapshot needs an empty replica, so everything is restored; one that the replica has is not missing.
        (NO_EPOCH, SNAPSHOT, Behind(True, SNAPSHOT)),
        (0, SNAPSHOT, Behind(True, SNAPSHOT)),
        (2, SNAPSHOT, Behind(True, SNAPSHOT)),
        (3, SNAPSHOT, Behind(False, SNAPSHOT[1:])),
        (4, SNAPSHOT, Behind(False, ())),
        (1, (ref(2, 3, True), ref(4, 4)), Behind(True, (ref(2, 3, True), ref(4, 4)))),
    ],
)
def test_what_is_missing(epoch: int, segments: tuple[SegmentRef, ...], expected: Behind) -> None:
    assert what_is_missing(epoch, segments) == expected


def test_replica_before_the_first_epoch_is_empty(history: History, shelf: Shelf) -> None:
    history.at(shelf, NO_EPOCH)
    history.at(shelf, 0)


def test_replica_catches_up_by_the_deltas_it_lacks(history: History, shelf: Shelf) -> None:
    history.at(shelf, 0)
    history.at(shelf, 2)
    assert history.read == [False, True, True, False]
    history.at(shelf, 2)
    assert history.read == [False] * 4
    history.at(shelf)
    assert history.read == [False, False, False, True]


def test_epoch_without_rows_is_caught_up_without_reading(history: History, shelf: Shelf) -> None:
    history.at(shelf)
    history.states.append(history.states[-1])
    history.at(shelf)
    assert history.read == [False] * 4


def test_replica_is_restored_from_deltas_alone(history: History, shelf: Shelf) -> None:
    history.at(shelf)
    assert history.read == [True] * 4


def test_replica_is_restored_from_a_snapshot_and_deltas(history: History, shelf: Shelf) -> None:
    history.compact(0, snapshot=True)
    history.commit()
    history.commit()
    history.at(shelf)
    assert history.read == [True] * 3


def test_replica_behind_a_snapshot_is_restored(history: History, shelf: Shelf) -> None:
    history.at(shelf, 1)
    history.compact(0, snapshot=True)
    history.commit()
    history.at(shelf)
    assert history.read == [True, True]


def test_replica_that_has_the_epochs_of_a_snapshot_goes_on(history: History, shelf: Shelf) -> None:
    history.at(shelf)
    history.compact(0, snapshot=True)
    history.commit()
    history.at(shelf)
    assert history.read == [False, True]


def test_replica_catches_up_by_a_merged_delta_that_it_has_in_part(history: History, shelf: Shelf) -> None:
    history.at(shelf, 2)
    history.compact(1, snapshot=False)
    history.at(shelf)
    assert history.read == [False, True]


def test_replica_ahead_of_the_epoch_is_restored(history: History, shelf: Shelf) -> None:
    history.at(shelf)
    history.at(shelf, 1)
    assert history.read == [True, True, False, False]
    history.at(shelf)


def test_damaged_segment_is_named_and_the_replica_stays_as_it_was(history: History, shelf: Shelf) -> None:
    history.at(shelf, 2)
    history.storage.delete([history.segments[3].name])
    with pytest.raises(CorruptionError) as caught:
        history.at(shelf)
    assert (caught.value.name, caught.value.last_good_epoch) == (history.segments[3].name, 2)
    history.at(shelf, 2)
    assert history.read == [False] * 4


def test_damaged_segment_in_a_restore_leaves_nothing_behind(history: History, local: Path) -> None:
    history.storage.delete([history.segments[3].name])
    with pytest.raises(CorruptionError):
        history.at(DiskShelf(local, "1"))
    assert replicas_in(local) == []


def test_memory_shelf_forgets_when_closed(history: History) -> None:
    shelf = MemoryShelf()
    history.at(shelf)
    shelf.close()
    assert shelf.open(history.step, history.partition) is None
    history.at(shelf)


def replicas_in(local: Path) -> list[Path]:
    return sorted(data.parent for data in local.rglob(DATA))


def sealed(history: History, local: Path, run: str = "1") -> Path:
    """The folder of a replica that a run left when it ended by itself."""
    shelf = DiskShelf(local, run)
    history.at(shelf)
    shelf.close()
    return next(folder for folder in replicas_in(local) if f"{history.partition:05d}" in folder.parts)


def test_sealed_replica_is_adopted_by_the_next_run(history: History, local: Path) -> None:
    before = (sealed(history, local) / DATA).stat().st_ino
    for run in ("2", "3"):
        shelf = DiskShelf(local, run)
        history.at(shelf)
        assert history.read == [False] * len(history.segments)
        history.commit()
        history.at(shelf)
        assert history.read == [False] * (len(history.segments) - 1) + [True]
        shelf.close()
    [folder] = replicas_in(local)
    assert (folder / DATA).stat().st_ino == before


def test_replica_of_this_run_is_trusted_when_opened_again(history: History, local: Path) -> None:
    sealed(history, local)
    history.at(DiskShelf(local, "1"))
    assert history.read == [False] * 4


def test_adopted_replica_is_not_sealed_any_more(history: History, local: Path) -> None:
    sealed(history, local)
    history.at(DiskShelf(local, "2"))
    assert not list(local.rglob(SEAL))


def test_adoption_removes_what_else_is_there(history: History, local: Path) -> None:
    folder = sealed(history, local)
    (folder.with_name("new-left") / "by a killed process").mkdir(parents=True)
    history.at(DiskShelf(local, "2"))
    assert history.read == [False] * 4
    assert sorted(path.name.split("-")[0] for path in folder.parent.iterdir()) == ["2", "lock"]


def test_unsealed_replica_of_another_run_is_dropped(
    history: History, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    history.at(DiskShelf(local, "1"))
    history.at(DiskShelf(local, "2"))
    assert history.read == [True] * 4
    assert "was not sealed; it will be restored" in caplog.text
    assert [folder.name[0] for folder in replicas_in(local)] == ["2"]


def test_replica_of_this_run_from_before_the_machine_was_started_is_dropped(
    history: History, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.at(DiskShelf(local, "1"))
    monkeypatch.setattr(replica, "this_boot", lambda: "another boot")
    history.at(DiskShelf(local, "1"))
    assert history.read == [True] * 4


def _truncated(folder: Path) -> None:
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[: len(data) // 2])


def _foreign(partition: int, step: str, history: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        local = folder.parents[3] / "of others" / history
        other = History(folder.parents[3] / "other storage", step, partition)
        for _ in range(4):
            other.commit({row_key(i): b"foreign" for i in range(300)})
        foreign = sealed(other, local)
        shutil.rmtree(folder)
        shutil.copytree(foreign, folder)

    return put


WRECKS: dict[str, Callable[[Path], object]] = {
    "data missing": lambda folder: (folder / DATA).unlink(),
    "truncated": _truncated,
    "empty": lambda folder: (folder / DATA).write_bytes(b""),
    "longer": lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes() + b"\0"),
    "garbage": lambda folder: (folder / DATA).write_bytes(b"garbage" * 5000),
    "zeros": lambda folder: (folder / DATA).write_bytes(bytes((folder / DATA).stat().st_size)),
    "another partition": _foreign(4, "totals", "history-1"),
    "another step": _foreign(3, "other", "history-1"),
    "another history": _foreign(3, "totals", "history-2"),
    "seal missing": lambda folder: (folder / SEAL).unlink(),
    "seal empty": lambda folder: (folder / SEAL).write_bytes(b""),
    "seal no JSON": lambda folder: (folder / SEAL).write_bytes(b"\xff\xfe\0"),
    "seal of other fields": lambda folder: (folder / SEAL).write_bytes(b'{"size_bytes": 1}'),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_bytes(b"no folder")),
}


@pytest.mark.parametrize("wreck", WRECKS.values(), ids=WRECKS.keys())
def test_wrecked_replica_is_restored(
    history: History, local: Path, wreck: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wreck(sealed(history, local))
    history.at(DiskShelf(local, "2"))
    assert history.read == [True] * 4
    assert "it will be restored" in caplog.text
    assert [folder.name[0] for folder in replicas_in(local)] == ["2"]


def test_sealed_replica_of_the_same_partition_under_another_name_is_adopted(history: History, local: Path) -> None:
    """What makes the foreign replicas above foreign is what the seal says, not that they were copied."""
    folder = sealed(history, local)
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    history.at(DiskShelf(local, "2"))
    assert history.read == [False] * 4


@pytest.mark.parametrize("file", [DATA, SEAL])
def test_flipped_bit_is_found_wherever_it_is(
    history: History, local: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sealed(history, local)
    data = (folder / file).read_bytes()
    step = 1 if file == SEAL else 499
    positions = [*range(0, len(data), step), *range(0, min(len(data), 8192), 61), len(data) - 1]
    for number, at in enumerate(positions):
        copy = tmp_path / f"copy-{number}" / local.name
        shutil.copytree(local, copy)
        damaged = copy / folder.relative_to(local) / file
        damaged.write_bytes(data[:at] + bytes([data[at] ^ (1 << number % 8)]) + data[at + 1 :])
        caplog.clear()
        shelf = DiskShelf(copy, "2")
        history.at(shelf)
        assert history.read == [True] * 4, f"byte {at}"
        assert "it will be restored" in caplog.text
        shelf.close()
        shutil.rmtree(copy.parent)


def test_replica_of_this_run_that_was_shortened_is_restored(
    history: History, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _truncated(sealed(history, local))
    history.at(DiskShelf(local, "1"))
    assert history.read == [True] * 4
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("content", [b"", b"garbage" * 5000])
def test_replica_of_this_run_that_was_overwritten_is_restored(history: History, local: Path, content: bytes) -> None:
    (sealed(history, local) / DATA).write_bytes(content)
    history.at(DiskShelf(local, "1"))
    assert history.read == [True] * 4


def test_replica_that_lmdb_finds_damaged_is_restored(
    history: History, local: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = DiskShelf(local, "1")
    store = history.at(shelf, 2)
    with monkeypatch.context() as patch:

        def damaged(*_: object) -> None:
            raise lmdb.CorruptedError("a page is not what it was")

        patch.setattr(store, "apply", damaged)
        history.at(shelf)
    assert "is damaged (a page is not what it was); it will be restored" in caplog.text
    assert history.read == [True] * 4


def test_folder_removed_under_an_open_store_is_restored(
    history: History, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = DiskShelf(local, "1")
    store = history.at(shelf, 2)
    shutil.rmtree(local)
    assert dict(store.scan(b"", DUES)) == history.states[2], "the task under way goes on"
    history.at(shelf)
    assert history.read == [True] * 4
    assert "was removed" in caplog.text


def test_folder_removed_between_runs_is_restored(history: History, local: Path) -> None:
    sealed(history, local)
    shutil.rmtree(local)
    history.at(DiskShelf(local, "2"))
    assert history.read == [True] * 4


def test_folder_removed_before_the_end_is_no_error(
    history: History, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = DiskShelf(local, "1")
    history.at(shelf)
    shutil.rmtree(local)
    shelf.close()
    assert "cannot be sealed" in caplog.text
    history.at(DiskShelf(local, "2"))


def test_folder_removed_while_it_is_restored_is_a_storage_error(history: History, local: Path) -> None:
    def rows() -> Iterator[pa.Table]:
        yield segment_table([b"\0\1a"], [b"1"])
        shutil.rmtree(local)

    shelf = DiskShelf(local, "1")
    with pytest.raises(StorageError, match="try again"):
        shelf.fresh("totals", 3, rows(), 0)
    history.at(shelf)


def test_place_that_cannot_be_written_is_a_storage_error(local: Path) -> None:
    local.parent.mkdir(parents=True)
    local.write_bytes(b"a file where a folder is needed")
    with pytest.raises(StorageError, match="choose another local_dir"):
        DiskShelf(local, "1").open("totals", 3)


def test_steps_and_partitions_have_replicas_of_their_own(tmp_path: Path, local: Path) -> None:
    histories = [
        History(tmp_path / f"{number}", step, partition)
        for number, (step, partition) in enumerate([("a/b", 0), ("a", 0), ("a", 1), ("..", 0), (".", 0)])
    ]
    shelf = DiskShelf(local, "1")
    for _ in range(2):
        for history in histories:
            history.commit()
            history.at(shelf)
    assert len(replicas_in(local)) == len(replicas_in(local.parent)) == len(histories)


_OTHER = """
import json, sys
from pathlib import Path
import msgspec
from penstock.state import replica, store as store_module
from penstock.state.replica import DiskShelf, Replicas
from penstock.state.segments import SegmentRef
from penstock.storage import open_storage
storage, local, run = sys.argv[1:]
shelf = DiskShelf(Path(local), run)
replicas = Replicas(open_storage(storage), shelf)
def mark(answer):
    print(json.dumps(answer), flush=True)
def wait_for_the_end():
    mark("here"); sys.stdin.read()
def rows():
    return [[key.decode(), value.decode()] for key, value in store.scan(b"", bytes([253]))]
def at(epoch, refs):
    global store
    store = replicas.at("totals", 3, epoch, msgspec.convert(refs, list[SegmentRef]))
def die_in_apply():
    write = store_module._write
    def write_and_wait(*given):
        write(*given); wait_for_the_end()
    store_module._write = write_and_wait
def die_in_fresh():
    fill = store_module.LmdbStore.apply
    def fill_and_wait(*given):
        fill(*given); wait_for_the_end()
    store_module.LmdbStore.apply = fill_and_wait
for line in sys.stdin:
    answer = "done"
    exec(line)
    mark(answer)
"""


class Other:
    """Another process that has a shelf of its own on the same folder and does what it is told."""

    def __init__(self, history: History, local: Path, storage: Path, run: str) -> None:
        self._history = history
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OTHER, str(storage), str(local), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> object:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def at(self, epoch: int) -> object:
        refs = [ref for ref in self._history.segments if ref.last_epoch <= epoch]
        return self.tell(f"at({epoch}, {msgspec.to_builtins(refs)!r})")

    def rows(self) -> Rows:
        return {key.encode(): value.encode() for key, value in self.tell("answer = rows()")}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate()


@pytest.fixture
def other(history: History, local: Path, tmp_path: Path) -> Iterator[Other]:
    with Other(history, local, tmp_path / "storage", "1") as other:
        yield other


@pytest.mark.parametrize("run", ["1", "2"])
def test_process_killed_in_the_middle_of_apply(history: History, local: Path, other: Other, run: str) -> None:
    """The same run goes on with what was committed to the store; another one does not trust it."""
    assert other.at(1) == "done"
    assert other.tell("die_in_apply()") == "done"
    assert other.at(3) == "here"
    other.kill()
    history.at(DiskShelf(local, run))
    assert history.read == ([False, False, True, True] if run == "1" else [True] * 4)


@pytest.mark.parametrize("run", ["1", "2"])
def test_process_killed_in_the_middle_of_fresh(history: History, local: Path, other: Other, run: str) -> None:
    assert other.tell("die_in_fresh()") == "done"
    assert other.at(3) == "here"
    other.kill()
    assert len(replicas_in(local)) == 1
    history.at(DiskShelf(local, run))
    assert history.read == [True] * 4
    assert [folder.name[0] for folder in replicas_in(local)] == [run]


def test_process_killed_while_it_replaces_a_replica(history: History, local: Path, other: Other) -> None:
    assert other.at(3) == "done"
    assert other.tell("die_in_fresh()") == "done"
    assert other.at(1) == "here"  # its replica is ahead, so it restores another one
    other.kill()
    history.at(DiskShelf(local, "1"))
    assert history.read == [False] * 4, "the one that was to be replaced is still whole"


def test_two_processes_of_a_run_share_a_replica(history: History, local: Path, other: Other) -> None:
    assert other.at(1) == "done"
    shelf = DiskShelf(local, "1")
    history.at(shelf, 2)
    assert history.read == [False, False, True, False]
    assert other.at(2) == "done"
    assert other.rows() == history.states[2]
    assert other.at(3) == "done"
    history.at(shelf, 3)
    assert history.read == [False] * 4
    assert len(replicas_in(local)) == 1


def test_replica_replaced_under_another_process(history: History, local: Path, other: Other) -> None:
    """It goes on with its old files, and with its next task goes over to the new ones."""
    assert other.at(3) == "done"
    shelf = DiskShelf(local, "1")
    history.at(shelf, 1)  # the replica is ahead, so it is replaced
    assert other.rows() == history.states[3]
    assert other.tell("answer = store.epoch") == 3
    assert other.at(3) == "done"
    assert other.rows() == history.states[3]
    history.at(shelf, 3)
    assert history.read == [False] * 4, "the other process has brought the new replica to this epoch"
    assert len(replicas_in(local)) == 1


def test_two_processes_restore_at_once(history: History, local: Path, other: Other) -> None:
    assert other.tell("die_in_fresh()") == "done"
    assert other.at(3) == "here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "MAX_WAIT_S", 0.1)
        with pytest.raises(StorageError, match="another process holds"):
            history.at(DiskShelf(local, "1"))
    other.kill()
    history.at(DiskShelf(local, "1"))
    assert len(replicas_in(local)) == 1


def test_late_task_of_another_process_does_not_set_a_replica_back(history: History, local: Path, other: Other) -> None:
    """It found the replica at epoch 1 and wants to bring it to 2, when another process has brought it to 3."""
    assert other.at(1) == "done"
    shelf = DiskShelf(local, "1")
    store = history.at(shelf, 3)
    late = read_segment(history.storage, history.segments[2])
    store.apply(late, 2)
    history.at(shelf, 3)
    assert history.read == [False] * 4
    assert other.at(3) == "done"
    assert other.rows() == history.states[3]


def test_shelf_sealed_while_another_process_goes_on_is_not_trusted(
    history: History, local: Path, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    assert other.at(2) == "done"
    shelf = DiskShelf(local, "1")
    history.at(shelf, 2)
    shelf.close()
    assert other.at(3) == "done"
    history.at(DiskShelf(local, "2"))
    assert history.read == [True] * 4
    assert "it is not what was sealed" in caplog.text
