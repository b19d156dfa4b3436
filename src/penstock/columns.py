"""Column expressions: `stream["a"] + stream["b"]` as a function of one value."""

import operator
from collections.abc import Callable, Collection
from typing import Any

BinaryFunction = Callable[[Any, Any], Any]


class Column:
    """A value computed from each event's value; made by `stream["name"]` and by operators on columns.

    Columns know arithmetic, comparison, `&`, `|` and `~` (of booleans, both sides are always computed), `isin`,
    `is_null`, `not_null` and `apply(fn)`. A missing field is an error; `get(name)` reads it as None.

    >>> from penstock import Application
    >>> from penstock.testing import TestDriver
    >>> app = Application("shop")
    >>> orders = app.dataframe(app.topic("orders"))
    >>> orders["cost"] = orders["price"] * orders["count"]
    >>> orders[orders["cost"] > 10].to_topic(app.topic("large"))
    >>> driver = TestDriver(app)
    >>> driver.send("orders", {"price": 4, "count": 2})
    >>> driver.send("orders", {"price": 4, "count": 3})
    >>> driver.epoch()
    >>> [event.value for event in driver.received("large")]
    [{'price': 4, 'count': 3, 'cost': 12}]
    """

    __slots__ = ("_text", "evaluate")
    __hash__ = None  # type: ignore[assignment]
    __iter__ = None  # or Python would ask for column[0], column[1], ... for ever

    def __init__(self, evaluate: Callable[[Any], Any], text: str) -> None:
        self.evaluate = evaluate
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} has a value for each event only; use & and | instead of 'and' and 'or', ~ instead of 'not'"
        )

    def __getitem__(self, name: Any) -> "Column":
        inner = self.evaluate
        return Column(lambda value: inner(value)[name], f"{self}[{name!r}]")

    def apply(self, fn: Callable[[Any], Any]) -> "Column":
        """The column with a function applied to each value."""
        inner = self.evaluate
        return Column(lambda value: fn(inner(value)), f"{self}.apply({getattr(fn, '__qualname__', fn)})")

    def get(self, name: Any, default: Any = None) -> "Column":
        """A field of the column, or a default where there is none."""
        inner = self.evaluate
        return Column(lambda value: inner(value).get(name, default), f"{self}.get({name!r})")

    def isin(self, values: Collection[Any]) -> "Column":
        """Whether the column is one of these."""
        inner = self.evaluate
        return Column(lambda value: inner(value) in values, f"{self}.isin(...)")

    def is_null(self) -> "Column":
        """Whether the column is None."""
        inner = self.evaluate
        return Column(lambda value: inner(value) is None, f"{self}.is_null()")

    def not_null(self) -> "Column":
        """Whether the column is not None."""
        return ~self.is_null()

    def __invert__(self) -> "Column":
        inner = self.evaluate
        return Column(lambda value: not inner(value), f"~({self})")

    def __neg__(self) -> "Column":
        inner = self.evaluate
        return Column(lambda value: -inner(value), f"-({self})")

    def __add__(self, other: Any) -> "Column":
        return _joined(operator.add, "+", self, other)

    def __radd__(self, other: Any) -> "Column":
        return _joined(operator.add, "+", other, self)

    def __sub__(self, other: Any) -> "Column":
        return _joined(operator.sub, "-", self, other)

    def __rsub__(self, other: Any) -> "Column":
        return _joined(operator.sub, "-", other, self)

    def __mul__(self, other: Any) -> "Column":
        return _joined(operator.mul, "*", self, other)

    def __rmul__(self, other: Any) -> "Column":
        return _joined(operator.mul, "*", other, self)

    def __truediv__(self, other: Any) -> "Column":
        return _joined(operator.truediv, "/", self, other)

    def __rtruediv__(self, other: Any) -> "Column":
        return _joined(operator.truediv, "/", other, self)

    def __floordiv__(self, other: Any) -> "Column":
        return _joined(operator.floordiv, "//", self, other)

    def __rfloordiv__(self, other: Any) -> "Column":
        return _joined(operator.floordiv, "//", other, self)

    def __mod__(self, other: Any) -> "Column":
        return _joined(operator.mod, "%", self, other)

    def __rmod__(self, other: Any) -> "Column":
        return _joined(operator.mod, "%", other, self)

    def __eq__(self, other: object) -> "Column":  # type: ignore[override]
        return _joined(operator.eq, "==", self, other)

    def __ne__(self, other: object) -> "Column":  # type: ignore[override]
        return _joined(operator.ne, "!=", self, other)

    def __lt__(self, other: Any) -> "Column":
        return _joined(operator.lt, "<", self, other)

    def __le__(self, other: Any) -> "Column":
        return _joined(operator.le, "<=", self, other)

    def __gt__(self, other: Any) -> "Column":
        return _joined(operator.gt, ">", self, other)

    def __ge__(self, other: Any) -> "Column":
        return _joined(operator.ge, ">=", self, other)

    def __and__(self, other: Any) -> "Column":
        return _joined(operator.and_, "&", self, other)

    def __rand__(self, other: Any) -> "Column":
        return _joined(operator.and_, "&", other, self)

    def __or__(self, other: Any) -> "Column":
        return _joined(operator.or_, "|", self, other)

    def __ror__(self, other: Any) -> "Column":
        return _joined(operator.or_, "|", other, self)


def field(name: Any) -> Column:
    """The column of one field of the value."""
    return Column(operator.itemgetter(name), f"column {name!r}")


def as_column(found: Any) -> Column:
    """A column as it is, anything else as a column with this value for every event."""
    return found if isinstance(found, Column) else Column(lambda value: found, repr(found))


def _joined(fn: BinaryFunction, sign: str, left: Any, right: Any) -> Column:
    first, second = as_column(left).evaluate, as_column(right).evaluate
    return Column(lambda value: fn(first(value), second(value)), f"({left!r} {sign} {right!r})")
