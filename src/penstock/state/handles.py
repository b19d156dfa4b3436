"""What the user's code holds: `State`, `ListState`, `MapState`, `Timers`, and the states of a whole partition.

Invariants:
- A handle reaches rows of its own key only: every row key begins with the key's self-delimiting form.
- Values are copied in and out: what user code does to an object after `set` or after `get` changes no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidError
from penstock.state.keys import Key, decode_key, encode_key, split_key
from penstock.state.overlay import ABSENT, CEILING, UNREAD, VALUE, Cells, KeyedState
from penstock.state.store import CLOCK_DUE, EVENT_DUE, due_rows

NAME, LIST, MAP, TIMER = b"n", b"l", b"m", b"t"
MAX_NAME_BYTES = 64
MAX_FIRINGS = 1000
MAX_TIME_MS = 1 << 62
"""Further away than any time that anybody means, and near enough to be added to."""


def _name_part(kind: bytes, name: str) -> bytes:
    raw = name.encode() if isinstance(name, str) else b""
    if not raw or len(raw) > MAX_NAME_BYTES or b"\x00" in raw:
        raise InvalidError(
            f"{name!r} cannot name a piece of state: a name is a text of 1 to {MAX_NAME_BYTES} bytes; "
            f"for many names that come from data, use state.map(name)"
        )
    return kind + raw + b"\x00"


def name_of(part: bytes) -> str:
    """The name that a part of a row key was made of."""
    return part[1 : part.index(b"\x00")].decode()


class State:
    """The state of one key in one step, given to functions of `apply`, `update` and `filter` with `stateful=True`.

    It is bound to the key of the event at hand; do not keep it. Values are copied in and out.

    >>> from penstock import Application, State
    >>> from penstock.testing import TestDriver
    >>> app = Application("shop")
    >>> def count(value: dict, state: State) -> int:
    ...     seen = state.get("seen", default=0) + 1
    ...     state.set("seen", seen)
    ...     return seen
    >>> app.dataframe(app.topic("in")).apply(count, stateful=True).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> for key in ["a", "b", "a"]:
    ...     driver.send("in", {}, key=key)
    >>> driver.epoch()
    >>> sorted((event.key, event.value) for event in driver.received("out"))
    [('a', 1), ('a', 2), ('b', 1)]
    """

    __slots__ = ("_columns", "_keyed", "k", "now_ms")

    def __init__(self, keyed: KeyedState) -> None:
        self._keyed = keyed
        self._columns: dict[str, Cells] = {}
        self.k = 0
        self.now_ms = 0

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a name, or the default."""
        cells = self._columns.get(name)
        if cells is None:
            cells = self._open(name)
        value = cells.live[self.k]
        if value.__class__ in cells.exact and not cells.dues:
            return value
        value = self._visible(cells)
        return default if value is ABSENT else value

    def set(self, name: str, value: Any, ttl: timedelta | None = None) -> None:
        """Store a value under a name. With `ttl` it is gone once event time has moved on by that much."""
        cells = self._columns.get(name)
        if cells is None:
            cells = self._open(name)
        if self._keyed.journal is not None:
            self._remember(cells)
        if value.__class__ in cells.plain:
            cells.live[self.k] = value
        else:
            cells.write(self.k, value)
        if ttl is not None:
            cells.dues[self.k] = self.now_ms + _milliseconds(ttl)
        elif cells.dues or cells.stored_dues:
            cells.dues.pop(self.k, None)

    def delete(self, name: str) -> None:
        """Remove what is under a name; nothing happens if nothing is."""
        cells = self._columns.get(name) or self._open(name)
        if self._keyed.journal is not None:
            self._remember(cells)
        cells.stored_at(self.k)
        cells.live[self.k] = ABSENT
        cells.dues.pop(self.k, None)

    def exists(self, name: str) -> bool:
        """Whether there is a value under a name."""
        return self._visible(self._columns.get(name) or self._open(name)) is not ABSENT

    def keys(self) -> list[str]:
        """The names that have a value, in order."""
        prefix = self._keyed.table.prefixes[self.k] + NAME
        for row, _ in self._keyed.store.scan(prefix, prefix + CEILING):
            name = name_of(row[len(prefix) - 1 :])
            self._columns.get(name) or self._open(name)
        return sorted(name for name in self._columns if self.exists(name))

    def list(self, name: str) -> ListState:
        """A list of this key that may grow large: one stored row for each element."""
        return ListState(self._keyed, self.k, name)

    def map(self, name: str) -> MapState:
        """A mapping of this key that may grow large: one stored row for each entry."""
        return MapState(self._keyed, self.k, name)

    def _open(self, name: str) -> Cells:
        cells = self._columns[name] = self._keyed.cells(_name_part(NAME, name))
        return cells

    def _visible(self, cells: Cells) -> Any:
        value = cells.read(self.k)
        due = cells.dues.get(self.k)
        return ABSENT if due is not None and due <= self.now_ms else value

    def _remember(self, cells: Cells) -> None:
        k = self.k
        cells.stored_at(k)
        live, frozen, due = cells.live[k], cells.frozen[k], cells.dues.get(k)

        def undo() -> None:
            cells.live[k], cells.frozen[k] = live, frozen
            if due is None:
                cells.dues.pop(k, None)
            else:
                cells.dues[k] = due

        assert self._keyed.journal is not None
        self._keyed.journal.append(undo)


def _milliseconds(ttl: timedelta) -> int:
    ms = ttl // timedelta(milliseconds=1)
    if ms <= 0:
        raise InvalidError(f"ttl must be positive, {ttl!r} is not; use delete() to remove a value now")
    return ms


class _Collection:
    """Rows of one key under one name, and one row that says how many there are."""

    __slots__ = ("_keyed", "_prefix")

    def __init__(self, keyed: KeyedState, k: int, kind: bytes, name: str) -> None:
        self._keyed = keyed
        self._prefix = keyed.table.prefixes[k] + _name_part(kind, name)

    def _read_meta(self, default: list[int]) -> list[int]:
        data = self._keyed.get_row(self._prefix)
        return default if data is None else msgspec.json.decode(data, type=list[int])

    def _write_meta(self, meta: list[int], empty: bool) -> None:
        self._keyed.put_row(self._prefix, None if empty else msgspec.json.encode(meta))

    def _decode(self, data: bytes) -> Any:
        return self._keyed.codec.decode(data)

    def _encode(self, value: Any) -> bytes:
        return self._keyed.codec.checked_encode(value)

    def clear(self) -> None:
        """Remove everything."""
        for row, _ in list(self._keyed.scan_rows(self._prefix, self._prefix + CEILING)):
            self._keyed.put_row(row, None)


class ListState(_Collection):
    """A list under one key: one row for each element, so that appending to a long list costs one element.

    >>> from penstock import Application, State
    >>> from penstock.testing import TestDriver
    >>> app = Application("shop")
    >>> def last_three(value: int, state: State) -> list:
    ...     recent = state.list("recent")
    ...     recent.append(value)
    ...     if len(recent) > 3:
    ...         recent.pop_first()
    ...     return list(recent)
    >>> app.dataframe(app.topic("in")).apply(last_three, stateful=True).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> for number in range(5):
    ...     driver.send("in", number, key="a")
    >>> driver.epoch()
    >>> driver.received("out")[-1].value
    [2, 3, 4]
    """

    __slots__ = ()

    def __init__(self, keyed: KeyedState, k: int, name: str) -> None:
        super().__init__(keyed, k, LIST, name)

    def __len__(self) -> int:
        first, end = self._read_meta([0, 0])
        return end - first

    def append(self, value: Any) -> None:
        """Add an element at the end."""
        first, end = self._read_meta([0, 0])
        self._keyed.put_row(self._row(end), self._encode(value))
        self._write_meta([first, end + 1], empty=False)

    def extend(self, values: Any) -> None:
        """Add several elements at the end."""
        for value in values:
            self.append(value)

    def __getitem__(self, index: int) -> Any:
        data = self._keyed.get_row(self._row(self._place(index)))
        assert data is not None, "an element between first and end has a row"
        return self._decode(data)

    def __setitem__(self, index: int, value: Any) -> None:
        self._keyed.put_row(self._row(self._place(index)), self._encode(value))

    def __iter__(self) -> Iterator[Any]:
        rows = self._keyed.scan_rows(self._prefix + b"\x00", self._prefix + CEILING)
        return (self._decode(data) for _, data in rows)

    def pop_first(self) -> Any:
        """Remove and return the first element."""
        first, end = self._read_meta([0, 0])
        value = self[0]
        self._keyed.put_row(self._row(first), None)
        self._write_meta([first + 1, end], empty=first + 1 == end)
        return value

    def pop(self) -> Any:
        """Remove and return the last element."""
        first, end = self._read_meta([0, 0])
        value = self[-1]
        self._keyed.put_row(self._row(end - 1), None)
        self._write_meta([first, end - 1], empty=first + 1 == end)
        return value

    def _place(self, index: int) -> int:
        first, end = self._read_meta([0, 0])
        place = first + index if index >= 0 else end + index
        if not first <= place < end:
            raise IndexError(f"the list has {end - first} elements, there is none at {index}")
        return place

    def _row(self, place: int) -> bytes:
        return self._prefix + place.to_bytes(8, "big")


class MapState(_Collection, MutableMapping[Any, Any]):
    """A mapping under one key: one row for each entry, so that changing one of a million costs one entry.

    Its keys are what keys of events can be; it is iterated in their order.

    >>> from penstock import Application, State
    >>> from penstock.testing import TestDriver
    >>> app = Application("shop")
    >>> def stock(value: dict, state: State) -> dict:
    ...     counts = state.map("counts")
    ...     counts[value["item"]] = counts.get(value["item"], 0) + value["count"]
    ...     return dict(counts)
    >>> app.dataframe(app.topic("in")).apply(stock, stateful=True).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> for item in ["pen", "ink", "pen"]:
    ...     driver.send("in", {"item": item, "count": 2}, key="berlin")
    >>> driver.epoch()
    >>> driver.received("out")[-1].value
    {'ink': 2, 'pen': 4}
    """

    __slots__ = ()

    def __init__(self, keyed: KeyedState, k: int, name: str) -> None:
        super().__init__(keyed, k, MAP, name)

    def __len__(self) -> int:
        return self._read_meta([0])[0]

    def __getitem__(self, key: Key) -> Any:
        data = self._keyed.get_row(self._row(key))
        if data is None:
            raise KeyError(key)
        return self._decode(data)

    def __contains__(self, key: object) -> bool:
        return self._keyed.get_row(self._row(key)) is not None  # type: ignore[arg-type]

    def __setitem__(self, key: Key, value: Any) -> None:
        row, data = self._row(key), self._encode(value)
        if self._keyed.get_row(row) is None:
            self._write_meta([len(self) + 1], empty=False)
        self._keyed.put_row(row, data)

    def __delitem__(self, key: Key) -> None:
        row = self._row(key)
        if self._keyed.get_row(row) is None:
            raise KeyError(key)
        self._keyed.put_row(row, None)
        left = len(self) - 1
        self._write_meta([left], empty=left == 0)

    def __iter__(self) -> Iterator[Key]:
        return (key for key, _ in self._entries())

    def _entries(self) -> Iterator[tuple[Key, Any]]:
        start = len(self._prefix)
        for row, data in self._keyed.scan_rows(self._prefix + b"\x00", self._prefix + CEILING):
            yield decode_key(row[start:]), self._decode(data)

    def _row(self, key: Key) -> bytes:
        return self._prefix + encode_key(key)


TimerClock = Literal["event", "processing"]


class Timer(msgspec.Struct, frozen=True):
    """A timer that a `StatefulLogic` set: its name, its time, and the clock that it waits for.

    >>> Timer(name="close", time_ms=60_000, clock="event").time_ms
    60000
    """

    name: str
    time_ms: int
    clock: TimerClock


class Timers:
    """The timers of one key in one step: `self.timers` in a `StatefulLogic`. A name has one timer at most.

    >>> from penstock import Application, StatefulLogic
    >>> from penstock.testing import TestDriver
    >>> class Reminder(StatefulLogic):
    ...     def on_data(self, event, state, emit):
    ...         self.timers.at_event_time(event.timestamp_ms + 1000)
    ...         return event.value
    ...     def on_timer(self, key, state, timer, emit):
    ...         emit(f"{key} said {state} a second ago")
    ...         return None
    >>> app = Application("reminders")
    >>> app.dataframe(app.topic("in")).stateful_op("remind", Reminder()).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> driver.send("in", "hello", key="anna", timestamp_ms=0)
    >>> driver.send("in", "later", key="bob", timestamp_ms=1500)
    >>> driver.epoch()
    >>> driver.epoch()
    >>> [event.value for event in driver.received("out")]
    ['anna said hello a second ago']
    """

    __slots__ = ("_keyed", "k")

    def __init__(self, keyed: KeyedState) -> None:
        self._keyed = keyed
        self.k = 0

    def at_event_time(self, time_ms: int, name: str = "timer") -> None:
        """Wake this key when the watermark has reached a time."""
        self._set(Timer(name, time_ms, "event"))

    def at_processing_time(self, time_ms: int, name: str = "timer") -> None:
        """Wake this key in the first epoch that begins at or after a time of the wall clock."""
        self._set(Timer(name, time_ms, "processing"))

    def cancel(self, name: str = "timer") -> None:
        """Forget a timer; nothing happens if there is none."""
        self._keyed.put_row(self._row(name), None)

    def _set(self, timer: Timer) -> None:
        if timer.time_ms.__class__ is not int or abs(timer.time_ms) > MAX_TIME_MS:
            raise InvalidError(f"the time of a timer is a whole number of milliseconds, {timer.time_ms!r} is not")
        event, clock = (timer.time_ms, None) if timer.clock == "event" else (None, timer.time_ms)
        self._keyed.put_row(self._row(timer.name), msgspec.json.encode(timer), event, clock)

    def _row(self, name: str) -> bytes:
        return self._keyed.table.prefixes[self.k] + _name_part(TIMER, name)


def due_timers(keyed: KeyedState, watermark_ms: int | None, clock_ms: int) -> Iterator[tuple[Key, Timer]]:
    """The timers whose time has come, earliest first; also those that are set while this is iterated.

    A timer is taken off before it is given. One that is set again and again for a time that has passed is given
    MAX_FIRINGS times in an epoch, and then left for the next.
    """
    limits = ((EVENT_DUE, watermark_ms), (CLOCK_DUE, clock_ms))
    rows = {row for index, until in limits if until is not None for _, row in due_rows(keyed.store, index, until)}
    untils = {"event": watermark_ms, "processing": clock_ms}
    waiting: list[tuple[int, bytes]] = []
    firings: Counter[bytes] = Counter()
    keyed.written_dues |= rows
    while keyed.written_dues or waiting:
        while keyed.written_dues:
            row = keyed.written_dues.pop()
            timer = _timer_at(keyed, row, untils)
            if timer is not None:
                heappush(waiting, (timer.time_ms, row))
        if not waiting:
            return
        time_ms, row = heappop(waiting)
        timer = _timer_at(keyed, row, untils)
        if timer is None or timer.time_ms != time_ms or firings[row] == MAX_FIRINGS:
            continue  # cancelled, or set to another time since
        firings[row] += 1
        keyed.put_row(row, None)
        yield split_key(row, 2)[0], timer


def _timer_at(keyed: KeyedState, row: bytes, untils: Mapping[str, int | None]) -> Timer | None:
    """The timer in a row, if there is one and its time has come."""
    end = split_key(row, 2)[1]
    data = keyed.get_row(row) if row[end : end + 1] == TIMER else None
    if data is None:
        return None
    timer = msgspec.json.decode(data, type=Timer)
    until = untils[timer.clock]
    return timer if until is not None and timer.time_ms <= until else None


def remove_expired(keyed: KeyedState, watermark_ms: int | None) -> None:
    """Delete the values whose ttl the watermark has passed, also those of keys that this epoch has not touched."""
    if watermark_ms is None:
        return
    for _, row in due_rows(keyed.store, EVENT_DUE, watermark_ms) if keyed.timed else []:
        key, end = split_key(row, 2)
        if row[end : end + 1] == NAME:
            cells, k = keyed.cells(row[end:]), keyed.table.number(key)
            cells.grow()
            cells.read(k)
    # What was set in this epoch may have expired as well: by an event that came late.
    for cells in keyed.columns():
        for k in [k for k, due in cells.dues.items() if due <= watermark_ms]:
            cells.live[k] = ABSENT
            del cells.dues[k]


class States(MutableMapping[Any, Any]):
    """The states of all keys of a partition, read as they are asked for: what `on_epoch` and `on_schedule` get.

    Setting a state to None, or deleting it, drops it. It may be changed while it is iterated.

    >>> from penstock import Application, StatefulLogic
    >>> from penstock.testing import TestDriver
    >>> class Total(StatefulLogic):
    ...     def on_data(self, event, state, emit):
    ...         return (state or 0) + event.value
    ...     def on_epoch(self, watermark_ms, states, emit):
    ...         for key, total in states.items():
    ...             emit(total, key=key)
    >>> app = Application("totals")
    >>> app.dataframe(app.topic("in")).stateful_op("total", Total()).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> driver.send("in", 3, key="a")
    >>> driver.send("in", 4, key="a")
    >>> driver.epoch()
    >>> [(event.key, event.value) for event in driver.received("out")]
    [('a', 7)]
    """

    def __init__(self, keyed: KeyedState) -> None:
        self._keyed = keyed
        self._cells = keyed.cells(VALUE)

    def __getitem__(self, key: Key) -> Any:
        row = self._keyed.table.place(key)
        k = self._keyed.table.find(row)
        if k is None:  # to look at a state is no reason to keep it in memory
            data = self._keyed.get_row(row)
            value = ABSENT if data is None else self._keyed.codec.decode(data)
        else:
            self._cells.grow()
            value = self._cells.read(k)
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Key, state: Any) -> None:
        k = self._keyed.table.number(key)
        self._cells.grow()
        if state is None:
            self._cells.read(k)
            self._cells.live[k] = ABSENT
        else:
            self._cells.write(k, state)

    def __delitem__(self, key: Key) -> None:
        self[key]
        self[key] = None

    def __iter__(self) -> Iterator[Key]:
        table, cells = self._keyed.table, self._cells
        written = sorted(
            (table.prefixes[k], k) for k, v in enumerate(cells.live) if v is not UNREAD and v is not ABSENT
        )
        touched = {table.prefixes[k] for k, value in enumerate(cells.live) if value is not UNREAD}
        at = 0
        for row, _ in self._keyed.store.scan(_first_row(table.partition.start), _first_row(table.partition.stop)):
            if row in touched or split_key(row, 2)[1] != len(row):
                continue
            while at < len(written) and written[at][0] < row:
                yield from self._unless_dropped(written[at][1])
                at += 1
            k = table.find(row)
            if k is None:
                yield decode_key(row[2:])
            else:
                yield from self._unless_dropped(k)
        for _, k in written[at:]:
            yield from self._unless_dropped(k)

    def _unless_dropped(self, k: int) -> Iterator[Key]:
        if k >= len(self._cells.live) or self._cells.live[k] is not ABSENT:
            yield self._keyed.table.keys[k]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _first_row(group: int) -> bytes:
    return group.to_bytes(2, "big")
