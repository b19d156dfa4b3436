"""A process that kills itself at a chosen write; run as a script it forks one for each line that it reads.

Forking from a process that has imported everything makes a life of such a process last some tens of milliseconds. The
process that forks opens nothing itself: neither threads nor local stores are carried over.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock import Application
from penstock.epochs import coordinator
from penstock.state.store import LmdbStore
from penstock.storage import Storage, open_storage
from penstock.testing import ManualClock, TestDriver

BATCHES = 4
EVENTS_PER_BATCH = 3
STEP, SOURCE, SINK = "sum", "numbers", "sums"


class Fuse:
    """Counts writes, and kills this process before or after a chosen one."""

    def __init__(self, die: int, when: str) -> None:
        self._die = die
        self._when = when
        self.writes = 0

    def __call__(self, write: Callable[[], Any]) -> Any:
        self.writes += 1
        self._burn("before")
        done = write()
        self._burn("after")
        return done

    def _burn(self, when: str) -> None:
        if (self.writes, when) == (self._die, self._when):
            os.kill(os.getpid(), signal.SIGKILL)


class Fused:
    """A storage whose writes go through a fuse."""

    def __init__(self, inner: Storage, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse
        self.read, self.list = inner.read, inner.list

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._fuse(lambda: self._inner.create(name, data)))

    def delete(self, names: list[str]) -> None:
        self._fuse(lambda: self._inner.delete(names))


def application() -> Application:
    app = Application("killed", partitions=2, retain=1, snapshots=timedelta(seconds=2))
    numbers = app.dataframe(app.topic(SOURCE))
    summed = numbers.stateful_map(STEP, lambda key, n, total: ([n, total + n], total + n), default=0)
    summed.to_topic(app.topic(SINK))
    return app


def live(folder: Path, die: int, when: str, seed: int) -> int:
    """Send what is missing, run until everything is done, end properly; returns how many writes there were."""
    fuse = Fuse(die, when)
    apply = LmdbStore.apply
    LmdbStore.apply = lambda store, tables, epoch: fuse(lambda: apply(store, tables, epoch))  # type: ignore[method-assign]
    clock = ManualClock()
    driver = TestDriver(
        application(),
        storage=Fused(open_storage(folder / "state"), fuse),
        topics=Fused(open_storage(folder / "topics"), fuse),
        local_dir=folder / "local",
        clock=clock,
        seed=seed,
    )
    for batch in range(BATCHES):
        clock.advance(timedelta(seconds=1))
        for number in range(len(driver.received(SOURCE)), EVENTS_PER_BATCH * (batch + 1)):
            driver.send(SOURCE, number, key=f"key {number % 4}")
        while driver.counts.read < EVENTS_PER_BATCH * (batch + 1):
            driver.epoch()
    driver.close()
    return fuse.writes


def warm_up() -> None:
    """Have everything imported that is imported late; without local stores, which must not be open in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        storages = (open_storage(Path(folder) / name) for name in ("state", "topics"))
        driver = TestDriver(application(), storage=next(storages), topics=next(storages))
        driver.send(SOURCE, 1, key="a")
        driver.epoch()
        driver.close()


def serve() -> None:
    coordinator.FULL_EVERY = 2
    os.fsync = lambda handle: None  # a killed process loses nothing that the system has
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writes = live(Path(request["folder"]), request["die"], request["when"], request["seed"])
                os.write(writer, b"%d" % writes)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        answer = os.read(reader, 100)
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(json.dumps({"status": status, "writes": int(answer or b"0")}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
