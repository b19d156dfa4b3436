"""Spark's applyInPandasWithState: the older way to keep state in Spark from Python, with pandas, on RocksDB."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from benchmarks.peers.job import Job, Report, serve
from benchmarks.peers.programs import spark_session
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.state import GroupState

TOTAL = "payment long, customer string, shop string, amount long, total long"


def totals(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Each row of a customer with the total so far, worked out by pandas at once."""
    total = state.get[0] if state.exists else 0
    for frame in frames:
        sums = frame["amount"].cumsum() + total
        total = int(sums.iloc[-1])
        yield frame.assign(total=sums)
    state.update((total,))


def run(job: Job) -> Report:
    """The payments of the input through applyInPandasWithState."""
    spark = spark_session.session(job)
    groups = spark_session.payments(spark_session.files(spark, job)).groupBy("customer")
    found = groups.applyInPandasWithState(totals, TOTAL, "total long", "append", "NoTimeout")
    progress = spark_session.run_query(found, job)
    state = spark.read.format("statestore").load(str(job.work / "checkpoint"))
    pairs = state.select(F.col("key.customer"), F.col("value.groupState.total"))
    spark_session.write_state(pairs, job.work / "state-0.jsonl")
    return Report(marks=[spark_session.marks(job, progress)], settings=spark_session.SETTINGS)


if __name__ == "__main__":
    serve(run, "pyspark", "pyarrow", "pandas")
