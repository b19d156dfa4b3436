"""filter: keeps some events."""

import pytest

from penstock import Event, LogicError


def test_filter_keeps_what_is_true(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).filter(lambda n: n % 3).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", n) for n in range(7)]}).values("out") == [1, 2, 4, 5]


@pytest.mark.parametrize("verdict", [True, False])
def test_filter_may_keep_all_or_none(pipeline, verdict):
    app = pipeline.application()
    app.dataframe(app.topic("in")).filter(lambda n: verdict).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", n) for n in range(3)]}).values("out") == ([0, 1, 2] if verdict else [])


def test_what_is_kept_keeps_key_time_and_headers(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).filter(bool).to_topic(app.topic("out"))
    [event] = pipeline.run(app, {"in": [Event("a", 0, 1), Event("b", 1, 2, (("h", b"x"),)), Event("c", 0, 3)]})["out"]
    assert (event.key, event.value, event.timestamp_ms, event.headers) == ("b", 1, 2, (("h", b"x"),))


def test_filter_with_state_drops_repetitions(pipeline):
    app = pipeline.application()

    def is_new(value, state):
        new = value != state.get("last")
        state.set("last", value)
        return new

    app.dataframe(app.topic("in")).filter(is_new, stateful=True).to_topic(app.topic("out"))
    items = [("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 1)]
    outputs = pipeline.run(app, {"in": items}, epochs=2)
    assert outputs.of_key("out", "a") == [1, 2, 1]
    assert outputs.of_key("out", "b") == [1]


def test_filter_with_metadata_and_with_both(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    stream.filter(lambda v, key, time, headers: time > 5, metadata=True).to_topic(app.topic("late"))
    both = stream.filter(lambda v, key, time, headers, state: state.get("x") is None, metadata=True, stateful=True)
    both.to_topic(app.topic("all"))
    outputs = pipeline.run(app, {"in": [("a", 1, 5), ("a", 2, 6)]})
    assert outputs.values("late") == [2]
    assert outputs.values("all") == [1, 2]


def test_a_verdict_that_is_neither_true_nor_false_is_an_error_of_the_function(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    column = stream["a"] > 1
    stream.filter(lambda value: column, name="odd").to_topic(app.topic("out"))
    with pytest.raises(LogicError, match="step 'odd'"):
        pipeline.run(app, {"in": [("a", {"a": 1})]})
