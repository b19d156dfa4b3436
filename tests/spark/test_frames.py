"""Streaming DataFrames as sources, on a real Spark: each row once in the state, through stops and restarts."""

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from penstock import Application, DeadLetter, InvalidError
from penstock.clock import SystemClock
from penstock.spark import lag
from penstock.spark.frames import placed
from penstock.state.keys import encode_key, key_group, partition_of
from penstock.testing import TestDriver

SCHEMA = "customer string, amount long, at long"


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def total(key: Any, value: dict[str, Any], state: int) -> tuple[dict[str, Any], int]:
    state += value["amount"]
    return {"customer": key, "total": state}, state


def application(spark: Any, tmp_path: Path, **settings: Any) -> Application:
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2, **settings)
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    stream = app.dataframe(frame, key="customer", timestamp="at", order="at")
    stream.stateful_map("total", total, default=0).to_topic(app.topic("totals"))
    return app


def last_totals(app: Application) -> dict[str, int]:
    return {event.key: event.value["total"] for event in app.topic("totals").read()}


def test_rows_of_a_streaming_frame_count_once_over_several_runs(spark: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in", "a.json", [{"customer": f"c{n % 3}", "amount": n, "at": n} for n in range(30)])
    application(spark, tmp_path).run(until="caught-up", spark=spark)
    write_rows(tmp_path / "in", "b.json", [{"customer": f"c{n % 3}", "amount": n, "at": n} for n in range(30, 60)])
    app = application(spark, tmp_path)
    app.run(until="caught-up", spark=spark)
    assert last_totals(app) == {f"c{k}": sum(range(k, 60, 3)) for k in range(3)}
    assert app.topic("totals").end() == 60


def test_rows_of_one_key_come_in_the_order_that_was_asked_for(spark: Any, tmp_path: Path) -> None:
    rows = [{"customer": "c", "amount": n, "at": n} for n in range(100)]
    write_rows(tmp_path / "in", "a.json", rows[::-1])
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2)
    frame = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in")).repartition(5)
    app.dataframe(frame, key="customer", value="amount", order="at").to_topic(app.topic("out"))
    app.run(until="caught-up", spark=spark)
    assert [event.value for event in app.topic("out").read()] == list(range(100))


STRANGE_TEXTS = ["", "a", "a\0", "\0", "\1", "\1\2", "\0\1", "\u00e4\u20ac\U0001f600", "c-1", "C-1", " c-1"]


def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The keys of a partition, with its number."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        there = pa.array([context.partitionId()] * batch.num_rows)
        yield pa.RecordBatch.from_arrays([there, batch.column("key")], ["partition", "key"])


@pytest.mark.parametrize("kind", ["string", "binary"])
@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_spark_brings_each_key_to_the_partition_that_owns_it(spark: Any, kind: str, partitions: int) -> None:
    draw = random.Random(partitions)
    keys: list[Any] = [*STRANGE_TEXTS, *(f"customer-{n}" for n in range(200))]
    if kind == "binary":
        keys = [*(key.encode() for key in keys), *(draw.randbytes(draw.randrange(40)) for _ in range(300))]
    rows = spark.createDataFrame([(key,) for key in [*keys, None]], f"key {kind}")
    found = placed(rows, partitions).mapInArrow(where, f"partition long, key {kind}").collect()
    owners = {key: partition_of(key_group(encode_key(key)), partitions) for key in keys}
    assert {(row.key if kind == "string" or row.key is None else bytes(row.key)): row.partition for row in found} == {
        **owners,
        None: 0,
    }


KEYS_OF_KINDS = {
    "string": STRANGE_TEXTS,
    "binary": [b"", b"\x00", b"\x01", b"\xff\xfe", b"c"],
    "long": [0, -1, 1, 255, 256, -(2**62), 2**62],
    "double": [0.5, -1.25, 1e300],
    "boolean": [True, False],
}


@pytest.mark.parametrize("kind", KEYS_OF_KINDS)
def test_keys_of_any_kind_have_their_own_state(spark: Any, tmp_path: Path, kind: str) -> None:
    keys = KEYS_OF_KINDS[kind]
    rows = [(key, amount) for amount in (1, 2, 3) for key in keys]
    spark.createDataFrame(rows, f"customer {kind}, amount long").write.parquet(str(tmp_path / "in"))
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=4)
    frame = spark.readStream.schema(f"customer {kind}, amount long").parquet(str(tmp_path / "in"))
    stream = app.dataframe(frame, key="customer", value="amount", order="amount")
    stream.stateful_map("seen", seen, default=()).to_topic(app.topic("out", key="canonical"))
    app.run(until="caught-up", spark=spark)
    found: dict[Any, list[Any]] = {}
    for event in app.topic("out", key="canonical").read():
        found.setdefault(event.key, []).append(event.value)
    assert found == {key: [[1], [1, 2], [1, 2, 3]] for key in keys}


def seen(key: Any, amount: int, before: Any) -> tuple[list[int], list[int]]:
    """All amounts of a key so far."""
    return [*before, amount], [*before, amount]


def test_events_without_a_time_get_that_of_their_epoch(spark: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in", "a.json", [{"customer": f"c{n}", "amount": n, "at": n} for n in range(5)])
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2)
    app.dataframe(spark.readStream.schema(SCHEMA).json(str(tmp_path / "in")), key="customer").to_topic(app.topic("out"))
    before_ms = SystemClock().now_ms()
    app.run(until="caught-up", spark=spark)
    [at_ms] = {event.timestamp_ms for event in app.topic("out").read()}
    assert before_ms <= at_ms <= SystemClock().now_ms()


def behind_the_last(key: Any, value: dict[str, Any], last: int) -> tuple[bool, int]:
    """Whether an event comes behind the last one of its key."""
    return value["at"] > last, value["at"]


@pytest.mark.parametrize("order", [None, "at"])
def test_rows_of_one_key_in_one_split_come_in_its_order(spark: Any, tmp_path: Path, order: str | None) -> None:
    splits, rows = 9, 400
    for split in range(splits):  # more splits than cores, and of different sizes
        keys = [f"c{split}-{key}" for key in range(7)]
        content = [{"customer": keys[at % 7], "amount": 1, "at": at} for at in range(rows * (1 + split % 3))]
        write_rows(tmp_path / "in", f"{split}.json", content)
    assert follow(spark, tmp_path, order) == [True] * sum(rows * (1 + split % 3) for split in range(splits))


def test_rows_of_one_key_in_many_splits_come_in_the_order_that_was_asked_for(spark: Any, tmp_path: Path) -> None:
    splits, rows = 9, 300
    for split in range(splits):
        content = [{"customer": f"c{at % 7}", "amount": 1, "at": at} for at in range(split, splits * rows, splits)]
        write_rows(tmp_path / "in", f"{split}.json", content)
    assert follow(spark, tmp_path, "at") == [True] * (splits * rows)


def follow(spark: Any, tmp_path: Path, order: str | None) -> list[bool]:
    """Of each event whether it came behind the last one of its key, with more partitions than cores."""
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=7)
    # As many tasks as files: Spark would put small ones together.
    spark.conf.set("spark.sql.files.openCostInBytes", 1 << 30)
    try:
        frame = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in"))
        stream = app.dataframe(frame, key="customer", timestamp="at", order=order)
        stream.stateful_map("order", behind_the_last, default=-1).to_topic(app.topic("out"))
        app.run(until="caught-up", spark=spark)
    finally:
        spark.conf.unset("spark.sql.files.openCostInBytes")
    return [event.value for event in app.topic("out").read()]


def test_a_frame_and_a_topic_feed_one_state(spark: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in", "a.json", [{"customer": "c", "amount": 5, "at": 1}])
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2)
    frame = app.dataframe(spark.readStream.schema(SCHEMA).json(str(tmp_path / "in")), key="customer")
    topic = app.dataframe(app.topic("more"))
    frame.concat(topic).stateful_map("total", total, default=0).to_topic(app.topic("totals"))
    with app.topic("more").producer() as send:
        send({"amount": 7}, key="c")
    app.run(until="caught-up", spark=spark)
    assert max(event.value["total"] for event in app.topic("totals").read()) == 12


def test_encoded_values_are_decoded_with_their_codec_and_bad_ones_put_aside(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text('{"amount": 1}\n{"amount": \n{"amount": 2}\n')
    app = Application(
        "frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local", on_error=DeadLetter("broken")
    )
    frame = spark.readStream.text(str(tmp_path / "in"))
    app.dataframe(frame, value="value", codec="json").map(lambda v: v["amount"]).to_topic(app.topic("out"))
    app.run(until="caught-up", spark=spark)
    assert sorted(event.value for event in app.topic("out").read()) == [1, 2]
    assert [event.value for event in app.topic("broken", key="bytes", value="bytes").read()] == [b'{"amount": ']


def test_a_lost_checkpoint_is_refused_and_nothing_is_counted_twice(spark: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in", "a.json", [{"customer": "c", "amount": 5, "at": 1}])
    write_rows(tmp_path / "in", "b.json", [{"customer": "c", "amount": 6, "at": 2}])
    application(spark, tmp_path).run(until="caught-up", spark=spark)
    for file in sorted((tmp_path / "state" / "frames" / "spark").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    app = application(spark, tmp_path)
    with pytest.raises(InvalidError, match="do not belong together"):
        app.run(until="caught-up", spark=spark)
    assert last_totals(app) == {"c": 11}


def test_a_frame_needs_spark_and_its_columns(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidError, match="on Spark only"):
        TestDriver(application(spark, tmp_path))
    app = Application("frames", tmp_path / "topics", tmp_path / "state", tmp_path / "local")
    frame = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in"))
    app.dataframe(frame, key="nobody").to_topic(app.topic("out"))
    with pytest.raises(InvalidError, match="no column 'nobody'; it has customer, amount, at"):
        app.run(until="caught-up", spark=spark)
    with pytest.raises(InvalidError, match="streaming DataFrame"):
        app.dataframe(spark.range(3))


def test_the_progress_of_the_query_says_how_far_its_sources_are_behind(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in", "a.json", [{"customer": "c", "amount": 5, "at": 1}])
    app = application(spark, tmp_path)
    heard: list[int] = []

    def listen(sources: Any) -> int:
        heard.append(sources[0].numInputRows)
        app.stop()
        return 3

    monkeypatch.setattr(lag, "events_behind", listen)
    app.run(timeout=timedelta(seconds=120), spark=spark)
    assert heard[0] == 1
