"""inspect: looks at the events, and leaves them as they are."""

import pytest

from penstock import InvalidError, LogicError


@pytest.mark.in_process("the function fills a list of this process")
def test_inspect_sees_each_value_and_passes_it_on(pipeline):
    app = pipeline.application()
    seen = []
    app.dataframe(app.topic("in")).inspect("look", seen.append).map(lambda n: n + 1).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1), ("a", 2)]}).values("out") == [2, 3]
    assert seen == [1, 2]


def test_what_inspect_returns_is_not_used(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).inspect("look", lambda n: None).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1)]}).values("out") == [1]


def test_an_error_in_inspect_is_an_error_of_the_event(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).inspect("look", lambda n: 1 / n).to_topic(app.topic("out"))
    with pytest.raises(LogicError, match=r"step 'look'.*offset 1: ZeroDivisionError"):
        pipeline.run(app, {"in": [("a", 1), ("a", 0)]})


def test_inspect_needs_a_function(pipeline):
    app = pipeline.application()
    with pytest.raises(InvalidError, match="needs a function"):
        app.dataframe(app.topic("in")).inspect("look", "print")
