"""Codecs: how values become bytes and come back.

``Codec.encode`` and ``Codec.decode`` are the codec's own C functions, without a Python frame around them, because they
run for every event. What they do to values that the format cannot hold is therefore said here, and checked beside them:

* ``codec.checked_encode(value)`` refuses a value that would not come back; for state, and wherever 0.2 µs is no matter.
* ``codec.encode_many(values)`` does so for a whole batch, at less than a Python call for each value where it can.

=============================  ==========================  ==========================  ========================
value                          "json"                      "msgpack"                   a type
=============================  ==========================  ==========================  ========================
nan, inf, anywhere inside      refused (``encode``: null)  comes back                  refused
bytes as the whole value       refused (``encode``:        comes back                  comes back if the type
                               base64 text)                                            says bytes
bytes inside a value           come back as base64 text    come back                   as above
int beyond 64 bits             comes back (to 4300 digits) refused                     as "json"
tuple, set                     come back as lists          come back as lists          as the type says
dict with int or float keys    keys come back as text      comes back                  as the type says
dict with other keys           refused unless text         comes back                  as the type says
dataclass, Struct              comes back as a dict        comes back as a dict        comes back
enum                           comes back as its value     comes back as its value     comes back
datetime, Decimal, UUID        come back as text           come back as text, or a     come back
                                                           datetime with a zone
a value not of the type        \\-                          \\-                          refused
a field the type has not       \\-                          \\-                          dropped on reading
subclass of str, int, float    refused                     refused                     refused
=============================  ==========================  ==========================  ========================

``decode`` raises ValueError for bytes that it cannot read (``msgspec.DecodeError``, ``msgspec.ValidationError`` and
UnicodeDecodeError are ValueErrors), and RecursionError for values nested too deep. Nothing is ever pickled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import InvalidError
from penstock.state.keys import shown, type_name

_JSON_SCALARS: frozenset[type] = frozenset({int, float, str, bool, type(None)})
_PACKED_SCALARS: frozenset[type] = _JSON_SCALARS | {bytes}
_RAW_TYPES: frozenset[type] = frozenset({bytes, bytearray, memoryview})
# A float in MessagePack whose exponent is all ones is nan or inf. Other values can look like it: a hit is only a doubt.
_PACKED_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_pack = msgspec.msgpack.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_LINE_END, _TEXT_BEGINS = ord("\n"), ord('"')
_NU, _UL = int.from_bytes(b"nu", "little"), int.from_bytes(b"ul", "little")
_MAX_COLUMN_BYTES = (1 << 31) - 1
_REFUSALS = (TypeError, ValueError, OverflowError, RecursionError)


def _no_loss(value: Any, data: bytes) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Codec:
    """How the values of one topic or one step become bytes.

    ``exact`` holds the scalar types whose values come back equal and of the same type, so that a store may keep such a
    value instead of decoding it again. (Of float under JSON this holds for finite values; ``checked_encode`` refuses
    the others.) ``loss`` says why a value would not come back from the bytes that ``encode`` made of it, "" if it
    would. ``fast`` encodes a whole batch at once, and gives None where it cannot vouch for every value. ``spec`` is
    what ``value_codec`` made this codec of; a codec that has one can be sent to another process.

    A codec of your own must give back from ``decode`` what ``encode`` was given, and keep doing so for stored bytes.

    >>> hexadecimal = Codec("hex", lambda number: b"%x" % number, lambda data: int(data, 16), frozenset({int}))
    >>> hexadecimal.encode(255), hexadecimal.decode(b"ff")
    (b'ff', 255)
    """

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    exact: frozenset[type]
    loss: Callable[[Any, bytes], str] = _no_loss
    fast: Callable[[Sequence[Any]], pa.Array | None] | None = None
    spec: Any = None

    def checked_encode(self, value: Any) -> bytes:
        """``encode``, but raises InvalidError, naming the value and the remedy, if the value would not come back.

        >>> value_codec("json").checked_encode({"ratio": 0.5})
        b'{"ratio":0.5}'
        >>> value_codec("json").checked_encode({"ratio": float("nan")})
        Traceback (most recent call last):
        penstock.errors.InvalidError: ...
        """
        try:
            data = self.encode(value)
        except _REFUSALS as error:
            raise _refused(self.name, value, str(error)) from error
        reason = self.loss(value, data)
        if reason:
            raise _refused(self.name, value, reason)
        return data

    def encode_many(self, values: Sequence[Any]) -> pa.ChunkedArray:
        """The bytes of all these values; raises if one of them cannot be encoded, or would not come back.

        >>> value_codec("json").encode_many([1, None]).to_pylist()
        [b'1', b'null']
        """
        column = None if self.fast is None else self.fast(values)
        if column is None:
            encode = self.encode if self.loss is _no_loss else self.checked_encode
            column = pa.array(list(map(encode, values)), pa.binary())  # in chunks, where it is very long
        return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])

    def __reduce__(self) -> tuple[Any, ...]:
        # msgspec's encoders cannot be sent to another process; what they were made of can.
        if self.spec is not None:
            return value_codec, (self.spec,)
        return Codec, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def value_codec(spec: Any = "json") -> Codec:
    """The codec that a spec stands for.

    * ``"json"``: any JSON value; ``"msgpack"``: these and bytes, in less space.
    * ``"bytes"``: bytes as they are; ``"str"``: text as UTF-8.
    * a type (a dataclass, ``msgspec.Struct``, TypedDict, ``list[int]``, …): JSON, validated on reading, and by
      ``checked_encode`` on writing, so that what was written can be read.
    * a ``Codec``: itself.

    Raises InvalidError for anything else.

    >>> value_codec("json").decode(b'{"amount":5}')
    {'amount': 5}
    >>> value_codec(dict[str, int]).name
    'json:dict[str, int]'
    """
    if isinstance(spec, Codec):
        return spec
    if spec is not None and not isinstance(spec, str):
        return _typed_codec(spec)
    if spec == "json":
        encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder()
        return Codec("json", encoder.encode, decoder.decode, _JSON_SCALARS, _json_loss, _fast_json, spec)
    if spec == "msgpack":
        packer, unpacker = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
        return Codec("msgpack", packer.encode, unpacker.decode, _PACKED_SCALARS, spec=spec)
    if spec == "bytes":
        # bytes.__bytes__ takes only bytes, where bytes() would make zeros of an int.
        return Codec("bytes", bytes.__bytes__, bytes, frozenset({bytes}), spec=spec)
    if spec == "str":
        return Codec("str", str.encode, bytes.decode, frozenset({str}), spec=spec)
    raise InvalidError(f'there is no value codec {spec!r}; use "json", "msgpack", "bytes", "str", a type, or a Codec')


def _typed_codec(kind: Any) -> Codec:
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    try:
        decoder = msgspec.json.Decoder(kind)
        foreign = _foreign_class(msgspec.inspect.type_info(kind))
    except TypeError as error:
        raise InvalidError(f"{name} cannot be read from JSON: {error}; {_TYPE_REMEDY}") from error
    if foreign is not None:
        raise InvalidError(f"{name} cannot be read from JSON, because {foreign.__qualname__} cannot; {_TYPE_REMEDY}")

    decode = decoder.decode

    def loss(value: Any, data: bytes) -> str:
        try:
            decode(data)
        except (ValueError, RecursionError) as error:
            return _non_finite(value, data) or f"it is not a {name}: {error}"
        return _non_finite(value, data)

    def fast(values: Sequence[Any]) -> pa.Array | None:
        lines = _encode_lines(values)
        try:
            decoder.decode_lines(lines)
        except (ValueError, RecursionError):
            return None
        return _column_of(lines, values)

    exact = frozenset({kind}) & _PACKED_SCALARS if isinstance(kind, type) else frozenset()
    return Codec(f"json:{name}", msgspec.json.Encoder().encode, decode, exact, loss, fast, kind)


_TYPE_REMEDY = "use a dataclass, a msgspec.Struct, a TypedDict, or a type built of these and of plain Python types"


def _foreign_class(info: Any) -> type | None:
    """The first class inside a type that msgspec would accept but never be able to build."""
    seen: set[int] = set()
    todo = [info]
    while todo:
        node = todo.pop()
        if isinstance(node, msgspec.inspect.CustomType):
            return node.cls
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tuple):
            todo.extend(node)
        elif isinstance(node, (msgspec.inspect.Type, msgspec.inspect.Field)):
            todo.extend(getattr(node, name) for name in node.__struct_fields__)
    return None


def _json_loss(value: Any, data: bytes) -> str:
    if type(value) in _RAW_TYPES:
        return "JSON has no bytes, they would come back as base64 text"
    return _non_finite(value, data)


def _fast_json(values: Sequence[Any]) -> pa.Array | None:
    column = _column_of(_encode_lines(values), values)
    if column is None or len(column) == 0:
        return column
    _, offsets, data = column.buffers()
    # Raw bytes become a text; where no line begins as a text does, there are none: cheaper than to look at each value.
    begins = np.frombuffer(data, np.uint8)[np.frombuffer(offsets, np.int32)[:-1]]
    return column if not (begins == _TEXT_BEGINS).any() or _RAW_TYPES.isdisjoint(map(type, values)) else None


def _column_of(lines: bytes, values: Sequence[Any]) -> pa.Array | None:
    """The lines that msgspec made of some values, as a column; None if a nan may be among them, or they are no lines.

    One call for a batch costs half of what a call for each value does.
    """
    if not len(values) <= len(lines) <= _MAX_COLUMN_BYTES:
        return None
    # Where no null was written, no nan was: one look at all bytes is far cheaper than one call for each value.
    if _holds_null(lines) and _may_hold_non_finite(values):
        return None
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == _LINE_END)
    if len(ends) != len(values):
        return None  # a msgspec.Raw that holds a line end
    offsets = np.zeros(len(values) + 1, np.int32)
    offsets[1:] = ends - np.arange(len(values))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(lines.replace(b"\n", b""))]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)


def _holds_null(lines: bytes) -> bool:
    """Whether "null" stands in some bytes; wherever it does, two letters of it stand at an even place.

    >>> _holds_null(b'{"a":1}'), _holds_null(b'{"a":null}'), _holds_null(b'{"aa":null}')
    (False, True, True)
    """
    pairs = np.frombuffer(lines, "<u2", len(lines) // 2)
    return bool((pairs == _NU).any() or (pairs == _UL).any()) and b"null" in lines


def _may_hold_non_finite(value: Any) -> bool:
    # MessagePack keeps nan and inf; packing and searching stay in C, where a walk through the value would not.
    try:
        return _PACKED_NON_FINITE.search(_pack(value)) is not None
    except _REFUSALS:
        return True


def _non_finite(value: Any, data: bytes) -> str:
    # msgspec writes nan and inf as null, so only values whose bytes have a null in them need a look.
    if data.find(b"null") < 0 or not _may_hold_non_finite(value):
        return ""
    todo: list[Any] = [msgspec.to_builtins(value)]
    while todo:
        part = todo.pop()
        if isinstance(part, float) and not math.isfinite(part):
            return f"it holds {part}, which JSON cannot express"
        if isinstance(part, dict):
            todo.extend(part.values())
        elif isinstance(part, (list, tuple)):
            todo.extend(part)
    return ""


_VALUE_REMEDIES = {
    "json": 'convert it to what JSON has, or choose "msgpack" (nan, bytes) or a type',
    "msgpack": "convert it to a dict, a list, text, bytes or a number of at most 64 bits",
    "bytes": 'encode it first, or choose "json"',
    "str": 'use str(value), or choose "json" or "bytes"',
}


def _refused(name: str, value: Any, reason: str) -> InvalidError:
    remedy = _VALUE_REMEDIES.get(name, "write a value that the codec can give back, or choose another codec")
    return InvalidError(
        f'the value {shown(value)} of type {type_name(value)} cannot be written with the codec "{name}": '
        f"{reason}; {remedy}"
    )
