"""Damage to every kind of stored file: a byte flipped, the end cut off, the file gone.

Local files heal: the run goes on with the right results and leaves a line in the log. Durable ones give a
CorruptionError that names the file, or do provably no harm. There is never a wrong value, and never another error.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock import Application
from penstock.epochs import coordinator
from penstock.epochs.coordinator import load_retained
from penstock.errors import CorruptionError
from penstock.storage import Storage, memory_storage
from penstock.testing import Crash, FaultyStorage, ManualClock, TestDriver

EPOCHS = 11
FULL_EVERY = 3
RETAIN = 4
MORE = 4  # epochs that follow the damage: they compact, write a full record, forget and collect
MARK = b"damaged"

Objects = dict[str, bytes]
World = dict[str, Objects]
Damage = Callable[[bytes], bytes | None]
seeds = count(1)


@pytest.fixture(autouse=True)
def _small_intervals() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "FULL_EVERY", FULL_EVERY)
        yield


def application() -> Application:
    app = Application("sums", partitions=1, retain=RETAIN, snapshots=timedelta(seconds=3))
    numbers = app.dataframe(app.topic("numbers"))
    numbers.stateful_map("sum", lambda key, n, total: (total + n, total + n), default=0).to_topic(app.topic("totals"))
    return app


APP = application()


def storages(world: World) -> dict[str, Storage]:
    made = {"state": memory_storage(), "topics": memory_storage()}
    for which, objects in world.items():
        for name, data in objects.items():
            made[which].create(name, data)
    return made


def contents(made: dict[str, Storage]) -> World:
    return {which: {name: storage.read(name) for name in storage.list("")} for which, storage in made.items()}


def run(driver: TestDriver, epochs: range) -> None:
    for epoch in epochs:
        send(driver, epoch)
        driver.epoch()


def send(driver: TestDriver, epoch: int) -> None:
    for n in range(2):
        driver.send("numbers", epoch + n, key=f"key {(epoch + n) % 5}", timestamp_ms=epoch)
    driver.advance_time(1000)


def start(made: dict[str, Storage], epochs: int, local_dir: Path | None = None) -> TestDriver:
    clock = ManualClock(1000 * epochs)
    return TestDriver(
        APP, storage=made["state"], topics=made["topics"], local_dir=local_dir, clock=clock, seed=next(seeds)
    )


def outcome(driver: TestDriver) -> dict[str, Any]:
    topics = {topic: [(e.offset, e.key, e.value) for e in driver.received(topic)] for topic in ("numbers", "totals")}
    return {"state": dict(driver.state("sum")), **topics}


@cache
def published() -> World:
    """What is stored after some epochs, all of them published."""
    made = storages({})
    run(start(made, 0), range(EPOCHS))
    return contents(made)


@cache
def unpublished() -> World:
    """The same, but the run died right after the commit of the last epoch."""
    made = storages({})
    driver = start(made, 0)
    run(driver, range(EPOCHS - 1))
    send(driver, EPOCHS - 1)
    driver.crash()
    driver.restart(topics=FaultyStorage(made["topics"], die_before=1))
    with pytest.raises(Crash):
        driver.epoch()
    return contents(made)


@cache
def unread() -> World:
    """The same, with events that no epoch has read."""
    made = storages(published())
    sender = start({**made, "state": memory_storage()}, EPOCHS)
    send(sender, EPOCHS)
    return contents(made)


def expected() -> dict[str, Any]:
    return _expected_after(EPOCHS + MORE)


@cache
def _expected_after(epochs: int) -> dict[str, Any]:
    driver = start(storages({}), 0)
    run(driver, range(epochs))
    return outcome(driver)


def flipped(share: float) -> Damage:
    def flip(data: bytes) -> bytes:
        place = min(int(share * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :] if data else MARK

    return flip


DAMAGES: dict[str, Damage] = {
    **{f"byte flipped at {share}": flipped(share) for share in (0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.97, 1)},
    **{f"cut to {share}": (lambda data, share=share: data[: int(share * len(data))]) for share in (0, 0.1, 0.5, 0.95)},
    "cut by a byte": lambda data: data[:-1],
    "other bytes added": lambda data: data + MARK,
    "all zero": lambda data: bytes(len(data)) if data else MARK,
    "gone": lambda data: None,
}


def damaged(world: World, which: str, name: str, how: str) -> dict[str, Storage]:
    objects = dict(world[which])
    data = DAMAGES[how](objects.pop(name))
    return storages({**world, which: objects if data is None else {**objects, name: data}})


def go_on(made: dict[str, Storage], sent: int = EPOCHS) -> dict[str, Any]:
    """Start again on what is there, go on for some epochs, and look at everything."""
    driver = start(made, EPOCHS)
    while driver.view.counts.read < 2 * sent:
        driver.epoch()
    run(driver, range(sent, EPOCHS + MORE))
    return outcome(driver)


def judge(world: World, which: str, name: str, how: str, sent: int = EPOCHS) -> CorruptionError | None:
    """The error that this damage gives, if any; without one, everything must be right."""
    where = f"{which}: {name} {how}"
    made = damaged(world, which, name, how)
    if contents(made) == world:
        return CorruptionError(name, "this damage changes nothing here")
    try:
        found: dict[str, Any] | CorruptionError = go_on(made, sent)
    except CorruptionError as error:
        found = error
    if not isinstance(found, CorruptionError):
        assert found == expected(), where
        return None
    assert found.name == name, f"{where}: another object is blamed: {found}"
    if found.last_good_epoch is not None:
        assert oldest_retained(world) <= found.last_good_epoch <= EPOCHS + MORE, f"{where}: {found}"
    return found


def oldest_retained(world: World) -> int:
    made = storages(world)
    history = coordinator.open_format(made["state"], lambda: "").history
    return load_retained(made["state"], history).oldest.epoch


def kinds(world: World) -> dict[str, list[str]]:
    """The names of the stored objects by their kind."""
    made = storages(world)
    view = start(made, EPOCHS).view
    live = {ref.name: ref.snapshot for ref in view.of("sum", 0)}
    names = sorted(world["state"])
    records = [n for n in names if n.startswith("epochs/") and not n.endswith(".full.json")]
    return {
        "format": ["format.json"],
        "record": records,
        "full record": [n for n in names if n.endswith(".full.json")],
        "live delta": [n for n in names if live.get(n) is False],
        "live snapshot": [n for n in names if live.get(n) is True],
        "old segment": [n for n in names if n.startswith("segments/") and n not in live],
        "outbox": [n for n in names if n.startswith("outbox/")],
        "mark": [n for n in names if n.startswith("published/")],
        "claim": [n for n in names if n.startswith("runs/")],
    }


def test_the_kinds_are_all_there_and_nothing_is_of_no_kind() -> None:
    found = kinds(published())
    assert all(found.values()), found
    assert sorted(name for names in found.values() for name in names) == sorted(published()["state"])
    assert len(found["full record"]) > 1


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["format", "live delta", "live snapshot"])
def test_what_is_needed_to_start_is_missed_when_it_is_damaged(kind: str, how: str) -> None:
    for name in kinds(published())[kind]:
        error = judge(published(), "state", name, how)
        assert error is not None, f"{name} {how}: nobody noticed"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_record_that_is_damaged_is_named_with_the_epoch_before(how: str) -> None:
    records = kinds(published())["record"]
    for name in records[1:]:
        error = judge(published(), "state", name, how)
        if error is None:  # a full record behind it makes up for one that is gone
            assert how == "gone"
            continue
        assert error.last_good_epoch in (int(name[7:27]) - 1, None), f"{name} {how}: {error}"
        if int(name[7:27]) - 1 >= oldest_retained(published()):
            assert error.last_good_epoch is not None, f"{name} {how}: {error}"
    judge(published(), "state", records[0], how)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["full record", "old segment"])
def test_what_only_older_epochs_need_is_named_or_does_no_harm(kind: str, how: str) -> None:
    for name in kinds(published())[kind]:
        judge(published(), "state", name, how)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["outbox", "mark", "claim"])
def test_what_nobody_needs_any_more_does_no_harm(kind: str, how: str) -> None:
    for name in kinds(published())[kind]:
        error = judge(published(), "state", name, how)
        assert error is None or "changes nothing" in error.found, f"{name} {how}: {error}"


@pytest.mark.parametrize("how", DAMAGES)
def test_an_outbox_that_is_not_published_yet_is_missed_when_it_is_damaged(how: str) -> None:
    for name in kinds(unpublished())["outbox"][-1:]:
        error = judge(unpublished(), "state", name, how)
        assert error is not None, f"{name} {how}: nobody noticed"
        assert error.last_good_epoch == EPOCHS - 2


@pytest.mark.parametrize("how", DAMAGES)
def test_a_segment_of_the_source_is_missed_when_it_is_damaged(how: str) -> None:
    """One that was read is missed by who reads the topic, one that was not read by the run as well."""
    names = [name for name in sorted(unread()["topics"]) if name.startswith("numbers/")]
    # The first segments may be deleted by who does not need them any more; the rest of the topic begins later then.
    for name in (names[1 if how == "gone" else 0], names[len(names) // 2], names[-3]):
        assert judge(unread(), "topics", name, how, EPOCHS + 1) is not None, f"{name} {how}: nobody noticed"
    if how != "gone":  # the last segment of a topic that nobody has read is like one that was never sent
        assert judge(unread(), "topics", names[-1], how, EPOCHS + 1) is not None, f"{names[-1]} {how}: nobody noticed"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_segment_of_the_sink_is_missed_when_it_is_damaged(how: str) -> None:
    names = [name for name in sorted(published()["topics"]) if name.startswith("totals/")]
    for name in (names[1 if how == "gone" else 0], names[len(names) // 2], names[-1]):
        assert judge(published(), "topics", name, how) is not None, f"{name} {how}: nobody noticed"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """What a run that ended properly has left, durable and local."""
    folder, made = tmp_path_factory.mktemp("local"), storages(published())
    driver = start(made, EPOCHS, folder)
    driver.epoch()
    driver.close()
    return contents(made), folder


def local_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb", "seal.json"])
def test_local_files_heal(
    sealed: tuple[World, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    local = Path(shutil.copytree(sealed[1], tmp_path / "local"))
    path = local_files(local)[file]
    before = path.read_bytes()
    data = DAMAGES[how](before)
    path.unlink() if data is None else path.write_bytes(data)
    caplog.set_level("INFO", "penstock")
    driver = start(storages(sealed[0]), EPOCHS, local)
    run(driver, range(EPOCHS, EPOCHS + MORE))
    assert outcome(driver) == expected(), f"{file} {how}"
    driver.close()
    if file != "lock.mdb" and data != before:
        assert [r for r in caplog.records if "will be restored" in r.message], f"{file} {how}: no line in the log"


def test_a_value_that_was_changed_in_a_local_file_is_not_believed(
    sealed: tuple[World, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = Path(shutil.copytree(sealed[1], tmp_path / "local"))
    path = local_files(local)["data.mdb"]
    # A value stands right behind its key: here a number, of which the first digit is changed.
    changed, places = re.subn(rb"(key \d\x00)(\d)", lambda m: m[1] + bytes([m[2][0] ^ 1]), path.read_bytes())
    assert places > 0
    path.write_bytes(changed)
    driver = start(storages(sealed[0]), EPOCHS, local)
    run(driver, range(EPOCHS, EPOCHS + MORE))
    assert outcome(driver) == expected()
    assert [r for r in caplog.records if "will be restored" in r.message]


def test_a_sealed_replica_that_is_intact_is_used_without_a_word(
    sealed: tuple[World, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = Path(shutil.copytree(sealed[1], tmp_path / "local"))
    caplog.set_level("INFO", "penstock")
    driver = start(storages(sealed[0]), EPOCHS, local)
    run(driver, range(EPOCHS, EPOCHS + MORE))
    assert outcome(driver) == expected()
    assert not [r for r in caplog.records if "restored" in r.message]


@pytest.mark.parametrize("when", ["before each epoch", "before the end"])
def test_local_files_may_be_deleted_while_a_run_is_under_way(tmp_path: Path, when: str) -> None:
    local = tmp_path / "local"
    made = storages(published())
    driver = start(made, EPOCHS, local)
    for epoch in range(EPOCHS, EPOCHS + MORE):
        run(driver, range(epoch, epoch + 1))
        if when == "before each epoch":
            shutil.rmtree(local)
    shutil.rmtree(local, ignore_errors=True)
    driver.close()
    assert outcome(start(made, EPOCHS + MORE, local)) == expected()
