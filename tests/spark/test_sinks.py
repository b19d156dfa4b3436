"""Sinks of an application on Spark: Spark's own writers, files, each epoch once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import Application, Event


def test_any_batch_writer_of_spark_can_be_a_sink_with_the_epoch_in_its_path(spark: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write(epoch: int, partition: int, events: Sequence[Event]) -> None:
        from pyspark.sql import SparkSession

        frame = SparkSession.active().createDataFrame([event.value for event in events], "n long")
        frame.write.mode("overwrite").parquet(str(out / f"epoch={epoch}" / f"part={partition}"))

    app = Application("writer", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2)
    app.from_iterable("numbers", range(10), key=str).map(lambda n: {"n": n}).sink(write)
    app.run(until="caught-up", spark=spark)
    assert sorted(row.n for row in spark.read.parquet(str(out)).collect()) == list(range(10))


def test_an_epoch_on_spark_appears_as_one_file(spark: Any, tmp_path: Path) -> None:
    app = Application("files", tmp_path / "topics", tmp_path / "state", tmp_path / "local", partitions=2)
    app.from_iterable("numbers", range(10), key=str).files(tmp_path / "out")
    app.run(until="caught-up", spark=spark)
    [file] = (tmp_path / "out").glob("*.json")
    assert sorted(json.loads(line) for line in file.read_text().splitlines()) == list(range(10))
