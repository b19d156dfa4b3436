"""Penstock with many keys of older state: speed of A beside them, memory of a worker, restart without replicas.

In one folder 10 M customers have paid once before workload A begins; in the other A is all there is.
"""

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.figures import sustained
from benchmarks.peers.job import Job, Report, number_of, read_job, serve
from benchmarks.peers.programs.memory import Watch
from benchmarks.peers.programs.penstock_on_spark import (
    INPUT,
    OUTPUT,
    VERSIONS,
    append,
    application,
    build,
    in_order,
    marks,
    published,
    records,
    settings,
    write_state,
)

WARM_UP = 0.25


def old(job: Job) -> list[bytes]:
    """The payments of long ago."""
    return in_order(replace(job, input=job.work / "old", events=job.options["old"]))


def later(job: Job, first: int) -> list[bytes]:
    """The payments of A, numbered from `first` on."""
    return [b'{"payment":%d%s' % (first + number_of(one), one[one.index(b",") :]) for one in in_order(job)]


def run_all(job: Job, folder: Path) -> None:
    """Run until the topic is done."""
    app = application(job, folder)
    build(app, app.dataframe(app.topic(INPUT)))
    app.run(until="caught-up", master=f"local[{job.cores}]")


def rate(folder: Path, behind: int) -> float:
    """Events per second of A: of the epochs behind the old payments, and behind a warm-up."""
    ours = [(at, count - behind) for at, count in marks(folder) if count > behind]
    return sustained([ours], WARM_UP)


def restart(job: Job, folder: Path) -> float:
    """Seconds from starting a process, with the replicas gone, until one new event is processed and published."""
    shutil.rmtree(folder / "local")
    append(application(job, folder), [b'{"payment":-1,"customer":"customer-00000001","shop":"shop-0001","amount":0}'])
    before = max(record.epoch for record in records(folder))
    began = time.time()
    subprocess.run([sys.executable, "-m", __spec__.name, sys.argv[1], str(folder)], check=True)
    return published(folder, before + 1) - began


def run(job: Job) -> Report:
    """A without old keys; the old keys; A behind them; and then a restart."""
    without, beside = job.work / "without", job.work / "beside"
    append(application(job, without), later(job, 0))
    run_all(job, without)
    fast = rate(without, 0)
    shutil.rmtree(without)
    append(application(job, beside), old(job))
    run_all(job, beside)
    append(application(job, beside), later(job, job.options["old"]))
    with Watch() as watch:
        run_all(job, beside)
    slow = rate(beside, job.options["old"])
    shutil.copytree(beside / "topics" / OUTPUT, job.outputs)
    app = application(job, beside)
    build(app, app.dataframe(app.topic(INPUT)))
    write_state(app, beside, job.work / "state-0.jsonl")
    figures = {
        "events/s without": fast,
        "events/s with old keys": slow,
        "worker MB": watch.largest_mb,
        "restart s": restart(job, beside),
    }
    return Report(figures=figures, settings=settings(job))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_all(read_job(Path(sys.argv[1])), Path(sys.argv[2]))
    else:
        serve(run, *VERSIONS)
