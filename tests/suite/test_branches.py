"""Branches: one stream used twice; neither branch sees what the other does to a value."""

from dataclasses import dataclass, field
from itertools import permutations

import pytest

from penstock import LogicError


@dataclass
class Order:
    tags: list[str] = field(default_factory=list)


def spoil(value):
    value["tags"].append("spoilt")
    value["more"] = True


BRANCHES = {
    "spoilt": lambda stream, app: stream.update(spoil).to_topic(app.topic("spoilt")),
    "direct": lambda stream, app: stream.to_topic(app.topic("direct")),
    "mapped": lambda stream, app: stream.map(lambda v: v).to_topic(app.topic("mapped")),
    "keyed": lambda stream, app: stream.key_by("k", lambda v: "k").to_topic(app.topic("keyed")),
    "filtered": lambda stream, app: stream.filter(bool).update(spoil).to_topic(app.topic("filtered")),
}


@pytest.mark.parametrize("names", list(permutations(BRANCHES, 3)), ids=" ".join)
def test_neither_branch_sees_what_the_other_does_in_whatever_order_they_are_declared(pipeline, names):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    for name in names:
        BRANCHES[name](stream, app)
    outputs = pipeline.run(app, {"in": [("a", {"tags": []}), ("b", {"tags": []})]})
    for name in names:
        changed = name in ("spoilt", "filtered")
        expected = {"tags": ["spoilt"], "more": True} if changed else {"tags": []}
        assert outputs.values(name) == [expected, expected], name


@pytest.mark.parametrize("first", ["sink", "update"])
def test_a_branch_within_a_branch(pipeline, first):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).map(lambda v: {"tags": [v]})
    if first == "sink":
        stream.to_topic(app.topic("whole"))
    left = stream.update(lambda v: v["tags"].append("left"))
    left.update(lambda v: v["tags"].append("deep")).to_topic(app.topic("deep"))
    left.to_topic(app.topic("left"))
    stream.update(lambda v: v["tags"].append("right")).to_topic(app.topic("right"))
    if first == "update":
        stream.to_topic(app.topic("whole"))
    outputs = pipeline.run(app, {"in": [("a", 1)]})
    assert outputs.values("whole") == [{"tags": [1]}]
    assert outputs.values("left") == [{"tags": [1, "left"]}]
    assert outputs.values("deep") == [{"tags": [1, "left", "deep"]}]
    assert outputs.values("right") == [{"tags": [1, "right"]}]


def test_values_of_a_type_are_not_shared_either(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in", value=Order))
    stream.update(lambda order: order.tags.append("x")).to_topic(app.topic("one", value=Order))
    stream.update(lambda order: order.tags.append("y")).to_topic(app.topic("two", value=Order))
    outputs = pipeline.run(app, {"in": [("a", Order(["new"]))]})
    assert outputs.values("one") == [Order(["new", "x"])]
    assert outputs.values("two") == [Order(["new", "y"])]


def test_a_topic_opened_as_a_stream_twice_is_read_once(pipeline):
    app = pipeline.application()
    topic = app.topic("in")
    app.dataframe(topic).to_topic(app.topic("one"))
    app.dataframe(topic).to_topic(app.topic("two"))
    outputs = pipeline.run(app, {"in": [("a", 1)]})
    assert outputs.values("one") == outputs.values("two") == [1]
    assert pipeline.counts.read == 1
    assert pipeline.counts.written == 2


def test_an_emitted_value_is_not_shared_between_branches(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).stateful_map("step", lambda k, v, s: (v, v), default=None)
    stream.update(spoil).to_topic(app.topic("spoilt"))
    stream.to_topic(app.topic("direct"))
    outputs = pipeline.run(app, {"in": [("a", {"tags": []})]})
    assert outputs.values("direct") == [{"tags": []}]
    assert dict(pipeline.state("step")) == {"a": {"tags": []}}


def test_a_value_that_cannot_be_copied_names_the_step(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).map(lambda v: (part for part in (1, 2)), name="parts")
    stream.map(list, name="one").to_topic(app.topic("one"))
    stream.map(list, name="two").to_topic(app.topic("two"))
    with pytest.raises(LogicError, match=r"step 'one'.*generator"):
        pipeline.run(app, {"in": [("a", 1)]})
