"""A streaming query of Spark's whose batches are epochs: `foreachBatch` drives the protocol.

Invariants:
- A batch is one epoch. A query that is to stop leaves the next batch unstarted, for the next run.
- Whoever runs an epoch holds the runner's lock: epochs of several queries, and of the loop, come one after the other.
"""

from abc import ABC, abstractmethod
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import InvalidError
from penstock.spark.engine import SparkRunner, spark_error


class _StoppedError(Exception):
    """Ends a batch that Spark had planned when the query was already to stop: the next run takes it in."""


class EpochQuery(ABC):
    """A streaming query over some rows; what an epoch makes of a batch of them is up to its kind.

    `of` says what it brings, for its name on Spark's own page.
    """

    def __init__(self, runner: SparkRunner, rows: DataFrame, checkpoint: str, of: str) -> None:
        self._runner = runner
        writer = rows.writeStream.foreachBatch(self._batch).option("checkpointLocation", checkpoint)
        self._writer = writer.queryName(f"{runner.name}, run {runner.run.coordinator.run}: {of}")
        self.ends_by_itself = False
        self._query: StreamingQuery | None = None
        self._stopping = False
        self._failure: BaseException | None = None

    @abstractmethod
    def _take_in(self, rows: DataFrame, number: int) -> None:
        """Make a batch an epoch."""

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        """Let Spark begin."""
        self.ends_by_itself = "availableNow" in trigger
        try:
            self._query = self._writer.trigger(**trigger).start()
        except AnalysisException as error:
            raise InvalidError(f"Spark cannot run this DataFrame as a stream: {str(error).splitlines()[0]}") from None
        return self._query

    @property
    def is_active(self) -> bool:
        """Whether batches may still come; raises what ended the query if it failed."""
        assert self._query is not None, "start() comes first"
        active = bool(self._query.isActive)
        if not active:
            self._raise()
        return active

    def stop(self) -> None:
        """Stop between two epochs."""
        with self._runner.alone:
            self._stopping = True
        if self._query is not None:
            self._query.stop()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
        failed = None if self._query is None else self._query.exception()
        if failed is not None:
            raise spark_error(failed, self._runner.run.coordinator.view.epoch + 1)

    def _batch(self, rows: DataFrame, number: int) -> None:
        with self._runner.alone:
            if self._stopping:
                raise _StoppedError
            try:
                self._take_in(rows, number)
            except BaseException as error:
                self._failure = error
                raise
