"""Columns: expressions of fields instead of functions of values."""

import pytest

from penstock import InvalidError, LogicError

VALUE = {"a": 7, "b": 2, "t": True, "f": False, "n": None, "text": "x", "deep": {"x": {"y": 5}}, "list": [1, 2]}


def evaluate(pipeline, make):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream["result"] = make(stream)
    stream.to_topic(app.topic("out"))
    [value] = pipeline.run(app, {"in": [("k", VALUE)]}).values("out")
    assert {name: item for name, item in value.items() if name != "result"} == VALUE
    return value["result"]


EXPRESSIONS = {
    "s['a']": (lambda s: s["a"], 7),
    "a + b": (lambda s: s["a"] + s["b"], 9),
    "a - b": (lambda s: s["a"] - s["b"], 5),
    "a * b": (lambda s: s["a"] * s["b"], 14),
    "a / b": (lambda s: s["a"] / s["b"], 3.5),
    "a // b": (lambda s: s["a"] // s["b"], 3),
    "a % b": (lambda s: s["a"] % s["b"], 1),
    "a + 1": (lambda s: s["a"] + 1, 8),
    "1 + a": (lambda s: 1 + s["a"], 8),
    "1 - a": (lambda s: 1 - s["a"], -6),
    "2 * a": (lambda s: 2 * s["a"], 14),
    "14 / a": (lambda s: 14 / s["a"], 2.0),
    "15 // a": (lambda s: 15 // s["a"], 2),
    "15 % a": (lambda s: 15 % s["a"], 1),
    "-a": (lambda s: -s["a"], -7),
    "text + text": (lambda s: s["text"] + "y", "xy"),
    "a == 7": (lambda s: s["a"] == 7, True),
    "a != 7": (lambda s: s["a"] != 7, False),
    "a < b": (lambda s: s["a"] < s["b"], False),
    "a <= 7": (lambda s: s["a"] <= 7, True),
    "a > b": (lambda s: s["a"] > s["b"], True),
    "a >= 8": (lambda s: s["a"] >= 8, False),
    "7 > b": (lambda s: 7 > s["b"], True),  # noqa: SIM300
    "t & f": (lambda s: s["t"] & s["f"], False),
    "t | f": (lambda s: s["t"] | s["f"], True),
    "True & t": (lambda s: True & s["t"], True),
    "False | f": (lambda s: False | s["f"], False),
    "~t": (lambda s: ~s["t"], False),
    "~(a > 3) | (b == 2)": (lambda s: ~(s["a"] > 3) | (s["b"] == 2), True),
    "isin": (lambda s: s["a"].isin([1, 7]), True),
    "not isin": (lambda s: ~s["a"].isin({1, 2}), True),
    "is_null": (lambda s: s["n"].is_null(), True),
    "not_null": (lambda s: s["n"].not_null(), False),
    "apply": (lambda s: s["a"].apply(str) + "!", "7!"),
    "deep": (lambda s: s["deep"]["x"]["y"] + 1, 6),
    "get": (lambda s: s["deep"].get("x")["y"], 5),
    "get of a missing field": (lambda s: s["deep"].get("z"), None),
    "get with a default": (lambda s: s["deep"].get("z", 3), 3),
    "element of a list": (lambda s: s["list"][1], 2),
    "a constant": (lambda s: "constant", "constant"),
    "a list": (lambda s: [1, 2], [1, 2]),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_is_computed_for_each_event(pipeline, name):
    make, expected = EXPRESSIONS[name]
    found = evaluate(pipeline, make)
    assert (type(found), found) == (type(expected), expected)


def test_a_field_set_is_there_from_then_on_and_not_before(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream.to_topic(app.topic("before"))
    stream["c"] = stream["a"] + stream["b"]
    stream["a"] = stream["c"] * 2
    stream.to_topic(app.topic("after"))
    outputs = pipeline.run(app, {"in": [("k", {"a": 1, "b": 2})]})
    assert outputs.values("before") == [{"a": 1, "b": 2}]
    assert outputs.values("after") == [{"a": 6, "b": 2, "c": 3}]


def test_a_constant_that_can_change_is_not_shared_between_events(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream["tags"] = []
    stream.update(lambda v: v["tags"].append(v["n"])).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("k", {"n": n}) for n in range(3)]})
    assert outputs.values("out") == [{"n": n, "tags": [n]} for n in range(3)]


def test_a_field_put_in_another_place_is_not_shared_with_its_first(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream["copy"] = stream["list"]
    stream.update(lambda v: v["copy"].append("x")).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("k", {"list": [1]})]})
    assert outputs.values("out") == [{"list": [1], "copy": [1, "x"]}]


def test_events_are_kept_by_a_column(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream[(stream["a"] > 1) & (stream["a"] != 3)].to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("k", {"a": a}) for a in range(5)]})
    assert [value["a"] for value in outputs.values("out")] == [2, 4]


def test_some_fields_are_kept(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in"))[["b", "a"]].to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("k", VALUE)]}).values("out") == [{"b": 2, "a": 7}]


def test_a_column_behind_other_steps_sees_what_they_made(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).map(lambda n: {"n": n})
    stream = stream[stream["n"] > 1]
    stream["double"] = stream["n"] * 2
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("k", n) for n in range(4)]}).values("out") == [
        {"n": 2, "double": 4},
        {"n": 3, "double": 6},
    ]


def test_a_missing_field_is_an_error_that_names_it(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream[stream["amount"] > 1].to_topic(app.topic("out"))
    with pytest.raises(LogicError, match=r"step .where .*amount.*, function of a column, key 'k'.*KeyError: 'amount'"):
        pipeline.run(app, {"in": [("k", {"amuont": 1})]})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: c and True,
        lambda c: not c,
        lambda c: 1 < c < 5,
        lambda c: c in [1, 2],
        lambda c: bool(c),
    ],
    ids=["and", "not", "chained", "in", "bool"],
)
def test_words_that_would_look_at_the_column_itself_say_what_to_use(pipeline, wrong):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    with pytest.raises(TypeError, match=r"use & and \|"):
        wrong(stream["a"])


def test_a_stream_and_a_column_cannot_be_iterated(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    with pytest.raises(TypeError, match="not iterable"):
        iter(stream)
    with pytest.raises(TypeError, match="not iterable"):
        iter(stream["a"])
    with pytest.raises(TypeError):
        assert "a" in stream


def test_a_column_where_a_function_is_needed_is_refused(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    with pytest.raises(InvalidError, match="needs a function"):
        stream.filter(stream["a"] > 1)


def test_a_column_shows_what_it_is(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    assert repr((stream["a"] + 1) > stream["b"]) == "((column 'a' + 1) > column 'b')"
