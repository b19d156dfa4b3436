"""One stage of one partition in one epoch: from its inputs to a control row.

Invariants:
- A task reads committed state only, and writes under names of its own attempt only: it can die, or run twice.
- Nothing it returns or writes counts before the epoch's record is created.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import names
from penstock.batches import Batch, copied, joined
from penstock.clock import IdFactory
from penstock.epochs.compaction import compact
from penstock.epochs.coordinator import Assignment
from penstock.epochs.records import Compacted, ControlRow, Counts, OutboxRef
from penstock.errors import InvalidError
from penstock.exchange import SCHEMA, Outgoing, in_key_order
from penstock.failures import ErrorPolicy, Failures, Original
from penstock.inputs import Input, exchange_origin, find_original, original_row, read_exchange, read_topic, together
from penstock.logic import StatefulOpOperator
from penstock.operators import CallOperator, Operator, Scope, StatefulMapOperator
from penstock.outputs import SinkOutput, encode_batch, letters_table
from penstock.plan import DEAD_LETTER, Call, Concat, Frame, Rekey, Source, Stage, StatefulMap, StatefulOp, Step
from penstock.sinks import outbox_origin
from penstock.state.codec import Codec, value_codec
from penstock.state.key_table import KeyTable, number_keys
from penstock.state.keys import decode_key, encode_key, encode_text_keys, group_range, key_groups
from penstock.state.overlay import KeyedState
from penstock.state.replica import Replicas
from penstock.state.segments import SegmentRef, write_segment
from penstock.state.store import NO_EPOCH, Store
from penstock.storage import Storage, settle
from penstock.topics import Slice, Topic, topic_segment

CROSSING = value_codec("msgpack")
"""How values go on to a later stage where nobody said otherwise."""
COPY = "copy of the value for another branch"


@dataclass(frozen=True, slots=True)
class Program:
    """What every task of an application knows."""

    history: str
    steps: tuple[Step, ...]
    stages: tuple[Stage, ...]
    partitions: int
    on_error: ErrorPolicy

    def topics(self) -> dict[str, Topic]:
        """The topic that each source step reads, by the step's name."""
        return {step.name: step.work.topic for step in self.steps if isinstance(step.work, Source)}

    def sources(self) -> dict[int, str]:
        """The name of what each source step reads: its topic, or for a frame the step itself."""
        found = {step.id: step.work.topic.name for step in self.steps if isinstance(step.work, Source)}
        return found | {step.id: step.name for step in self.steps if isinstance(step.work, Frame)}


@dataclass(frozen=True, slots=True)
class TaskInput:
    """What one task is given: slices of topics by source step, and the rows that earlier stages sent to it."""

    stage: int
    partition: int
    slices: Mapping[int, tuple[Slice, ...]]
    rows: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task gives back: its control row, and what it sends on to later stages."""

    control: ControlRow
    outgoing: pa.Table


def run_task(
    program: Program, assignment: Assignment, given: TaskInput, storage: Storage, replicas: Replicas, ids: IdFactory
) -> TaskResult:
    """Run one stage of one partition in one epoch."""
    with _no_collector():
        return _Task(program, assignment, given, storage, replicas, ids).run()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's cycle collector, which would walk through a million live events again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Task:
    def __init__(
        self,
        program: Program,
        assignment: Assignment,
        given: TaskInput,
        storage: Storage,
        replicas: Replicas,
        ids: IdFactory,
    ) -> None:
        self._program = program
        self._assignment = assignment
        self._given = given
        self._storage = storage
        self._replicas = replicas
        self._ids = ids
        self._stage = program.stages[given.stage]
        self._groups = group_range(given.partition, program.partitions)
        self._failures = Failures(program.on_error, self._original)
        self._outgoing = Outgoing(given.partition)
        self._keyed: dict[str, KeyedState] = {}

    def run(self) -> TaskResult:
        """Read, run the steps, write; return what was written."""
        stores = self._stores()
        inputs = self._read_inputs()
        table, numbers = number_keys([one.keys for one in inputs], self._groups)
        flow = self._flow(table, stores)
        for batches in together(inputs, numbers, self._failures):
            flow.feed(batches)
        flow.finish()
        sources = [one for one in inputs if isinstance(one.step.work, Source | Frame)]
        read = sum(len(one) + one.refused for one in sources)
        highest_ms = {one.step.name: int(one.times.max()) for one in sources if len(one)}
        # What is not needed any more makes room: inputs for outputs, and those for segments that are to be merged.
        inputs.clear()
        sources.clear()
        return TaskResult(self._control(flow, read, highest_ms), self._outgoing.table())

    def _read_inputs(self) -> list[Input]:
        """What enters at each step: slices of a topic, or rows, which have one order among all steps they enter at."""
        entries = [self._program.steps[entry] for entry in self._stage.entries]
        rows = SCHEMA.empty_table() if self._given.rows is None else in_key_order(self._given.rows)
        origin = exchange_origin(rows, self._program.sources())
        inputs = []
        for step in entries:
            if isinstance(step.work, Source):
                slices = self._given.slices.get(step.id, ())
                inputs.append(read_topic(step, step.work.topic, slices, self._groups, self._failures))
            else:
                inputs.append(read_exchange(step, rows, _codec_behind(step), origin))
        return inputs

    def _stores(self) -> dict[str, Store]:
        """The state of each step as of the epoch before. It comes first: to catch up takes memory of its own."""
        view, partition, oldest = self._assignment.view, self._given.partition, self._assignment.oldest_epoch
        return {
            step.name: self._replicas.at(step.name, partition, view.epoch, view.of(step.name, partition), oldest)
            for step in self._stage.steps
            if step.state is not None
        }

    def _flow(self, table: KeyTable, stores: Mapping[str, Store]) -> "_Flow":
        assignment = self._assignment
        scope = Scope(
            assignment.epoch,
            table,
            self._failures,
            assignment.clock_ms,
            assignment.clock_ms if assignment.view.epoch == NO_EPOCH else assignment.view.clock_ms,
            assignment.watermark_ms,
        )
        for step in self._stage.steps:
            if step.state is not None:
                self._keyed[step.name] = KeyedState(step.name, stores[step.name], table, step.state)
        return _Flow(self._program, self._stage, scope, self._keyed, self._outgoing)

    def _control(self, flow: "_Flow", read: int, highest_ms: dict[str, int]) -> ControlRow:
        outbox = [*self._write_outputs(flow), *self._write_letters()]
        dead = len(self._failures.letters)
        return ControlRow(
            stage=self._given.stage,
            partition=self._given.partition,
            deltas=dict(self._write_deltas()),
            compacted=dict(self._compact()),
            outbox=tuple(outbox),
            highest_ms=highest_ms,
            counts=Counts(read, sum(ref.rows for ref in outbox) - dead, self._failures.skipped, dead),
        )

    def _write_deltas(self) -> Iterator[tuple[str, SegmentRef]]:
        epoch = self._assignment.epoch
        for step, keyed in self._keyed.items():
            try:
                delta = keyed.delta()
            except InvalidError as error:
                raise InvalidError(f"step {step!r}: {error}") from error
            if delta is not None:
                name = names.segment(step, self._given.partition, epoch, self._ids())
                yield step, write_segment(self._storage, name, [delta], range(epoch, epoch + 1), snapshot=False)

    def _compact(self) -> Iterator[tuple[str, Compacted]]:
        partition, assignment = self._given.partition, self._assignment
        for step in self._keyed:
            run = assignment.compact.get(step, {}).get(partition)
            if run:
                pa.default_memory_pool().release_unused()  # what Arrow keeps for more of the same is of little use now
                oldest = run[0] == assignment.view.of(step, partition)[0]
                name = names.segment(step, partition, assignment.epoch, self._ids())
                yield step, compact(self._storage, name, run, oldest, assignment.oldest_epoch)

    def _write_outputs(self, flow: "_Flow") -> Iterator[OutboxRef]:
        while flow.outputs:
            output = flow.outputs.pop(min(flow.outputs))
            table = output.table()
            if table is not None:
                yield self._write_outbox(output.step.name, table)

    def _write_letters(self) -> Iterator[OutboxRef]:
        letters = self._failures.letters
        for topic in sorted({letter.topic for letter in letters}):
            yield self._write_outbox(DEAD_LETTER + topic, letters_table([one for one in letters if one.topic == topic]))

    def _write_outbox(self, sink: str, table: pa.Table) -> OutboxRef:
        stage, partition, epoch = self._given.stage, self._given.partition, self._assignment.epoch
        origin = outbox_origin(self._program.history, sink, epoch, stage, partition)
        data, checksum = topic_segment(table, origin)
        name = names.outbox(sink, partition, epoch, self._ids())
        stands = settle(self._storage, name, data)
        assert stands == data, f"the name {name} was given to two attempts"
        return OutboxRef(sink, stage, partition, name, table.num_rows, len(data), checksum)

    def _original(self, topic: str, offset: int) -> Original:
        works = (step.work for step in self._program.steps)
        logs = [work.topic.log for work in works if isinstance(work, Source) and work.topic.name == topic]
        if logs:
            return find_original(logs[0], offset)
        assert self._given.rows is not None, "what comes from no topic came as rows"
        source = next(id_ for id_, name in self._program.sources().items() if name == topic)
        return original_row(self._given.rows, source, offset)


def _codec_behind(step: Step) -> Codec:
    return step.work.value if isinstance(step.work, Rekey | Frame) else CROSSING


class _Flow:
    """The steps of a stage, wired: batches go in, and come out at sinks and exits."""

    def __init__(
        self, program: Program, stage: Stage, scope: Scope, keyed: Mapping[str, KeyedState], outgoing: Outgoing
    ) -> None:
        self._scope = scope
        self._steps = [step for step in stage.steps if not isinstance(step.work, Source | Frame)]
        self._exits = {step for step in stage.exits if not isinstance(program.steps[step].work, Rekey)}
        self._program = program
        self._outgoing = outgoing
        self._operators: dict[int, Operator] = {}
        self.outputs: dict[int, SinkOutput] = {}
        for step in self._steps:
            if step.is_sink:
                self.outputs[step.id] = SinkOutput(step, scope.table, scope.failures)
            elif not isinstance(step.work, Rekey | Concat):
                self._operators[step.id] = _operator(step, scope, keyed.get(step.name))
        last = {source: step.id for step in self._steps for source in step.inputs}
        self._copied = {
            (source, step.id)
            for step in self._steps
            for source in step.inputs
            if last[source] != step.id and not step.is_sink
        }

    def feed(self, batches: dict[int, Batch]) -> None:
        """Run batches of one origin, each the output of an entry step, through the steps behind."""
        for entry in batches:
            self._leave(entry, batches[entry])
        for step in self._steps:
            found = self._gather(step, batches)
            if found is not None:
                self._run(step, found, batches)

    def finish(self) -> None:
        """Let each step send what it has at the end of the epoch, and the steps behind it work on that."""
        batches: dict[int, Batch] = {}
        for step in self._steps:
            found = self._gather(step, batches)
            if found is not None:
                self._run(step, found, batches)
            operator = self._operators.get(step.id)
            last = None if operator is None else operator.finish()
            if last is not None:
                self._leave(step.id, last)
                batches[step.id] = joined([batches[step.id], last]) if step.id in batches else last

    def _gather(self, step: Step, batches: dict[int, Batch]) -> Batch | None:
        found = []
        for place, source in enumerate(step.inputs):
            batch = batches.get(source)
            if batch is None or not len(batch):
                continue
            copies = (source, step.id) in self._copied or source in step.inputs[:place]
            found.append(self._copy(step, batch) if copies else batch)
        return joined(found) if found else None

    def _copy(self, step: Step, batch: Batch) -> Batch:
        """The events with values of their own; those whose value cannot be copied go to the error policy."""
        try:
            return batch.with_values([copied(value) for value in batch.values])
        except Exception:  # one of them: find out which
            values, places = [], []
            for place, value in enumerate(batch.values):
                try:
                    values.append(copied(value))
                    places.append(place)
                except Exception as error:
                    self._scope.failures.handle(step.name, COPY, error, self._key(batch, place), batch, place)
            return batch.take(values, places)

    def _key(self, batch: Batch, place: int) -> Any:
        return self._scope.table.keys[batch.keys[place]]

    def _run(self, step: Step, batch: Batch, batches: dict[int, Batch]) -> None:
        if step.is_sink:
            self.outputs[step.id].add(batch)
        elif isinstance(step.work, Rekey):
            self._rekey(step, step.work, batch)
        else:
            operator = self._operators.get(step.id)
            batches[step.id] = out = batch if operator is None else operator.process(batch)
            self._leave(step.id, out)

    def _leave(self, step: int, batch: Batch) -> None:
        """Send a step's outputs to the later stages that need them, before a step of this stage can change them."""
        if step not in self._exits or not len(batch):
            return
        sent, failures = batch, self._scope.failures
        name = self._program.steps[step].name
        batch, values = encode_batch(name, batch, CROSSING, failures, lambda place: self._key(sent, place))
        table = self._scope.table
        keys = pa.array([table.prefixes[k][2:] or None for k in batch.keys.tolist()], pa.binary())
        self._outgoing.add(step, batch, keys, table.groups[batch.keys], values)

    def _rekey(self, step: Step, work: Rekey, batch: Batch) -> None:
        new, places = self._new_keys(step, work, batch)
        forms, kept = self._canonical(step, work, batch, new, places)
        if len(kept) < len(batch):
            batch = batch.take([batch.values[i] for i in kept], kept)
        numbered = Batch(batch.values, np.arange(len(forms)), batch.times, batch.rows, batch.headers, batch.origin)
        failures = self._scope.failures
        sent, values = encode_batch(
            step.name, numbered, work.value, failures, lambda place: decode_key(forms[place].as_py())
        )
        keys = forms if len(sent) == len(forms) else forms.take(pa.array(sent.keys))
        distinct = keys.dictionary_encode()  # events of a batch often share their new key
        groups = key_groups(distinct.dictionary.to_numpy(zero_copy_only=False).tolist())
        self._outgoing.add(step.id, sent, keys, groups[distinct.indices.to_numpy()], values)

    def _new_keys(self, step: Step, work: Rekey, batch: Batch) -> tuple[list[Any], list[int]]:
        """What the function gives as new keys, and the places of those events; where it fails is handled."""
        fn = work.fn
        new: list[Any] = []
        failed: list[int] = []
        while len(new) + len(failed) < len(batch):
            try:
                for value in islice(batch.values, len(new) + len(failed), None):
                    new.append(fn(value))
            except Exception as error:
                place = len(new) + len(failed)
                self._scope.failures.handle(step.name, fn, error, self._key(batch, place), batch, place)
                failed.append(place)
        return new, np.delete(np.arange(len(batch)), failed).tolist()

    def _canonical(
        self, step: Step, work: Rekey, batch: Batch, new: Sequence[Any], places: list[int]
    ) -> tuple[pa.Array, list[int]]:
        """The canonical forms of new keys, and the places of the events that have one; the others are handled."""
        if set(map(type, new)) == {str}:
            with suppress(InvalidError, UnicodeEncodeError):  # one of them is no key: find out which
                return encode_text_keys(pa.array(new, pa.string())), places
        forms: list[bytes] = []
        kept: list[int] = []
        for key, place in zip(new, places, strict=True):
            try:
                forms.append(encode_key(key))
                kept.append(place)
            except Exception as error:
                self._scope.failures.handle(step.name, work.fn, error, self._key(batch, place), batch, place)
        return pa.array(forms, pa.binary()), kept


def _operator(step: Step, scope: Scope, keyed: KeyedState | None) -> Operator:
    work = step.work
    if isinstance(work, Call):
        return CallOperator(step, work, scope, keyed)
    assert keyed is not None, "a stateful step has state"
    if isinstance(work, StatefulMap):
        return StatefulMapOperator(step, work, scope, keyed)
    assert isinstance(work, StatefulOp)
    return StatefulOpOperator(step, work, scope, keyed)
