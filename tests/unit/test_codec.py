"""Codecs: what comes back, what is refused, and that nothing is lost in silence."""

import copy
import datetime
import enum
import math
import pickle
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidError
from penstock.state.codec import Codec, value_codec
from penstock.state.key_codecs import KeyCodec, key_codec
from penstock.state.keys import Key, encode_key

NAN, INF = math.nan, math.inf


@dataclass
class Order:
    customer: str
    amount: float
    note: str | None = None


class Total(msgspec.Struct):
    sums: dict[int, float]
    seen: set[str] = msgspec.field(default_factory=set)
    raw: bytes = b""


class Reading(TypedDict):
    celsius: float | None


class Node(msgspec.Struct):
    below: "list[Node]"


class Plain:
    pass


class Name(str):
    __slots__ = ()


class Level(enum.Enum):
    LOW = 1


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


@given(scalars)
def test_scalars_of_the_exact_types_come_back_as_the_same_value_and_type(value: Any) -> None:
    for spec in ("json", "msgpack", "bytes", "str", int, float, str, bool, bytes):
        codec = value_codec(spec)
        if type(value) not in codec.exact:
            continue
        try:
            data = codec.checked_encode(value)
        except InvalidError:
            assert (spec in ("json", float) and value in (INF, -INF)) or (spec == "msgpack" and abs(value) >= 2**63)
            continue
        found = codec.decode(data)
        assert found == value
        assert type(found) is type(value)


def test_exact_types_are_those_of_the_format() -> None:
    assert value_codec("json").exact == {int, float, str, bool, type(None)}
    assert value_codec("msgpack").exact == {int, float, str, bool, type(None), bytes}
    assert value_codec("bytes").exact == {bytes}
    assert value_codec("str").exact == {str}
    assert value_codec(float).exact == {float}
    assert value_codec(Order).exact == value_codec(list[int]).exact == frozenset()


def test_the_default_is_json() -> None:
    assert value_codec().encode({"a": [1, 2.5, None, "ü"]}) == '{"a":[1,2.5,null,"ü"]}'.encode()


def test_encode_is_not_wrapped_in_a_python_function() -> None:
    for spec in ("json", "msgpack", "bytes", "str", Order):
        codec = value_codec(spec)
        assert not hasattr(codec.encode, "__code__")
        assert not hasattr(codec.decode, "__code__")


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (Order, Order("c-1", 2.5)),
        (Total, Total({1: 2.5}, {"a"}, b"\xff")),
        (Reading, {"celsius": None}),
        (list[tuple[int, str]], [(1, "a")]),
        (Node, Node([Node([])])),
        (datetime.datetime, datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC)),
        (bytes, b"\xff"),
        (int | None, None),
    ],
)
def test_typed_values_come_back_as_their_type(spec: Any, value: Any) -> None:
    codec = value_codec(spec)
    assert codec.decode(codec.checked_encode(value)) == value
    assert codec.encode_many([value]).to_pylist() == [codec.encode(value)]


@pytest.mark.parametrize(
    ("spec", "value", "reason"),
    [
        ("json", NAN, "holds nan"),
        ("json", -INF, "holds -inf"),
        ("json", {"a": None, "b": [1, (NAN,)]}, "holds nan"),
        ("json", {"a": {"b": {"c": INF}}}, "holds inf"),
        ("json", Order("c", NAN), "holds nan"),
        ("json", b"x", "base64"),
        ("json", bytearray(b"x"), "base64"),
        ("json", memoryview(b"x"), "base64"),
        ("json", {(1, 2): 3}, "keys"),
        ("json", Plain(), "unsupported"),
        ("json", Name("a"), "unsupported"),
        ("json", np.float64(1), "unsupported"),
        ("json", "\ud800", "surrogates"),
        pytest.param("json", 10**5000, "4300 digits", id="json-huge"),
        ("msgpack", 2**64, "2**64"),
        ("msgpack", [-(2**63) - 1], "2**63"),
        ("msgpack", Plain(), "unsupported"),
        ("bytes", 5, "'bytes'"),
        ("bytes", "a", "'bytes'"),
        ("bytes", bytearray(b"a"), "'bytes'"),
        ("bytes", None, "'bytes'"),
        ("str", 5, "'str'"),
        ("str", b"a", "'str'"),
        ("str", "\ud800", "surrogates"),
        (Order, Order("c", NAN), "holds nan"),
        (Order, Order("c", "much"), "not a Order: Expected `float`, got `str`"),  # type: ignore[arg-type]
        (Order, {"customer": "c"}, "missing required field `amount`"),
        (Reading, {"celsius": NAN}, "holds nan"),
        (int, 1.5, "Expected `int`"),
        (list[int], [1, None], "Expected `int`, got `null`"),
    ],
)
def test_values_that_would_not_come_back_are_refused_by_name(spec: Any, value: Any, reason: str) -> None:
    codec = value_codec(spec)
    with pytest.raises(InvalidError) as refusal:
        codec.checked_encode(value)
    message = str(refusal.value)
    assert reason in message
    assert f'codec "{codec.name}"' in message
    assert type(value).__qualname__ in message
    assert "choose" in message or "convert" in message


@pytest.mark.parametrize("lost", [NAN, INF, {"a": [NAN]}, b"x", [None, -INF, 2**70]])
def test_a_batch_is_refused_if_one_value_would_not_come_back(lost: Any) -> None:
    codec = value_codec("json")
    values = [{"a": 1}, "null", None, {"b": None}, lost, 3]
    with pytest.raises(InvalidError, match="cannot be written"):
        codec.encode_many(values)


def test_a_batch_of_honest_nulls_passes() -> None:
    codec = value_codec("json")
    # The last but one looks, in MessagePack, as if it held a nan; the last cannot be written there.
    values = [{"a": None}, "null", None, [1.5, None], {"b": b"\xcb\x7f\xf8", "c": None}, [2**70, None]]
    assert codec.encode_many(values).to_pylist() == [codec.encode(value) for value in values]


def test_a_typed_batch_is_read_again() -> None:
    codec = value_codec(Order)
    values = [Order("c", 1.0), {"customer": "c", "amount": "1"}]
    assert codec.encode_many([]).to_pylist() == []
    with pytest.raises(InvalidError, match="Expected `float`, got `str`"):
        codec.encode_many(values)


def test_nan_and_bytes_survive_in_msgpack() -> None:
    codec = value_codec("msgpack")
    assert math.isnan(codec.decode(codec.checked_encode({"a": NAN}))["a"])
    assert codec.decode(codec.checked_encode([b"x", INF])) == [b"x", INF]


def test_ints_beyond_64_bits_survive_in_json() -> None:
    codec = value_codec("json")
    for number in (2**63, 2**64, -(2**63) - 1, 10**300, -(10**4000)):
        assert codec.decode(codec.checked_encode(number)) == number


def test_the_documented_changes_of_form_in_json() -> None:
    codec = value_codec("json")

    def there_and_back(value: Any) -> Any:
        return codec.decode(codec.checked_encode(value))

    assert there_and_back((1, {2})) == [1, [2]]
    assert there_and_back({1: "a", 2.5: "b"}) == {"1": "a", "2.5": "b"}
    assert there_and_back({"raw": b"x"}) == {"raw": "eA=="}
    assert there_and_back(Order("c", 1.0)) == {"customer": "c", "amount": 1.0, "note": None}
    assert there_and_back(Level.LOW) == 1


@pytest.mark.parametrize(
    ("spec", "data"),
    [
        ("json", b""),
        ("json", b"{"),
        ("json", b'"\xff"'),
        ("json", b"NaN"),
        ("msgpack", b""),
        ("msgpack", b"\xc1"),
        ("str", b"\xff"),
        (Order, b"{}"),
        (int, b'"1"'),
    ],
)
def test_bytes_that_cannot_be_read_are_a_value_error(spec: Any, data: bytes) -> None:
    with pytest.raises(ValueError):
        value_codec(spec).decode(data)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("pickle", 'use "json"'),
        (None, 'use "json"'),
        (3, "use a dataclass"),
        (Plain, "because Plain cannot"),
        (dict[str, list[Plain]], "because Plain cannot"),
        (list[int] | set[int], "use a dataclass"),
    ],
)
def test_impossible_value_codecs_are_refused(spec: Any, reason: str) -> None:
    with pytest.raises(InvalidError, match=reason):
        value_codec(spec)


@pytest.mark.parametrize("spec", ["json", "msgpack", "bytes", "str", Order, list[int]])
def test_a_codec_can_be_sent_to_another_process(spec: Any) -> None:
    codec = value_codec(spec)
    for again in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert (again.name, again.exact, again.spec) == (codec.name, codec.exact, codec.spec)
    assert pickle.loads(pickle.dumps(key_codec("json"))) == key_codec("json")


def test_a_codec_of_your_own_is_taken_as_it_is() -> None:
    codec = Codec("upper", str.encode, bytes.decode, frozenset())
    assert value_codec(codec) is codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert codec.checked_encode("a") == b"a"
    with pytest.raises(InvalidError, match="choose another codec"):
        codec.checked_encode(1)
    keys = KeyCodec("mine", encode_key, bytes.decode)
    assert key_codec(keys) is keys


@pytest.mark.parametrize(
    ("name", "key", "data", "back"),
    [
        ("str", "ü", b"\xc3\xbc", "ü"),
        ("str", 7, b"7", "7"),
        ("str", 1.5, b"1.5", "1.5"),
        ("str", -0.0, b"0.0", "0.0"),
        ("str", True, b"True", "True"),
        ("bytes", b"\xff", b"\xff", b"\xff"),
        ("int", -7, b"-7", -7),
        ("json", "a", b'"a"', "a"),
        ("json", ("eu", (7, True, 1.5)), b'["eu",[7,true,1.5]]', ("eu", (7, True, 1.5))),
        ("json", -0.0, b"0.0", 0.0),
        ("canonical", ("eu", b"x"), b"\x05\x02eu\x00\x01x\x00\x00", ("eu", b"x")),
    ],
)
def test_topic_keys_are_written_and_read(name: str, key: Key, data: bytes, back: Key) -> None:
    codec = key_codec(name)
    assert codec.encode(key) == data
    found = codec.decode(data)
    assert found == back
    assert type(found) is type(back)


@pytest.mark.parametrize(
    ("name", "key", "remedy"),
    [
        ("str", b"a", 'key="bytes"'),
        ("str", ("a", 1), 'key="json" or "canonical"'),
        ("str", NAN, "drop the event"),
        ("str", None, "use a key of"),
        ("str", "\ud800", "surrogates"),
        pytest.param("str", 10**5000, "4300 digits", id="str-huge"),
        ("str", np.float64(1), "use a key of"),
        ("bytes", "a", 'key="str"'),
        ("int", "7", 'key="str"'),
        ("int", True, 'key="str"'),
        pytest.param("int", 10**5000, "4300 digits", id="int-huge"),
        ("json", b"a", 'key="bytes"'),
        ("json", ("a", (b"b",)), 'key="bytes"'),
        ("json", INF, 'key="canonical"'),
        ("json", (NAN,), "drop the event"),
        ("json", [1], "use a key of"),
        ("json", "\ud800", "surrogates"),
        ("canonical", None, "drop events"),
    ],
)
def test_topic_keys_that_do_not_fit_are_refused_with_the_remedy(name: str, key: Any, remedy: str) -> None:
    with pytest.raises(InvalidError) as refusal:
        key_codec(name).encode(key)
    assert remedy in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("str", b"\xff"),
        ("int", b""),
        ("int", b"a"),
        ("int", b" 7"),
        ("int", b"+7"),
        ("int", b"007"),
        ("int", b"1_0"),
        ("int", b"1" * 5000),
        ("json", b"{}"),
        ("json", b"null"),
        ("json", b"[1,[null]]"),
        ("json", b"["),
        ("json", b"[" * 100_000),
        ("canonical", b"a"),
    ],
)
def test_topic_keys_that_cannot_be_read_are_a_value_error(name: str, data: bytes) -> None:
    with pytest.raises(ValueError):
        key_codec(name).decode(data)


def test_an_unknown_key_codec_is_refused() -> None:
    with pytest.raises(InvalidError, match='use "str", "bytes", "int", "json", "canonical"'):
        key_codec("avro")
