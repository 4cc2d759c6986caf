"""Draws a run as a bar chart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.registry import OURS, STOCK
from benchmarks.report import headline
from benchmarks.runner import Result


def draw(path: Path, results: list[Result]) -> bool:
    """Draws the speed-up over PyG of every implementation, one bar each.

    Returns:
        False where matplotlib isn't installed or there is nothing to draw.
    """
    bars: list[tuple[str, str, float]] = []
    runs: list[tuple[str, float | None]] = []
    for result in results:
        phase = headline(result)
        stock = result.median(STOCK, phase)
        for name in result.entries:
            median = result.median(name, phase)
            if name != STOCK and stock and median:
                bars.append((result.title, name, stock / median))
        if any(bar[0] == result.title for bar in bars):
            bound = result.bounds.get(phase)
            runs.append((result.title, stock / bound if stock and bound else None))
    if not bars:
        print("nothing to draw", file=sys.stderr)
        return False
    try:
        import matplotlib
    except ImportError:
        print("no chart: pip install matplotlib", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in dict.fromkeys(bar[1] for bar in bars) if name != OURS]
    # Ours in the one warm colour, the peers in greys and blues.
    cool = pyplot.get_cmap("Blues")
    shade: dict[str, Any] = {
        name: cool(0.35 + 0.5 * i / max(1, len(names))) for i, name in enumerate(names)
    }
    shade[OURS] = "#d1495b"

    figure, axes = pyplot.subplots(
        figsize=(8, 1.5 + 0.22 * len(bars) + 0.2 * len(runs))
    )
    labelled: set[str] = set()

    def once(label: str) -> str | None:
        """The label, the first time it is asked for: one entry in the legend."""
        new = label not in labelled
        labelled.add(label)
        return label if new else None

    ticks, y = [], 0.0
    for title, limit in runs:
        group = [bar for bar in bars if bar[0] == title]
        middle, half = y + (len(group) - 1) / 2, len(group) / 2
        ticks.append(middle)
        for _, name, speed_up in group:
            # From 1, so that what is slower than PyG points to the left.
            axes.barh(
                y, speed_up - 1, 0.9, 1, color=shade[name], label=once(name), zorder=2
            )
            side = "left" if speed_up >= 1 else "right"
            text = f" {speed_up:.3g} "
            axes.text(speed_up, y, text, va="center", ha=side, fontsize=7)
            y += 1
        if limit is not None:
            ends = (middle - half, middle + half)
            label = once("hardware bound") or ""
            axes.vlines(limit, *ends, color="black", linestyle=":", label=label)
        y += 1
    axes.set_yticks(ticks, [title for title, _ in runs])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.margins(x=0.12, y=0.02)
    axes.axvline(1, color="black", linewidth=0.8)
    graph = f"{results[0].graph}, F = {results[0].features}"
    axes.set_xlabel(f"times PyG on a plain edge_index ({graph})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
