"""`Application.run()`: when it ends, how it starts again, and what it says when the world is not as it should be."""

import logging
import os
import signal
import threading
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import Application, InvalidError
from penstock.errors import ConflictError, LogicError, StorageError
from penstock.spark import running
from penstock.spark.java import find_java_home
from penstock.storage import Storage


def add(key: Any, n: int, total: int) -> tuple[int, int]:
    return total + n, total + n


def application(folder: Path, **settings: Any) -> Application:
    places = {"broker_address": folder / "topics", "state_dir": folder / "state", "local_dir": folder / "local"}
    return Application("run", partitions=2, **{**places, **settings})


def summing(app: Application, function: Any = add) -> Application:
    app.dataframe(app.topic("numbers")).stateful_map("sum", function, default=0).to_topic(app.topic("sums"))
    return app


def send(app: Application, first: int, count: int) -> None:
    with app.topic("numbers").producer() as send_one:
        for n in range(first, first + count):
            send_one(n, key="k", timestamp_ms=n)


def sums(app: Application) -> list[int]:
    return [event.value for event in app.topic("sums").read()]


def running_sums(count: int) -> list[int]:
    return [n * (n + 1) // 2 for n in range(count)]


def epochs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state" / "run" / "epochs").glob("*[0-9].json"))


def test_until_caught_up_ends_when_the_input_does_and_goes_on_there(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=4))
    send(app, 0, 10)
    app.run(until="caught-up", spark=spark)
    assert sums(app) == running_sums(10)
    assert len(epochs(tmp_path)) == 3
    app.run(until="caught-up", spark=spark)
    assert len(epochs(tmp_path)) == 3, "nothing was new"
    send(app, 10, 2)
    app.run(until="caught-up", spark=spark)
    assert sums(app) == running_sums(12)


def test_count_ends_after_so_many_events_of_this_run(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=4))
    send(app, 0, 20)
    app.run(count=8, spark=spark)
    assert sums(app) == running_sums(8)
    app.run(count=5, spark=spark)
    assert sums(app) == running_sums(16), "an epoch is never cut in the middle"


def test_timeout_ends_a_run_that_waits(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path))
    send(app, 0, 3)
    app.run(timeout=timedelta(seconds=2), spark=spark)
    assert sums(app) == running_sums(3)


def stop_when_there_are_sums(app: Application, how: Any) -> threading.Thread:
    def watch() -> None:
        while not sums(app):
            pass
        how()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["stop()", "SIGTERM", "SIGINT"])
def test_it_stops_after_the_epoch_under_way(spark: Any, tmp_path: Path, how: str) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=3))
    send(app, 0, 3_000)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = app.stop if how == "stop()" else lambda: os.kill(os.getpid(), getattr(signal, how))
    thread = stop_when_there_are_sums(app, stop)
    app.run(spark=spark)
    thread.join()
    found = sums(app)
    assert 0 < len(found) < 3_000
    assert found == running_sums(3_000)[: len(found)]
    assert len(found) == 3 * len(epochs(tmp_path)), "an epoch was cut"
    assert (tmp_path / "state" / "run" / "runs" / f"{1:020d}.ended").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    app.run(count=3, spark=spark)
    assert sums(app) == running_sums(3_000)[: len(found) + 3], "a stopped application can be run again"


def test_the_session_of_the_user_lives_on_with_the_users_settings(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path))
    send(app, 0, 3)
    app.run(until="caught-up", spark=spark)
    assert spark.range(5).count() == 5


def test_a_trigger_is_the_least_interval_between_two_epochs(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=1))
    send(app, 0, 3)
    app.run(until="caught-up", spark=spark, trigger=timedelta(milliseconds=700))
    times = [(tmp_path / "state" / "run" / "epochs" / name).stat().st_mtime for name in epochs(tmp_path)]
    assert all(later - earlier >= 0.6 for earlier, later in pairwise(times))
    assert sums(app) == running_sums(3)


class Pauses(threading.Event):
    """Notes how long a run would pause, and lets no time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > running.IDLE_SECONDS:
            self.seconds.append(timeout)
        return super().wait(0)


def failing(folder: Path, times: int) -> Any:
    def add_or_fail(key: Any, n: int, total: int) -> tuple[int, int]:
        failed = len(list(folder.glob("failed-*")))
        if n == 2 and failed < times:
            (folder / f"failed-{failed}").touch()
            raise ConnectionError(f"failure number {failed}")
        return total + n, total + n

    return add_or_fail


def test_a_failure_that_passes_is_survived_by_restarts_with_growing_pauses(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path), failing(tmp_path, times=3))
    app._stop = pauses = Pauses()
    send(app, 0, 5)
    app.run(until="caught-up", spark=spark, restarts=3)
    assert pauses.seconds == [1, 2, 4]
    assert sums(app) == running_sums(5)


def test_restarts_give_up_with_the_first_cause(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path), failing(tmp_path, times=9))
    app._stop = pauses = Pauses()
    send(app, 0, 5)
    with pytest.raises(LogicError, match="failure number 0") as caught:
        app.run(until="caught-up", spark=spark, restarts=2)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert pauses.seconds == [1, 2]
    assert len(list(tmp_path.glob("failed-*"))) == 3
    assert sums(app) == []


class Unreachable:
    """A storage that cannot be reached when an epoch is to be committed, so many times."""

    def __init__(self, inner: Storage, times: int) -> None:
        self.read, self.list, self.delete = inner.read, inner.list, inner.delete
        self._inner = inner
        self._times = times

    def create(self, name: str, data: bytes) -> bool:
        if name.startswith("epochs/") and self._times:
            self._times -= 1
            raise StorageError("it cannot be reached; try again")
        return self._inner.create(name, data)


def test_storage_that_fails_for_a_while_is_survived_by_restarts(spark: Any, tmp_path: Path) -> None:
    app = summing(application(tmp_path))
    app._stop = Pauses()
    send(app, 0, 5)
    app._state = Unreachable(app._state, times=2)
    with pytest.raises(StorageError, match="cannot be reached"):
        app.run(until="caught-up", spark=spark)
    app.run(until="caught-up", spark=spark, restarts=1)
    assert sums(app) == running_sums(5)


def test_what_no_restart_can_help_is_raised_at_once(spark: Any, tmp_path: Path) -> None:
    first = summing(application(tmp_path))
    send(first, 0, 5)

    def take_over(key: Any, n: int, total: int) -> tuple[int, int]:
        (tmp_path / "state" / "run" / "runs" / f"{7:020d}.json").write_text("{}")  # as another run would
        return total + n, total + n

    app = summing(application(tmp_path), take_over)
    app._stop = pauses = Pauses()
    with pytest.raises(ConflictError, match="run 7"):
        app.run(until="caught-up", spark=spark, restarts=3)
    assert pauses.seconds == []
    assert sums(app) == []


class NoSpark:
    """In place of a session: whoever touches it has begun with Spark."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("Spark was started")


@pytest.mark.parametrize("what", ["state_dir", "broker_address"])
def test_a_place_that_cannot_be_used_is_told_before_spark_starts(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("no folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            InvalidError, match=f"{what} is '{place}', but '{tmp_path / 'file'}' is a file; give a folder"
        ):
            summing(application(tmp_path, **{what: place})).run(spark=NoSpark())


def test_a_folder_that_may_not_be_read_is_told_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(InvalidError, match="may not be read and written here; change its"):
        summing(application(tmp_path)).run(spark=NoSpark())


def test_a_broker_that_holds_no_such_topic_is_told(spark: Any, tmp_path: Path, caplog: Any) -> None:
    app = summing(application(tmp_path))
    with caplog.at_level(logging.WARNING):
        app.run(until="caught-up", spark=spark)
    assert f"topic 'numbers' in {tmp_path / 'topics'} has no events yet" in caplog.text


def test_the_address_of_a_kafka_broker_and_of_memory_are_refused_with_the_way_to_do_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="readStream"):
        application(tmp_path, broker_address="localhost:9092")
    with pytest.raises(InvalidError, match="use a folder or an object store"):
        summing(application(tmp_path, broker_address="memory://here")).run(spark=NoSpark())


def test_a_missing_java_is_an_error_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.java._packaged_java", lambda: None)
    with pytest.raises(InvalidError, match=r"needs Java 17 or newer.*pip install 'penstock\[java\]'"):
        find_java_home(tmp_path, {"PATH": str(tmp_path)})
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(InvalidError, match="needs Java 17 or newer"):
        find_java_home(tmp_path, {"JAVA_HOME": str(tmp_path), "PATH": str(old.parent)})


@pytest.mark.parametrize("full", ["state_dir", "broker_address", "local_dir"])
def test_a_full_disk_is_a_sentence_and_with_room_it_goes_on(
    spark: Any, tmp_path: Path, small_disk: Path, full: str
) -> None:
    app = summing(application(tmp_path, max_events_per_epoch=5, **{full: small_disk / "here"}))
    send(app, 0, 5)
    app.run(until="caught-up", spark=spark)
    send(app, 5, 5)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    with pytest.raises(StorageError, match=r"(?i)no space left|make room") as caught:
        app.run(until="caught-up", spark=spark)
    assert len(str(caught.value).splitlines()) == 1
    filler.unlink()
    app.run(until="caught-up", spark=spark)
    assert sums(app) == running_sums(10)
