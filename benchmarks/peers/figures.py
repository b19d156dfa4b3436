"""From what programs noted to figures: pure functions, the same for every peer."""

import math
from collections.abc import Sequence

from benchmarks.peers.job import Mark

WARM_UP = 0.25


def merged(marks: Sequence[Sequence[Mark]]) -> list[Mark]:
    """The marks of all processes as those of one: at each time, what all of them had done by then.

    >>> merged([[(1.0, 0), (3.0, 5)], [(1.0, 0), (2.0, 4)]])
    [(1.0, 0), (1.0, 0), (2.0, 4), (3.0, 9)]
    """
    done = [0] * len(marks)
    found = []
    for at, process, count in sorted((at, process, count) for process, own in enumerate(marks) for at, count in own):
        done[process] = count
        found.append((at, sum(done)))
    return found


def sustained(marks: Sequence[Sequence[Mark]], warm_up: float = WARM_UP) -> float:
    """Events per second from the first mark behind the warm-up to the last mark of all.

    >>> sustained([[(0.0, 0), (9.0, 100), (10.0, 200), (11.0, 300), (12.0, 400)]])
    100.0
    """
    together = merged(marks)
    end, total = together[-1]
    start, before = next((at, count) for at, count in together if count >= warm_up * total and count)
    if end <= start:
        raise ValueError(f"{len(together)} marks are too few to tell a warm-up from the rest")
    return (total - before) / (end - start)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
