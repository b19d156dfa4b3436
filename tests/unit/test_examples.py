"""The examples do what they say, as programs and as pipelines that others run."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from penstock import Application, Event
from penstock.testing import TestDriver

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHORT = ["running_sum", "parity_sums", "message_counts"]
RUNNING_SUMS = [n * (n + 1) // 2 for n in range(101)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def printed_by(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=120).stdout


def driven(name: str, topic: str) -> TestDriver:
    module = load(name)
    driver = TestDriver(module.pipeline())
    for event in module.EVENTS:
        driver.send(topic, event.value, key=event.key, timestamp_ms=event.timestamp_ms)
    driver.epoch()
    return driver


@pytest.mark.parametrize("name", SHORT)
def test_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("name", SHORT)
def test_example_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    printed_by(name, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHORT)
def test_example_runs_on_folders_too(name: str, tmp_path: Path) -> None:
    module = load(name)
    app: Application = module.pipeline(
        broker_address=tmp_path / "topics", state_dir=tmp_path / "state", local_dir=tmp_path / "local"
    )
    [source, *_], [*_, sink] = app.topics.values(), app.topics.values()
    source.append(module.EVENTS)
    runner = app.runner()
    runner.epoch()
    runner.close()
    assert sink.end() == len(module.EVENTS)


def test_running_sum_prints_the_sums(tmp_path: Path) -> None:
    assert [int(word) for word in printed_by("running_sum", cwd=tmp_path).split()] == RUNNING_SUMS


def test_running_sum_sends_the_sums_in_order() -> None:
    driver = driven("running_sum", "numbers")
    assert [event.value for event in driver.received("sums")] == RUNNING_SUMS
    assert driver.state("sum") == {"all": 5050}


def test_parity_sums_prints_both_sums(tmp_path: Path) -> None:
    assert sorted(printed_by("parity_sums", cwd=tmp_path).splitlines()) == ["even 2550", "odd 2500"]


def test_parity_sums_keeps_booleans_as_keys() -> None:
    driver = driven("parity_sums", "numbers")
    assert driver.state("sum") == {True: 2550, False: 2500}
    last = {event.key: event.value for event in driver.received("sums")}
    assert last == {True: 2550, False: 2500}
    assert all(type(key) is bool for key in last)


def test_message_counts_prints_each_person(tmp_path: Path) -> None:
    assert printed_by("message_counts", cwd=tmp_path).splitlines() == [
        "anna: 3, last 'bye'",
        "bob: 1, last 'hi'",
        "carl: 1, last 'good morning'",
    ]


def test_message_counts_keeps_the_count_of_each_key() -> None:
    driver = driven("message_counts", "messages")
    assert {key: known["messages"] for key, known in driver.state("count").items()} == {"anna": 3, "bob": 1, "carl": 1}
    assert [event.value for event in driver.received("counts") if event.key == "anna"] == [1, 2, 3]


@pytest.fixture
def results() -> tuple[ModuleType, list[Event], list[Event]]:
    """The demo, some payments, and the outputs that are right for them."""
    demo = load("demo")
    sent, totals, outputs = list(demo.payments(100, 5)), dict[str, int](), []
    for event in sent:
        output, totals[event.key] = demo.running_total(event.key, event.value, totals.get(event.key, 0))
        outputs.append(Event(event.key, output, event.timestamp_ms))
    return demo, sent, outputs


def test_proof_holds_for_what_is_right(results: tuple[ModuleType, list[Event], list[Event]]) -> None:
    demo, sent, outputs = results
    assert demo.prove(sent, outputs, counted=100).holds


def test_proof_finds_what_is_missing(results: tuple[ModuleType, list[Event], list[Event]]) -> None:
    demo, sent, outputs = results
    assert demo.prove(sent, outputs[:-1], counted=100).missing == 1
    assert not demo.prove(sent, outputs[:-1], counted=100).holds
    assert not demo.prove(sent, outputs, counted=99).holds


def test_proof_finds_what_is_there_twice(results: tuple[ModuleType, list[Event], list[Event]]) -> None:
    demo, sent, outputs = results
    proof = demo.prove(sent, [*outputs, outputs[-1]], counted=100)
    assert proof.doubled == 1
    assert not proof.holds


def test_proof_finds_a_wrong_total(results: tuple[ModuleType, list[Event], list[Event]]) -> None:
    demo, sent, outputs = results
    off_by_one = {**outputs[-1].value, "total": outputs[-1].value["total"] + 1}
    proof = demo.prove(sent, [*outputs[:-1], Event(outputs[-1].key, off_by_one, 0)], counted=100)
    assert proof.wrong == 1
    assert not proof.holds


def test_proof_that_is_empty_does_not_hold() -> None:
    demo = load("demo")
    assert not replace(demo.Proof(), sent=1).holds
