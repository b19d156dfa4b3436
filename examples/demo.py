"""The demonstration: payments are counted exactly once, although the application is killed on the way.

This process sends payments into an embedded topic. Another one computes the running total of each customer; it is
killed with SIGKILL in the middle and started again. At the end every output is compared with what was sent.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import Application, Event

PAYMENTS, CUSTOMERS = 200_000, 1_000
BURST, BURSTS_PER_SECOND = 1_000, 10
MAX_SECONDS = 300


def payments(count: int, customers: int, seed: int = 2024) -> Iterator[Event]:
    """Payments of customers drawn at random, the same for the same seed; each has a number of its own."""
    draw = random.Random(seed)
    for number in range(count):
        customer = f"customer-{draw.randrange(customers):05d}"
        yield Event(customer, {"payment": number, "amount": draw.randrange(1, 100_000)}, timestamp_ms=number)


def running_total(customer: str, payment: dict, total: int) -> tuple[dict, int]:
    """The payment with the total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "total": total}, total


def pipeline(folder: Path, **settings: Any) -> Application:
    """payments → total → totals, with everything under one folder."""
    app = Application("demo", folder / "topics", folder / "state", folder / "local", **settings)
    app.dataframe(app.topic("payments")).stateful_map("total", running_total, default=0).to_topic(app.topic("totals"))
    return app


@dataclass
class Proof:
    """What was found in the outputs, compared with what was sent."""

    sent: int = 0
    counted: int = 0
    outputs: int = 0
    doubled: int = 0
    missing: int = 0
    exact: int = 0
    wrong: int = 0
    customers: int = 0
    last: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every payment counted exactly once."""
        complete = self.sent == self.counted == self.outputs == self.exact
        return complete and not (self.doubled or self.missing or self.wrong)


def prove(sent: Iterable[Event], outputs: Iterable[Event], counted: int) -> Proof:
    """Compare outputs with what was sent: each payment once, and each total the sum up to that payment."""
    expected, totals = {}, {}
    for event in sent:
        totals[event.key] = totals.get(event.key, 0) + event.value["amount"]
        expected[event.value["payment"]] = (event.key, totals[event.key])
    proof, seen = Proof(sent=len(expected), counted=counted, customers=len(totals)), set()
    for event in outputs:
        number = event.value["payment"]
        proof.outputs += 1
        proof.doubled += number in seen
        proof.exact += expected.get(number) == (event.key, event.value["total"])
        proof.last[event.key] = event.value["total"]
        seen.add(number)
    proof.missing = len(expected.keys() - seen)
    proof.wrong = sum(proof.last.get(customer) != total for customer, total in totals.items())
    return proof


def show(proof: Proof, kills: int, seconds: float) -> None:
    """Print the proof as a table."""
    rows = [
        ("events sent", f"{proof.sent:,}"),
        ("events counted", f"{proof.counted:,}"),
        ("killed with SIGKILL", f"{kills} time" + "s" * (kills != 1)),
        ("customers", f"{proof.customers:,}"),
        ("totals that are exact", f"{proof.customers - proof.wrong:,} of {proof.customers:,}"),
        ("outputs", f"{proof.outputs:,}, of which exact {proof.exact:,}"),
        ("outputs missing / there twice", f"{proof.missing:,} / {proof.doubled:,}"),
        (f"events/s, sent at {BURST * BURSTS_PER_SECOND:,}/s", f"{proof.counted / seconds:,.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    line = "─" * (width + 34)
    print(line, *(f"{name:<{width}}   {found}" for name, found in rows), line, sep="\n")
    print("Every payment counted exactly once." if proof.holds else "This is wrong: a payment was lost or doubled.")


def work(folder: Path, count: int) -> None:
    """What the other process does: run epochs until every payment is counted, or nobody waits for it any more."""
    parent, runner = os.getppid(), pipeline(folder).runner()
    while runner.coordinator.view.counts.read < count and os.getppid() == parent:
        if runner.is_caught_up():
            time.sleep(0.01)
        else:
            runner.epoch()
    runner.close()


def start(folder: Path, count: int) -> subprocess.Popen[bytes]:
    """Start the other process."""
    return subprocess.Popen([sys.executable, __file__, str(folder), str(count)])


def counted(folder: Path) -> int:
    """How many payments the committed epochs have counted, read from storage."""
    runner = pipeline(folder).runner()
    runner.close()
    return runner.coordinator.view.counts.read


def perform(folder: Path, count: int = PAYMENTS) -> Proof:
    """Send, kill, start again, wait, prove."""
    events, topic, began = list(payments(count, CUSTOMERS)), pipeline(folder).topic("payments"), time.monotonic()
    process, kills = start(folder, count), 0
    try:
        for burst, at in enumerate(range(0, count, BURST), 1):
            topic.append(events[at : at + BURST])
            if burst == count // BURST // 2:
                time.sleep(0.02)  # so that it is at work on what it was just sent
                process.send_signal(signal.SIGKILL)
                process.wait()
                process, kills = start(folder, count), kills + 1
                print(f"{at + BURST:>9,} payments sent; the application was killed, and is started again")
            elif burst * 10 % (count // BURST) == 0:
                print(f"{at + BURST:>9,} payments sent")
            time.sleep(max(0.0, began + burst / BURSTS_PER_SECOND - time.monotonic()))
        if process.wait(MAX_SECONDS) != 0:
            raise SystemExit(f"the application ended with {process.returncode}")
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    proof = prove(events, pipeline(folder).topic("totals").read(), counted(folder))
    show(proof, kills, seconds)
    return proof


def main() -> int:
    """Perform the demonstration in a temporary folder, and leave nothing behind."""
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        return 0 if perform(folder).holds else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
