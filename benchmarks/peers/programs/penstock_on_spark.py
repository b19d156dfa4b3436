"""Penstock on Spark, as `app.run()` runs it: the payments wait in an embedded topic, the totals go to another one.

Marks are the times at which the sink's mark of an epoch was created: state committed, outputs published.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.peers.job import Job, Mark, Report, number_of, serve

from penstock import Application
from penstock.epochs.coordinator import history_of, load_retained
from penstock.epochs.records import EpochRecord, fold
from penstock.state.query import StepState
from penstock.state.replica import MemoryShelf, Replicas
from penstock.storage import Storage, open_storage, sub

GROUP, SINK = "bench", "totals"


def customer_total(customer: str, payment: dict[str, Any], total: int) -> tuple[dict[str, Any], int]:
    """The payment with the customer's total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "total": total}, total


def shop_total(shop: str, payment: dict[str, Any], total: int) -> tuple[dict[str, Any], int]:
    """The payment with the shop's total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "shop_total": total}, total


def application(job: Job) -> Application:
    """The application of a workload, with everything under the job's folder."""
    return Application(
        GROUP,
        job.work / "topics",
        job.work / "state",
        job.work / "local",
        partitions=job.options.get("partitions", job.cores),
        max_events_per_epoch=job.options["epoch"],
    )


def build(app: Application, workload: str) -> None:
    """payments → total per customer (→ by shop → total per shop) → totals."""
    stream = app.dataframe(app.topic("payments")).stateful_map("customer", customer_total, default=0)
    if workload == "C":
        stream = stream.key_by("shop", lambda payment: payment["shop"]).stateful_map("shops", shop_total, default=0)
    stream.to_topic(app.topic(SINK))


def in_order(job: Job) -> Iterable[bytes]:
    """The payments of all lanes in the order of the input."""
    lanes = [list(job.lane(lane)) for lane in range(job.cores)]
    return sorted((value for lane in lanes for value in lane), key=number_of)


def append(app: Application, values: Iterable[bytes]) -> None:
    """Put payments into the topic, in the order given."""
    decode = msgspec.json.Decoder().decode
    with app.topic("payments").producer() as send:
        for number, data in enumerate(values):
            value = decode(data)
            send(value, key=value["customer"], timestamp_ms=number)


def records(storage: Storage) -> list[EpochRecord]:
    """The records of all epochs."""
    history = history_of(storage)
    assert history is not None, "the application has run"
    return list(load_retained(storage, history).records)


def marks(job: Job, storage: Storage) -> list[Mark]:
    """When each epoch was published, and how many events were done then."""
    found, done = [], 0
    for record in records(storage):
        done += record.counts.read
        (mark,) = (job.work / "state" / GROUP).glob(f"published/*/{record.epoch:020d}")
        found.append((mark.stat().st_mtime, done))
    return found


def write_state(app: Application, storage: Storage, path: Path) -> None:
    """The state as it is stored, from its segments, as JSON lines for the checks."""
    history = history_of(storage)
    assert history is not None
    retained = load_retained(storage, history)
    view = fold(retained.oldest, retained.records)
    replicas = Replicas(storage, MemoryShelf())
    parts = range(app.settings.partitions)
    stores = [replicas.at("customer", part, view.epoch, view.of("customer", part)) for part in parts]
    step = next(step for step in app.plan.steps if step.name == "customer")
    assert step.state is not None
    with path.open("w") as out:
        for pair in StepState(stores, step.state, named=False).items():
            out.write(f"{json.dumps(pair)}\n")


def run(job: Job) -> Report:
    """Append all payments, then run until they are done."""
    app = application(job)
    build(app, job.workload)
    append(app, in_order(job))
    app.run(until="caught-up", master=f"local[{job.cores}]")
    storage = sub(open_storage(job.work / "state"), GROUP)
    job.outputs.symlink_to(job.work / "topics" / SINK)
    write_state(app, storage, job.work / "state-0.jsonl")
    settings = {"epoch": job.options["epoch"], "partitions": app.settings.partitions, "master": f"local[{job.cores}]"}
    return Report(marks=[marks(job, storage)], settings=settings)


if __name__ == "__main__":
    serve(run, "penstock", "pyspark", "pyarrow", "msgspec", "lmdb")
