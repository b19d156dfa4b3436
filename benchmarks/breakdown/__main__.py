"""Break an epoch on Spark down: on the driver, in Spark, and inside the tasks."""

import argparse
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.breakdown.clocks import DRIVER, TASK, Clocks
from benchmarks.breakdown.daemon import FOLDER
from benchmarks.peers.catalogue import WORKLOADS
from benchmarks.peers.job import Job
from benchmarks.peers.payments import write_lanes
from benchmarks.peers.programs.penstock_on_spark import INPUT, append, application, build, in_order
from rich.console import Console
from rich.table import Table

import penstock.spark.running as running

WARM_UP = 2
OTHER = "other"
JOB = "the job"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__)
    parser.add_argument("--workload", choices=["A", "B", "C"], default="A")
    parser.add_argument("--events", type=int, default=500_000, help="events of an epoch")
    parser.add_argument("--epochs", type=int, default=8, help=f"epochs in all, of which {WARM_UP} are warm-up")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    return parser.parse_args()


def watch_driver(clocks: Clocks, epochs: list[dict[str, Any]]) -> None:
    """Note the phases of each epoch on the driver, from the end of the last one to its own."""
    clocks.install(DRIVER)
    runner = running.SparkRunner
    epoch, execute = runner.epoch, runner._execute
    times = {"last": time.time()}

    @functools.wraps(execute)
    def executed(*given: Any) -> Any:
        times["job"] = time.time()
        answers = execute(*given)
        times["answered"] = time.time()
        return answers

    @functools.wraps(epoch)
    def noted(*given: Any) -> Any:
        record = epoch(*given)
        now = time.time()
        marks = {"epoch": record.epoch, "job": times["job"], "answered": times["answered"]}
        epochs.append({**marks, "seconds": now - times["last"], "phases": clocks.take()})
        times["last"] = now
        return record

    runner._execute = executed  # type: ignore[method-assign]
    runner.epoch = noted  # type: ignore[method-assign]


def read_tasks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the tasks wrote down, by epoch."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            task = json.loads(line)
            found.setdefault(task["epoch"], []).append(task)
    return found


def split_epoch(epoch: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, float]:
    """The phases of an epoch on the clock: the driver's, and the job cut at the first and the last moment of a task."""
    phases = {phase: epoch["phases"].get(phase, 0.0) for phase in DRIVER if phase != JOB}
    first, last = min(task["began"] for task in tasks), max(task["ended"] for task in tasks)
    phases["Spark: plan, schedule, start tasks"] = first - epoch["job"]
    phases["tasks, from the first to the last"] = last - first
    phases["Spark: finish tasks, collect"] = epoch["answered"] - last
    # New events are looked for inside of the job as well as before.
    phases[OTHER] = epoch["seconds"] - sum(phases.values())
    return phases


def split_task(task: dict[str, Any]) -> dict[str, float]:
    """The phases of a task, with Arrow's way in and out of the worker."""
    phases = {phase: task["phases"].get(phase, 0.0) for phase in TASK}
    phases[OTHER] = task["task"] - sum(phases.values())
    phases["rows in and out of the worker"] = task["ended"] - task["began"] - task["task"]
    return phases


def table(title: str, rows: list[dict[str, float]]) -> Table:
    """Medians of each phase, with their share of the sum; what nothing was spent on is left out."""
    found = Table(title=title, title_justify="left")
    found.add_column("phase")
    found.add_column("ms", justify="right")
    found.add_column("share", justify="right")
    medians = {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}
    total = sum(medians.values())
    for phase, seconds in medians.items():
        if seconds * 1_000 >= 0.05:
            found.add_row(phase, f"{seconds * 1_000:,.1f}", f"{seconds / total:.0%}")
    found.add_section()
    found.add_row("sum", f"{total * 1_000:,.1f}", "")
    return found


def profile(given: argparse.Namespace, folder: Path) -> list[Table]:
    """Run so many epochs with clocks everywhere."""
    notes = folder / "notes"
    notes.mkdir()
    os.environ[FOLDER] = str(notes)
    os.environ["PYSPARK_SUBMIT_ARGS"] = "--conf spark.python.daemon.module=benchmarks.breakdown.daemon pyspark-shell"
    events = given.events * given.epochs
    job = Job(given.workload, events, given.cores, folder / "input", folder / "work", {"epoch": given.events})
    write_lanes(WORKLOADS[given.workload].payments(events), job.input, given.cores)
    app = application(job, job.work)
    build(app, app.dataframe(app.topic(INPUT)), given.workload)
    append(app, in_order(job))
    epochs: list[dict[str, Any]] = []
    watch_driver(Clocks(), epochs)
    app.run(until="caught-up", master=f"local[{given.cores}]")
    tasks = read_tasks(notes)
    measured = [epoch for epoch in epochs if epoch["epoch"] >= WARM_UP]
    tables = [table("An epoch, on the clock", [split_epoch(epoch, tasks[epoch["epoch"]]) for epoch in measured])]
    mine = [task for epoch in measured for task in tasks[epoch["epoch"]]]
    for stage in sorted({task["stage"] for task in mine}):
        rows = [split_task(task) for task in mine if task["stage"] == stage]
        tables.append(table(f"A task of stage {stage}, of {given.cores} at a time", rows))
    return tables


def main() -> None:
    """Print where the time goes."""
    given, console = arguments(), Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="penstock-profile-"))
    try:
        tables = profile(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"workload {given.workload}, {given.events:,} events an epoch, medians of {given.epochs - WARM_UP}")
    for one in tables:
        console.print(one)


if __name__ == "__main__":
    main()
