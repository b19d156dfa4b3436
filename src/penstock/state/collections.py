"""Collections under one key that may grow large: one row for each element, so that a change costs one element."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec

from penstock.state.keys import Key, decode_key, encode_key
from penstock.state.overlay import CEILING, KeyedState
from penstock.state.parts import LIST, MAP, name_part


class _Collection:
    """Rows of one key under one name, and one row that says how many there are."""

    __slots__ = ("_keyed", "_prefix")

    def __init__(self, keyed: KeyedState, k: int, kind: bytes, name: str) -> None:
        self._keyed = keyed
        self._prefix = keyed.table.prefixes[k] + name_part(kind, name)

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

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
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
