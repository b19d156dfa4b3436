"""Inputs of a task: slices of topics, or rows of an exchange, with their keys in canonical form.

Invariants:
- Events come by key group, those of a group in order of offset, or of their sources in an exchange: what comes of them
  has the order in which topics are stored, and need not be sorted once more.
- A key that cannot be read goes to the error policy; its event goes no further.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batches import Batch, Ints, Origin
from penstock.errors import InvalidError
from penstock.events import Headers
from penstock.failures import Failure, Failures, Original
from penstock.plan import Step
from penstock.state.codec import Codec
from penstock.state.key_codecs import KeyCodec
from penstock.state.key_table import KeyColumn
from penstock.state.keys import decode_key, encode_key, encode_text_keys, key_groups
from penstock.topic_log import group_order, in_order
from penstock.topics import SCHEMA as TOPIC_SCHEMA
from penstock.topics import Slice, Topic, TopicLog, read_headers

EVENTS_PER_BATCH = 2 * 1024  # few enough to stay in the cache of the processor from decoding to encoding


@dataclass(frozen=True, slots=True)
class Input:
    """What enters a task at one step: columns, and where they were read."""

    step: Step
    keys: KeyColumn
    values: pa.Array | pa.ChunkedArray
    times: Ints
    headers: list[Headers] | None
    origin: Origin
    codec: Codec
    refused: int = 0
    """How many more were read, and had a key that cannot be."""
    rows: Ints | None = None
    """Which rows of the origin these are, in order; None: all of them."""
    order: Ints | None = None
    """Where the values of the rows are among `values`; None: in their order. The other columns are in order."""

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, low: int, high: int, numbers: Ints, failures: Failures) -> Batch:
        """The events from row `low` of the origin to before `high`, decoded; `numbers` are those of their keys."""
        start, end = (low, high) if self.rows is None else np.searchsorted(self.rows, (low, high)).tolist()
        if self.order is None:
            found = self.values.slice(start, end - start)
        else:  # brought into order batch by batch, not all of them at once: that would copy them
            found = self.values.take(pa.array(self.order[start:end]))
        raw = found.to_numpy(zero_copy_only=False).tolist()
        headers = None if self.headers is None else self.headers[start:end]
        rows = np.arange(start, end) if self.rows is None else self.rows[start:end]
        batch = Batch(raw, numbers[start:end], self.times[start:end], rows, headers, self.origin)
        return _decoded(batch, self.codec, self.step.name, failures, lambda place: self.key(start + place))

    def key(self, index: int) -> Any:
        """The key of one event."""
        at = int(self.keys.rows[index])
        return decode_key(self.keys.distinct[at].as_py()) if at < len(self.keys.distinct) else None


def together(inputs: Sequence[Input], numbers: Sequence[Ints], failures: Failures) -> Iterator[dict[int, Batch]]:
    """The events of all inputs in batches, by entry step; inputs of one origin come together, in its order."""
    origins = {id(one.origin): one.origin for one in inputs}
    for origin in origins.values():
        mine = [(one, own) for one, own in zip(inputs, numbers, strict=True) if one.origin is origin]
        for low in range(0, len(origin), EVENTS_PER_BATCH):
            high = min(len(origin), low + EVENTS_PER_BATCH)
            yield {one.step.id: one.batch(low, high, own, failures) for one, own in mine}


def _decoded(batch: Batch, codec: Codec, step: str, failures: Failures, key_of: Callable[[int], Any]) -> Batch:
    try:
        return batch.with_values(list(map(codec.decode, batch.values)))
    except Exception:  # one of them: find out which, and let the policy decide
        values, places = [], []
        for place, raw in enumerate(batch.values):
            try:
                values.append(codec.decode(raw))
            except Exception as error:
                found = InvalidError(f"the value {raw[:80]!r} cannot be read as {codec.name}: {error}")
                where = batch.origin.place(int(batch.rows[place]))
                failures.decide(Failure(step, "decode", key_of(place), *where, found))
            else:
                places.append(place)
        return batch.take(values, places)


def read_topic(step: Step, topic: Topic, slices: Sequence[Slice], groups: range, failures: Failures) -> Input:
    """The events of some slices that belong to these key groups."""
    parts = [topic.log.read(part, groups) for part in slices]
    table = pa.concat_tables([rows for rows, _ in parts]) if parts else TOPIC_SCHEMA.empty_table()
    offsets = np.concatenate([offsets for _, offsets in parts]) if parts else np.empty(0, np.int64)
    raw = table.column("key").combine_chunks()
    stored_groups = table.column("key_group").to_numpy()
    keys, errors = _topic_keys(topic, raw, stored_groups)
    if errors:
        bad = np.isin(keys.rows, list(errors))
        for row in np.flatnonzero(bad).tolist():
            where = (topic.name, int(offsets[row]))
            failures.decide(Failure(step.name, "decode", None, *where, errors[keys.rows[row]]))
        table = table.filter(pa.array(~bad))
        offsets = offsets[~bad]
        keys = _only_used(keys._replace(rows=keys.rows[~bad]))
    order = group_order(table)
    values = table.column("value")
    if order is not None:  # of several slices
        values = values.cast(pa.large_binary()).combine_chunks()  # together they may be more than 2 GiB
        table, offsets = in_order(table.select(["timestamp_ms", "headers"]), order), offsets[order]
        keys = keys._replace(rows=keys.rows[order])
    return Input(
        step,
        keys,
        values,
        table.column("timestamp_ms").to_numpy(),
        read_headers(table.column("headers")),
        Origin({step.id: topic.name}, np.full(len(offsets), step.id, np.int64), offsets),
        topic.value,
        refused=len(raw) - len(offsets),
        order=order,
    )


def _topic_keys(
    topic: Topic, raw: pa.Array, stored_groups: npt.NDArray[np.uint16]
) -> tuple[KeyColumn, dict[int, Exception]]:
    """The keys of a topic's rows, and for those of the distinct ones that cannot be read, why."""
    encoded = raw.dictionary_encode()
    distinct, count = encoded.dictionary, len(encoded.dictionary)
    rows = encoded.indices.fill_null(count).to_numpy(zero_copy_only=False).astype(np.int64)
    canonical, errors = _canonical(topic.key, distinct)
    groups = key_groups(canonical.to_numpy(zero_copy_only=False).tolist())
    stored = np.zeros(count + 1, np.uint16)
    stored[rows] = stored_groups
    foreign = [i for i in np.flatnonzero(stored[:count] != groups).tolist() if i not in errors]
    if foreign:
        raise InvalidError(
            f"topic {topic.name!r}: the key {distinct[foreign[0]].as_py()!r} was not written with "
            f"key={topic.key.name!r}; open the topic with the key codec that it was written with"
        )
    return KeyColumn(canonical, groups, rows), errors


def _only_used(keys: KeyColumn) -> KeyColumn:
    """The same column without distinct keys that no row has."""
    used, rows = np.unique(keys.rows, return_inverse=True)  # "no key" is the largest number, and so it stays
    kept = used[used < len(keys.distinct)]
    return KeyColumn(keys.distinct.take(pa.array(kept)), keys.groups[kept], rows)


def _canonical(codec: KeyCodec, distinct: pa.Array) -> tuple[pa.Array, dict[int, Exception]]:
    try:
        if codec.name == "str":
            return encode_text_keys(distinct), {}
        return pa.array([encode_key(codec.decode(raw)) for raw in distinct.to_pylist()], pa.binary()), {}
    except Exception:  # one of them: find out which
        forms: list[bytes] = []
        errors: dict[int, Exception] = {}
        for i, raw in enumerate(distinct.to_pylist()):
            try:
                forms.append(encode_key(codec.decode(raw)))
            except Exception as error:
                errors[i] = InvalidError(f"the key {raw[:80]!r} cannot be read as {codec.name}: {error}")
                forms.append(b"\xff" + i.to_bytes(4, "big"))  # a place holder, as no key begins so
        return pa.array(forms, pa.binary()), errors


def exchange_origin(table: pa.Table, names: Mapping[int, str]) -> Origin:
    """Where the rows of an exchange came from; `names` are those of the sources."""
    return Origin(names, table.column("source").to_numpy().astype(np.int64), table.column("offset").to_numpy())


def read_exchange(step: Step, table: pa.Table, codec: Codec, origin: Origin) -> Input:
    """The events that an earlier stage's step sent here, out of all that were sent, which are in order."""
    mine = table.column("step").to_numpy() == step.id
    if not mine.all():
        table = table.filter(pa.array(mine))
    encoded = table.column("key").combine_chunks().dictionary_encode()
    rows = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
    groups = np.zeros(len(encoded.dictionary) + 1, np.uint16)
    groups[rows] = table.column("key_group").to_numpy()
    return Input(
        step,
        KeyColumn(encoded.dictionary, groups[:-1], rows),
        table.column("value").combine_chunks(),
        table.column("timestamp_ms").to_numpy(),
        read_headers(table.column("headers")),
        origin,
        codec,
        rows=np.flatnonzero(mine),
    )


def find_original(log: TopicLog, offset: int) -> Original:
    """An event as its topic holds it."""
    segment = next(log.segments_from(offset))
    table, _ = log.read(Slice(segment.first, offset, offset + 1))
    key, value, timestamp_ms = (table.column(name)[0].as_py() for name in ("key", "value", "timestamp_ms"))
    headers = read_headers(table.column("headers"))
    return Original(key, value, timestamp_ms, headers[0] if headers else ())


def original_row(rows: pa.Table, source: int, offset: int) -> Original:
    """An event of no topic as it came to a task: its value as it was encoded for the way."""
    places = (rows.column("source").to_numpy() == source) & (rows.column("offset").to_numpy() == offset)
    row = rows.slice(int(np.flatnonzero(places)[0]), 1)
    headers = read_headers(row.column("headers"))
    key, value, timestamp_ms = (row.column(name)[0].as_py() for name in ("key", "value", "timestamp_ms"))
    return Original(key, value, timestamp_ms, headers[0] if headers else ())
