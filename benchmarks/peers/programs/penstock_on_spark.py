"""Penstock on Spark, as `app.run()` runs it: the payments wait in an embedded topic, the totals go to another one.

Marks are the times at which the sink's mark of an epoch was created: state committed, outputs published.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.peers.job import Job, Mark, Report, number_of, serve
from benchmarks.peers.programs import spark_session

from penstock import Application
from penstock.epochs.coordinator import history_of, load_retained
from penstock.epochs.records import EpochRecord, fold
from penstock.state.query import StepState
from penstock.state.replica import MemoryShelf, Replicas
from penstock.storage import open_storage, sub
from penstock.stream import Stream

GROUP, STEP, INPUT, OUTPUT = "bench", "customer", "payments", "totals"
VERSIONS = ("penstock", "pyspark", "pyarrow", "msgspec", "lmdb")


def customer_total(customer: str, payment: dict[str, Any], total: int) -> tuple[dict[str, Any], int]:
    """The payment with the customer's total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "total": total}, total


def shop_total(shop: str, payment: dict[str, Any], total: int) -> tuple[dict[str, Any], int]:
    """The payment with the shop's total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "shop_total": total}, total


def application(job: Job, folder: Path) -> Application:
    """An application with as many partitions as cores, and everything under one folder."""
    places = folder / "topics", folder / "state", folder / "local"
    limit = {"max_events_per_epoch": job.options["epoch"]} if "epoch" in job.options else {}
    return Application(GROUP, *places, partitions=job.cores, **limit)


def build(app: Application, payments: Stream, workload: str = "A") -> None:
    """payments → total per customer (→ by shop → total per shop) → totals."""
    stream = payments.stateful_map(STEP, customer_total, default=0)
    if workload == "C":
        stream = stream.key_by("shop", lambda payment: payment["shop"]).stateful_map("shops", shop_total, default=0)
    stream.to_topic(app.topic(OUTPUT))


def in_order(job: Job) -> list[bytes]:
    """The payments of all lanes in the order of the input."""
    return sorted((value for lane in range(job.cores) for value in job.lane(lane)), key=number_of)


def append(app: Application, values: Iterable[bytes]) -> None:
    """Put payments into the topic, in the order given."""
    decode = msgspec.json.Decoder().decode
    with app.topic(INPUT).producer() as send:
        for number, data in enumerate(values):
            value = decode(data)
            send(value, key=value["customer"], timestamp_ms=number)


def records(folder: Path) -> Iterator[EpochRecord]:
    """The records of all epochs that are retained."""
    storage = sub(open_storage(folder / "state"), GROUP)
    history = history_of(storage)
    assert history is not None, "the application has run"
    yield from load_retained(storage, history).records


def published(folder: Path, epoch: int) -> float:
    """When an epoch was published."""
    (mark,) = (folder / "state" / GROUP).glob(f"published/*/{epoch:020d}")
    return mark.stat().st_mtime


def marks(folder: Path) -> list[Mark]:
    """When each epoch was published, and how many events were done then."""
    found: list[Mark] = []
    for record in records(folder):
        found.append((published(folder, record.epoch), record.counts.read + (found[-1][1] if found else 0)))
    return found


def write_state(app: Application, folder: Path, path: Path) -> None:
    """The state as it is stored, from its segments, as JSON lines for the checks."""
    storage = sub(open_storage(folder / "state"), GROUP)
    history = history_of(storage)
    assert history is not None, "the application has run"
    retained = load_retained(storage, history)
    view = fold(retained.oldest, retained.records)
    replicas = Replicas(storage, MemoryShelf())
    parts = range(app.settings.partitions)
    stores = [replicas.at(STEP, part, view.epoch, view.of(STEP, part)) for part in parts]
    (step,) = (step for step in app.plan.steps if step.name == STEP)
    assert step.state is not None
    with path.open("w") as out:
        for pair in StepState(stores, step.state, named=False).items():
            out.write(f"{json.dumps(pair)}\n")


def settings(job: Job) -> dict[str, Any]:
    """What the application was told."""
    return {"partitions": job.cores, "master": f"local[{job.cores}]", **job.options}


def run(job: Job) -> Report:
    """All payments wait in the topic, or in files that Spark streams; run until they are done."""
    app = application(job, job.work)
    if job.workload == "frame":
        spark = spark_session.session(job)
        frame = spark_session.files(spark, job)
        build(app, app.dataframe(frame, key="customer", value="value", codec="json"))
        app.run(until="caught-up", spark=spark)
    else:
        build(app, app.dataframe(app.topic(INPUT)), job.workload)
        append(app, in_order(job))
        app.run(until="caught-up", master=f"local[{job.cores}]")
    job.outputs.symlink_to(job.work / "topics" / OUTPUT)
    write_state(app, job.work, job.work / "state-0.jsonl")
    return Report(marks=[marks(job.work)], settings=settings(job))


if __name__ == "__main__":
    serve(run, *VERSIONS)
