"""Failures of the user's code and data, and the policies for them.

Invariants:
- Under "fail" nothing of the epoch is committed.
- Under any other policy an event leaves nothing in the step where it failed and goes no further; what is left of it is
  a count and, if asked for, a dead letter with its original bytes. What steps before that one did with it stands.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.batches import NO_ROW, Batch
from penstock.errors import InvalidError, LogicError
from penstock.events import Headers
from penstock.plan import check_name

MAX_SHOWN_CHARACTERS = 200
_OWN_FOLDER = str(Path(__file__).parent) + os.sep


class DeadLetter(msgspec.Struct, frozen=True):
    """The error policy that puts events aside: a topic receives their original bytes, with the error in the headers.

    The keys of that topic are bytes, and so are its values: read it with `app.topic(name, key="bytes", value="bytes")`.
    Where no event caused the failure, but a timer, the letter has no key and an empty value; the headers tell.

    >>> from penstock import Application, DeadLetter
    >>> from penstock.testing import TestDriver
    >>> app = Application("shop", on_error=DeadLetter("broken"))
    >>> app.dataframe(app.topic("orders")).apply(lambda value: value["amount"]).to_topic(app.topic("amounts"))
    >>> driver = TestDriver(app)
    >>> driver.send("orders", {"amuont": 3})
    >>> driver.epoch()
    >>> [letter] = driver.received("broken")
    >>> letter.value, dict(letter.headers)["penstock.error"]
    (b'{"amuont":3}', b"KeyError: 'amount'")
    """

    topic: str

    def __post_init__(self) -> None:
        check_name("the topic of a DeadLetter", self.topic)


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that failed, as an error callback gets it.

    >>> from penstock import Application
    >>> from penstock.testing import TestDriver
    >>> def decide(failure):
    ...     return "skip" if isinstance(failure.error, ZeroDivisionError) else "fail"
    >>> app = Application("shop", on_error=decide)
    >>> app.dataframe(app.topic("in")).apply(lambda value: 10 // value).to_topic(app.topic("out"))
    >>> driver = TestDriver(app)
    >>> for number in (5, 0, 2):
    ...     driver.send("in", number)
    >>> driver.epoch()
    >>> [event.value for event in driver.received("out")], driver.counts.skipped
    ([2, 5], 1)
    """

    step: str
    function: str
    key: Any
    topic: str
    offset: int
    error: Exception


Decision = Literal["fail", "skip"] | DeadLetter
ErrorPolicy = Literal["fail", "skip"] | DeadLetter | Callable[[Failure], Decision]


@dataclass(frozen=True, slots=True)
class Original:
    """An event as its topic holds it."""

    key: bytes | None
    value: bytes
    timestamp_ms: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Letter:
    """An event put aside, and the topic that it goes to."""

    topic: str
    original: Original
    headers: Headers


NO_EVENT = Original(None, b"", 0, ())
"""What a letter holds where no event caused the failure."""

FindOriginal = Callable[[str, int], Original]


@dataclass(slots=True)
class Failures:
    """The failures of one task: applies the policy, counts, keeps the dead letters."""

    policy: ErrorPolicy
    original: FindOriginal
    skipped: int = 0
    letters: list[Letter] = field(default_factory=list)

    @property
    def fatal(self) -> bool:
        """Whether every failure ends the epoch, so that nobody needs to be able to undo anything."""
        return self.policy == "fail"

    def handle(self, step: str, fn: Any, error: Exception, key: Any, batch: Batch | None, place: int) -> None:
        """Apply the policy to an event of a batch that failed (to a timer, if there is no batch)."""
        topic, offset = _origin(batch, place)
        self.decide(Failure(step, describe(fn), key, topic, offset, error))

    def fail(self, step: str, fn: Any, error: Exception, key: Any, batch: Batch | None, place: int) -> None:
        """Raise the LogicError of a failure that no policy can help with."""
        topic, offset = _origin(batch, place)
        raise LogicError(_message(Failure(step, describe(fn), key, topic, offset, error))) from error

    def decide(self, failure: Failure) -> None:
        """Apply the policy: raise LogicError, or count the event and return."""
        decision = _asked(self.policy, failure) if callable(self.policy) else self.policy
        if decision == "fail":
            raise LogicError(_message(failure)) from failure.error
        if decision == "skip":
            self.skipped += 1
            return
        if not isinstance(decision, DeadLetter):
            raise InvalidError(
                f'the on_error callback returned {decision!r}; it decides "fail", "skip" or DeadLetter(topic)'
            ) from failure.error
        original = NO_EVENT if failure.offset < 0 else self.original(failure.topic, failure.offset)
        self.letters.append(Letter(decision.topic, original, (*original.headers, *_headers(failure))))


def check_policy(policy: Any) -> ErrorPolicy:
    """An error policy as given by the user, if it is one."""
    if policy is DeadLetter:
        raise InvalidError("on_error is DeadLetter itself; it needs the name of a topic: DeadLetter(topic)")
    if policy in ("fail", "skip") or isinstance(policy, DeadLetter) or callable(policy):
        return policy  # type: ignore[no-any-return]
    raise InvalidError(f'on_error is {policy!r}; it is "fail", "skip", DeadLetter(topic) or a function of a Failure')


def describe(fn: Any) -> str:
    """A function by its name, with file and line where it is defined.

    >>> describe(len)
    'len'
    """
    if isinstance(fn, str):  # a work of ours that has no function of the user's
        return fn
    inner = getattr(fn, "__func__", fn)
    name = getattr(inner, "__qualname__", None) or repr(fn)
    code = getattr(inner, "__code__", None)
    if code is not None and code.co_filename.startswith(_OWN_FOLDER):
        return "of a column"
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _origin(batch: Batch | None, place: int) -> tuple[str, int]:
    return ("", NO_ROW) if batch is None else batch.origin.place(int(batch.rows[place]))


def _error_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _headers(failure: Failure) -> Headers:
    said = {
        "error": _error_line(failure.error),
        "step": failure.step,
        "function": failure.function,
        "key": "" if failure.key is None else repr(failure.key),
        "topic": failure.topic,
        "offset": str(failure.offset),
    }
    return tuple((f"penstock.{name}", text.encode(errors="backslashreplace")) for name, text in said.items())


def _asked(policy: Callable[[Failure], Decision], failure: Failure) -> Decision:
    try:
        return policy(failure)
    except Exception as error:
        raise LogicError(
            f"the on_error callback {describe(policy)} failed: {_error_line(error)}\n{_users_trace(error)}"
            f"It was asked about {_message(failure)}"
        ) from error


def _users_trace(error: Exception) -> str:
    """The traceback of an error without our own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([f for f in frames if not f.filename.startswith(_OWN_FOLDER)]))


def unpublished(sink: str, fn: Any, error: Exception, epoch: int, partition: int) -> LogicError:
    """The error that says that the function of a sink failed."""
    return LogicError(
        f"step {sink!r}, function {describe(fn)}, epoch {epoch}, partition {partition}: {_error_line(error)}\n"
        f"{_users_trace(error)}The epoch is committed, and the function will be called with it again before any other "
        f"is run: mend it, or what it writes to, and start again."
    )


def _message(failure: Failure) -> str:
    where = [f"step {failure.step!r}, function {failure.function}"]
    if failure.key is not None:
        where.append(f"key {failure.key!r:.{MAX_SHOWN_CHARACTERS}}")
    if failure.offset >= 0:
        where.append(f"topic {failure.topic!r}, offset {failure.offset}")
    return (
        f"{', '.join(where)}: {_error_line(failure.error)}\n{_users_trace(failure.error)}"
        f'The epoch was not committed, so nothing is lost: mend the function and start again, or set on_error="skip", '
        f"DeadLetter(topic) or a function of yours."
    )
