"""Measure Penstock beside its peers: the same payments, the same machine, one after the other."""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.peers.catalogue import AIMS, PEERS, WORKLOADS
from benchmarks.peers.environments import NoEnvironmentError, interpreter
from benchmarks.peers.measure import REPOSITORY, Outcome, Size, measure
from benchmarks.peers.report import judge, machine, print_tables, shown, write_json
from rich.console import Console

RESULTS = REPOSITORY / "benchmarks" / "results"
CHART = ("matplotlib==3.11.2",)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--short", action="store_true", help="fewer events: a first look, in minutes")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="tasks, processes or workers of each peer")
    parser.add_argument("--results", type=Path, default=RESULTS / "peers.json", help="the JSON file to write")
    parser.add_argument("--picture", type=Path, help="the PNG to write (by default beside the JSON file)")
    parser.add_argument("--folder", type=Path, help="where inputs, states and outputs lie while it runs")
    parser.epilog = f"workloads: {', '.join(WORKLOADS)}; peers: {', '.join(PEERS)}"
    return parser.parse_args()


def measure_all(workloads: list[str], peers: list[str], size: Size, console: Console) -> list[Outcome]:
    """Every peer on every workload that it takes part in, saying so as it goes."""
    outcomes = []
    for workload in workloads:
        for peer in [PEERS[key] for key in peers if workload in PEERS[key].portions]:
            began = time.monotonic()
            outcome = measure(WORKLOADS[workload], peer, size)
            outcomes.append(outcome)
            found = ", ".join(f"{shown(figure)} {name}" for name, figure in outcome.figures.items())
            said = found or f"[red]{outcome.failure}[/red]"
            console.print(f"{workload}, {peer.title}: {said} [dim]({time.monotonic() - began:.0f} s)[/dim]")
        shutil.rmtree(size.folder / f"input-{workload}", ignore_errors=True)
    return outcomes


def draw(results: Path, picture: Path, console: Console) -> None:
    """Bars, if matplotlib can be had and there is something to compare."""
    try:
        python = interpreter("chart", CHART)
    except NoEnvironmentError as error:
        console.print(f"no picture: {error}")
        return
    command = [python, str(REPOSITORY / "benchmarks" / "peers" / "programs" / "chart.py"), str(results), str(picture)]
    done = subprocess.run(command, capture_output=True, text=True)
    console.print(f"picture: {picture}" if done.returncode == 0 else f"no picture: {done.stderr.strip()[-300:]}")


def main() -> None:
    """Measure, print, write."""
    given, console = arguments(), Console(highlight=False)
    said = {"date": time.strftime("%Y-%m-%d"), "short": given.short, "machine": machine()}
    folder = Path(tempfile.mkdtemp(prefix="penstock-peers-", dir=given.folder))
    try:
        outcomes = measure_all(given.workloads, given.peers, Size(given.cores, given.short, folder), console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = judge(AIMS, outcomes)
    print_tables(outcomes, verdicts, console)
    write_json(given.results, said, outcomes, verdicts)
    console.print(f"everything: {given.results}")
    draw(given.results, given.picture or given.results.with_suffix(".png"), console)


if __name__ == "__main__":
    main()
