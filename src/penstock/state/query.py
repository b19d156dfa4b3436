"""Reading the state of a step: a mapping from key to state, over stores that hold its partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.state.codec import Codec
from penstock.state.keys import Key, decode_key, encode_key, row_prefix, split_key
from penstock.state.parts import LIST, MAP, NAME, name_of
from penstock.state.store import DUES, Store

_CEILING = b"\xff"


class StepState(Mapping[Any, Any]):
    """The state of every key of a step: the value of a `stateful_map` or `stateful_op`, or the names of a `State`.

    Keys are told apart by type, as everywhere in Penstock: 1, 1.0 and True are three keys, although a dict would take
    them for one.
    """

    def __init__(self, stores: Sequence[Store], codec: Codec, named: bool) -> None:
        self._stores = stores
        self._codec = codec
        self._named = named

    def __getitem__(self, key: Key) -> Any:
        prefix = row_prefix(encode_key(key))
        rows = [row for store in self._stores for row in store.scan(prefix, prefix + _CEILING)]
        found = self._assembled(len(prefix), rows)
        if found is _NOTHING:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[Key]:
        for store in self._stores:
            last = b""
            for row, _ in store.scan(b"\x00\x00", DUES):
                end = split_key(row, 2)[1]
                counts = row[end : end + 1] in (NAME, LIST, MAP) if self._named else end == len(row)
                if counts and row[:end] != last:
                    last = row[:end]
                    yield decode_key(last[2:])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(key in self and self[key] == other[key] for key in other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {state!r}" for key, state in self.items()) + "}"

    def _assembled(self, start: int, rows: list[tuple[bytes, bytes]]) -> Any:
        if not self._named:
            return next((self._codec.decode(data) for row, data in rows if len(row) == start), _NOTHING)
        names: dict[str, Any] = {}
        for row, data in rows:
            part = row[start:]
            if part[:1] in (NAME, LIST, MAP):
                self._add(names, part, data)
        return names or _NOTHING

    def _add(self, names: dict[str, Any], part: bytes, data: bytes) -> None:
        name = name_of(part)
        rest = part[part.index(b"\x00") + 1 :]
        if part[:1] == NAME:
            names[name] = self._codec.decode(data)
        elif not rest:  # how many there are
            names[name] = [] if part[:1] == LIST else {}
        elif part[:1] == LIST:
            names[name].append(self._codec.decode(data))
        else:
            names[name][decode_key(rest)] = self._codec.decode(data)


_NOTHING = msgspec.UNSET
