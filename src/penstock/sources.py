"""Feeds: finite iterables and folders of files, brought into embedded topics from which they are read like any other.

Invariants:
- Each part of a feed is appended under an origin of its own, so that it comes in once, however often it is offered.
- What came in keeps its offset: an epoch that runs again reads the same events.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import InvalidError
from penstock.events import Event
from penstock.storage import Storage
from penstock.topics import SCHEMA, Position, Topic, headers_column, raw_key_groups, topic_segment

EVENTS_PER_PART = 50_000

FileFormat = Literal["json", "csv", "parquet"]
SUFFIXES: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "csv": (".csv",),
    "parquet": (".parquet",),
}


class Feed(Protocol):
    """Something that fills a topic."""

    def refresh(self, topic: Topic, now_ms: int) -> None:
        """Append to the topic what the feed has and the topic has not."""
        ...


@dataclass(slots=True)
class _Taken:
    """The origins that a topic holds, learnt once and then kept up to date."""

    origins: set[str] = field(default_factory=set)
    end: Position | None = None

    def learn(self, topic: Topic) -> None:
        """Look at what the topic holds by now."""
        start = self.end
        for segment in topic.log.segments(start):
            self.origins.add(segment.origin)
            self.end = Position(segment.end, segment.end)
        if self.end is None:
            self.end = Position()


@dataclass(slots=True)
class IterableFeed:
    """A finite list of values (or events), each under `key(value)` if there is a key function."""

    name: str
    items: Sequence[Any]
    key: Callable[[Any], Any] | None
    _taken: _Taken = field(default_factory=_Taken)

    def refresh(self, topic: Topic, now_ms: int) -> None:
        """Append the items, once."""
        if self._taken.end is not None:
            return
        self._taken.learn(topic)
        for number, start in enumerate(range(0, len(self.items), EVENTS_PER_PART)):
            part = self.items[start : start + EVENTS_PER_PART]
            events = [_as_event(item, self.key, now_ms) for item in part]
            _append(topic, self._taken, f"iterable {self.name} {number}", events)


@dataclass(slots=True)
class FilesFeed:
    """A folder of JSON lines, CSV or Parquet files, in the order of their names; files are added, never changed."""

    folder: Storage
    path: str
    format: FileFormat
    key: Callable[[Any], Any] | None
    _taken: _Taken = field(default_factory=_Taken)
    _seen: set[str] = field(default_factory=set)

    def refresh(self, topic: Topic, now_ms: int) -> None:
        """Append the rows of files that are new."""
        new = [n for n in self.folder.list("") if n.endswith(SUFFIXES[self.format]) and n not in self._seen]
        if not new and self._taken.end is not None:
            return
        self._taken.learn(topic)
        for name in new:
            rows = self._rows(name)
            for number, part in enumerate(iter(lambda: list(islice(rows, EVENTS_PER_PART)), [])):  # noqa: B023
                origin = f"file {name} {number}"
                if origin not in self._taken.origins:
                    _append(topic, self._taken, origin, [_as_event(row, self.key, now_ms) for row in part])
            self._seen.add(name)

    def _rows(self, name: str) -> Iterator[Any]:
        data = self.folder.read(name)
        try:
            if self.format == "json":
                return iter([msgspec.json.decode(line) for line in data.splitlines() if line.strip()])
            if self.format == "csv":
                return iter(list(csv.DictReader(io.StringIO(data.decode()))))
            return iter(pq.read_table(pa.BufferReader(data)).to_pylist())
        except (ValueError, pa.ArrowException, csv.Error) as error:
            raise InvalidError(
                f"the file {self.path}/{name} cannot be read as {self.format} ({error}); mend it, or move it away"
            ) from error


def _as_event(item: Any, key: Callable[[Any], Any] | None, now_ms: int) -> Event:
    if isinstance(item, Event):
        return item
    return Event(None if key is None else key(item), item, now_ms)


def _append(topic: Topic, taken: _Taken, origin: str, events: Sequence[Event]) -> None:
    assert taken.end is not None, "what the topic holds is looked at first"
    keys = pa.array([None if e.key is None else topic.key.encode(e.key) for e in events], pa.binary())
    values = pa.array([topic.value.checked_encode(e.value) for e in events], pa.binary())
    table = pa.Table.from_arrays(
        [
            pa.array(raw_key_groups(topic.key, keys)),
            keys,
            values,
            pa.array([e.timestamp_ms for e in events], pa.int64()),
            headers_column([e.headers for e in events]),
        ],
        schema=SCHEMA,
    )
    data, checksum = topic_segment(table, origin)
    if origin not in taken.origins:
        topic.log.append_once(data, origin, checksum, taken.end)
        taken.origins.add(origin)
