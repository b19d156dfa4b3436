"""group_by: key_by, by the name of a field or by a function."""

import pytest

from penstock import InvalidError, LogicError


def count(key, value, n):
    return n + 1, n + 1


def test_group_by_a_field(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).group_by("city").stateful_map("count", count, default=0)
    stream.to_topic(app.topic("out"))
    cities = ["berlin", "rome", "berlin"]
    outputs = pipeline.run(app, {"in": [(None, {"city": city}) for city in cities]})
    assert outputs.of_key("out", "berlin") == [1, 2]
    assert dict(pipeline.state("count")) == {"berlin": 2, "rome": 1}


def test_group_by_a_function(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).group_by(len).stateful_map("count", count, default=0)
    pipeline.run(app, {"in": [("x", text) for text in ("a", "b", "cc")]})
    assert dict(pipeline.state("count")) == {1: 2, 2: 1}


def test_group_by_twice_and_by_an_odd_field_name(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).group_by("a/b").group_by("a/b").group_by("a/b", name="third")
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("x", {"a/b": 7})]})["out"][0].key == "7"


def test_a_missing_field_names_the_step_and_the_field(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).group_by("city").to_topic(app.topic("out"))
    with pytest.raises(LogicError, match=r"step 'group by city'.*topic 'in', offset 0: KeyError: 'city'"):
        pipeline.run(app, {"in": [("x", {"town": "rome"})]})


def test_group_by_something_else_is_refused(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).group_by(7)
