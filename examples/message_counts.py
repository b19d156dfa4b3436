"""How many messages each person has sent, and the last one: a function with `State`."""

from typing import Any

from penstock import Application, Event, State
from penstock.testing import TestDriver

SAID = [("anna", "hello"), ("bob", "hi"), ("anna", "how are you?"), ("carl", "good morning"), ("anna", "bye")]
EVENTS = [Event(person, text, timestamp_ms=number) for number, (person, text) in enumerate(SAID)]


def count(text: str, state: State) -> int:
    """The number of this message among those of its key."""
    messages = state.get("messages", default=0) + 1
    state.set("messages", messages)
    state.set("last", text)
    return messages


def pipeline(**settings: Any) -> Application:
    """messages → count → counts."""
    app = Application("message-counts", **settings)
    app.dataframe(app.topic("messages")).apply(count, stateful=True).to_topic(app.topic("counts"))
    return app


def main() -> None:
    """Run the pipeline in this process, and print the state of the step."""
    driver = TestDriver(pipeline())
    for event in EVENTS:
        driver.send("messages", event.value, key=event.key)
    driver.epoch()
    for person, known in sorted(driver.state("count").items()):
        print(f"{person}: {known['messages']}, last {known['last']!r}")


if __name__ == "__main__":
    main()
