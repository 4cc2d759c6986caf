"""Reports a run: JSON for machines, a Markdown table for people."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import BACKWARD, FORWARD, STEP, STOCK
from benchmarks.runner import MEMORY, OK, Result
from benchmarks.targets import Verdict, judge

PHASES = (FORWARD, BACKWARD, STEP, MEMORY)

Stamp = dict[str, Any]


def stamp(command: str, bandwidth: float) -> Stamp:
    """What the run ran on.

    Args:
        command: the command line.
        bandwidth: bytes per second of a plain copy.
    """
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": _version("torch_geometric"),
        "torch_scatter": _version("torch_scatter"),
        "torch_sparse": _version("torch_sparse"),
        "gnnaccel": _gnnaccel_version(),
        "kernels": _kernels(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gnnaccel_version() -> str:
    try:
        return str(importlib.import_module("gnnaccel").__version__)
    except (ImportError, AttributeError) as error:
        return f"not usable ({error})"


def _kernels() -> str:
    """Which kernels served gnnaccel: the instruction set, or why there are none."""
    try:
        native = importlib.import_module("gnnaccel.kernels.native")
    except ImportError as error:
        return f"none ({error})"
    if native.available():
        return f"native, {native.isa()}"
    return f"reference ({native.reason()})"


def format_quantity(value: float, phase: str) -> str:
    """Seconds, or bytes for phase "memory", in a unit that suits the size."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    if phase == MEMORY:
        units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((u for u, size in units.items() if value >= size), list(units)[-1])
    scaled = value / units[unit]
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:.{digits}f} {unit}"


def headline(result: Result) -> str:
    """The phase by which implementations are compared."""
    for phase in (STEP, MEMORY, FORWARD):
        if any(phase in entry.values for entry in result.entries.values()):
            return phase
    return STEP


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}x" if above is not None and below else ""


def _rows(result: Result) -> list[list[str]]:
    phase = headline(result)
    rows = []
    for name, entry in result.entries.items():
        if entry.status != OK:
            blank = [""] * (len(HEADER) - 4)
            rows.append([result.title, name, entry.status, *blank, entry.note])
            continue
        cells = []
        for shown in PHASES:
            value = entry.values.get(shown)
            cells.append(format_quantity(value.median, shown) if value else "")
        value = entry.values.get(phase)
        median = value.median if value else None
        timed = phase != MEMORY and result.edges > 0
        spread = None
        if value and value.samples > 1:
            spread = value.spread / value.median
        shares = [
            f"{100 * bound / mine:.0f}"
            for shown, bound in result.bounds.items()
            if (mine := result.median(name, shown))
        ]
        rows.append(
            [
                result.title,
                name,
                *cells,
                f"{100 * spread:.0f} %" if spread is not None else "",
                f"{1e9 * median / result.edges:.3g}" if timed and median else "",
                _ratio(result.median(STOCK, phase), median),
                _ratio(result.best_peer(phase), median),
                "/".join(shares) + " %" if shares else "",
                entry.note,
            ]
        )
    if result.bounds:
        limits = (result.bounds.get(shown) for shown in PHASES)
        cells = [format_quantity(b, FORWARD) if b else "" for b in limits]
        blank = [""] * (len(HEADER) - 2 - len(cells))
        rows.append([result.title, f"(bound: {result.bound_name})", *cells, *blank])
    return rows


HEADER = [
    "case",
    "implementation",
    "forward",
    "backward",
    "both",
    "peak memory",
    "IQR",
    "ns/edge",
    "x PyG",
    "x best peer",
    "of bound",
    "note",
]


def table(machine: Stamp, results: list[Result]) -> str:
    """The whole report as Markdown whose columns are aligned in plain text too."""
    graph = f"{results[0].graph}, F = {results[0].features}" if results else ""
    about = "\n".join(f"* {name}: {value}" for name, value in machine.items())
    rows = [row for result in results for row in _rows(result)]
    text = f"{about}\n\n{graph}\n\n{_align([HEADER, *rows])}\n"
    verdicts = judge(results)
    if verdicts:
        text += f"\nYardsticks of the project\n\n{_verdicts(verdicts)}\n"
    return text


def _verdicts(verdicts: list[Verdict]) -> str:
    rows = [["case", "yardstick", "measured", "limit", ""]]
    for v in verdicts:
        limit = f"{'>=' if v.at_least else '<='} {v.limit:g}"
        word = "pass" if v.passed else "miss"
        rows.append([v.title, v.label, f"{v.value:.3g}", limit, word])
    return _align(rows)


def _align(rows: list[list[str]]) -> str:
    """Lays out rows, the header first; columns with nothing below it are left out."""
    columns = [c for c in zip(*rows, strict=True) if any(c[1:]) or not c[0]]
    rows = [list(row) for row in zip(*columns, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_json(path: Path, machine: Stamp, results: list[Result]) -> None:
    """Writes everything that was measured, with the verdicts."""
    verdicts = [{**dataclasses.asdict(v), "passed": v.passed} for v in judge(results)]
    content = {
        "machine": machine,
        "results": [dataclasses.asdict(result) for result in results],
        "yardsticks": verdicts,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
