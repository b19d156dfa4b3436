"""concat: two streams as one, in the order of the source where they have one."""

import pytest

from penstock import Application, InvalidError


def test_branches_joined_again_are_in_the_order_of_the_source(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    odd = stream.filter(lambda n: n % 2).map(lambda n: -n)
    even = stream.filter(lambda n: n % 2 == 0)
    even.concat(odd).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(8)]}, epochs=2)
    assert outputs.values("out") == [0, -1, 2, -3, 4, -5, 6, -7]


def test_a_stream_joined_with_its_copy_has_every_event_twice(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream.concat(stream.map(lambda n: n + 100)).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1), ("a", 2)]}).values("out") == [1, 101, 2, 102]


def test_a_stream_joined_with_itself_has_two_events_that_share_nothing(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream.concat(stream).update(lambda v: v["seen"].append(1)).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", {"seen": []})]}).values("out") == [{"seen": [1]}, {"seen": [1]}]


def test_two_topics_as_one(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    left, right = app.dataframe(app.topic("left")), app.dataframe(app.topic("right"))
    both = left.map(lambda n: ["left", n]).concat(right.map(lambda n: ["right", n]))
    both.stateful_map("count", lambda k, v, c: ([*v, c + 1], c + 1), default=0).to_topic(app.topic("out"))
    items = [("a", n) for n in range(4)]
    outputs = pipeline.run(app, {"left": items, "right": items}, epochs=2)
    for side in ("left", "right"):
        assert [v[1] for v in outputs.values("out") if v[0] == side] == [0, 1, 2, 3]
    assert [v[2] for v in outputs.values("out")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert dict(pipeline.state("count")) == {"a": 8}


def test_two_topics_with_keys_of_two_codecs_keep_them_apart(pipeline):
    app = pipeline.application()
    left, right = app.dataframe(app.topic("left", key="int")), app.dataframe(app.topic("right"))
    left.concat(right).stateful_map("count", lambda k, v, c: (c + 1, c + 1), default=0)
    pipeline.run(app, {"left": [(1, 0), (1, 0)], "right": [("1", 0)]})
    assert dict(pipeline.state("count")) == {1: 2, "1": 1}


def test_a_stream_joined_with_a_re_keyed_one(pipeline, partitions):
    """The one has to wait for the other: both meet behind the change of the key."""
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    both = stream.map(lambda n: ["plain", n]).concat(stream.key_by("b", lambda n: "b").map(lambda n: ["keyed", n]))
    both.stateful_map("count", lambda k, v, c: ([*v, c + 1], c + 1), default=0).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(4)]}, epochs=2)
    assert outputs.of_key("out", "a") == [["plain", n, n + 1] for n in range(4)]
    assert outputs.of_key("out", "b") == [["keyed", n, n + 1] for n in range(4)]
    assert dict(pipeline.state("count")) == {"a": 4, "b": 4}


def test_re_keyed_branches_of_one_source_are_joined_in_its_order(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    odd = stream.filter(lambda n: n % 2).key_by("odd", lambda n: "k")
    even = stream.filter(lambda n: n % 2 == 0).key_by("even", lambda n: "k")
    even.concat(odd).stateful_map("last", lambda k, n, s: ([s, n], n)).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(6)]})
    assert outputs.values("out") == [[None, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]


def test_branches_of_different_length_are_joined_in_the_order_of_the_source(pipeline, partitions):
    app = pipeline.application(partitions=partitions)
    stream = app.dataframe(app.topic("in"))
    short = stream.filter(lambda n: n % 2).key_by("short", lambda n: "k")
    long = stream.filter(lambda n: n % 2 == 0).key_by("one", lambda n: n).key_by("two", lambda n: "k")
    long.concat(short).concat(stream.map(lambda n: n + 100).key_by("third", lambda n: "k")).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(6)]})
    assert [v for v in outputs.values("out") if v < 100] == [0, 1, 2, 3, 4, 5]
    assert [v % 100 for v in outputs.values("out")] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_many_events_of_re_keyed_branches_are_joined_in_the_order_of_the_source(pipeline):
    """More than one batch, so that no batch of the one may overtake those of the other."""
    app = pipeline.application(partitions=1)
    stream = app.dataframe(app.topic("in"))
    rare = stream.filter(lambda n: n % 1000 == 0).key_by("rare", lambda n: "k")
    common = stream.filter(lambda n: n % 1000).key_by("common", lambda n: "k")
    common.concat(rare).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", n) for n in range(40_000)]})
    assert outputs.values("out") == list(range(40_000))


def test_a_stream_of_another_application_is_refused(pipeline):
    app, other = pipeline.application(), Application("other")
    stream = app.dataframe(app.topic("in"))
    for wrong in (other.dataframe(other.topic("in")), app.topic("in"), None):
        with pytest.raises(InvalidError, match="joins two streams of one application"):
            stream.concat(wrong)
