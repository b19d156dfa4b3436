"""The application: its settings, its topics, and how its state is cleared."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from penstock import Application, ConflictError, DeadLetter, InvalidError
from penstock.testing import ManualClock, seeded_ids


@dataclass
class Order:
    amount: int


WRONG = [
    ({"consumer_group": ""}, "consumer_group is ''"),
    ({"consumer_group": "a/b"}, "consumer_group is 'a/b'"),
    ({"consumer_group": "."}, r"consumer_group is '\.'"),
    ({"consumer_group": "a\nb"}, "consumer_group is"),
    ({"consumer_group": "x" * 300}, "consumer_group is"),
    ({"consumer_group": "\ud800"}, "consumer_group is"),
    ({"consumer_group": None}, "consumer_group is None"),
    ({"partitions": 0}, "partitions is 0; it is a whole number from 1 to 4096"),
    ({"partitions": 4097}, "partitions is 4097"),
    ({"partitions": 4.0}, "partitions is 4.0"),
    ({"partitions": True}, "partitions is True"),
    ({"retain": 0}, "retain is 0"),
    ({"max_events_per_epoch": 0}, "max_events_per_epoch is 0"),
    ({"max_events_per_epoch": None}, "max_events_per_epoch is None"),
    ({"snapshots": 10}, r"snapshots is 10; it is an interval such as timedelta\(seconds=10\)"),
    ({"snapshots": timedelta(0)}, "snapshots is"),
    ({"snapshots": timedelta(seconds=-1)}, "snapshots is"),
    ({"store": "rocksdb"}, "store is 'rocksdb'; it is one of 'lmdb', 'memory'"),
    ({"store": ["lmdb"]}, "store is"),
    ({"on_error": "ignore"}, "on_error is 'ignore'"),
    ({"state_dir": "ftp://host/x"}, "ftp://host/x"),
    ({"state_dir": ""}, "state_dir is ''"),
    ({"broker_address": "localhost:9092"}, "broker_address is 'localhost:9092'.*Kafka"),
    ({"broker_address": "a:9092,b:9092"}, "Kafka"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings)[:60] for settings, _ in WRONG])
def test_wrong_settings_are_refused_with_what_they_should_be(settings, message):
    with pytest.raises(InvalidError, match=message):
        Application(**{"consumer_group": "app", "broker_address": "memory://t", "state_dir": "memory://s", **settings})


@pytest.mark.parametrize("policy", ["fail", "skip", DeadLetter("x"), lambda failure: "skip"])
def test_every_policy_is_a_setting(policy):
    Application("app", "memory://t", "memory://s", on_error=policy)


def test_an_application_that_is_only_built_touches_no_folder(tmp_path):
    app = Application("app", tmp_path / "topics", tmp_path / "state", tmp_path / "local")
    app.dataframe(app.topic("in")).to_topic(app.topic("out"))
    assert list(tmp_path.iterdir()) == []


def test_replicas_are_in_the_folder_for_temporary_files_unless_told_otherwise():
    app = Application("app", "memory://t", "memory://s")
    assert app._local_dir == Path(tempfile.gettempdir()) / "penstock"
    assert Application("app", "memory://t", "memory://s", local_dir="here")._local_dir == Path("here")


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "..", "a\0", 7, "x" * 300])
def test_names_of_topics_are_validated(pipeline, name):
    with pytest.raises(InvalidError, match="a topic's name is"):
        pipeline.application().topic(name)


@pytest.mark.parametrize("second", [{"key": "int"}, {"value": "bytes"}, {"value": Order}])
def test_a_topic_with_two_codecs_is_refused(pipeline, second):
    app = pipeline.application()
    app.topic("in")
    with pytest.raises(InvalidError, match=r"topic 'in' was opened with key='str' and value='json' before"):
        app.topic("in", **second)


def test_a_topic_opened_twice_in_the_same_way_is_one(pipeline):
    app = pipeline.application()
    assert app.topic("in", value=Order) is app.topic("in", value=Order)
    assert set(app.topics) == {"in"}


def test_two_types_of_one_name_are_two_codecs(pipeline):
    app = pipeline.application()
    app.topic("in", value=Order)
    other = dataclass(type("Order", (), {"__annotations__": {"price": int}, "__qualname__": "Order"}))
    with pytest.raises(InvalidError, match="topic 'in' was opened with"):
        app.topic("in", value=other)


@pytest.mark.parametrize("codec", [{"key": "text"}, {"value": "yaml"}, {"key": None}, {"value": None}])
def test_a_codec_that_does_not_exist_is_refused(pipeline, codec):
    with pytest.raises(InvalidError, match=r"there is no (key|value) codec"):
        pipeline.application().topic("in", **codec)


@pytest.mark.parametrize("wrong", ["in", None, 7])
def test_a_dataframe_needs_a_topic(pipeline, wrong):
    with pytest.raises(InvalidError, match=r"app.dataframe\(app.topic\(name\)\)"):
        pipeline.application().dataframe(wrong)


# --- clear_state ------------------------------------------------------------------------------------------------------


def counting(folder, group="app"):
    app = Application(group, folder / "topics", folder / "state", folder / "local", partitions=2)
    app.dataframe(app.topic("in")).stateful_map("count", lambda k, v, n: (n + 1, n + 1), default=0).to_topic(
        app.topic("out")
    )
    return app


def run_once(app, *values):
    with app.topic("in").producer() as send:
        for value in values:
            send(value, key="k")
    runner = app.runner()
    runner.epoch()
    runner.close()
    return [event.value for event in app.topic("out").read()]


def test_state_lives_on_from_run_to_run(tmp_path):
    assert run_once(counting(tmp_path), "a", "b") == [1, 2]
    assert run_once(counting(tmp_path), "c") == [1, 2, 3]


def test_cleared_state_is_gone_and_the_topics_are_read_from_their_beginning(tmp_path):
    app = counting(tmp_path)
    run_once(app, "a", "b")
    app.clear_state()
    left = [path.name for path in (tmp_path / "state" / "app").rglob("*") if path.is_file()]
    assert all(name.endswith((".json", ".ended")) and name[:20].isdigit() for name in left), left
    assert not list((tmp_path / "local").rglob("*.mdb"))
    assert [event.value for event in app.topic("in").read()] == ["a", "b"]
    assert run_once(counting(tmp_path)) == [1, 2, 1, 2]


def test_clearing_what_is_empty_does_nothing(tmp_path):
    app = counting(tmp_path)
    app.clear_state()
    app.clear_state()
    assert run_once(app, "a") == [1]


def test_clearing_leaves_other_applications_alone(tmp_path):
    one, other = counting(tmp_path, "one"), counting(tmp_path, "other")
    run_once(one, "a")
    run_once(other)
    one.clear_state()
    again = counting(tmp_path, "other")
    assert run_once(again, "b")[-1] == 2


def test_clearing_leaves_replicas_of_an_application_of_that_name_elsewhere_alone(tmp_path):
    apps = [
        Application("app", tmp_path / f"{n}" / "topics", tmp_path / f"{n}" / "state", tmp_path / "local") for n in "ab"
    ]
    for app in apps:
        app.dataframe(app.topic("in")).stateful_map("count", lambda k, v, n: (n + 1, n + 1), default=0).to_topic(
            app.topic("out")
        )
        run_once(app, "x")
    before = set((tmp_path / "local").rglob("*.mdb"))
    apps[0].clear_state()
    after = set((tmp_path / "local").rglob("*.mdb"))
    assert len(before) == 2 * len(after) > 0


def test_clearing_is_refused_while_the_application_runs_in_this_process(tmp_path):
    app = counting(tmp_path)
    runner = app.runner()
    with pytest.raises(ConflictError, match=rf"application 'app' is running \(process {os.getpid()} .*stop it first"):
        app.clear_state()
    runner.epoch()
    with pytest.raises(ConflictError):
        counting(tmp_path).clear_state()
    runner.close()
    app.clear_state()


def test_force_clears_at_any_time_and_the_run_stops_at_its_next_commit(tmp_path):
    app = counting(tmp_path)
    runner = app.runner()
    runner.epoch()
    app.clear_state(force=True)
    with pytest.raises(ConflictError):
        runner.epoch()
    assert run_once(counting(tmp_path), "a") == [1]


PROGRAM = """
import sys
from pathlib import Path
from penstock import Application

folder = Path(sys.argv[1])
app = Application("app", folder / "topics", folder / "state", folder / "local", partitions=2)
stream = app.dataframe(app.topic("in")).stateful_map("count", lambda k, v, n: (n + 1, n + 1), default=0)
stream.to_topic(app.topic("out"))
runner = app.runner()
runner.epoch()
print("running", flush=True)
sys.stdin.readline()
runner.close()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other_process(tmp_path):
    """The application in a process of its own, which waits in the middle of its run for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    yield process
    process.kill()
    process.communicate()


def test_clearing_is_refused_while_the_application_runs_in_another_process(tmp_path, other_process):
    app = counting(tmp_path)
    with pytest.raises(ConflictError, match=rf"is running \(process {other_process.pid} on .*stop it first"):
        app.clear_state()
    other_process.stdin.write("\n")
    other_process.stdin.flush()
    assert other_process.stdout.readline() == "ended\n"  # the run has ended, although the process lives
    app.clear_state()
    assert run_once(app, "a") == [1]


def test_clearing_works_when_the_process_was_killed(tmp_path, other_process):
    app = counting(tmp_path)
    with pytest.raises(ConflictError):
        app.clear_state()
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    app.clear_state()
    assert run_once(app, "a") == [1]


def test_a_run_can_be_started_when_the_process_was_killed(tmp_path, other_process):
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    assert run_once(counting(tmp_path), "a") == [1]


def test_clearing_is_refused_when_the_run_is_on_another_machine_unless_forced(tmp_path):
    app = counting(tmp_path)
    app.runner()
    [claim] = (tmp_path / "state" / "app" / "runs").iterdir()
    text = claim.read_text()
    claim.write_text(text.replace(f'"host":"{os.uname().nodename}"', '"host":"elsewhere"'))
    assert "elsewhere" in claim.read_text()
    with pytest.raises(ConflictError, match=r"on elsewhere.*if it is dead, call clear_state\(force=True\)"):
        app.clear_state()
    app.clear_state(force=True)


def test_a_second_run_makes_the_first_stop_at_its_next_commit(tmp_path):
    first = counting(tmp_path).runner()
    first.epoch()
    second = counting(tmp_path).runner()
    with pytest.raises(ConflictError, match="run only one at a time"):
        first.epoch()
    second.epoch()
    second.close()


def test_another_number_of_partitions_is_refused_with_the_remedy(tmp_path):
    run_once(counting(tmp_path), "a")
    app = Application("app", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=3)
    app.dataframe(app.topic("in")).to_topic(app.topic("out"))
    with pytest.raises(InvalidError, match="the state has 2 partitions, the application asks for 3"):
        app.runner()


def test_clock_and_ids_can_be_given(tmp_path):
    clock = ManualClock(1234)
    app = Application("app", tmp_path / "t", tmp_path / "s", tmp_path / "l", clock=clock, ids=seeded_ids(1))
    with app.topic("in").producer() as send:
        send(1)
    assert next(iter(app.topic("in").read())).timestamp_ms == 1234


def test_an_epoch_takes_no_more_events_than_allowed(tmp_path):
    app = Application("app", tmp_path / "t", tmp_path / "s", tmp_path / "l", max_events_per_epoch=3)
    app.dataframe(app.topic("in")).to_topic(app.topic("out"))
    with app.topic("in").producer() as send:
        for n in range(8):
            send(n, key="k")
    runner = app.runner()
    seen = []
    while not runner.is_caught_up():
        runner.epoch()
        seen.append(app.topic("out").end())
    assert seen == [3, 6, 8]
    runner.close()
