"""Streams: how the user builds a plan, step by step."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock.batches import copied
from penstock.columns import Column, as_column, field
from penstock.errors import InvalidError
from penstock.failures import describe
from penstock.logic import StatefulLogic
from penstock.plan import (
    Call,
    CallKind,
    Concat,
    Plan,
    Rekey,
    StatefulMap,
    StatefulOp,
    Step,
    ToFiles,
    ToFunction,
    ToTopic,
    Work,
)
from penstock.printing import TablePrinter, print_events
from penstock.sources import SUFFIXES, FileFormat
from penstock.state.codec import Codec, value_codec
from penstock.storage import open_storage
from penstock.topics import Topic


class Stream:
    """Events on their way: what `app.dataframe(topic)` gives. Every method adds a step and gives the stream behind it.

    A stream can be used twice: both branches get all events, and neither sees what the other does to a value.

    >>> from penstock import Application
    >>> from penstock.testing import TestDriver
    >>> app = Application("numbers")
    >>> numbers = app.dataframe(app.topic("numbers"))
    >>> numbers.filter(lambda n: n % 2 == 0).to_topic(app.topic("even"))
    >>> numbers.map(lambda n: n * n).to_topic(app.topic("squares"))
    >>> driver = TestDriver(app)
    >>> for n in range(4):
    ...     driver.send("numbers", n)
    >>> driver.epoch()
    >>> [e.value for e in driver.received("even")], [e.value for e in driver.received("squares")]
    ([0, 2], [0, 1, 4, 9])
    """

    def __init__(self, plan: Plan, step: Step) -> None:
        self._plan = plan
        self._step = step

    def apply(
        self,
        fn: Callable[..., Any],
        stateful: bool = False,
        expand: bool = False,
        metadata: bool = False,
        name: str | None = None,
        state: Any = "json",
    ) -> "Stream":
        """Replace each value by `fn(value)`.

        With `stateful` the function is called as `fn(value, state)`, with `metadata` as
        `fn(value, key, timestamp_ms, headers)`, with both as `fn(value, key, timestamp_ms, headers, state)`. With
        `expand` it returns several values, each of which goes on as an event of its own. `state` is the codec of the
        stored state, `name` the step's name: give one if the step is stateful and the function may be renamed.
        """
        return self._call("expand" if expand else "map", fn, stateful, metadata, name, state)

    def map(self, fn: Callable[[Any], Any], name: str | None = None) -> "Stream":
        """Replace each value by `fn(value)`."""
        return self._call("map", fn, False, False, name, None)

    def flat_map(self, fn: Callable[[Any], Iterable[Any]], name: str | None = None) -> "Stream":
        """Replace each value by the values that `fn(value)` returns: none, one or many."""
        return self._call("expand", fn, False, False, name, None)

    def update(
        self,
        fn: Callable[..., Any],
        stateful: bool = False,
        metadata: bool = False,
        name: str | None = None,
        state: Any = "json",
    ) -> "Stream":
        """Call `fn(value)`, which changes the value in place; what it returns is not used."""
        return self._call("update", fn, stateful, metadata, name, state)

    def filter(
        self,
        fn: Callable[..., Any],
        stateful: bool = False,
        metadata: bool = False,
        name: str | None = None,
        state: Any = "json",
    ) -> "Stream":
        """Keep the events for which `fn(value)` is true."""
        return self._call("filter", fn, stateful, metadata, name, state)

    def inspect(self, name: str, fn: Callable[[Any], Any]) -> "Stream":
        """Call `fn(value)` for each event and leave the event as it is. It may be called again after a crash."""
        return self._call("inspect", fn, False, False, name, None)

    def key_by(self, name: str, fn: Callable[[Any], Any], value: Any = "msgpack") -> "Stream":
        """Give each event the key `fn(value)`.

        The events go on in another partition; values travel there as `value` says: by default tuples arrive as lists
        and dataclasses as dicts; give a type to have it back.
        """
        _require_callable("key_by", fn)
        return self._add(name, None, Rekey(fn, value_codec(value)))

    def group_by(self, by: str | Callable[[Any], Any], name: str | None = None, value: Any = "msgpack") -> "Stream":
        """Give each event a new key: a field of its value by name, or what a function of the value returns."""
        if isinstance(by, str):
            return self._add(name, f"group by {by}", Rekey(field(by).evaluate, value_codec(value)))
        _require_callable("group_by", by)
        return self._add(name, f"group by {_name(by, 'function')}", Rekey(by, value_codec(value)))

    def stateful_map(
        self, name: str, fn: Callable[[Any, Any, Any], tuple[Any, Any]], default: Any = None, state: Any = "json"
    ) -> "Stream":
        """Call `fn(key, value, state)`, which returns the output and the new state; None as new state drops it.

        `default` is the state of a key that has none: a value, of which each key gets its own copy, or a function
        that makes one. `state` is the codec of the stored state.
        """
        _require_callable("stateful_map", fn)
        return self._add(name, None, StatefulMap(fn, default, _state_codec(state, default)))

    def stateful_op(self, name: str, logic: StatefulLogic, default: Any = None, state: Any = "json") -> "Stream":
        """Run a `StatefulLogic`, which may emit nothing, one or many events, and has timers."""
        if not isinstance(logic, StatefulLogic) or type(logic).on_data is StatefulLogic.on_data:
            raise InvalidError(
                f"stateful_op({name!r}) was given {logic!r}; it needs an instance of a subclass of "
                f"StatefulLogic with on_data"
            )
        schedule = logic.schedule
        if schedule is not None and (not isinstance(schedule, timedelta) or schedule < timedelta(milliseconds=1)):
            raise InvalidError(
                f"stateful_op({name!r}): the schedule of {type(logic).__name__} is {schedule!r}; it is None, or an "
                f"interval of a millisecond or more, such as timedelta(seconds=10)"
            )
        return self._add(name, None, StatefulOp(logic, default, _state_codec(state, default)))

    def concat(self, other: "Stream") -> "Stream":
        """The events of both streams, in the order of the source where they have one source."""
        if not isinstance(other, Stream) or other._plan is not self._plan:
            raise InvalidError(f"concat() was given {other!r}; it joins two streams of one application")
        return Stream(self._plan, self._plan.add(None, "concat", Concat(), (self._step.id, other._step.id)))

    def to_topic(self, topic: Topic, key: Callable[[Any], Any] | None = None) -> None:
        """Write the events to a topic, each exactly once, under their keys or under `key(value)`."""
        if not isinstance(topic, Topic):
            raise InvalidError(f"to_topic() was given {topic!r}; it needs a topic: to_topic(app.topic(name))")
        if key is not None:
            _require_callable("to_topic(key=...)", key)
        self._add(None, f"to {topic.name}", ToTopic(topic, key))

    def sink(self, fn: Callable[[int, int, Sequence[Any]], None], name: str | None = None, value: Any = "json") -> None:
        """Call `fn(epoch, partition, events)` with the events of each committed epoch.

        After a crash it may be called again with the same epoch, partition and events: write so that this does no
        harm. `value` is the codec in which the events wait for it.
        """
        _require_callable("sink", fn)
        self._add(name, f"sink {_name(fn, 'function')}", ToFunction(fn, value_codec(value)))

    def files(self, path: str | Path, format: FileFormat = "json", name: str | None = None) -> None:
        """Write the values of each epoch as one file of JSON lines, CSV or Parquet; it appears whole or not at all."""
        if format not in SUFFIXES:
            raise InvalidError(f"files() was given format={format!r}; it is one of {', '.join(map(repr, SUFFIXES))}")
        self._add(name, f"to files {path}", ToFiles(open_storage(path), format, value_codec("json")))

    def print(self, name: str | None = None) -> None:
        """Print the events of each committed epoch; after a crash possibly the last epoch once more."""
        self.sink(print_events, name=name or "print", value="msgpack")

    def print_table(self, size: int = 10, name: str | None = None) -> None:
        """Print the last `size` events of each committed epoch and partition as a table."""
        self.sink(TablePrinter(size), name=name or "print_table", value="msgpack")

    __iter__ = None  # or Python would ask for stream[0], stream[1], ... for ever

    def __getitem__(self, item: Any) -> Any:
        """`s["a"]` is a column, `s[s["a"] > 3]` keeps some events, `s[["a", "b"]]` keeps some fields."""
        if isinstance(item, Column):
            return self._call("filter", item.evaluate, False, False, None, None, f"where {item!r}")
        if isinstance(item, list):
            names = tuple(item)
            return self._call("map", _fields(names), False, False, None, None, f"fields {', '.join(map(str, names))}")
        return field(item)

    def __setitem__(self, name: str, value: Any) -> None:
        """`s["c"] = s["a"] + s["b"]`: from here on the stream has the field."""
        column = as_column(value).evaluate
        step = self._call("map", lambda v: {**v, name: copied(column(v))}, False, False, None, None, f"set {name}")
        self._step = step._step

    def _call(
        self,
        kind: CallKind,
        fn: Callable[..., Any],
        stateful: bool,
        metadata: bool,
        name: str | None,
        state: Any,
        hint: str | None = None,
    ) -> "Stream":
        _require_callable(kind, fn)
        work = Call(fn, kind, metadata, value_codec(state) if stateful else None)
        return self._add(name, None if kind == "inspect" else hint or _name(fn, kind), work)

    def _add(self, name: str | None, hint: str | None, work: Work) -> "Stream":
        return Stream(self._plan, self._plan.add(name, hint, work, (self._step.id,)))


def _state_codec(state: Any, default: Any) -> Codec:
    """The codec of a step's state, if it can hold the default."""
    codec = value_codec(state)
    if default is not None and not callable(default):
        codec.checked_encode(default)
    return codec


def _fields(names: tuple[Any, ...]) -> Callable[[Any], dict[Any, Any]]:
    return lambda value: {name: value[name] for name in names}


def _name(fn: Any, otherwise: str) -> str:
    """The name of a function, for the name of its step; lambdas have none worth keeping."""
    name = getattr(fn, "__name__", "<")
    return otherwise if name.startswith("<") else name


def _require_callable(where: str, fn: Any) -> None:
    if not callable(fn):
        raise InvalidError(f"{where}() was given {describe(fn)}; it needs a function")
