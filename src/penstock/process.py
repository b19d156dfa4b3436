"""Which process runs an application, and whether it still does."""

import os
import socket
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True):
    """A process, told apart from a later one with the same number by when it started."""

    host: str
    pid: int
    started: str


def this_process() -> Owner:
    """The process that asks.

    >>> is_running(this_process())
    True
    """
    return Owner(socket.gethostname(), os.getpid(), _start_of(os.getpid()) or "")


def is_running(owner: Owner) -> bool | None:
    """Whether a process is there; None if it is on another machine, so that nobody here can know.

    >>> is_running(Owner("another machine", 1, ""))
    """
    if owner.host != socket.gethostname():
        return None
    found = _start_of(owner.pid)
    return found is not None and found == owner.started


def this_boot() -> str:
    """What tells the time since this machine was started from the times before; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process of this machine started, in a form that says "the same" or "another"; None: it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _start_elsewhere(pid)
    state, *rest = stat.rpartition(")")[2].split()  # the name of the program, in brackets, may hold anything
    return None if state in "ZX" else f"{this_boot()} {rest[18]}"


def _start_elsewhere(pid: int) -> str | None:
    """For systems without /proc: a process of that number is taken for the same one."""
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is there, but not ours
    return ""
