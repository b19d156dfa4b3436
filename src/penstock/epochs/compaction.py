"""Compaction: which segments to merge, and merging them.

Invariants:
- A partition has at most MAX_SEGMENTS segments, however many epochs there were.
- A segment is rewritten only together with newer ones that weigh as much: each time a row is written again, it comes to
  stand in a segment of twice the size. So the work follows what is written, not what is there.
"""

from collections.abc import Sequence

from penstock.epochs.records import Compacted, View
from penstock.state.segments import SegmentRef, merge_rows, read_segment, write_segment
from penstock.storage import Storage

MAX_SEGMENTS = 64


def choose_run(sizes: Sequence[int]) -> int:
    """Where the run to merge begins: at the oldest segment that all newer ones together outweigh or equal.

    What stays before it is a row of segments of which each outweighs all behind it: there cannot be many. A run of one
    segment means that there is nothing to merge.

    >>> choose_run([1000, 10, 8, 2]), choose_run([100, 60, 50]), choose_run([1000, 10])
    (1, 0, 1)
    """
    weight, start = 0, len(sizes) - 1
    for index in range(len(sizes) - 1, -1, -1):
        if weight >= sizes[index]:
            start = index
        weight += sizes[index]
    return max(0, start)


def runs_to_compact(view: View, due: bool) -> dict[str, dict[int, tuple[SegmentRef, ...]]]:
    """The run to merge in each partition of each step: where there is one when it is time, else only where it must."""
    runs: dict[str, dict[int, tuple[SegmentRef, ...]]] = {}
    for step, parts in view.segments.items():
        for partition, refs in parts.items():
            if len(refs) >= MAX_SEGMENTS or (due and len(refs) > 1):
                run = refs[choose_run([ref.rows for ref in refs]) :]
                if len(run) > 1:
                    runs.setdefault(step, {})[partition] = run
    return runs


def compact(storage: Storage, name: str, run: Sequence[SegmentRef], snapshot: bool, oldest_epoch: int) -> Compacted:
    """Merge a run of segments into one. `snapshot`: nothing is older, so deleted rows can go."""
    rows = merge_rows([read_segment(storage, ref, oldest_epoch) for ref in run], snapshot)
    epochs = range(run[0].first_epoch, run[-1].last_epoch + 1)
    return Compacted(write_segment(storage, name, rows, epochs, snapshot), tuple(ref.name for ref in run))
