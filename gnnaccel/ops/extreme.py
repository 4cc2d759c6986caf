"""Largest and smallest neighbours, and their gradient split among ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.kernels.grouping import accumulator
from gnnaccel.ops.adj import Adj, found, wants_grad
from gnnaccel.ops.function import Function


def spmm_extreme(adj: Adj, x: Tensor, weight: Tensor | None, is_max: bool) -> Tensor:
    """The extreme behind :func:`gnnaccel.ops.spmm`, unchecked.

    Args:
        adj: The graph.
        x: ``[num_src, F]``.
        weight: ``[E]`` of the dtype of ``x``, or ``None``; gets no gradient.
        is_max: Largest, else smallest.
    """
    out: Tensor
    if adj.graph is None:
        assert adj.edge_index is not None
        out, _ = _spmm_extreme(
            x, adj.edge_index, weight, adj.num_src, adj.num_dst, is_max
        )
    elif wants_grad(x):
        out, _ = _Extreme.apply(x, weight, adj, is_max)
    else:
        out, _ = run_extreme(adj, x, weight, is_max, with_ties=False)
    return out


def run_extreme(
    adj: Adj, x: Tensor, weight: Tensor | None, is_max: bool, with_ties: bool
) -> tuple[Tensor, Tensor | None]:
    """Extremes ``[num_dst, F]`` and, if asked, by how much each gradient is divided.

    Without autograd. See :func:`spmm_extreme` for the arguments.
    """
    backend = kernels.pick_for(x)
    result: tuple[Tensor, Tensor | None] = backend.spmm_extreme(
        adj.grouping(False), x, weight, is_max, with_ties
    )
    return result


class _Extreme(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, adj: Adj, is_max: bool) -> Any:
        return run_extreme(adj, x, weight, is_max, with_ties=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.adj, ctx.is_max = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight, out, ties = ctx.saved_tensors
        share = grad.to(ties.dtype) / ties
        return split(ctx.adj, share, x, out, weight, ctx.is_max), None, None, None


def split(
    adj: Adj, share: Tensor, x: Tensor, out: Tensor, weight: Tensor | None, is_max: bool
) -> Tensor:
    """The gradient of ``x``: to every message that attains an extreme, its share.

    Args:
        adj: The graph.
        share: ``[num_dst, F]``, the extremes' gradient divided by their ties.
        x: ``[num_src, F]``.
        out: The extremes, ``[num_dst, F]``.
        weight: ``[E]`` or ``None``.
        is_max: Largest, else smallest.

    Returns:
        ``[num_src, F]``, differentiable in ``share``.
    """
    return _select(adj, share, x, out, weight, is_max, True)


def _select(
    adj: Adj,
    v: Tensor,
    x: Tensor,
    best: Tensor,
    weight: Tensor | None,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    """Sums ``v`` where the message attains the extreme; linear in ``v``."""
    # Whether a message attains it is piecewise constant.
    x, best = x.detach(), best.detach()
    out: Tensor
    if adj.graph is None:
        assert adj.edge_index is not None
        out = _spmm_select(
            v,
            x,
            best,
            adj.edge_index,
            weight,
            adj.num_src,
            adj.num_dst,
            is_max,
            transposed,
        )
    elif wants_grad(v):
        out = _Select.apply(v, x, best, weight, adj, is_max, transposed)
    else:
        out = _run_select(adj, v, x, best, weight, is_max, transposed)
    return out


def _run_select(
    adj: Adj,
    v: Tensor,
    x: Tensor,
    best: Tensor,
    weight: Tensor | None,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    backend = kernels.pick_for(x) if not kernels.transforming(v) else kernels.reference
    out: Tensor = backend.spmm_select(
        adj.grouping(transposed), x, best, v, weight, is_max, transposed
    )
    return out


class _Select(Function):
    @staticmethod
    def forward(
        v: Tensor,
        x: Tensor,
        best: Tensor,
        weight: Tensor | None,
        adj: Adj,
        is_max: bool,
        transposed: bool,
    ) -> Tensor:
        return _run_select(adj, v, x, best, weight, is_max, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, x, best, weight, ctx.adj, ctx.is_max, ctx.transposed = inputs
        ctx.save_for_backward(x, best, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, best, weight = ctx.saved_tensors
        v = grad.to(accumulator(x.dtype))
        out = _select(ctx.adj, v, x, best, weight, ctx.is_max, not ctx.transposed)
        return out.to(v.dtype), *[None] * 6


@torch.library.custom_op(
    "gnnaccel::spmm_extreme",
    mutates_args=(),
    schema="(Tensor x, Tensor edge_index, Tensor? weight, SymInt num_src, "
    "SymInt num_dst, bool is_max) -> (Tensor, Tensor)",
)
def _spmm_extreme(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_src: int,
    num_dst: int,
    is_max: bool,
) -> tuple[Tensor, Tensor]:
    adj = found(edge_index, num_src, num_dst)
    out, ties = run_extreme(adj, x, weight, is_max, with_ties=True)
    assert ties is not None
    return out, ties


@_spmm_extreme.register_fake
def _(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_src: int,
    num_dst: int,
    is_max: bool,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(num_dst, x.size(1))
    return out, torch.empty_like(out, dtype=accumulator(x.dtype))


def _setup_extreme(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, edge_index, weight, *ctx.rest = inputs
    ctx.save_for_backward(x, edge_index, weight, *output)


def _backward_extreme(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, edge_index, weight, out, ties = ctx.saved_tensors
    num_src, num_dst, is_max = ctx.rest
    adj = Adj(None, edge_index, num_src, num_dst)
    share = grad.to(ties.dtype) / ties
    return _select(adj, share, x, out, weight, is_max, True), *[None] * 5


_spmm_extreme.register_autograd(_backward_extreme, setup_context=_setup_extreme)


@torch.library.custom_op(
    "gnnaccel::spmm_select",
    mutates_args=(),
    schema="(Tensor v, Tensor x, Tensor best, Tensor edge_index, Tensor? weight, "
    "SymInt num_src, SymInt num_dst, bool is_max, bool transposed) -> Tensor",
)
def _spmm_select(
    v: Tensor,
    x: Tensor,
    best: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_src: int,
    num_dst: int,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    adj = found(edge_index, num_src, num_dst)
    return _run_select(adj, v, x, best, weight, is_max, transposed)


@_spmm_select.register_fake
def _(
    v: Tensor,
    x: Tensor,
    best: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_src: int,
    num_dst: int,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    return x.new_empty(num_src if transposed else num_dst, x.size(1))


def _setup_select(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, x, best, edge_index, weight, *ctx.rest = inputs
    ctx.save_for_backward(x, best, edge_index, weight)


def _backward_select(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, best, edge_index, weight = ctx.saved_tensors
    num_src, num_dst, is_max, transposed = ctx.rest
    adj = Adj(None, edge_index, num_src, num_dst)
    v = grad.to(accumulator(x.dtype))
    out = _select(adj, v, x, best, weight, is_max, not transposed)
    return out.to(v.dtype), *[None] * 8


_spmm_select.register_autograd(_backward_select, setup_context=_setup_select)
