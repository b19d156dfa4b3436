"""What every implementation of a seam promises, as test suites to subclass."""

import threading
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import pyarrow as pa

from penstock.errors import InvalidError, MissingError, OutcomeUnknownError
from penstock.storage import MAX_SETTLE_ATTEMPTS, Storage, settle, sub
from penstock.testing.faults import FaultyStorage

_Answer = TypeVar("_Answer")

RACERS = 8
ODD_NAMES = ("with space", "ünï-çødé-日本", "hash#1", "per%20cent", "100%", "plus+and&", "a=b,c;d", "quote'", "@:!~")


class StorageContract:
    """The promises of `penstock.storage.Storage`, as tests for pytest.

    Subclass it in a test module, with a name that pytest collects, and give it a fixture `storage`: an empty storage
    that belongs to the test alone.

    >>> class TestMyStorage(StorageContract):
    ...     # @pytest.fixture
    ...     def storage(self):
    ...         from penstock.storage import open_storage
    ...         return open_storage("memory://contract")
    >>> suite = TestMyStorage()
    >>> suite.test_created_object_reads_back(suite.storage())
    """

    def test_created_object_reads_back(self, storage: Storage) -> None:
        """What was created is what is read."""
        assert storage.create("epochs/1.json", b"one") is True
        assert storage.read("epochs/1.json") == b"one"

    def test_second_create_is_refused_and_changes_nothing(self, storage: Storage) -> None:
        """A name that is taken answers False and keeps its bytes."""
        assert storage.create("a", b"first") is True
        assert storage.create("a", b"second") is False
        assert storage.read("a") == b"first"

    def test_any_buffer_can_be_created(self, storage: Storage) -> None:
        """Data may be any contiguous buffer, not bytes alone."""
        assert storage.create("arrow", pa.py_buffer(b"arrow")) is True
        assert storage.create("view", memoryview(b"a view")[2:]) is True
        assert storage.create("numbers", memoryview(b"12345678").cast("q")) is True
        assert storage.create("array", bytearray(b"array")) is True
        assert [storage.read(name) for name in ("arrow", "view", "array")] == [b"arrow", b"view", b"array"]
        assert storage.read("numbers") == b"12345678"

    def test_reading_an_absent_object_says_it_is_missing(self, storage: Storage) -> None:
        """Absence is its own error, which names the object, for whole reads and for ranges."""
        storage.create("folder/object", b"here")
        for name in ("absent", "folder/absent", "folder", "folder/object/below"):
            for start, end in ((0, None), (1, 3), (2, 2), (-2, None)):
                with _raises(MissingError) as caught:
                    storage.read(name, start, end)
                assert name in str(caught.exception)

    def test_ranges_are_clipped_like_slices(self, storage: Storage) -> None:
        """A range gives what a slice of the bytes would give."""
        data = b"0123456789"
        storage.create("a", data)
        for start, end in (
            (0, 4),
            (3, 7),
            (8, 99),
            (10, 12),
            (50, 60),
            (4, 4),
            (0, 0),
            (4, None),
            (10, None),
            (50, None),
        ):
            assert storage.read("a", start, end) == data[start:end], (start, end)
        for start in (-1, -3, -10, -50):
            assert storage.read("a", start) == data[start:], start

    def test_a_range_that_means_nothing_is_refused(self, storage: Storage) -> None:
        """Backward ranges, and suffixes with an end, are mistakes of the caller."""
        storage.create("a", b"0123456789")
        for start, end in ((5, 3), (-5, 8), (-5, -1), (0, -1)):
            with _raises(InvalidError):
                storage.read("a", start, end)

    def test_empty_object_is_an_object(self, storage: Storage) -> None:
        """No bytes are not no object."""
        assert storage.create("marks/empty", b"") is True
        assert storage.create("marks/empty", b"x") is False
        assert (
            storage.read("marks/empty") == storage.read("marks/empty", -8) == storage.read("marks/empty", 0, 8) == b""
        )
        assert storage.list("marks") == ["marks/empty"]

    def test_large_object_reads_back(self, storage: Storage) -> None:
        """10 MB, whole and in part, and still refused the second time."""
        data = bytes(range(250)) * 40_000
        assert storage.create("large", data) is True
        assert storage.read("large") == data
        assert storage.read("large", -300) == data[-300:]
        assert storage.read("large", 5_000_000, 5_000_100) == data[5_000_000:5_000_100]
        assert storage.create("large", data) is False

    def test_odd_names_are_kept_as_they_are(self, storage: Storage) -> None:
        """Spaces, unicode and characters with a meaning in URLs and shells are plain characters of a name."""
        names = [f"odd names/{name}/{name}" for name in ODD_NAMES]
        for name in names:
            assert storage.create(name, name.encode()) is True
        assert storage.list("odd names") == sorted(names)
        assert [storage.read(name) for name in names] == [name.encode() for name in names]
        for name in names:
            assert storage.list("odd names", after=name) == sorted(other for other in names if other > name)
        storage.delete(names)
        assert storage.list("") == []

    def test_names_that_leave_the_storage_are_refused(self, storage: Storage) -> None:
        """A name is relative, and cannot climb out."""
        for name in ("", "/a", "a/", "a//b", "../a", "a/../b", "./a", "line\nbreak"):
            for use in (storage.read, lambda name: storage.create(name, b""), lambda name: storage.delete([name])):
                with _raises(InvalidError):
                    use(name)

    def test_list_is_sorted_and_full_names(self, storage: Storage) -> None:
        """Names come in the order of their characters, below subfolders too."""
        names = ["e/10", "e/9", "e/1.full", "e/1", "e/a/2", "e/a.b", "e/a-b", "e/Z"]
        for name in names:
            storage.create(name, b"")
        assert storage.list("e") == sorted(names)
        assert storage.list("") == sorted(names)
        assert storage.list("e/a") == ["e/a/2"]

    def test_list_gives_the_folder_and_not_its_namesakes(self, storage: Storage) -> None:
        """A prefix is a folder: neither an object of that name nor names that merely begin so belong to it."""
        for name in ("epochs/1", "epochs2/1", "epochs.json", "other"):
            storage.create(name, b"")
        assert storage.list("epochs") == storage.list("epochs/") == ["epochs/1"]
        assert storage.list("absent") == storage.list("other") == []

    def test_list_after_is_strict(self, storage: Storage) -> None:
        """`after` is a full name, of an object or not, and is itself left out."""
        names = [f"log/{number:020d}" for number in range(0, 30, 3)]
        for name in names:
            storage.create(name, b"")
        assert storage.list("log", after=names[4]) == names[5:]
        assert storage.list("log", after=f"log/{13:020d}") == names[5:]
        assert storage.list("log", after=names[-1]) == []
        assert storage.list("log", after="log") == storage.list("log", after="a") == names
        assert storage.list("log", after="z") == []

    def test_list_after_looks_into_subfolders(self, storage: Storage) -> None:
        """`after` compares full names, whatever folder they are in."""
        names = ["t/a-b/1", "t/a/1", "t/a/2", "t/b/1", "t/c"]
        for name in names:
            storage.create(name, b"")
        for after in (*names, "t/a", "t/a/", "t/b", "t/bb"):
            assert storage.list("t", after=after) == [name for name in sorted(names) if name > after], after

    def test_more_than_a_page_of_names_is_listed(self, storage: Storage) -> None:
        """Object stores answer with pages of 1,000 names; a list has all of them."""
        names = [f"many/{number:05d}" for number in range(1_100)]
        with ThreadPoolExecutor(RACERS) as pool:
            assert all(pool.map(lambda name: storage.create(name, b""), names))
        assert storage.list("many") == names
        assert storage.list("many", after=names[49]) == names[50:]

    def test_deleted_object_is_gone_and_its_name_is_free(self, storage: Storage) -> None:
        """Deleting frees the name, and touches nothing else."""
        storage.create("a/1", b"1")
        storage.create("a/2", b"2")
        storage.delete(["a/1"])
        assert storage.list("a") == ["a/2"]
        with _raises(MissingError):
            storage.read("a/1")
        assert storage.create("a/1", b"again") is True

    def test_deleting_what_is_absent_is_no_error(self, storage: Storage) -> None:
        """The present ones go, the absent ones do not matter, wherever they stand in the call."""
        storage.create("a/1", b"1")
        storage.create("b", b"2")
        storage.delete(["a/0", "a/1", "nowhere/at/all", "b/below", "b"])
        storage.delete(["a/1"])
        storage.delete([])
        assert storage.list("") == []

    def test_exactly_one_of_many_creators_wins(self, storage: Storage) -> None:
        """Of 8 threads that create one name at once, one is told True, and its bytes stand."""
        for round_number in range(5):
            name = f"race/{round_number}"
            answers = _race(partial(_create_as, storage, name))
            assert answers.count(True) == 1
            assert answers.count(False) == RACERS - 1
            assert storage.read(name) == _bytes_of(answers.index(True))

    def test_settlers_agree_on_the_winner(self, storage: Storage) -> None:
        """Everyone who settles a name holds the same bytes, and one of them wrote these."""
        answers = _race(lambda racer: settle(storage, "leader", b"%d" % racer))
        assert set(answers) == {storage.read("leader")}
        assert [answer == b"%d" % racer for racer, answer in enumerate(answers)].count(True) == 1

    def test_settle_recognises_its_own_write_when_the_answer_is_lost(self, storage: Storage) -> None:
        """A lost answer is not a lost race."""
        faulty = FaultyStorage(storage, lose_answer=1)
        assert settle(faulty, "a", b"ours") == b"ours"
        assert faulty.writes == 1
        assert settle(storage, "a", b"ours") == b"ours"

    def test_settle_gives_the_winner_when_the_answer_of_a_loser_is_lost(self, storage: Storage) -> None:
        """Who lost, and lost the answer too, still learns who won."""
        storage.create("a", b"theirs")
        assert settle(FaultyStorage(storage, lose_answer=1), "a", b"ours") == b"theirs"

    def test_settle_gives_up_after_its_maximum(self, storage: Storage) -> None:
        """A storage that never answers is asked a bounded number of times."""
        unreachable = _Unreachable(storage)
        with _raises(OutcomeUnknownError):
            settle(unreachable, "a", b"ours")
        assert unreachable.attempts == MAX_SETTLE_ATTEMPTS

    def test_sub_is_a_folder_of_the_storage(self, storage: Storage) -> None:
        """A view of a folder keeps all promises, and sees nothing else."""
        part = sub(storage, "totals/epochs")
        assert part.create("1/a", b"1") is True
        assert storage.create("totals/other", b"") is True
        assert part.create("2", b"2") is True
        assert part.create("2", b"3") is False
        assert part.read("2") == storage.read("totals/epochs/2") == b"2"
        assert part.list("") == ["1/a", "2"]
        assert part.list("1") == ["1/a"]
        assert part.list("", after="1/a") == ["2"]
        part.delete(["2", "absent"])
        assert storage.list("") == ["totals/epochs/1/a", "totals/other"]
        with _raises(InvalidError):
            part.read("../other")


class _Unreachable(FaultyStorage):
    """Loses every write, and every answer."""

    attempts = 0

    def create(self, name: str, data: object) -> bool:
        self.attempts += 1
        raise OutcomeUnknownError(f"no answer about {name!r}, as this test wants")


def _raises(error: type[Exception]) -> "AbstractContextManager[unittest.case._AssertRaisesContext[Exception]]":
    # The standard library's, so that this package can be imported where pytest is not installed.
    return unittest.TestCase().assertRaises(error)  # noqa: PT027


def _bytes_of(racer: int) -> bytes:
    return b"%d" % racer * 10_000


def _create_as(storage: Storage, name: str, racer: int) -> bool:
    return storage.create(name, _bytes_of(racer))


def _race(run: Callable[[int], _Answer]) -> list[_Answer]:
    """The answers of racers that start together, by racer."""
    start = threading.Barrier(RACERS)

    def racer(number: int) -> _Answer:
        start.wait(timeout=60)
        return run(number)

    with ThreadPoolExecutor(RACERS) as pool:
        return list(pool.map(racer, range(RACERS)))
