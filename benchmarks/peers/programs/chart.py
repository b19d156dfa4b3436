"""Bars from a results file, one panel for each workload that was measured in events per second or milliseconds."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

OURS, OTHERS, LIMIT = "#d9480f", "#5c7cfa", "#adb5bd"
UNITS = {"events/s": "events/s", "p99 ms": "ms, 99th percentile"}


def panels(results: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The results that make a panel, by workload and figure; one bar is no comparison."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        for name in UNITS:
            if name in result["figures"]:
                found.setdefault((result["workload"], name), []).append(result)
    return {panel: rows for panel, rows in found.items() if len(rows) > 1}


def draw(axes: Any, title: str, unit: str, rows: list[dict[str, Any]], name: str) -> None:
    """One panel: the longest bar on top."""
    rows = sorted(rows, key=lambda row: row["figures"][name])
    figures = [row["figures"][name] for row in rows]
    colours = [{"penstock": OURS, "bare": LIMIT}.get(row["peer"], OTHERS) for row in rows]
    axes.barh([row["title"] for row in rows], figures, color=colours, height=0.65)
    for place, figure in enumerate(figures):
        text = f" {figure:,.0f}" if figure >= 100 else f" {figure:.3g}"
        axes.text(figure, place, text, va="center", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlim(0, max(figures) * 1.18)
    axes.set_xlabel(unit, fontsize=8)
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(source: Path, target: Path) -> None:
    """Draw all panels below each other."""
    said = json.loads(source.read_text())
    found = panels(said["results"])
    if not found:
        sys.exit("no workload was measured with two peers, so there is nothing to compare")
    heights = [len(rows) + 1.4 for rows in found.values()]
    figure, axes = plt.subplots(
        len(found),
        1,
        figsize=(9, 0.42 * sum(heights) + 0.8),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (panel, rows), one in zip(found.items(), axes[:, 0], strict=True):
        workload, name = panel
        draw(one, f"{workload}: {said['workloads'][workload]}", UNITS[name], rows, name)
    where = f"{said['machine']['cores']} cores, {said['machine']['memory_gib']} GiB, {said['date']}"
    figure.suptitle(f"Penstock and its peers ({where})", x=0.01, ha="left", fontsize=11)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
