"""The one place where time and randomness enter; everything that decides or stores is handed them from here."""

import time
import uuid
from collections.abc import Callable
from typing import Protocol

IdFactory = Callable[[], str]
"""A function whose every result differs from every other, and is fit to be part of an object's name."""


class Clock(Protocol):
    """What time it is.

    >>> from penstock.testing import ManualClock
    >>> clock: Clock = ManualClock(start_ms=5)
    >>> clock.now_ms()
    5
    """

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The clock of this machine.

    >>> SystemClock().now_ms() > 1_600_000_000_000
    True
    """

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as this machine believes; it may step back when corrected."""
        return time.time_ns() // 1_000_000


def random_ids() -> IdFactory:
    """Ids of 32 hexadecimal characters that differ between calls, processes and machines.

    >>> new_id = random_ids()
    >>> len(new_id()), new_id() == new_id()
    (32, False)
    """
    return lambda: uuid.uuid4().hex
