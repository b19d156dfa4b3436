"""What the heart costs: running totals per key through Penstock, beside a bare loop on the same events.

One process, JSON values, durable deltas and outbox on local disk, replicas in LMDB. The bare loop decodes, calls the
function, encodes and keeps its totals in a dict: nothing durable, no topics, no engine. Both read the same events in
the same run, in turns; only the ratio counts. All events are sent before anything is measured: those of a real stream
are made elsewhere.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from penstock import Application, Event

EPOCHS = 8
EVENTS_PER_EPOCH = 500_000


def events(count: int, keys: int, seed: int) -> list[Event]:
    """Payments of customers drawn evenly, the same for the same seed."""
    draw = random.Random(seed)
    names = [f"customer-{i:07d}" for i in range(keys)]
    order = [names[draw.randrange(keys)] for _ in range(count)] if keys < count else draw.sample(names, count)
    return [
        Event(name, {"customer": name, "amount": draw.randrange(100_000), "currency": "EUR"}, number)
        for number, name in enumerate(order)
    ]


def total(key: str, value: dict, state: int) -> tuple[dict, int]:
    """The running total of a customer."""
    state += value["amount"]
    return {**value, "total": state}, state


def bare_loop(raw: list[tuple[str, bytes]], totals: dict[str, int]) -> list[bytes]:
    """The limit: decode, function, encode, dict."""
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    out = []
    for key, data in raw:
        output, totals[key] = total(key, decode(data), totals.get(key, 0))
        out.append(encode(output))
    return out


def measure(keys: int, folder: Path) -> tuple[list[float], list[float]]:
    """Events per second of each epoch: of Penstock, and of the bare loop."""
    app = Application(
        "bench",
        folder / "topics",
        folder / "state",
        folder / "local",
        partitions=1,
        max_events_per_epoch=EVENTS_PER_EPOCH,
    )
    payments, totals = app.topic("payments"), app.topic("totals")
    app.dataframe(payments).stateful_map("total", total, default=0).to_topic(totals)
    encode = msgspec.json.Encoder().encode
    raw = []
    for epoch in range(EPOCHS):
        batch = events(EVENTS_PER_EPOCH, keys, epoch)
        payments.append(batch)
        raw.append([(event.key, encode(event.value)) for event in batch])
    runner, known = app.runner(), {}
    ours, bare = [], []
    for epoch in range(EPOCHS):
        began = time.perf_counter()
        runner.epoch()
        ours.append(EVENTS_PER_EPOCH / (time.perf_counter() - began))
        began = time.perf_counter()
        bare_loop(raw[epoch], known)
        bare.append(EVENTS_PER_EPOCH / (time.perf_counter() - began))
    check(totals.read(), known)
    runner.close()
    return ours, bare


def check(outputs: object, known: dict[str, int]) -> None:
    """Penstock's last output of each key is the bare loop's total, and there are as many outputs as events."""
    last, count = {}, 0
    for event in outputs:  # type: ignore[attr-defined]
        last[event.key] = event.value["total"]
        count += 1
    assert count == EPOCHS * EVENTS_PER_EPOCH, f"{count} outputs"
    assert last == known, "the totals differ"


def main() -> None:
    """Print events per second and the ratios."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, nargs="*", default=[10_000, 1_000_000])
    for keys in arguments.parse_args().keys:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        try:
            ours, bare = measure(keys, folder)
        finally:
            shutil.rmtree(folder)
        # The first epoch is warm-up: caches are cold, memory is not there yet.
        mine, limit = statistics.median(ours[1:]), statistics.median(bare[1:])
        # Each epoch is compared with the bare loop right behind it: a machine's pace changes within seconds.
        ratio = statistics.median(own / other for own, other in zip(ours[1:], bare[1:], strict=True))
        print(f"{keys:>9,} keys: penstock {mine:>9,.0f} events/s, bare loop {limit:>9,.0f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
