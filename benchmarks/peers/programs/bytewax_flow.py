"""Bytewax: a process with one worker for each core, recovery on, JSON by msgspec."""

import json
import pickle
import socket
import sqlite3
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import msgspec
from benchmarks.peers.job import Job, Pace, Report, read_job, serve
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

BATCH = 1_000


class Lane(StatefulSourcePartition):
    """The payments of one lane, from memory, in batches; its position is its state."""

    def __init__(self, values: list[bytes], start: int) -> None:
        self._values = values
        self._at = start

    def next_batch(self) -> list[bytes]:
        """The next values."""
        if self._at >= len(self._values):
            raise StopIteration
        batch = self._values[self._at : self._at + BATCH]
        self._at += len(batch)
        return batch

    def snapshot(self) -> int:
        """How many values were read."""
        return self._at


class Lanes(FixedPartitionedSource):
    """One part of the input for each worker. Each process loads its own while the flow is built, untimed."""

    def __init__(self, job: Job, mine: int) -> None:
        self._names = [str(lane) for lane in range(job.cores)]
        self._values = {str(mine): list(job.lane(mine))}
        self._job = job

    def list_parts(self) -> list[str]:
        """All lanes."""
        return self._names

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Lane:
        """A lane, from where it was left."""
        values = self._values.get(for_part)
        return Lane(list(self._job.lane(int(for_part))) if values is None else values, resume_state or 0)


class Lines(StatelessSinkPartition):
    """Writes the outputs of one worker as JSON lines, and notes when."""

    def __init__(self, path: Path, pace: Pace) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._pace = pace
        self._count = 0

    def write_batch(self, items: list[bytes]) -> None:
        """Append outputs."""
        self._file.write(b"\n".join(items) + b"\n")
        self._count += len(items)
        if self._count - self._pace.marks[-1][1] >= self._pace.every:
            self._pace.done(self._count)

    def close(self) -> None:
        """All outputs are in the file."""
        self._file.close()
        self._pace.done(self._count)


class Files(DynamicSink):
    """A file for each worker."""

    def __init__(self, folder: Path, process: int, pace: Pace) -> None:
        self._folder, self._process, self._pace = folder, process, pace

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Lines:
        """The file of a worker."""
        return Lines(self._folder / f"{worker_index}.jsonl", self._pace)


def customer_total(total: int | None, payment: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The new total, and the payment with it."""
    total = (total or 0) + payment["amount"]
    return total, {**payment, "total": total}


def shop_total(total: int | None, payment: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The new total, and the payment with it."""
    total = (total or 0) + payment["amount"]
    return total, {**payment, "shop_total": total}


def flow(job: Job, process: int, pace: Pace) -> Dataflow:
    """payments → total per customer (→ by shop → total per shop) → files."""
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode

    def keyed(values: list[bytes]) -> list[tuple[str, dict[str, Any]]]:
        return [(payment["customer"], payment) for payment in map(decode, values)]

    def encoded(pairs: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
        return [encode(payment) for _, payment in pairs]

    graph = Dataflow("bench")
    values = op.input("payments", graph, Lanes(job, process))
    # flat_map_batch is Bytewax's fast path: one call for many values.
    totals = op.stateful_map("customer", op.flat_map_batch("decode", values, keyed), customer_total)
    if job.workload == "C":
        by_shop = op.key_on("by shop", op.map("value", totals, lambda pair: pair[1]), lambda payment: payment["shop"])
        totals = op.stateful_map("shops", by_shop, shop_total)
    op.output("totals", op.flat_map_batch("encode", totals, encoded), Files(job.outputs, process, pace))
    return graph


def work(job: Job, process: int, ports: list[int]) -> None:
    """One process of the cluster."""
    pace = Pace()
    graph = flow(job, process, pace)
    addresses = [f"127.0.0.1:{port}" for port in ports] if len(ports) > 1 else []
    interval = timedelta(seconds=job.options["interval_seconds"])
    pace.marks[0] = (time.time(), 0)
    cluster_main(
        graph,
        addresses,
        process,
        epoch_interval=interval,
        recovery_config=RecoveryConfig(str(job.work / "recovery")),
        worker_count_per_proc=1,
    )
    pace.marks.append((time.time(), pace.marks[-1][1]))  # the last snapshot is written by now
    (job.work / f"marks-{process}.json").write_text(json.dumps(pace.marks))


def write_state(job: Job) -> None:
    """The last snapshot of every customer, out of the recovery store, as JSON lines for the checks."""
    newest: dict[str, tuple[int, Any]] = {}
    for path in sorted((job.work / "recovery").glob("*.sqlite3")):
        with sqlite3.connect(path) as database:
            rows = database.execute(
                "SELECT state_key, snap_epoch, ser_change FROM snaps WHERE step_id LIKE '%customer%'"
            )
            for key, epoch, change in rows:
                if key not in newest or epoch > newest[key][0]:
                    newest[key] = (epoch, change)
    with (job.work / "state-0.jsonl").open("w") as out:
        for key, (_, change) in newest.items():
            out.write(f"{json.dumps([key, pickle.loads(change)])}\n")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run(job: Job) -> Report:
    """Start a process for each core, wait for all."""
    job.outputs.mkdir(parents=True)
    (job.work / "recovery").mkdir()
    init_db_dir(job.work / "recovery", job.cores)
    ports = free_ports(job.cores)
    command = [sys.executable, "-m", "benchmarks.peers.programs.bytewax_flow", sys.argv[1]]
    processes = [subprocess.Popen([*command, str(number), json.dumps(ports)]) for number in range(job.cores)]
    assert not any(process.wait() for process in processes), "a process failed"
    write_state(job)
    marks = [json.loads((job.work / f"marks-{number}.json").read_text()) for number in range(job.cores)]
    settings = {"processes": job.cores, "workers": job.cores, "epoch_interval_s": job.options["interval_seconds"]}
    return Report(
        marks=marks, settings={**settings, "json": "msgspec", "source": "memory", "sink": "a file per worker"}
    )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        work(read_job(Path(sys.argv[1])), int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        serve(run, "bytewax", "msgspec")
