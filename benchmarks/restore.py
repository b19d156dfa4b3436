"""How fast a lost replica comes back: five million keys, from segments on local disk into LMDB, in one process.

The state is one snapshot and a few deltas behind it, as a run leaves it. Restoring verifies every byte that it reads.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock import names
from penstock.state.key_table import KeyColumn, number_keys
from penstock.state.keys import KEY_GROUPS, encode_text_keys, key_groups
from penstock.state.replica import DiskShelf, Replicas
from penstock.state.segments import SegmentRef, segment_table, write_segment
from penstock.storage import Storage, open_storage

DELTAS = 5
KEYS_PER_DELTA = 20_000
ROWS_PER_TABLE = 128 * 1024
STEP, PARTITION = "total", 0


def row_keys(count: int) -> list[bytes]:
    """The row keys of so many customers, sorted as segments have them."""
    forms = encode_text_keys(pa.array([f"customer-{i:07d}" for i in range(count)]))
    groups = key_groups(forms.to_pylist())
    table, _ = number_keys([KeyColumn(forms, groups, np.arange(count))], range(KEY_GROUPS))
    return table.prefixes


def tables(keys: list[bytes], epoch: int) -> Iterator[pa.Table]:
    """Rows whose values tell which epoch wrote them."""
    for at in range(0, len(keys), ROWS_PER_TABLE):
        part = keys[at : at + ROWS_PER_TABLE]
        values = [b'{"total":%d,"epoch":%d}' % (1000 * number, epoch) for number in range(at, at + len(part))]
        yield segment_table(part, values)


def write_state(storage: Storage, keys: list[bytes]) -> list[SegmentRef]:
    """A snapshot of all keys, and deltas that change some of them."""
    written = []
    for epoch in range(DELTAS + 1):
        chosen = keys if epoch == 0 else keys[epoch :: max(1, len(keys) // KEYS_PER_DELTA)]
        name = names.segment(STEP, PARTITION, epoch, "bench")
        written.append(write_segment(storage, name, tables(chosen, epoch), range(epoch, epoch + 1), epoch == 0))
    return written


def measure(count: int, folder: Path) -> None:
    """Write the state, restore it, look whether it is right, and print how long it took."""
    storage, keys = open_storage(folder / "state"), row_keys(count)
    segments = write_state(storage, keys)
    size_mb, rows = sum(ref.size_bytes for ref in segments) / 1e6, sum(ref.rows for ref in segments)
    print(f"{rows:,} rows of {count:,} keys in {len(segments)} segments, {size_mb:.0f} MB")
    shelf = DiskShelf(folder / "local", "run")
    began = time.perf_counter()
    store = Replicas(storage, shelf).at(STEP, PARTITION, DELTAS, segments)
    seconds = time.perf_counter() - began
    sample = range(0, count, max(1, count // 10_000))
    assert store.epoch == DELTAS
    assert None not in store.get_many([keys[i] for i in sample]), "a key is missing"
    assert sum(1 for _ in store.scan(b"\x00\x00", b"\xfd")) == count, "there are other keys than were written"
    print(f"restored in {seconds:.2f} s: {count / seconds:,.0f} keys/s (aim: >= 1,000,000)")
    began = time.perf_counter()
    shelf.close()
    print(f"sealed in {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    Replicas(storage, DiskShelf(folder / "local", "next run")).at(STEP, PARTITION, DELTAS, segments)
    print(f"adopted by the next run, after verifying the seal, in {time.perf_counter() - began:.2f} s")


def main() -> None:
    """Print keys per second."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=5_000_000)
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        measure(arguments.parse_args().keys, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
