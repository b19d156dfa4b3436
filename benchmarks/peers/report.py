"""What people look at: a table of figures, one of aims, a JSON file with everything, and bars."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import PEERS, WORKLOADS, Aim
from benchmarks.peers.measure import Outcome
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Verdict:
    """An aim, what was measured, and whether it holds; None if something of it was not measured."""

    aim: Aim
    found: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the aim is reached."""
        if self.found is None:
            return None
        low, high = self.aim.at_least, self.aim.at_most
        return (low is None or self.found >= low) and (high is None or self.found <= high)

    @property
    def asked(self) -> str:
        """The aim in a few signs."""
        return f"≥ {self.aim.at_least:g}" if self.aim.at_least is not None else f"≤ {self.aim.at_most:g}"


def by_name(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """All figures, each under workload, peer and name, as aims call them."""
    return {f"{o.workload} {o.peer} {name}": figure for o in outcomes for name, figure in o.figures.items()}


def judge(aims: Iterable[Aim], outcomes: Iterable[Outcome]) -> list[Verdict]:
    """Hold figures against aims."""
    figures = by_name(outcomes)
    verdicts = []
    for aim in aims:
        found = figures.get(aim.figure)
        if found is not None and aim.over is not None:
            other = figures.get(aim.over)
            found = None if other is None else found / other
        verdicts.append(Verdict(aim, found))
    return verdicts


def shown(figure: float) -> str:
    """A figure with as many digits as mean something.

    >>> shown(1234567.8), shown(12.345), shown(0.6123)
    ('1,234,568', '12.3', '0.61')
    """
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def print_tables(outcomes: Sequence[Outcome], verdicts: Iterable[Verdict], console: Console) -> None:
    """The figures of every peer with Penstock's ratio to it, and the aims."""
    figures = by_name(outcomes)
    table = Table(title="Figures", title_justify="left")
    for column, side in (("workload", "left"), ("peer", "left"), ("figure", "right"), ("", "left")):
        table.add_column(column, justify=side)
    table.add_column("Penstock to it", justify="right")
    for one in outcomes:
        peer, workload = PEERS[one.peer].title, WORKLOADS[one.workload].key
        if one.failure:
            table.add_row(workload, peer, "none", f"[red]{one.failure.splitlines()[-1][:100]}[/red]", "")
        for name, figure in one.figures.items():
            ours = figures.get(f"{one.workload} penstock {name}")
            ratio = "" if ours is None or one.peer == "penstock" else f"{shown(ours / figure)} x"
            table.add_row(workload, peer, shown(figure), name, ratio)
    console.print(table)
    aims = Table(title="Aims", title_justify="left")
    for column, side in (("aim", "left"), ("asked", "right"), ("found", "right"), ("", "left")):
        aims.add_column(column, justify=side)
    marks = {True: "[green]holds[/green]", False: "[red]not reached[/red]"}
    for verdict in verdicts:
        if verdict.found is not None:
            aims.add_row(verdict.aim.text, verdict.asked, shown(verdict.found), marks[verdict.holds])
    if aims.row_count:
        console.print(aims)


def machine() -> dict[str, Any]:
    """What this machine is, as far as it matters for figures; how busy it is just now, too."""
    model = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": model[0] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory[0] / (1 << 20)) if memory else None,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def write_json(path: Path, said: dict[str, Any], outcomes: Iterable[Outcome], verdicts: Iterable[Verdict]) -> None:
    """Everything that was measured, with versions and settings; marks and latencies are left out."""
    results = []
    for one in outcomes:
        row = asdict(one)
        row["title"] = PEERS[one.peer].title
        for long in ("marks", "latencies_ms", "figures"):
            del row["report"][long]
        results.append(row)
    aims = [{"aim": v.aim.text, "asked": v.asked, "found": v.found, "holds": v.holds} for v in verdicts]
    titles = {key: workload.title for key, workload in WORKLOADS.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**said, "workloads": titles, "results": results, "aims": aims}, indent=1) + "\n")
