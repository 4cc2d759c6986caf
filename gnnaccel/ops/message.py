"""message_sum: messages that a neighbour and the edge make together, added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.graph import Size
from gnnaccel.kernels import transforming
from gnnaccel.kernels.grouping import accumulator
from gnnaccel.kernels.message import KINDS, Parts, mapped
from gnnaccel.ops.adj import (
    Adj,
    check_device,
    check_tensors,
    hold,
    node_scale,
    wants_grad,
)
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.product import spmm_sum

#: The messages of :func:`message_sum`.
MESSAGES = ("add", "add_relu", "mul")


def message_sum(
    adj: Any,
    x: Tensor,
    edge: Tensor | None = None,
    message: str = "add_relu",
    reduce: str = "sum",
    *,
    map: Tensor | None = None,
    weight: Tensor | None = None,
    x_dst: Tensor | None = None,
    size: Size = None,
) -> Tensor:
    """Adds up messages that are made of a neighbour's row and the edge's features.

    The message of an edge ``e`` from ``j``, with ``y[e] = edge[e]`` or, given a map,
    ``edge[e] @ map`` (whose last row, if it has one more than ``edge[e]`` has columns,
    is added as it is):

    - ``"add"``: ``x[j] + y[e]``
    - ``"add_relu"``: ``relu(x[j] + y[e])``, as in GINEConv, or given ``x_dst``
      ``relu(x[j] + x_dst[i] + y[e])``;
    - ``"mul"``: ``x[j] * y[e]``, as in SchNet's continuous filters.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        x: ``[num_src, F]``, floating point.
        edge: ``[E, F]``, or ``[E, D]`` with a map, in input edge order; ``None``, with
            ``"add_relu"`` and without a map: nothing.
        message: See above.
        reduce: ``"sum"`` (or ``"add"``) or ``"mean"`` (over the number of edges).
        map: ``[D, F]`` or ``[D + 1, F]``. With a D of up to 16, ``[E, F]`` is never
            written down as long as ``edge`` wants no gradient.
        weight: ``[E]``, in input edge order, multiplies messages; no gradient.
        x_dst: ``[num_dst, F]``, of the nodes that messages go to; with ``"add_relu"``.
        size: ``(num_src, num_dst)`` of a plain ``edge_index``; default: as many as
            ``x`` has rows, on both sides.

    Returns:
        ``[num_dst, F]``; 0 for a node without incoming edges. Half types are
        accumulated in float32.

    Raises:
        TypeError: A tensor is none.
        ValueError: A shape, dtype, device, ``message`` or ``reduce`` is wrong.
        EdgeIndexError: An edge names a node that does not exist.
    """
    check_tensors(x=x, edge=edge, map=map, weight=weight, x_dst=x_dst)
    if size is None and isinstance(adj, Tensor) and adj.layout == torch.strided:
        size = (x.size(0), x.size(0))
    held = hold(adj, size, x, edge, map, weight)
    if message not in MESSAGES:
        raise ValueError(f"Expected 'message' out of {MESSAGES} (got {message!r})")
    if reduce not in ("sum", "add", "mean"):
        raise ValueError(f"Expected 'reduce' to be 'sum' or 'mean' (got {reduce!r})")
    if x_dst is not None and message != "add_relu":
        raise ValueError(
            f"Expected 'x_dst' with message='add_relu' only (got {message!r})"
        )
    if edge is None and (map is not None or message != "add_relu"):
        raise ValueError(
            "Expected 'edge' unless message='add_relu' without 'map' (got None with "
            f"{message!r})"
        )
    parts = Parts(x, edge, map, weight, x_dst)
    _check(held, parts)
    out = sum_messages(held, message, parts)
    if reduce == "mean":
        out = mean_of(held, out)
    return out


def _check(held: Adj, parts: Parts) -> None:
    """Raises ``ValueError`` unless the tensors of ``parts`` fit each other."""
    x, edge, map_, weight, x_dst = parts
    if x.dim() != 2 or x.size(0) != held.num_src or not x.is_floating_point():
        raise ValueError(
            f"Expected 'x' to be floating, of shape [{held.num_src}, F] (got "
            f"{list(x.shape)}, {x.dtype})"
        )
    edges = (
        held.graph.num_edges if held.graph is not None else held.edge_index.size(1)  # type: ignore[union-attr]
    )
    depth, wide = x.size(1), False
    if map_ is not None and edge is not None:
        # With or without a row that is added.
        wide = edge.dim() == 2 and map_.dim() == 2 and map_.size(0) > edge.size(1)
        depth = map_.size(0) - wide
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "x": (x, tuple(x.shape)),
        "map": (map_, (depth + wide, x.size(1))),
        "edge": (edge, (edges, depth)),
        "weight": (weight, (edges,)),
        "x_dst": (x_dst, (held.num_dst, x.size(1))),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"Expected '{name}' to have shape {list(shape)} and the dtype of 'x', "
                f"{x.dtype} (got {list(tensor.shape)}, {tensor.dtype})"
            )
        check_device(held, name, tensor)
    if wants_grad(weight):
        raise ValueError(
            "Expected 'weight' not to require a gradient: multiply 'x' and 'edge', or "
            "detach it"
        )


#: Up to so many columns, edges' features are mapped inside the kernel.
SHALLOW = 16


def sum_messages(adj: Adj, kind: str, parts: Parts, own: float = 0.0) -> Tensor:
    """The sum behind :func:`message_sum`, unchecked.

    Args:
        adj: The graph.
        kind: One of :data:`MESSAGES`.
        parts: The tensors.
        own: So much of each row of ``x`` is added; as many destinations as sources.

    Returns:
        ``[num_dst, F]``.
    """
    x, edge, map_, *_ = parts
    if (
        adj.graph is None
        or kind not in KINDS
        or transforming(x)
        or 0 in (x.numel(), adj.graph.num_edges)
        or (parts.x_dst is not None and accumulator(x.dtype) != x.dtype)
    ):
        wide = accumulator(x.dtype)
        if wide != x.dtype:
            raised = (None if tensor is None else tensor.to(wide) for tensor in parts)
            return compose(adj, kind, Parts(*raised), own).to(x.dtype)  # type: ignore[arg-type]
        return compose(adj, kind, parts, own)
    if (
        map_ is not None
        and edge is not None
        and (
            kind != "add_relu"
            or edge.size(1) > SHALLOW
            or accumulator(x.dtype) != x.dtype
            or wants_grad(edge)
        )
    ):
        parts = parts._replace(edge=mapped(edge, map_), map=None)
    if wants_grad(*parts):
        out: Tensor = _MessageSum.apply(*parts, adj, kind, own)
        return out
    summed: Tensor = kernels.pick_for(x).message_sum(adj.graph.rows, kind, parts, own)
    return summed


def mean_of(adj: Adj, total: Tensor) -> Tensor:
    """The mean over the edges into each destination, out of their sum."""
    scale = node_scale(adj, "mean", total.dtype).unsqueeze(-1)
    return (total * scale).to(total.dtype)


class _MessageSum(Function):
    @staticmethod
    def forward(
        x: Tensor,
        edge: Tensor | None,
        map_: Tensor | None,
        weight: Tensor | None,
        x_dst: Tensor | None,
        adj: Adj,
        kind: str,
        own: float,
    ) -> Tensor:
        assert adj.graph is not None
        backend = kernels.pick_for(x)
        parts = Parts(x, edge, map_, weight, x_dst)
        out: Tensor = backend.message_sum(adj.graph.rows, kind, parts, own)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.adj, ctx.kind, ctx.own = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = Parts(*ctx.saved_tensors)
        adj, kind, own = ctx.adj, ctx.kind, ctx.own
        wanted = ctx.needs_input_grad[:5]
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda *tensors: compose(adj, kind, Parts(*tensors), own),
                parts,
                grad,
                wanted,
            )
            return *found, None, None, None
        backend = kernels.pick_for(parts.x)
        grads = backend.message_sum_backward(
            adj.graph.t.rows, kind, parts, own, grad, wanted[1]
        )
        if wanted[4]:
            active = backend.message_sum(adj.graph.rows, "active", parts)
            grads = grads._replace(x_dst=active.mul_(grad))
        return (
            *(g if w else None for g, w in zip(grads, wanted, strict=True)),
            None,
            None,
            None,
        )


def compose(adj: Adj, kind: str, parts: Parts, own: float = 0.0) -> Tensor:
    """The same out of other operators, which differentiate to any order."""
    x, edge, map_, weight, x_dst = parts
    index = adj.edge_index if adj.graph is None else adj.graph.edge_index
    assert index is not None
    if edge is None:
        edge = x.new_zeros(index.size(1), 1)
    if kind == "add":
        # A sum of sums: edges are added up as narrow as they are.
        if map_ is not None and map_.size(0) > edge.size(1):
            edge = torch.cat([edge, edge.new_ones(edge.size(0), 1)], dim=1)
        weighted = edge if weight is None else edge * weight.unsqueeze(-1)
        of_edges = scatter(weighted, index[1], adj.num_dst)
        of_edges = of_edges if map_ is None else of_edges @ map_
        out = spmm_sum(adj, x, weight) + of_edges
    else:
        edge = edge if map_ is None else mapped(edge, map_)
        messages = gather(x, index[0])
        if x_dst is not None:
            messages = messages + gather(x_dst, index[1])
        messages = (messages + edge).relu() if kind == "add_relu" else messages * edge
        if weight is not None:
            messages = messages * weight.unsqueeze(-1)
        out = scatter(messages, index[1], adj.num_dst)
    return out + own * x if own else out
