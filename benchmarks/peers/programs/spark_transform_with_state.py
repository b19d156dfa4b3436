"""Spark's transformWithState in Python, with rows: the newest way to keep state in Spark, on RocksDB."""

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.job import Job, Report, serve
from benchmarks.peers.programs import spark_session
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

TOTAL = "payment long, customer string, shop string, amount long, total long"
SHOP_TOTAL = f"{TOTAL}, shop_total long"
AMOUNT = 3


class Totals(StatefulProcessor):
    """The running total of a key. State is read and written once per key and batch: each costs a round trip."""

    name = "total"
    output = Row(*(column.split()[0] for column in TOTAL.split(", ")))

    def init(self, handle: StatefulProcessorHandle) -> None:
        """One value of state."""
        self._total = handle.getValueState(self.name, "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Each row with the total so far."""
        found = self._total.get()
        total = found[0] if found is not None else 0
        for row in rows:
            total += row[AMOUNT]
            yield self.output(*row, total)
        self._total.update((total,))

    def close(self) -> None:
        """Nothing to give back."""


class ShopTotals(Totals):
    """The same for shops, behind the other."""

    name = "shop_total"
    output = Row(*(column.split()[0] for column in SHOP_TOTAL.split(", ")))


def write_totals(spark: SparkSession, job: Job) -> None:
    """The customers' totals as the state store holds them, for the checks."""
    reader = spark.read.format("statestore").option("stateVarName", Totals.name)
    # Operators are counted from the end of the query.
    state = reader.option("operatorId", 1 if job.workload == "C" else 0).load(str(job.work / "checkpoint"))
    spark_session.write_state(state.select("key.customer", "value.total"), job.work / "state-0.jsonl")


def run(job: Job) -> Report:
    """The payments of the input through one transformWithState, or two."""
    spark = spark_session.session(job)
    totals = spark_session.payments(spark_session.files(spark, job))
    totals = totals.groupBy("customer").transformWithState(Totals(), TOTAL, "append", "none")
    if job.workload == "C":
        totals = totals.groupBy("shop").transformWithState(ShopTotals(), SHOP_TOTAL, "append", "none")
    progress = spark_session.run_query(totals, job)
    write_totals(spark, job)
    return Report(marks=[spark_session.marks(job, progress)], settings=spark_session.SETTINGS)


if __name__ == "__main__":
    serve(run, "pyspark", "pyarrow", "pandas")
