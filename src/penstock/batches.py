"""Batches: events as columns, on their way through the steps of a task."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.events import Headers

Ints = npt.NDArray[np.int64]
NO_ROW = -1
"""The row of an event that no input caused: one emitted by a timer or at the end of an epoch."""


class Origin:
    """Where the events of a batch were read: for each row, its source and its offset there."""

    __slots__ = ("names", "offsets", "sources")

    def __init__(self, names: Mapping[int, str], sources: Ints, offsets: Ints) -> None:
        self.names = names
        self.sources = sources
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def place(self, row: int) -> tuple[str, int]:
        """The topic and the offset of a row; of NO_ROW, none."""
        if row < 0:
            return "", NO_ROW
        source = int(self.sources[row])
        return self.names.get(source, ""), int(self.offsets[row]) if source in self.names else NO_ROW


NOWHERE = Origin({}, np.empty(0, np.int64), np.empty(0, np.int64))


class Batch:
    """Some events as columns: values, numbers of keys, times, rows of their origin, headers (None: nobody has any)."""

    __slots__ = ("headers", "keys", "origin", "rows", "times", "values")

    def __init__(
        self, values: list[Any], keys: Ints, times: Ints, rows: Ints, headers: list[Headers] | None, origin: Origin
    ) -> None:
        self.values = values
        self.keys = keys
        self.times = times
        self.rows = rows
        self.headers = headers
        self.origin = origin

    def __len__(self) -> int:
        return len(self.values)

    def with_values(self, values: list[Any]) -> "Batch":
        """The same events with other values."""
        return Batch(values, self.keys, self.times, self.rows, self.headers, self.origin)

    def take(self, values: list[Any], places: Sequence[int] | Ints) -> "Batch":
        """Other values for the events at these places; a place may come several times, or not at all."""
        at = np.asarray(places, np.int64)
        headers = None if self.headers is None else [self.headers[i] for i in at.tolist()]
        return Batch(values, self.keys[at], self.times[at], self.rows[at], headers, self.origin)

    def header(self, place: int) -> Headers:
        """The headers of one event."""
        return () if self.headers is None else self.headers[place]


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one origin as one, in the order of the source."""
    if len(batches) == 1:
        return batches[0]
    rows = np.concatenate([batch.rows for batch in batches])
    order = np.argsort(rows, kind="stable")
    values = [value for batch in batches for value in batch.values]
    headers: list[Headers] | None = None
    if any(batch.headers is not None for batch in batches):
        everyone = [batch.header(i) for batch in batches for i in range(len(batch))]
        headers = [everyone[i] for i in order.tolist()]
    return Batch(
        [values[i] for i in order.tolist()],
        np.concatenate([batch.keys for batch in batches])[order],
        np.concatenate([batch.times for batch in batches])[order],
        rows[order],
        headers,
        batches[0].origin,
    )


def copied(value: Any) -> Any:
    """A copy that shares nothing that can change; fast for what JSON is made of."""
    kind = value.__class__
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind in (int, str, float, bool, bytes, type(None)):
        return value
    return copy.deepcopy(value)
