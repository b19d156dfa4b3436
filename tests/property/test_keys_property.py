"""Keys, for all keys: they come back, keep their order, and none begins with another."""

from typing import Any

import pyarrow as pa
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import InvalidError
from penstock.state.key_codecs import key_codec
from penstock.state.keys import (
    KEY_GROUPS,
    Key,
    decode_key,
    encode_key,
    encode_text_keys,
    group_range,
    key_group,
    key_groups,
    partition_of,
    row_prefix,
    split_key,
)

# Few different characters, so that keys often agree in their first ones, and the escaped ones among them.
texts = st.text(st.sampled_from("\0\1\2aü\uffff🌍"), max_size=12) | st.text(max_size=30)
raws = st.binary(max_size=30) | st.lists(st.sampled_from([0, 1, 2, 255]), max_size=8).map(bytes)
ints = st.integers() | st.integers(-(2**200), 2**200) | st.integers(-300, 300)
floats = st.floats(allow_nan=False)
scalars: st.SearchStrategy[Any] = texts | raws | ints | floats | st.booleans()
keys: st.SearchStrategy[Any] = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def identity(key: Any) -> Any:
    """What a key is: its types as well as its values, of which Python's == sees only the values."""
    return tuple(map(identity, key)) if isinstance(key, tuple) else (type(key), key)


@given(keys)
def test_every_key_comes_back_with_its_types(key: Key) -> None:
    assert identity(decode_key(encode_key(key))) == identity(key)


@given(texts | raws | ints | floats, st.data())
def test_order_is_that_of_python_within_a_type(one: Any, data: st.DataObject) -> None:
    strategy = {str: texts, bytes: raws, int: ints, float: floats}[type(one)]
    other: Any = data.draw(strategy)
    assert (encode_key(one) < encode_key(other)) == (one < other)
    assert (encode_key(one) == encode_key(other)) == (one == other)


@given(st.lists(st.tuples(texts, ints, floats), max_size=2), st.lists(st.tuples(texts, ints, floats), max_size=2))
def test_order_of_tuples_is_that_of_python(one: list[Any], other: list[Any]) -> None:
    assert (encode_key(tuple(one)) < encode_key(tuple(other))) == (one < other)


@given(keys, keys)
def test_different_keys_have_forms_of_which_none_begins_with_the_other(one: Key, other: Key) -> None:
    assume(identity(one) != identity(other))
    assert not encode_key(one).startswith(encode_key(other))
    assert not encode_key(other).startswith(encode_key(one))


@given(texts, texts)
def test_no_text_begins_with_another_text(one: str, other: str) -> None:
    assert encode_key(one + other).startswith(encode_key(one)) == (other == "")


@given(keys, st.binary(max_size=8))
def test_a_key_ends_where_it_ends_whatever_follows(key: Key, rest: bytes) -> None:
    row = row_prefix(encode_key(key)) + rest
    found, end = split_key(row, 2)
    assert identity(found) == identity(key)
    assert row[end:] == rest


@given(st.binary(max_size=24) | st.lists(st.sampled_from([0, 1, 2, 5, 0x13, 0x15, 0x21, 97]), max_size=8).map(bytes))
def test_any_bytes_are_refused_or_are_the_one_form_of_a_key(data: bytes) -> None:
    try:
        key = decode_key(data)
    except ValueError:
        return
    assert encode_key(key) == data


@given(st.lists(texts, max_size=20), st.integers(0, 3), st.booleans())
def test_a_column_is_encoded_as_each_of_its_texts(column: list[str], skip: int, large: bool) -> None:
    array = pa.array(column, pa.large_string() if large else pa.string())[skip:]
    assert encode_text_keys(array).to_pylist() == [encode_key(text) for text in column[skip:]]


@given(st.lists(keys, max_size=20))
def test_groups_of_many_are_the_groups_of_each(many: list[Key]) -> None:
    forms = [encode_key(key) for key in many]
    assert key_groups(forms).tolist() == [key_group(form) for form in forms]


@given(st.integers(1, KEY_GROUPS), st.integers(0, KEY_GROUPS - 1))
def test_the_partition_of_a_group_is_the_one_whose_range_holds_it(partitions: int, group: int) -> None:
    partition = partition_of(group, partitions)
    assert group in group_range(partition, partitions)
    assert len(group_range(partition, partitions)) in (KEY_GROUPS // partitions, -(-KEY_GROUPS // partitions))


@given(keys)
def test_topic_keys_that_are_written_come_back(key: Key) -> None:
    for name in ("bytes", "int", "json", "canonical"):
        codec = key_codec(name)
        try:
            data = codec.encode(key)
        except InvalidError:
            assert name != "canonical"
            continue
        assert identity(codec.decode(data)) == identity(key)
