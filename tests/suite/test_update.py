"""update: changes a value in place."""

from penstock import Event


def test_update_changes_the_value_and_ignores_what_is_returned(pipeline):
    app = pipeline.application()
    app.dataframe(app.topic("in")).update(lambda v: v.pop("a")).to_topic(app.topic("out"))
    assert pipeline.run(app, {"in": [("k", {"a": 1, "b": 2})]}).values("out") == [{"b": 2}]


def test_update_with_state(pipeline):
    app = pipeline.application()

    def number(value, state):
        state.set("n", state.get("n", 0) + 1)
        value["n"] = state.get("n")

    app.dataframe(app.topic("in")).update(number, stateful=True).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", {}), ("b", {}), ("a", {})]})
    assert outputs.of_key("out", "a") == [{"n": 1}, {"n": 2}]
    assert outputs.of_key("out", "b") == [{"n": 1}]


def test_update_with_metadata(pipeline):
    app = pipeline.application()

    def stamp(value, key, timestamp_ms, headers):
        value.update(key=key, time=timestamp_ms, headers=len(headers))

    app.dataframe(app.topic("in")).update(stamp, metadata=True).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [Event("a", {}, 9, (("x", b""), ("y", b"")))]})
    assert outputs.values("out") == [{"key": "a", "time": 9, "headers": 2}]


def test_update_with_metadata_and_state(pipeline):
    app = pipeline.application()

    def gap(value, key, timestamp_ms, headers, state):
        value["gap"] = timestamp_ms - state.get("last", timestamp_ms)
        state.set("last", timestamp_ms)

    app.dataframe(app.topic("in")).update(gap, stateful=True, metadata=True).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", {}, 5), ("a", {}, 12)]})
    assert outputs.values("out") == [{"gap": 0}, {"gap": 7}]


def test_state_keeps_nothing_of_what_happens_to_the_value_afterwards(pipeline):
    app = pipeline.application()

    def keep(value, state):
        value["before"] = state.get("last")
        state.set("last", {"x": value["x"]})

    stream = app.dataframe(app.topic("in")).update(keep, stateful=True)
    stream.update(lambda v: (v["before"] or {}).update(x="changed")).to_topic(app.topic("out"))
    outputs = pipeline.run(app, {"in": [("a", {"x": n}) for n in range(3)]})
    assert [v["before"] for v in outputs.values("out")] == [None, {"x": "changed"}, {"x": "changed"}]
    assert pipeline.state("keep") == {"a": {"last": {"x": 2}}}
