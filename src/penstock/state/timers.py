"""Timers: how a key asks to be woken, and which are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Literal

import msgspec

from penstock.errors import InvalidError
from penstock.state.keys import Key, split_key
from penstock.state.overlay import KeyedState
from penstock.state.parts import TIMER, name_part
from penstock.state.store import CLOCK_DUE, EVENT_DUE, due_rows

MAX_FIRINGS = 1000
MAX_TIME_MS = 1 << 62
"""Further away than any time that anybody means, and near enough to be added to."""

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
        return self._keyed.table.prefixes[self.k] + name_part(TIMER, name)


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
