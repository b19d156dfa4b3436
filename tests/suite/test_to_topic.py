"""to_topic: keys, values, times and headers reach a topic as its codecs say."""

from dataclasses import dataclass

import pytest

from penstock import Event, InvalidError, LogicError


@dataclass
class Order:
    amount: int


def send_under(pipeline, key_in_pipeline, **topic):
    app = pipeline.application()
    app.dataframe(app.topic("in")).key_by("by", lambda v: key_in_pipeline).to_topic(app.topic("out", **topic))
    return pipeline.run(app, {"in": [("a", 1)]})["out"]


def test_events_arrive_with_key_value_time_and_headers(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).to_topic(app.topic("out"))
    sent = [Event("a", {"n": 1}, 5, (("h", b"x"),)), Event("a", {"n": 2}, 6), Event(None, {"n": 3}, 7)]
    received = pipeline.run(app, {"in": sent})["out"]
    assert sorted((e.key or "", e.value["n"], e.timestamp_ms, e.headers) for e in received) == [
        ("", 3, 7, ()),
        ("a", 1, 5, (("h", b"x"),)),
        ("a", 2, 6, ()),
    ]


@pytest.mark.parametrize(
    ("key", "text"), [("a", "a"), (7, "7"), (-7, "-7"), (True, "True"), (0.5, "0.5"), ("é\0", "é\0")]
)
def test_numbers_and_booleans_are_written_as_their_text(pipeline, key, text):
    [event] = send_under(pipeline, key)
    assert event.key == text


@pytest.mark.parametrize(
    ("key", "codec"),
    [
        ((1, "a"), "canonical"),
        ((1, "a"), "json"),
        (b"\xff", "bytes"),
        (7, "int"),
        (7, "canonical"),
        (True, "canonical"),
        (1.0, "canonical"),
        (b"x", "canonical"),
    ],
)
def test_a_key_comes_back_as_it_was_with_a_codec_that_has_it(pipeline, key, codec):
    [event] = send_under(pipeline, key, key=codec)
    assert repr(event.key) == repr(key)


@pytest.mark.parametrize("key", [("a", 1), b"raw"])
def test_a_key_that_the_topic_cannot_hold_is_refused_with_the_remedy(pipeline, key):
    with pytest.raises(LogicError, match=r"step 'to out'.*topic 'in', offset 0.*choose key=.*canonical"):
        send_under(pipeline, key)


def test_what_was_written_can_be_read_by_another_application(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).key_by("by", lambda n: n).to_topic(app.topic("between", key="int"))
    again = app.dataframe(app.topic("between", key="int"))
    again.stateful_map("count", lambda k, v, c: (c + 1, c + 1), default=0).to_topic(app.topic("out", key="int"))
    outputs = pipeline.run(app, {"in": [("a", n % 3) for n in range(9)]})
    pipeline.run(app, {})
    assert sorted(outputs.pairs("out")) == [(k, n) for k in range(3) for n in (1, 2, 3)]


def test_a_key_function_gives_the_key_of_the_topic_and_changes_no_other(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    stream.to_topic(app.topic("out"), key=lambda v: v["city"])
    stream.stateful_map("count", lambda k, v, c: (v, c + 1), default=0)
    outputs = pipeline.run(app, {"in": [("a", {"city": "rome"}), ("b", {"city": None})]})
    assert sorted(outputs.pairs("out"), key=repr) == [("rome", {"city": "rome"}), (None, {"city": None})]
    assert dict(pipeline.state("count")) == {"a": 1, "b": 1}


def test_events_under_a_key_function_can_be_read_by_that_key(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).to_topic(app.topic("between"), key=lambda n: n % 5)
    app.dataframe(app.topic("between")).stateful_map("sum", lambda k, n, s: (s + n, s + n), default=0)
    pipeline.run(app, {"in": [("a", n) for n in range(20)]})
    pipeline.run(app, {})
    assert dict(pipeline.state("sum")) == {str(k): sum(range(k, 20, 5)) for k in range(5)}


def test_a_key_function_that_fails_leaves_keys_and_values_together(pipeline):
    app = pipeline.application(on_error="skip", partitions=1)
    stream = app.dataframe(app.topic("in")).map(lambda n: b"" if n == 3 else n)
    stream.to_topic(app.topic("out"), key=lambda n: ["list"] if n == 1 else "x" * 500 if n == 5 else f"k{n!r}")
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(8)]})
    assert sorted(outputs.pairs("out")) == [("k0", 0), ("k2", 2), ("k4", 4), ("k6", 6), ("k7", 7)]
    assert pipeline.counts.skipped == 3
    assert pipeline.counts.written == 5


@pytest.mark.parametrize(
    ("codec", "value"),
    [("json", {"a": [1, None, 0.5]}), ("msgpack", {"a": b"x"}), ("bytes", b"\xff"), ("str", "é"), (Order, Order(3))],
)
def test_values_are_written_as_the_codec_says(pipeline, codec, value):
    app = pipeline.application()
    app.dataframe(app.topic("in")).map(lambda n: value).to_topic(app.topic("out", value=codec))
    assert pipeline.run(app, {"in": [("a", 1)]}).values("out") == [value]


@pytest.mark.parametrize(
    ("codec", "value"), [("json", {1, object()}), ("json", b"x"), ("json", float("nan")), ("str", 7), (Order, {"x": 1})]
)
def test_a_value_that_the_topic_cannot_hold_names_step_key_and_offset(pipeline, codec, value):
    app = pipeline.application()
    app.dataframe(app.topic("in")).map(lambda n: value).to_topic(app.topic("out", value=codec))
    with pytest.raises(LogicError, match=r"step 'to out'.*key 'a', topic 'in', offset 0.*cannot be written"):
        pipeline.run(app, {"in": [("a", 1)]})


def test_two_branches_may_write_one_topic(pipeline):
    app = pipeline.application()
    out = app.topic("out")
    stream = app.dataframe(app.topic("in"))
    stream.map(lambda n: n).to_topic(out)
    stream.map(lambda n: -n).to_topic(out)
    outputs = pipeline.run(app, {"in": [("a", 1), ("a", 2)]}, epochs=2)
    assert sorted(outputs.values("out")) == [-2, -1, 1, 2]


def test_an_epoch_without_events_writes_nothing(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).to_topic(app.topic("out"))
    driver = pipeline.start(app)
    for _ in range(3):
        driver.epoch()
    assert driver.received("out") == []
    assert driver.view.epoch == 2


def test_something_that_is_no_topic_is_refused(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match=r"it needs a topic: to_topic\(app.topic\(name\)\)"):
        app.dataframe(app.topic("in")).to_topic("out")
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).to_topic(app.topic("out"), key="city")
