"""The names of everything an application stores: the one place that knows them.

Folders and numbers sort as text in the order of epochs, so a listing from a name on is a listing from an epoch on.
"""

from urllib.parse import quote

FORMAT = "format.json"
EPOCHS = "epochs"
SEGMENTS = "segments"
OUTBOX = "outbox"
PUBLISHED = "published"
RUNS = "runs"
SPARK = "spark"
FULL_SUFFIX = ".full.json"


def as_part(name: str) -> str:
    """A name that users chose, as one part of the name of an object or a path, and of no other name's.

    >>> as_part("orders/by customer"), as_part("..")
    ('orders%2Fby customer', '%2E.')
    """
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E", 1) if quoted.startswith(".") else quoted


def epoch_record(epoch: int) -> str:
    """The record whose creation is the commit of an epoch."""
    return f"{EPOCHS}/{epoch:020d}.json"


def full_record(epoch: int) -> str:
    """The whole state of the application as of an epoch."""
    return f"{EPOCHS}/{epoch:020d}{FULL_SUFFIX}"


def segment(step: str, partition: int, epoch: int, attempt: str) -> str:
    """A segment of one partition of a step, unique to the attempt that wrote it."""
    return f"{SEGMENTS}/{as_part(step)}/{partition:05d}/{epoch:020d}-{attempt}.parquet"


def outbox(sink: str, partition: int, epoch: int, attempt: str) -> str:
    """What one partition gives to a sink in an epoch, unique to the attempt that wrote it."""
    return f"{OUTBOX}/{as_part(sink)}/{epoch:020d}-{partition:05d}-{attempt}.parquet"


def published(sink: str, epoch: int) -> str:
    """The mark that a sink has published an epoch."""
    return f"{PUBLISHED}/{as_part(sink)}/{epoch:020d}"


def run(number: int) -> str:
    """The claim of a run on the application."""
    return f"{RUNS}/{number:020d}.json"


def ended(number: int) -> str:
    """The mark that a run ended by itself."""
    return f"{RUNS}/{number:020d}.ended"


def number_of(name: str) -> int:
    """The epoch (of a run: its number) that a name begins with.

    >>> number_of(segment("totals", 3, 42, "a1"))
    42
    """
    return int(name.rsplit("/", 1)[-1][:20])
