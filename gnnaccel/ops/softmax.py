"""softmax over the edges that enter each node, or over any groups of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.graph import Graph, Size, grouping_of
from gnnaccel.ops.adj import check_tensors, hold, tracing, wants_grad
from gnnaccel.ops.function import Function
from gnnaccel.ops.gather import Destinations, Groups, check_index, gather, scatter

#: Added to the denominator, as in :func:`torch_geometric.utils.softmax`.
EPSILON = 1e-16


def softmax(x: Tensor, index: Tensor, num_nodes: int | None = None) -> Tensor:
    """Softmax over the rows that share an index.

    Equals :func:`torch_geometric.utils.softmax` along dimension 0.

    Args:
        x: ``[E]`` or ``[E, H]`` (any further dimensions count as heads), floating.
        index: ``[E]``, int32 or int64, in any order.
        num_nodes: Number of groups; default: the largest index plus one.

    Returns:
        The shape of ``x``.

    Raises:
        ValueError: Shapes don't fit.
        EdgeIndexError: An index is outside ``[0, num_nodes)``.
    """
    check_index(index, x)
    if index.dim() != 1 or x.dim() == 0 or index.size(0) != x.size(0):
        raise ValueError(
            f"Expected 'index' to have one entry per row of 'x' (got "
            f"{list(index.shape)} for shape {list(x.shape)})"
        )
    if num_nodes is None:
        num_nodes = int(index.max()) + 1 if index.numel() else 0
    if tracing(x, index):
        flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(-1)
        out: Tensor = _softmax(flat, index, num_nodes)
        return out.view_as(x)
    return softmax_groups(x, Groups(index, grouping_of(index, num_nodes)))


def edge_softmax(adj: Any, logits: Tensor, *, size: Size = None) -> Tensor:
    """Softmax of edge values over the edges that enter the same node.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        logits: ``[E]`` or ``[E, H]``, in input edge order, floating point.
        size: ``(num_src, num_dst)`` of a plain ``edge_index``; default: inferred.

    Returns:
        The shape of ``logits``.

    Raises:
        ValueError: ``logits`` does not have one row per edge.
        EdgeIndexError: An edge names a node that does not exist.
    """
    check_tensors(logits=logits)
    if tracing(logits):
        held = hold(adj, size, logits)
        assert held.edge_index is not None
        return softmax(logits, held.edge_index[1], held.num_dst)
    graph = Graph.of(adj, size)
    if logits.dim() == 0 or logits.size(0) != graph.num_edges:
        raise ValueError(
            f"Expected 'logits' to have one row for each of {graph.num_edges} edges "
            f"(got shape {list(logits.shape)})"
        )
    return softmax_groups(logits, Destinations(graph))


def softmax_groups(x: Tensor, groups: Groups) -> Tensor:
    """The softmax behind :func:`softmax`, unchecked; see there for ``x``."""
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(-1)
    out: Tensor = (
        _Softmax.apply(flat, groups) if wants_grad(flat) else _run(flat, groups)
    )
    return out.view_as(x)


def _run(x: Tensor, groups: Groups) -> Tensor:
    backend = kernels.pick_for(x)
    out: Tensor = backend.softmax(groups.grouping, x, EPSILON)
    return out


def _run_backward(s: Tensor, grad: Tensor, groups: Groups) -> Tensor:
    backend = kernels.pick_for(s)
    out: Tensor = backend.softmax_backward(groups.grouping, s, grad)
    return out


class _Softmax(Function):
    @staticmethod
    def forward(x: Tensor, groups: Groups) -> Tensor:
        return _run(x, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.groups = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (s,) = ctx.saved_tensors
        if wants_grad(s, grad):
            return _SoftmaxBackward.apply(s, grad, ctx.groups), None
        return _run_backward(s, grad, ctx.groups), None


class _SoftmaxBackward(Function):
    @staticmethod
    def forward(s: Tensor, grad: Tensor, groups: Groups) -> Tensor:
        return _run_backward(s, grad, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        s, grad, ctx.groups = inputs
        ctx.save_for_backward(s, grad)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor, None]:
        s, grad = ctx.saved_tensors
        index, rows = ctx.groups.index, ctx.groups.grouping.rows
        return *_second(s, grad, u, index, rows), None


def _second(
    s: Tensor, grad: Tensor, u: Tensor, index: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Gradients of ``s (g - sum s g)`` against ``u``, with respect to ``s`` and ``g``.

    With ``S = sum s g`` and ``U = sum s u`` over a group: ``u g - u S - g U`` and
    ``s (u - U)``.
    """

    def total(x: Tensor) -> Tensor:
        return gather(scatter(x, index, rows), index)

    along_u = total(s * u)
    return u * grad - u * total(s * grad) - grad * along_u, s * (u - along_u)


# While torch traces ------------------------------------------------------------------


@torch.library.custom_op(
    "gnnaccel::softmax",
    mutates_args=(),
    schema="(Tensor x, Tensor index, SymInt num_nodes) -> Tensor",
)
def _softmax(x: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return _run(x, Groups(index, grouping_of(index, num_nodes)))


@_softmax.register_fake
def _(x: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, ctx.num_nodes = inputs
    ctx.save_for_backward(output, index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    s, index = ctx.saved_tensors
    return _softmax_backward(s, grad, index, ctx.num_nodes), None, None


_softmax.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(
    "gnnaccel::softmax_backward",
    mutates_args=(),
    schema="(Tensor s, Tensor grad, Tensor index, SymInt num_nodes) -> Tensor",
)
def _softmax_backward(s: Tensor, grad: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return _run_backward(s, grad, Groups(index, grouping_of(index, num_nodes)))


@_softmax_backward.register_fake
def _(s: Tensor, grad: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    s, grad, index, ctx.num_nodes = inputs
    ctx.save_for_backward(s, grad, index)


def _backward_second(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor, None, None]:
    s, grad, index = ctx.saved_tensors
    return *_second(s, grad, u, index, ctx.num_nodes), None, None


_softmax_backward.register_autograd(_backward_second, setup_context=_setup_second)
