"""The keys of a task, numbered: state is kept in lists that are indexed by the number of a key.

Invariants:
- Numbers follow the order of the rows in which the state of the keys is stored, as long as no key comes late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidError
from penstock.state.keys import Key, decode_key, encode_key, key_group

NO_KEY = b"\xff\xff"  # in place of the prefix of events without a key: no row begins so


class KeyTable:
    """The distinct keys of a task, numbered in the order of their rows, and possibly `None` as the first."""

    def __init__(
        self,
        prefixes: list[bytes],
        groups: npt.NDArray[np.uint16],
        partition: range,
        nulls: bool,
        texts: pa.Array | None,
    ) -> None:
        self.prefixes = prefixes
        self._groups = groups
        self._late_groups: list[int] = []
        self.partition = partition
        self.nulls = nulls
        self.texts = texts
        self._keys: list[Key | None] | None = None
        self._numbers: dict[bytes, int] | None = None
        self.sorted = True

    def __len__(self) -> int:
        return len(self.prefixes)

    @property
    def keys(self) -> list[Any]:
        """The keys themselves, by number."""
        if self._keys is None:
            if self.texts is not None:
                self._keys = self.texts.cast(pa.string()).to_numpy(zero_copy_only=False).tolist()
            else:
                self._keys = [None if prefix == NO_KEY else decode_key(prefix[2:]) for prefix in self.prefixes]
        return self._keys

    @property
    def groups(self) -> npt.NDArray[np.uint16]:
        """The groups of the keys, by number."""
        if self._late_groups:
            self._groups = np.append(self._groups, np.array(self._late_groups, np.uint16))
            self._late_groups = []
        return self._groups

    def find(self, prefix: bytes) -> int | None:
        """The number of the key with this row prefix, if it has one."""
        if self._numbers is None:
            self._numbers = {prefix: i for i, prefix in enumerate(self.prefixes)}
        return self._numbers.get(prefix)

    def place(self, key: Key) -> bytes:
        """The row prefix of a key, which must belong to the partition."""
        canonical = encode_key(key)
        group = key_group(canonical)
        if group not in self.partition:
            raise InvalidError(
                f"key {key!r} belongs to another partition, so its state is not here; "
                f"emit it under a key of this partition and give it its new key with key_by()"
            )
        return group.to_bytes(2, "big") + canonical

    def number(self, key: Key) -> int:
        """The number of a key, which gets one if it has none; the key must belong to the partition."""
        prefix = self.place(key)
        found = self.find(prefix)
        if found is not None:
            return found
        assert self._numbers is not None, "find() has made it"
        self.keys.append(key)
        self.prefixes.append(prefix)
        self._late_groups.append(int.from_bytes(prefix[:2], "big"))
        self.sorted, self.texts = False, None
        self._numbers[prefix] = len(self.prefixes) - 1
        return self._numbers[prefix]


class KeyColumn(NamedTuple):
    """The keys of some events: the distinct ones in canonical form with their groups, and which one each row has."""

    distinct: pa.Array
    groups: npt.NDArray[np.uint16]
    rows: npt.NDArray[np.int64]
    """Positions in `distinct`; its length stands for no key."""


def number_keys(columns: Sequence[KeyColumn], partition: range) -> tuple[KeyTable, list[npt.NDArray[np.int64]]]:
    """Number the distinct keys of several columns; gives the table and each row's number."""
    distinct, groups, positions = _unified(columns)
    nulls = any(bool((column.rows == len(column.distinct)).any()) for column in columns)
    prefixes = _prefixed(distinct, groups)
    order = pc.sort_indices(prefixes).to_numpy()
    rank = np.empty(len(distinct), np.int64)
    rank[order] = np.arange(len(distinct)) + nulls
    prefixes = prefixes.take(pa.array(order))
    listed = prefixes.to_numpy(zero_copy_only=False).tolist()
    table = KeyTable(
        [NO_KEY, *listed] if nulls else listed,
        np.concatenate([np.zeros(int(nulls), np.uint16), groups[order]]),
        partition,
        nulls,
        None if nulls else _texts(prefixes),
    )
    numbers = [np.append(rank[places], 0)[column.rows] for column, places in zip(columns, positions, strict=True)]
    return table, numbers


def _texts(prefixes: pa.Array) -> pa.Array | None:
    """The UTF-8 of keys that are all texts without escapes, cut out of their prefixes; None if one is not."""
    if len(prefixes) == 0:
        return None
    _, offsets, data = prefixes.buffers()
    starts = np.frombuffer(offsets, np.int32, len(prefixes), prefixes.offset * 4)
    tags = np.frombuffer(data, np.uint8)[starts + 2]
    texts = pc.binary_slice(prefixes, 3, -1)
    _, _, inner = texts.buffers()
    plain = inner is None or not bool((np.frombuffer(inner, np.uint8) == 1).any())
    return texts if plain and bool((tags == 2).all()) else None


def _unified(
    columns: Sequence[KeyColumn],
) -> tuple[pa.Array, npt.NDArray[np.uint16], list[npt.NDArray[np.int64]]]:
    """The distinct keys of all columns with their groups, and where those of each column are among them."""
    if len(columns) == 1:
        return columns[0].distinct, columns[0].groups, [np.arange(len(columns[0].distinct))]
    everything = pa.chunked_array([column.distinct for column in columns], pa.binary()).combine_chunks()
    encoded = everything.dictionary_encode()
    places = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    groups = np.zeros(len(encoded.dictionary), np.uint16)
    groups[places] = np.concatenate([column.groups for column in columns] or [np.empty(0, np.uint16)])
    bounds = np.cumsum([0, *(len(column.distinct) for column in columns)])
    return encoded.dictionary, groups, [places[bounds[i] : bounds[i + 1]] for i in range(len(columns))]


def _prefixed(canonical: pa.Array, groups: npt.NDArray[np.uint16]) -> pa.Array:
    """Each canonical key behind the two bytes of its group."""
    count = len(canonical)
    if count == 0:
        return pa.array([], pa.binary())
    offsets = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    two = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(groups.astype(">u2"))])
    return pc.binary_join_element_wise(two, canonical, pa.scalar(b"", pa.binary()))
