"""A streaming query of Spark's whose batches are epochs: `foreachBatch` drives the protocol.

Invariants:
- A batch is one epoch. A query whose run is over leaves the next batch unstarted, for the next run.
- Whoever runs an epoch holds the runner's lock: epochs of several queries, and of the loop, come one after the other.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.epochs.records import EpochRecord
from penstock.errors import InvalidError, StorageError
from penstock.spark.engine import SparkRunner, spark_error

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """The run that a query belongs to: its name, what it is asked before each batch, and told after each epoch."""

    name: str
    is_over: Callable[[], bool]
    on_epoch: Callable[[EpochRecord], None]


class _StoppedError(Exception):
    """Ends a batch that Spark had planned when the run was already over: the next run takes it in."""


class EpochQuery(ABC):
    """A streaming query over some rows; what an epoch makes of a batch of them is up to its kind.

    `of` says what it brings, for its name on Spark's own page. `was_cut` tells that it was stopped from outside in the
    middle of an epoch.
    """

    def __init__(self, runner: SparkRunner, host: Host, rows: DataFrame, checkpoint: str, of: str) -> None:
        self.was_cut = False
        self.ends_by_itself = False
        self._runner = runner
        self._host = host
        writer = rows.writeStream.foreachBatch(self._batch).option("checkpointLocation", checkpoint)
        self._writer = writer.queryName(f"{host.name}: {of}")
        self._query: StreamingQuery | None = None
        self._stopping = False
        self._failure: BaseException | None = None

    @abstractmethod
    def _take_in(self, rows: DataFrame, number: int) -> EpochRecord | None:
        """Make a batch an epoch; None if it was one before."""

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        """Let Spark begin."""
        self.ends_by_itself = "availableNow" in trigger
        try:
            with self._runner.alone:  # no batch begins before it is known which query it belongs to
                self._query = self._writer.trigger(**trigger).start()
        except AnalysisException as error:
            raise InvalidError(f"Spark cannot run this DataFrame as a stream: {str(error).splitlines()[0]}") from None
        return self._query

    @property
    def is_active(self) -> bool:
        """Whether batches may still come; raises what ended the query if it failed."""
        assert self._query is not None, "start() comes first"
        if self._query.isActive:
            return True
        self.check()
        return False

    def check(self) -> None:
        """Raise what ended the query, if it failed; where it is to stop, that it did is no failure."""
        with self._runner.alone:  # the batch under way is over
            if self._failure is not None:
                raise self._failure
            failed = None if self._query is None or self._stopping else self._query.exception()
            if failed is not None:
                raise spark_error(failed, self._runner.run.coordinator.view.epoch + 1)

    def stop(self) -> None:
        """Stop between two epochs; if this is interrupted, at once."""
        self._stopping = True
        try:
            with self._runner.alone:
                pass  # the epoch under way is over
        finally:
            if self._query is not None:
                self._query.stop()

    def _batch(self, rows: DataFrame, number: int) -> None:
        with self._runner.alone:
            if self._stopping or self._host.is_over():
                self._stopping = True
                raise _StoppedError
            try:
                record = self._take_in(rows, number)
            except BaseException as error:
                self._note(error)
                raise
            if record is not None:
                self._host.on_epoch(record)

    def _note(self, error: BaseException) -> None:
        """Remember why a batch failed. Where Spark gave up its job because somebody stopped the query, nothing did."""
        assert self._query is not None, "start() waits until the query is known"
        if isinstance(error, StorageError) and not self._query.isActive:
            log.info("the streaming query was stopped in the middle of an epoch: %s", error)
            self._stopping = self.was_cut = True
            return
        self._failure = error
