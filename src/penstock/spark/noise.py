"""What Spark's processes print: passed on line by line, except for what nobody who runs an application needs to see.

The Java process and, through it, the Python workers print to one pipe. So what a function of the user's prints in a
worker appears in order above the live view, instead of across it.
"""

import os
import re
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TextIO

MAX_HELD_LINES = 200
QUIET_SECONDS = 0.05
MAX_QUIET_WAITS = 20
_NOISE = re.compile(
    r"WARNING: Using incubator modules: "
    r"|WARNING: package .* not in java\.base"
    r"|Using Spark's default log4j profile: "
    r"|Setting default log level to "
    r"|To adjust logging level use sc\.setLogLevel"
    r"|Picked up JAVA_TOOL_OPTIONS: "
)
_TRACE = "Traceback (most recent call last):"
_IDLE_WORKER_ENDS = re.compile(
    r"(Traceback .*\n)(  File \".*pyspark/daemon\.py\", .*\n(    .*\n)*)+BrokenPipeError: .*\n?"
)
_CUT_SHORT = re.compile(r"(Traceback .*\n?)(  File \".*pyspark/daemon\.py\", .*\n?(    .*\n?)*)*")


def without_noise(lines: Iterable[str]) -> Iterator[str]:
    """The lines that are worth reading, in order.

    An idle worker that Spark closes prints a traceback of Spark's own daemon, and nothing is wrong with that; nor if
    it comes to its end before the traceback does.

    >>> list(without_noise(["WARNING: Using incubator modules: jdk.incubator.vector\\n", "hello\\n"]))
    ['hello\\n']
    >>> list(without_noise(["Traceback (most recent call last):\\n", '  File "/a/pyspark/daemon.py", line 9, in x\\n']))
    []
    """
    held: list[str] = []
    for line in lines:
        if held and line.startswith("  ") and len(held) < MAX_HELD_LINES:
            held.append(line)
            continue
        if held:
            whole = "".join([*held, line])
            if _IDLE_WORKER_ENDS.fullmatch(whole):
                held = []
                continue
            yield from held
            held = []
        if line.rstrip() == _TRACE:
            held = [line]
        elif not _NOISE.match(line):
            yield line
    if not _CUT_SHORT.fullmatch("".join(held)):
        yield from held


class Outlet:
    """A pipe whose lines are passed on to the error stream of this process, as long as it lives."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        self._reader = threading.Thread(target=self._pass_on, name="penstock-outlet", daemon=True)

    def open(self) -> None:
        """Begin, when the process that prints has been started."""
        os.close(self.write_end)
        self._reader.start()

    def drain(self) -> None:
        """Wait until what was printed so far has been passed on, or a second at most."""
        for _ in range(MAX_QUIET_WAITS):
            if not select.select([self._read], [], [], QUIET_SECONDS)[0]:
                return
            self._reader.join(QUIET_SECONDS)

    def _pass_on(self) -> None:
        with open(self._read, errors="replace", closefd=False) as lines:
            for line in without_noise(lines):
                stream: TextIO | None = sys.stderr
                if stream is not None:
                    stream.write(line)
                    stream.flush()
