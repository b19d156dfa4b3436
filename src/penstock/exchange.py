"""The exchange: how events go from one stage to the next, and in which order they arrive.

Invariants:
- Events of one key arrive in the order of the source: by source, offset, and the order in which one input's outputs
  were made. What no input caused (timers, the end of an epoch) comes behind everything else.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batches import Batch, Ints
from penstock.state.keys import group_range
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
        keys: Sequence[bytes | None],
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
                    pa.array(keys, pa.binary()),
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


def in_source_order(table: pa.Table) -> pa.Table:
    """Rows of an exchange in the order of the source; as they are, if they have it already."""
    columns = [table.column(name).to_numpy() for name in ("sequence", "offset", "source")]
    if table.num_rows < 2 or _is_sorted(columns):
        return table
    return table.take(pa.array(np.lexsort(columns)))


def _is_sorted(columns: list[npt.NDArray[np.int64]]) -> bool:
    sequence, offset, source = columns
    same_source, same_offset = source[1:] == source[:-1], offset[1:] == offset[:-1]
    rising = (source[1:] > source[:-1]) | (same_source & (offset[1:] > offset[:-1]))
    return bool((rising | (same_source & same_offset & (sequence[1:] >= sequence[:-1]))).all())


def rows_of_partition(table: pa.Table, partition: int, partitions: int) -> pa.Table:
    """The rows of an exchange that belong to a partition."""
    groups = table.column("key_group").to_numpy()
    wanted = group_range(partition, partitions)
    return table.filter(pa.array((groups >= wanted.start) & (groups < wanted.stop)))
