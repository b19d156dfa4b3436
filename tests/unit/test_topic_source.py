"""Topics as a source of Spark's, without a Spark: offsets are positions, rows are descriptors, all of it is cheap."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Application, CorruptionError
from penstock.spark.engine import spark_error
from penstock.spark.source import ROWS_AT_ONCE, Descriptors, Reading, TopicReader, offset_of, positions_of
from penstock.spark.stage import DESCRIPTORS, Slices
from penstock.storage import Storage, open_storage
from penstock.topics import Position, Topic, TopicLog

_numbers = count()
PARTITIONS = 3
STEPS = {"from orders": 0, "from visits": 4}

positions = st.builds(Position, st.integers(0, 1 << 62), st.integers(0, 1 << 62))
sizes = st.lists(st.integers(1, 9), max_size=6)


def topics() -> dict[str, Topic]:
    app = Application("source", broker_address=f"memory://topic-source-{next(_numbers)}")
    return {step: app.topic(step.removeprefix("from ")) for step in STEPS}


def send(topic: Topic, segments: Sequence[int]) -> None:
    with topic.producer() as send_one:
        for size in segments:
            for n in range(size):
                send_one(n, key=f"k{n}")
            send_one.flush()


def reader(logs: Mapping[str, TopicLog], limit: int, start: Mapping[str, Position] | None = None) -> TopicReader:
    begin = start or dict.fromkeys(logs, Position())
    return TopicReader(Reading(logs, {name: STEPS[name] for name in logs}, begin, limit, PARTITIONS))


def latest(source: TopicReader, start: Any) -> Any:
    """As Spark asks: what the reader gives and takes is JSON on its way."""
    return json.loads(json.dumps(source.latestOffset(start, source.getDefaultReadLimit())))


def described(source: TopicReader, start: Any, end: Any) -> list[Descriptors]:
    found = [part for part in source.partitions(start, end) if isinstance(part, Descriptors)]
    assert len(found) in (0, PARTITIONS)
    assert all(part.slices == found[0].slices for part in found), "each task picks its own key groups"
    return found


def offsets(slices: Slices, step: int) -> list[int]:
    return [offset for part in slices[step] for offset in range(part.start, part.end)]


@given(st.dictionaries(st.text(max_size=9), positions, max_size=3))
def test_an_offset_is_positions_and_back(found: dict[str, Position]) -> None:
    assert positions_of(json.loads(json.dumps(offset_of(found)))) == found


@settings(max_examples=50)
@given(orders=sizes, visits=sizes, limit=st.integers(1, 12))
def test_batches_describe_every_event_once_and_never_more_than_the_limit(
    orders: list[int], visits: list[int], limit: int
) -> None:
    filled = topics()
    for topic, segments in zip(filled.values(), (orders, visits), strict=True):
        send(topic, segments)
    source = reader({step: topic.log for step, topic in filled.items()}, limit)
    start, read = source.initialOffset(), {step: list[int]() for step in STEPS}
    while (end := latest(source, start)) != start:
        parts = described(source, start, end)
        for step, number in STEPS.items():
            new = offsets(parts[0].slices, number)
            assert new == list(range(start[step]["offset"], end[step]["offset"]))
            assert len(new) <= limit
            read[step] += new
        assert sum(part.events for part in parts) == sum(len(offsets(parts[0].slices, n)) for n in STEPS.values())
        start = end
    assert read == {"from orders": list(range(sum(orders))), "from visits": list(range(sum(visits)))}
    assert source.reportLatestOffset() == end


def test_where_nothing_is_new_the_offset_stays_and_there_is_nothing_to_read() -> None:
    filled = topics()
    send(filled["from orders"], [4])
    source = reader({step: topic.log for step, topic in filled.items()}, 100)
    end = latest(source, source.initialOffset())
    assert latest(source, end) == end
    assert source.partitions(end, end) == []


def test_a_topic_may_come_to_be_later() -> None:
    filled = topics()
    source = reader({step: topic.log for step, topic in filled.items()}, 100)
    start = source.initialOffset()
    assert latest(source, start) == start
    send(filled["from visits"], [2])
    parts = described(source, start, latest(source, start))
    assert offsets(parts[0].slices, STEPS["from visits"]) == [0, 1]


def test_a_query_begins_at_the_positions_it_is_given() -> None:
    filled = topics()
    send(filled["from orders"], [3, 3])
    log = filled["from orders"].log
    source = reader({"from orders": log}, 100, {"from orders": Position(0, 2)})
    parts = described(source, source.initialOffset(), latest(source, source.initialOffset()))
    assert offsets(parts[0].slices, 0) == [2, 3, 4, 5]


def test_the_latest_offset_that_is_reported_counts_what_the_limit_holds_back() -> None:
    filled = topics()
    log = filled["from orders"].log
    send(filled["from orders"], [3, 3])
    source = reader({"from orders": log}, 2)
    assert latest(source, source.initialOffset()) == {"from orders": {"segment": 0, "offset": 2}}
    assert source.reportLatestOffset() == {"from orders": {"segment": 6, "offset": 6}}


@pytest.mark.parametrize("events", [1, 2, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, ROWS_AT_ONCE + 2])
def test_spark_counts_as_many_rows_as_there_are_events(events: int) -> None:
    slices: Slices = {}
    rows = [row for batch in reader({}, 1).read(Descriptors(slices, events)) for row in batch.column(DESCRIPTORS)]
    assert len(rows) == events
    assert msgspec.msgpack.decode(rows[0].as_py(), type=Slices) == slices
    assert not any(row.is_valid for row in rows[1:]), "the rest is content of no task"


def test_a_task_without_a_share_of_the_events_has_its_descriptors_all_the_same() -> None:
    filled = topics()
    send(filled["from orders"], [1])
    source = reader({"from orders": filled["from orders"].log}, 9)
    start = source.initialOffset()
    for part in described(source, start, latest(source, start)):
        [batch] = source.read(part)
        assert batch.num_rows == 1
        assert batch.column(DESCRIPTORS).null_count == 0


class CountingStorage:
    """Another storage that counts what is asked of it."""

    def __init__(self, inner: Storage) -> None:
        self.create, self.delete = inner.create, inner.delete
        self._inner = inner
        self.calls = 0

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls += 1
        return self._inner.read(name, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        self.calls += 1
        return self._inner.list(prefix, after)


def test_a_batch_costs_what_is_new_and_waiting_one_call_for_each_topic() -> None:
    [topic, _] = topics().values()
    storage = CountingStorage(open_storage(f"memory://topic-source-{next(_numbers)}"))
    topic = Topic(topic.name, topic.key, topic.value, storage, topic._clock, topic._ids)
    send(topic, [2] * 60)
    source = reader({"from orders": TopicLog(storage, "orders")}, 1000)
    end = latest(source, source.initialOffset())
    send(topic, [2])
    storage.calls = 0
    start, end = end, latest(source, end)
    assert source.reportLatestOffset() == end
    assert len(source.partitions(start, end)) == PARTITIONS
    assert storage.calls <= 4, "the new segment, and that there is none behind it"
    storage.calls = 0
    for _ in range(10):
        assert latest(source, end) == end == source.reportLatestOffset()
    assert storage.calls == 10


def test_an_error_of_ours_comes_through_all_that_spark_says_of_the_planner() -> None:
    [topic, _] = topics().values()
    send(topic, [2, 2])
    log = TopicLog(topic.log._storage, "orders")
    source = reader({"from orders": log}, 100, {"from orders": Position(3, 3)})  # where no segment begins
    with pytest.raises(RuntimeError) as told:
        latest(source, source.initialOffset())
    found = spark_error(Exception(f"[STREAM_FAILED] ... Traceback ...\nRuntimeError: {told.value}\n\tat o.a.s..."), 7)
    assert isinstance(found, CorruptionError)
    assert (found.name, found.found) == (
        "orders/00000000000000000003.parquet",
        "it is missing, but the topic was read up to offset 3 before",
    )
