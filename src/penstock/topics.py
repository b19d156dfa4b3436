"""Embedded topics: a log with a codec for keys and one for values, and the producer that appends to it.

Invariants:
- An event is refused when it is sent, not later: what was taken can be written, and read again.
- What a producer sent is in the log once, whatever answer of the storage was lost.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.clock import Clock, IdFactory
from penstock.errors import InvalidError
from penstock.events import Event, Headers
from penstock.state.codec import Codec
from penstock.state.key_codecs import KeyCodec, key_codec
from penstock.state.keys import MAX_KEY_BYTES, encode_key, encode_text_keys, key_group, key_groups, shown
from penstock.storage import Storage
from penstock.topic_log import HEADERS_TYPE as HEADERS_TYPE
from penstock.topic_log import ORIGIN as ORIGIN
from penstock.topic_log import SCHEMA as SCHEMA
from penstock.topic_log import LogSegment as LogSegment
from penstock.topic_log import Position as Position
from penstock.topic_log import Slice as Slice
from penstock.topic_log import TopicLog as TopicLog
from penstock.topic_log import topic_segment as topic_segment

MAX_BUFFERED_EVENTS = 50_000
MAX_BUFFERED_BYTES = 16 << 20
_MIN_TIME_MS, _MAX_TIME_MS = -(1 << 63), (1 << 63) - 1
# The canonical form of a text is at most twice as long as the text, a tag and a terminator.
_SURELY_A_TEXT_KEY = (MAX_KEY_BYTES - 2) // 2
_OBJECT_BEGINS = ord("{")


def raw_key_group(codec: KeyCodec, raw: bytes | None) -> int:
    """The key group of a topic's key as stored; events without a key are in the first."""
    return 0 if raw is None else key_group(encode_key(codec.decode(raw)))


def raw_key_groups(codec: KeyCodec, keys: pa.Array) -> npt.NDArray[np.uint16]:
    """The key group of each of a topic's keys as stored: `raw_key_group` for many, each different key once.

    >>> raw_key_groups(key_codec("int"), pa.array([b"7", None, b"7"], pa.binary())).tolist()
    [1681, 0, 1681]
    """
    different = keys.dictionary_encode()
    raw = different.dictionary
    if codec == key_codec("str"):
        forms = encode_text_keys(raw).to_pylist()
    else:
        forms = [encode_key(codec.decode(one)) for one in raw.to_pylist()]
    groups = np.append(key_groups(forms), np.uint16(0))
    of_each: npt.NDArray[np.uint16] = groups[different.indices.fill_null(len(forms)).to_numpy()]
    return of_each


def headers_column(headers: Sequence[Headers | None]) -> pa.Array:
    """Headers as a topic stores them: null where there are none."""
    rows = [[{"name": n, "value": v} for n, v in h] if h else None for h in headers]
    return pa.array(rows, HEADERS_TYPE)


def read_headers(column: pa.ChunkedArray | pa.Array) -> list[Headers] | None:
    """The headers of each row; None if no row has any."""
    if column.null_count == len(column):
        return None
    return [tuple((h["name"], h["value"]) for h in row or ()) for row in column.to_pylist()]


class Topic:
    """A named log of events with a codec for keys and one for values. Made by `Application.topic`.

    >>> from penstock import Application
    >>> orders = Application("shop", broker_address="memory://docs").topic("orders")
    >>> with orders.producer() as send:
    ...     send({"amount": 3}, key="anna", timestamp_ms=1000)
    >>> [(event.key, event.value, event.offset) for event in orders.read()]
    [('anna', {'amount': 3}, 0)]
    """

    def __init__(self, name: str, key: KeyCodec, value: Codec, storage: Storage, clock: Clock, ids: IdFactory) -> None:
        self.name = name
        self.key = key
        self.value = value
        self.log = TopicLog(storage, name)
        self._clock = clock
        self._ids = ids

    def producer(self) -> "Producer":
        """A producer for use in a `with` block, which gives a function: `send(value, key=..., timestamp_ms=...)`."""
        return Producer(self, self._clock, self._ids())

    def append(self, events: Iterable[Event]) -> int:
        """Append events; returns the offset behind the last. Their timestamps are kept."""
        with self.producer() as send:
            for event in events:
                send(event.value, key=event.key, timestamp_ms=event.timestamp_ms, headers=event.headers)
        return self.end()

    def end(self) -> int:
        """The offset behind the last event."""
        return self.log.end().offset

    def read(self, start: int = 0, end: int | None = None) -> Iterator[Event]:
        """The events with start <= offset < end, in order of offset; `end=None`: up to the last."""
        for segment in self.log.segments_from(start):
            if end is not None and segment.first >= end:
                return
            low, high = max(start, segment.first), segment.end if end is None else min(end, segment.end)
            if low < high:
                yield from self._events(Slice(segment.first, low, high))

    def _events(self, part: Slice) -> Iterator[Event]:
        table, offsets = self.log.read(part)
        headers = read_headers(table.column("headers"))
        keys, values, times = (table.column(name).to_pylist() for name in ("key", "value", "timestamp_ms"))
        for index, offset in enumerate(offsets.tolist()):
            key = None if keys[index] is None else self._decoded("key", self.key.decode, keys[index], offset)
            value = self._decoded("value", self.value.decode, values[index], offset)
            yield Event(key, value, times[index], headers[index] if headers else (), self.name, offset)

    def _decoded(self, part: str, decode: Callable[[bytes], Any], data: bytes, offset: int) -> Any:
        try:
            return decode(data)
        except Exception as error:
            codec = self.key.name if part == "key" else self.value.name
            raise InvalidError(
                f"topic {self.name!r}, offset {offset}: the {part} {data[:80]!r} cannot be read as {codec} ({error}); "
                f"open the topic with the codec it was written with"
            ) from error


class Producer:
    """Buffers events and appends them to a topic in segments; use it in a `with` block.

    Events are durable after `flush()` or the end of the block. A producer that dies leaves whole segments only.

    >>> from penstock import Application
    >>> topic = Application("shop", broker_address="memory://producer").topic("orders")
    >>> with topic.producer() as send:
    ...     send({"amount": 3}, key="anna")
    ...     send.flush()
    ...     topic.end()
    1
    """

    def __init__(self, topic: Topic, clock: Clock, writer: str) -> None:
        self._topic = topic
        self._clock = clock
        self._writer = writer
        self._encode_key = topic.key.encode
        self._is_json = topic.value.spec == "json"
        self._encode_value = topic.value.encode if self._is_json else topic.value.checked_encode
        self._surely_a_key = _SURELY_A_TEXT_KEY if topic.key == key_codec("str") else -1
        self._known_keys: set[bytes] = set()
        self._keys: list[bytes | None] = []
        self._values: list[bytes] = []
        self._times: list[int] = []
        self._headers: dict[int, Headers] = {}
        self._bytes = 0
        self._flushes = 0
        self._sealed: tuple[pa.Buffer, str, str, int] | None = None
        self._since: Position | None = None

    def __call__(self, value: Any, key: Any = None, timestamp_ms: int | None = None, headers: Headers = ()) -> None:
        """Send one event. Without a timestamp it gets the time of now. If this raises, the event was not taken."""
        try:
            raw_value = self._encode_value(value)
            # A JSON object without a null has lost nothing; to see that here is twice as fast as the codec's own check.
            if self._is_json and (raw_value[0] != _OBJECT_BEGINS or b"null" in raw_value):
                raw_value = self._topic.value.checked_encode(value)
            raw_key = None if key is None else self._encode_key(key)
            # The key group needs the key's canonical form, which not every key has.
            if raw_key is not None and len(raw_key) > self._surely_a_key and raw_key not in self._known_keys:
                raw_key_group(self._topic.key, raw_key)
                self._known_keys.add(raw_key)
        except Exception as error:
            raise self._refused(value, key, error) from error
        if timestamp_ms is None:
            timestamp_ms = self._clock.now_ms()
        elif type(timestamp_ms) is not int or not _MIN_TIME_MS <= timestamp_ms <= _MAX_TIME_MS:
            raise InvalidError(
                f"topic {self._topic.name!r}, key {shown(key)}: timestamp_ms={shown(timestamp_ms)} is not an int of 64 "
                f"bits; give milliseconds since 1970-01-01 UTC as an int, or leave it out"
            )
        if len(self._values) >= MAX_BUFFERED_EVENTS or self._bytes >= MAX_BUFFERED_BYTES:
            self.flush()
        if headers:
            where = f"topic {self._topic.name!r}, key {shown(key)}: "
            self._headers[len(self._values)] = checked_headers(headers, where)
        self._keys.append(raw_key)
        self._values.append(raw_value)
        self._times.append(timestamp_ms)
        self._bytes += len(raw_value)

    def flush(self) -> None:
        """Make everything sent so far durable and visible. After an error of storage, flush again."""
        while self._sealed is not None or self._values:
            self._sealed = self._sealed or self._seal()
            data, origin, checksum, rows = self._sealed
            # A segment whose creation got no answer may stand in the log: it is looked for before it is written again.
            self._since = self._since or self._topic.log.end()
            end = self._topic.log.append_once(data, origin, checksum, self._since) + rows
            self._since, self._sealed = Position(end, end), None

    def _seal(self) -> tuple[pa.Buffer, str, str, int]:
        keys, rows = pa.array(self._keys, pa.binary()), len(self._values)
        headers = [self._headers.get(row) for row in range(rows)] if self._headers else None
        columns = [
            pa.array(raw_key_groups(self._topic.key, keys)),
            keys,
            pa.array(self._values, pa.binary()),
            pa.array(self._times, pa.int64()),
            pa.nulls(rows, HEADERS_TYPE) if headers is None else headers_column(headers),
        ]
        self._flushes += 1
        origin = f"producer {self._writer} {self._flushes}"
        data, checksum = topic_segment(pa.Table.from_arrays(columns, schema=SCHEMA), origin)
        self._keys, self._values, self._times, self._headers = [], [], [], {}
        self._known_keys, self._bytes = set(), 0
        return data, origin, checksum, rows

    def _refused(self, value: Any, key: Any, error: Exception) -> InvalidError:
        topic, reason = self._topic, str(error)
        if not isinstance(error, InvalidError):
            try:
                topic.value.checked_encode(value)
            except InvalidError as better:
                reason = str(better)
        return InvalidError(
            f"topic {topic.name!r} (key={topic.key.name!r}, value={topic.value.name!r}): an event with key "
            f"{shown(key)} cannot be sent: {reason}"
        )

    def __enter__(self) -> "Producer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()


def checked_headers(headers: Any, where: str = "") -> Headers:
    """Headers as given by the user, if they are some; `where` begins the message if they are not.

    >>> checked_headers([["trace", b"a1"]])
    (('trace', b'a1'),)
    """
    if isinstance(headers, tuple | list) and all(map(_is_header, headers)):
        return tuple((name, value) for name, value in headers)
    raise InvalidError(
        f"{where}the headers {shown(headers)} are not pairs of a str and bytes; "
        f'give them like (("trace", b"a1"), ("source", b"web"))'
    )


def _is_header(header: Any) -> bool:
    if not isinstance(header, tuple | list) or len(header) != 2:
        return False
    name, value = header
    return isinstance(name, str) and isinstance(value, bytes) and not any("\ud800" <= c <= "\udfff" for c in name)
