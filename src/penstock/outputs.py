"""Outputs of a task: what its sinks are given, collected and written to the outbox."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.batches import Batch, Ints
from penstock.errors import InvalidError
from penstock.events import Headers
from penstock.failures import Failures, Letter
from penstock.plan import Step, ToFunction, ToTopic
from penstock.sinks import FUNCTION_KEYS
from penstock.state.codec import Codec
from penstock.state.overlay import KeyTable
from penstock.topics import HEADERS_TYPE, SCHEMA, headers_column, raw_key_group


def encode_batch(step: Step, batch: Batch, codec: Codec, failures: Failures) -> tuple[Batch, list[bytes]]:
    """The values of a batch, encoded; events whose value cannot be go to the error policy and are left out."""
    try:
        encoded = list(map(codec.encode, batch.values))
        codec.check_many(batch.values, encoded)
        return batch, encoded
    except Exception:  # one of them: find out which
        encoded, places = [], []
        for place, value in enumerate(batch.values):
            try:
                encoded.append(codec.checked_encode(value))
                places.append(place)
            except Exception as error:
                failures.handle(step.name, f"encode as {codec.name}", error, None, batch, place)
        return batch.take([batch.values[i] for i in places], places), encoded


class SinkOutput:
    """Collects what one sink is given in a task."""

    def __init__(self, step: Step, table: KeyTable, failures: Failures) -> None:
        assert isinstance(step.work, ToTopic | ToFunction)
        self.step = step
        self._table = table
        self._failures = failures
        self._codec = step.work.topic.value if isinstance(step.work, ToTopic) else step.work.value
        self._keys = step.work.topic.key if isinstance(step.work, ToTopic) else FUNCTION_KEYS
        self._rekey = step.work.key if isinstance(step.work, ToTopic) else None
        self._values: list[bytes] = []
        self._numbers: list[Ints] = []
        self._times: list[Ints] = []
        self._headers: list[Headers] | None = None
        self._own_keys: list[bytes | None] = []

    def add(self, batch: Batch) -> None:
        """Take the events of a batch: encoded at once, so what happens to their values afterwards does not matter."""
        if self._rekey is not None:
            batch = self._rekeyed(batch, self._rekey)
        batch, encoded = encode_batch(self.step, batch, self._codec, self._failures)
        if batch.headers is not None and self._headers is None:
            self._headers = [()] * len(self._values)
        if self._headers is not None:
            self._headers.extend(batch.headers or [()] * len(batch))
        self._values.extend(encoded)
        self._numbers.append(batch.keys)
        self._times.append(batch.times)

    def _rekeyed(self, batch: Batch, fn: Callable[[Any], Any]) -> Batch:
        places = []
        for place, value in enumerate(batch.values):
            try:
                key = fn(value)
                self._own_keys.append(None if key is None else self._keys.encode(key))
                places.append(place)
            except Exception as error:
                self._failures.handle(self.step.name, fn, error, None, batch, place)
        return batch.take([batch.values[i] for i in places], places) if len(places) < len(batch) else batch

    def table(self) -> pa.Table | None:
        """Everything the sink was given, as a topic stores it; None if that is nothing."""
        count = len(self._values)
        if not count:
            return None
        keys, groups = self._key_columns()
        headers = pa.nulls(count, HEADERS_TYPE) if self._headers is None else headers_column(self._headers)
        values = pa.array(self._values, pa.binary())
        return pa.Table.from_arrays(
            [groups, keys, values, pa.array(np.concatenate(self._times)), headers], schema=SCHEMA
        )

    def _key_columns(self) -> tuple[pa.Array, pa.Array]:
        if self._rekey is not None:
            known = {raw: raw_key_group(self._keys, raw) for raw in set(self._own_keys)}
            return pa.array(self._own_keys, pa.binary()), pa.array([known[raw] for raw in self._own_keys], pa.uint16())
        numbers = np.concatenate(self._numbers)
        texts = self._table.texts
        if texts is not None and self._keys.name == "str":
            at = pa.array(numbers)
            return texts.take(at), pa.array(self._table.groups).take(at)
        seen = np.zeros(len(self._table), np.bool_)
        seen[numbers] = True
        used = np.flatnonzero(seen)
        places = (np.cumsum(seen) - 1)[numbers]
        keys = [self._table.keys[k] for k in used.tolist()]
        at = pa.array(places)
        forms = [self._raw(key) for key in keys]
        groups = [raw_key_group(self._keys, form) for form in forms]
        return pa.array(forms, pa.binary()).take(at), pa.array(groups, pa.uint16()).take(at)

    def _raw(self, key: Any) -> bytes | None:
        try:
            return None if key is None else self._keys.encode(key)
        except InvalidError as error:
            raise InvalidError(f"step {self.step.name!r}: {error}") from error


def letters_table(letters: Sequence[Letter]) -> pa.Table:
    """Dead letters as a topic stores them: the original bytes, with the error in the headers."""
    originals = [letter.original for letter in letters]
    columns = [
        pa.array([o.key_group for o in originals], pa.uint16()),
        pa.array([o.key for o in originals], pa.binary()),
        pa.array([o.value for o in originals], pa.binary()),
        pa.array([o.timestamp_ms for o in originals], pa.int64()),
        headers_column([letter.headers for letter in letters]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)
