"""The overlay of an epoch: what a task has read and written of one step's state, over a store that is only read.

Invariants:
- Everything written in an epoch lies in the overlay and leaves it as one sorted delta.
- Each row is read at most once per epoch and written at most once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidError
from penstock.state.codec import Codec
from penstock.state.key_table import KeyTable
from penstock.state.keys import shown
from penstock.state.segments import segment_table
from penstock.state.store import DUES, MAX_ROW_KEY_BYTES, Store, unpack_dues

VALUE = b""
FEW_INSERTIONS = 64  # up to here, inserting into a sorted list is cheaper than sorting it
SINGLE_READS = 16  # a name read for more keys than this is fetched for all keys of the task at once
CEILING = b"\xff"


class Mark:
    """A place in a column of cells that holds no value of the user's."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


UNREAD, ABSENT, FROZEN = Mark("UNREAD"), Mark("ABSENT"), Mark("FROZEN")


class Cells:
    """One part of the state (a value, or one name) for each key of a task, as a column indexed by the key's number."""

    __slots__ = (
        "_loaded",
        "_reads",
        "_state",
        "codec",
        "dues",
        "exact",
        "frozen",
        "live",
        "part",
        "plain",
        "stored",
        "stored_dues",
    )

    def __init__(self, state: KeyedState, part: bytes, codec: Codec) -> None:
        self._state = state
        self.part = part
        self.codec = codec
        self.exact = codec.exact
        self.plain = codec.exact - {float}  # a float may be one that the codec cannot hold: write() looks
        self.live: list[Any] = []
        self.frozen: list[bytes | None] = []
        self.stored: list[bytes | None] = []
        self.dues: dict[int, int] = {}
        self.stored_dues: dict[int, int] = {}
        self._loaded = 0
        self._reads = 0
        self.grow()

    def grow(self) -> None:
        """Make room for keys that got a number since."""
        missing = len(self._state.table) - len(self.live)
        if missing > 0:
            self.live.extend([UNREAD] * missing)
            self.frozen.extend([None] * missing)

    def load(self) -> None:
        """Fetch the stored rows of all keys that were not fetched yet, in one go."""
        self.grow()
        start, prefixes = self._loaded, self._state.table.prefixes
        keys = [p + self.part for p in prefixes[start:]] if self.part or start else prefixes
        self.stored[start:] = self._state.store.get_many(keys)
        if self._state.timed:
            self._note_dues(start, self._state.store.get_many([DUES + key for key in keys]))
        self._loaded = len(prefixes)

    def _note_dues(self, start: int, dues: list[bytes | None]) -> None:
        for k, packed in enumerate(dues, start):
            if packed is not None and (due := unpack_dues(packed)[0]) is not None and k not in self.stored_dues:
                self.stored_dues[k] = due
                if self.live[k] is UNREAD:
                    self.dues[k] = due

    def stored_at(self, k: int) -> bytes | None:
        """The stored bytes of a key, fetched alone while few are asked for."""
        if k < self._loaded:
            return self.stored[k]
        self._reads += 1
        if self._reads > SINGLE_READS or k >= len(self.live):
            self.load()
            return self.stored[k]
        self.stored.extend([None] * (k + 1 - len(self.stored)))
        row = self._state.table.prefixes[k] + self.part
        self.stored[k] = self._state.store.get_many([row])[0]
        if self._state.timed:
            self._note_dues(k, self._state.store.get_many([DUES + row]))
        return self.stored[k]

    def read(self, k: int) -> Any:
        """The value of a key, a copy of its own unless it cannot change; or ABSENT."""
        value = self.live[k]
        if value is FROZEN:
            return self.codec.decode(self.frozen[k])  # type: ignore[arg-type]
        if value is not UNREAD:
            return value
        data = self.stored_at(k)
        if data is None:
            self.live[k] = ABSENT
            return ABSENT
        try:
            value = self.codec.decode(data)
        except Exception as error:
            raise InvalidError(
                f"the stored state {data[:80]!r} of key {self._state.table.keys[k]!r} in step {self._state.step!r} "
                f"cannot be read as {self.codec.name} ({error}); read it as it was written, or call clear_state()"
            ) from error
        if value.__class__ in self.exact:
            self.live[k] = value
        else:
            self.frozen[k], self.live[k] = data, FROZEN
        return value

    def write(self, k: int, value: Any) -> None:
        """Set the value of a key: a value that can change is encoded at once, so later changes to it are not seen."""
        if value.__class__ in self.exact and (value.__class__ is not float or isfinite(value)):
            self.live[k] = value
            return
        self.frozen[k] = self.codec.checked_encode(value)
        self.live[k] = FROZEN

    def changes(self) -> tuple[list[int], list[bytes | None]]:
        """The numbers and the new bytes (None: deleted) of the keys whose rows are not what is stored."""
        encode, frozen, live = self.codec.encode, self.frozen, self.live
        # Who deletes a row has looked at it before, so what was never fetched can only be written.
        self.stored.extend([None] * (len(live) - len(self.stored)))
        dues, stored_dues = self.dues, self.stored_dues
        numbers: list[int] = []
        changed: list[bytes | None] = []
        data: bytes | None
        for k, (value, stored) in enumerate(zip(live, self.stored, strict=True)):
            if value.__class__ is not Mark:
                try:
                    data = encode(value)
                except Exception as error:
                    raise self._unfit(k, value, error) from error
            elif value is UNREAD:
                continue
            else:
                data = frozen[k] if value is FROZEN else None
            if data != stored or ((dues or stored_dues) and dues.get(k) != stored_dues.get(k)):
                numbers.append(k)
                changed.append(data)
        return numbers, changed

    def _unfit(self, k: int, value: Any, error: Exception) -> InvalidError:
        return InvalidError(
            f"the new state {shown(value)} of key {shown(self._state.table.keys[k])} cannot be written with the codec "
            f'"{self.codec.name}": {error}; return a state that it can hold, or give the step another codec'
        )


RowWrite = tuple[bytes | None, int | None, int | None]


class KeyedState:
    """The state of one step in one partition during an epoch: an overlay over the store as of the epoch before."""

    def __init__(self, step: str, store: Store, table: KeyTable, codec: Codec) -> None:
        self.step = step
        self.store = store
        self.table = table
        self.codec = codec
        self.timed = next(iter(store.scan(DUES, CEILING)), None) is not None
        self.journal: list[Callable[[], None]] | None = None
        self._cells: dict[bytes, Cells] = {}
        self.written_dues: set[bytes] = set()
        self._rows: dict[bytes, RowWrite] = {}
        self._sorted: list[bytes] = []
        self._unsorted: list[bytes] = []

    def cells(self, part: bytes) -> Cells:
        """The column of one part of the state."""
        found = self._cells.get(part)
        if found is None:
            found = self._cells[part] = Cells(self, part, self.codec)
        return found

    def columns(self) -> list[Cells]:
        """The columns of all parts of the state that this epoch has touched."""
        return list(self._cells.values())

    def grow(self) -> None:
        """Make room for keys that got a number since: timers wake keys that no event of this epoch has."""
        for cells in self._cells.values():
            cells.grow()

    def get_row(self, key: bytes) -> bytes | None:
        """The bytes of a row that is no cell (an element of a collection, a timer)."""
        if key in self._rows:
            return self._rows[key][0]
        return self.store.get_many([key])[0]

    def put_row(self, key: bytes, data: bytes | None, event_ms: int | None = None, clock_ms: int | None = None) -> None:
        """Write a row that is no cell; None deletes it."""
        if len(key) > MAX_ROW_KEY_BYTES:
            raise InvalidError(
                f"step {self.step!r}: a key with the name or map key beneath it takes {len(key)} bytes, "
                f"at most {MAX_ROW_KEY_BYTES} are possible; use shorter ones"
            )
        old = self._rows.get(key)
        if self.journal is not None:
            self.journal.append(lambda: self._undo(key, old))
        if old is None:
            self._unsorted.append(key)
        if event_ms is not None or clock_ms is not None:
            self.written_dues.add(key)
        self._rows[key] = (data, event_ms, clock_ms)

    def _undo(self, key: bytes, old: RowWrite | None) -> None:
        if old is not None:
            self._rows[key] = old
            return
        del self._rows[key]
        keys = self._ordered()
        del keys[bisect_left(keys, key)]

    def _ordered(self) -> list[bytes]:
        """The keys of the rows written in this epoch, in order."""
        if len(self._unsorted) < FEW_INSERTIONS:
            for key in self._unsorted:
                insort(self._sorted, key)
        else:
            self._sorted = sorted(self._sorted + self._unsorted)
        self._unsorted = []
        return self._sorted

    def scan_rows(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows with start <= key < end in order, with what was written in this epoch."""
        keys = self._ordered()
        written = keys[bisect_left(keys, start) : bisect_left(keys, end)]
        at = 0
        for key, data in self.store.scan(start, end):
            while at < len(written) and written[at] < key:
                yield from self._live_row(written[at])
                at += 1
            if at < len(written) and written[at] == key:
                yield from self._live_row(key)
                at += 1
            elif key not in self._rows:
                yield key, data
        for key in written[at:]:
            yield from self._live_row(key)

    def _live_row(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        data = self._rows[key][0] if key in self._rows else self.store.get_many([key])[0]
        if data is not None:
            yield key, data

    def rollback(self) -> None:
        """Undo what was done since the journal was begun, and begin it anew."""
        assert self.journal is not None, "only what is journalled can be undone"
        for undo in reversed(self.journal):
            undo()
        self.journal = []

    def delta(self) -> pa.Table | None:
        """Everything this epoch changed, sorted by key; None if that is nothing."""
        keys: list[bytes] = []
        values: list[bytes | None] = []
        dues: dict[bytes, int] = {}
        prefixes = self.table.prefixes
        for cells in self._cells.values():
            numbers, changed = cells.changes()
            keys.extend([prefixes[k] + cells.part for k in numbers] if cells.part else [prefixes[k] for k in numbers])
            values.extend(changed)
            dues.update((prefixes[k] + cells.part, due) for k, due in cells.dues.items())
        if not keys and not self._rows:
            return None
        if not self._rows and not dues and len(self._cells) == 1 and self.table.sorted:
            return segment_table(keys, values)
        rows: dict[bytes, RowWrite] = {k: (v, dues.get(k), None) for k, v in zip(keys, values, strict=True)}
        rows.update(self._rows)
        ordered = sorted(rows)
        data_column, event_ms, clock_ms = zip(*(rows[key] for key in ordered), strict=True)
        return segment_table(ordered, data_column, event_ms, clock_ms)
