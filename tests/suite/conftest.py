"""Runs one and the same suite on every runner: a test asks for `pipeline`, and says nothing about what runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import Application, Event
from penstock.state.query import StepState
from penstock.testing import TestDriver

Item = Event | tuple[Any, ...]
"""An event, or (key, value), or (key, value, timestamp_ms)."""


class Outputs:
    """What an application has written so far."""

    def __init__(self, driver: TestDriver) -> None:
        self._driver = driver

    def __getitem__(self, topic: str) -> list[Event]:
        return self._driver.received(topic)

    def values(self, topic: str) -> list[Any]:
        return [event.value for event in self[topic]]

    def pairs(self, topic: str) -> list[tuple[Any, Any]]:
        return [(event.key, event.value) for event in self[topic]]

    def of_key(self, topic: str, key: Any) -> list[Any]:
        return [event.value for event in self[topic] if event.key == key]


class DriverPipeline:
    """Applications run by the test driver. Another runner has the same methods, and `started` those of a driver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: TestDriver | None = None

    def application(self, group: str = "suite", **settings: Any) -> Application:
        folder = self._folder / group
        return Application(group, folder / "topics", folder / "state", folder / "local", **settings)

    def start(self, app: Application, **settings: Any) -> TestDriver:
        self.started = TestDriver(app, **settings)
        return self.started

    def run(self, app: Application, inputs: Mapping[str, Sequence[Item]], epochs: int = 1) -> Outputs:
        """Run an application on some events, cut into so many epochs; again, if it runs already."""
        driver = self.started or self.start(app)
        for index in range(epochs):
            for topic, items in inputs.items():
                part = items[len(items) * index // epochs : len(items) * (index + 1) // epochs]
                with driver.producer(topic) as send:
                    for item in part:
                        event = as_event(item)
                        send(event.value, event.key, event.timestamp_ms, event.headers)
            driver.epoch()
        return Outputs(driver)

    def state(self, step: str) -> StepState:
        assert self.started is not None, "run an application first"
        return self.started.state(step)

    @property
    def counts(self) -> Any:
        assert self.started is not None, "run an application first"
        return self.started.counts


def as_event(item: Item) -> Event:
    if isinstance(item, Event):
        return item
    key, value, *rest = item
    return Event(key, value, rest[0] if rest else 0)


@pytest.fixture(params=["driver"])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> DriverPipeline:
    assert request.param == "driver"
    return DriverPipeline(tmp_path)


@pytest.fixture(params=[1, 4, 7])
def partitions(request: pytest.FixtureRequest) -> int:
    return int(request.param)
