"""The command line: ``python -m benchmarks [CASE ...] [options]``."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path

import torch

# Importing the case files fills the table of cases.
from benchmarks import (  # noqa: F401
    bounds,
    cases_any_layer,
    cases_constant,
    cases_extra,
    cases_kernels,
    cases_layers,
    cases_loading,
    cases_models,
    cases_prefetch,
    chart,
    graphs,
    measure,
    report,
)
from benchmarks.registry import CASES, Setting, select
from benchmarks.runner import Options, Result, probe_memory, run_case, say


def parser() -> argparse.ArgumentParser:
    """The options; ``--probe-memory`` is for the benchmark's own child processes."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times gnnaccel beside PyTorch Geometric and its peers. Exit code "
        "1: a result was wrong or an implementation failed.",
    )
    p.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="cases, groups (kernels, layers, any_layer, constant, models, extra, "
        "loading), "
        "wildcards or 'all'; default: kernels and layers",
    )
    p.add_argument("--list", action="store_true", help="list the cases and leave")
    p.add_argument(
        "--graph",
        default="rmat:15:16",
        metavar="GRAPH",
        help="rmat:SCALE:FACTOR[:SEED], FILE.npz, or a NAME known to --data "
        "(default: %(default)s)",
    )
    p.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of data sets with a load.py"
    )
    p.add_argument(
        "--features", type=int, default=64, metavar="F", help="default: %(default)s"
    )
    p.add_argument(
        "--threads", type=int, metavar="N", help="torch's threads (default: torch's)"
    )
    p.add_argument(
        "--repeat",
        type=int,
        default=measure.Plan.rounds,
        metavar="R",
        help="rounds of measurement (default: %(default)s)",
    )
    p.add_argument(
        "--no-gc", action="store_true", help="garbage collector off while timing"
    )
    p.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json, results.md and results.png there",
    )
    p.add_argument(
        "--quick", action="store_true", help="one round, smallest sizes: a smoke test"
    )
    p.add_argument("--probe-memory", nargs=3, help=argparse.SUPPRESS)
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: those of the process if None.

    Returns:
        0, or 1 if any result was wrong or any implementation failed.
    """
    p = parser()
    args = p.parse_args(arguments)
    # torch about its CSR tensors: in beta, and not checked.
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
    if args.list:
        for case in CASES.values():
            print(f"{case.name:18}{case.group:11}{case.summary}")
        return 0
    try:
        chosen = select(args.cases)
        problem = graphs.load(args.graph, args.data)
    except (ValueError, OSError) as error:
        p.error(str(error))
    if args.features < 1 or args.repeat < 1:
        p.error("--features and --repeat must be at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    setting = Setting(problem, args.features, quick=args.quick, data=args.data)
    if args.probe_memory:
        return _probe(args.probe_memory, setting)

    bandwidth = bounds.copy_bandwidth(*((1 << 20, 1) if args.quick else ()))
    plan = measure.QUICK if args.quick else measure.Plan(rounds=args.repeat)
    plan = replace(plan, gc_off=args.no_gc)
    options = Options(setting, plan, bandwidth, _probe_arguments(args))
    machine = report.stamp(_shown(args, p.parse_args([])), bandwidth)
    results: list[Result] = []
    for case in chosen:
        results += run_case(case, options)
    text = report.table(machine, results)
    print(text)
    if args.out is not None:
        _write(args.out, text, machine, results)
    return int(any(result.failed for result in results))


def _shown(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The command line without what only concerns this machine's folders."""
    words = ["python -m benchmarks", *args.cases]
    for name in ("graph", "features", "threads", "repeat"):
        value = getattr(args, name)
        if value != getattr(defaults, name):
            value = Path(value).name if name == "graph" else value
            words.append(f"--{name} {value}")
    words += [
        f"--{flag.replace('_', '-')}"
        for flag in ("no_gc", "quick")
        if getattr(args, flag)
    ]
    return " ".join(words)


def _probe_arguments(args: argparse.Namespace) -> tuple[str, ...]:
    """What a memory probe needs to build the same setting, from any folder."""
    graph = args.graph
    if graph.endswith(".npz"):
        graph = str(Path(graph).resolve())
    words = ["--graph", graph, "--features", str(args.features)]
    words += ["--threads", str(torch.get_num_threads())]
    if args.data is not None:
        words += ["--data", str(args.data.resolve())]
    return tuple(words)


def _probe(request: list[str], setting: Setting) -> int:
    case, variant, name = request
    warm = replace(setting, problem=graphs.rmat(6, 4))
    peak = probe_memory(CASES[case], variant, name, setting, warm)
    print(json.dumps({"peak_extra": peak}))
    return 0


def _write(
    folder: Path, text: str, machine: report.Stamp, results: list[Result]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(text)
    report.write_json(folder / "results.json", machine, results)
    chart.draw(folder / "results.png", results)
    say(f"wrote results.json, results.md and results.png to {folder}")
