"""The sums of the even and of the odd numbers from 0 to 100: the key is the parity."""

from typing import Any

from penstock import Application, Event
from penstock.testing import TestDriver

EVENTS = [Event(None, number, timestamp_ms=number) for number in range(101)]


def pipeline(**settings: Any) -> Application:
    """numbers → by parity → sum → sums."""
    app = Application("parity-sums", **settings)
    numbers, sums = app.topic("numbers"), app.topic("sums", key="json")
    by_parity = app.dataframe(numbers).key_by("parity", lambda n: n % 2 == 0)
    by_parity.stateful_map("sum", lambda even, n, total: (total + n, total + n), default=0).to_topic(sums)
    return app


def main() -> None:
    """Run the pipeline in this process, and print the state of the step."""
    driver = TestDriver(pipeline())
    for event in EVENTS:
        driver.send("numbers", event.value)
    driver.epoch()
    for even, total in driver.state("sum").items():
        print("even" if even else "odd", total)


if __name__ == "__main__":
    main()
