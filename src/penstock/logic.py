"""The stateful primitive: `StatefulLogic`, and the operator that runs one in a task.

Invariants:
- What a logic emits keeps the key of its input, and never lies before the watermark.
- A timer fires once, in the first epoch whose watermark (or clock) has reached its time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any, Protocol

import numpy as np

from penstock.batches import NO_ROW, NOWHERE, Batch, Origin, copied
from penstock.errors import InvalidError
from penstock.events import Event, Headers
from penstock.operators import PerEvent, Scope, default_state, require_key
from penstock.plan import StatefulOp, Step
from penstock.state.collections import ListState, MapState
from penstock.state.handles import States
from penstock.state.keys import Key
from penstock.state.overlay import ABSENT, VALUE, KeyedState
from penstock.state.timers import Timer, Timers, due_timers
from penstock.topics import checked_headers

_MAX_INT64 = (1 << 63) - 1


class StatefulLogic:
    """Your code in a stateful step: subclass it, and pass an instance to `stateful_op`.

    `on_data` must be given; the other hooks do nothing unless you write them. Keep nothing in `self`: all state is
    what the hooks are given and return, and what `self.timers`, `self.list_state(name)` and `self.map_state(name)`
    hold for the key at hand. `schedule` is the interval of `on_schedule`, in processing time.

    >>> from penstock import Application, StatefulLogic
    >>> from penstock.testing import TestDriver
    >>> class Pairs(StatefulLogic):
    ...     def on_data(self, event, state, emit):
    ...         if state is None:
    ...             return event.value
    ...         emit([state, event.value])
    ...         return None
    >>> app = Application("pairs")
    >>> app.dataframe(app.topic("in")).stateful_op("pair", Pairs()).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> for number in range(5):
    ...     driver.send("in", number, key="a")
    >>> driver.epoch()
    >>> [event.value for event in driver.received("out")], dict(driver.state("pair"))
    ([[0, 1], [2, 3]], {'a': 4})
    """

    schedule: timedelta | None = None
    _keyed: KeyedState | None = None
    _timers: Timers | None = None

    def on_data(self, event: Event, state: Any, emit: Emit) -> Any:
        """One event and the state of its key (the default if there is none); returns the new state, None to drop it."""
        raise InvalidError(f"{type(self).__name__} has no on_data(event, state, emit); a StatefulLogic needs one")

    def on_timer(self, key: Key, state: Any, timer: Timer, emit: Emit) -> Any:
        """A timer of a key has come; returns the new state, None to drop it."""
        return state

    def on_epoch(self, watermark_ms: int | None, states: States, emit: Emit) -> None:
        """The end of each epoch; `states` are those of all keys of this partition. Emitted events need a key."""

    def on_schedule(self, states: States, emit: Emit) -> None:
        """The first epoch in each new interval of `schedule`, never the first of all. Emitted events need a key."""

    @property
    def timers(self) -> Timers:
        """The timers of the key at hand, in on_data and on_timer."""
        if self._timers is None:
            raise InvalidError(
                "timers, list_state() and map_state() belong to a key, and there is none at hand here; "
                "use them in on_data and on_timer"
            )
        return self._timers

    def list_state(self, name: str) -> ListState:
        """A large list of the key at hand."""
        k = self.timers.k
        assert self._keyed is not None, "who has timers has state"
        return ListState(self._keyed, k, name)

    def map_state(self, name: str) -> MapState:
        """A large mapping of the key at hand."""
        k = self.timers.k
        assert self._keyed is not None, "who has timers has state"
        return MapState(self._keyed, k, name)


class Emit(Protocol):
    """Sends one event on: `emit(value)`. It keeps the key, time and headers of its input unless you give others.

    >>> from penstock import Application, Emit, Event, StatefulLogic
    >>> from penstock.testing import TestDriver
    >>> class Twice(StatefulLogic):
    ...     def on_data(self, event: Event, state: None, emit: Emit) -> None:
    ...         emit(event.value)
    ...         emit(event.value, timestamp_ms=event.timestamp_ms + 1)
    >>> app = Application("twice")
    >>> app.dataframe(app.topic("in")).stateful_op("twice", Twice()).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> driver.send("in", "hello", key="a", timestamp_ms=7)
    >>> driver.epoch()
    >>> [(event.value, event.timestamp_ms) for event in driver.received("out")]
    [('hello', 7), ('hello', 8)]
    """

    def __call__(
        self, value: Any, timestamp_ms: int | None = None, key: Key | None = None, headers: Headers | None = None
    ) -> None: ...


class _Emitter:
    """Collects what a logic emits, and holds it to what may be emitted."""

    __slots__ = ("_scope", "header_rows", "headers", "key_number", "keys", "row", "rows", "time_ms", "times", "values")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.values: list[Any] = []
        self.keys: list[int] = []
        self.times: list[int] = []
        self.rows: list[int] = []
        self.header_rows: list[Headers] = []
        self.key_number: int | None = None
        self.time_ms = 0
        self.row = NO_ROW
        self.headers: Headers = ()

    def __call__(
        self, value: Any, timestamp_ms: int | None = None, key: Key | None = None, headers: Headers | None = None
    ) -> None:
        k = self.key_number
        if k is None:
            if key is None:
                raise InvalidError(
                    "emit() needs a key here: on_epoch and on_schedule belong to no event, so there is none to keep"
                )
            k = self._scope.table.number(key)
        elif key is not None and self._scope.table.number(key) != k:
            raise InvalidError(
                f"emit() was given key {key!r}, but the event at hand has key {self._scope.table.keys[k]!r}; an "
                f"emitted event keeps the key of its input: change it afterwards with key_by()"
            )
        time_ms = self.time_ms if timestamp_ms is None else self._checked(timestamp_ms)
        own_headers = self.headers if headers is None else checked_headers(headers)
        self.values.append(copied(value))  # the logic may go on to change it
        self.keys.append(k)
        self.times.append(time_ms)
        self.rows.append(self.row)
        self.header_rows.append(own_headers)

    def _checked(self, timestamp_ms: int) -> int:
        watermark_ms = self._scope.watermark_ms
        if timestamp_ms.__class__ is not int or abs(timestamp_ms) > _MAX_INT64:
            raise InvalidError(f"emit() was given timestamp_ms={timestamp_ms!r}; it is a whole number of milliseconds")
        if watermark_ms is not None and timestamp_ms < min(watermark_ms, self.time_ms):
            raise InvalidError(
                f"emit() was given timestamp_ms={timestamp_ms}, which is before the watermark {watermark_ms}: later "
                f"steps were told that no such event comes any more; emit at the watermark or later"
            )
        return timestamp_ms

    def cut(self, length: int) -> None:
        """Take back what was emitted behind this many events."""
        for column in (self.values, self.keys, self.times, self.rows, self.header_rows):
            del column[length:]

    def batch(self, origin: Origin) -> Batch:
        """What was emitted, as a batch."""
        keys, times, rows = (np.array(column, np.int64) for column in (self.keys, self.times, self.rows))
        headers = self.header_rows if any(self.header_rows) else None
        return Batch(self.values, keys, times, rows, headers, origin)


class StatefulOpOperator(PerEvent):
    """`stateful_op`: runs a StatefulLogic."""

    def __init__(self, step: Step, work: StatefulOp, scope: Scope, keyed: KeyedState) -> None:
        self._logic: StatefulLogic = copy.copy(work.logic)
        super().__init__(step, self._logic.on_data, scope)
        self._keyed = keyed
        self._cells = keyed.cells(VALUE)
        self._default = default_state(work.default, work.state)
        self._timers = Timers(keyed)
        self._logic._keyed, self._logic._timers = keyed, self._timers
        if not scope.failures.fatal:
            keyed.journal = []

    def process(self, batch: Batch) -> Batch:
        """Give each event to the logic."""
        self._cells.load()
        emit = _Emitter(self.scope)
        done: list[int] = []
        run, undo = (lambda start: self._run(batch, start, emit, done)), (lambda: self._undo(emit, done))
        self._guarded(batch, done, run, undo)
        return emit.batch(batch.origin)

    def _run(self, batch: Batch, start: int, emit: _Emitter, done: list[int]) -> None:
        table, place_of, on_data = self.scope.table, batch.origin.place, self._logic.on_data
        keys = table.keys
        columns = (batch.keys, batch.times, batch.rows)
        rest = zip(islice(batch.values, start, None), *(c[start:].tolist() for c in columns), strict=True)
        for place, (value, k, time_ms, row) in enumerate(rest, start):
            require_key(table, k)
            headers = batch.header(place)
            emit.key_number, emit.time_ms, emit.row, emit.headers = k, time_ms, row, headers
            self._timers.k = k
            event = Event(keys[k], value, time_ms, headers, *place_of(row))
            self._store(k, on_data(event, self._load(k), emit))
            done.append(len(emit.values))
            if self._keyed.journal is not None:
                self._keyed.journal = []

    def _undo(self, emit: _Emitter, done: list[int]) -> None:
        """Take back what an event did that failed half-way: what it emitted, and what it wrote."""
        emit.cut(done[-1] if done else 0)
        self._keyed.rollback()

    def _load(self, k: int) -> Any:
        state = self._cells.read(k)
        return self._default() if state is ABSENT else state

    def _store(self, k: int, state: Any) -> None:
        if state is None:
            self._cells.live[k] = ABSENT
        else:
            self._cells.write(k, state)

    def finish(self) -> Batch | None:
        """Timers, `on_epoch`, `on_schedule`, in this order."""
        emit = _Emitter(self.scope)
        emit.time_ms = self.scope.clock_ms if self.scope.watermark_ms is None else self.scope.watermark_ms
        self._fire_timers(emit)
        self._keyed.journal = None
        emit.key_number = self._logic._timers = None
        states = States(self._keyed)
        watermark_ms = self.scope.watermark_ms
        self._call(self._logic.on_epoch, lambda: self._logic.on_epoch(watermark_ms, states, emit))
        if self._is_scheduled():
            self._call(self._logic.on_schedule, lambda: self._logic.on_schedule(states, emit))
        return emit.batch(NOWHERE) if emit.values else None

    def _fire_timers(self, emit: _Emitter) -> None:
        for key, timer in due_timers(self._keyed, self.scope.watermark_ms, self.scope.clock_ms):
            self._fire(key, timer, emit)

    def _fire(self, key: Key, timer: Timer, emit: _Emitter) -> None:
        k = self.scope.table.number(key)
        self._cells.grow()
        self._timers.k = emit.key_number = k
        emitted = len(emit.values)
        if self._keyed.journal is not None:
            self._keyed.journal = []
        try:
            self._store(k, self._logic.on_timer(key, self._load(k), timer, emit))
        except Exception as error:
            self.scope.failures.handle(self.step.name, self._logic.on_timer, error, key, None, 0)
            emit.cut(emitted)
            self._keyed.rollback()

    def _call(self, hook: Callable[..., None], call: Callable[[], None]) -> None:
        """A hook that belongs to no event: if it fails, there is nothing to skip, so the epoch fails."""
        try:
            call()
        except Exception as error:
            self.scope.failures.fail(self.step.name, hook, error, None, None, 0)

    def _is_scheduled(self) -> bool:
        if self._logic.schedule is None:
            return False
        interval = max(1, self._logic.schedule // timedelta(milliseconds=1))
        return self.scope.clock_ms // interval > self.scope.clock_before_ms // interval
