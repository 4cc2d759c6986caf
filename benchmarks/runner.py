"""Runs cases: first the results are compared, then what is right is measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import torch

from benchmarks import check, measure
from benchmarks.registry import (
    BACKWARD,
    OURS,
    STOCK,
    Case,
    Implementation,
    Setting,
    Unavailable,
    Workload,
)

OK, WRONG, ERROR, ABSENT = "ok", "WRONG", "ERROR", "n/a"
MEMORY = "memory"

# The float64 check narrows x until a tensor [E, F] has at most this many numbers: it
# is about the arithmetic, and stock PyG holds several such tensors at a time.
MOST_NUMBERS_IN_FLOAT64 = 1 << 27


@dataclass(frozen=True)
class Value:
    """A measured quantity: seconds, or bytes in phase "memory"."""

    median: float
    spread: float  # interquartile range
    samples: int


@dataclass
class Entry:
    """One implementation of one workload.

    Attributes:
        status: "ok", "WRONG", "ERROR" or "n/a"; only "ok" has values.
        note: why it isn't ok, or anything worth saying.
        values: by phase.
    """

    status: str = OK
    note: str = ""
    values: dict[str, Value] = field(default_factory=dict)


@dataclass
class Result:
    """What came of one variant of one case.

    Attributes:
        edges: number of edges.
        entries: by implementation.
        bounds: seconds by phase; empty where they can't be measured.
        bound_name: what they count.
        readings: the measured parts of the bounds, in seconds.
    """

    case: str
    variant: str
    graph: str
    features: int
    edges: int
    entries: dict[str, Entry] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    bound_name: str = ""
    readings: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.case} {self.variant}".strip()

    def median(self, implementation: str, phase: str) -> float | None:
        """The median, or None if there is none."""
        entry = self.entries.get(implementation)
        value = entry.values.get(phase) if entry else None
        return value.median if value else None

    def best_peer(self, phase: str) -> float | None:
        """The least median of all but stock PyG and gnnaccel."""
        peers = [n for n in self.entries if n not in (STOCK, OURS)]
        found = [m for n in peers if (m := self.median(n, phase)) is not None]
        return min(found, default=None)

    @property
    def failed(self) -> bool:
        return any(e.status in (WRONG, ERROR) for e in self.entries.values())


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        setting: what the cases are built for.
        plan: how long to measure.
        bandwidth: bytes per second of a plain copy.
        probe: arguments that make the memory probe build the same setting.
    """

    setting: Setting
    plan: measure.Plan
    bandwidth: float
    probe: tuple[str, ...] = ()


def say(message: str) -> None:
    """Progress goes to stderr: stdout is for the table."""
    print(message, file=sys.stderr, flush=True)


def run_case(case: Case, options: Options) -> list[Result]:
    """Runs all variants of a case."""
    results = []
    for variant in case.variants(options.setting):
        say(f"{case.name} {variant}".strip() + ": checking")
        result = _run_variant(case, variant, options)
        for name, entry in result.entries.items():
            if entry.status in (WRONG, ERROR):
                say(f"  {entry.status}: {name}: {entry.note}")
        results.append(result)
    return results


def _run_variant(case: Case, variant: str, options: Options) -> Result:
    setting = options.setting
    result = Result(case.name, variant, setting.problem.name, setting.features, 0)
    for dtype in case.check:
        _check(case.build(_setting_for(setting, dtype), variant), dtype, result)
    workload = case.build(setting, variant)
    result.edges = workload.edges
    result.graph = workload.graph or result.graph
    right = [name for name, entry in result.entries.items() if entry.status == OK]
    if case.kind == MEMORY:
        _measure_memory(case, variant, right, options, result)
        return result
    made = {}
    for name in right:
        made[name] = implementation = workload.makers[name]()
        result.entries[name].note = implementation.note
    say("  timing " + ", ".join(made))
    _measure_time(workload, made, options, result)
    return result


def _setting_for(setting: Setting, dtype: torch.dtype) -> Setting:
    if dtype != torch.float64:
        return replace(setting, dtype=dtype)
    widest = MOST_NUMBERS_IN_FLOAT64 // max(1, setting.problem.num_edges)
    features = max(1, min(setting.features, widest))
    return replace(setting, dtype=dtype, features=features)


def _check(workload: Workload, dtype: torch.dtype, result: Result) -> None:
    """Compares all implementations with the reference and enters their status."""

    def attempt(name: str) -> check.Results | None:
        entry = result.entries.setdefault(name, Entry())
        if entry.status != OK:
            return None
        try:
            return check.results(workload, workload.makers[name]())
        except Unavailable as reason:
            entry.status, entry.note = ABSENT, str(reason)
        except Exception as error:  # whatever a peer raises is its result
            entry.status, entry.note = ERROR, f"{type(error).__name__}: {error}"
        return None

    # In the order of the table: stock first, ours last.
    for name in workload.makers:
        result.entries.setdefault(name, Entry())
    expected, beside = attempt(workload.reference), None
    if workload.exact is not None:
        expected, beside = workload.exact(), expected
    for name in workload.makers:
        entry = result.entries[name]
        if name == workload.reference or entry.status != OK:
            continue
        if expected is None:
            entry.status, entry.note = ERROR, f"no reference ({workload.reference})"
            continue
        actual = attempt(name)
        if actual is not None:
            wrong = check.difference(actual, expected, dtype, beside)
            if wrong is not None:
                entry.status, entry.note = WRONG, wrong


def _measure_time(
    workload: Workload,
    made: dict[str, Implementation],
    options: Options,
    result: Result,
) -> None:
    tasks = {n: measure.implementation_task(workload, i) for n, i in made.items()}
    # A reading that no bound uses isn't worth its time.
    used = {part for parts in workload.bounds.values() for part in parts}
    for name in used:
        tasks[f"bound: {name}"] = measure.reading_task(workload.readings[name])
    samples = measure.interleave(tasks, options.plan)
    for name in made:
        for phase, values in samples[name].items():
            median, spread = measure.summary(values)
            value = Value(median, spread, len(values))
            result.entries[name].values[phase] = value
    for name in used:
        values = next(iter(samples[f"bound: {name}"].values()))
        result.readings[name] = measure.summary(values)[0]
    result.bound_name = workload.bound_name
    for phase in workload.phases:
        if phase in workload.bounds:
            parts = workload.bounds[phase]
            result.bounds[phase] = sum(result.readings[part] for part in parts)
        elif phase in workload.bytes_moved:
            moved = workload.bytes_moved[phase]
            result.bounds[phase] = moved / options.bandwidth


def _measure_memory(
    case: Case, variant: str, names: list[str], options: Options, result: Result
) -> None:
    for name in names:
        say(f"  memory of {name}")
        entry = result.entries[name]
        request = ["--probe-memory", case.name, variant, name]
        try:
            peak = measure.peak_in_subprocess([*request, *options.probe])
        except RuntimeError as error:
            entry.status, entry.note = ERROR, str(error)
            continue
        entry.values[MEMORY] = Value(float(peak), 0.0, 1)


def probe_memory(
    case: Case, variant: str, name: str, setting: Setting, warm: Setting
) -> int:
    """Peak extra bytes of one forward and backward, in this process.

    Args:
        case: what to build.
        variant: of the case.
        name: the implementation.
        setting: what to measure.
        warm: a small one that is run first, so that libraries are loaded.
    """

    def once(workload: Workload, implementation: Implementation) -> object:
        out = implementation.forward(workload.x)
        if BACKWARD not in workload.phases or not isinstance(out, torch.Tensor):
            return out
        inputs = [workload.x, *implementation.parameters.values()]
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

    small = case.build(warm, variant)
    once(small, small.makers[name]())
    workload = case.build(setting, variant)
    implementation = workload.makers[name]()
    return measure.peak_extra(lambda: once(workload, implementation))
