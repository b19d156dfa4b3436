"""The session, the source, the sink and the marks that Spark's own operators are measured with."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Mark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming import DataStreamWriter

PAYMENT = "payment long, customer string, shop string, amount long"
MAX_SECONDS = 600
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Of Penstock's own settings all that transformWithState can take; it does not commit on RawLocalFileSystem.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.shuffle.reduceLocality.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}


def session(job: Job, **more: str) -> SparkSession:
    """A session with as many tasks and shuffle partitions as cores."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    settings = {**SETTINGS, "spark.sql.shuffle.partitions": str(job.cores), **more}
    builder = SparkSession.builder.master(f"local[{job.cores}]").appName("bench")
    spark = builder.config("spark.local.dir", str(job.work / "spark")).config(map={**settings}).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def files(spark: SparkSession, job: Job) -> DataFrame:
    """The payments as a stream of files, columns customer and value, one batch after the other."""
    reader = spark.readStream.schema("customer string, value string").option("maxFilesPerTrigger", job.cores)
    return reader.parquet(str(job.work / "input"))


def payments(raw: DataFrame, columns: str = PAYMENT) -> DataFrame:
    """The payments of a column of JSON, which is read by Spark itself, in the JVM."""
    return raw.select(F.from_json("value", columns).alias("payment")).select("payment.*")


def writer(totals: DataFrame, job: Job) -> DataStreamWriter:
    """Writes totals as JSON, in a column of Parquet files, exactly once."""
    values = totals.select(F.to_json(F.struct("*")).alias("value"))
    places = {"path": str(job.outputs), "checkpointLocation": str(job.work / "checkpoint")}
    return values.writeStream.format("parquet").options(**places).outputMode("append")


def run_query(totals: DataFrame, job: Job) -> list[dict[str, Any]]:
    """Run until all payments are done; the progress of every batch."""
    query = writer(totals, job).trigger(availableNow=True).start()
    assert query.awaitTermination(MAX_SECONDS), f"not done after {MAX_SECONDS} s"
    return [json.loads(progress.json) for progress in query.recentProgress]


def marks(job: Job, progress: list[dict[str, Any]]) -> list[Mark]:
    """When Spark had logged each batch as committed, and how many events were done then."""
    rows = {batch["batchId"]: batch["numInputRows"] for batch in progress if batch["numInputRows"]}
    found, done = [], 0
    for batch in sorted(rows):
        done += rows[batch]
        found.append(((job.work / "checkpoint" / "commits" / str(batch)).stat().st_mtime, done))
    return found


def write_state(pairs: DataFrame, path: Path) -> None:
    """Customers and totals as JSON lines for the checks."""
    with path.open("w") as out:
        for customer, total in pairs.toLocalIterator():
            out.write(f"{json.dumps([customer, total])}\n")
