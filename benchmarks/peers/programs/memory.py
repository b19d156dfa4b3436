"""How much memory the Python workers of a run take, apart from the page cache."""

import threading
from pathlib import Path

LOOK_SECONDS = 0.25


def anonymous_mb(pid: str) -> float:
    """The memory of a process that is no file's, in MB; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))


def workers() -> list[str]:
    """The Python processes that Spark's daemon has forked, on this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if b"pyspark.daemon" in command and b"pyspark.daemon" in above:
            found.append(folder.name)
    return found


class Watch:
    """Notes the largest worker while it is open."""

    def __init__(self) -> None:
        self.largest_mb = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.largest_mb = max([self.largest_mb, *map(anonymous_mb, workers())])

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
