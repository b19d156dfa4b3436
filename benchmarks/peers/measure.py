"""One workload on one peer: prepare the input, run the peer's program, check what it computed, work out figures."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import LATENCY, STATE, Peer, Workload
from benchmarks.peers.checks import WrongError, check_outputs, check_state, read_outputs, read_state
from benchmarks.peers.environments import NoEnvironmentError, interpreter
from benchmarks.peers.figures import percentile, sustained
from benchmarks.peers.job import Job, Report, read_report, write_job
from benchmarks.peers.payments import joined, old_payments, write_lanes, write_parquet

REPOSITORY = Path(__file__).parent.parent.parent
MAX_SECONDS = 1_800
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one workload on one peer: figures, or why there are none."""

    workload: str
    peer: str
    events: int
    figures: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: the cores, whether in short, and where inputs and everything else lie meanwhile."""

    cores: int
    short: bool
    folder: Path


def measure(workload: Workload, peer: Peer, size: Size) -> Outcome:
    """Measure; whatever fails is an outcome, too, so that the others are still measured."""
    portion = peer.portions[workload.key]
    events = portion.short if size.short else portion.events
    options = dict(portion.options)
    if size.short and "short_batch" in options:
        options["batch"] = options["short_batch"]
    work = size.folder / f"{workload.key}-{peer.key}"
    job = Job(workload.key, events, size.cores, size.folder / f"input-{workload.key}", work, options)
    try:
        _prepare(workload, job)
        _execute(peer, job)
        report = read_report(job)
        if events:
            _check(workload, peer, job)
        return Outcome(workload.key, peer.key, events, figures_of(workload.kind, report), report=report)
    except (WrongError, NoEnvironmentError, FailedError) as error:
        return Outcome(workload.key, peer.key, events, failure=str(error))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def figures_of(kind: str, report: Report) -> dict[str, float]:
    """The figures of a kind of workload, from what a program noted.

    >>> figures_of(LATENCY, Report(latencies_ms=[3.0, 1.0, 2.0]))
    {'median ms': 2.0, 'p99 ms': 3.0}
    """
    if kind == LATENCY:
        return {"median ms": percentile(report.latencies_ms, 0.5), "p99 ms": percentile(report.latencies_ms, 0.99)}
    if kind == STATE:
        return dict(report.figures)
    return {"events/s": sustained(report.marks)}


class FailedError(Exception):
    """A peer's program ended with an error, or not at all."""


def _prepare(workload: Workload, job: Job) -> None:
    """Input that all peers share is written once; what only one reads, into the job's own folder."""
    shutil.rmtree(job.work, ignore_errors=True)
    done = job.input / f"{job.events}.written"
    if "old" in job.options:
        payments = old_payments(job.options["old"])
        write_lanes(payments, job.work / "old", job.cores)
        if "batch" in job.options:
            write_parquet(payments, job.work / "input", job.cores, job.options["batch"])
    elif "batch" in job.options:
        payments = workload.payments(job.events)
        write_parquet(payments, job.work / "input", job.cores, job.options["batch"])
    if job.events and not any(int(path.stem) >= job.events for path in job.input.glob("*.written")):
        write_lanes(workload.payments(job.events), job.input, job.cores)
        done.touch()
    write_job(job)


def _execute(peer: Peer, job: Job) -> None:
    """Run a peer's program in its own environment, with nothing of this one's."""
    python = interpreter(peer.environment, peer.requirements)
    program = peer.portions[job.workload].program or peer.program
    command = [python, "-m", f"benchmarks.peers.programs.{program}", str(job.work / "job.json")]
    paths = [REPOSITORY] if peer.requirements else [REPOSITORY, REPOSITORY / "src"]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    log = job.work / "log.txt"
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                command, env=environment, cwd=job.work, stdout=out, stderr=subprocess.STDOUT, timeout=MAX_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise FailedError(f"not done after {MAX_SECONDS} s") from None
    if done.returncode:
        raise FailedError("\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]))


def _check(workload: Workload, peer: Peer, job: Job) -> None:
    """Raise WrongError unless outputs and state are right."""
    payments = workload.payments(job.events)
    if "old" in job.options:
        payments = joined(old_payments(job.options["old"]), payments)
    check_outputs(payments, read_outputs(job.outputs), peer.in_order, shops=workload.key == "C")
    state: dict[str, int] = {}
    for path in sorted(job.work.glob("state-*.jsonl")):
        state |= read_state(path)
    check_state(payments, state)
