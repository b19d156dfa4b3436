"""What ten thousand small epochs cost: does the last one cost what the first did, and does storage stay bounded?

One process, a few events per epoch, durable deltas and outbox on local disk, replicas in LMDB. Only the epoch itself
is timed, not sending the events. The first epochs are warm-up. Beside the time on the clock, which holds waiting for
the disk and for whatever else the machine does, the time of the processor is shown: what Penstock itself does.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from penstock import Application, Event

KEYS = 1_000
EVENTS_PER_EPOCH = 5
WARM_UP = 100


class Cost(NamedTuple):
    """What one epoch took, on the clock and of the processor."""

    clock_ms: float
    processor_ms: float


def total(key: str, value: dict, state: int) -> tuple[dict, int]:
    """The running total of a customer."""
    state += value["amount"]
    return {**value, "total": state}, state


def stored_objects(state: Path) -> Counter[str]:
    """How many objects the application's state consists of, by kind."""
    return Counter(path.relative_to(state).parts[0] for path in state.rglob("*") if path.is_file())


def measure(epochs: int, partitions: int, folder: Path) -> tuple[list[Cost], list[tuple[int, Counter[str]]]]:
    """What each epoch cost, and the stored objects after each tenth."""
    app = Application("bench", folder / "topics", folder / "state", folder / "local", partitions=partitions)
    payments, totals = app.topic("payments"), app.topic("totals")
    app.dataframe(payments).stateful_map("total", total, default=0).to_topic(totals)
    draw, runner = random.Random(7), app.runner()
    costs, objects = [], []
    for epoch in range(WARM_UP + epochs):
        names = [f"customer-{draw.randrange(KEYS):04d}" for _ in range(EVENTS_PER_EPOCH)]
        payments.append(Event(name, {"amount": draw.randrange(100)}, epoch) for name in names)
        began, worked = time.perf_counter(), time.process_time()
        runner.epoch()
        costs.append(Cost(1000 * (time.perf_counter() - began), 1000 * (time.process_time() - worked)))
        if epoch >= WARM_UP and (epoch - WARM_UP + 1) % (epochs // 10) == 0:
            objects.append((epoch + 1, stored_objects(folder / "state" / "bench")))
    assert totals.end() == (WARM_UP + epochs) * EVENTS_PER_EPOCH, "an output is missing, or there twice"
    runner.close()
    return costs[WARM_UP:], objects


def report(costs: list[Cost], objects: list[tuple[int, Counter[str]]]) -> None:
    """Print the objects and the milliseconds of each tenth, and the ratio of the last to the first."""
    size = len(costs) // 10
    clock = [[cost.clock_ms for cost in costs[at : at + size]] for at in range(0, 10 * size, size)]
    processor = [
        statistics.mean(cost.processor_ms for cost in costs[at : at + size]) for at in range(0, 10 * size, size)
    ]
    for (epoch, found), tenth, own in zip(objects, clock, processor, strict=True):
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.items()))
        times = f"{statistics.mean(tenth):6.2f} ms (median {statistics.median(tenth):5.2f}, processor {own:5.2f})"
        print(f"after {epoch:>6,} epochs: {times} per epoch, {found.total():>4} objects: {kinds}")
    mean = statistics.mean(clock[-1]) / statistics.mean(clock[0])
    median = statistics.median(clock[-1]) / statistics.median(clock[0])
    print(f"stored objects: {objects[0][1].total()} after the first tenth, {objects[-1][1].total()} at the end")
    print(
        f"last tenth to first tenth: {mean:.2f} (aim: <= 1.3); of medians {median:.2f}, "
        f"of processor time {processor[-1] / processor[0]:.2f}"
    )


def main() -> None:
    """Print how time and storage grow with the number of epochs."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=10_000)
    arguments.add_argument("--partitions", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="where to work: a folder in memory leaves the disk out of it")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=given.folder))
    try:
        report(*measure(given.epochs, given.partitions, folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
