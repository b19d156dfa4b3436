"""The in-process runner: the same plan and the same tasks as on Spark, one after the other, without a JVM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from penstock.clock import Clock, IdFactory
from penstock.epochs.coordinator import Assignment, Coordinator, PlanShape
from penstock.epochs.protocol import Complete
from penstock.epochs.records import EpochRecord
from penstock.exchange import SCHEMA, rows_of_partition
from penstock.failures import ErrorPolicy
from penstock.plan import Plan, Source
from penstock.sinks import Sinks
from penstock.state.replica import Replicas, Shelf
from penstock.storage import Storage
from penstock.task import Program, TaskInput, TaskResult, run_task
from penstock.topics import Position, Slice, TopicLog

MAX_EVENTS_PER_EPOCH = 1_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run needs to know beside its plan."""

    partitions: int
    snapshots: timedelta
    retain: int
    on_error: ErrorPolicy
    max_events_per_epoch: int = MAX_EVENTS_PER_EPOCH


class Runner:
    """One run of an application in this process."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        storage: Storage,
        shelf: Callable[[str, int], Shelf],
        open_topic: Callable[[str], TopicLog],
        clock: Clock,
        ids: IdFactory,
    ) -> None:
        stages = plan.stages()
        shape = PlanShape(len(stages), settings.partitions, plan.stateful_steps())
        self._coordinator = Coordinator(storage, shape, clock, ids, settings.snapshots, settings.retain)
        self._program = Program(
            self._coordinator.history, tuple(plan.steps), stages, settings.partitions, settings.on_error
        )
        self._limit = settings.max_events_per_epoch
        self._storage = storage
        self._ids = ids
        self._shelf: Shelf = shelf(self._coordinator.history, self._coordinator.run)
        self._replicas = Replicas(storage, self._shelf)
        self._sinks = Sinks(storage, {s.name: s for s in plan.steps if s.is_sink}, open_topic)
        last = self._coordinator.last
        if last is not None:
            self._coordinator.publish(last, self._sinks.publish)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of this run."""
        return self._coordinator

    def epoch(self) -> EpochRecord:
        """Run, commit and publish one epoch with what is new in the sources, even if nothing is."""
        assignment = self._coordinator.assign(self._coordinator.view.epoch + 1)
        assert assignment is not None, "the next epoch is never committed already"
        slices, positions = self._new_events()
        results = self._run_stages(assignment, slices)
        complete = self._coordinator.check([result.control for result in results])
        assert isinstance(complete, Complete), "in one process each task runs once"
        record = self._coordinator.commit(assignment, complete, positions, self._sinks.positions())
        self._coordinator.publish(record, self._sinks.publish)
        return record

    def is_caught_up(self) -> bool:
        """Whether the sources hold nothing that is not committed."""
        return not any(self._new_events()[0].values())

    def close(self) -> None:
        """End the run: seal the replicas, say that it ended."""
        self._shelf.close()
        self._coordinator.end()

    def _new_events(self) -> tuple[dict[int, tuple[Slice, ...]], dict[str, Position]]:
        slices: dict[int, tuple[Slice, ...]] = {}
        positions: dict[str, Position] = {}
        for step in self._program.steps:
            if not isinstance(step.work, Source):
                continue
            log: TopicLog = step.work.topic.log
            position = self._coordinator.view.positions.get(step.name) or _oldest(log)
            found, positions[step.name] = log.slices(position, self._limit)
            slices[step.id] = tuple(found)
        return slices, positions

    def _run_stages(self, assignment: Assignment, slices: Mapping[int, tuple[Slice, ...]]) -> list[TaskResult]:
        results: list[TaskResult] = []
        for stage in self._program.stages:
            sent = [result.outgoing for result in results]
            rows = pa.concat_tables(sent) if sent else SCHEMA.empty_table()
            for partition in range(self._program.partitions):
                mine = rows_of_partition(rows, partition, self._program.partitions)
                given = TaskInput(stage.index, partition, slices, mine)
                results.append(run_task(self._program, assignment, given, self._storage, self._replicas, self._ids))
        return results


def _oldest(log: TopicLog) -> Position:
    """Where a topic begins."""
    first = next(log.segments_from(0), None)
    return Position() if first is None else Position(first.first, first.first)
