"""Sinks and plans that change."""

from collections.abc import Sequence

import pytest

from penstock import Application, Event, InvalidError, LogicError
from penstock.storage import memory_storage
from penstock.testing import TestDriver


def fails(epoch: int, partition: int, events: Sequence[Event]) -> None:
    raise OSError("the database is away")


def test_a_sink_with_outputs_to_publish_cannot_be_removed_from_the_plan() -> None:
    storage, topics = memory_storage(), memory_storage()
    app = Application("sinks", partitions=1)
    app.dataframe(app.topic("in")).sink(fails, name="database")
    driver = TestDriver(app, storage=storage, topics=topics)
    driver.send("in", 1)
    with pytest.raises(LogicError, match="the database is away"):
        driver.epoch()
    changed = Application("sinks", partitions=1)
    changed.dataframe(changed.topic("in")).to_topic(changed.topic("out"))
    with pytest.raises(InvalidError, match=r"'database' is not published.*start once with the sink"):
        TestDriver(changed, storage=storage, topics=topics)
