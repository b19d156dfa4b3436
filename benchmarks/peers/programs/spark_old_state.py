"""How long Spark needs to start again with 10 M keys of state: RocksDB, restored from its checkpoint.

The state is that of a sum that Spark itself computes in the JVM: to build it with transformWithState takes most of an
hour. It lies in the same store, is restored by the same code, and the first batch needs no Python.
"""

import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.peers.job import Job, Report, read_job, serve
from benchmarks.peers.programs import spark_session
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

LAST = b'{"payment":0,"customer":"customer-00000001","shop":"shop-0001","amount":1}'


def run_all(job: Job) -> None:
    """Sum up all files that are new."""
    spark = spark_session.session(job)
    payments = spark_session.payments(spark_session.files(spark, job))
    sums = payments.groupBy("customer").agg(F.sum("amount").alias("total"))
    query = (
        sums.writeStream.format("noop")
        .option("checkpointLocation", str(job.work / "checkpoint"))
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(spark_session.MAX_SECONDS), "not done in time"


def start(job: Job) -> None:
    """Run in a process of its own."""
    subprocess.run([sys.executable, "-m", __spec__.name, str(job.work / "job.json"), "run"], check=True)


def commits(job: Job) -> dict[int, Path]:
    """Spark's log of batches that are committed."""
    return {int(path.name): path for path in (job.work / "checkpoint" / "commits").glob("[0-9]*")}


def run(job: Job) -> Report:
    """Build the state; add one payment; start again."""
    start(job)
    last = max(commits(job))
    row = pa.table({"customer": ["customer-00000001"], "value": [LAST.decode()]})
    for lane in range(job.cores):
        pq.write_table(row, job.work / "input" / f"999999-{lane}.parquet")
    began = time.time()
    start(job)
    seconds = commits(job)[last + 1].stat().st_mtime - began
    return Report(figures={"restart s": seconds}, settings={**spark_session.SETTINGS, **job.options})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_all(read_job(Path(sys.argv[1])))
    else:
        serve(run, "pyspark", "pyarrow", "pandas")
