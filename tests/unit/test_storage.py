"""Storage keeps its contract on a disk, in memory and on a server that speaks S3, and fails as it says."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from http.client import HTTPConnection
from itertools import count
from pathlib import Path

import pytest
from obstore.store import S3Store

from penstock.clock import SystemClock, random_ids
from penstock.errors import CorruptionError, InvalidError, MissingError, OutcomeUnknownError, StorageError
from penstock.storage import Storage, _ObjectStoreStorage, open_storage, settle, sub
from penstock.testing import Crash, FaultyStorage, ManualClock, StorageContract, seeded_ids

SERVER_START_S = 60
_numbers = count()


class TestFolderOnDisk(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "made" / "when needed")


class TestFileUrl(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage((tmp_path / "with space").as_uri())


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(f"memory://contract-{next(_numbers)}")


class TestMemoryFolder(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage(f"memory://contract-{next(_numbers)}/folder/below")


class TestSub(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return sub(open_storage(tmp_path), "a/folder")


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3_bucket: str) -> Storage:
        return open_storage(f"s3://{s3_bucket}/folder-{next(_numbers)}/below")


# The server takes a free port and says which, so that nobody can take the port in between; it ends with its input.
_SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False); server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """A bucket on a server of its own, that the environment variables of obstore point to."""
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline())
        environment = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            _create_bucket(port, "penstock")
            yield "penstock"
    finally:
        server.kill()
        server.communicate()


def _create_bucket(port: int, bucket: str) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=SERVER_START_S)
    connection.request(
        "PUT", f"/{bucket}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/1/us-east-1/s3/x"}
    )
    assert connection.getresponse().status == 200
    connection.close()


def test_missing_bucket_is_a_storage_error_that_says_so(s3_bucket: str) -> None:
    with pytest.raises(StorageError, match="s3://no-such-bucket"):
        open_storage("s3://no-such-bucket").create("a", b"1")


def test_server_that_is_not_there_leaves_the_outcome_unknown() -> None:
    store = S3Store(
        "bucket",
        endpoint="http://127.0.0.1:9",
        access_key_id="test",
        secret_access_key="test",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )
    storage = _ObjectStoreStorage(store, "s3://bucket")
    with pytest.raises(OutcomeUnknownError, match="cannot create 'a' in s3://bucket"):
        storage.create("a", b"1")
    with pytest.raises(StorageError, match="cannot read 'a' in s3://bucket") as caught:
        storage.read("a")
    assert type(caught.value) is StorageError


@pytest.mark.parametrize("url", ["ftp://host/folder", "s3://", "file://otherhost/folder", "http://host/x"])
def test_unsupported_url_is_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(InvalidError, match=r"use a folder, file://, memory://, s3://, gs:// or az://"):
        open_storage(url)


def test_reopened_storage_sees_the_same_objects(tmp_path: Path) -> None:
    for url in (
        tmp_path / "state",
        str(tmp_path / "text"),
        f"file://{tmp_path}/url",
        "memory://",
        "memory://reopened/x",
    ):
        assert open_storage(url).create("a", b"1") is True
        assert open_storage(url).list("") == ["a"]
        assert open_storage(url).read("a") == b"1"


def test_relative_folder_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("state")
    monkeypatch.chdir("/")
    storage.create("a", b"1")
    assert (tmp_path / "state" / "a").read_bytes() == b"1"


def test_opening_a_folder_makes_nothing(tmp_path: Path) -> None:
    assert open_storage(tmp_path / "new").list("") == []
    assert not (tmp_path / "new").exists()


def test_object_cannot_take_the_name_of_a_folder_on_disk(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.create("a/b", b"1")
    with pytest.raises(InvalidError, match="'a' is a folder"):
        storage.create("a", b"2")
    with pytest.raises(StorageError, match="cannot create 'a/b/c'"):
        storage.create("a/b/c", b"3")
    assert storage.list("") == ["a/b"]


def test_what_was_read_from_a_disk_is_linked_there_and_lives_without_the_first_name(tmp_path: Path) -> None:
    outbox, topic = open_storage(tmp_path / "outbox"), open_storage(tmp_path / "topic")
    assert outbox.create("a", b"1")
    assert topic.create("b", outbox.read("a"))
    assert (tmp_path / "topic" / "b").stat().st_ino == (tmp_path / "outbox" / "a").stat().st_ino
    assert not topic.create("b", outbox.read("a"))
    outbox.delete(["a"])
    assert topic.read("b") == b"1"


def test_what_was_read_is_written_where_it_cannot_be_linked(tmp_path: Path, small_disk: Path) -> None:
    first, elsewhere = open_storage(tmp_path), open_storage(small_disk)
    assert first.create("a", b"1")
    data = first.read("a")
    assert elsewhere.create("b", data)
    first.delete(["a"])
    assert first.create("c", data)
    assert elsewhere.read("b") == first.read("c") == b"1"


def test_failed_create_certainly_failed_and_leaves_nothing(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    name = "too long " * 40
    with pytest.raises(StorageError, match="check the disk") as caught:
        storage.create(name, b"1")
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert storage.list("") == []
    assert list((tmp_path / ".partial").iterdir()) == []


def test_writer_killed_in_the_middle_leaves_nothing_visible(tmp_path: Path) -> None:
    """SIGKILL at many moments of creating 64 MB: each object that is there is whole, and none is half."""
    size = 64_000_000
    program = textwrap.dedent(f"""
        import sys
        from penstock.storage import open_storage
        storage, data = open_storage(sys.argv[1]), bytes(range(250)) * {size // 250}
        print("ready", flush=True)
        for number in range(1_000):
            storage.create(f"large/{{number}}", data)
    """)
    killed_in_the_middle = 0
    for attempt in range(6):
        root = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.02 + 0.04 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        storage = open_storage(root)
        partial = list((root / ".partial").glob("*"))
        killed_in_the_middle += bool(partial)
        assert storage.list("") == storage.list("large")
        for name in storage.list("large"):
            assert storage.read(name) == bytes(range(250)) * (size // 250)
        assert storage.create(f"large/{len(storage.list('large'))}", b"the name is free") is True
    assert killed_in_the_middle > 0


def test_what_killed_writers_left_behind_goes_after_a_day(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.create("a", b"1")
    now = time.time()
    for name, hours in {"just now": 0, "yesterday": 23, "long ago": 25, "in another year": 9_000}.items():
        file = tmp_path / ".partial" / name
        file.write_bytes(b"half")
        os.utime(file, (now - hours * 3_600, now - hours * 3_600))
    (tmp_path / ".partial" / "not a file").mkdir()
    storage.create("b", b"2")
    assert len(list((tmp_path / ".partial").iterdir())) == 5, "once for each opened storage"
    assert open_storage(tmp_path).read("a") == b"1"
    assert len(list((tmp_path / ".partial").iterdir())) == 5, "readers delete nothing"
    assert open_storage(tmp_path).create("c", b"3") is True
    assert sorted(file.name for file in (tmp_path / ".partial").iterdir()) == ["just now", "not a file", "yesterday"]
    assert open_storage(tmp_path).list("") == ["a", "b", "c"]


def test_writer_whose_file_was_taken_for_abandoned_fails_and_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(tmp_path)
    link, times = os.link, count()

    def late_link(source: Path, target: Path) -> None:
        if next(times) == 0:
            Path(source).unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    with pytest.raises(StorageError) as caught:
        storage.create("a", b"1")
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert storage.list("") == []
    assert storage.create("a", b"1") is True


def test_faulty_storage_dies_before_its_write() -> None:
    inner = open_storage(f"memory://faults-{next(_numbers)}")
    storage = FaultyStorage(inner, die_before=2)
    storage.create("a", b"1")
    with pytest.raises(Crash):
        storage.create("b", b"2")
    assert inner.list("") == ["a"]
    assert (storage.writes, storage.log) == (2, [("create", "a"), ("create", "b")])


def test_faulty_storage_dies_after_its_write_and_stays_dead() -> None:
    inner = open_storage(f"memory://faults-{next(_numbers)}")
    storage = FaultyStorage(inner, die_after=2)
    storage.create("a", b"1")
    with pytest.raises(Crash):
        storage.delete(["a", "b"])
    assert inner.list("") == []
    uses = (
        lambda: storage.read("a"),
        lambda: storage.list(""),
        lambda: storage.create("c", b""),
        lambda: storage.delete([]),
    )
    for use in uses:
        with pytest.raises(Crash):
            use()
    assert (storage.writes, storage.log) == (2, [("create", "a"), ("delete", "a"), ("delete", "b")])
    assert inner.list("") == []


def test_faulty_storage_loses_one_answer_and_lives() -> None:
    inner = open_storage(f"memory://faults-{next(_numbers)}")
    storage = FaultyStorage(inner, lose_answer=1)
    with pytest.raises(OutcomeUnknownError):
        storage.create("a", b"1")
    assert storage.read("a") == b"1"
    assert storage.create("a", b"2") is False


def test_settle_creates_again_when_the_lost_write_never_happened() -> None:
    inner = open_storage(f"memory://faults-{next(_numbers)}")

    class LosesFirstWrite(FaultyStorage):
        def create(self, name: str, data: bytes) -> bool:
            if self.writes == 0:
                self.writes += 1
                raise OutcomeUnknownError("the request was lost on its way")
            return super().create(name, data)

    assert settle(LosesFirstWrite(inner), "a", b"ours") == b"ours"
    assert inner.read("a") == b"ours"


def test_settle_passes_on_what_certainly_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        settle(open_storage(tmp_path / "file"), "a", b"ours")
    assert type(caught.value) is StorageError


@pytest.mark.parametrize("last_good_epoch", [None, 0, 41])
def test_corruption_survives_copies_and_the_way_between_processes(last_good_epoch: int | None) -> None:
    error = CorruptionError("segments/a.parquet", "its footer is missing", last_good_epoch)
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is CorruptionError
        assert (twin.name, twin.found, twin.last_good_epoch) == (error.name, error.found, last_good_epoch)
        assert str(twin) == str(error)
        assert "'segments/a.parquet' is damaged: its footer is missing" in str(twin)


def test_plain_errors_survive_the_way_between_processes() -> None:
    twin = pickle.loads(pickle.dumps(MissingError("there is no object 'a'")))
    assert type(twin) is MissingError
    assert str(twin) == "there is no object 'a'"


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(100)
    assert clock.now_ms() == clock.now_ms() == 100
    clock.advance(timedelta(seconds=1, microseconds=1_500))
    assert clock.now_ms() == 1_101
    clock.advance(-1)
    assert clock.now_ms() == 1_100


def test_system_clock_is_the_time_of_the_machine() -> None:
    before, now, after = time.time(), SystemClock().now_ms(), time.time()
    assert before * 1_000 - 1 <= now <= after * 1_000


def test_ids_differ_and_seeded_ones_repeat() -> None:
    new_id, again, other = seeded_ids(1), seeded_ids(1), seeded_ids(2)
    ids = [new_id() for _ in range(100)]
    assert ids == [again() for _ in range(100)]
    assert len({*ids, *(other() for _ in range(100)), *(random_ids()() for _ in range(100))}) == 300
    assert {len(one) for one in ids} == {32}
