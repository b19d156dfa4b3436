"""apply: one value from each, or several, with state and metadata in every combination."""

from itertools import product
from typing import Any

import pytest

from penstock import Event, InvalidError, LogicError

HEADERS = (("trace", b"a1"),)


def test_apply_replaces_each_value(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(lambda n: n + 1).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1), ("a", 2)]}).values("out") == [2, 3]


def test_apply_keeps_key_time_and_headers(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(lambda n: n + 1).to_topic(app.topic("out"))
    [event] = pipeline.run(app, {"in": [Event("a", 1, 77, HEADERS)]})["out"]
    assert (event.key, event.timestamp_ms, event.headers) == ("a", 77, HEADERS)


def test_apply_may_return_none_as_a_value(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(lambda n: None).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1)]}).values("out") == [None]


@pytest.mark.parametrize(("stateful", "expand", "metadata"), list(product([False, True], repeat=3)))
def test_apply_calls_the_function_with_what_it_was_asked_for(pipeline, stateful, expand, metadata):
    app = pipeline.application()

    def fn(value: Any, *rest: Any) -> Any:
        state = rest[-1] if stateful else None
        shown = [value, *(rest[:3] if metadata else ())]
        assert len(rest) == 3 * metadata + stateful
        if state is not None:
            state.set("seen", state.get("seen", 0) + 1)
            shown.append(state.get("seen"))
        if metadata:
            shown[3] = [[name, text.decode()] for name, text in shown[3]]
        return [shown, "more"] if expand else shown

    stream = app.dataframe(app.topic("in")).apply(fn, stateful=stateful, expand=expand, metadata=metadata)
    stream.to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [Event("a", 5, 70, HEADERS), Event("a", 6, 71)]})
    first = [5, *(["a", 70, [["trace", "a1"]]] if metadata else []), *([1] if stateful else [])]
    second = [6, *(["a", 71, []] if metadata else []), *([2] if stateful else [])]
    expected = [first, "more", second, "more"] if expand else [first, second]
    assert outputs.values("out") == expected
    assert [event.timestamp_ms for event in outputs["out"]] == ([70, 70, 71, 71] if expand else [70, 71])


def test_expand_gives_none_one_or_many_events(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(lambda n: [n] * n, expand=True).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", n) for n in (0, 1, 0, 3)]}).values("out") == [1, 3, 3, 3]


def test_expand_takes_a_generator_with_state(pipeline):
    app = pipeline.application()

    def parts(value, state):
        for part in value.split():
            state.set("parts", state.get("parts", 0) + 1)
            yield [part, state.get("parts")]

    app.dataframe(app.topic("in")).apply(parts, stateful=True, expand=True).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", "x y"), ("b", "z"), ("a", "w")]})
    assert outputs.of_key("out", "a") == [["x", 1], ["y", 2], ["w", 3]]
    assert outputs.of_key("out", "b") == [["z", 1]]


def test_state_belongs_to_the_key_and_lives_on_in_the_next_epoch(pipeline, partitions):
    app = pipeline.application(partitions=partitions)

    def count(value, state):
        state.set("n", state.get("n", 0) + 1)
        return state.get("n")

    app.dataframe(app.topic("in")).apply(count, stateful=True).to_topic(app.topic("out"))
    keys = ["a", "b", "a", "c", "a", "b"]
    outputs = pipeline.run(app, {"in": [(key, 0) for key in keys]}, epochs=3)
    assert {key: outputs.of_key("out", key) for key in "abc"} == {"a": [1, 2, 3], "b": [1, 2], "c": [1]}
    assert pipeline.state("count") == {"a": {"n": 3}, "b": {"n": 2}, "c": {"n": 1}}


def test_steps_in_a_row_each_have_state_of_their_own(pipeline):
    app = pipeline.application()

    def count(value, state):
        state.set("n", state.get("n", 0) + value)
        return state.get("n")

    stream = app.dataframe(app.topic("in")).apply(count, stateful=True).apply(count, stateful=True)
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1)] * 4}, epochs=2).values("out") == [1, 3, 6, 10]
    assert pipeline.state("count") == {"a": {"n": 4}}
    assert pipeline.state("count-2") == {"a": {"n": 10}}


def test_the_state_codec_may_be_a_type(pipeline):
    app = pipeline.application()

    def remember(value, state):
        state.set("numbers", [*state.get("numbers", []), value])

    app.dataframe(app.topic("in")).apply(remember, stateful=True, state=list[int])
    pipeline.run(app, {"in": [("a", 1), ("a", 2)]})
    assert pipeline.state("remember") == {"a": {"numbers": [1, 2]}}


def test_something_that_is_no_function_is_refused_when_the_plan_is_built(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).apply("upper")


def test_a_function_of_other_arguments_fails_with_its_name(pipeline):
    app = pipeline.application()

    def two(value, state):
        return value

    app.dataframe(app.topic("in")).apply(two)
    with pytest.raises(LogicError, match=r"step 'two'.*two \(test_apply.py:\d+\)(.|\n)*missing 1 required"):
        pipeline.run(app, {"in": [("a", 1)]})
