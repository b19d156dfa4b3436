"""Two drivers on the same state, as real processes: the later one wins, the other stops and says so."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.storage import open_storage
from penstock.testing import TestDriver

LIFE = Path(__file__).parent / "life.py"
FIRST, MORE = 60, 120

_spec = importlib.util.spec_from_file_location("life", LIFE)
assert _spec is not None
assert _spec.loader is not None
life = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(life)


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(LIFE), str(folder), "rekeyed", "loop", "none", "before", "1", "0", "0"]
    environment = {**os.environ, **life.ENVIRONMENT}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does; an end of the process before that is told with its last words."""
    while not condition():
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        assert condition(), process.communicate()[1]


def last_epoch(folder: Path) -> int:
    records = (folder / "state" / life.GROUP / "epochs").glob("*.json")
    return max((int(record.name[:20]) for record in records), default=-1)


def outcome(folder: Path) -> tuple[object, list[object]]:
    """State and outputs by key, as they are."""
    app = life.application(folder, "rekeyed", at_once=1_000_000)
    driver = TestDriver(app, storage=open_storage(folder / "state" / life.GROUP), topics=app._broker)
    outputs = sorted((event.key, event.value, event.timestamp_ms) for event in driver.received("sums"))
    states = {step: dict(driver.state(step)) for step in life.STATE["rekeyed"]}
    driver.close()
    return states, outputs


def undisturbed(given: Path, folder: Path) -> tuple[object, list[object]]:
    """What one run makes of the same events, in one epoch."""
    shutil.copytree(given / "topics" / "numbers", folder / "topics" / "numbers")
    app = life.application(folder, "rekeyed", at_once=1_000_000)
    driver = TestDriver(app, storage=open_storage(folder / "state" / life.GROUP), topics=app._broker)
    driver.epoch()
    driver.close()
    return outcome(folder)


def test_a_driver_that_was_asleep_finds_another_one_at_work_and_stops(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    life.send(folder, range(FIRST))
    older = start(folder)
    newer = None
    try:
        wait_until(lambda: last_epoch(folder) >= 2, older)
        os.kill(older.pid, signal.SIGSTOP)  # somewhere: before, in the middle of, or after an epoch
        life.send(folder, range(FIRST, FIRST + MORE))
        newer = start(folder)
        wait_until(lambda: last_epoch(folder) >= 12, newer)
        os.kill(older.pid, signal.SIGCONT)  # from here on both are at work
        said = older.communicate(timeout=120)[1]
        ended = newer.communicate(timeout=120)[1]
    finally:
        for process in (older, newer):
            if process is not None:
                process.kill()
    assert newer.returncode == 0, ended
    assert older.returncode == 1, said
    assert "penstock.errors.ConflictError: " in said
    assert "run 2" in said
    assert outcome(folder) == undisturbed(folder, tmp_path / "undisturbed")


def test_of_two_drivers_started_at_once_one_wins(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    life.send(folder, range(FIRST + MORE))
    both = [start(folder), start(folder)]
    try:
        said = [process.communicate(timeout=240)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    # The one that claims later wins. The other stops, unless it had come to the end before that.
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 1], [0, 0]), said
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0 or "penstock.errors.ConflictError: " in text, text
    assert outcome(folder) == undisturbed(folder, tmp_path / "undisturbed")
