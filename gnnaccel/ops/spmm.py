"""spmm: the product of a sparse and a dense matrix, reducing weighted neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.graph import Size
from gnnaccel.ops import extreme
from gnnaccel.ops.adj import (
    Adj,
    check_device,
    check_tensors,
    hold,
    node_scale,
    wants_grad,
)
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.product import Scales, spmm_sum

REDUCTIONS = ("sum", "add", "mean", "max", "min")


def spmm(
    adj: Any,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    size: Size = None,
) -> Tensor:
    """Reduces the (weighted) features of each node's in-neighbours.

    No message per edge is materialised, save for the gradient of weights under
    ``"max"`` and ``"min"``.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        x: ``[num_src, F]`` or ``[num_src, H, F]``, floating point.
        weight: ``[E]``, or ``[E, H]`` if ``x`` has heads, in input edge order.
        reduce: ``"sum"`` (or ``"add"``), ``"mean"`` (over the number of edges),
            ``"max"`` or ``"min"``.
        size: ``(num_src, num_dst)`` of a plain ``edge_index``; default: as many as
            ``x`` has rows, on both sides.

    Returns:
        ``[num_dst, F]`` or ``[num_dst, H, F]``, of the promoted dtype of ``x`` and
        ``weight``; 0 for a node without incoming edges. Half types are accumulated in
        float32. The gradient of a maximum is split among ties as torch's
        ``scatter_reduce`` does.

    Raises:
        TypeError: ``x`` or ``weight`` is no tensor.
        ValueError: A shape, dtype, device or ``reduce`` is wrong.
        EdgeIndexError: An edge names a node that does not exist.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"Expected 'reduce' out of {REDUCTIONS} (got {reduce!r})")
    check_tensors(x=x, weight=weight)
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            "Expected 'x' to be a floating point tensor of shape [num_src, F] or "
            f"[num_src, H, F] (got {list(x.shape)}, {x.dtype})"
        )
    if size is None and isinstance(adj, Tensor) and adj.layout == torch.strided:
        size = (x.size(0), x.size(0))
    held = hold(adj, size, x, weight)
    if x.size(0) != held.num_src:
        raise ValueError(
            f"Expected 'x' to have a row for each of {held.num_src} source nodes (got "
            f"{list(x.shape)})"
        )
    check_device(held, "x", x)
    check_device(held, "weight", weight)
    check_weight(held, x, weight)
    if weight is not None and weight.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(dtype), weight.to(dtype)
    # Without weights per head, heads are columns like any other.
    shape = x.shape[1:]
    if x.dim() == 3 and (
        weight is None or weight.dim() == 1 or reduce in ("max", "min")
    ):
        if weight is not None and weight.dim() == 2:
            weight = weight.repeat_interleave(x.size(2), 1)
        x = x.flatten(1)
    if reduce in ("max", "min"):
        out = reduce_extreme(held, x, weight, reduce)
    else:
        scale = node_scale(held, "mean", x.dtype) if reduce == "mean" else None
        out = spmm_sum(held, x, weight, Scales(dst=scale))
    return out.unflatten(1, shape) if out.shape[1:] != shape else out


def check_weight(held: Adj, x: Tensor, weight: Tensor | None) -> None:
    """Raises ``ValueError`` unless ``weight`` is ``[E]``, or ``[E, H]`` with heads."""
    if weight is None:
        return
    edges = (
        held.graph.num_edges if held.graph is not None else held.edge_index.size(1)  # type: ignore[union-attr]
    )
    fits = weight.dim() in (1, 2) and weight.size(0) == edges
    if fits and weight.dim() == 2:
        fits = x.dim() == 3 and weight.size(1) == x.size(1)
    if not fits:
        per_head = f" or [{edges}, {x.size(1)}]" if x.dim() == 3 else ""
        raise ValueError(
            f"Expected 'weight' to have shape [{edges}]{per_head} (got "
            f"{list(weight.shape)})"
        )


def reduce_extreme(held: Adj, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """The maximum or minimum behind :func:`spmm`, unchecked.

    Args:
        held: The graph.
        x: ``[num_src, F]``.
        weight: ``[E]``, or ``[E, F]`` for one weight per column, or ``None``.
        reduce: ``"max"`` or ``"min"``.
    """
    if weight is not None and (weight.dim() == 2 or wants_grad(weight)):
        # The gradient of a weight needs its edge's message: materialise them.
        index = held.edge_index if held.graph is None else held.graph.edge_index
        assert index is not None
        column = weight if weight.dim() == 2 else weight.unsqueeze(-1)
        return scatter(column * gather(x, index[0]), index[1], held.num_dst, reduce)
    return extreme.spmm_extreme(held, x, weight, reduce == "max")
