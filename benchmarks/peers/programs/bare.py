"""The limit: decode, function, encode, dict, in as many processes as cores. No engine, and nothing durable."""

import json
import multiprocessing
import time
from pathlib import Path

import msgspec
from benchmarks.peers.job import Job, Mark, Pace, Report, serve

EVERY = 50_000


def loop(values: list[bytes], totals: dict[str, int], pace: Pace) -> list[bytes]:
    """Running totals per customer."""
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    out: list[bytes] = []
    for start in range(0, len(values), EVERY):
        for data in values[start : start + EVERY]:
            value = decode(data)
            customer = value["customer"]
            total = totals.get(customer, 0) + value["amount"]
            totals[customer] = total
            out.append(encode({**value, "total": total}))
        pace.done(len(out))
    return out


def work(job: Job, lane: int, together: "multiprocessing.synchronize.Barrier", marks: dict[int, list[Mark]]) -> None:
    """One process: its customers' payments from memory to memory; then, untimed, what came out is written down."""
    values, totals = list(job.lane(lane)), {}
    together.wait()
    pace = Pace()
    out = loop(values, totals, pace)
    marks[lane] = pace.marks
    (job.outputs / f"{lane}.jsonl").write_bytes(b"".join(value + b"\n" for value in out))
    write_state(job.work / f"state-{lane}.jsonl", totals)


def write_state(path: Path, totals: dict[str, int]) -> None:
    """The state as the checks read it."""
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in totals.items()))


def run(job: Job) -> Report:
    """All processes at once."""
    job.outputs.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        marks, together = manager.dict(), manager.Barrier(job.cores)
        processes = [context.Process(target=work, args=(job, lane, together, marks)) for lane in range(job.cores)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0, "a process failed"
        found = [marks[lane] for lane in range(job.cores)]
    return Report(marks=found, settings={"processes": job.cores, "json": "msgspec", "started": time.ctime()})


if __name__ == "__main__":
    serve(run, "msgspec")
