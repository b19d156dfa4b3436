"""What the user's code holds: the `State` of a key, and the states of a whole partition.

Invariants:
- A handle reaches rows of its own key only: every row key begins with the key's self-delimiting form.
- Values are copied in and out: what user code does to an object after `set` or after `get` changes no state.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

from penstock.errors import InvalidError
from penstock.state.collections import ListState, MapState
from penstock.state.keys import Key, decode_key, split_key
from penstock.state.overlay import ABSENT, CEILING, UNREAD, VALUE, Cells, KeyedState
from penstock.state.parts import NAME, name_of, name_part
from penstock.state.store import EVENT_DUE, due_rows


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
        cells = self._columns[name] = self._keyed.cells(name_part(NAME, name))
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
            cells.stored_at(k)  # it may have been set without a look at what it replaces
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
            self._cells.stored_at(k)
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
