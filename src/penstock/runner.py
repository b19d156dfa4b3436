"""The in-process runner: the same plan and the same tasks as on Spark, one after the other, without a JVM."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from penstock.clock import Clock, IdFactory
from penstock.epochs.coordinator import Assignment, Coordinator, PlanShape
from penstock.epochs.protocol import Complete
from penstock.epochs.records import ControlRow, EpochRecord, SparkBatch
from penstock.errors import StorageError
from penstock.exchange import SCHEMA, rows_of_partition
from penstock.failures import ErrorPolicy
from penstock.plan import Plan, Source
from penstock.sinks import Sinks
from penstock.state.replica import Replicas, Shelf
from penstock.storage import Storage
from penstock.task import Program, TaskInput, TaskResult, run_task
from penstock.topics import Position, Slice, TopicLog

log = logging.getLogger(__name__)

MAX_EVENTS_PER_EPOCH = 1_000_000
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run needs to know beside its plan."""

    partitions: int
    snapshots: timedelta
    retain: int
    on_error: ErrorPolicy
    max_events_per_epoch: int = MAX_EVENTS_PER_EPOCH


@dataclass(frozen=True, slots=True)
class Answers:
    """What executing an epoch gives: the control rows of its tasks, and how far its sources were read."""

    rows: Sequence[ControlRow]
    positions: Mapping[str, Position]
    batch: SparkBatch | None = None


@dataclass(frozen=True, slots=True)
class NewEvents:
    """What an epoch is to read: slices by source step, and the positions behind them by the step's name."""

    slices: Mapping[int, tuple[Slice, ...]]
    positions: Mapping[str, Position]


class Run:
    """One run of an application, wherever its tasks are executed: from its claim to its end."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        storage: Storage,
        open_topic: Callable[[str], TopicLog],
        clock: Clock,
        ids: IdFactory,
    ) -> None:
        self._clock = clock
        self._feeds = [(s.work.feed, s.work.topic) for s in plan.steps if isinstance(s.work, Source) and s.work.feed]
        plan = plan.without_feeds()
        stages = plan.stages()
        shape = PlanShape(len(stages), settings.partitions, plan.stateful_steps())
        self.coordinator = Coordinator(storage, shape, clock, ids, settings.snapshots, settings.retain)
        self.program = Program(
            self.coordinator.history, tuple(plan.steps), stages, settings.partitions, settings.on_error
        )
        self._sinks = Sinks(storage, {s.name: s for s in plan.steps if s.is_sink}, open_topic)
        self._unpublished = self.coordinator.last
        self._publish()
        self._sinks.check(self.coordinator.records)

    def _publish(self) -> None:
        """Publish the last committed epoch, unless this run has done so; what failed is tried again here."""
        if self._unpublished is not None:
            self.coordinator.publish(self._unpublished, self._sinks.publish)
            self._unpublished = None

    def positions(self) -> dict[str, Position]:
        """From where each source is read on, by the name of its step."""
        committed = self.coordinator.view.positions
        return {name: committed.get(name) or _oldest(topic.log) for name, topic in self.program.topics().items()}

    def new_events(self, limit: int) -> NewEvents:
        """What is new in the sources, at most so many events of each."""
        for feed, topic in self._feeds:
            feed.refresh(topic, self._clock.now_ms())
        slices: dict[int, tuple[Slice, ...]] = {}
        ends: dict[str, Position] = {}
        topics, positions = self.program.topics(), self.positions()
        for step in self.program.steps:
            if step.name in topics:
                found, ends[step.name] = topics[step.name].log.slices(positions[step.name], limit)
                slices[step.id] = tuple(found)
        return NewEvents(slices, ends)

    def is_caught_up(self) -> bool:
        """Whether the sources hold nothing that is not committed."""
        return not any(self.new_events(1).slices.values())

    def perform(self, epoch: int, execute: Callable[[Assignment], Answers]) -> EpochRecord | None:
        """Have an epoch executed, commit it and publish it; None if it was committed before, and is published now."""
        self._publish()
        assignment = self.coordinator.assign(epoch)
        if assignment is None:
            return None
        for _ in range(MAX_ATTEMPTS):
            with self.coordinator.owning():
                answers = execute(assignment)
            checked = self.coordinator.check(answers.rows)
            if isinstance(checked, Complete):
                sinks = {ref.sink for row in checked.rows for ref in row.outbox}
                record = self.coordinator.commit(
                    assignment, checked, answers.positions, self._sinks.positions(sinks), answers.batch
                )
                self._unpublished = record
                self._publish()
                return record
            log.warning("epoch %d runs again: %s", epoch, checked.reason)
        raise StorageError(
            f"epoch {epoch} did not come to one answer per partition in {MAX_ATTEMPTS} attempts; try again"
        )


class Runner:
    """A run whose tasks are executed in this process, one after the other."""

    def __init__(self, run: Run, storage: Storage, shelf: Shelf, ids: IdFactory, max_events_per_epoch: int) -> None:
        self._run = run
        self._storage = storage
        self._shelf = shelf
        self._replicas = Replicas(storage, shelf)
        self._ids = ids
        self._limit = max_events_per_epoch

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of this run."""
        return self._run.coordinator

    def epoch(self) -> EpochRecord:
        """Run, commit and publish one epoch with what is new in the sources, even if nothing is."""
        record = self._run.perform(self.coordinator.view.epoch + 1, self._execute)
        assert record is not None, "the next epoch is never committed already"
        return record

    def is_caught_up(self) -> bool:
        """Whether the sources hold nothing that is not committed."""
        return self._run.is_caught_up()

    def close(self) -> None:
        """End the run: seal the replicas, say that it ended."""
        self._shelf.close()
        self.coordinator.end()

    def _execute(self, assignment: Assignment) -> Answers:
        new = self._run.new_events(self._limit)
        results = self._run_stages(assignment, new.slices)
        return Answers([result.control for result in results], new.positions)

    def _run_stages(self, assignment: Assignment, slices: Mapping[int, tuple[Slice, ...]]) -> list[TaskResult]:
        program = self._run.program
        results: list[TaskResult] = []
        for stage in program.stages:
            sent = [result.outgoing for result in results]
            rows = pa.concat_tables(sent) if sent else SCHEMA.empty_table()
            for partition in range(program.partitions):
                mine = rows_of_partition(rows, partition, program.partitions)
                given = TaskInput(stage.index, partition, slices, mine)
                results.append(run_task(program, assignment, given, self._storage, self._replicas, self._ids))
        return results


def _oldest(log: TopicLog) -> Position:
    """Where a topic begins."""
    first = next(log.segments_from(0), None)
    return Position() if first is None else Position(first.first, first.first)
