"""What is measured: workloads, peers, how much of each workload each peer is given, and what Penstock is held to."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.payments import Payments, draw, shuffled

THROUGHPUT, LATENCY, STATE = "throughput", "latency", "state"


@dataclass(frozen=True, slots=True)
class Workload:
    """A question, and the payments it is asked with."""

    key: str
    title: str
    kind: str
    customers: int

    def payments(self, count: int) -> Payments:
        """The first so many payments of this workload."""
        # Made in one size, so that the first of them are the same however many a peer is given.
        made = shuffled if self.key == "B" else draw
        return made(MAX_EVENTS, self.customers).first(count)


@dataclass(frozen=True, slots=True)
class Portion:
    """How many events of a workload a peer is given, in full and in short, with which options, and to which program."""

    events: int
    short: int
    options: dict[str, Any] = field(default_factory=dict)
    program: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A system, the program that runs it, and what its environment needs; no requirements: Penstock's own."""

    key: str
    title: str
    program: str
    environment: str
    requirements: tuple[str, ...]
    portions: dict[str, Portion]
    in_order: bool = True


@dataclass(frozen=True, slots=True)
class Aim:
    """What Penstock is held to: a figure of its own, alone or over a peer's; at least, or at most, so much."""

    text: str
    figure: str
    over: str | None = None
    at_least: float | None = None
    at_most: float | None = None


MAX_EVENTS = 8_000_000
OLD_CUSTOMERS = 10_000_000

WORKLOADS = {
    one.key: one
    for one in (
        Workload("A", "running total per customer, 10,000 customers", THROUGHPUT, 10_000),
        Workload("B", "the same, 1 M customers, nearly every event another one", THROUGHPUT, 1_000_000),
        Workload("C", "two stages: total per customer, re-keyed, total per shop", THROUGHPUT, 10_000),
        Workload("frame", "A through a streaming DataFrame (Spark's shuffle)", THROUGHPUT, 10_000),
        Workload("D", "1,000 events/s for a minute: from append to committed output", LATENCY, 10_000),
        Workload("state", "10 M keys of older state: speed, memory, restart", STATE, 10_000),
    )
}

_SPARK = ("pyspark==4.3.0", "pyarrow==26.0.1", "pandas==2.3.3", "protobuf", "numpy==2.4.6")
_QUIX = {"partitions": 12}
_BYTEWAX = {"interval_seconds": 10}

PEERS = {
    one.key: one
    for one in (
        Peer(
            *("penstock", "Penstock", "penstock_on_spark", "", ()),
            {
                "A": Portion(8_000_000, 4_000_000),
                "B": Portion(4_000_000, 3_000_000),
                "C": Portion(4_000_000, 3_000_000),
                "frame": Portion(8_000_000, 4_000_000, {"batch": 1_000_000}),
                "D": Portion(70_000, 25_000, {}, "penstock_latency"),
                "state": Portion(4_000_000, 2_000_000, {"old": OLD_CUSTOMERS}, "penstock_old_state"),
            },
        ),
        Peer(
            *("bare", "bare loop (the limit)", "bare", "", ()),
            {"A": Portion(6_000_000, 3_000_000), "B": Portion(4_000_000, 2_000_000)},
        ),
        Peer(
            *("transform", "Spark transformWithState", "spark_transform_with_state", "spark", _SPARK),
            {
                "A": Portion(4_000_000, 1_000_000, {"batch": 1_000_000, "short_batch": 250_000}),
                "B": Portion(200_000, 100_000, {"batch": 50_000, "short_batch": 25_000}),
                "C": Portion(3_000_000, 500_000, {"batch": 1_000_000, "short_batch": 125_000}),
                "D": Portion(70_000, 25_000, {}, "spark_latency"),
                "state": Portion(0, 0, {"old": OLD_CUSTOMERS, "batch": 1_000_000}, "spark_old_state"),
            },
        ),
        Peer(
            *("pandas", "Spark applyInPandasWithState", "spark_apply_in_pandas", "spark", _SPARK),
            {
                "A": Portion(1_500_000, 500_000, {"batch": 500_000, "short_batch": 125_000}),
                "B": Portion(40_000, 20_000, {"batch": 10_000, "short_batch": 5_000}),
            },
        ),
        Peer(
            *("quix", "Quix Streams", "quix_streams", "quix", ("quixstreams==3.28.1",)),
            {
                "A": Portion(600_000, 400_000, _QUIX),
                "B": Portion(600_000, 400_000, _QUIX),
                "C": Portion(400_000, 300_000, _QUIX),
            },
        ),
        Peer(
            *("bytewax", "Bytewax", "bytewax_flow", "bytewax", ("bytewax==0.21.1", "msgspec==0.22.0")),
            {
                "A": Portion(4_000_000, 2_000_000, _BYTEWAX),
                "B": Portion(1_500_000, 1_000_000, _BYTEWAX),
                "C": Portion(2_000_000, 800_000, _BYTEWAX),
            },
        ),
    )
}

AIMS = (
    Aim("A, to Spark transformWithState", "A penstock events/s", "A transform events/s", at_least=20),
    Aim("A, to Quix Streams", "A penstock events/s", "A quix events/s", at_least=8),
    Aim("A, to Bytewax", "A penstock events/s", "A bytewax events/s", at_least=2),
    Aim("A, to the bare loop", "A penstock events/s", "A bare events/s", at_least=0.6),
    Aim("B, to Spark transformWithState", "B penstock events/s", "B transform events/s", at_least=40),
    Aim(
        *("A through a streaming DataFrame, to Spark transformWithState", "frame penstock events/s"),
        *("A transform events/s", 10),
    ),
    Aim("C, to Spark with two transformWithState", "C penstock events/s", "C transform events/s", at_least=10),
    Aim("D, median, ms", "D penstock median ms", at_most=150),
    Aim("D, 99th percentile, ms", "D penstock p99 ms", at_most=300),
    Aim("D, median, to Spark transformWithState", "D penstock median ms", "D transform median ms", at_most=1),
    Aim("D, 99th percentile, to Spark transformWithState", "D penstock p99 ms", "D transform p99 ms", at_most=1),
    Aim(
        *("A with 10 M older keys, to A with none", "state penstock events/s with old keys"),
        *("state penstock events/s without", 0.8),
    ),
    Aim("memory of a Python worker with 10 M keys, MB", "state penstock worker MB", at_most=500),
    Aim("restart with 10 M keys, replicas gone, s", "state penstock restart s", at_most=15),
    Aim("the same restart, to Spark", "state penstock restart s", "state transform restart s", at_most=0.2),
)
