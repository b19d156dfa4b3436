"""Rows of a streaming DataFrame become events: in the first stage, if Spark can bring them there, or before it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import PenstockError
from penstock.exchange import SCHEMA as EXCHANGE
from penstock.spark.parcels import PARCEL_BYTES, PARCEL_EVENTS, failed_note, parcels
from penstock.spark.work import told
from penstock.state.codec import value_codec
from penstock.state.keys import encode_key, encode_text_keys, key_groups
from penstock.topics import HEADERS_TYPE

ROWS_PER_TASK_BITS = 33
_VALUES = value_codec("msgpack")


@dataclass(frozen=True, slots=True)
class Ingest:
    """Turns rows of a DataFrame (key, value, perhaps time and order) into rows of an exchange, in a Python worker.

    Rows without a time get that of their epoch. As a column it would be a constant in the code that Spark generates, so
    that Java would compile it anew for each batch. Rows without an order keep their own.
    """

    step: int
    encoded: bool

    def events(self, batches: Iterable[pa.RecordBatch], groups: range) -> pa.Table:
        """All rows of a partition, which Spark has brought there."""
        found = list(batches)
        rows = self.rows(pa.Table.from_batches(found), 0) if found else EXCHANGE.empty_table()
        there = rows.column("key_group").to_numpy()
        assert ((there >= groups.start) & (there < groups.stop)).all(), "Spark hashes a key otherwise than keys.py"
        return rows

    def rows(self, table: pa.Table, sent: int) -> pa.Table:
        """Rows of an exchange; `sent` came before them."""
        count, given = table.num_rows, table.column_names
        sequence = np.arange(sent, sent + count)
        keys, groups = _canonical(table.column("key").combine_chunks())
        values = table.column("value").combine_chunks()
        if not self.encoded:
            values = pa.array([_VALUES.checked_encode(value) for value in values.to_pylist()], pa.binary())
        return pa.Table.from_arrays(
            [
                pa.array(np.full(count, self.step, np.int32)),
                pa.array(groups),
                keys,
                values.cast(pa.binary()),
                table.column("timestamp_ms") if "timestamp_ms" in given else _time_of_epoch(count),
                pa.nulls(count, HEADERS_TYPE),
                pa.array(np.full(count, self.step, np.int32)),
                table.column("order").fill_null(-1) if "order" in given else pa.array(sequence + _first_order()),
                pa.array(sequence),
            ],
            schema=EXCHANGE,
        )


@dataclass(frozen=True, slots=True)
class Parcelling:
    """Turns rows of a DataFrame into parcels for the partitions of their keys, before Spark shuffles them."""

    ingest: Ingest
    partitions: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Parcels with all rows; if one cannot be an event, a note that says so."""
        sent = 0
        for table in _gathered(batches):
            try:
                rows = self.ingest.rows(table, sent)
            except PenstockError as error:
                yield failed_note(error)
                return
            sent += rows.num_rows
            yield from parcels(rows, self.partitions)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same rows in fewer tables: Spark's batches are short, and each table costs something whatever its length."""
    found: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        found.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= PARCEL_EVENTS or size_bytes >= PARCEL_BYTES:
            yield pa.Table.from_batches(found)
            found, rows, size_bytes = [], 0, 0
    if found:
        yield pa.Table.from_batches(found)


def _first_order() -> int:
    """Where the numbers of this task's rows begin."""
    return told()[1] << ROWS_PER_TASK_BITS


def _time_of_epoch(count: int) -> pa.Array:
    return pa.array(np.full(count, told()[0].assignment.clock_ms))


def _canonical(keys: pa.Array) -> tuple[pa.Array, Any]:
    """The canonical forms of a column of keys, and their groups; no key stays none, in the first group."""
    encoded = keys.dictionary_encode()
    distinct = encoded.dictionary
    if pa.types.is_null(keys.type):
        return pa.nulls(len(keys), pa.binary()), np.zeros(len(keys), np.uint16)
    if pa.types.is_string(distinct.type):
        forms = encode_text_keys(distinct)
    else:
        forms = pa.array([encode_key(key) for key in distinct.to_pylist()], pa.binary())
    groups = np.append(key_groups(forms.to_pylist()), np.uint16(0))
    places = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return forms.take(encoded.indices), groups[places]
