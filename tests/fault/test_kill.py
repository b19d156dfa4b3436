"""Real processes, killed by the system before and after each of their writes, to durable storage and local stores."""

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killed.py")
MIN_POINTS = 30
seeds = count(1)


class Processes:
    """Starts processes on a folder, each forked off the one script that has imported everything."""

    def __init__(self) -> None:
        self._script = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def live(self, folder: Path, die: int = 0, when: str = "before") -> dict[str, int]:
        assert self._script.stdin is not None
        assert self._script.stdout is not None
        request = {"folder": str(folder), "die": die, "when": when, "seed": next(seeds)}
        self._script.stdin.write(json.dumps(request) + "\n")
        self._script.stdin.flush()
        answer: dict[str, int] = json.loads(self._script.stdout.readline())
        return answer

    def end(self) -> None:
        self._script.communicate()


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A killed process loses nothing that the system has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


def results(folder: Path) -> dict[str, Any]:
    """What the last process left, read by tools that know nothing of runs: state by key, and outputs by key."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import killed
    finally:
        sys.path.remove(str(SCRIPT.parent))
    from penstock.storage import open_storage
    from penstock.testing import TestDriver

    reader = TestDriver(
        killed.application(), storage=open_storage(folder / "state"), topics=open_storage(folder / "topics"), seed=0
    )
    outputs: dict[Any, list[Any]] = defaultdict(list)
    for event in reader.received(killed.SINK):
        outputs[event.key].append(event.value)
    numbers = [event.value for event in reader.received(killed.SOURCE)]
    return {"state": dict(reader.state(killed.STEP)), "outputs": dict(outputs), "numbers": numbers}


@pytest.fixture(scope="module")
def undisturbed(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = processes.live(folder)
    assert answer["status"] == 0
    assert answer["writes"] >= MIN_POINTS
    found = results(folder)
    assert found["numbers"] == list(range(12))
    assert found["state"] == {f"key {k}": sum(range(k, 12, 4)) for k in range(4)}
    return answer["writes"], found


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_at_any_write_is_continued_by_the_next(
    processes: Processes, undisturbed: tuple[int, dict[str, Any]], tmp_path: Path, when: str
) -> None:
    writes, expected = undisturbed
    for n in range(1, writes + 1):
        folder = tmp_path / str(n)
        killed = processes.live(folder, die=n, when=when)
        assert killed["status"] == -signal.SIGKILL, f"not killed {when} write {n} of {writes}: {killed}"
        assert processes.live(folder)["status"] == 0, f"killed {when} write {n} of {writes}"
        assert results(folder) == expected, f"killed {when} write {n} of {writes}"


def test_processes_killed_again_and_again_come_to_the_end(
    processes: Processes, undisturbed: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    """Each process gets a little further: killed before its n-th write, the next one before its n+1-th, and so on."""
    writes, expected = undisturbed
    for n in range(2, 3 * writes):
        if processes.live(tmp_path, die=n)["status"] == 0:
            break
    else:
        pytest.fail("no process came to the end")
    assert results(tmp_path) == expected, f"killed before writes 2 to {n - 1} of one process after the other"
