"""What a peer's program is told, and what it leaves: the only words that the environments share.

Nothing but the standard library, and Python 3.11: every peer's environment imports this.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

Mark = tuple[float, int]
"""A time, in seconds since 1970, and how many events were done by then."""


@dataclass(frozen=True, slots=True)
class Job:
    """One workload for one peer: the first `events` of the input, with all it leaves in the folder `work`."""

    workload: str
    events: int
    cores: int
    input: Path
    work: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> Path:
        """Where the outputs are when the program has ended: Parquet with a column `value`, or JSON lines."""
        return self.work / "outputs"

    def lane(self, number: int) -> Iterator[bytes]:
        """The payments of one part of the customers, as JSON, in the order of the input."""
        with (self.input / f"lane-{number}.jsonl").open("rb") as lines:
            for line in lines:
                value = line.rstrip(b"\n")
                if number_of(value) >= self.events:
                    return
                yield value


@dataclass(frozen=True, slots=True)
class Report:
    """What a peer's program measured, of itself and nobody else; the figure is worked out from it, not here."""

    marks: list[list[Mark]] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def number_of(value: bytes) -> int:
    """The number of a payment, which stands first in its JSON.

    >>> number_of(b'{"payment":17,"customer":"customer-0000001"}')
    17
    """
    return int(value[11 : value.index(b",", 11)])


def write_job(job: Job) -> Path:
    """Put a job where its program finds it."""
    job.work.mkdir(parents=True, exist_ok=True)
    path = job.work / "job.json"
    path.write_text(json.dumps(asdict(job), default=str, indent=1))
    return path


def read_job(path: Path) -> Job:
    """The inverse of write_job."""
    said = json.loads(path.read_text())
    return Job(**{**said, "input": Path(said["input"]), "work": Path(said["work"])})


def read_report(job: Job) -> Report:
    """What the program of a job left."""
    return Report(**json.loads((job.work / "report.json").read_text()))


def serve(run: Callable[[Job], Report], *distributions: str) -> None:
    """The main function of a peer's program: do the job that the command line names, leave the report."""
    job = read_job(Path(sys.argv[1]))
    report = run(job)
    versions = {"python": sys.version.split()[0], **{name: version(name) for name in distributions}}
    text = json.dumps({**asdict(report), "versions": {**versions, **report.versions}})
    (job.work / "report.json").write_text(text)


class Pace:
    """Notes a mark now and then while events are counted one by one, at the cost of an addition each."""

    def __init__(self, every: int = 20_000) -> None:
        self.every = every
        self.marks: list[Mark] = [(time.time(), 0)]

    def done(self, count: int) -> None:
        """So many events are done now."""
        self.marks.append((time.time(), count))
