"""Outputs of a task: what its sinks are given, collected and written to the outbox."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.batches import Batch, Ints, Origin
from penstock.events import Headers
from penstock.failures import Failure, Failures, Letter
from penstock.plan import Step, ToFiles, ToFunction, ToTopic
from penstock.sinks import FUNCTION_KEYS
from penstock.state.codec import Codec
from penstock.state.key_codecs import key_codec
from penstock.state.key_table import KeyTable
from penstock.topics import HEADERS_TYPE, SCHEMA, headers_column, raw_key_group

RAW_KEYS = key_codec("bytes")


def encode_batch(
    step: str, batch: Batch, codec: Codec, failures: Failures, key_of: Callable[[int], Any]
) -> tuple[Batch, pa.ChunkedArray]:
    """The values of a batch, encoded; events whose value cannot be go to the error policy and are left out."""
    try:
        return batch, codec.encode_many(batch.values)
    except Exception:  # one of them: find out which
        encoded, places = [], []
        for place, value in enumerate(batch.values):
            try:
                encoded.append(codec.checked_encode(value))
                places.append(place)
            except Exception as error:
                failures.handle(step, f"encode as {codec.name}", error, key_of(place), batch, place)
        left = batch.take([batch.values[i] for i in places], places)
        return left, pa.chunked_array([pa.array(encoded, pa.binary())])


class SinkOutput:
    """Collects what one sink is given in a task."""

    def __init__(self, step: Step, table: KeyTable, failures: Failures) -> None:
        assert isinstance(step.work, ToTopic | ToFunction | ToFiles)
        self.step = step
        self._table = table
        self._failures = failures
        self._codec = step.work.topic.value if isinstance(step.work, ToTopic) else step.work.value
        self._keys = step.work.topic.key if isinstance(step.work, ToTopic) else FUNCTION_KEYS
        self._rekey = step.work.key if isinstance(step.work, ToTopic) else None
        self._values: list[pa.Array] = []
        self._count = 0
        self._numbers: list[Ints] = []
        self._times: list[Ints] = []
        self._headers: list[Headers] | None = None
        self._own_keys: list[bytes | None] = []
        self._own_groups: dict[bytes | None, int] = {}
        self._places: list[tuple[Origin, Ints]] = []

    def add(self, batch: Batch) -> None:
        """Take the events of a batch: encoded at once, so what happens to their values afterwards does not matter."""
        own = None
        if self._rekey is not None:
            batch, own = self._rekeyed(batch, self._rekey)
        key_of = partial(_key_of, self._table, batch.keys)
        if own is not None:
            batch = Batch(batch.values, np.arange(len(own)), batch.times, batch.rows, batch.headers, batch.origin)
        batch, encoded = encode_batch(self.step.name, batch, self._codec, self._failures, key_of)
        if own is not None:
            self._own_keys.extend([own[i] for i in batch.keys.tolist()])
        if batch.headers is not None and self._headers is None:
            self._headers = [()] * self._count
        if self._headers is not None:
            self._headers.extend(batch.headers or [()] * len(batch))
        self._values.extend(encoded.chunks)
        self._count += len(encoded)
        self._numbers.append(batch.keys)
        self._times.append(batch.times)
        self._places.append((batch.origin, batch.rows))

    def _rekeyed(self, batch: Batch, fn: Callable[[Any], Any]) -> tuple[Batch, list[bytes | None]]:
        """The events that have a key of their own, and those keys."""
        places: list[int] = []
        own: list[bytes | None] = []
        groups = self._own_groups
        for place, value in enumerate(batch.values):
            try:
                key = fn(value)
                raw = None if key is None else self._keys.encode(key)
                if raw not in groups:
                    groups[raw] = raw_key_group(self._keys, raw)
                own.append(raw)
                places.append(place)
            except Exception as error:
                key = _key_of(self._table, batch.keys, place)
                self._failures.handle(self.step.name, fn, error, key, batch, place)
        return batch.take([batch.values[i] for i in places], places) if len(places) < len(batch) else batch, own

    def table(self) -> pa.Table | None:
        """Everything the sink was given, as a topic stores it; None if that is nothing."""
        count = self._count
        if not count:
            return None
        keys, groups, refused = self._key_columns()
        headers = pa.nulls(count, HEADERS_TYPE) if self._headers is None else headers_column(self._headers)
        values = pa.chunked_array(self._values, pa.binary())
        self._values = []  # the table holds them
        columns = [groups, keys, values, pa.array(np.concatenate(self._times)), headers]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        return self._without(refused, table) if refused else table

    def _without(self, refused: dict[int, Exception], table: pa.Table) -> pa.Table | None:
        """The table without the events whose key the topic cannot hold; they go to the error policy."""
        numbers = np.concatenate(self._numbers)
        bad = np.isin(numbers, list(refused))
        places = [(origin, row) for origin, rows in self._places for row in rows.tolist()]
        for at in np.flatnonzero(bad).tolist():
            (origin, row), k = places[at], int(numbers[at])
            where = origin.place(row)
            key = self._table.keys[k]
            self._failures.decide(Failure(self.step.name, f"encode key as {self._keys.name}", key, *where, refused[k]))
        return None if bad.all() else table.filter(pa.array(~bad))

    def _key_columns(self) -> tuple[pa.Array, pa.Array, dict[int, Exception]]:
        """Keys and groups as the topic stores them, and which keys (by number) it cannot hold, and why."""
        if self._rekey is not None:
            groups = [self._own_groups[raw] for raw in self._own_keys]
            return pa.array(self._own_keys, pa.binary()), pa.array(groups, pa.uint16()), {}
        numbers = np.concatenate(self._numbers)
        texts = self._table.texts
        if texts is not None and self._keys.name == "str":
            at = pa.array(numbers)
            return texts.take(at), pa.array(self._table.groups).take(at), {}
        seen = np.zeros(len(self._table), np.bool_)
        seen[numbers] = True
        used = np.flatnonzero(seen)
        places = (np.cumsum(seen) - 1)[numbers]
        at = pa.array(places)
        forms: list[bytes | None] = []
        groups = []
        refused: dict[int, Exception] = {}
        for k in used.tolist():
            key = self._table.keys[k]
            raw, group = None, 0
            try:
                raw = None if key is None else self._keys.encode(key)
                group = raw_key_group(self._keys, raw)
            except Exception as error:
                refused[k] = error
            forms.append(raw)
            groups.append(group)
        return pa.array(forms, pa.binary()).take(at), pa.array(groups, pa.uint16()).take(at), refused


def _key_of(table: KeyTable, numbers: Ints, place: int) -> Any:
    return table.keys[numbers[place]]


def letters_table(letters: Sequence[Letter]) -> pa.Table:
    """Dead letters as a topic of bytes stores them: the original bytes, with the error in the headers."""
    originals = [letter.original for letter in letters]
    keys = pa.array([o.key for o in originals], pa.binary())
    columns = [
        pa.array([raw_key_group(RAW_KEYS, o.key) for o in originals], pa.uint16()),
        keys,
        pa.array([o.value for o in originals], pa.binary()),
        pa.array([o.timestamp_ms for o in originals], pa.int64()),
        headers_column([letter.headers for letter in letters]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)
