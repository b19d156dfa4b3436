"""A long life: what is stored stays bounded, and every epoch that is retained can be read as it was."""

import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from penstock import Application
from penstock.epochs import coordinator
from penstock.epochs.compaction import MAX_SEGMENTS
from penstock.epochs.coordinator import load_retained, open_format
from penstock.epochs.records import View, after
from penstock.state.codec import value_codec
from penstock.state.query import StepState
from penstock.state.replica import Replicas
from penstock.storage import Storage, memory_storage
from penstock.testing import Crash, FaultyStorage, TestDriver

EPOCHS = 400
FULL_EVERY = 5
RETAIN = 12
PARTITIONS = 2
SNAPSHOT_EPOCHS = 4  # the clock moves by a second with each epoch
CRASH_EVERY = 23
KEYS = 40


@pytest.fixture(autouse=True)
def _small_intervals() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "FULL_EVERY", FULL_EVERY)
        yield


def application() -> Application:
    app = Application("long", partitions=PARTITIONS, retain=RETAIN, snapshots=timedelta(seconds=SNAPSHOT_EPOCHS))
    numbers = app.dataframe(app.topic("numbers"))
    summed = numbers.stateful_map("sum", lambda key, n, total: (total + n, total + n or None), default=0)
    summed.to_topic(app.topic("sums"))
    return app


def bound() -> int:
    """The most objects that the settings allow: those of the epochs that are retained, and what they stand on."""
    # Before the next full record comes, there are the epochs since the last one, too, and those that it will forget.
    epochs = RETAIN + 2 * FULL_EVERY
    records = epochs + math.ceil(epochs / FULL_EVERY) + 1
    marks = epochs
    outbox = epochs * PARTITIONS
    deltas = epochs * PARTITIONS
    snapshots = math.ceil(epochs / SNAPSHOT_EPOCHS) * PARTITIONS
    # Of a row of segments that each outweigh all behind them, there are as many as their rows have binary digits.
    below = PARTITIONS * min(MAX_SEGMENTS, math.ceil(math.log2(KEYS)) + SNAPSHOT_EPOCHS)
    orphans = FULL_EVERY * (deltas + outbox) // epochs  # of the attempts that died since the last collection
    runs = 2 * (1 + FULL_EVERY + RETAIN // CRASH_EVERY + 1)
    return 1 + records + marks + outbox + deltas + snapshots + below + orphans + runs


def views(storage: Storage) -> list[View]:
    """The application as of each epoch that is retained, read from storage alone."""
    retained = load_retained(storage, open_format(storage, lambda: "").history)
    found = [retained.oldest] if retained.oldest.epoch >= 0 else []
    view = retained.oldest
    for record in retained.records:
        view = after(view, record)
        found.append(view)
    return found


def state_at(storage: Storage, view: View) -> dict[Any, int]:
    replicas = Replicas(storage)
    stores = [replicas.at("sum", part, view.epoch, view.of("sum", part)) for part in range(PARTITIONS)]
    return dict(StepState(stores, value_codec("json"), named=False))


def test_what_is_stored_stays_bounded_and_every_retained_epoch_can_be_read() -> None:
    storage, topics = memory_storage(), memory_storage()
    driver = TestDriver(application(), storage=storage, topics=topics)
    sums: dict[str, int] = {}
    history: list[dict[str, int]] = []
    counts: list[int] = []
    for epoch in range(EPOCHS):
        for n in (3 * epoch, 3 * epoch + 1):
            key, value = f"key {n % KEYS}", n % 3 - 1  # sums come back to zero, so state is deleted as well
            driver.send("numbers", value, key=key)
            sums[key] = sums.get(key, 0) + value
        if epoch % CRASH_EVERY == 0:
            driver.crash()
            with suppress(Crash):
                driver.restart(storage=FaultyStorage(storage, die_before=3))
                driver.epoch()
            driver.crash()
            driver.restart(storage=storage)
        driver.epoch()
        history.append({key: total for key, total in sums.items() if total})
        driver.advance_time(1000)
        counts.append(len(storage.list("")))
        assert counts[-1] <= bound(), f"epoch {epoch}: {counts[-1]} objects, at most {bound()} are allowed"
        if epoch % 20 == 19 or epoch == EPOCHS - 1:
            check_history(storage, history)
    half = EPOCHS // 2
    assert max(counts[half:]) <= max(counts[half // 2 : half]) + 2 * PARTITIONS, "it grows with the number of epochs"


def check_history(storage: Storage, history: list[dict[str, int]]) -> None:
    found = views(storage)
    last = len(history) - 1
    assert found[-1].epoch == last
    assert last - found[0].epoch >= min(RETAIN, last), f"at epoch {last} only {len(found)} epochs can be read"
    for view in found:
        assert state_at(storage, view) == history[view.epoch], f"epoch {view.epoch}, read at epoch {last}"
