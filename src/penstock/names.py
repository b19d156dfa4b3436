"""The names of everything an application stores, and what an object can be called: the one place that knows.

Folders and numbers sort as text in the order of epochs, so a listing from a name on is a listing from an epoch on.
"""

from urllib.parse import quote

from penstock.errors import InvalidError

FORMAT = "format.json"
EPOCHS = "epochs"
SEGMENTS = "segments"
OUTBOX = "outbox"
PUBLISHED = "published"
RUNS = "runs"
SPARK = "spark"
PARTIAL = ".partial"
"""Where what is just being written lies; no object is called so."""
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


def folder_of(prefix: str) -> str:
    """A prefix as the beginning that the names in it share: "" for all, else with one "/" at the end."""
    if not prefix:
        return ""
    check_name(prefix.removesuffix("/"))
    return prefix.removesuffix("/") + "/"


def check_name(name: str) -> None:
    """Raise InvalidError if no object can be called so."""
    parts = name.split("/")
    if {"", ".", "..", PARTIAL}.isdisjoint(parts) and name.isprintable():
        return
    raise InvalidError(
        f"{name!r} cannot name an object; use a relative name like 'epochs/7.json', "
        f"without empty parts, '.', '..', '{PARTIAL}' and control characters"
    )


def check_range(name: str, start: int, end: int | None) -> None:
    """Raise InvalidError if no bytes of an object can be asked for so."""
    if end is None or 0 <= start <= end:
        return
    raise InvalidError(
        f"{name!r} has no range from {start} to {end}; ask for 0 <= start <= end, or a suffix without end"
    )


def missing(name: str, url: str) -> str:
    """What is said of an object that is not there."""
    return f"there is no object {name!r} in {url}"
