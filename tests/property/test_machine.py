"""An application under a random life: events, epochs, crashes, restarts, damage; a dict says what must come out.

The oracle is the sentence "every event counts once, in order": it folds the events of each committed epoch over plain
dicts. It knows nothing of segments, records, replicas or partitions.
"""

import shutil
import tempfile
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock import Application, Event, State, StatefulLogic
from penstock.epochs import coordinator
from penstock.errors import StorageError
from penstock.state.keys import encode_key
from penstock.storage import memory_storage
from penstock.testing import Crash, FaultyStorage, TestDriver

KEYS = ["a", "", "ä", 1, 1.0, True, -7, b"a", ("a", 1), ("a", (b"", False))]
SNAPSHOTS = timedelta(seconds=10)
EVENTS_PER_EPOCH = 5
TTL_MS = 40

names = st.sampled_from(["x", "y"])
small = st.integers(0, 3)
values = st.one_of(small, st.text(max_size=2), st.lists(small, max_size=2), st.just({"n": None}))
operations = st.one_of(
    st.tuples(st.sampled_from(["set", "ttl"]), names, values),
    st.tuples(st.just("delete"), names, st.none()),
    st.tuples(st.just("append"), st.sampled_from(["l", "m"]), values),
    st.tuples(st.just("pop"), st.sampled_from(["l", "m"]), st.booleans()),
    st.tuples(st.just("put"), small, values),
    st.tuples(st.just("drop"), small, st.none()),
    st.tuples(st.sampled_from(["event timer", "clock timer", "cancel"]), small, st.none()),
)

events = st.lists(st.tuples(st.sampled_from(KEYS), operations, st.integers(-30, 60)), max_size=7)


def do(operation: list[Any], state: State) -> dict[str, Any]:
    """One operation on the state of a key; the output is everything that can be seen of that state afterwards."""
    verb, name, value = operation
    if verb in ("set", "ttl"):
        state.set(name, value, ttl=timedelta(milliseconds=TTL_MS) if verb == "ttl" else None)
    elif verb == "delete":
        state.delete(name)
    elif verb == "append":
        state.list(name).append(value)
    elif verb == "pop" and len(state.list(name)):
        state.list(name).pop_first() if value else state.list(name).pop()
    elif verb == "put":
        state.map("map")[name] = value
    elif verb == "drop":
        state.map("map").pop(name, None)
    seen = {one: state.get(one) for one in state.keys()}  # noqa: SIM118 - State is no mapping
    lists = {one: list(state.list(one)) for one in ("l", "m")}
    return {"names": seen, "lists": lists, "map": list(state.map("map").items()), "size": len(state.map("map"))}


def count(key: Any, operation: list[Any], total: int) -> tuple[int, int | None]:
    """Counts the events of a key, and forgets the count when something is dropped."""
    return total + 1, None if operation[0] == "drop" else total + 1


class Alarm(StatefulLogic):
    """Sets timers, counts those that came."""

    def on_data(self, event: Event, state: Any, emit: Any) -> Any:
        verb, delay, _ = event.value
        if verb == "event timer":
            self.timers.at_event_time(event.timestamp_ms + 10 * delay, name="event")
        elif verb == "clock timer":
            self.timers.at_processing_time(10_000 * delay, name="clock")
        elif verb == "cancel":
            self.timers.cancel("event")
        return state

    def on_timer(self, key: Any, state: Any, timer: Any, emit: Any) -> Any:
        emit([timer.name, timer.time_ms, state])
        return state + 1


class Oracle:
    """What each key's state and outputs must be. Keys are in their canonical form: 1, 1.0 and True are three."""

    def __init__(self) -> None:
        self.epoch, self.highest = -1, -1
        self.sent: list[tuple[Any, int, tuple[Any, ...]]] = []
        self.named: dict[Any, dict[str, tuple[Any, int | None]]] = defaultdict(dict)
        self.lists: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: {"l": [], "m": []})
        self.maps: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.counts: dict[Any, int] = {}
        self.timers: dict[tuple[str, Any], int] = {}
        self.alarms: dict[Any, int] = {}
        self.out: dict[str, dict[Any, list[Any]]] = {t: defaultdict(list) for t in ("states", "counts", "alarms")}

    def commit(self, clock_ms: int) -> None:
        """One more epoch was committed, at this time: it took the oldest events."""
        watermark, self.epoch = self.highest, self.epoch + 1
        batch, self.sent = self.sent[:EVENTS_PER_EPOCH], self.sent[EVENTS_PER_EPOCH:]
        for key, time_ms, operation in batch:
            self.highest = max(self.highest, time_ms)
            self._event(key, time_ms, *operation)
        for (clock, key), due in sorted(self.timers.items(), key=lambda item: (item[1], item[0])):
            if due <= (watermark if clock == "event" else clock_ms):
                self.out["alarms"][key].append([clock, due, self.alarms.get(key, 0)])
                self.alarms[key] = self.alarms.get(key, 0) + 1
                del self.timers[clock, key]
        for held in self.named.values():
            for name in [name for name, (_, due) in held.items() if due is not None and due <= watermark]:
                del held[name]

    def _event(self, key: Any, time_ms: int, verb: str, name: Any, value: Any) -> None:
        held, lists, entries = self.named[key], self.lists[key], self.maps[key]
        if verb in ("set", "ttl"):
            held[name] = (value, time_ms + TTL_MS if verb == "ttl" else None)
        elif verb == "delete":
            held.pop(name, None)
        elif verb == "append":
            lists[name].append(value)
        elif verb == "pop" and lists[name]:
            lists[name].pop(0 if value else -1)
        elif verb == "put":
            entries[name] = value
        elif verb == "drop":
            entries.pop(name, None)
        elif verb == "event timer":
            self.timers["event", key] = time_ms + 10 * name
        elif verb == "clock timer":
            self.timers["clock", key] = 10_000 * name
        elif verb == "cancel":
            self.timers.pop(("event", key), None)
        seen = {one: v for one, (v, due) in sorted(held.items()) if due is None or due > time_ms}
        shown = {"names": seen, "lists": {n: list(v) for n, v in lists.items()}}
        shown |= {"map": [list(item) for item in sorted(entries.items())], "size": len(entries)}
        self.out["states"][key].append(shown)
        self.counts[key] = total = self.counts.get(key, 0) + 1
        self.out["counts"][key].append(total)
        if verb == "drop":
            del self.counts[key]
        self.alarms.setdefault(key, 0)

    def states(self) -> dict[Any, dict[str, Any]]:
        """What the step with `State` has stored."""
        found: dict[Any, dict[str, Any]] = {}
        for key in self.named:
            found[key] = {name: value for name, (value, _) in self.named[key].items()}
            found[key] |= {name: items for name, items in self.lists[key].items() if items}
            found[key] |= {"map": self.maps[key]} if self.maps[key] else {}
        return {key: state for key, state in found.items() if state}


def canonical(mapping: Any) -> dict[bytes, Any]:
    return {encode_key(key): mapping[key] for key in mapping}


class Life(RuleBasedStateMachine):
    """What can happen to an application."""

    partitions = 1
    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.storage, self.topics = memory_storage(), memory_storage()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-machine-")) if self.on_disk else None
        self.oracle = Oracle()
        self.now_ms = 0

    @initialize(full_every=st.sampled_from([1, 3]), retain=st.sampled_from([1, 4]))
    def begin(self, full_every: int, retain: int) -> None:
        coordinator.FULL_EVERY = full_every
        app = self.app = Application(
            "life",
            partitions=self.partitions,
            snapshots=SNAPSHOTS,
            retain=retain,
            max_events_per_epoch=EVENTS_PER_EPOCH,
        )
        source = app.dataframe(app.topic("in", key="canonical"))
        source.apply(do, stateful=True).to_topic(app.topic("states", key="canonical"))
        source.stateful_map("count", count, default=0).to_topic(app.topic("counts", key="canonical"))
        source.stateful_op("alarm", Alarm(), default=0).to_topic(app.topic("alarms", key="canonical"))
        self.driver = TestDriver(app, storage=self.storage, topics=self.topics, local_dir=self.folder)

    @rule(events=events)
    def send(self, events: list[Any]) -> None:
        for key, operation, moves in events:
            self.now_ms = max(0, self.now_ms + moves)
            self.driver.send("in", list(operation), key=key, timestamp_ms=self.now_ms)
            self.oracle.sent.append((encode_key(key), self.now_ms, operation))

    @rule(events=events)
    def epoch(self, events: list[Any]) -> None:
        self.send(events)
        self.driver.epoch()
        self.compare()

    @rule(
        events=events,
        n=st.integers(1, 40),
        fault=st.sampled_from(["die_before", "die_after", "lose_answer"]),
        topics=st.booleans(),
        epochs=st.integers(1, 3),
    )
    def crash(self, events: list[Any], n: int, fault: str, topics: bool, epochs: int) -> None:
        """The n-th write of a run fails, wherever that is: in its start, in an epoch, while it collects, at its end."""
        self.send(events)
        faulty = FaultyStorage(self.topics if topics else self.storage, **{fault: n})
        self.driver.crash()
        with suppress(Crash, StorageError):
            self.driver.restart(**({"topics": faulty} if topics else {"storage": faulty}))
            for _ in range(epochs):
                self.driver.epoch()
            self.driver.close()
        self.driver.crash()
        self.driver.restart(storage=self.storage, topics=self.topics)
        self.compare()

    @rule(properly=st.booleans())
    def reopen(self, properly: bool) -> None:
        if not properly:
            self.driver.crash()
        self.driver.restart()
        self.compare()

    @rule(events=events)
    def snapshot(self, events: list[Any]) -> None:
        self.send(events)
        self.driver.advance_time(SNAPSHOTS)
        self.driver.epoch()
        self.compare()

    @rule()
    def collect(self) -> None:
        self.driver._running().coordinator.collect()
        self.compare()

    @rule(ms=st.integers(-5_000, 15_000))
    def advance_time(self, ms: int) -> None:
        self.driver.advance_time(ms)

    def compare(self, driver: TestDriver | None = None) -> None:
        """State and outputs are those of the oracle, after it has seen what was committed."""
        driver = driver or self.driver
        view = driver.view
        while self.oracle.epoch < view.epoch:
            # Within a rule the clock stands still, so all epochs since the last look ran at this time.
            self.oracle.commit(view.clock_ms)
        states = {"do": self.oracle.states(), "count": self.oracle.counts, "alarm": self.oracle.alarms}
        for step, held in states.items():
            found = canonical(driver.state(step))
            wrong = {key for key in found.keys() | held.keys() if found.get(key) != held.get(key)}
            assert not wrong, f"{step} at epoch {view.epoch}: {[(k, found.get(k), held.get(k)) for k in wrong]}"
        for topic, expected in self.oracle.out.items():
            received: dict[bytes, list[Any]] = defaultdict(list)
            for event in driver.received(topic):
                received[encode_key(event.key)].append(event.value)
            assert received == expected, topic

    def teardown(self) -> None:
        coordinator.FULL_EVERY = FULL_EVERY
        if self.folder is not None:
            shutil.rmtree(self.folder)


FULL_EVERY = coordinator.FULL_EVERY
SOAK = settings.default is not None and settings.default.max_examples >= 1_000


class OnDisk(Life):
    """The same with local replicas on disk, to which something can happen."""

    on_disk = True

    @rule(events=events, epochs=st.integers(1, 4))
    def elsewhere(self, events: list[Any], epochs: int) -> None:
        """The application runs on another machine for a while, and then here again, where the replicas are old."""
        self.send(events)
        self.driver.close()
        other = TestDriver(
            self.app, storage=self.storage, topics=self.topics, clock=self.driver.clock, seed=1 + self.oracle.epoch
        )
        for _ in range(epochs):
            other.epoch()
            self.driver.advance_time(SNAPSHOTS)
            self.compare(other)
        other.close()
        self.driver.restart()
        self.driver.epoch()
        self.compare()

    @rule(how=st.sampled_from(["delete", "truncate", "flip"]), which=st.integers(0, 100), at=st.floats(0, 1))
    def damage_local(self, how: str, which: int, at: float) -> None:
        """Something happens to a local file between two runs."""
        assert self.folder is not None
        self.driver.close()
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        if files:
            file = files[which % len(files)]
            data = bytearray(file.read_bytes())
            place = min(int(at * len(data)), len(data) - 1)
            if how == "delete":
                file.unlink()
            elif how == "truncate":
                file.write_bytes(data[:place])
            elif data:
                data[place] ^= 0x41
                file.write_bytes(data)
        self.driver.restart()
        self.driver.epoch()
        self.compare()


class InThree(Life):
    partitions = 3


class OnDiskInThree(OnDisk):
    partitions = 3


HOW_LONG = settings(max_examples=200 if SOAK else 12, stateful_step_count=100 if SOAK else 30, deadline=None)
TestInMemory = Life.TestCase
TestOnDisk = OnDisk.TestCase
TestInMemoryInThreePartitions = InThree.TestCase
TestOnDiskInThreePartitions = OnDiskInThree.TestCase
TestInMemory.settings = TestOnDisk.settings = HOW_LONG
TestInMemoryInThreePartitions.settings = TestOnDiskInThreePartitions.settings = HOW_LONG
