"""Keys: what is a key, what is refused and how, and where keys live."""

import enum
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import InvalidError
from penstock.state.keys import (
    KEY_GROUPS,
    MAX_KEY_BYTES,
    MAX_KEY_DEPTH,
    Key,
    decode_key,
    encode_key,
    encode_text_keys,
    group_range,
    key_group,
    key_groups,
    partition_of,
    row_prefix,
    shown,
    split_key,
)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


def nested(depth: int) -> Key:
    key: Key = ()
    for _ in range(depth - 1):
        key = (key,)
    return key


def test_equal_looking_keys_of_different_types_are_different_keys() -> None:
    keys: list[Key] = [1, 1.0, True, "1", b"1", (1,)]
    assert len({encode_key(key) for key in keys}) == len(keys)


def test_minus_zero_is_the_key_zero() -> None:
    assert encode_key(-0.0) == encode_key(0.0)
    assert str(decode_key(encode_key(-0.0))) == "0.0"


@pytest.mark.parametrize("sign", [1, -1])
def test_ints_keep_their_order_where_their_length_changes(sign: int) -> None:
    numbers = sorted(sign * (2**bits + step) for bits in range(0, 2040, 8) for step in (-1, 0, 1))
    forms = [encode_key(number) for number in numbers]
    assert forms == sorted(forms)
    assert [decode_key(form) for form in forms] == numbers


@pytest.mark.parametrize(
    ("value", "found", "remedy"),
    [
        (None, "None of type NoneType", "drop events without a key"),
        (float("nan"), "nan of type float", "drop such events"),
        ([1], "[1] of type list", "make it a tuple"),
        ({"a": 1}, "{'a': 1} of type dict", "make it a tuple"),
        (Colour.RED, "Colour", ".value"),
        (Level.LOW, "Level", ".value"),
        (Name("a"), "'a' of type", "str(key)"),
        (np.float64(1.5), "numpy.float64", ".item()"),
        (np.int64(1), "numpy.int64", ".item()"),
        (np.str_("a"), "numpy.str_", ".item()"),
        (bytearray(b"a"), "bytearray", "bytes(key)"),
        (object(), "of type object", "str(key)"),
        ("\ud800", "'\\ud800' of type str", "bytes as key"),
        ("\0\ud800", "'\\x00\\ud800' of type str", "bytes as key"),
        (("a", None), "None of type NoneType", "drop events without a key"),
        (2**2040, "an int of 256 bytes", "digest"),
        ("a" * 1000, "of type str takes 1002 bytes", "digest"),
        (nested(MAX_KEY_DEPTH + 1), "more than 16 deep", "flatter"),
    ],
)
def test_what_is_no_key_is_refused_with_value_type_and_remedy(value: Any, found: str, remedy: str) -> None:
    with pytest.raises(InvalidError) as refusal:
        encode_key(value)
    assert found in str(refusal.value)
    assert remedy in str(refusal.value)


def test_keys_at_the_limits_are_accepted() -> None:
    for key in ("a" * (MAX_KEY_BYTES - 2), b"\0" * 199, 2**2040 - 1, -(2**2040) + 1, nested(MAX_KEY_DEPTH)):
        assert decode_key(encode_key(key)) == key


@pytest.mark.parametrize("text", ["a" * 399, "ü" * 200, "\0" * 200, "🌍" * 100])
def test_keys_one_byte_over_the_limit_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="at most 400"):
        encode_key(text)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("", "1 bytes expected at byte 0, found 0"),
        ("00", "unknown tag 0x00"),
        ("ff", "unknown tag 0xff"),
        ("02 61", "no end"),
        ("02 61 00 00", "1 more bytes"),
        ("02 ff 00", "not UTF-8"),
        ("02 ed a0 80 00", "not UTF-8"),
        ("02 01 03 00", "unknown escape"),
        ("01 61 01 00", "unknown escape"),
        ("01 01 01 01 00", "unknown escape"),
        ("15", "1 bytes expected"),
        ("15 00", "shortest form"),
        ("16 00 01", "shortest form"),
        ("13 ff", "shortest form"),
        ("1d 01 05", "shortest form"),
        ("1d 00", "shortest form"),
        ("0b ff", "shortest form"),
        ("1d 09 01", "9 bytes expected"),
        ("21 00", "8 bytes expected"),
        ("21 ff f8 00 00 00 00 00 00", "never written"),
        ("21 7f ff ff ff ff ff ff ff", "never written"),
        ("05 15 01", "1 bytes expected"),
        ("05 " * 17 + "00 " * 17, "more than 16 deep"),
        ("02" + "61" * 399 + "00", "at most 400"),
    ],
)
def test_bytes_that_were_never_written_are_not_read(form: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_key(bytes.fromhex(form))


def test_a_key_is_split_from_what_follows_it() -> None:
    row = row_prefix(encode_key(("eu", 7))) + b"\xfftotal"
    assert split_key(row, 2) == (("eu", 7), len(row) - 6)


def test_all_rows_of_one_partition_lie_together() -> None:
    rows = sorted(row_prefix(encode_key(f"c-{number}")) for number in range(1000))
    partitions = [partition_of(int.from_bytes(row[:2], "big"), 7) for row in rows]
    assert partitions == sorted(partitions)


def test_every_key_group_belongs_to_exactly_one_partition() -> None:
    for partitions in (1, 2, 3, 7, 1000, 4095, 4096):
        owners = [partition for partition in range(partitions) for _ in group_range(partition, partitions)]
        assert owners == [partition_of(group, partitions) for group in range(KEY_GROUPS)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: group_range(0, 0),
        lambda: group_range(0, 4097),
        lambda: group_range(2, 2),
        lambda: group_range(-1, 2),
        lambda: partition_of(4096, 2),
        lambda: partition_of(-1, 2),
        lambda: partition_of(0, 0),
    ],
)
def test_impossible_partitions_are_refused(call: Any) -> None:
    with pytest.raises(InvalidError, match="give"):
        call()


@pytest.mark.parametrize("column_type", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize(
    "texts", [[], [""], ["", ""], ["a"], ["c-1", "", "Grüße", "🌍" * 50], ["a", "b\0"], ["a\1", "b"]]
)
def test_a_column_of_texts_is_encoded_as_each_text_is(column_type: pa.DataType, texts: list[str]) -> None:
    column = pa.array(["x\0", *texts, "y"], pa.string()).cast(column_type).slice(1, len(texts))
    forms = encode_text_keys(column)
    forms.validate(full=True)
    assert forms.to_pylist() == [encode_key(text) for text in texts]
    assert forms.type == pa.binary()


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array(["a", None]), "1 of the 2 keys"),
        (pa.array([1, 2]), "type int64"),
        (pa.array([b"\xff"]), "UTF-8"),
        (pa.array(["a", "b" * 399]), "takes 401 bytes"),
        (pa.array(["a\0", "b" * 399]), "takes 401 bytes"),
    ],
)
def test_a_column_with_something_that_is_no_key_is_refused(column: pa.Array, reason: str) -> None:
    with pytest.raises(InvalidError, match=reason):
        encode_text_keys(column)


def test_key_groups_of_nothing_is_an_empty_column() -> None:
    groups = key_groups([])
    assert groups.dtype == np.uint16
    assert len(groups) == 0


def test_keys_spread_evenly_over_partitions() -> None:
    counts = np.bincount([partition_of(key_group(encode_key(number)), 8) for number in range(8000)], minlength=8)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_a_value_without_a_repr_can_still_be_named() -> None:
    assert "ValueError" in shown(10**5000)
