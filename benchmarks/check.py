"""Is it right? Outputs and gradients of an implementation against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import BACKWARD, Implementation, Workload

# Relative difference of norms that counts as equal, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}

Results = dict[str, Tensor]


def results(workload: Workload, implementation: Implementation) -> Results:
    """Runs an implementation once.

    Returns:
        Its outputs ("out", "out 1", ...) and, where the workload has a backward, the
        gradients ("grad x", "grad NAME" for each parameter).
    """
    if implementation.prepare is not None:
        implementation.prepare()
    out = implementation.forward(workload.x)
    if BACKWARD not in workload.phases:
        parts = out if isinstance(out, tuple) else (out,)
        names = ["out"] + [f"out {i}" for i in range(1, len(parts))]
        return dict(zip(names, (part.detach() for part in parts), strict=True))
    assert isinstance(out, Tensor)
    inputs = {"x": workload.x, **implementation.parameters}
    inputs = {name: value for name, value in inputs.items() if value.requires_grad}
    grads = torch.autograd.grad(out, list(inputs.values()), output_gradient(out))
    return {"out": out.detach()} | {
        f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)
    }


def output_gradient(out: Tensor) -> Tensor:
    """The gradient that every backward starts from: the same for all."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(out.shape, generator=generator).to(out.dtype)


def difference(
    actual: Results,
    expected: Results,
    dtype: torch.dtype,
    beside: Results | None = None,
) -> str | None:
    """What is wrong with ``actual``; None if it equals ``expected`` up to rounding.

    Args:
        actual: The results to judge.
        expected: The right ones.
        dtype: That of the computation.
        beside: Those of PyG, if ``expected`` is not PyG's: nobody has to be nearer to
            it than ten times as far as PyG is, as one near tie that falls the other way
            may be.
    """
    if actual.keys() != expected.keys():
        return f"gives {sorted(actual)}, expected {sorted(expected)}"
    tolerance = TOLERANCE[dtype]
    for name, right in expected.items():
        ours = actual[name]
        if ours.shape != right.shape:
            return f"{name} is {list(ours.shape)}, expected {list(right.shape)}"
        if right.is_floating_point() and ours.dtype != right.dtype:
            return f"{name} is {ours.dtype}, expected {right.dtype}"
        error = _error(ours, right)
        allowed = tolerance
        if beside is not None:
            allowed = max(allowed, 10 * _error(beside[name], right))
        # Not `error > allowed`: a NaN must fail.
        if not error <= allowed:
            return f"{name} is off by {error:.1e} of its norm in {dtype}"
    return None


def _error(actual: Tensor, right: Tensor) -> float:
    """The difference's norm relative to that of ``right``."""
    norm = right.double().norm().item()
    return (actual.double() - right.double()).norm().item() / max(norm, 1e-30)
