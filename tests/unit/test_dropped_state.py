"""State that is written and dropped in one epoch is gone, also what was stored of it before."""

from datetime import timedelta
from typing import Any

from penstock import Application, State, StatefulLogic
from penstock.testing import TestDriver


class WriteThenDrop(StatefulLogic):
    """Keeps each value; in an epoch without events, writes all states anew and drops them."""

    def on_data(self, event: Any, state: Any, emit: Any) -> Any:
        return event.value

    def on_epoch(self, watermark_ms: int | None, states: Any, emit: Any) -> None:
        if watermark_ms is not None:
            states["a"] = 7
            states["a"] = None


def test_state_that_on_epoch_writes_and_drops_is_gone() -> None:
    app = Application("dropped", partitions=1)
    app.dataframe(app.topic("in")).stateful_op("keep", WriteThenDrop()).to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.send("in", 3, key="a")
    driver.epoch()
    assert dict(driver.state("keep")) == {"a": 3}
    driver.epoch()
    assert dict(driver.state("keep")) == {}


def test_a_value_that_a_late_event_sets_expires_with_what_it_replaced() -> None:
    def keep(value: Any, state: State) -> Any:
        state.set("x", value, ttl=timedelta(milliseconds=10) if value == "late" else None)
        return value

    app = Application("expired", partitions=1)
    app.dataframe(app.topic("in")).apply(keep, stateful=True).to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.send("in", "early", key="a", timestamp_ms=0)
    driver.send("in", "early", key="b", timestamp_ms=1000)
    driver.epoch()
    driver.send("in", "late", key="a", timestamp_ms=5)
    driver.epoch()
    assert dict(driver.state("keep")) == {"b": {"x": "early"}}
