"""Runs one and the same suite on every runner: a test asks for `pipeline`, and says nothing about what runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

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
    """Applications run by the test driver, in this process or on Spark."""

    def __init__(self, folder: Path, spark: Any = None) -> None:
        self._folder = folder
        self._spark = spark
        self.started: TestDriver | None = None

    def application(self, group: str = "suite", **settings: Any) -> Application:
        folder = self._folder / group
        return Application(group, folder / "topics", folder / "state", folder / "local", **settings)

    def start(self, app: Application, **settings: Any) -> TestDriver:
        self.started = TestDriver(app, spark=self._spark, **settings)
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pipeline" not in metafunc.fixturenames:
        return
    # What a test observes in the memory of this process cannot be seen from Spark's workers.
    alone = metafunc.definition.get_closest_marker("in_process")
    assert alone is None or alone.args, "in_process needs a reason: @pytest.mark.in_process(reason)"
    metafunc.parametrize("runs_on", ["driver"] if alone else ["driver", "spark"])
    if "partitions" in metafunc.fixturenames:
        metafunc.parametrize("partitions", [1, 4, 7])


@pytest.fixture
def pipeline(runs_on: str, request: pytest.FixtureRequest, tmp_path: Path) -> DriverPipeline:
    if runs_on == "driver":
        return DriverPipeline(tmp_path)
    # Workers cannot import a test's module, so what it defines travels whole.
    cloudpickle.register_pickle_by_value(request.module)
    return DriverPipeline(tmp_path, request.getfixturevalue("spark"))
