"""SIGKILL on Spark: whatever dies and whenever, state and outputs are those of an undisturbed run.

The lives of an application make up a chain: each one goes on with what the one before left when it was killed, and is
then killed itself. What each kill left is also copied, brought to an end in this process, and compared. Two chains run
beside each other and beside other tests, as most of a life is waiting for Spark to start; a test looks at one life.
"""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.storage import open_storage
from penstock.testing import TestDriver

LIFE = Path(__file__).parent / "life.py"
EVENTS_PER_LIFE = 18
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
QUERIED = {("rekeyed", kind, when, 1) for kind in ("record", "publish") for when in ("before", "after")}
"""The lives in which a streaming query of Spark's brings the events; the loop goes on with what they leave."""


@dataclass
class Chain:
    """Lives of one application, one after the other, in one folder. What each left is copied, for whoever asks."""

    folder: Path
    pipeline: str
    lived: int = 0

    def live(self, point: Point) -> "Left":
        """One life on Spark. Nothing of it runs any more when this returns: every process of it holds the pipe."""
        first = EVENTS_PER_LIFE * self.lived
        self.lived += 1
        now = self.folder / "now"
        driven = "query" if (self.pipeline, *point) in QUERIED else "loop"
        command = [sys.executable, str(LIFE), str(now), self.pipeline, driven, *map(str, point), str(first)]
        ended = subprocess.run(
            [*command, str(first + EVENTS_PER_LIFE)],
            capture_output=True,
            text=True,
            timeout=LIFE_SECONDS,
            check=False,
            env={**os.environ, **life.ENVIRONMENT},
        )
        copy = self.folder / f"after {self.lived}"
        shutil.copytree(now, copy, ignore=shutil.ignore_patterns("local"))
        return Left(copy, self.pipeline, point, first + EVENTS_PER_LIFE, ended.returncode, ended.stderr)


@dataclass(frozen=True)
class Left:
    """What a life has left."""

    folder: Path
    pipeline: str
    point: Point
    sent: int
    code: int
    said: str

    def check(self) -> None:
        """It ended where it should, and brought to an end it is what an undisturbed run makes of the same events."""
        kind, when, _ = self.point
        killed = when in ("before", "after")
        assert self.code == (-signal.SIGKILL if killed else 0), f"{self.point} was not met: {self.said[-3000:]}"
        if when == "worker":
            assert (self.folder / f"{kind} died").exists()
        if not killed:  # what Spark itself left needs nothing more done: all that was sent is in it
            app = life.application(self.folder, self.pipeline)
            assert len(list(app.topic("sums", key="canonical").read())) == self.sent
        undisturbed = self.folder / "undisturbed"
        shutil.copytree(self.folder / "topics" / "numbers", undisturbed / "topics" / "numbers")
        assert finished(self.folder, self.pipeline) == finished(undisturbed, self.pipeline)
        shutil.rmtree(self.folder)


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
    """All chains, under way beside each other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-chains-")
        self._stopped = False
        self._workers = ThreadPoolExecutor(len(POINTS))
        self._lives: dict[tuple[str, Point], Future[Left]] = {
            (pipeline, point): Future() for pipeline, points in POINTS.items() for point in points
        }
        for pipeline in POINTS:
            self._workers.submit(self._run, Chain(Path(self._folder.name) / pipeline, pipeline))

    def _run(self, chain: Chain) -> None:
        (chain.folder / "now").mkdir(parents=True)
        for point in POINTS[chain.pipeline]:
            outcome = self._lives[chain.pipeline, point]
            try:
                assert not self._stopped, "the tests ended before"
                outcome.set_result(chain.live(point))
            except BaseException as error:
                outcome.set_exception(error)

    def left(self, pipeline: str, point: Point) -> Left:
        """What a life has left, once it is over."""
        return self._lives[pipeline, point].result()

    def close(self) -> None:
        self._stopped = True
        self._workers.shutdown()
        self._folder.cleanup()


_begun: list[Chains] = []


def begin() -> Callable[[], None]:
    """Begin before the first test of all runs, and say how to end: see tests/conftest.py."""
    _begun.append(Chains())
    return _begun[-1].close


@pytest.fixture(scope="module")
def chains() -> Chains:
    [running] = _begun
    return running


def _name(point: Point) -> str:
    kind, when, number = point
    return f"{when}-{kind}-{number}"


@pytest.mark.beside
@pytest.mark.parametrize(
    ("pipeline", "point"),
    [
        pytest.param(pipeline, point, id=f"{pipeline}-{_name(point)}")
        for pipeline in POINTS
        for point in POINTS[pipeline]
    ],
)
def test_killed_here_and_started_again_nothing_is_lost_or_doubled(chains: Chains, pipeline: str, point: Point) -> None:
    chains.left(pipeline, point).check()


@pytest.mark.soak
def test_killed_at_twenty_writes_taken_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "3"))
    print(f"PENSTOCK_SEED={seed}")  # noqa: T201
    draw = random.Random(seed)
    chain = Chain(tmp_path, "rekeyed")
    (tmp_path / "now").mkdir()
    for _ in range(20):
        chain.live(("any", draw.choice(["before", "after"]), draw.randint(1, 30))).check()
    chain.live(("none", "at all", 1)).check()


def test_there_are_thirty_distinct_points_at_least() -> None:
    kills = {(pipeline, *point) for pipeline, points in POINTS.items() for point in points}
    assert len([kill for kill in kills if kill[2] in ("before", "after")]) >= 30
    assert len(QUERIED & kills) == len(QUERIED) == 4
