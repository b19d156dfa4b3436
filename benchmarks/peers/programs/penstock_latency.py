"""Penstock on Spark under a small, steady load: how long it takes from sending an event to its published output."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
from benchmarks.peers.job import Job, Report, number_of, read_job, serve
from benchmarks.peers.programs.feed import PACE, WARM_UP, send_steadily, sent_ms
from benchmarks.peers.programs.penstock_on_spark import (
    INPUT,
    OUTPUT,
    VERSIONS,
    application,
    build,
    settings,
    write_state,
)

MAX_TIME = timedelta(minutes=5)


def feed(job: Job) -> None:
    """The producer, in a process of its own; each burst is flushed at once. Ends when all is sent."""
    topic, decode = application(job, job.work).topic(INPUT), msgspec.json.Decoder().decode
    with topic.producer() as producer:

        def send(values: list[bytes]) -> None:
            for data in values:
                value = decode(data)
                producer(value, key=value["customer"])
            producer.flush()

        def wait() -> None:
            while not list((job.work / "topics" / OUTPUT).glob("*.parquet")):
                time.sleep(0.1)

        send_steadily(job, send, wait)


def latencies(job: Job) -> list[float]:
    """From before the flush of each payment's burst until the file with its output was there, behind the warm-up."""
    found = []
    for path in sorted((job.work / "topics" / OUTPUT).glob("*.parquet")):
        visible_ms = path.stat().st_mtime * 1_000
        values = pq.read_table(path, columns=["value"], partitioning=None).column(0).to_pylist()
        found += [visible_ms - sent_ms(value) for value in values if number_of(value) >= WARM_UP]
    return found


def run(job: Job) -> Report:
    """Run the application while another process feeds it."""
    app = application(job, job.work)
    build(app, app.dataframe(app.topic(INPUT)))
    with subprocess.Popen([sys.executable, "-m", __spec__.name, sys.argv[1], "feed"]) as feeder:
        app.run(count=job.events, timeout=MAX_TIME, master=f"local[{job.cores}]")
    assert feeder.returncode == 0, "not all payments were sent"
    job.outputs.symlink_to(job.work / "topics" / OUTPUT)
    write_state(app, job.work, job.work / "state-0.jsonl")
    return Report(latencies_ms=latencies(job), settings={**settings(job), **PACE})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        feed(read_job(Path(sys.argv[1])))
    else:
        serve(run, *VERSIONS)
