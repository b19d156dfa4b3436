"""SIGKILL on Spark: whatever dies and whenever, state and outputs are those of an undisturbed run.

The lives of an application make up a chain: each one goes on with what the one before left when it was killed, and is
then killed itself. What each kill left is also copied, brought to an end in this process, and compared. Two chains run
beside each other, as most of a life is waiting for Spark to start; a test is one life of one of them.
"""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.storage import open_storage
from penstock.testing import TestDriver

LIFE = Path(__file__).parent / "life.py"
EVENTS_PER_LIFE = 18
KEYS = 5
MAX_EVENTS = 1_000_000
LIFE_SECONDS = 300

_spec = importlib.util.spec_from_file_location("life", LIFE)
assert _spec is not None
assert _spec.loader is not None
life = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(life)

Point = tuple[str, str, int]
"""The kind of a write, "before" or "after" it, and which one of that kind; or a step whose "worker" dies."""

SINGLE: list[Point] = [
    *((kind, when, 1) for kind in ("format", "claim", "segment", "outbox") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("record", "publish", "mark", "end") for when in ("before", "after")),
    ("sum", "worker", 1),
]
REKEYED: list[Point] = [
    *((kind, when, 1) for kind in ("segment", "second segment", "outbox", "record") for when in ("before", "after")),
    *((kind, when, 1) for kind in ("publish", "mark", "full record", "delete") for when in ("before", "after")),
    ("parity sum", "worker", 1),
]
POINTS = {"single": SINGLE, "rekeyed": REKEYED}


@dataclass
class Chain:
    """Lives of one application, one after the other, in one folder."""

    folder: Path
    pipeline: str
    sent: list[int] = field(default_factory=list)

    def live(self, point: Point, scratch: Path) -> None:
        """One life on Spark, which ends as it should, and what it leaves is right."""
        kind, when, _ = point
        self._send()
        killed = when in ("before", "after")
        ended = self._ended(point)
        assert ended == (-signal.SIGKILL if killed else 0), f"{point} was not met"
        if when == "worker":
            assert (self.folder / f"{kind} died").exists()
        if not killed:  # what Spark itself left needs nothing more done: all that was sent is in it
            assert self._counted() == len(self.sent)
        self._check_copy(scratch)

    def _send(self) -> None:
        """Give the next life something to do."""
        topic = life.application(self.folder, self.pipeline).topic("numbers")
        with topic.producer() as send:
            for n in range(len(self.sent), len(self.sent) + EVENTS_PER_LIFE):
                send(n, key=f"k{n % KEYS}", timestamp_ms=n)
                self.sent.append(n)

    def _ended(self, point: Point) -> int:
        """How a life ended. Nothing of it runs any more then: every process of it holds the pipe."""
        command = [sys.executable, str(LIFE), str(self.folder), self.pipeline, *map(str, point)]
        environment = {**os.environ, **life.ENVIRONMENT}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=LIFE_SECONDS, check=False, env=environment
        )
        if ended.returncode not in (0, -signal.SIGKILL):
            pytest.fail(f"{point} ended with {ended.returncode}: {ended.stderr[-3000:]}")
        return ended.returncode

    def _counted(self) -> int:
        app = life.application(self.folder, self.pipeline)
        return len(list(app.topic("sums", key="canonical").read()))

    def _check_copy(self, scratch: Path) -> None:
        """What a life left, brought to an end in this process, is what an undisturbed run makes of it."""
        shutil.rmtree(scratch, ignore_errors=True)
        for part in ("state", "topics"):
            if (self.folder / part).exists():
                shutil.copytree(self.folder / part, scratch / "left" / part)
        shutil.copytree(self.folder / "topics" / "numbers", scratch / "undisturbed" / "topics" / "numbers")
        assert finished(scratch / "left", self.pipeline) == finished(scratch / "undisturbed", self.pipeline)


def finished(folder: Path, pipeline: str) -> Any:
    """State and outputs, by key, once everything that was sent is processed."""
    app = life.application(folder, pipeline, at_once=MAX_EVENTS)
    state = open_storage(folder / "state" / life.GROUP)
    driver = TestDriver(app, storage=state, topics=open_storage(folder / "topics"))
    sent = len(driver.received("numbers"))
    driver.epoch()
    assert driver.counts.read == sent
    outputs: dict[Any, list[Any]] = defaultdict(list)
    for event in driver.received("sums"):
        outputs[event.key].append((event.value, event.timestamp_ms))
    states = {step: dict(driver.state(step)) for step in life.STATE[pipeline]}
    driver.close()
    return states, dict(outputs)


class Chains:
    """All chains, under way beside each other. The lives of one that come after a failure are not lived."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given_up = False
        self._workers = ThreadPoolExecutor(len(POINTS))
        self._lives: dict[tuple[str, Point], Future[None]] = {
            (pipeline, point): Future() for pipeline, points in POINTS.items() for point in points
        }
        for pipeline in POINTS:
            self._workers.submit(self._run, pipeline)

    def _run(self, pipeline: str) -> None:
        chain = Chain(self._folder / pipeline, pipeline)
        chain.folder.mkdir()
        failed: BaseException | None = None
        for point in POINTS[pipeline]:
            life_ = self._lives[pipeline, point]
            try:
                assert failed is None, f"not lived: the chain broke before, by {failed}"
                assert not self._given_up, "not lived: the tests ended before"
                chain.live(point, self._folder / f"{pipeline} copy")
                life_.set_result(None)
            except BaseException as error:
                failed = failed or error
                life_.set_exception(error)

    def outcome(self, pipeline: str, point: Point) -> None:
        """Wait for a life; raises what was wrong with it."""
        self._lives[pipeline, point].result()

    def close(self) -> None:
        self._given_up = True
        self._workers.shutdown()


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chains]:
    running = Chains(tmp_path_factory.mktemp("chains"))
    yield running
    running.close()


def _name(point: Point) -> str:
    kind, when, number = point
    return f"{when}-{kind}-{number}"


@pytest.mark.parametrize(
    ("pipeline", "point"),
    [
        pytest.param(pipeline, point, id=f"{pipeline}-{_name(point)}")
        for pipeline in POINTS
        for point in POINTS[pipeline]
    ],
)
def test_killed_here_and_started_again_nothing_is_lost_or_doubled(chains: Chains, pipeline: str, point: Point) -> None:
    chains.outcome(pipeline, point)


@pytest.mark.soak
def test_killed_at_twenty_writes_taken_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "3"))
    print(f"PENSTOCK_SEED={seed}")  # noqa: T201
    draw = random.Random(seed)
    chain = Chain(tmp_path / "chain", "rekeyed")
    chain.folder.mkdir()
    for _ in range(20):
        chain.live(("any", draw.choice(["before", "after"]), draw.randint(1, 30)), tmp_path / "copy")
    chain.live(("none", "at all", 1), tmp_path / "copy")


def test_there_are_thirty_distinct_points_at_least() -> None:
    kills = {(pipeline, *point) for pipeline, points in POINTS.items() for point in points}
    assert len([kill for kill in kills if kill[2] in ("before", "after")]) >= 30
