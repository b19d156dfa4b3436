"""Storage that fails at a chosen write, to stand at every point of a protocol and pull the plug."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import OutcomeUnknownError
from penstock.storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Crash(BaseException):
    """Stands for SIGKILL: not an `Exception`, so that no handler in the code under test can live through it.

    >>> issubclass(Crash, Exception)
    False
    """


class FaultyStorage:
    """Another storage, until a chosen write; writes are the calls of `create` and `delete`, counted from 1.

    At write `die_before` the process "dies" with the write not done, at `die_after` with the write done: `Crash` is
    raised, and by every later call too. At `lose_answer` the write is done, and `OutcomeUnknownError` raised once.
    `writes` is how many writes were asked for, `log` the (verb, name) of each object they named.

    >>> from penstock.storage import open_storage
    >>> inner = open_storage("memory://faulty")
    >>> storage = FaultyStorage(inner, die_after=2)
    >>> storage.create("a", b"1")
    True
    >>> try:
    ...     storage.create("b", b"2")
    ... except Crash:
    ...     print(inner.list(""), storage.writes, storage.log)
    ['a', 'b'] 2 [('create', 'a'), ('create', 'b')]
    """

    def __init__(
        self,
        inner: Storage,
        *,
        die_before: int | None = None,
        die_after: int | None = None,
        lose_answer: int | None = None,
    ) -> None:
        self.writes = 0
        self.log: list[tuple[str, str]] = []
        self._inner = inner
        self._die_before = die_before
        self._die_after = die_after
        self._lose_answer = lose_answer
        self._dead = False

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """As the inner storage, while alive."""
        self._check_alive()
        return self._inner.read(name, start, end)

    def create(self, name: str, data: "Buffer") -> bool:
        """As the inner storage, unless this write is the chosen one."""
        self._begin_write("create", [name])
        created = self._inner.create(name, data)
        self._end_write(f"create {name!r}")
        return created

    def list(self, prefix: str, after: str = "") -> list[str]:
        """As the inner storage, while alive."""
        self._check_alive()
        return self._inner.list(prefix, after)

    def delete(self, names: Sequence[str]) -> None:
        """As the inner storage, unless this write is the chosen one."""
        self._begin_write("delete", names)
        self._inner.delete(names)
        self._end_write(f"delete {len(names)} objects")

    def _check_alive(self) -> None:
        if self._dead:
            raise Crash("this process died before; reopen what it left through the inner storage")

    def _begin_write(self, verb: str, names: Sequence[str]) -> None:
        self._check_alive()
        self.writes += 1
        self.log.extend((verb, name) for name in names)
        if self.writes == self._die_before:
            self._die("before")

    def _end_write(self, what: str) -> None:
        if self.writes == self._die_after:
            self._die("after")
        if self.writes == self._lose_answer:
            raise OutcomeUnknownError(f"the answer to {what} was lost, as this test wants")

    def _die(self, when: str) -> None:
        self._dead = True
        raise Crash(f"died {when} write {self.writes}")
