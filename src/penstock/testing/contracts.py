"""What every implementation of a seam promises, as test suites to subclass."""

import random
import threading
import unittest
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import pyarrow as pa

from penstock.errors import InvalidError, MissingError, OutcomeUnknownError
from penstock.state.segments import segment_table
from penstock.state.store import CLOCK_DUE, DUES, EVENT_DUE, MAX_ROW_KEY_BYTES, NO_EPOCH, Store, due_rows, unpack_dues
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


class StoreContract:
    """The promises of `penstock.state.store.Store`, as tests for pytest.

    Subclass it in a test module, with a name that pytest collects, and give it a fixture `store`: an empty store that
    belongs to the test alone.

    >>> from penstock.state.store import MemoryStore
    >>> class TestMyStore(StoreContract):
    ...     # @pytest.fixture
    ...     def store(self):
    ...         return MemoryStore()
    >>> suite = TestMyStore()
    >>> suite.test_applied_rows_are_found(suite.store())
    """

    def test_new_store_holds_nothing(self, store: Store) -> None:
        """Before anything is applied there is no row, and no epoch."""
        assert store.epoch == NO_EPOCH
        assert store.get_many([b"\0\1a", b"\0\0"]) == [None, None]
        assert list(store.scan(b"", b"\xff\xff")) == []

    def test_applied_rows_are_found(self, store: Store) -> None:
        """Values come in the order of the keys asked for, None where there is no row."""
        store.apply([_rows({b"\0\1a": b"1", b"\0\1b": b"", b"\x0f\xffz": b"3"})], 0)
        assert store.epoch == 0
        asked = [b"\x0f\xffz", b"\0\1a", b"\0\1absent", b"\0\1b", b"\0\1a"]
        assert store.get_many(asked) == [b"3", b"1", None, b"", b"1"]
        assert store.get_many([]) == []

    def test_scan_gives_a_range_in_order(self, store: Store) -> None:
        """From start, which is included, to end, which is not; the store's own keys are not among the rows."""
        rows = {b"\0\0": b"0", b"\0\1a": b"1", b"\0\1ab": b"2", b"\0\1b": b"3", b"\x0f\xffz": b"4"}
        store.apply([_rows(rows)], 4)
        keys = sorted(rows)
        for start in (b"", *keys, b"\0\1aa"):
            for end in (b"", *keys, b"\0\1aa", DUES):
                expected = [(key, rows[key]) for key in keys if start <= key < end]
                assert list(store.scan(start, end)) == expected, (start, end)

    def test_scan_may_be_left_before_its_end(self, store: Store) -> None:
        """Who has seen enough stops, and the store is as before."""
        store.apply([_rows({b"\0\1%d" % i: b"" for i in range(9)})], 1)
        assert next(iter(store.scan(b"", DUES))) == (b"\0\x010", b"")
        store.apply([_rows({b"\0\1new": b""})], 2)
        assert len(list(store.scan(b"", DUES))) == 10

    def test_later_rows_replace_and_delete(self, store: Store) -> None:
        """A row is overwritten, or deleted by a null; to delete what is absent is no error."""
        store.apply([_rows({b"\0\1a": b"1", b"\0\1b": b"1", b"\0\1c": b"1"})], 1)
        store.apply([_rows({b"\0\1a": b"2", b"\0\1b": None, b"\0\1x": None, b"\0\1y": b"2"})], 2)
        assert list(store.scan(b"", DUES)) == [(b"\0\1a", b"2"), (b"\0\1c", b"1"), (b"\0\1y", b"2")]
        assert store.get_many([b"\0\1b", b"\0\1x"]) == [None, None]

    def test_of_several_tables_the_last_holds(self, store: Store) -> None:
        """The tables of one `apply` are written in their order."""
        first = _rows({b"\0\1a": b"1", b"\0\1b": b"1"})
        second = _rows({b"\0\1a": None, b"\0\1b": b"2"})
        store.apply([first, second, _rows({b"\0\1a": b"3"}), _rows({})], 1)
        assert store.get_many([b"\0\1a", b"\0\1b"]) == [b"3", b"2"]

    def test_epoch_without_rows_is_noted(self, store: Store) -> None:
        """An epoch counts even if it wrote nothing."""
        store.apply([], 0)
        assert store.epoch == 0
        store.apply([_rows({})], 7)
        assert store.epoch == 7

    def test_apply_that_fails_changes_nothing(self, store: Store) -> None:
        """If the rows cannot all be read, none of them is written, nor the epoch."""
        store.apply([_rows({b"\0\1a": b"1"}, event_due_ms=5)], 1)
        with _raises(_BrokenOffError):
            store.apply(_broken_off(_rows({b"\0\1a": None, b"\0\1b": b"2"})), 2)
        assert store.epoch == 1
        assert store.get_many([b"\0\1a", b"\0\1b"]) == [b"1", None]
        assert due_rows(store, EVENT_DUE, 10) == [(5, b"\0\1a")]

    def test_rows_that_come_late_change_nothing(self, store: Store) -> None:
        """An epoch that the store has is not applied again, nor one before it."""
        store.apply([_rows({b"\0\1a": b"old"})], 5)
        store.apply([_rows({b"\0\1a": b"new"})], 6)
        for late in (4, 5, 6, NO_EPOCH):
            store.apply([_rows({b"\0\1a": b"late", b"\0\1b": b"late"})], late)
            assert store.epoch == 6
            assert store.get_many([b"\0\1a", b"\0\1b"]) == [b"new", None]

    def test_store_is_filled_part_by_part(self, store: Store) -> None:
        """While a store has no epoch, rows are added under none."""
        for part in range(3):
            store.apply([_rows({b"\0\1%d%d" % (part, i): b"%d" % i for i in range(5)})], NO_EPOCH)
        assert store.epoch == NO_EPOCH
        store.apply([], 9)
        assert store.epoch == 9
        assert len(list(store.scan(b"", DUES))) == 15

    def test_due_rows_come_in_order_of_time(self, store: Store) -> None:
        """A row is found by each of its due times, and only by those."""
        keys = [b"\0\1a", b"\0\1b", b"\0\1c", b"\0\1d"]
        store.apply([segment_table(keys, [b""] * 4, [30, None, 10, None], [None, 20, 10, None])], 1)
        assert due_rows(store, EVENT_DUE, 100) == [(10, b"\0\1c"), (30, b"\0\1a")]
        assert due_rows(store, EVENT_DUE, 30) == [(10, b"\0\1c"), (30, b"\0\1a")]
        assert due_rows(store, EVENT_DUE, 29) == [(10, b"\0\1c")]
        assert due_rows(store, EVENT_DUE, 9) == []
        assert due_rows(store, CLOCK_DUE, 100) == [(10, b"\0\1c"), (20, b"\0\1b")]
        assert [None if d is None else unpack_dues(d) for d in store.get_many([DUES + key for key in keys])] == [
            (30, None), (None, 20), (10, 10), None,
        ]  # fmt: skip

    def test_rewritten_row_is_due_only_as_written_last(self, store: Store) -> None:
        """Overwriting or deleting a row takes its old due times out of the indexes."""
        keys = [b"\0\1a", b"\0\1b", b"\0\1c", b"\0\1d"]
        store.apply([segment_table(keys, [b"1"] * 4, [10, 20, 30, 40], [1, 2, 3, 4])], 1)
        store.apply([segment_table(keys, [b"2", None, b"2", b"2"], [11, None, None, 40], [None, None, None, 4])], 2)
        assert due_rows(store, EVENT_DUE, 100) == [(11, b"\0\1a"), (40, b"\0\1d")]
        assert due_rows(store, CLOCK_DUE, 100) == [(4, b"\0\1d")]
        store.apply([segment_table(keys, [None] * 4)], 3)
        assert list(store.scan(b"", b"\xff\xff")) == []

    def test_longest_key_can_be_due(self, store: Store) -> None:
        """The longest row key that there is has room in every index."""
        key = b"\0\1" + b"k" * (MAX_ROW_KEY_BYTES - 2)
        store.apply([segment_table([key], [b"v" * 100_000], [-5], [1 << 62])], 1)
        assert store.get_many([key]) == [b"v" * 100_000]
        assert due_rows(store, EVENT_DUE, 0) == [(0, key)]
        assert due_rows(store, CLOCK_DUE, 1 << 62) == [(1 << 62, key)]

    def test_store_is_what_a_dict_would_be(self, store: Store) -> None:
        """Many epochs of random writes and deletions, small and large, leave what they leave in a dict."""
        chance = random.Random(7)
        expected: dict[bytes, tuple[bytes, int | None]] = {}
        for epoch in range(30):
            keys = [b"\0\1%04d" % chance.randrange(4000) for _ in range(chance.choice([0, 1, 10, 3000]))]
            rows = {key: chance.choice([None, b"", b"v%d" % epoch]) for key in keys}
            due = chance.choice([None, epoch * 10])
            store.apply([_rows(rows, due)], epoch)
            expected |= {key: (value, due) for key, value in rows.items() if value is not None}
            expected = {key: row for key, row in expected.items() if rows.get(key, b"") is not None}
            assert list(store.scan(b"", DUES)) == [(key, expected[key][0]) for key in sorted(expected)]
            dues = sorted((due, key) for key, (_, due) in expected.items() if due is not None)
            assert due_rows(store, EVENT_DUE, 1000) == dues


class _BrokenOffError(Exception):
    """What a test lets the reading of rows end with."""


def _broken_off(rows: pa.Table) -> Iterator[pa.Table]:
    yield rows
    raise _BrokenOffError


def _rows(rows: Mapping[bytes, bytes | None], event_due_ms: int | None = None) -> pa.Table:
    values = [rows[key] for key in sorted(rows)]
    return segment_table(sorted(rows), values, [None if value is None else event_due_ms for value in values])


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
