"""What a person sees while an application runs: the live view, the log lines, and what Spark prints, without noise."""

import logging
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock import Application
from penstock.epochs.records import Counts, EpochRecord
from penstock.runner import Run
from penstock.spark import view
from penstock.spark.noise import without_noise
from penstock.spark.view import Facts, Restore, as_line, as_panel, watching
from penstock.storage import open_storage
from penstock.testing import ManualClock, seeded_ids

FACTS = Facts("totals", "running", 41, Counts(1_234_567, 8, 3, 2), 52_300.4, 12_000, 10_000, 1_250_000)


def rendered(facts: Facts, width: int = 100) -> str:
    console = Console(record=True, force_terminal=True, width=width, file=StringIO())
    console.print(as_panel(facts))
    return console.export_text()


def test_the_view_shows_every_fact() -> None:
    text = rendered(FACTS)
    for fact in ("totals · running", "1,234,567", "52,300", "12,000 events", "41", "10,000 rows, 1.2 MB", "Ctrl-C"):
        assert fact in text
    assert "3 skipped, 2 dead-lettered" in text
    assert "restoring" not in text


def test_the_view_says_what_is_waited_for() -> None:
    assert rendered(Facts("totals", "starting Spark")).count("starting Spark") == 2
    assert rendered(FACTS).count("running") == 1


def test_the_view_shows_a_bar_while_replicas_are_restored() -> None:
    text = rendered(replace(FACTS, restore=Restore(10_000, done=1, tasks=4)))
    assert "restoring up to 10,000 rows" in text
    assert "━" in text
    assert "1 of 4 tasks done" in text


def test_a_run_that_is_over_waits_for_nothing() -> None:
    text = rendered(replace(FACTS, doing="failed", restore=Restore(10_000)))
    assert "totals · failed" in text
    assert "restoring" not in text
    assert "Ctrl-C" not in text


@pytest.mark.parametrize("width", [100, 80, 40])
def test_the_view_fits_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in rendered(FACTS, width).splitlines())


def test_a_line_has_the_same_facts() -> None:
    assert as_line(replace(FACTS, restore=Restore(10_000))) == (
        "totals: epoch 41, 1,234,567 events, 52,300 events/s, behind by 12,000, state 10,000 rows (1.2 MB), "
        "skipped 3, dead-lettered 2, restoring up to 10,000 rows"
    )
    assert as_line(Facts("totals", "starting Spark")).startswith("totals: no epoch yet, 0 events, 0 events/s, state 0")


class Pipeline:
    """A small application whose epochs are run in this process and shown by a watch."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(1_000)
        self.app = Application(
            "totals", folder / "topics", folder / "state", folder / "local", clock=self.clock, ids=seeded_ids(1)
        )
        self.topic = self.app.topic("in")
        stream = self.app.dataframe(self.topic)
        stream.stateful_map("sum", lambda key, n, total: (total + n, total + n), default=0).to_topic(
            self.app.topic("out")
        )

    def send(self, count: int) -> None:
        with self.topic.producer() as send:
            for number in range(count):
                send(number, key=f"key {number}")

    def epochs(self) -> EpochRecord:
        runner = self.app.runner()
        record = runner.epoch()
        runner.close()
        return record

    def run(self) -> Run:
        """A run as `Application.run()` starts it."""
        storage = open_storage(self.app._addresses["state_dir"] + "/totals")
        return Run(self.app.plan, self.app.settings, storage, self.app._open_log, self.clock, seeded_ids(2))


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path)


def done(epoch: int, read: int) -> EpochRecord:
    """The record of an epoch that read so many events."""
    return EpochRecord(epoch, "", 1, "", 0, None, 0, 4, {}, {}, {}, (), (), {}, Counts(read))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == view.__name__]


def test_without_a_terminal_there_is_a_log_line_every_few_seconds(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pipeline.send(30)
    with watching("totals", pipeline.clock, Console(file=StringIO())) as watch:
        watch.follow(pipeline.run(), lambda: None)
        for epoch in range(100):
            pipeline.clock.advance(100)
            watch.add(done(epoch, read=10))
            watch.look()
        watch.end("ended")
    first, *between, last = lines(caplog)
    assert "no epoch yet" in first
    assert len(between) == 2
    assert "100 events/s, behind by 30" in between[0]
    assert last.endswith("; ended")
    assert "1,000 events, 100 events/s" in last


@pytest.mark.parametrize(("lag", "shown"), [(12, "behind by 42, "), (0, "behind by 30, "), (None, "events/s, state")])
def test_what_sources_of_spark_hold_counts_as_behind_if_they_tell(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, lag: int | None, shown: str
) -> None:
    caplog.set_level(logging.INFO)
    pipeline.send(30)
    with watching("totals", pipeline.clock, Console(file=StringIO())) as watch:
        watch.follow(pipeline.run(), lambda: None, lambda: lag)
    assert shown in lines(caplog)[0]


def test_an_idle_application_does_not_fill_the_log(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with watching("totals", pipeline.clock, Console(file=StringIO())) as watch:
        watch.follow(pipeline.run(), lambda: None)
        for _ in range(100):
            pipeline.clock.advance(1000)
            watch.look()
    assert len(lines(caplog)) == 1


def test_the_topics_are_looked_at_once_a_second_at_most(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(view, "behind", lambda run: looks.append(1) or 0)
    with watching("totals", pipeline.clock, Console(file=StringIO())) as watch:
        watch.follow(pipeline.run(), lambda: None)
        for epoch in range(50):
            pipeline.clock.advance(100)
            watch.add(done(epoch, read=1))
            watch.look()
    assert len(looks) == 1 + 5


def test_a_run_with_state_may_have_to_restore_it_until_its_first_epoch_is_done(pipeline: Pipeline) -> None:
    pipeline.send(30)
    pipeline.epochs()
    with watching("totals", pipeline.clock, Console(file=StringIO())) as watch:
        watch.follow(pipeline.run(), lambda: (1, 4))
        assert watch.facts.restore == Restore(30)
        assert watch.facts.state_rows == 30
        watch.add(done(epoch=1, read=1))
        assert watch.facts.restore is None


def test_on_a_terminal_the_view_is_live_and_says_how_it_ended(pipeline: Pipeline) -> None:
    pipeline.send(30)
    pipeline.epochs()
    console = Console(record=True, force_terminal=True, force_interactive=True, width=100, file=StringIO())
    with watching("totals", pipeline.clock, console) as watch:
        watch.follow(pipeline.run(), lambda: (1, 4))
        sys.stderr.write("printed meanwhile\n")
        watch.end("stopped")
    text = console.export_text()
    assert "starting Spark" in text
    assert "printed meanwhile" in text
    assert "totals · stopped" in text


IDLE_WORKER = [
    "Traceback (most recent call last):\n",
    '  File "…/pyspark.zip/pyspark/daemon.py", line 264, in manager\n',
    '  File "…/pyspark.zip/pyspark/daemon.py", line 95, in worker\n',
    "BrokenPipeError: [Errno 32] Broken pipe\n",
]
OF_THE_USER = [
    "Traceback (most recent call last):\n",
    '  File "mine.py", line 4, in total\n',
    "    raise BrokenPipeError\n",
    "BrokenPipeError\n",
]


def test_noise_of_spark_is_left_out() -> None:
    said = ["WARNING: Using incubator modules: jdk.incubator.vector\n", *IDLE_WORKER, "mine\n", *IDLE_WORKER]
    assert list(without_noise(said)) == ["mine\n"]


def test_nothing_of_the_users_is_left_out() -> None:
    said = ["a\n", *OF_THE_USER, "  indented\n", *OF_THE_USER[:2]]
    assert list(without_noise(said)) == said
