"""A bank whose money is conserved, whatever write of the protocol is the last one of a process.

Transfers are debited at one account, change their key, and are credited at another: two stages that must commit
together. Every test compares with a run in which nothing failed: the same state, the same outputs in the same order at
the same offsets, none twice. A message names the fault, so that it can be played again.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count, pairwise
from typing import Any

import pytest

from penstock import Application, Event, State
from penstock.epochs import coordinator
from penstock.errors import ConflictError, InvalidError, StorageError
from penstock.storage import Storage, memory_storage, open_storage
from penstock.testing import Crash, FaultyStorage, ManualClock, TestDriver

BATCHES = 6
ACCOUNTS = [f"account {n}" for n in range(7)]
FAULTS = ("die_before", "die_after", "lose_answer")
STORAGES = ("state", "topics")
SECOND_MS = 1000

seeds = count(1)
Outcome = dict[str, Any]


@pytest.fixture(autouse=True)
def _small_intervals() -> Iterator[None]:
    """Full records, forgetting and collection within a few epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "FULL_EVERY", 2)
        yield


def transfers(batch: int) -> list[dict[str, Any]]:
    chosen = random.Random(batch)
    return [
        {"id": 10 * batch + n, "from": chosen.choice(ACCOUNTS), "to": chosen.choice(ACCOUNTS), "amount": n + 1}
        for n in range(6)
    ]


@cache
def segments() -> list[dict[str, bytes]]:
    """What sending each batch of transfers adds to the storage of topics."""
    storage, found = open_storage("memory://transfers"), []
    topic = Application("sender", broker_address="memory://transfers").topic("transfers")
    for batch in range(BATCHES):
        before = set(storage.list(""))
        topic.append([Event(value["from"], value, timestamp_ms=batch) for value in transfers(batch)])
        found.append({name: storage.read(name) for name in storage.list("") if name not in before})
    return found


def debit(value: dict[str, Any], state: State) -> dict[str, Any]:
    spent = state.get("spent", default=0) + value["amount"]
    state.set("spent", spent)
    return {**value, "spent": spent}


def credit(value: dict[str, Any], state: State) -> dict[str, Any]:
    received = state.get("received", default=0) + value["amount"]
    state.set("received", received)
    return {"id": value["id"], "amount": value["amount"], "received": received}


def bank(fee: Callable[[], int] = lambda: 0) -> Application:
    """The bank; `fee` is added to each transfer when it is debited, so that debiting can be made to vary."""
    app = Application("bank", partitions=2, retain=1, snapshots=timedelta(seconds=2))
    debited = (
        app.dataframe(app.topic("transfers"))
        .map(lambda value: {**value, "amount": value["amount"] + fee()}, name="fee")
        .apply(debit, stateful=True, name="debit")
    )
    debited.to_topic(app.topic("debits"))
    credited = debited.key_by("to", lambda value: value["to"]).apply(credit, stateful=True, name="credit")
    credited.to_topic(app.topic("credits"))
    return app


BANK = bank()


def copy_of(storage: Storage) -> Storage:
    copy = memory_storage()
    for name in storage.list(""):
        copy.create(name, storage.read(name))
    return copy


class World:
    """What outlives a process: two storages, the time, and how many batches of transfers were sent."""

    def __init__(self, app: Application = BANK) -> None:
        self.app = app
        self.storages = {"state": memory_storage(), "topics": memory_storage()}
        self.clock = ManualClock()
        self.sent = 0

    def copy(self) -> "World":
        world = World(self.app)
        world.storages = {name: copy_of(storage) for name, storage in self.storages.items()}
        world.clock = ManualClock(self.clock.now_ms())
        world.sent = self.sent
        return world

    def start(self, **replaced: Storage) -> TestDriver:
        storages = self.storages | replaced
        return TestDriver(
            self.app, storage=storages["state"], topics=storages["topics"], clock=self.clock, seed=next(seeds)
        )

    def send(self) -> None:
        for name, data in segments()[self.sent].items():
            self.storages["topics"].create(name, data)
        self.sent += 1
        self.clock.advance(SECOND_MS)

    def catch_up(self, driver: TestDriver) -> None:
        while driver.view.counts.read < 6 * self.sent:
            driver.epoch()

    def play(self, until: int = BATCHES, **replaced: Storage) -> TestDriver:
        """Go on, as a new process would, until so many batches are done."""
        driver = self.start(**replaced)
        self.catch_up(driver)
        while self.sent < until:
            self.send()
            self.catch_up(driver)
        return driver

    def play_to_death(self, until: int = BATCHES, **replaced: Storage) -> None:
        """The same, but the process may die or stop on the way; ends properly if not."""
        with suppress(Crash, StorageError):
            self.play(until, **replaced).close()


def outcome(driver: TestDriver) -> Outcome:
    found: Outcome = {step: dict(driver.state(step)) for step in ("debit", "credit")}
    for topic in ("debits", "credits"):
        found[topic] = [(event.offset, event.key, event.value) for event in driver.received(topic)]
    return found


@cache
def worlds() -> list[World]:
    """The world before each batch, in a run without faults, and at the end."""
    world = World()
    before = [world.copy()]
    driver = world.start()
    for _ in range(BATCHES):
        before.append(world.copy())
        world.send()
        world.catch_up(driver)
    return [before[0], *before[2:], world]


@cache
def expected() -> Outcome:
    return outcome(worlds()[-1].start())


@cache
def logs(batch: int) -> dict[str, FaultyStorage]:
    """What a process writes to each storage that starts, runs a batch and ends."""
    world = worlds()[batch].copy()
    watched = {name: FaultyStorage(storage) for name, storage in world.storages.items()}
    # The transfers are sent through storages of their own: here is only what the run writes.
    world.play(batch + 1, **watched).close()
    return watched


def test_the_run_without_faults_conserves_the_total_and_publishes_each_transfer_once() -> None:
    found, sent = expected(), [value for batch in range(BATCHES) for value in transfers(batch)]
    total = sum(value["amount"] for value in sent)
    assert sum(state["spent"] for state in found["debit"].values()) == total
    assert sum(state["received"] for state in found["credit"].values()) == total
    for topic in ("debits", "credits"):
        assert sorted(value["id"] for _, _, value in found[topic]) == sorted(value["id"] for value in sent)
        assert [offset for offset, _, _ in found[topic]] == list(range(len(sent)))


def test_the_run_without_faults_writes_every_kind_of_object() -> None:
    state = [entry for batch in range(BATCHES) for entry in logs(batch)["state"].log]
    topics = [entry for batch in range(BATCHES) for entry in logs(batch)["topics"].log]
    created = {name.split("/")[0] for verb, name in state if verb == "create"}
    deleted = {name.split("/")[0] for verb, name in state if verb == "delete"}
    assert created == {"format.json", "runs", "segments", "outbox", "epochs", "published"}
    assert deleted == {"runs", "segments", "outbox", "epochs", "published"}
    assert any(name.endswith(".full.json") for verb, name in state if verb == "create")
    assert any(name.endswith(".full.json") for verb, name in state if verb == "delete")
    assert {name.split("/")[0] for _, name in topics} == {"debits", "credits"}
    segments = [ref for parts in worlds()[-1].start().view.segments.values() for refs in parts.values() for ref in refs]
    assert any(ref.snapshot for ref in segments), "no compaction took place"


def points() -> list[tuple[int, str]]:
    return [(batch, storage) for batch in range(BATCHES) for storage in STORAGES]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("batch", "storage"), points())
def test_a_fault_at_any_write_changes_nothing(batch: int, storage: str, fault: str) -> None:
    writes = logs(batch)[storage].writes
    assert writes > 0
    for n in range(1, writes + 1):
        world = worlds()[batch].copy()
        faulty = FaultyStorage(world.storages[storage], **{fault: n})
        world.play_to_death(batch + 1, **{storage: faulty})
        where = f"batch {batch}, {fault} write {n} of {writes} to {storage}: {faulty.log[-1:]}"
        assert faulty.writes >= n, f"{where}: the run did not come to this write"
        assert outcome(world.play()) == expected(), where


class Refusing:
    """A storage that takes no new objects for a while, as one that is full or cannot be reached."""

    def __init__(self, inner: Storage) -> None:
        self.refusals = 0
        self._inner = inner
        self.read, self.list, self.delete = inner.read, inner.list, inner.delete

    def create(self, name: str, data: bytes) -> bool:
        if self.refusals:
            self.refusals -= 1
            raise StorageError("full, as this test wants")
        return self._inner.create(name, data)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_that_goes_on_after_an_error_of_storage_loses_nothing(storage: str) -> None:
    """The same run is asked again, without a restart: an epoch that it could not publish is published first."""
    for refusals in range(1, 8):
        world = worlds()[3].copy()
        refusing = Refusing(world.storages[storage])
        driver = world.start(**{storage: refusing})
        world.send()
        refusing.refusals = refusals
        for _ in range(2 * refusals):
            with suppress(StorageError):
                driver.epoch()
        driver.close()
        assert outcome(world.play()) == expected(), f"{refusals} writes to {storage} refused"


def test_a_plan_that_lacks_a_sink_with_something_to_publish_is_refused() -> None:
    world = worlds()[0].copy()
    world.play_to_death(1, topics=FaultyStorage(world.storages["topics"], die_before=1))
    world.app = Application("bank", partitions=2)
    debited = world.app.dataframe(world.app.topic("transfers")).apply(debit, stateful=True, name="debit")
    debited.to_topic(world.app.topic("debits"))
    with pytest.raises(InvalidError, match=r"epoch 0 is committed.*'to credits'"):
        world.start()
    world.app = BANK
    assert outcome(world.play()) == expected()


def writes_of_restart(world: World, storage: str) -> int:
    """How many writes a process has that starts, catches up with what was sent, and ends."""
    trial = world.copy()
    watched = FaultyStorage(trial.storages[storage])
    trial.play(trial.sent, **{storage: watched}).close()
    return watched.writes


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("first", STORAGES)
def test_a_crash_while_recovering_from_a_crash_changes_nothing(first: str, storage: str) -> None:
    batch = 3  # an epoch that compacts, writes a full record, forgets and collects
    for n in range(1, logs(batch)[first].writes + 1, 2):
        left = worlds()[batch].copy()
        left.play_to_death(batch + 1, **{first: FaultyStorage(left.storages[first], die_after=n)})
        for m in range(1, writes_of_restart(left, storage) + 1):
            world = left.copy()
            world.play_to_death(left.sent, **{storage: FaultyStorage(world.storages[storage], die_after=m)})
            where = f"batch {batch}, died after write {n} to {first}, then after write {m} to {storage}"
            assert outcome(world.play()) == expected(), where


class Interrupted:
    """A storage in which something else happens right before the n-th call (of any verb, or of those that write)."""

    def __init__(self, inner: Storage, n: int, happens: Callable[[], None], reads: bool = False) -> None:
        self._inner = inner
        self._left = n
        self._happens = happens
        self._reads = reads

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._count(self._reads)
        return self._inner.read(name, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        self._count(self._reads)
        return self._inner.list(prefix, after)

    def create(self, name: str, data: bytes) -> bool:
        self._count()
        return self._inner.create(name, data)

    def delete(self, names: Sequence[str]) -> None:
        self._count()
        self._inner.delete(names)

    def _count(self, counts: bool = True) -> None:
        self._left -= counts
        if counts and self._left == 0:
            self._happens()


def race(batch: int, storage: str, n: int, lead: str, reads: bool, where: str) -> bool:
    """A second run starts before the n-th call of the first and has a lead of so much; then both go on to the end."""
    world = worlds()[batch].copy()
    runs: list[TestDriver] = []

    def overtake() -> None:
        second = world.start()
        runs.append(second)
        if lead != "nothing":
            world.catch_up(second)
        while lead == "everything" and world.sent < BATCHES:
            world.send()
            world.catch_up(second)

    first, stopped = None, 0
    try:
        first = world.start(**{storage: Interrupted(world.storages[storage], n, overtake, reads)})
        runs.append(first)
        if world.sent == batch:
            world.send()
        world.catch_up(first)
    except ConflictError:
        stopped += 1
        runs = [run for run in runs if run is not first]
    if len(runs) + stopped < 2:
        return False  # the first run has no n-th call
    for _ in range(3 * BATCHES):
        if len(runs) == 1 and world.sent == BATCHES and runs[0].view.counts.read == 6 * BATCHES:
            break
        for driver in list(runs):
            try:
                driver.epoch()
            except ConflictError:
                runs.remove(driver)
                stopped += 1
        assert runs, f"{where}: both stopped"
        if world.sent < BATCHES:
            world.send()
    assert stopped == 1, f"{where}: {stopped} runs stopped"
    assert outcome(runs[0]) == expected(), where
    return True


LEADS = ("nothing", "one batch", "everything")


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("batch", "storage"), [(0, "state"), (3, "state"), (3, "topics")])
def test_of_two_runs_that_race_one_stops_and_nothing_is_lost_or_doubled(batch: int, storage: str, lead: str) -> None:
    for n in count(1):
        where = f"batch {batch}, second run with a lead of {lead} before write {n} of the first to {storage}"
        if not race(batch, storage, n, lead, False, where):
            break
    assert n >= logs(batch)[storage].writes


@pytest.mark.parametrize("lead", LEADS)
def test_a_run_that_is_overtaken_while_it_reads_stops(lead: str) -> None:
    for n in count(1, 2):
        where = f"batch 3, second run with a lead of {lead} before call {n} of the first to state"
        if not race(3, "state", n, lead, True, where):
            break
    assert n > logs(3)["state"].writes


def chain_is_consistent(events: list[tuple[int, Any, dict[str, Any]]], total: str) -> bool:
    """Whether the totals of each key grow by just the amounts: no output of an attempt that was given up."""
    of_key: dict[Any, list[dict[str, Any]]] = {}
    for _, key, value in events:
        of_key.setdefault(key, [{total: 0}]).append(value)
    return all(
        after[total] == before[total] + after["amount"]
        for values in of_key.values()
        for before, after in pairwise(values)
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_state_and_outputs_belong_together_when_the_function_is_not_deterministic(storage: str, fault: str) -> None:
    calls = count()
    app, batch = bank(fee=lambda: next(calls)), 3
    left = World(app)
    left.play(batch)
    ids = sorted(value["id"] for number in range(batch + 2) for value in transfers(number))
    for n in range(1, logs(batch)[storage].writes + 1):
        world = left.copy()
        world.play_to_death(batch + 1, **{storage: FaultyStorage(world.storages[storage], **{fault: n})})
        found = outcome(world.play(batch + 2))
        where = f"{fault} write {n} to {storage}"
        for topic, step, total in (("debits", "debit", "spent"), ("credits", "credit", "received")):
            last = {key: {total: value[total]} for _, key, value in found[topic]}
            assert last == found[step], f"{where}: the last outputs of {topic} are not the state of {step}"
            assert chain_is_consistent(found[topic], total), f"{where}: the outputs of {topic} are of several attempts"
            assert sorted(value["id"] for _, _, value in found[topic]) == ids, f"{where}: {topic} lost or doubled some"
        amounts = [{value["id"]: value["amount"] for _, _, value in found[topic]} for topic in ("debits", "credits")]
        assert amounts[0] == amounts[1], f"{where}: money was lost between the accounts"
