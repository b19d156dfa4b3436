"""State larger than the memory that Spark's workers are given: it runs, and the memory of a worker stays flat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_MB = 640
PARTITIONS = 32
EVENTS = 24_000
EPOCHS = 12

PROGRAM = """
import json, os, random, resource, sys
from datetime import timedelta
from pathlib import Path
from penstock import Application

folder, partitions, events, epochs = Path(sys.argv[1]), *map(int, sys.argv[2:5])

def memory():
    with open("/proc/self/status") as lines:
        found = [line.split() for line in lines if line.startswith(("RssAnon", "VmSize"))]
    return {name.rstrip(":"): int(kilobytes) // 1024 for name, kilobytes, _ in found}

def keep(key, n, state):
    known = "" if state is None else state
    if n % 100 == 0:
        told = {"n": n, "pid": os.getpid(), "limit": resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, **memory()}
        with open(folder / "memory", "a") as out:
            out.write(json.dumps(told) + "\\n")
    return len(known), random.Random(n).randbytes(15_000).hex()

app = Application("large", folder / "topics", folder / "state", folder / "local", partitions=partitions,
                  max_events_per_epoch=events // epochs, snapshots=timedelta(seconds=5), retain=2)
numbers, lengths = app.topic("numbers"), app.topic("lengths")
with numbers.producer() as send:
    for n in range(events):
        send(n, key=f"k{n}")
    for n in range(0, events, 100):  # and some keys once more, when all is there
        send(n, key=f"k{n}")
app.dataframe(numbers).stateful_map("keep", keep).to_topic(lengths)
app.run(until="caught-up", master="local[2]")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of workers")
def test_state_larger_than_the_memory_of_the_workers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    limits = f"--conf spark.executor.pyspark.memory={LIMIT_MB}m --conf spark.ui.enabled=false"
    environment = {
        **os.environ,
        "PYSPARK_SUBMIT_ARGS": f"{limits} pyspark-shell",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "program.py", str(tmp_path), str(PARTITIONS), str(EVENTS), str(EPOCHS)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    from penstock import Application

    lengths = Application("large", tmp_path / "topics").topic("lengths")
    found: dict[str | None, list[int]] = {}
    for event in lengths.read():
        found.setdefault(event.key, []).append(event.value)
    assert found == {f"k{n}": [0, 30_000] if n % 100 == 0 else [0] for n in range(EVENTS)}

    told = [json.loads(line) for line in (tmp_path / "memory").read_text().splitlines()]
    assert {one["limit"] for one in told} == {LIMIT_MB}
    stored = sum(path.stat().st_size for path in (tmp_path / "local").rglob("data.mdb"))
    assert stored > LIMIT_MB << 20, f"{stored >> 20} MB of state fit into the {LIMIT_MB} MB of a worker"
    first = max(one["RssAnon"] for one in told if one["n"] < EVENTS // 4)
    last = max(one["RssAnon"] for one in told[-EVENTS // 100 :])
    print(f"state {stored >> 20} MB, limit {LIMIT_MB} MB, a worker's own memory at first {first} MB, at last {last} MB")  # noqa: T201
    assert last <= 1.3 * first
