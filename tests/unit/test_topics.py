"""Embedded topics keep every event once and in order, whoever writes, dies or reads; and say so when they cannot."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import topic_log, topics
from penstock.clock import SystemClock, random_ids
from penstock.errors import CorruptionError, InvalidError, OutcomeUnknownError, StorageError
from penstock.events import Event
from penstock.state.codec import Codec, value_codec
from penstock.state.key_codecs import key_codec
from penstock.state.keys import KEY_GROUPS, encode_key, group_range, key_group
from penstock.storage import Storage, open_storage
from penstock.testing import FaultyStorage, ManualClock, seeded_ids
from penstock.topics import Position, Slice, Topic, TopicLog, raw_key_group, raw_key_groups, topic_segment

_numbers = count()


@dataclass
class Order:
    amount: int


class CountingStorage:
    """Another storage that counts the calls of each verb and the bytes read."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.calls: list[tuple[str, str]] = []
        self.bytes_read = 0

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls.append(("read", name))
        data = self._inner.read(name, start, end)
        self.bytes_read += len(data)
        return data

    def create(self, name: str, data: bytes) -> bool:
        self.calls.append(("create", name))
        return self._inner.create(name, data)

    def list(self, prefix: str, after: str = "") -> list[str]:
        self.calls.append(("list", prefix))
        return self._inner.list(prefix, after)

    def delete(self, names: Sequence[str]) -> None:
        self._inner.delete(names)


def memory() -> Storage:
    return open_storage(f"memory://topics-{next(_numbers)}")


def topic_on(storage: Storage, key: str = "str", value: Any = "json", seed: int = 1) -> Topic:
    return Topic("orders", key_codec(key), value_codec(value), storage, ManualClock(5_000), seeded_ids(seed))


def fill(storage: Storage, sizes: Sequence[int], keys: int = 7) -> list[Event]:
    """A topic with segments of these sizes; returns its events as they are read."""
    topic = topic_on(storage)
    numbers = count()
    for size in sizes:
        topic.append(Event(f"k{n % keys}", n, 1_000 + n) for n in (next(numbers) for _ in range(size)))
    return list(topic.read())


def damage(storage: Storage, name: str, change: Callable[[bytes], bytes]) -> None:
    data = storage.read(name)
    storage.delete([name])
    storage.create(name, change(data))


def segment_of(number: int, rows: int = 3) -> tuple[bytes, str, str]:
    keys = [f"k{number}".encode()] * rows
    group = raw_key_group(key_codec("str"), keys[0])
    columns = [[group] * rows, keys, [b"%d" % number] * rows, [number] * rows, [None] * rows]
    arrays = [pa.array(c, topics.SCHEMA.field(i).type) for i, c in enumerate(columns)]
    origin = f"history sink {number} 0 0"
    data, checksum = topic_segment(pa.Table.from_arrays(arrays, schema=topics.SCHEMA), origin)
    return data, origin, checksum


# Round trips


def test_events_come_back_with_keys_values_times_headers_and_offsets() -> None:
    topic = topic_on(memory())
    headers = (("trace", b"\x00\xff"), ("trace", b""), ("ü", b"2"))
    with topic.producer() as send:
        send("other", key="anna", timestamp_ms=-7)
        send({"amount": 3}, key="anna", timestamp_ms=-7, headers=headers)
        send.flush()
        send("another", key="anna", timestamp_ms=-7)
        send("last", key="anna", timestamp_ms=-7)
        send([1, None], key=None, timestamp_ms=(1 << 63) - 1)
        send("text")
    found = {event.value if isinstance(event.value, str) else str(event.value): event for event in topic.read()}
    assert found["{'amount': 3}"].headers == headers
    assert (found["{'amount': 3}"].key, found["{'amount': 3}"].timestamp_ms) == ("anna", -7)
    assert (found["[1, None]"].key, found["[1, None]"].timestamp_ms) == (None, (1 << 63) - 1)
    assert (found["text"].timestamp_ms, found["text"].headers, found["text"].topic) == (5_000, (), "orders")
    assert sorted(event.offset for event in found.values()) == list(range(6)) == list(range(topic.end()))
    assert [found[value].headers for value in ("other", "another", "last")] == [(), (), ()]


@pytest.mark.parametrize(
    ("codec", "keys"),
    [
        ("str", ["", "a", "Grüße 🌍", "\x00\x01", "x" * 199, "x" * 398]),
        ("bytes", [b"", b"\x00\x01\xff", b"x" * 100]),
        ("int", [0, -1, 2**63, 10**30]),
        ("json", ["a", 1, 1.5, True, ("eu", 7), ("a", ("b", 2))]),
        ("canonical", ["a", b"a", 1, 1.5, False, ("eu", b"7", (1.0,))]),
    ],
)
def test_every_key_codec_brings_keys_back_and_finds_their_key_group(codec: str, keys: list[Any]) -> None:
    topic = topic_on(memory(), key=codec)
    topic.append(Event(key, i, i) for i, key in enumerate([*keys, None]))
    assert {event.value: event.key for event in topic.read()} == dict(enumerate([*keys, None]))
    table, _ = topic.log.read(Slice(0, 0, len(keys) + 1))
    groups = dict(zip(table.column("value").to_pylist(), table.column("key_group").to_pylist(), strict=True))
    for i, key in enumerate(keys):
        assert groups[b"%d" % i] == key_group(encode_key(key))
    assert groups[b"%d" % len(keys)] == 0


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        ("json", [None, 1, 1.5, "a", [1, [2]], {"a": None, "b": {"c": []}}, True, 10**30]),
        ("msgpack", [None, b"\x00", float("inf"), {"a": [1, b"2"]}]),
        ("bytes", [b"", b"\x00\xff"]),
        ("str", ["", "Grüße"]),
        (Order, [Order(1), Order(-2)]),
        (Codec("hex", lambda n: b"%x" % n, lambda data: int(data, 16), frozenset({int})), [0, 255]),
    ],
    ids=["json", "msgpack", "bytes", "str", "type", "own"],
)
def test_every_value_codec_brings_values_back(codec: Any, values: list[Any]) -> None:
    topic = topic_on(memory(), value=codec)
    topic.append(Event("k", value, 0) for value in values)
    assert [event.value for event in topic.read()] == values


def test_key_groups_of_many_keys_are_those_of_each() -> None:
    raw = [None if i % 5 == 0 else f"{i % 13}\x00ü".encode() for i in range(100)]
    found = raw_key_groups(key_codec("str"), pa.array(raw, pa.binary()))
    assert found.tolist() == [raw_key_group(key_codec("str"), one) for one in raw]


def test_an_empty_topic_has_no_events_and_ends_at_zero() -> None:
    topic = topic_on(memory())
    assert (list(topic.read()), topic.end()) == ([], 0)
    with topic.producer():
        pass
    assert topic.log.slices(Position(), 10) == ([], Position())


def test_any_range_of_offsets_can_be_read_across_segments() -> None:
    storage = memory()
    events = fill(storage, [3, 1, 4, 2])
    assert [event.offset for event in events] == list(range(10))
    for start in range(12):
        for end in [*range(12), None]:
            assert list(topic_on(storage).read(start, end)) == events[start:end]


def test_reading_from_late_on_does_not_look_at_what_is_early() -> None:
    storage = memory()
    events = fill(storage, [2] * 20)
    counting = CountingStorage(storage)
    assert list(topic_on(counting).read(36)) == events[36:]
    assert {name for verb, name in counting.calls if verb == "read"} == {f"{n:020d}.parquet" for n in (36, 38, 40)}


# Order


def test_rows_of_a_segment_are_sorted_by_key_group_and_a_key_stays_in_order() -> None:
    storage = memory()
    topic = topic_on(storage)
    topic.append(Event(f"k{n * 7919 % 97}", n, n) for n in range(2_000))
    table, offsets = topic.log.read(Slice(0, 0, 2_000))
    groups = table.column("key_group").to_pylist()
    assert groups == sorted(groups)
    assert offsets.tolist() == list(range(2_000))
    of_key: dict[Any, list[int]] = {}
    for event in topic.read():
        of_key.setdefault(event.key, []).append(event.value)
    assert len(of_key) == 97
    assert all(values == sorted(values) for values in of_key.values())


@pytest.mark.parametrize("partitions", [1, 3, 16, 500])
def test_partitions_together_read_each_row_of_a_slice_once(partitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_log, "ROWS_PER_GROUP", 16)
    storage = memory()
    fill(storage, [5, 300], keys=60)
    log = TopicLog(storage, "orders")
    for part in (Slice(5, 5, 305), Slice(5, 40, 41), Slice(5, 17, 250), Slice(5, 300, 305), Slice(5, 9, 9)):
        whole, all_offsets = log.read(part)
        assert all_offsets.tolist() == list(range(part.start, part.end))
        found: dict[int, tuple[int, bytes]] = {}
        for partition in range(partitions):
            groups = group_range(partition, partitions)
            table, offsets = log.read(part, groups)
            assert table.schema == topics.SCHEMA
            assert all(group in groups for group in table.column("key_group").to_pylist())
            rows = zip(*(table.column(c).to_pylist() for c in ("key_group", "value")), strict=True)
            found |= dict(zip(offsets.tolist(), rows, strict=True))
        expected = zip(*(whole.column(c).to_pylist() for c in ("key_group", "value")), strict=True)
        assert found == dict(zip(all_offsets.tolist(), expected, strict=True))


def test_a_partition_reads_only_the_row_groups_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_log, "ROWS_PER_GROUP", 1_000)
    storage = memory()
    noise = seeded_ids(3)
    topic_on(storage).append(Event(f"k{n}", noise(), n) for n in range(20_000))
    counting = CountingStorage(storage)
    size = len(storage.read(storage.list("")[0]))
    rows = 0
    bytes_of_each = []
    for partition in range(10):
        counting.bytes_read = 0
        table, _ = TopicLog(counting, "orders").read(Slice(0, 0, 20_000), group_range(partition, 10))
        rows += table.num_rows
        bytes_of_each.append(counting.bytes_read)
    assert rows == 20_000
    assert size > 10 * topic_log.ROWS_PER_GROUP * 32
    # The footer's read, and of twenty row groups two or three.
    assert max(bytes_of_each) < 64 * 1024 + size * 4 / 20


@pytest.mark.parametrize(("events", "partitions"), [(100, 1), (20_000, 2), (50_000, 4), (300_000, 32)])
def test_row_groups_end_where_partitions_do(events: int, partitions: int) -> None:
    keys = pa.array([b"%d" % n for n in range(events)], pa.binary())
    groups = pa.array(raw_key_groups(key_codec("str"), keys))
    columns = [groups, keys, keys, pa.array(range(events)), pa.nulls(events, topics.HEADERS_TYPE)]
    data, _ = topic_segment(pa.Table.from_arrays(columns, schema=topics.SCHEMA), "me")
    metadata = pq.read_metadata(pa.BufferReader(data))
    stats = [metadata.row_group(i).column(0).statistics for i in range(metadata.num_row_groups)]
    assert len(stats) == partitions
    for partition, found in enumerate(stats):
        own = group_range(partition, partitions)
        assert own.start <= found.min <= found.max < own.stop


# Following


def test_slices_give_what_is_new_up_to_any_limit() -> None:
    storage = memory()
    fill(storage, [3, 1, 4])
    firsts = [0, 3, 4, 8]
    for start in range(9):
        position = Position(max(f for f in firsts if f <= start), start)
        for limit in range(11):
            found, behind = TopicLog(storage, "orders").slices(position, limit)
            end = min(8, start + limit)
            assert [offset for part in found for offset in range(part.start, part.end)] == list(range(start, end))
            assert all(part.start < part.end for part in found)
            assert all(part.segment == max(f for f in firsts if f <= part.start) for part in found)
            assert behind == Position(max(f for f in firsts if f <= end), end)


def test_following_in_small_bites_finds_everything_once() -> None:
    storage = memory()
    fill(storage, [3, 1, 4, 10])
    for limit in range(1, 20):
        log, position, offsets = TopicLog(storage, "orders"), Position(), []
        while (answer := log.slices(position, limit))[0]:
            offsets += [offset for part in answer[0] for offset in range(part.start, part.end)]
            position = answer[1]
        assert offsets == list(range(18))


@pytest.mark.parametrize("use", ["poll", "poll when nothing is new", "append", "end"])
def test_following_costs_what_is_new_not_what_is_old(use: str) -> None:
    def calls(old: int) -> list[str]:
        storage = memory()
        fill(storage, [2] * old)
        at = Position(2 * old, 2 * old)
        counting = CountingStorage(storage)
        topic = topic_on(counting, seed=2)
        topic.end()
        if use == "poll":
            topic_on(storage, seed=3).append([Event("k", 1, 1)])
        counting.calls.clear()
        if use == "append":
            topic.append([Event("k", 1, 1)])
        elif use == "end":
            topic_on(counting).end()
        else:
            topic.log.slices(at, 100)
        return [verb for verb, _ in counting.calls]

    assert calls(1) == calls(200)


def test_polling_an_idle_topic_lists_only_now_and_then() -> None:
    storage = memory()
    fill(storage, [2, 2])
    counting = CountingStorage(storage)
    log = TopicLog(counting, "orders")
    for _ in range(topic_log.PROBES_PER_LISTING):
        assert log.slices(Position(4, 4), 10) == ([], Position(4, 4))
    assert [verb for verb, _ in counting.calls].count("list") == 1


def test_a_long_topic_is_listed_the_more_seldom() -> None:
    storage, segments = memory(), 3 * topic_log.PROBES_PER_LISTING
    fill(storage, [1] * segments)
    counting = CountingStorage(storage)
    log = TopicLog(counting, "orders")
    for _ in range(topic_log.PROBES_PER_LISTING + segments):
        assert log.slices(Position(segments, segments), 10)[0] == []
    assert [verb for verb, _ in counting.calls].count("list") == 2


def test_reading_a_topic_that_grows_is_no_gap() -> None:
    """A segment that appears between two looks, with one behind it, is read, and is not taken for a missing one."""
    storage = memory()
    fill(storage, [2])

    class Growing(CountingStorage):
        def list(self, prefix: str, after: str = "") -> list[str]:
            if not self.calls.count(("list", "")):
                fill_more = topic_on(storage, seed=9)
                fill_more.append([Event("k", 1, 1)])
                fill_more.append([Event("k", 2, 2)])
            return super().list(prefix, after)

    found, behind = TopicLog(Growing(storage), "orders").slices(Position(0, 0), 100)
    assert (found, behind) == ([Slice(0, 0, 2), Slice(2, 2, 3), Slice(3, 3, 4)], Position(4, 4))


def test_files_that_are_not_segments_are_passed_over() -> None:
    storage = memory()
    storage.create(".DS_Store", b"x")
    storage.create("0.tmp", b"x")
    storage.create("below/00000000000000000000.parquet", b"x")
    events = fill(storage, [2, 2])
    assert len(events) == topic_on(storage).end() == 4


# Many writers

_WRITER = """
import os, sys
from penstock.clock import SystemClock, random_ids
from penstock.events import Event
from penstock.state.codec import value_codec
from penstock.state.key_codecs import key_codec
from penstock.storage import open_storage
from penstock.topics import Topic
url, writer, segments, rows, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
topic = Topic("orders", key_codec("str"), value_codec("json"), open_storage(url), SystemClock(), random_ids())
noise = os.urandom(size).hex()
print("ready", flush=True)
input()
for segment in range(segments):
    topic.append(Event(writer, [segment * rows + row, noise], 0) for row in range(rows))
"""


def _writer(url: Path, name: str, segments: int, rows: int, size: int = 1) -> "subprocess.Popen[str]":
    arguments = [str(url), name, str(segments), str(rows), str(size)]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WRITER), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_producers_in_two_processes_interleave_without_loss(tmp_path: Path) -> None:
    writers = {name: _writer(tmp_path, name, 60, 5) for name in ("a", "b")}
    for writer in writers.values():
        assert writer.stdout.readline() == "ready\n"
    for writer in writers.values():
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.wait(60) for writer in writers.values()] == [0, 0]
    for writer in writers.values():
        writer.communicate()
    events = list(topic_on(open_storage(tmp_path)).read())
    assert [event.offset for event in events] == list(range(600))
    for name in writers:
        assert [event.value[0] for event in events if event.key == name] == list(range(300))
    assert sum(a.key != b.key for a, b in pairwise(events)) > 1


def test_producer_killed_in_the_middle_of_a_segment_leaves_whole_segments_only(tmp_path: Path) -> None:
    killed_in_the_middle = 0
    for attempt in range(3):
        root = tmp_path / str(attempt)
        writer = _writer(root, "a", 1_000, 2, 3_500_000)
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("\n")
        writer.stdin.flush()
        deadline = time.monotonic() + 30
        while len(list((root / ".partial").glob("*"))) == 0 or len(list(root.glob("*.parquet"))) < attempt:
            assert time.monotonic() < deadline
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        killed_in_the_middle += bool(list((root / ".partial").glob("*")))
        topic = topic_on(open_storage(root))
        numbers = [event.value[0] for event in topic.read()]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 2 == 0
        assert topic.append([Event("a", "next", 0)]) == len(numbers) + 1
    assert killed_in_the_middle > 0


# Answers that are lost


@pytest.mark.parametrize("write", range(1, 5))
def test_a_lost_answer_makes_no_duplicate(write: int) -> None:
    storage = memory()
    topic = topic_on(FaultyStorage(storage, lose_answer=write))
    with topic.producer() as send:
        for number in range(4):
            send(number, key="k")
            send.flush()
    assert [event.value for event in topic_on(storage).read()] == [0, 1, 2, 3]


class Unreachable(CountingStorage):
    """Once `down`, a write happens or does not, gets no answer, and nothing can be read any more."""

    def __init__(self, inner: Storage, happens: bool) -> None:
        super().__init__(inner)
        self.happens = happens
        self.down = False
        self.asked = False

    def create(self, name: str, data: bytes) -> bool:
        if not self.down:
            return super().create(name, data)
        self.asked = True
        if self.happens:
            self._inner.create(name, data)
        raise OutcomeUnknownError("no answer")

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if self.down and self.asked:
            raise StorageError("no answer")
        return super().read(name, start, end)


@pytest.mark.parametrize("happens", [True, False])
def test_flushing_again_after_an_outcome_that_stayed_unknown_makes_no_duplicate(happens: bool) -> None:
    storage = Unreachable(memory(), happens)
    topic = topic_on(storage)
    with topic.producer() as send:
        send("first", key="k")
        send.flush()
        send("second", key="k")
        storage.down = True
        with pytest.raises(OutcomeUnknownError):
            send.flush()
        storage.down = False
        topic_on(storage, seed=2).append([Event("k", "other", 0)])
        send("third", key="k")
    values = [event.value for event in topic_on(storage).read()]
    assert sorted(values) == ["first", "other", "second", "third"]
    assert values.index("second") < values.index("third")


def test_an_event_whose_send_failed_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "MAX_BUFFERED_EVENTS", 2)
    storage = Unreachable(memory(), happens=False)
    with topic_on(storage).producer() as send:
        send(0)
        send(1)
        storage.down = True
        with pytest.raises(StorageError):
            send(2)
        send(2)
        send(3)
        for _ in range(3):
            with pytest.raises(StorageError):
                send(4)
        storage.down = False
        send(4)
    assert [event.value for event in topic_on(storage).read()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("limit", "value"), [("MAX_BUFFERED_EVENTS", 3), ("MAX_BUFFERED_BYTES", 3)])
def test_a_producer_buffers_no_more_than_its_limits(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, limit, value)
    storage = memory()
    with topic_on(storage).producer() as send:
        for number in range(7):
            send(number)
    assert storage.list("") == [f"{first:020d}.parquet" for first in (0, 3, 6)]


def test_leaving_the_block_by_an_error_keeps_what_was_sent() -> None:
    storage = memory()

    def send_and_fail() -> None:
        with topic_on(storage).producer() as send:
            send(1)
            raise KeyError("a mistake of the user's")

    with pytest.raises(KeyError):
        send_and_fail()
    assert [event.value for event in topic_on(storage).read()] == [1]


# Publishing once


def test_published_again_is_no_second_copy_even_between_foreign_segments() -> None:
    storage = memory()
    fill(storage, [2])
    since = TopicLog(storage, "orders").end()
    segments = [segment_of(number) for number in range(3)]
    firsts = []
    for number, segment in enumerate(segments):
        firsts.append(TopicLog(storage, "orders").append_once(*segment, since))
        topic_on(storage, seed=10 + number).append([Event("foreign", number, 0)])
    for first, segment in zip(firsts, segments, strict=True):
        assert TopicLog(storage, "orders").append_once(*segment, since) == first
    assert firsts == [2, 6, 10]
    assert topic_on(storage).end() == 2 + 3 * 3 + 3


@pytest.mark.parametrize("write", range(1, 4))
def test_a_lost_answer_while_publishing_makes_no_second_copy(write: int) -> None:
    storage = memory()
    log = TopicLog(FaultyStorage(storage, lose_answer=write), "orders")
    for _ in range(2):
        for number in range(3):
            log.append_once(*segment_of(number), Position())
    assert topic_on(storage).end() == 9


def test_another_content_under_the_same_origin_is_corruption() -> None:
    storage = memory()
    log = TopicLog(storage, "orders")
    log.append_once(*segment_of(1), Position())
    data, origin, checksum = segment_of(1, rows=4)
    with pytest.raises(CorruptionError, match="history sink 1 0 0 was published with another content") as caught:
        log.append_once(data, origin, checksum, Position())
    assert caught.value.name == "orders/00000000000000000000.parquet"


def test_publishers_and_producers_that_race_leave_one_copy_of_each_segment(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            barrier.wait()
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return run

    def publish() -> None:
        log = TopicLog(storage, "orders")
        for number in range(30):
            log.append_once(*segment_of(number), Position())

    def produce(seed: int) -> None:
        for number in range(30):
            topic_on(storage, seed=seed * 1_000 + number).append([Event(f"foreign{seed}", number, 0)])

    works = [publish, publish, lambda: produce(1), lambda: produce(2)]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    origins = [segment.origin for segment in TopicLog(storage, "orders").segments()]
    assert len(origins) == len(set(origins)) == 30 + 60
    assert [origin for origin in origins if origin.startswith("history")] == [segment_of(n)[1] for n in range(30)]


def test_publishing_many_segments_looks_at_each_other_segment_once() -> None:
    counting = CountingStorage(memory())
    log = TopicLog(counting, "orders")
    for number in range(50):
        log.append_once(*segment_of(number), Position())
    reads = [name for verb, name in counting.calls if verb == "read"]
    assert len(reads) <= 2 * 50 + 2


def test_append_goes_behind_what_others_wrote() -> None:
    storage = memory()
    ours = TopicLog(storage, "orders")
    assert ours.append(segment_of(1)[0], 3) == 0
    assert TopicLog(storage, "orders").append(segment_of(2)[0], 3) == 3
    assert ours.append(segment_of(3)[0], 3) == 6
    assert ours.end() == Position(9, 9)


def test_append_that_is_overtaken_goes_behind_the_winner() -> None:
    storage = memory()

    class Overtaking(CountingStorage):
        def create(self, name: str, data: bytes) -> bool:
            if ("create", name) not in self.calls and not storage.list(""):
                TopicLog(storage, "orders").append(segment_of(7)[0], 3)
            return super().create(name, data)

    first = TopicLog(Overtaking(storage), "orders").append(segment_of(1)[0], 3)
    origins = [segment.origin for segment in TopicLog(storage, "orders").segments()]
    assert (first, origins.count("history sink 1 0 0"), origins[-1]) == (3, 1, "history sink 1 0 0")


# Damage


def changes() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    yield "flipped in a row group", lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:]
    yield "flipped in the footer", lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
    yield "cut short", lambda data: data[:-1]
    yield "cut to nothing", lambda data: b""
    yield "cut in the middle", lambda data: data[: len(data) // 2]


@pytest.mark.parametrize("change", [change for _, change in changes()], ids=[name for name, _ in changes()])
def test_damaged_segment_is_named(change: Callable[[bytes], bytes]) -> None:
    storage = memory()
    fill(storage, [2, 2, 2])
    damage(storage, "00000000000000000002.parquet", change)
    with pytest.raises(CorruptionError) as caught:
        list(topic_on(storage).read())
    assert caught.value.name == "orders/00000000000000000002.parquet"


@pytest.mark.parametrize("use", ["read all", "read from it", "slices", "end of another reader", "read of its slice"])
def test_missing_segment_in_the_middle_is_named(use: str) -> None:
    storage = memory()
    fill(storage, [2, 2, 2])
    storage.delete(["00000000000000000002.parquet"])
    topic = topic_on(storage)
    uses: dict[str, Callable[[], object]] = {
        "read all": lambda: list(topic.read()),
        "read from it": lambda: list(topic.read(3)),
        "slices": lambda: topic.log.slices(Position(0, 1), 100),
        "end of another reader": lambda: topic.log.slices(Position(2, 2), 100),
        "read of its slice": lambda: topic.log.read(Slice(2, 2, 4)),
    }
    with pytest.raises(CorruptionError, match="it is missing") as caught:
        uses[use]()
    assert caught.value.name == "orders/00000000000000000002.parquet"


def test_a_gap_that_comes_while_polling_is_noticed_in_the_end() -> None:
    storage = memory()
    fill(storage, [2])
    log = TopicLog(storage, "orders")
    assert log.slices(Position(2, 2), 10) == ([], Position(2, 2))
    fill(storage, [2, 2])
    storage.delete(["00000000000000000002.parquet"])
    for _ in range(topic_log.PROBES_PER_LISTING - 1):
        assert log.slices(Position(2, 2), 10) == ([], Position(2, 2))
    with pytest.raises(CorruptionError, match="it is missing"):
        log.slices(Position(2, 2), 10)


@pytest.mark.parametrize(
    ("position", "name"),
    [
        (Position(6, 7), "00000000000000000006"),
        (Position(8, 8), "00000000000000000008"),
        (Position(3, 3), "00000000000000000003"),
        (Position(4, 6), "00000000000000000004"),
        (Position(4, 9), "00000000000000000004"),
    ],
)
def test_position_that_the_topic_does_not_reach_is_an_error(position: Position, name: str) -> None:
    """As when a topic was deleted, or replaced by a shorter one, behind the back of its reader."""
    storage = memory()
    fill(storage, [2, 2, 2])
    with pytest.raises(CorruptionError) as caught:
        TopicLog(storage, "orders").slices(position, 10)
    assert caught.value.name == f"orders/{name}.parquet"


def test_position_in_a_topic_that_is_gone_is_an_error() -> None:
    with pytest.raises(CorruptionError, match="read up to offset 8 before"):
        TopicLog(memory(), "orders").slices(Position(8, 8), 10)


def test_slice_that_the_segment_does_not_reach_is_an_error() -> None:
    storage = memory()
    fill(storage, [2])
    with pytest.raises(CorruptionError, match="it holds 2 events, but should reach to offset 3"):
        TopicLog(storage, "orders").read(Slice(0, 0, 3))


# What is refused


@pytest.mark.parametrize(
    ("key_spec", "value_spec", "key", "value", "said"),
    [
        ("str", "json", "anna", {"a": object()}, ["'anna'", "object", 'codec "json"', 'choose "msgpack"']),
        ("str", "json", "anna", {"a": float("nan")}, ["'anna'", "nan", 'codec "json"', 'choose "msgpack"']),
        ("str", "json", "anna", float("inf"), ["inf", 'codec "json"']),
        ("str", "json", "anna", [float("inf")], ["inf", 'codec "json"']),
        ("str", "json", "anna", b"raw", ["bytes", 'codec "json"', 'choose "msgpack"']),
        ("str", "msgpack", "anna", 2**70, ['codec "msgpack"', "64 bits"]),
        ("str", "bytes", "anna", "text", ['codec "bytes"', 'choose "json"']),
        ("str", "str", "anna", 7, ['codec "str"', "use str(value)"]),
        ("str", Order, "anna", {"amount": "three"}, ["json:Order", "amount"]),
        ("int", "json", "anna", 1, ["'anna'", 'key="int"', 'choose key="str"']),
        ("str", "json", ["a"], 1, ["['a']", 'key="str"', "use a key of str"]),
        ("str", "json", "x" * 399, 1, ["401 bytes", "use a shorter key"]),
        ("str", "json", "\x00" * 200, 1, ["402 bytes", "use a shorter key"]),
        ("bytes", "json", b"\x00" * 200, 1, ["402 bytes", "use a shorter key"]),
        ("json", "json", tuple("x" * 399), 1, ["bytes", "use a shorter key"]),
        ("str", "json", "\ud800", 1, ["surrogate"]),
    ],
)
def test_what_cannot_be_written_is_refused_at_once_with_the_remedy(
    key_spec: str, value_spec: Any, key: Any, value: Any, said: list[str]
) -> None:
    storage = memory()
    with topic_on(storage, key_spec, value_spec).producer() as send, pytest.raises(InvalidError) as caught:
        send(value, key=key, timestamp_ms=1)
    for words in ["topic 'orders'", *said]:
        assert words in str(caught.value)
    assert storage.list("") == []


@pytest.mark.parametrize("timestamp_ms", [1.5, "1", True, 1 << 63, -(1 << 63) - 1])
def test_timestamp_that_is_no_int_of_64_bits_is_refused(timestamp_ms: Any) -> None:
    storage = memory()
    said = r"topic 'orders', key 'anna': timestamp_ms=.* as an int"
    with topic_on(storage).producer() as send, pytest.raises(InvalidError, match=said):
        send(1, key="anna", timestamp_ms=timestamp_ms)
    assert storage.list("") == []


def test_headers_are_found_where_only_some_row_groups_have_any() -> None:
    topic, headers = topic_on(open_storage("memory://")), (("trace", b"1"),)
    with topic.producer() as send:
        for n in range(40_000):
            send(n, key=f"k{n % 500}", headers=headers if n == 33_333 else ())
    assert topic.end() == 40_000
    [segment] = topic.log.segments()
    file = topic.log._open(segment.first)
    assert file is not None
    told = [topic_log._may_have_headers(file, [group]) for group in range(file.metadata.num_row_groups)]
    assert sorted(told) == [False] * (len(told) - 1) + [True]
    assert len(told) > 1
    assert [event.value for event in topic.read() if event.headers] == [33_333]


@pytest.mark.parametrize(
    "headers", [{"a": b"1"}, [("a", "1")], [("a",)], ["ab"], [(b"a", b"1")], "ab", [("a", None)], [("\ud800", b"")], 7]
)
def test_wrong_headers_are_refused(headers: Any) -> None:
    storage = memory()
    said = r"topic 'orders', key 'anna': the headers .* give them like"
    with topic_on(storage).producer() as send, pytest.raises(InvalidError, match=said):
        send(1, key="anna", headers=headers)
    assert storage.list("") == []


def test_headers_may_be_lists_and_none() -> None:
    topic = topic_on(memory())
    with topic.producer() as send:
        send(1, key="a", headers=[["a", b"1"]])  # type: ignore[arg-type, list-item]
        send(2, key="a", headers=None)  # type: ignore[arg-type]
    assert [event.headers for event in topic.read()] == [(("a", b"1"),), ()]


def test_what_cannot_be_read_is_named_with_offset_and_remedy() -> None:
    storage = memory()
    with topic_on(storage, key="bytes", value="bytes").producer() as send:
        send(b"1", key=b"7")
        send(b"not json", key=b"7")
        send(b"1", key=b"seven")
    messages = []
    for start in (0, 1, 2):
        try:
            next(topic_on(storage, key="int").read(start))
        except InvalidError as error:
            messages.append(str(error))
    assert len(messages) == 2
    for message, words in zip(sorted(messages), (("key", "seven", "int"), ("value", "not json", "json")), strict=True):
        assert all(word in message for word in ("topic 'orders', offset ", "open the topic with the codec", *words))


def test_a_reused_dict_is_sent_as_it_was_when_sent() -> None:
    topic = topic_on(memory())
    value = {"n": 0}
    with topic.producer() as send:
        for number in range(3):
            value["n"] = number
            send(value, key="k")
    assert [event.value["n"] for event in topic.read()] == [0, 1, 2]


def test_real_clock_and_ids_do() -> None:
    topic = Topic("orders", key_codec(), value_codec(), memory(), SystemClock(), random_ids())
    before = SystemClock().now_ms()
    topic.append([Event("a", 1, 7)])
    with topic.producer() as send:
        send(2, key="a")
    first, second = topic.read()
    assert first.timestamp_ms == 7
    assert before <= second.timestamp_ms <= SystemClock().now_ms()
    assert KEY_GROUPS > raw_key_group(topic.key, b"a") >= 0
