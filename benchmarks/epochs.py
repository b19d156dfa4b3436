"""What ten thousand small epochs cost: does the last one cost what the first did, and does storage stay bounded?

One process, a few events per epoch, durable deltas and outbox on local disk, replicas in LMDB. Only the epoch itself
is timed, not sending the events. A machine is not as fast in one minute as in the next; so when the epochs are run, a
new application is started beside the old one, and the two take turns: what counts is the ratio of their epochs. Beside
the time on the clock, which holds waiting for the disk and for whatever else the machine does, the processor's time is
shown: what Penstock itself does.
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


class Life:
    """One application and its epochs."""

    def __init__(self, partitions: int, folder: Path) -> None:
        self._state = folder / "state" / "bench"
        app = Application("bench", folder / "topics", folder / "state", folder / "local", partitions=partitions)
        self._payments, self._totals = app.topic("payments"), app.topic("totals")
        app.dataframe(self._payments).stateful_map("total", total, default=0).to_topic(self._totals)
        self._draw, self._runner = random.Random(7), app.runner()
        self._epochs = 0
        for _ in range(WARM_UP):
            self.epoch()

    def epoch(self) -> Cost:
        """Send a few events, and run an epoch with them."""
        names = [f"customer-{self._draw.randrange(KEYS):04d}" for _ in range(EVENTS_PER_EPOCH)]
        self._payments.append(Event(name, {"amount": self._draw.randrange(100)}, self._epochs) for name in names)
        self._epochs += 1
        began, worked = time.perf_counter(), time.process_time()
        self._runner.epoch()
        return Cost(1000 * (time.perf_counter() - began), 1000 * (time.process_time() - worked))

    def objects(self) -> Counter[str]:
        """How many objects the state consists of, by kind."""
        return stored_objects(self._state)

    def end(self) -> None:
        """Check that every event was counted once, and stop."""
        assert self._totals.end() == self._epochs * EVENTS_PER_EPOCH, "an output is missing, or there twice"
        self._runner.close()


def measure(epochs: int, partitions: int, folder: Path) -> None:
    """Print what the epochs of each tenth cost and store, and what one costs at the end, beside one at the start."""
    old, tenths, objects = Life(partitions, folder / "old"), 10, []
    for _ in range(tenths):
        costs = [old.epoch() for _ in range(epochs // tenths)]
        objects.append(old.objects())
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(objects[-1].items()))
        print(f"{shown(costs)}, {objects[-1].total():>4} objects: {kinds}")
    new = Life(partitions, folder / "new")
    turns = [(old.epoch(), new.epoch()) for _ in range(epochs // tenths)]
    at_end, at_start = [turn[0] for turn in turns], [turn[1] for turn in turns]
    old.end()
    new.end()
    print(f"stored objects: {objects[0].total()} after the first tenth, {objects[-1].total()} at the end")
    print(f"in turns, after {epochs:,} epochs: {shown(at_end)}; of a new application: {shown(at_start)}")
    clock = statistics.mean(c.clock_ms for c in at_end) / statistics.mean(c.clock_ms for c in at_start)
    own = statistics.mean(c.processor_ms for c in at_end) / statistics.mean(c.processor_ms for c in at_start)
    print(f"an epoch at the end to one at the start: {clock:.2f} (aim: <= 1.3); of processor time {own:.2f}")


def shown(costs: list[Cost]) -> str:
    """The cost of some epochs, in words."""
    clock = [cost.clock_ms for cost in costs]
    own = statistics.mean(cost.processor_ms for cost in costs)
    return f"{statistics.mean(clock):6.2f} ms (median {statistics.median(clock):5.2f}, processor {own:5.2f}) per epoch"


def main() -> None:
    """Print how time and storage grow with the number of epochs."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=10_000)
    arguments.add_argument("--partitions", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="where to work: a folder in memory leaves the disk out of it")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=given.folder))
    try:
        measure(given.epochs, given.partitions, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
