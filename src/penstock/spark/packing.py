"""How functions and errors travel between the driver and Spark's workers. Nothing of this is ever stored.

What can be imported travels by its name. What the program itself defines, its main module above all, travels whole.
"""

import dataclasses
import io
from typing import Any

import msgspec
from pyspark import cloudpickle

from penstock.errors import InvalidError

_CACHE = "__msgspec_cache__"


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """How an object travels that the rules of Python alone do not bring over."""
        if obj is dataclasses.MISSING:
            return "MISSING"  # by its name: a copy of it would be taken for a default, and no field would be required
        if isinstance(obj, type) and _CACHE in vars(obj):
            delattr(obj, _CACHE)  # what msgspec learnt of a dataclass cannot travel; it learns it again
        reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if reduced is not NotImplemented and isinstance(obj, type) and issubclass(obj, msgspec.Struct):
            # It would arrive without its fields, and nobody would notice.
            raise InvalidError(
                f"{obj.__qualname__} is a msgspec.Struct of the program itself, which cannot be sent to Spark's "
                f"workers; move it into a module of its own, or make it a dataclass"
            )
        return reduced


def pack(value: Any) -> bytes:
    """A value with its functions and classes as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def pack_error(error: BaseException | None) -> bytes:
    """An error as bytes; none, if it cannot travel: what it said is in the message already."""
    try:
        return b"" if error is None else pack(error)
    except Exception:
        return b""


def unpack_error(data: bytes) -> BaseException | None:
    """The inverse of pack_error; None if there is no error, or it cannot be made here."""
    try:
        error = cloudpickle.loads(data) if data else None
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
