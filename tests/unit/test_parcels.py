"""Parcels: how the events of an exchange travel through Spark."""

import numpy as np
import pyarrow as pa
import pytest

from penstock.exchange import SCHEMA, rows_of_partition
from penstock.spark import parcels as module
from penstock.spark.parcels import parcels
from penstock.spark.stage import StageTask
from penstock.spark.work import DESCRIPTORS, Slices, pack_slices
from penstock.state.keys import KEY_GROUPS
from penstock.topics import Slice


def rows(groups: list[int], value: bytes = b"1") -> pa.Table:
    count = len(groups)
    columns = {
        "step": [1] * count,
        "key_group": groups,
        "key": [b"k%d" % group for group in groups],
        "value": [value] * count,
        "timestamp_ms": list(range(count)),
        "headers": [[{"name": "n", "value": b"v"}]] * count,
        "source": [0] * count,
        "offset": list(range(count)),
        "sequence": list(range(count)),
    }
    return pa.table(columns, schema=SCHEMA)


def opened(sent: list[pa.RecordBatch]) -> list[tuple[int, pa.Table]]:
    return [
        (row["partition"], pa.ipc.open_stream(row["value"]).read_all()) for batch in sent for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_each_partition_gets_its_rows_in_their_order(partitions: int) -> None:
    table = rows(np.random.default_rng(3).integers(0, 4096, 500).tolist())
    sent = opened(list(parcels(table, partitions)))
    for partition in range(partitions):
        mine = pa.concat_tables([SCHEMA.empty_table(), *(part for to, part in sent if to == partition)])
        assert mine.equals(rows_of_partition(table, partition, partitions).combine_chunks())


def test_large_values_make_more_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 1000)
    sent = opened(list(parcels(rows([5] * 40, b"x" * 100), 2)))
    assert [part.num_rows for _, part in sent] == [9, 10, 10, 10, 1]


def test_many_events_make_more_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_EVENTS", 16)
    assert [part.num_rows for _, part in opened(list(parcels(rows([5] * 40), 2)))] == [16, 16, 8]


def test_nothing_makes_no_parcel_and_what_came_is_told_apart() -> None:
    assert list(parcels(SCHEMA.empty_table(), 2)) == []
    sent = list(parcels(rows([1, 2]), 1))
    note = module._note(module.CONTROL, b"{}")
    slices: Slices = {3: (Slice(0, 2, 5),)}
    descriptors = pa.record_batch([pa.array([pack_slices(slices)])], names=[DESCRIPTORS])
    received, described, notes = StageTask("run", None, 0)._received([*sent, note, descriptors], range(KEY_GROUPS))
    assert described == slices
    assert received.equals(rows([1, 2]))
    assert [row for batch in notes for row in batch.to_pylist()] == note.to_pylist()
