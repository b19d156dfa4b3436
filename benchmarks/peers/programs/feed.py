"""Sends payments at a steady pace, each with the time at which it was sent: for measuring how long outputs take."""

import json
import time
from collections.abc import Callable

from benchmarks.peers.job import Job, number_of

PER_SECOND = 1_000
BURST = 20
WARM_UP = 10_000
"""So many of the first events are left out: ten seconds, in which Java compiles what it runs often."""
PACE = {"events_per_second": PER_SECOND, "events_per_burst": BURST, "warm_up_events": WARM_UP}


def send_steadily(job: Job, send: Callable[[list[bytes]], None], wait: Callable[[], None]) -> None:
    """So many events a second in small bursts; a burst that comes late does not delay those behind it.

    After the first burst `wait` is called, until its outputs are there: to start an engine is no latency.
    """
    values = sorted((value for lane in range(job.cores) for value in job.lane(lane)), key=number_of)
    began = time.monotonic()
    for start in range(0, len(values), BURST):
        if start == BURST:
            wait()
            began = time.monotonic()
        time.sleep(max(0.0, began + start / PER_SECOND - time.monotonic()))
        sent = b',"sent_us":%d}' % (time.time_ns() // 1_000)
        send([value[:-1] + sent for value in values[start : start + BURST]])


def sent_ms(value: bytes) -> float:
    """When an output's payment was sent.

    >>> sent_ms(b'{"payment":1,"sent_us":2500}')
    2.5
    """
    return float(json.loads(value)["sent_us"]) / 1_000
