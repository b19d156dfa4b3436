"""How many events Spark's own sources hold that no epoch has taken in, as far as they tell."""

from collections.abc import Sequence

import msgspec
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SourceProgress,
    StreamingQueryListener,
)

_decode = msgspec.json.Decoder(dict[str, dict[str, int]]).decode


class Lag(StreamingQueryListener):
    """Listens to the progress of one query; a session may run others."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.events: int | None = None

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - the name is Spark's
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - the name is Spark's
        """Look how far the sources are, after each batch."""
        if str(event.progress.runId) == self._run_id:
            self.events = events_behind(event.progress.sources)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - the name is Spark's
        """Nothing is new."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - the name is Spark's
        """What was known last stays known."""


def events_behind(sources: Sequence[SourceProgress]) -> int | None:
    """The events between what was read and what is there; None if a source does not tell, or counts no events.

    Kafka tells: its offsets are numbers by topic and partition.

    >>> from pyspark.sql.streaming.listener import SourceProgress
    >>> read, there = '{"orders":{"0":5,"1":7}}', '{"orders":{"0":9,"1":7}}'
    >>> kafka = SourceProgress("KafkaV2[Subscribe[orders]]", "", read, there, 3, 0.0, 0.0, {})
    >>> events_behind([kafka])
    4
    >>> events_behind([kafka, SourceProgress("RateStreamV2", "", "5", "null", 3, 0.0, 0.0, {})]) is None
    True
    """
    total = 0
    for source in sources:
        try:
            read, there = _decode(source.endOffset), _decode(source.latestOffset)
        except (msgspec.MsgspecError, TypeError):
            return None
        ends = [(topic, part, end) for topic, parts in there.items() for part, end in parts.items()]
        total += sum(end - read.get(topic, {}).get(part, 0) for topic, part, end in ends)
    return total
