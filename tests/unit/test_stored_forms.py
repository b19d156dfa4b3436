"""The stored forms as literals. If one of these fails, old state has become unreadable: change the code back."""

import struct

import pytest
import xxhash

from penstock.state.keys import KEY_GROUPS, Key, decode_key, encode_key, key_group, row_prefix

GOLDEN: list[tuple[Key, str, int]] = [
    ("", "02 00", 2814),
    ("c-1", "02 63 2d 31 00", 2069),
    ("customer-12", "02 63 75 73 74 6f 6d 65 72 2d 31 32 00", 1168),
    ("Grüße 🌍", "02 47 72 c3 bc c3 9f 65 20 f0 9f 8c 8d 00", 2828),
    ("a\x00b\x01", "02 61 01 01 62 01 02 00", 3406),
    (b"", "01 00", 2545),
    (b"\x00\x01\xff", "01 01 01 01 02 ff 00", 1808),
    (0, "14", 469),
    (1, "15 01", 81),
    (-1, "13 fe", 1338),
    (255, "15 ff", 137),
    (-256, "12 fe ff", 882),
    (2**63, "1c 80 00 00 00 00 00 00 00", 3951),
    (-(2**64), "0b f6 fe ff ff ff ff ff ff ff ff", 1369),
    (10**30, "1d 0d 0c 9f 2c 9c d0 46 74 ed ea 40 00 00 00", 1207),
    (-(10**30), "0b f2 f3 60 d3 63 2f b9 8b 12 15 bf ff ff ff", 3282),
    (0.0, "21 80 00 00 00 00 00 00 00", 3320),
    (1.5, "21 bf f8 00 00 00 00 00 00", 2132),
    (-1.5, "21 40 07 ff ff ff ff ff ff", 1420),
    (float("inf"), "21 ff f0 00 00 00 00 00 00", 2756),
    (False, "26", 456),
    (True, "27", 2553),
    ((), "05 00", 422),
    (("eu", 7), "05 02 65 75 00 15 07 00", 664),
    (
        ("a", (1, (2.0, b"x")), True),
        "05 02 61 00 05 15 01 05 21 c0 00 00 00 00 00 00 00 01 78 00 00 00 27 00",
        2399,
    ),
]


@pytest.mark.parametrize(("key", "form", "group"), GOLDEN, ids=[repr(key) for key, _, _ in GOLDEN])
def test_the_stored_form_of_a_key_never_changes(key: Key, form: str, group: int) -> None:
    canonical = bytes.fromhex(form)
    assert encode_key(key) == canonical
    assert decode_key(canonical) == key
    assert type(decode_key(canonical)) is type(key)
    assert key_group(canonical) == group
    assert row_prefix(canonical) == group.to_bytes(2, "big") + canonical


def test_the_number_of_key_groups_never_changes() -> None:
    assert KEY_GROUPS == 4096


@pytest.mark.parametrize(
    ("data", "digest"), [(b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)]
)
def test_the_hash_is_the_published_xxhash64(data: bytes, digest: int) -> None:
    assert xxhash.xxh64_intdigest(data, 0) == digest


def test_the_hash_with_seed_42_is_the_one_in_the_spark_manual() -> None:
    """Spark documents xxhash64('Spark', array(123), 2) = 5602566077635097486: each hash is the seed of the next."""
    digest = xxhash.xxh64_intdigest(b"Spark", 42)
    for number in (123, 2):
        digest = xxhash.xxh64_intdigest(struct.pack("<i", number), digest)
    assert digest == 5602566077635097486
