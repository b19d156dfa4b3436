"""Compaction: which segments to merge, and merging them.

Invariants:
- The number of segments of a partition stays below MAX_SEGMENTS, however many epochs there were.
- A row is rewritten about once each time the state doubles, not once per snapshot: the work follows what is written.
"""

from collections.abc import Sequence

from penstock.epochs.records import Compacted, View
from penstock.state.segments import SegmentRef, merge_rows, read_segment, write_segment
from penstock.storage import Storage

MAX_SEGMENTS = 64


def choose_run(sizes: Sequence[int]) -> int:
    """Where the run to merge begins: it reaches back as long as what is newer weighs as much as the next older one.

    So a large snapshot is merged only when the changes since have grown as large, and small ones are merged at once.

    >>> choose_run([1000, 10, 5]), choose_run([100, 60, 50]), choose_run([7, 7])
    (1, 0, 0)
    """
    start = len(sizes) - 1
    weight = sizes[start] if sizes else 0
    while start > 0 and (weight >= sizes[start - 1] or start == len(sizes) - 1):
        start -= 1
        weight += sizes[start]
    return max(0, start)


def runs_to_compact(view: View, due: bool) -> dict[str, dict[int, tuple[SegmentRef, ...]]]:
    """The run to merge in each partition of each step: all partitions when it is time, else those with too many."""
    runs: dict[str, dict[int, tuple[SegmentRef, ...]]] = {}
    for step, parts in view.segments.items():
        for partition, refs in parts.items():
            if len(refs) >= MAX_SEGMENTS or (due and len(refs) > 1):
                start = choose_run([ref.rows for ref in refs])
                runs.setdefault(step, {})[partition] = refs[start:]
    return runs


def compact(storage: Storage, name: str, run: Sequence[SegmentRef], snapshot: bool, oldest_epoch: int) -> Compacted:
    """Merge a run of segments into one. `snapshot`: nothing is older, so deleted rows can go."""
    rows = merge_rows([read_segment(storage, ref, oldest_epoch) for ref in run], snapshot)
    epochs = range(run[0].first_epoch, run[-1].last_epoch + 1)
    return Compacted(write_segment(storage, name, rows, epochs, snapshot), tuple(ref.name for ref in run))
