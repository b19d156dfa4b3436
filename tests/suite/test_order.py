"""The events of one key are processed in source order, over segments, partitions, epochs and changes of the key."""

import random

import pytest

from penstock import StatefulLogic

COUNT = 6000


class Offsets(StatefulLogic):
    def on_data(self, event, state, emit):
        emit(event.offset)


def in_order(key, value, last):
    """Emits whether the event comes behind the last one of its key."""
    number = value["n"]
    return {**value, "ok": last is None or number > last}, number


def in_order_of_topic(key, value, last):
    """Emits whether the event comes behind the last one of its key from its topic."""
    number = value["n"]
    return number > last.get(value["topic"], -1), {**last, value["topic"]: number}


def feed(driver, items, segments):
    """Send events as so many segments of a topic."""
    size = -(-len(items) // segments)
    for start in range(0, len(items), size):
        with driver.producer("in") as send:
            for key, value in items[start : start + size]:
                send(value, key=key, timestamp_ms=0)


@pytest.mark.parametrize("segments", [1, 9])
@pytest.mark.parametrize("epochs", [1, 3])
def test_events_of_a_key_are_in_source_order(pipeline, partitions, segments, epochs):
    rng = random.Random(3)
    app = pipeline.application(partitions=partitions, max_events_per_epoch=-(-COUNT // epochs))
    stream = app.dataframe(app.topic("in")).stateful_map("order", in_order)
    stream.to_topic(app.topic("out"))
    driver = pipeline.start(app)
    feed(driver, [(f"k{rng.randrange(300)}", {"n": n}) for n in range(COUNT)], segments)
    for _ in range(epochs + 1):
        driver.epoch()
    received = driver.received("out")
    assert len(received) == COUNT
    assert all(event.value["ok"] for event in received)
    last: dict[str, int] = {}
    for event in received:  # and so they are in the topic
        assert event.value["n"] > last.get(event.key, -1)
        last[event.key] = event.value["n"]


@pytest.mark.parametrize("epochs", [1, 3])
def test_events_of_a_key_from_several_topics_are_in_the_order_of_each(pipeline, partitions, epochs):
    rng = random.Random(4)
    app = pipeline.application(partitions=partitions, max_events_per_epoch=-(-COUNT // 3 // epochs))
    x, y, z = (app.dataframe(app.topic(name)) for name in ("x", "y", "z"))
    x.concat(y).concat(z).stateful_map("order", in_order_of_topic, default={}).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    for name in ("x", "y", "z"):
        for start in range(0, COUNT // 3, 500):  # several segments of each
            with driver.producer(name) as send:
                for n in range(start, start + 500):
                    send({"topic": name, "n": n}, key=f"k{rng.randrange(50)}", timestamp_ms=0)
    for _ in range(epochs):
        driver.epoch()
    assert [event.value for event in driver.received("out")] == [True] * COUNT


@pytest.mark.parametrize("segments", [1, 5])
def test_events_of_one_source_key_keep_their_order_through_changes_of_the_key(pipeline, partitions, segments):
    rng = random.Random(5)
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    for name, size in (("first", 40), ("second", 7), ("third", 1)):
        stream = stream.key_by(name, lambda v, size=size: v["r"] % size)
        stream = stream.stateful_map(f"order {name}", in_order)
        stream = stream.filter(lambda v: v["ok"])
    stream.to_topic(app.topic("out"))
    driver = pipeline.start(app)
    feed(driver, [("one", {"n": n, "r": rng.randrange(1000)}) for n in range(COUNT)], segments)
    driver.epoch()
    assert [event.value["n"] for event in driver.received("out")] == list(range(COUNT))


def test_events_are_in_order_of_offset_behind_a_change_of_the_key(pipeline, partitions):
    rng = random.Random(9)
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in")).stateful_op("offsets", Offsets()).key_by("together", lambda v: "all")
    stream.to_topic(app.topic("out"))
    driver = pipeline.start(app)
    feed(driver, [(f"k{rng.randrange(100)}", 0) for n in range(2000)], 4)
    driver.epoch()
    assert [event.value for event in driver.received("out")] == list(range(2000))


def test_outputs_of_one_event_stay_in_order(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in")).flat_map(lambda n: [[n, i] for i in range(3)])
    stream.key_by("together", lambda v: "all").flat_map(lambda v: [[*v, "a"], [*v, "b"]]).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("x", n) for n in range(500)]})
    assert outputs.values("out") == [[n, i, letter] for n in range(500) for i in range(3) for letter in "ab"]
