"""Measured lower bounds: loops that only do what no implementation can avoid.

* Reading the rows: a sparse product over ``E`` edges must read row ``x[col]`` for
  each of them. The loop that does only this (all threads, same prefetch, no
  arithmetic beyond a checksum, nothing written) is the floor of a sparse product.
* Dense products: a layer's ``x @ W`` and the two products of its backward, as torch
  runs them.
* Plain copy: the speed at which memory moves when the access is regular.

The first two are timed in turn with the implementations, so that a machine that slows
down slows them too.
"""

from __future__ import annotations

import importlib
import time

import torch
from torch import Tensor

from benchmarks.graphs import Compressed, Problem
from benchmarks.registry import BACKWARD, FORWARD, STEP, Reading

#: What the limit of a layer is made of.
DENSE_AND_ROWS = "dense products + reading the rows"


def row_reader(rows: Compressed, x: Tensor) -> Reading | None:
    """A loop that reads ``x[rows.col]``.

    Returns:
        The loop; None where the native kernels are absent or don't read such rows
        (they do float32 by int32 columns).
    """
    if x.dtype != torch.float32:
        return None
    try:
        native = importlib.import_module("gnnaccel.kernels.native")
        graph = importlib.import_module("gnnaccel.graph").Graph
    except ImportError:
        return None
    if not native.available():
        return None
    grouping = graph.from_csr(rows.rowptr, rows.col, x.size(0)).rows
    if grouping.ptr.dtype != torch.int32:
        return None
    x = x.detach()
    return lambda: native.read_rows(grouping, x)


def dense_products(x: Tensor, fan_out: int, count: int = 1) -> tuple[Reading, Reading]:
    """The dense products of ``count`` linear maps of ``x``, by phase.

    Args:
        x: [N, F_in]; only shape and dtype matter.
        fan_out: F_out.
        count: linear maps of that shape in the layer.

    Returns:
        One loop for the forward ``x @ W.T``, one for the backward ``g @ W`` and
        ``g.T @ x``, each product into a tensor of its own like in a layer.
    """
    x = x.detach()
    weight = torch.randn(fan_out, x.size(1)).to(x.dtype)
    grad = torch.randn(x.size(0), fan_out).to(x.dtype)

    def forward() -> None:
        for _ in range(count):
            torch.mm(x, weight.t())

    def backward() -> None:
        for _ in range(count):
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return forward, backward


def dense_and_rows(
    problem: Problem, x: Tensor, fan_out: int, maps: int, rows: Tensor, reads: int = 1
) -> tuple[dict[str, Reading], dict[str, tuple[str, ...]]]:
    """Readings and bounds: the dense products alone plus reading the rows.

    Args:
        problem: The graph.
        x: [N, F_in].
        fan_out: F_out.
        maps: Linear maps of that shape.
        rows: [N, *], what must be read at the other end of every edge.
        reads: How often.
    """
    dense, dense_back = dense_products(x, fan_out, maps)
    readings: dict[str, Reading] = {"dense": dense, "dense backward": dense_back}
    read = row_reader(problem.by_dst, rows)
    read_back = row_reader(problem.by_src, rows)
    if read is None or read_back is None:
        return readings, {}
    readings |= {"rows": read, "rows backward": read_back}
    forward = ("dense",) + reads * ("rows",)
    backward = ("dense backward",) + reads * ("rows backward",)
    return readings, {
        FORWARD: forward,
        BACKWARD: backward,
        STEP: forward + backward,
    }


def copy_bandwidth(num_bytes: int = 1 << 28, repeat: int = 7) -> float:
    """Bytes per second of a plain copy on torch's threads, read and written counted.

    Args:
        num_bytes: size of the source; well above the last-level cache by default.
        repeat: copies; the best counts, for this is a bound.
    """
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch pays for the pages
    best = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return 2 * num_bytes / best
