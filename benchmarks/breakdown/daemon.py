"""Spark's Python daemon with clocks in it: each task writes down when it ran, and what took how long."""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.breakdown.clocks import TASK, Clocks
from pyspark import daemon

import penstock.spark.stage as stage

FOLDER = "PENSTOCK_PROFILE"


def install() -> None:
    """Put clocks around the parts of a task; the workers, which are forked from here, have them."""
    clocks = Clocks()
    clocks.install(TASK)
    run_task, call = stage.run_task, stage.StageTask.__call__
    note: dict[str, Any] = {}

    @functools.wraps(run_task)
    def timed(program: Any, assignment: Any, given: Any, *rest: Any) -> Any:
        clocks.take()
        began = time.perf_counter()
        result = run_task(program, assignment, given, *rest)
        note.update(
            epoch=assignment.epoch,
            stage=given.stage,
            partition=given.partition,
            task=time.perf_counter() - began,
            phases=clocks.take(),
        )
        return result

    @functools.wraps(call)
    def called(self: Any, batches: Any) -> Any:
        began = time.time()
        yield from call(self, batches)
        line = json.dumps({**note, "began": began, "ended": time.time()})
        path = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"
        with path.open("a") as out:
            out.write(line + "\n")

    stage.run_task = timed
    stage.StageTask.__call__ = called  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    daemon.manager()
