"""One life of an application on Spark: it starts, goes on with what it finds, and is killed at a chosen write.

As a script: `life.py FOLDER PIPELINE DRIVEN KIND WHEN NUMBER FIRST END`. DRIVEN says by what: the "loop" or a "query".
KIND is the kind of a write (see `KINDS`), a step whose worker is to die, or "none"; WHEN is "before" or "after"; NUMBER
counts the writes of that kind from 1, in all processes of this life. Before it begins it sends the numbers from FIRST
to before END, for itself and those after it.

A write of a task happens in one of Spark's Python workers. It takes the driver with it and dies too; the JVM and the
other workers find out by themselves, so for a moment tasks of a dead run are still under way, as on a real machine.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import Application
from penstock.epochs import coordinator
from penstock.storage import Storage

GROUP = "lives"
PARTITIONS = 2
KEYS = 5
EVENTS_PER_EPOCH = 6
STATE = {"single": ("sum",), "rekeyed": ("sum", "parity sum")}
ENVIRONMENT = {
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # a life is short: it is all start-up
    "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false pyspark-shell",
}
KINDS = {
    "format": r"format\.json",
    "claim": r"runs/\d+\.json",
    "segment": r"segments/sum/.*",
    "second segment": r"segments/parity[^/]*/.*",
    "outbox": r"outbox/.*",
    "record": r"epochs/\d+\.json",
    "full record": r"epochs/\d+\.full\.json",
    "publish": r"sums/.*",
    "mark": r"published/.*",
    "delete": r"delete .*",
    "end": r"runs/\d+\.ended",
    "any": r".*",
}
"""What the names of the objects look like that writes of a kind make."""


class Fuse:
    """Counts writes of a kind over all processes, and kills driver and writer before or after a chosen one."""

    def __init__(self, folder: Path, kind: str, when: str, number: int) -> None:
        self._counter = folder / "writes"
        self._pattern = KINDS.get(kind)
        self._when = when
        self._number = number
        self._driver = os.getpid()

    def is_due(self, name: str) -> bool:
        """Whether this is the chosen write. A byte appended to a file is a count that all processes share."""
        if self._pattern is None or not re.fullmatch(self._pattern, name):
            return False
        file = os.open(self._counter, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size == self._number
        finally:
            os.close(file)

    def burn(self, when: str) -> None:
        if when == self._when:
            os.kill(self._driver, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


class Fused:
    """A storage whose writes go through a fuse."""

    def __init__(self, inner: Storage, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.read(name, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._inner.list(prefix, after)

    def create(self, name: str, data: bytes) -> bool:
        due = self._fuse.is_due(name)
        if due:
            self._fuse.burn("before")
        done = self._inner.create(name, data)
        if due:
            self._fuse.burn("after")
        return done

    def delete(self, names: Sequence[str]) -> None:
        due = bool(names) and self._fuse.is_due(f"delete {names[0]}")
        if due:
            self._fuse.burn("before")
        self._inner.delete(names)
        if due:
            self._fuse.burn("after")


def application(
    folder: Path, pipeline: str, fuse: Fuse | None = None, dying: str = "", at_once: int = EVENTS_PER_EPOCH
) -> Application:
    """Sums per key; "rekeyed" sums them once more by parity, behind a shuffle. `dying` is the step that kills once."""

    def die_once(step: str) -> None:
        if step != dying:
            return
        try:
            (folder / f"{step} died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def add(key: Any, n: int, total: int) -> tuple[int, int]:
        if total:  # not with the first event
            die_once("sum")
        return total + n, total + n

    def add_parity(key: Any, n: int, seen: list[int]) -> tuple[list[int], list[int]]:
        if seen[0]:
            die_once("parity sum")
        seen = [seen[0] + 1, seen[1] + n]
        return seen, seen

    app = Application(
        GROUP,
        folder / "topics",
        folder / "state",
        folder / "local",
        partitions=PARTITIONS,
        max_events_per_epoch=at_once,
        retain=2,
    )
    if fuse is not None:
        app._state, app._broker = Fused(app._state, fuse), Fused(app._broker, fuse)
    stream = app.dataframe(app.topic("numbers")).stateful_map("sum", add, default=0)
    if pipeline == "rekeyed":
        stream = stream.key_by("parity", lambda n: n % 2).stateful_map("parity sum", add_parity, default=[0, 0])
    stream.to_topic(app.topic("sums", key="canonical"))
    return app


def send(folder: Path, numbers: range) -> None:
    with application(folder, "single").topic("numbers").producer() as send_one:
        for n in numbers:
            send_one(n, key=f"k{n % KEYS}", timestamp_ms=n)


def main() -> None:
    folder, (pipeline, driven, kind, when, number, first, end) = Path(sys.argv[1]), sys.argv[2:9]
    coordinator.FULL_EVERY = 2  # so that each life gets to tidying up
    send(folder, range(int(first), int(end)))
    (folder / "writes").unlink(missing_ok=True)
    fuse = Fuse(folder, kind, when, int(number))
    app = application(folder, pipeline, fuse, dying=kind)
    app.run(until="caught-up", master="local[2]", streaming_query=driven == "query")


if __name__ == "__main__":
    main()
