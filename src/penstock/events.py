"""The words that every other module speaks: event, headers, position."""

from typing import Any

import msgspec

Headers = tuple[tuple[str, bytes], ...]


class Event(msgspec.Struct, frozen=True):
    """One record: key, value, timestamp_ms, headers; and where it was read, if it was.

    >>> event = Event(key="anna", value={"amount": 3}, timestamp_ms=1000)
    >>> event.key, event.value, event.timestamp_ms, event.headers
    ('anna', {'amount': 3}, 1000, ())
    """

    key: Any
    value: Any
    timestamp_ms: int
    headers: Headers = ()
    topic: str = ""
    offset: int = -1
