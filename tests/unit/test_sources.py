"""Iterables and folders of files as sources: each item once, in order, through restarts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Application, Event, InvalidError
from penstock.storage import memory_storage
from penstock.testing import Crash, FaultyStorage, TestDriver


def values(driver: TestDriver, topic: str = "out") -> list[Any]:
    return [event.value for event in driver.received(topic)]


def test_items_of_an_iterable_are_read_once_however_often_the_application_starts() -> None:
    app = Application("numbers", partitions=1)
    app.from_iterable("numbers", range(5)).to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.epoch()
    driver.restart()
    driver.epoch()
    assert values(driver) == [0, 1, 2, 3, 4]


def test_items_have_the_keys_of_the_key_function_or_their_own() -> None:
    app = Application("numbers", partitions=1)
    app.from_iterable("numbers", [1, Event("own", 2, 77)], key=lambda n: f"k{n}").to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.epoch()
    assert {(e.key, e.value) for e in driver.received("out")} == {("k1", 1), ("own", 2)}


@pytest.mark.parametrize("fault", ["die_before", "die_after", "lose_answer"])
def test_a_crash_while_an_iterable_comes_in_neither_loses_nor_doubles_items(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("penstock.sources.EVENTS_PER_PART", 2)
    for write in (1, 2, 3):
        topics = memory_storage()
        app = Application("numbers", partitions=1)
        app.from_iterable("numbers", range(5)).to_topic(app.topic("out"))
        driver = TestDriver(app, topics=FaultyStorage(topics, **{fault: write}))
        try:
            driver.epoch()
        except Crash:
            app = Application("numbers", partitions=1)
            app.from_iterable("numbers", range(5)).to_topic(app.topic("out"))
            driver = TestDriver(app, topics=topics)
            driver.epoch()
        assert values(driver, "numbers") == [0, 1, 2, 3, 4], f"{fault} at write {write}"


def write_file(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    elif name.endswith(".csv"):
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        (folder / name).write_text("\n".join(lines) + "\n")
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_rows_of_files_are_read_in_the_order_of_names_and_new_files_later(tmp_path: Path, kind: Any) -> None:
    write_file(tmp_path / "in", f"b.{kind}", [{"n": 3}, {"n": 4}])
    write_file(tmp_path / "in", f"a.{kind}", [{"n": 1}, {"n": 2}])
    write_file(tmp_path / "in", "other.txt", [{"n": 99}])
    app = Application("files", partitions=1)
    app.files(tmp_path / "in", kind).map(lambda row: int(row["n"])).to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.epoch()
    write_file(tmp_path / "in", f"c.{kind}", [{"n": 5}])
    driver.epoch()
    driver.restart()
    driver.epoch()
    assert values(driver) == [1, 2, 3, 4, 5]


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    write_file(tmp_path / "in", "a.json", [{"n": 1}])
    (tmp_path / "in" / "b.json").write_text('{"n": \n')
    app = Application("files", partitions=1)
    app.files(tmp_path / "in").to_topic(app.topic("out"))
    driver = TestDriver(app)
    with pytest.raises(InvalidError, match=r"in/b\.json cannot be read as json"):
        driver.epoch()
    assert values(driver) == []
    (tmp_path / "in" / "b.json").write_text('{"n": 2}\n')
    driver.epoch()
    assert values(driver) == [{"n": 1}, {"n": 2}]


def test_an_unknown_format_is_refused_when_the_plan_is_built(tmp_path: Path) -> None:
    app = Application("files")
    with pytest.raises(InvalidError, match="it is one of 'json', 'csv', 'parquet'"):
        app.files(tmp_path, "xml")  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="it is one of 'json', 'csv', 'parquet'"):
        app.dataframe(app.topic("in")).files(tmp_path, "xml")  # type: ignore[arg-type]


def written(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.json")):
        rows.extend(json.loads(line) for line in file.read_text().splitlines())
    return rows


def test_an_epoch_is_one_file_and_publishing_it_again_writes_no_second(tmp_path: Path) -> None:
    storage = memory_storage()
    app = Application("files", partitions=3)
    app.dataframe(app.topic("in")).files(tmp_path / "out")
    driver = TestDriver(app, storage=storage)
    for n in range(6):
        driver.send("in", {"n": n}, key=f"k{n}")
    driver.epoch()
    [mark] = storage.list("published")
    driver.crash()
    storage.delete([mark])
    driver.restart()
    assert sorted(row["n"] for row in written(tmp_path / "out")) == [0, 1, 2, 3, 4, 5]
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_of_other_formats_hold_the_fields_as_columns(tmp_path: Path, kind: Any) -> None:
    app = Application("files", partitions=1)
    app.dataframe(app.topic("in")).files(tmp_path / "out", kind)
    driver = TestDriver(app)
    driver.send("in", {"a": 1, "b": "x"})
    driver.send("in", {"a": 2, "c": True})
    driver.epoch()
    [file] = (tmp_path / "out").glob(f"*.{kind}")
    if kind == "csv":
        assert file.read_text() == "a,b,c\n1,x,\n2,,True\n"
    else:
        assert pq.read_table(file).to_pylist() == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": True}]


def test_print_shows_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    app = Application("shown", partitions=1)
    app.dataframe(app.topic("in")).print()
    driver = TestDriver(app)
    driver.send("in", {"n": [1, 2]}, key="a")
    driver.epoch()
    assert "'a': {'n': [1, 2]}" in capsys.readouterr().out


def test_print_table_shows_the_last_events_with_a_column_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    app = Application("shown", partitions=1)
    app.dataframe(app.topic("in")).print_table(2)
    driver = TestDriver(app)
    for n in range(3):
        driver.send("in", {"number": n + 100}, key="a")
    driver.epoch()
    shown = capsys.readouterr().out
    assert "epoch 0, partition 0: 3 events" in shown
    assert "number" in shown
    assert "101" in shown
    assert "102" in shown
    assert "100" not in shown
