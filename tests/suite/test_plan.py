"""The plan: names are unique and valid, stages are cut where the key changes."""

import pytest

from penstock import InvalidError, StatefulLogic
from penstock.storage import open_storage


class Logic(StatefulLogic):
    def on_data(self, event, state, emit):
        return state


NAMED = {
    "apply": lambda s, name: s.apply(lambda v: v, name=name),
    "map": lambda s, name: s.map(lambda v: v, name=name),
    "flat_map": lambda s, name: s.flat_map(lambda v: v, name=name),
    "update": lambda s, name: s.update(lambda v: v, name=name),
    "filter": lambda s, name: s.filter(lambda v: v, name=name),
    "inspect": lambda s, name: s.inspect(name, lambda v: v),
    "key_by": lambda s, name: s.key_by(name, lambda v: v),
    "group_by": lambda s, name: s.group_by("x", name=name),
    "stateful_map": lambda s, name: s.stateful_map(name, lambda k, v, s: (v, s)),
    "stateful_op": lambda s, name: s.stateful_op(name, Logic()),
    "sink": lambda s, name: s.sink(lambda e, p, v: None, name=name),
}


@pytest.fixture
def stream(pipeline):
    app = pipeline.application()
    return app.dataframe(app.topic("in"))


@pytest.mark.parametrize("second", NAMED)
@pytest.mark.parametrize("first", ["map", "stateful_map", "sink"])
def test_two_steps_of_one_name_are_refused_when_the_plan_is_built(stream, first, second):
    NAMED[first](stream, "twice")
    with pytest.raises(InvalidError, match=r"there are two steps named 'twice'.*rename one"):
        NAMED[second](stream, "twice")


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "a\0", "x" * 101, 7, "\ud800"])
@pytest.mark.parametrize("kind", ["map", "stateful_map", "sink"])
def test_names_are_validated(stream, kind, name):
    with pytest.raises(InvalidError, match="a step cannot be named"):
        NAMED[kind](stream, name)


@pytest.mark.parametrize("kind", ["stateful_map", "stateful_op", "inspect", "key_by"])
def test_a_name_that_is_needed_cannot_be_none(stream, kind):
    with pytest.raises(InvalidError, match="a step cannot be named None"):
        NAMED[kind](stream, None)


@pytest.mark.parametrize("name", ["x" * 100, "sum of 1", "Grüße", "..", ".", "%2F", "a.b", "*?<>|:", "総" * 20])
def test_other_names_are_fine_also_on_disk(pipeline, tmp_path, name):
    app = pipeline.application()
    stream = app.dataframe(app.topic("in")).stateful_map(name, lambda k, v, s: (v, v))
    stream.sink(lambda epoch, partition, events: None, name=f"{name[:90]} sink")
    driver = pipeline.start(app, storage=open_storage(tmp_path / "state"), local_dir=tmp_path / "disk")
    driver.send("in", 1, key="a")
    driver.epoch()
    driver.restart()
    assert dict(driver.state(name)) == {"a": 1}


def test_a_name_too_long_for_a_file_is_refused_when_the_plan_is_built(stream):
    with pytest.raises(InvalidError, match="a step cannot be named"):
        NAMED["stateful_map"](stream, "総" * 90)


def test_the_prefix_of_dead_letters_is_taken(stream):
    with pytest.raises(InvalidError, match="dead-letter"):
        NAMED["sink"](stream, "dead-letter:x")


def test_steps_without_a_name_get_one_of_their_function(stream):
    def clean(value):
        return value

    app_steps = [stream.map(clean), stream.map(clean), stream.map(lambda v: v), stream.filter(str.isupper)]
    assert [step._step.name for step in app_steps] == ["clean", "clean-2", "map", "isupper"]


def test_a_name_that_was_made_gives_way_to_none_given_later(stream):
    stream.map(lambda v: v)
    with pytest.raises(InvalidError, match="two steps named 'map'"):
        stream.map(lambda v: v, name="map")


def stages(stream):
    return [[step.name for step in stage.steps] for stage in stream._plan.stages()]


def test_steps_without_a_change_of_the_key_are_one_stage(stream):
    stream.map(str, name="a").stateful_map("b", lambda k, v, s: (v, s)).filter(bool, name="c")
    assert stages(stream) == [["from in", "a", "b", "c"]]


def test_each_change_of_the_key_begins_a_stage(stream):
    stream.map(str, name="a").key_by("k1", str).map(str, name="b").key_by("k2", str).map(str, name="c")
    assert stages(stream) == [["from in", "a", "k1"], ["b", "k2"], ["c"]]


def test_a_concat_waits_for_the_later_of_its_streams(stream):
    stream.map(str, name="a").concat(stream.key_by("k", str)).map(str, name="b")
    assert stages(stream) == [["from in", "a", "k"], ["concat", "b"]]
    assert [stage.exits for stage in stream._plan.stages()] == [(1, 2), ()]


def test_a_change_of_the_key_at_the_end_is_a_plan_too(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).key_by("k", str)
    pipeline.run(app, {"in": [("a", 1)]})
    assert pipeline.counts.read == 1


def test_an_application_without_steps_is_told_how_to_begin(pipeline):
    with pytest.raises(InvalidError, match=r"begin with app.dataframe"):
        pipeline.start(pipeline.application())


def test_a_source_alone_is_a_plan(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in"))
    pipeline.run(app, {"in": [("a", 1)]})
    assert pipeline.counts.read == 1


@pytest.mark.parametrize("what", ["dataframe", "to_topic"])
def test_a_topic_of_another_application_is_refused(pipeline, what):
    app, other = pipeline.application("one"), pipeline.application("two")
    if what == "dataframe":
        app.dataframe(other.topic("in"))
    else:
        app.dataframe(app.topic("in")).to_topic(other.topic("out"))
    with pytest.raises(InvalidError, match="another application"):
        pipeline.start(app)


def test_a_step_may_be_added_to_or_left_out_of_a_plan_with_state(pipeline, tmp_path):
    topics, state = open_storage(tmp_path / "t"), open_storage(tmp_path / "s")
    for names, total in ((["a"], 1), (["b", "a"], 2), (["b"], 3), (["a", "c"], 4)):
        app = pipeline.application()
        stream = app.dataframe(app.topic("in"))
        for name in names:
            stream = stream.stateful_map(name, lambda k, v, s: (v, s + 1), default=0)
        driver = pipeline.start(app, topics=topics, storage=state)
        driver.send("in", 0, key="k")
        driver.epoch()
        driver.close()
        expected = {"a": {1: 1, 2: 2, 4: 3}, "b": {2: 1, 3: 2}, "c": {4: 1}}
        driver.restart()
        assert {name: dict(driver.state(name))["k"] for name in names} == {n: expected[n][total] for n in names}
        driver.close()


def test_state_of_another_form_is_refused_with_the_remedy(pipeline, tmp_path):
    state = open_storage(tmp_path / "s")
    for codec in ("json", "msgpack"):
        app = pipeline.application()
        app.dataframe(app.topic("in")).stateful_map("sum", lambda k, v, s: (v, v), state=codec)
        if codec == "json":
            pipeline.start(app, storage=state).epoch()
        else:
            with pytest.raises(InvalidError, match=r"step 'sum' was written as .*json.*clear_state"):
                pipeline.start(app, storage=state)
