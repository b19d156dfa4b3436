"""Quix Streams: one process for each core, state in RocksDB with changelog topics, JSON by Quix's own serialisers.

The broker is librdkafka's mock cluster. Marks are the ends of the output topic, looked at from outside.
"""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Mark, Report, read_job, serve
from confluent_kafka import Consumer, Producer, TopicPartition
from quixstreams import Application, State
from quixstreams.models.topics import Topic, TopicAdmin, TopicConfig, TopicManager
from rocksdict import AccessType, Options, Rdict

GROUP, INPUT, OUTPUT = "bench", "payments", "totals"
REPARTITION = f"repartition__{GROUP}--{INPUT}--shop"
CHANGELOGS = [f"changelog__{GROUP}--{INPUT}--default", f"changelog__{GROUP}--repartition.{INPUT}.shop--default"]
COMMIT_SECONDS = 5.0
LOOK_SECONDS = 0.2
MAX_SECONDS_WITHOUT_PROGRESS = 60
COMPRESSION = {"compression.type": "lz4"}


class MockAdmin(TopicAdmin):
    """What Quix asks an administrator, answered for a broker that has all topics and no configurations."""

    def inspect_topics(self, topic_names: list[str], timeout: float = 30) -> dict[str, TopicConfig | None]:
        """The topics' partitions, from the broker's metadata."""
        known = self.list_topics(timeout=timeout)
        settings = {"cleanup.policy": "compact", "retention.ms": "-1", "retention.bytes": "-1"}
        return {
            name: TopicConfig(len(known[name].partitions), 1, settings) if name in known else None
            for name in topic_names
        }

    def create_topics(self, topics: list[Topic], timeout: float = 30, finalize_timeout: float = 60) -> None:
        """They are all there."""


def customer_total(payment: dict[str, Any], state: State) -> dict[str, Any]:
    """The payment with the customer's total so far."""
    total = state.get("total", 0) + payment["amount"]
    state.set("total", total)
    payment["total"] = total
    return payment


def shop_total(payment: dict[str, Any], state: State) -> dict[str, Any]:
    """The payment with the shop's total so far."""
    total = state.get("total", 0) + payment["amount"]
    state.set("total", total)
    payment["shop_total"] = total
    return payment


def work(job: Job, process: int, address: str) -> None:
    """One process of the consumer group; SIGTERM ends it."""
    admin = MockAdmin(broker_address=address, logger=logging.getLogger("admin"))
    app = Application(
        broker_address=address,
        consumer_group=GROUP,
        auto_offset_reset="earliest",
        commit_interval=COMMIT_SECONDS,
        state_dir=job.work / f"state-{process}",
        producer_extra_config=COMPRESSION,
        topic_manager=TopicManager(admin, GROUP),
        loglevel="WARNING",
    )
    stream = app.dataframe(app.topic(INPUT)).apply(customer_total, stateful=True)
    if job.workload == "C":
        stream = stream.group_by("shop").apply(shop_total, stateful=True)
    stream.to_topic(app.topic(OUTPUT))
    app.run()


def produce(job: Job, address: str) -> None:
    """Put all payments into the broker before anything is timed."""
    producer = Producer({"bootstrap.servers": address, **COMPRESSION, "linger.ms": 100, "batch.size": 1_000_000})
    for lane in range(job.cores):
        for value in job.lane(lane):
            customer = json.loads(value)["customer"]
            while True:
                try:
                    producer.produce(INPUT, value, customer)
                    break
                except BufferError:
                    producer.poll(0.1)
    assert not producer.flush(60), "the broker did not take all payments"


def spectator(address: str) -> Consumer:
    """A consumer outside of every group."""
    return Consumer({"bootstrap.servers": address, "group.id": "spectator", "auto.offset.reset": "earliest"})


def ends(consumer: Consumer, topic: str, partitions: int) -> tuple[int, int]:
    """How many events of a topic there were in all, and how many the broker has dropped."""
    marks = [consumer.get_watermark_offsets(TopicPartition(topic, part)) for part in range(partitions)]
    return sum(high for _, high in marks), sum(low for low, _ in marks)


def watch(job: Job, consumer: Consumer, processes: list["subprocess.Popen[bytes]"]) -> list[Mark]:
    """Look at the topics until all outputs are there; an event is half done when the first of two stages is."""
    stages = [REPARTITION, OUTPUT] if job.workload == "C" else [OUTPUT]
    marks = [(time.time(), 0)]
    while marks[-1][1] < job.events:
        time.sleep(LOOK_SECONDS)
        done = sum(ends(consumer, topic, job.options["partitions"])[0] for topic in stages) // len(stages)
        if done > marks[-1][1]:
            marks.append((time.time(), done))
        assert all(process.poll() is None for process in processes), "a process ended"
        assert time.time() - marks[-1][0] < MAX_SECONDS_WITHOUT_PROGRESS, f"no progress behind {done} outputs"
    return marks


def write_outputs(job: Job, consumer: Consumer) -> None:
    """All that is in the output topic, as JSON lines for the checks."""
    partitions = job.options["partitions"]
    total, dropped = ends(consumer, OUTPUT, partitions)
    assert not dropped, f"the mock broker has dropped {dropped} outputs; use more partitions"
    consumer.assign([TopicPartition(OUTPUT, part, 0) for part in range(partitions)])
    job.outputs.mkdir()
    with (job.outputs / "totals.jsonl").open("wb") as out:
        while total:
            messages = consumer.consume(10_000, 5.0)
            assert messages, f"{total} outputs cannot be read"
            out.writelines(message.value() + b"\n" for message in messages)
            total -= len(messages)


def write_state(job: Job) -> None:
    """What RocksDB holds of each customer, as JSON lines for the checks."""
    with (job.work / "state-all.jsonl").open("w") as out:
        for path in sorted(job.work.glob(f"state-[0-9]/**/{INPUT}/*")):
            if not (path / "CURRENT").exists():
                continue
            store = Rdict(str(path), Options(raw_mode=True), access_type=AccessType.read_only())
            for key, value in store.items():
                customer, _, name = key.partition(b"|")
                if name == b'"total"':
                    out.write(f"{json.dumps([customer.decode().strip(chr(34)), json.loads(value)])}\n")
            store.close()


def run(job: Job) -> Report:
    """Broker, payments, processes; then look."""
    partitions, module = job.options["partitions"], [sys.executable, "-m"]
    topics = [INPUT, OUTPUT, REPARTITION, *CHANGELOGS]
    command = [*module, "benchmarks.peers.programs.mock_broker", str(partitions), *topics]
    processes: list[subprocess.Popen[bytes]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout is not None
            address = broker.stdout.readline().strip()
            produce(job, address)
            consumer = spectator(address)
            there, dropped = ends(consumer, INPUT, partitions)
            assert (there, dropped) == (job.events, 0), f"the broker holds {there - dropped} of {job.events} payments"
            own = [*module, "benchmarks.peers.programs.quix_streams", sys.argv[1]]
            processes += [subprocess.Popen([*own, str(number), address]) for number in range(job.cores)]
            marks = watch(job, consumer, processes)
            time.sleep(COMMIT_SECONDS + 2)  # the state of the last events is stored with the next commit
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(60)
            write_outputs(job, consumer)
            consumer.close()
            write_state(job)
        finally:
            for process in (*processes, broker):
                process.kill()
    settings = {"processes": job.cores, "partitions": partitions, "guarantee": "at-least-once", **COMPRESSION}
    return Report(marks=[marks], settings={**settings, "broker": "librdkafka's mock cluster"})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        work(read_job(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
    else:
        serve(run, "quixstreams", "confluent-kafka", "orjson", "rocksdict")
