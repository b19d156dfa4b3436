"""SIGKILL on Spark: whatever dies and whenever, state and outputs are those of an undisturbed run.

The lives of an application make up a chain: each one goes on with what the one before left when it was killed, and is
then killed itself. What each kill left is also copied, brought to an end in this process, and compared.
"""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.storage import open_storage
from penstock.testing import TestDriver

LIFE = Path(__file__).parent / "life.py"
EVENTS_PER_LIFE = 18
KEYS = 5
MAX_EPOCHS = 1_000
LIFE_SECONDS = 300

_spec = importlib.util.spec_from_file_location("life", LIFE)
assert _spec is not None
assert _spec.loader is not None
life = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(life)

Point = tuple[str, str, int]
"""The kind of a write, "before" or "after" it, and which one of that kind."""

EACH_KIND: list[Point] = [
    ("claim", "after", 1),
    ("segment", "after", 2),
    ("second segment", "before", 1),
    ("outbox", "after", 1),
    ("record", "before", 2),
    ("publish", "before", 1),
    ("mark", "before", 1),
    ("full record", "after", 1),
]
SINGLE: list[Point] = [
    *((kind, when, 1) for kind in ("format", "claim") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("segment", "outbox", "record", "publish", "mark") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("full record", "delete", "end") for when in ("before", "after")),
    ("segment", "after", 3),
    ("record", "after", 2),
]
REKEYED: list[Point] = [
    *((kind, when, 1) for kind in ("claim", "segment", "second segment", "outbox") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("record", "publish", "mark") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("full record", "delete", "end") for when in ("before", "after")),
    ("second segment", "after", 3),
    ("record", "before", 2),
]


@dataclass
class Chain:
    """Lives of one application, one after the other, in one folder."""

    folder: Path
    pipeline: str
    sent: list[int] = field(default_factory=list)

    def send(self) -> None:
        """Give the next life something to do."""
        topic = life.application(self.folder, self.pipeline).topic("numbers")
        with topic.producer() as send:
            for n in range(len(self.sent), len(self.sent) + EVENTS_PER_LIFE):
                send(n, key=f"k{n % KEYS}", timestamp_ms=n)
                self.sent.append(n)

    def live(self, kind: str, when: str, number: int) -> int:
        """One life on Spark; returns how it ended. Nothing of it runs any more then: every process holds the pipe."""
        command = [sys.executable, str(LIFE), str(self.folder), self.pipeline, kind, when, str(number)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_SECONDS, check=False)
        if ended.returncode not in (0, -signal.SIGKILL):
            pytest.fail(f"{kind} {when} {number} ended with {ended.returncode}: {ended.stderr[-3000:]}")
        return ended.returncode

    def check_copy(self, scratch: Path) -> None:
        """What a life left, brought to an end in this process, is what an undisturbed run makes of it."""
        shutil.rmtree(scratch, ignore_errors=True)
        for part in ("state", "topics"):
            if (self.folder / part).exists():
                shutil.copytree(self.folder / part, scratch / part)
        assert finished(scratch, self.pipeline) == self.undisturbed(scratch.parent / "undisturbed")

    def undisturbed(self, folder: Path) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / "topics" / "numbers", folder / "topics" / "numbers")
        return finished(folder, self.pipeline)


def finished(folder: Path, pipeline: str) -> Any:
    """State and outputs, by key, once everything that was sent is processed."""
    app = life.application(folder, pipeline)
    state = open_storage(folder / "state" / life.GROUP)
    driver = TestDriver(app, storage=state, topics=open_storage(folder / "topics"))
    sent = len(driver.received("numbers"))
    for _ in range(MAX_EPOCHS):
        if driver.counts.read == sent:
            break
        driver.epoch()
    assert driver.counts.read == sent
    outputs: dict[Any, list[Any]] = defaultdict(list)
    for event in driver.received("sums"):
        outputs[event.key].append((event.value, event.timestamp_ms))
    states = {step: dict(driver.state(step)) for step in life.STATE[pipeline]}
    driver.close()
    return states, dict(outputs)


def run_chain(folder: Path, pipeline: str, points: list[Point], worker_dies: bool) -> None:
    chain = Chain(folder / "chain", pipeline)
    chain.folder.mkdir()
    for kind, when, number in points:
        chain.send()
        assert chain.live(kind, when, number) == -signal.SIGKILL, f"{kind} {when} {number} was not met"
        chain.check_copy(folder / "copy")
    chain.send()
    assert chain.live("worker" if worker_dies else "none", "before", 1) == 0
    assert (chain.folder / "worker died").exists() == worker_dies
    chain.check_copy(folder / "copy")
    # What Spark itself left needs nothing more done.
    assert finished(chain.folder, pipeline) == chain.undisturbed(folder / "undisturbed")


def test_killed_at_each_kind_of_write_and_a_worker_in_mid_task(tmp_path: Path) -> None:
    run_chain(tmp_path, "rekeyed", EACH_KIND, worker_dies=True)


@pytest.mark.soak
@pytest.mark.parametrize(("pipeline", "points"), [("single", SINGLE), ("rekeyed", REKEYED)], ids=["single", "rekeyed"])
def test_killed_before_and_after_every_write(tmp_path: Path, pipeline: str, points: list[Point]) -> None:
    run_chain(tmp_path, pipeline, points, worker_dies=True)


@pytest.mark.soak
def test_killed_at_twenty_writes_taken_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "3"))
    print(f"PENSTOCK_SEED={seed}")  # noqa: T201
    draw = random.Random(seed)
    points = [("any", draw.choice(["before", "after"]), draw.randint(1, 30)) for _ in range(20)]
    run_chain(tmp_path, "rekeyed", points, worker_dies=False)


def test_there_are_thirty_distinct_points_at_least() -> None:
    distinct = {("single", *point) for point in SINGLE} | {("rekeyed", *point) for point in REKEYED}
    assert len(distinct) >= 30
