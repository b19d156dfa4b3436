"""The running sum of the numbers 0 to 100: 0, 1, 3, 6, … 5050."""

from typing import Any

from penstock import Application, Event
from penstock.testing import TestDriver

EVENTS = [Event("all", number, timestamp_ms=number) for number in range(101)]


def add(key: str, number: int, total: int) -> tuple[int, int]:
    """The output, and the new state: here they are the same."""
    return total + number, total + number


def pipeline(**settings: Any) -> Application:
    """numbers → sum → sums."""
    app = Application("running-sum", **settings)
    numbers, sums = app.topic("numbers"), app.topic("sums")
    app.dataframe(numbers).stateful_map("sum", add, default=0).to_topic(sums)
    return app


def main() -> None:
    """Run the pipeline in this process, and print what it sent."""
    driver = TestDriver(pipeline())
    for event in EVENTS:
        driver.send("numbers", event.value, key=event.key)
    driver.epoch()
    print(*[event.value for event in driver.received("sums")])


if __name__ == "__main__":
    main()
