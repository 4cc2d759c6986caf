"""Time and memory, measured so that the competitors' conditions are equal.

Time. Implementations take turns, round after round, so that a machine that drifts
drifts under all of them. The first round is thrown away: the first measurement in a
process is 11 to 18 % slow. In a turn, a short call is made several times and its first
one isn't counted, for it finds the neighbour's data in the caches, not its own.

Memory. The peak resident memory of one call above what was resident before it, each
implementation in a process of its own: a heap that another one has grown hides a peak.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.check import output_gradient
from benchmarks.registry import (
    BACKWARD,
    FORWARD,
    STEP,
    Implementation,
    Reading,
    Workload,
)

Sample = dict[str, float]  # seconds by phase
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
        rounds: turns of each implementation, the discarded one not counted.
        turn: seconds that a turn of short calls may fill.
        calls: most calls in a turn.
        limit: an implementation that has used this many seconds stops after
            ``enough`` samples.
        enough: least number of samples.
        gc_off: keep Python's garbage collector out of the measured calls.
    """

    rounds: int = 9
    turn: float = 0.05
    calls: int = 500
    limit: float = 20.0
    enough: int = 3
    gc_off: bool = False


QUICK = Plan(rounds=1, turn=0.0, limit=1.0, enough=1)


@dataclass
class Task:
    """One participant of the round robin; ``call`` makes one timed call."""

    call: Callable[[], Sample]
    samples: Samples = field(default_factory=dict)
    used: float = 0.0
    calls: int = 1

    def turn(self) -> None:
        """Takes a turn: ``calls`` calls, the first uncounted if there are more."""
        for index in range(self.calls):
            sample = self.call()
            self.used += _total(sample)
            if index == 0 and self.calls > 1:
                continue
            for phase, seconds in sample.items():
                self.samples.setdefault(phase, []).append(seconds)

    def warm_up(self, plan: Plan) -> None:
        """One or two uncounted calls; the last tells how many calls fill a turn."""
        seconds = _total(self.call())
        if seconds < 1.0:
            seconds = _total(self.call())
        self.calls = max(1, min(plan.calls, int(plan.turn / max(seconds, 1e-9))))

    def done(self, plan: Plan) -> bool:
        """True once the limits of ``plan`` are reached."""
        count = max((len(values) for values in self.samples.values()), default=0)
        return self.used >= plan.limit and count >= plan.enough


def _total(sample: Sample) -> float:
    return sample.get(STEP, sum(sample.values()))


def interleave(tasks: Mapping[str, Task], plan: Plan) -> dict[str, Samples]:
    """Times all tasks in turn.

    Returns:
        For each task, for each phase, its times in seconds.
    """
    enabled = gc.isenabled()
    gc.collect()
    if plan.gc_off:
        gc.disable()
    try:
        for task in tasks.values():
            task.warm_up(plan)
        for _ in range(plan.rounds):
            for task in tasks.values():
                if not task.done(plan):
                    task.turn()
            if plan.gc_off:
                gc.collect()
    finally:
        if enabled:
            gc.enable()
    return {name: task.samples for name, task in tasks.items()}


def reading_task(reading: Reading) -> Task:
    """Times a loop that has no phases, as phase "forward"."""

    def call() -> Sample:
        begin = time.perf_counter()
        reading()
        return {FORWARD: time.perf_counter() - begin}

    return Task(call)


def implementation_task(workload: Workload, implementation: Implementation) -> Task:
    """Times forward, backward and both of one call.

    The gradient that backward starts from is made once, outside of the timing, and
    the gradients are returned instead of added to ``.grad``: no copy, no sum.
    """
    inputs = [
        value
        for value in (workload.x, *implementation.parameters.values())
        if value.requires_grad
    ]
    start: list[Tensor] = []

    def call() -> Sample:
        if implementation.prepare is not None:
            implementation.prepare()
        begin = time.perf_counter()
        out = implementation.forward(workload.x)
        middle = time.perf_counter()
        if BACKWARD not in workload.phases:
            return {FORWARD: middle - begin}
        assert isinstance(out, Tensor)
        if not start:
            start.append(output_gradient(out))
        resume = time.perf_counter()
        grads = torch.autograd.grad(out, inputs, start[0])
        end = time.perf_counter()
        del grads
        forward, backward = middle - begin, end - resume
        return {FORWARD: forward, BACKWARD: backward, STEP: forward + backward}

    return Task(call)


def summary(values: list[float]) -> tuple[float, float]:
    """Median and interquartile range of a non-empty list."""
    median = statistics.median(values)
    if len(values) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, high - low


def _status(field_name: str) -> int:
    """A field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field_name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field_name}")
    return int(found[1]) * 1024


def peak_extra(call: Callable[[], object]) -> int:
    """Bytes by which ``call`` raises the resident memory at its peak (Linux).

    Call it in a fresh process, after a warm-up on small data: libraries that load and
    thread stacks that grow aren't what is asked.

    Raises:
        OSError: the kernel doesn't let a process reset its peak.
    """
    gc.collect()
    try:
        # Freed memory that the allocator keeps would be reused unseen.
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # not glibc
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def peak_in_subprocess(arguments: list[str]) -> int:
    """Runs this package's memory probe and returns the bytes it prints.

    Args:
        arguments: of ``python -m benchmarks``, see `benchmarks.cli`.

    Raises:
        RuntimeError: the probe failed; its last line of output says why.
    """
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        raise RuntimeError(lines[-1])
    return int(json.loads(run.stdout.strip().splitlines()[-1])["peak_extra"])
