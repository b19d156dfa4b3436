"""The plan: what the user builds. A graph of named steps, cut into stages where events change their key.

Invariants:
- A step is added after its inputs, so the order of the steps is an order in which they can run.
- Step names are unique: a name is the identity of a step's stored state.
- Inside a stage no event changes its key, so one task can run all steps of a stage for its partition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.errors import InvalidError
from penstock.names import as_part
from penstock.sources import Feed, FileFormat
from penstock.state.codec import Codec
from penstock.state.keys import shown
from penstock.storage import Storage
from penstock.topics import Topic

MAX_NAME_CHARACTERS = 100
MAX_NAME_BYTES = 240
"""As part of a file's name, of which file systems take 255 bytes."""
DEAD_LETTER = "dead-letter:"
"""What the names of sinks begin with that no step stands for."""

CallKind = Literal["map", "expand", "update", "filter", "inspect"]


@dataclass(frozen=True, slots=True)
class Source:
    """Reads a topic, which a feed may fill."""

    topic: Topic
    feed: Feed | None = None


@dataclass(frozen=True, slots=True)
class FrameColumns:
    """Which columns of a DataFrame are the parts of an event; `encoded`: the value is text or bytes to be decoded."""

    key: str | None
    value: str | list[str] | None
    timestamp: str | None
    order: str | None
    encoded: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """Reads a streaming DataFrame of Spark's; the frame itself stays on the driver, under the step's name."""

    value: Codec


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a function for each event; `kind` says what becomes of the result."""

    fn: Callable[..., Any]
    kind: CallKind
    metadata: bool = False
    state: Codec | None = None


@dataclass(frozen=True, slots=True)
class StatefulMap:
    """Calls `fn(key, value, state)` for each event and gets the output and the new state."""

    fn: Callable[[Any, Any, Any], tuple[Any, Any]]
    default: Any
    state: Codec


@dataclass(frozen=True, slots=True)
class StatefulOp:
    """Runs a StatefulLogic."""

    logic: Any
    default: Any
    state: Codec


@dataclass(frozen=True, slots=True)
class Rekey:
    """Gives each event a new key; its events go on in the next stage, encoded on the way."""

    fn: Callable[[Any], Any]
    value: Codec


@dataclass(frozen=True, slots=True)
class Concat:
    """Joins streams into one."""


@dataclass(frozen=True, slots=True)
class ToTopic:
    """Writes to a topic, under the event's key or under that of `key(value)`."""

    topic: Topic
    key: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class ToFunction:
    """Calls `fn(epoch, partition, events)` with what a committed epoch sends here."""

    fn: Callable[[int, int, Sequence[Any]], None]
    value: Codec


@dataclass(frozen=True, slots=True)
class ToFiles:
    """Writes one file for each epoch into a folder."""

    folder: Storage
    format: FileFormat
    value: Codec


Work = Source | Frame | Call | StatefulMap | StatefulOp | Rekey | Concat | ToTopic | ToFunction | ToFiles


@dataclass(frozen=True, slots=True)
class Step:
    """One named node of the pipeline."""

    id: int
    name: str
    work: Work
    inputs: tuple[int, ...]

    @property
    def state(self) -> Codec | None:
        """The codec of the step's state; None for a step without."""
        return self.work.state if isinstance(self.work, Call | StatefulMap | StatefulOp) else None

    @property
    def is_sink(self) -> bool:
        """Whether events leave the pipeline here."""
        return isinstance(self.work, ToTopic | ToFunction | ToFiles)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that one task runs for a partition: what enters, what is done in order, what goes on to later stages."""

    index: int
    entries: tuple[int, ...]
    steps: tuple[Step, ...]
    exits: tuple[int, ...]


def check_name(what: str, name: Any) -> None:
    """Raise InvalidError if a topic, or an application, cannot have this name."""
    fits = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES
    if not fits or "/" in name or name.startswith("."):
        raise InvalidError(
            f"{what} is {shown(name)}; it is a text of 1 to {MAX_NAME_BYTES} bytes, without '/', that does not begin "
            f"with '.'"
        )


def _is_name(name: str) -> bool:
    fits = 0 < len(name) <= MAX_NAME_CHARACTERS and "/" not in name and name.isprintable()
    return fits and len(as_part(name)) <= MAX_NAME_BYTES and not name.startswith(DEAD_LETTER)


def _shortened(hint: str) -> str:
    """As much of a hint as leaves room for a number behind it."""
    while len(hint) > MAX_NAME_CHARACTERS - 20 or len(as_part(hint)) > MAX_NAME_BYTES - 20:
        hint = hint[:-1]
    return hint


@dataclass(slots=True)
class Plan:
    """The steps added so far."""

    steps: list[Step] = field(default_factory=list)

    def add(self, name: str | None, hint: str | None, work: Work, inputs: Sequence[int] = ()) -> Step:
        """Add a step. A given name must be new; without one, a name is made from the hint, if there is a hint."""
        taken = {step.name for step in self.steps}
        if name is None and hint is not None:
            hint = _shortened("".join(c for c in hint.replace("/", " ") if c.isprintable()))
            name = next(n for i in range(1, len(taken) + 2) if (n := hint if i == 1 else f"{hint}-{i}") not in taken)
        elif not isinstance(name, str) or not _is_name(name):
            raise InvalidError(
                f"a step cannot be named {name!r}: a name is a text of 1 to {MAX_NAME_CHARACTERS} printable characters "
                f"({MAX_NAME_BYTES // 9} where they are not Latin), without '/', that does not begin with "
                f"{DEAD_LETTER!r}"
            )
        elif name in taken:
            raise InvalidError(
                f"there are two steps named {name!r}; a step's name is the identity of its state: rename one"
            )
        step = Step(len(self.steps), name, work, tuple(inputs))
        self.steps.append(step)
        return step

    def stages(self) -> tuple[Stage, ...]:
        """The plan cut into stages: stage k holds the steps with k changes of the key before them."""
        level: dict[int, int] = {}
        for step in self.steps:
            level[step.id] = max((self._out(level, source) for source in step.inputs), default=0)
        stages = []
        for index in range(max(level.values(), default=-1) + 1):
            steps = tuple(step for step in self.steps if level[step.id] == index)
            crossing = {s for step in steps for s in step.inputs if self._crosses(level, s, index)}
            sources = {step.id for step in steps if isinstance(step.work, Source | Frame)}
            exits = {
                s for later in self.steps for s in later.inputs
                if level[s] == index and self._crosses(level, s, level[later.id])
            }  # fmt: skip
            stages.append(Stage(index, tuple(sorted(crossing | sources)), steps, tuple(sorted(exits))))
        return tuple(stages)

    def with_topics(self, replaced: Callable[[Topic], Topic]) -> "Plan":
        """The same plan on other topics."""
        steps = []
        for step in self.steps:
            work = step.work
            if isinstance(work, Source | ToTopic):
                step = replace(step, work=replace(work, topic=replaced(work.topic)))
            steps.append(step)
        return Plan(steps)

    def without_feeds(self) -> "Plan":
        """The same plan as tasks need it: what fills a topic stays with the driver."""
        steps = [
            replace(step, work=replace(step.work, feed=None)) if isinstance(step.work, Source) else step
            for step in self.steps
        ]
        return Plan(steps)

    def _out(self, level: dict[int, int], step: int) -> int:
        return level[step] + isinstance(self.steps[step].work, Rekey)

    def _crosses(self, level: dict[int, int], step: int, into: int) -> bool:
        return isinstance(self.steps[step].work, Rekey) or level[step] < into

    def stateful_steps(self) -> dict[str, str]:
        """The name of each step with state, and the form its state is stored in."""
        kinds = {Call: "State", StatefulMap: "value", StatefulOp: "value"}
        return {s.name: f"{kinds[type(s.work)]} in {s.state.name}" for s in self.steps if s.state is not None}
