"""What two thousand small epochs cost on Spark: do time, files and memory of the last ones equal those of the first?

A few events per epoch, durable deltas and outbox on local disk, replicas in LMDB, one Spark session. Only the epoch
itself is timed, not sending the events. The first epochs are warm-up: Java compiles what it runs often.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from pyspark import SparkContext

from penstock import Application
from penstock.spark.session import close_session, open_session
from penstock.storage import open_storage
from penstock.testing import TestDriver

KEYS = 1_000
EVENTS_PER_EPOCH = 5
WARM_UP = 200
TENTHS = 10


class Sizes(NamedTuple):
    """What there is at a moment: files of the state and of replicas, and the memory of each kind of process in MB."""

    files: int
    local_files: int
    driver_mb: int
    java_mb: int
    workers: int
    workers_mb: int


def total(key: str, value: dict, state: int) -> tuple[dict, int]:
    """The running total of a customer, or of a shop."""
    state += value["amount"]
    return {**value, "total": state}, state


def pipeline(app: Application, rekeyed: bool) -> None:
    """Totals by customer; `rekeyed`: and then by shop, behind a shuffle."""
    stream = app.dataframe(app.topic("payments")).stateful_map("total", total, default=0)
    if rekeyed:
        stream = stream.key_by("shop", lambda value: value["shop"]).stateful_map("shop total", total, default=0)
    stream.to_topic(app.topic("totals"))


def files_in(folder: Path) -> int:
    """How many files a folder holds."""
    return sum(path.is_file() for path in folder.rglob("*"))


def status(pid: int) -> dict[str, str]:
    """What Linux says about a process; nothing, if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines)


def megabytes(pid: int) -> int:
    """The memory of a process, without what it has mapped of files."""
    return int(status(pid).get("RssAnon", "0 kB").split()[0]) // 1024


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    parents = {int(p.name): int(status(int(p.name)).get("PPid", 0)) for p in Path("/proc").glob("[0-9]*")}
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [one for child in found for one in below(child)]


def sizes(folder: Path) -> Sizes:
    """What there is now."""
    java: Any = SparkContext._gateway
    workers = below(java.proc.pid)
    return Sizes(
        files_in(folder / "state"),
        files_in(folder / "local"),
        megabytes(int(Path("/proc/self").resolve().name)),
        megabytes(java.proc.pid),
        len(workers),
        sum(map(megabytes, workers)),
    )


def measure(epochs: int, partitions: int, rekeyed: bool, folder: Path) -> tuple[list[float], list[Sizes]]:
    """The milliseconds of each epoch, and the sizes after each tenth."""
    app = Application("bench", partitions=partitions)
    pipeline(app, rekeyed)
    session = open_session("local[*]", "bench")
    driver = TestDriver(
        app,
        storage=open_storage(folder / "state"),
        topics=open_storage(folder / "topics"),
        local_dir=folder / "local",
        spark=session,
    )
    draw, times, found = random.Random(7), [], []
    for epoch in range(WARM_UP + epochs):
        with driver.producer("payments") as send:
            for _ in range(EVENTS_PER_EPOCH):
                value = {"amount": draw.randrange(100), "shop": f"shop-{draw.randrange(50)}"}
                send(value, key=f"customer-{draw.randrange(KEYS):04d}", timestamp_ms=epoch)
        began = time.perf_counter()
        driver.epoch()
        times.append(1000 * (time.perf_counter() - began))
        driver.advance_time(int(times[-1]))
        if epoch >= WARM_UP and (epoch - WARM_UP + 1) % (epochs // TENTHS) == 0:
            found.append(sizes(folder))
            print_tenth(len(found), times[-(epochs // TENTHS) :], found[-1])
    assert len(driver.received("totals")) == (WARM_UP + epochs) * EVENTS_PER_EPOCH, "an output is missing or doubled"
    driver.close()
    close_session(session)
    return times[WARM_UP:], found


def print_tenth(number: int, times: list[float], there: Sizes) -> None:
    """Print what a tenth of the epochs took, and left."""
    print(
        f"tenth {number:>2}: {statistics.mean(times):6.1f} ms (median {statistics.median(times):6.1f}) per epoch; "
        f"{there.files} files of state, {there.local_files} local; driver {there.driver_mb} MB, "
        f"Java {there.java_mb} MB, {there.workers} workers {there.workers_mb} MB",
        flush=True,
    )


def report(times: list[float], found: list[Sizes]) -> None:
    """Print the ratios of the last tenth to the first."""
    size = len(times) // TENTHS
    first, last = times[:size], times[-size:]
    mean, median = statistics.mean(last) / statistics.mean(first), statistics.median(last) / statistics.median(first)
    print(f"last tenth to first tenth: {mean:.2f} (aim: <= 1.3); of medians {median:.2f}")
    files = found[-1].files / found[0].files
    memory = [(one.driver_mb, one.java_mb, one.workers_mb) for one in (found[0], found[-1])]
    ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(*memory, strict=True))
    print(f"files {files:.2f}; memory of driver, Java, workers: {ratios}")


def main() -> None:
    """Print how time, files and memory grow with the number of epochs."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=2_000)
    arguments.add_argument("--partitions", type=int, default=4)
    arguments.add_argument("--rekeyed", action="store_true", help="with a second stage, behind a shuffle")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        report(*measure(given.epochs, given.partitions, given.rekeyed, folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
