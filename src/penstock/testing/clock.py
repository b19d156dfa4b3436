"""Time and ids that a test decides."""

import random
from datetime import timedelta

from penstock.clock import IdFactory


class ManualClock:
    """A clock that moves only when told to.

    >>> clock = ManualClock(start_ms=1_000)
    >>> clock.advance(500)
    >>> clock.advance(timedelta(seconds=2))
    >>> clock.now_ms()
    3500
    """

    def __init__(self, start_ms: int = 0) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        """The time it was last moved to."""
        return self._now_ms

    def advance(self, delta: timedelta | int) -> None:
        """Move by so much, an int being milliseconds; a negative delta moves back, as real clocks sometimes do."""
        delta_ms = delta // timedelta(milliseconds=1) if isinstance(delta, timedelta) else delta
        self._now_ms += delta_ms


def seeded_ids(seed: int) -> IdFactory:
    """Ids like those of `penstock.clock.random_ids`, the same ones in every run with the same seed.

    >>> first, second = seeded_ids(7), seeded_ids(7)
    >>> first() == second(), first() == first(), len(first())
    (True, False, 32)
    """
    source = random.Random(seed)
    return lambda: f"{source.getrandbits(128):032x}"
