"""Names of stored objects: unique, in order, and safe whatever the user calls a step."""

from itertools import pairwise

import pytest

from penstock import names
from penstock.storage import open_storage

ODD = ["totals", "a b", "a/b", "..", ".", "...", "a%2Fb", "日本", "a\nb", ".partial", "#1", "?*", "A", "a"]


def test_names_are_where_the_documentation_says() -> None:
    assert names.epoch_record(42) == "epochs/00000000000000000042.json"
    assert names.full_record(42) == "epochs/00000000000000000042.full.json"
    assert names.segment("totals", 3, 42, "a1") == "segments/totals/00003/00000000000000000042-a1.parquet"
    assert names.outbox("out", 3, 42, "a1") == "outbox/out/00000000000000000042-00003-a1.parquet"
    assert names.published("out", 42) == "published/out/00000000000000000042"
    assert names.run(5) == "runs/00000000000000000005.json"
    assert names.ended(5) == "runs/00000000000000000005.ended"


def test_names_sort_like_their_epochs() -> None:
    epochs = [0, 1, 9, 10, 99, 100, 2**31, 2**63]
    for make in (names.epoch_record, names.full_record, names.run, lambda n: names.segment("s", 0, n, "z")):
        assert all(a < b for a, b in pairwise(map(make, epochs)))


@pytest.mark.parametrize("epoch", [0, 42, 2**63])
def test_number_is_read_back_from_every_name(epoch: int) -> None:
    made = [
        names.epoch_record(epoch),
        names.full_record(epoch),
        names.segment("7/8", 9, epoch, "a1"),
        names.outbox("out", 9, epoch, "a1"),
        names.published("out", epoch),
        names.run(epoch),
        names.ended(epoch),
    ]
    assert [names.number_of(name) for name in made] == [epoch] * len(made)


def test_odd_steps_and_sinks_name_objects_of_their_own() -> None:
    storage = open_storage("memory://odd-names")
    for odd in ODD:
        for name in (names.segment(odd, 0, 1, "a"), names.outbox(odd, 0, 1, "a"), names.published(odd, 1)):
            assert storage.create(name, b"") is True
    assert len(storage.list("")) == 3 * len(ODD)


@pytest.mark.parametrize("odd", ODD)
def test_odd_step_is_one_part_of_a_path(odd: str) -> None:
    part = names.as_part(odd)
    assert "/" not in part
    assert not part.startswith(".")
    assert part.isprintable()
