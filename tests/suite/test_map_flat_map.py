"""map and flat_map: functions of the value alone."""

import pytest

from penstock import LogicError


def test_map_replaces_each_value(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).map(str).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 1), ("a", 2)]}).values("out") == ["1", "2"]


def test_maps_in_a_row(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in"))
    for n in range(20):
        stream = stream.map(lambda value, n=n: value + n)
    stream.to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", 0)]}).values("out") == [190]


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda parts: (part for part in parts)])
def test_flat_map_takes_any_iterable(pipeline, kind):
    app = pipeline.application()
    app.dataframe(app.topic("in")).flat_map(lambda text: kind(text.split())).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", "x y"), ("a", ""), ("a", "z")]}).values("out") == ["x", "y", "z"]


def test_flat_map_that_gives_one_object_twice_gives_two_events(pipeline):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).flat_map(lambda value: [value, value])
    stream.update(lambda value: value.update(n=value["n"] + 1)).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", {"n": 0})]}).values("out") == [{"n": 1}, {"n": 1}]


def test_a_generator_may_yield_one_object_again_and_again(pipeline):
    app = pipeline.application()

    def steps(value):
        for n in range(3):
            value["n"] = n
            yield value

    app.dataframe(app.topic("in")).flat_map(steps).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", {})]}).values("out") == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("kind", ["map", "flat_map"])
def test_a_stray_stop_iteration_is_an_error_and_loses_no_events(pipeline, kind):
    app = pipeline.application(on_error="skip")

    def first(value):
        found = next(iter(value))
        return found if kind == "map" else [found]

    getattr(app.dataframe(app.topic("in")), kind)(first).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("a", v) for v in ([1], [], [2], [3])]}).values("out") == [1, 2, 3]
    assert pipeline.counts.skipped == 1


def test_flat_map_of_something_that_is_no_iterable_names_the_step(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).flat_map(lambda value: None, name="parts").to_topic(app.topic("out"))
    with pytest.raises(LogicError, match=r"step 'parts'.*'NoneType' object is not iterable"):
        pipeline.run(app, {"in": [("a", 1)]})
