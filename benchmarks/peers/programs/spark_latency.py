"""Spark's transformWithState under a small, steady load: how long from an event in its source to its committed output.

The source is Spark's MemoryStream, which costs next to nothing: no file is listed, no broker asked.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq
from benchmarks.peers.job import Job, Report, number_of, serve
from benchmarks.peers.programs import spark_session
from benchmarks.peers.programs.feed import PACE, WARM_UP, send_steadily, sent_ms
from benchmarks.peers.programs.spark_transform_with_state import Row, Totals, write_totals
from pyspark.sql import DataFrame, SparkSession

SENT = f"{spark_session.PAYMENT}, sent_us long"
SENT_TOTAL = f"{SENT}, total long"


class SentTotals(Totals):
    """The same totals for rows that say when they were sent."""

    output = Row(*(column.split()[0] for column in SENT_TOTAL.split(", ")))


def memory_stream(spark: SparkSession) -> tuple[Callable[[list[bytes]], None], DataFrame]:
    """A function that adds JSON to a stream in memory, and the DataFrame of that; one partition, to keep the order."""
    jvm: Any = spark.sparkContext._jvm
    streams = jvm.org.apache.spark.sql.execution.streaming.runtime.MemoryStream
    stream = streams.apply(spark._jsparkSession, 1, jvm.org.apache.spark.sql.Encoders.STRING())

    def add(values: list[bytes]) -> None:
        texts = jvm.java.util.ArrayList()
        texts.addAll([value.decode() for value in values])
        stream.addData(jvm.PythonUtils.toSeq(texts))

    return add, DataFrame(stream.toDF(), spark)


def committed(job: Job) -> Iterator[tuple[float, Path]]:
    """The files of outputs, each with the time at which the sink's log first named it."""
    logs = (path for path in (job.outputs / "_spark_metadata").glob("[0-9]*"))
    seen: set[str] = set()
    for log in sorted(logs, key=lambda path: int(path.name.removesuffix(".compact"))):
        names = [json.loads(line)["path"] for line in log.read_text().splitlines()[1:]]
        for name in names:
            if name not in seen:
                yield log.stat().st_mtime, Path(unquote(urlparse(name).path))
        seen.update(names)


def latencies(job: Job) -> list[float]:
    """From before a payment was added until its output was committed by the sink, behind the warm-up."""
    found = []
    for at, path in committed(job):
        values = pq.read_table(path, columns=["value"], partitioning=None).column(0).to_pylist()
        found += [at * 1_000 - sent_ms(value) for value in map(str.encode, values) if number_of(value) >= WARM_UP]
    return found


def run(job: Job) -> Report:
    """Feed a running query, then wait until all is done."""
    spark = spark_session.session(job)
    add, raw = memory_stream(spark)
    payments = spark_session.payments(raw, SENT)
    totals = payments.groupBy("customer").transformWithState(SentTotals(), SENT_TOTAL, "append", "none")
    query = spark_session.writer(totals, job).start()
    send_steadily(job, add, query.processAllAvailable)
    query.processAllAvailable()
    query.stop()
    write_totals(spark, job)
    settings = {**spark_session.SETTINGS, **PACE, "source": "MemoryStream"}
    return Report(latencies_ms=latencies(job), settings=settings)


if __name__ == "__main__":
    serve(run, "pyspark", "pyarrow", "pandas")
