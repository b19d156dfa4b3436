"""The exchange: how events go from one stage to the next, and in which order they arrive.

Invariants:
- Events of one key arrive in the order of the source: by source, offset, and the order in which one input's outputs
  were made. What no input caused (timers, the end of an epoch) comes behind everything else.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batches import Batch, Ints
from penstock.state.keys import group_range
from penstock.topic_log import in_order
from penstock.topics import HEADERS_TYPE, headers_column

NO_SOURCE = (1 << 31) - 1
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("key_group", pa.uint16()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp_ms", pa.int64()),
        ("headers", HEADERS_TYPE),
        ("source", pa.int32()),
        ("offset", pa.int64()),
        ("sequence", pa.int64()),
    ]
)


class Outgoing:
    """Collects what a task sends on to later stages."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._tables: list[pa.Table] = []
        self._sent = 0

    def add(
        self,
        step: int,
        batch: Batch,
        keys: pa.Array,
        groups: npt.NDArray[np.uint16],
        values: pa.ChunkedArray,
    ) -> None:
        """Send events on as outputs of a step, under these canonical keys."""
        count = len(batch)
        sources, offsets = self._order(batch)
        headers = pa.nulls(count, HEADERS_TYPE) if batch.headers is None else headers_column(batch.headers)
        self._tables.append(
            pa.Table.from_arrays(
                [
                    pa.array(np.full(count, step, np.int32)),
                    pa.array(groups),
                    keys,
                    values,
                    pa.array(batch.times),
                    headers,
                    pa.array(sources.astype(np.int32)),
                    pa.array(offsets),
                    pa.array(np.arange(self._sent, self._sent + count)),
                ],
                schema=SCHEMA,
            )
        )
        self._sent += count

    def _order(self, batch: Batch) -> tuple[Ints, Ints]:
        known = batch.rows >= 0
        sources = np.full(len(batch), NO_SOURCE, np.int64)
        offsets = np.full(len(batch), self._partition, np.int64)
        sources[known] = batch.origin.sources[batch.rows[known]]
        offsets[known] = batch.origin.offsets[batch.rows[known]]
        return sources, offsets

    def table(self) -> pa.Table:
        """Everything that was sent."""
        return pa.concat_tables(self._tables) if self._tables else SCHEMA.empty_table()


def in_key_order(table: pa.Table) -> pa.Table:
    """Rows of an exchange by key group, those of a group in the order of the source.

    So what comes of them has the order in which topics are stored, and is not sorted once more.
    """
    columns = [table.column(name).to_numpy() for name in ("sequence", "offset", "source", "key_group")]
    order = np.lexsort(columns)
    return table if (order[1:] > order[:-1]).all() else in_order(table, order)


def rows_of_partition(table: pa.Table, partition: int, partitions: int) -> pa.Table:
    """The rows of an exchange that belong to a partition."""
    groups = table.column("key_group").to_numpy()
    wanted = group_range(partition, partitions)
    return table.filter(pa.array((groups >= wanted.start) & (groups < wanted.stop)))
