"""Operators: what each kind of step does with a batch of events, inside one task.

Events travel in batches of columns; a step works through its column of values in one tight loop. A step that gives one
output for each input leaves keys, times and headers untouched, so they never become Python objects at all.

Invariants:
- The events of a key leave a step in the order in which they came.
- An event whose function failed has changed nothing: no state, no timer, no output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from penstock.batches import Batch, Ints, copied
from penstock.errors import InvalidError
from penstock.failures import Failures
from penstock.plan import Call, StatefulMap, Step
from penstock.state.codec import Codec
from penstock.state.handles import State, remove_expired
from penstock.state.key_table import KeyTable
from penstock.state.keys import shown
from penstock.state.overlay import ABSENT, UNREAD, VALUE, KeyedState, Mark


@dataclass(frozen=True, slots=True)
class Scope:
    """What the steps of one task share."""

    epoch: int
    table: KeyTable
    failures: Failures
    clock_ms: int
    clock_before_ms: int
    watermark_ms: int | None


class Operator(Protocol):
    """A step at work in a task."""

    def process(self, batch: Batch) -> Batch:
        """What becomes of some events."""
        ...

    def finish(self) -> Batch | None:
        """What the step sends on by itself at the end of an epoch."""
        ...


class PerEvent:
    """Works through a batch event by event; an event that fails is handed to the error policy and left out."""

    def __init__(self, step: Step, fn: Callable[..., Any], scope: Scope) -> None:
        self.step = step
        self.fn = fn
        self.scope = scope

    def finish(self) -> Batch | None:
        """Nothing is sent at the end of an epoch."""
        return None

    def _guarded(
        self, batch: Batch, done: list[Any], run: Callable[[int], None], undo: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Call run(start), which adds to `done` for each event it finishes, until all events are done or failed."""
        failed: list[int] = []
        start = 0
        while start < len(batch):
            try:
                run(start)
                break
            except Exception as error:
                place = len(done) + len(failed)
                self.scope.failures.handle(self.step.name, self.fn, error, self._key(batch, place), batch, place)
                undo()
                failed.append(place)
                start = place + 1
        return failed

    def _key(self, batch: Batch, place: int) -> Any:
        return self.scope.table.keys[batch.keys[place]]


def _left(batch: Batch, failed: list[int]) -> Ints:
    return np.delete(np.arange(len(batch)), failed)


class CallOperator(PerEvent):
    """`apply`, `update`, `filter`, `inspect`, with or without state and metadata."""

    def __init__(self, step: Step, work: Call, scope: Scope, keyed: KeyedState | None) -> None:
        super().__init__(step, work.fn, scope)
        self._work = work
        self._keyed = keyed
        self._state = None if keyed is None else State(keyed)
        if keyed is not None and not scope.failures.fatal:
            keyed.journal = []

    def process(self, batch: Batch) -> Batch:
        """Call the function for each event and do with the results what the kind of the call says."""
        if self._keyed is not None:
            self._keyed.grow()
        results: list[Any] = []
        undo = (lambda: None) if self._keyed is None else self._keyed.rollback
        failed = self._guarded(batch, results, lambda start: self._run(batch, start, results), undo)
        if failed:
            places = _left(batch, failed)
            batch = batch.take([batch.values[i] for i in places.tolist()], places)
        kind = self._work.kind
        if kind == "map":
            return batch.with_values(results)
        if kind == "filter":
            kept = np.flatnonzero(np.fromiter(results, np.bool_, len(results)))
            return batch if len(kept) == len(batch) else batch.take([batch.values[i] for i in kept.tolist()], kept)
        if kind == "expand":
            places = np.repeat(np.arange(len(batch)), list(map(len, results)))
            return batch.take([value for values in results for value in values], places)
        return batch

    def _run(self, batch: Batch, start: int, results: list[Any]) -> None:
        add, kind = results.append, self._work.kind
        if kind == "filter" or kind == "expand":
            taken = bool if kind == "filter" else _parts
            for output in self._bound(batch, start):
                add(taken(output))
            return
        if self._state is None and not self._work.metadata:
            fn = self.fn
            for value in islice(batch.values, start, None):
                add(fn(value))
            return
        for output in self._bound(batch, start):
            add(output)

    def _bound(self, batch: Batch, start: int) -> Iterator[Any]:
        """The function's results from a place on, called with what it asks for."""
        if self._state is not None:
            return self._stateful(batch, start, self._state)
        if self._work.metadata:
            return self._with_metadata(batch, start)
        fn = self.fn  # not map(): it would take a StopIteration of the function for the end of the batch
        return (fn(value) for value in islice(batch.values, start, None))

    def _with_metadata(self, batch: Batch, start: int) -> Iterator[Any]:
        fn, keys = self.fn, self.scope.table.keys
        rest = zip(batch.keys[start:].tolist(), batch.times[start:].tolist(), strict=True)
        for place, (k, time_ms) in enumerate(rest, start):
            yield fn(batch.values[place], keys[k], time_ms, batch.header(place))

    def _stateful(self, batch: Batch, start: int, state: State) -> Iterator[Any]:
        fn, table, keyed = self.fn, self.scope.table, self._keyed
        assert keyed is not None
        rest = zip(
            islice(batch.values, start, None), batch.keys[start:].tolist(), batch.times[start:].tolist(), strict=True
        )
        if table.nulls or keyed.journal is not None or self._work.metadata:
            for place, (value, k, time_ms) in enumerate(rest, start):
                require_key(table, k)
                state.k, state.now_ms = k, time_ms
                if self._work.metadata:
                    yield fn(value, table.keys[k], time_ms, batch.header(place), state)
                else:
                    yield fn(value, state)
                if keyed.journal is not None:
                    keyed.journal = []
            return
        for value, k, time_ms in rest:
            state.k, state.now_ms = k, time_ms
            yield fn(value, state)

    def finish(self) -> Batch | None:
        """Remove what expired; nothing is sent."""
        if self._keyed is not None:
            self._keyed.journal = None
            remove_expired(self._keyed, self.scope.watermark_ms)
        return None


def _parts(output: Any) -> list[Any]:
    """The values of an expanding function, each an object of its own, even where the function gave one twice."""
    if output.__class__ is not list and output.__class__ is not tuple:
        return [copied(part) for part in output]
    parts = list(output)
    return parts if len(set(map(id, parts))) == len(parts) else [copied(part) for part in parts]


def require_key(table: KeyTable, k: int) -> None:
    if table.nulls and k == 0:
        raise InvalidError(
            "the event has no key, and state belongs to a key; give it one with key_by() before this step"
        )


def default_state(default: Any, codec: Codec) -> Callable[[], Any]:
    """A function that gives each key a default of its own."""
    if callable(default):
        return default  # type: ignore[no-any-return]
    if default is None or default.__class__ in codec.exact:
        return lambda: default
    data = codec.checked_encode(default)
    return lambda: codec.decode(data)


class StatefulMapOperator(PerEvent):
    """`stateful_map`: one output for each event, and the new state."""

    def __init__(self, step: Step, work: StatefulMap, scope: Scope, keyed: KeyedState) -> None:
        super().__init__(step, work.fn, scope)
        self._keyed = keyed
        self._cells = keyed.cells(VALUE)
        self._default = default_state(work.default, work.state)

    def process(self, batch: Batch) -> Batch:
        """Call the function for each event with the state of its key."""
        self._cells.load()
        outputs: list[Any] = []
        failed = self._guarded(batch, outputs, lambda start: self._run(batch, start, outputs.append))
        return batch.take(outputs, _left(batch, failed)) if failed else batch.with_values(outputs)

    def _run(self, batch: Batch, start: int, add: Callable[[Any], None]) -> None:
        fn, default, cells, keys = self.fn, self._default, self._cells, self.scope.table.keys
        live, stored, read, write = cells.live, cells.stored, cells.read, cells.write
        absent, unread, mark = ABSENT, UNREAD, Mark
        plain = cells.plain - {type(None)}
        for value, k in zip(islice(batch.values, start, None), batch.keys[start:].tolist(), strict=True):
            state = live[k]
            if state.__class__ is mark:
                state = read(k) if state is not unread or stored[k] is not None else absent
                if state is absent:
                    require_key(self.scope.table, k)
                    state = default()
            returned = fn(keys[k], value, state)
            try:
                output, state = returned
            except (TypeError, ValueError) as error:
                raise _no_pair(returned) from error
            if state.__class__ in plain:
                live[k] = state
            elif state is None:
                live[k] = absent
            else:
                write(k, state)
            add(output)


def _no_pair(returned: Any) -> InvalidError:
    return InvalidError(f"the function returned {shown(returned)}; it must return a pair: (output, new state)")
