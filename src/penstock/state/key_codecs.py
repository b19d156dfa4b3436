"""Codecs of keys: how the keys of topics become bytes and come back. Inside an application keys are canonical."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import InvalidError
from penstock.state.keys import Key, decode_key, encode_key, shown, type_name


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """How the keys of one topic become bytes: ``decode`` raises ValueError, ``encode`` InvalidError.

    >>> key_codec("int").decode(b"42")
    42
    """

    name: str
    encode: Callable[[Key], bytes]
    decode: Callable[[bytes], Key]


def key_codec(spec: str | KeyCodec = "str") -> KeyCodec:
    """The key codec that a spec stands for.

    * ``"str"``: text as UTF-8. Numbers and booleans are written as their text and come back as ``str``.
    * ``"bytes"``: bytes as they are.
    * ``"int"``: an int as decimal text.
    * ``"json"``: text, numbers, booleans, and tuples of them, which are lists in JSON and come back as tuples.
    * ``"canonical"``: the form in which keys are stored; every key comes back as it was.
    * a ``KeyCodec``: itself.

    Raises InvalidError for anything else.

    >>> key_codec("json").decode(key_codec("json").encode(("eu", 7)))
    ('eu', 7)
    """
    if isinstance(spec, KeyCodec):
        return spec
    if isinstance(spec, str) and spec in _KEY_CODECS:
        return _KEY_CODECS[spec]
    names = ", ".join(f'"{name}"' for name in _KEY_CODECS)
    raise InvalidError(f"there is no key codec {spec!r}; use {names}, or a KeyCodec")


def _text_key(key: Key) -> bytes:
    kind = type(key)
    try:
        if kind is str:
            return key.encode()  # type: ignore[union-attr]
        if kind is int or kind is bool:
            return str(key).encode()
    except ValueError as error:
        raise _refused_key("str", key, f"{error}; choose another key") from None
    if kind is float and key == key:
        # Equal keys must have equal bytes, so -0.0 is written as 0.0.
        return str(key + 0.0).encode()  # type: ignore[operator]
    raise _refused_key("str", key, _key_remedy(key))


def _bytes_key(key: Key) -> bytes:
    if type(key) is bytes:
        return key
    raise _refused_key("bytes", key, _key_remedy(key))


def _int_key(key: Key) -> bytes:
    try:
        if type(key) is int:
            return b"%d" % key
    except ValueError as error:
        raise _refused_key("int", key, f"{error}; choose another key") from None
    raise _refused_key("int", key, _key_remedy(key))


def _decode_int_key(data: bytes) -> int:
    # int() also reads " 7", "+7" and "0_7", which would give one key several forms.
    try:
        key = int(data)
    except ValueError:
        raise ValueError(
            f'the key {shown(data)} is not a whole number; read the topic with key="str" or "bytes"'
        ) from None
    if b"%d" % key != data:
        raise ValueError(f'the key {shown(data)} is not the plain form of {key}; read the topic with key="str"')
    return key


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


def _json_key(key: Key) -> bytes:
    try:
        return _encode_json(_json_part(key, key))
    except (ValueError, RecursionError) as error:
        raise _refused_key("json", key, f"{error}; choose another key") from None


def _json_part(part: Key, key: Key) -> Key:
    """The part as JSON writes it without loss; refuses the whole key if there is none."""
    kind = type(part)
    if kind is str or kind is int or kind is bool:
        return part
    if isinstance(part, float) and kind is float and math.isfinite(part):
        return part + 0.0
    if isinstance(part, tuple) and kind is tuple:
        return tuple([_json_part(inner, key) for inner in part])
    raise _refused_key("json", key, _key_remedy(part))


def _decode_json_key(data: bytes) -> Key:
    try:
        return _tuples(_decode_json(data), data)
    except RecursionError:
        raise ValueError(f"the key {shown(data)} is nested too deep to be a key") from None


def _tuples(part: Any, data: bytes) -> Key:
    if isinstance(part, list):
        return tuple([_tuples(inner, data) for inner in part])
    if isinstance(part, (str, bool, int, float)):
        return part
    raise ValueError(
        f"the key {shown(data)} holds a JSON {'null' if part is None else 'object'}, which cannot be a key"
    )


_KEY_CODECS = {
    codec.name: codec
    for codec in (
        KeyCodec("str", _text_key, bytes.decode),
        KeyCodec("bytes", _bytes_key, bytes),
        KeyCodec("int", _int_key, _decode_int_key),
        KeyCodec("json", _json_key, _decode_json_key),
        KeyCodec("canonical", encode_key, decode_key),
    )
}


def _key_remedy(part: object) -> str:
    fitting = {
        str: 'choose key="str", "json" or "canonical"',
        bytes: 'choose key="bytes" or "canonical"',
        tuple: 'choose key="json" or "canonical"',
        int: 'choose key="int", "str", "json" or "canonical"',
        float: 'choose key="canonical", or drop the event if it is nan',
        bool: 'choose key="str", "json" or "canonical"',
    }
    return fitting.get(type(part), "use a key of str, bytes, int, float, bool, or a tuple of these")


def _refused_key(name: str, key: object, remedy: str) -> InvalidError:
    return InvalidError(
        f'the key {shown(key)} of type {type_name(key)} cannot be written to a topic with key="{name}"; {remedy}'
    )
