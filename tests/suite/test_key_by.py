"""key_by: a new key for each event, and the state of the steps behind it belongs to that key."""

from dataclasses import dataclass

import pytest

from penstock import Event, InvalidError


@dataclass
class Order:
    city: str
    amount: int


def total(key, n, before):
    return before + n, before + n


def test_state_behind_key_by_belongs_to_the_new_key(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in")).key_by("parity", lambda n: n % 2 == 0)
    stream.stateful_map("sum", total, default=0).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("x", n) for n in range(10)]}, epochs=2)
    assert outputs.of_key("out", "True") == [0, 2, 6, 12, 20]
    assert outputs.of_key("out", "False") == [1, 4, 9, 16, 25]
    assert dict(pipeline.state("sum")) == {True: 20, False: 25}


@pytest.mark.parametrize("key", ["a", b"a", 7, -7, 0.5, True, ("eu", 7), (("a",), b"x", 1.5, False), ()])
def test_a_key_keeps_its_type_in_the_pipeline(pipeline, key):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).key_by("by", lambda n: key)
    stream.apply(lambda v, k, t, h: repr(k), metadata=True).stateful_map("seen", lambda k, v, s: (v, repr(k))).to_topic(
        app.topic("out", key="canonical")
    )
    [event] = pipeline.run(app, {"in": [("x", 1)]})["out"]
    assert event.value == repr(key)
    assert repr(event.key) == repr(key)
    assert list(map(repr, pipeline.state("seen"))) == [repr(key)]


def test_key_by_keeps_time_and_headers(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).key_by("by", str).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [Event("a", 1, 5, (("h", b"x"),)), Event("a", 1, 6)]})
    assert [(e.key, e.timestamp_ms, e.headers) for e in outputs["out"]] == [("1", 5, (("h", b"x"),)), ("1", 6, ())]


def test_an_event_without_a_key_can_be_given_one(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).key_by("by", lambda n: "k")
    stream.stateful_map("sum", total, default=0).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [(None, 1), (None, 2)]}).values("out") == [1, 3]


def test_keys_change_several_times(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    for n in (7, 5, 3, 2):
        stream = stream.key_by(f"by {n}", lambda v, n=n: v % n)
        stream = stream.stateful_map(f"count {n}", lambda k, v, count: (v, count + 1), default=0)
    stream.to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", v) for v in range(42)]}, epochs=2)
    assert sorted(outputs.values("out")) == list(range(42))
    for n in (7, 5, 3, 2):
        assert dict(pipeline.state(f"count {n}")) == {k: len(range(k, 42, n)) for k in range(n)}


def test_values_travel_as_their_codec_says(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in", value=Order))
    stream.key_by("plain", lambda order: order.city).map(lambda v: type(v).__name__).to_topic(app.topic("plain"))
    typed = stream.key_by("typed", lambda order: order.city, value=Order)
    typed.map(lambda v: type(v).__name__).to_topic(app.topic("typed"))
    outputs = pipeline.run(app, {"in": [("a", Order("berlin", 3))]})
    assert outputs.values("plain") == ["dict"]
    assert outputs.values("typed") == ["Order"]


def test_values_that_json_does_not_have_travel_too(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).map(lambda n: {"raw": b"\xff", "nan": float("nan"), 1: 2})
    stream.key_by("by", lambda v: "k").map(repr).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1)]}).values("out") == ["{'raw': b'\\xff', 'nan': nan, 1: 2}"]


def test_the_key_function_must_be_a_function(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).key_by("by", "city")
