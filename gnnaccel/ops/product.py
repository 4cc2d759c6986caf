"""The closed pair behind spmm and sddmm, registered with torch.

The gradient of a sum over neighbours is the sum over the reversed graph, that of its
weights is a dot product of the two ends of every edge, and theirs are these two again:
so all orders of derivatives exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.kernels.grouping import Grouping
from gnnaccel.ops.adj import Adj, found, wants_grad
from gnnaccel.ops.function import Function


class Scales(NamedTuple):
    """Constant factors folded into a sum; accumulator dtype, no gradients.

    ``out[i] = own[i] x[i] + dst[i] sum_e weight[e] src[j] x[j]``. ``own`` may be
    ``[1]``, one value for all.
    """

    src: Tensor | None = None
    dst: Tensor | None = None
    own: Tensor | None = None


def spmm_sum(
    adj: Adj,
    x: Tensor,
    weight: Tensor | None = None,
    scales: Scales = Scales(),  # noqa: B008 - immutable
    transposed: bool = False,
    skip_loops: bool = False,
) -> Tensor:
    """The sum behind :func:`gnnaccel.ops.spmm`, unchecked.

    Args:
        adj: The graph.
        x: ``[N, F]``, or ``[N, H, F]`` with ``weight`` of ``[E, H]``.
        weight: ``[E]`` or ``[E, H]``, of the dtype of ``x``.
        scales: See there.
        transposed: Sum over outgoing edges: ``x`` belongs to destinations then.
        skip_loops: Leave self-loops out; only without ``weight``.
    """
    if adj.graph is None:
        assert adj.edge_index is not None
        out: Tensor = _spmm_sum(
            x,
            adj.edge_index,
            weight,
            *scales,
            adj.num_src,
            adj.num_dst,
            transposed,
            skip_loops,
        )
        return out
    if wants_grad(x, weight):
        out = _Sum.apply(x, weight, adj, scales, transposed, skip_loops)
        return out
    return run_spmm_sum(adj, x, weight, scales, transposed, skip_loops)


def run_spmm_sum(
    adj: Adj,
    x: Tensor,
    weight: Tensor | None,
    scales: Scales = Scales(),  # noqa: B008 - immutable
    transposed: bool = False,
    skip_loops: bool = False,
    base: Tensor | None = None,
    base_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """``base_scale base + spmm_sum(adj, x, weight, scales)``, without autograd.

    Args:
        adj: The graph.
        x: See :func:`spmm_sum`, as are the others.
        weight: See there.
        scales: See there.
        transposed: See there.
        skip_loops: See there.
        base: Contiguous, of the sum's shape and dtype; or ``None``.
        base_scale: Multiplies it.
        out: Where the result goes, which may be ``base``; ``None``: into fresh memory.
    """
    backend = kernels.pick_for(x)
    grouping, weight = arranged(adj, weight, transposed, skip_loops)
    total: Tensor = backend.spmm_sum(
        grouping, x, weight, *scales, base, base_scale, out
    )
    return total


def arranged(
    adj: Adj, weight: Tensor | None, transposed: bool, skip_loops: bool
) -> tuple[Grouping, Tensor | None]:
    """What a kernel gets for a sum: see :func:`spmm_sum`."""
    grouping = adj.grouping(transposed, skip_loops)
    if weight is not None and weight.dim() == 1 and grouping.perm is not None:
        in_order = _in_order(adj, weight, grouping, transposed)
        if in_order is not None:
            return grouping.in_order, in_order
    return grouping, weight


def _in_order(
    adj: Adj, weight: Tensor, grouping: Grouping, transposed: bool
) -> Tensor | None:
    """Constant weights in grouped order, from the second time they are met.

    Reading them through the permutation costs a cache miss per edge. Weights that are
    learnt, or new at every step, are not worth the copy.
    """
    if weight.requires_grad or adj.graph is None:
        return None
    perm = grouping.perm
    assert perm is not None
    met: list[Tensor | None] = adj.graph.memory.remember(
        weight, ("in order", transposed), list
    )
    if not met:
        met.append(None)
    elif met[0] is None:
        met[0] = weight.index_select(0, perm)
    return met[0]


def _sum_gradients(
    adj: Adj,
    x: Tensor | None,
    weight: Tensor | None,
    scales: Scales,
    transposed: bool,
    skip_loops: bool,
    grad: Tensor,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = grad_weight = None
    if need_x:
        back = Scales(scales.dst, scales.src, scales.own)
        grad_x = spmm_sum(adj, grad, weight, back, not transposed, skip_loops)
    if need_weight:
        assert x is not None
        ends = (_scaled(grad, scales.dst), _scaled(x, scales.src))
        grad_weight = sddmm_held(adj, *(reversed(ends) if transposed else ends))
    return grad_x, grad_weight


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return x
    return (x * scale.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


class _Sum(Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        adj: Adj,
        scales: Scales,
        transposed: bool,
        skip_loops: bool,
    ) -> Tensor:
        return run_spmm_sum(adj, x, weight, scales, transposed, skip_loops)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.adj, ctx.scales, ctx.transposed, ctx.skip_loops = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grads = _sum_gradients(
            ctx.adj,
            x,
            weight,
            ctx.scales,
            ctx.transposed,
            ctx.skip_loops,
            grad,
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[1],
        )
        return *grads, None, None, None, None


@torch.library.custom_op(
    "gnnaccel::spmm_sum",
    mutates_args=(),
    schema="(Tensor x, Tensor edge_index, Tensor? weight, Tensor? src_scale, "
    "Tensor? dst_scale, Tensor? own_scale, SymInt num_src, SymInt num_dst, "
    "bool transposed, bool skip_loops) -> Tensor",
)
def _spmm_sum(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    own_scale: Tensor | None,
    num_src: int,
    num_dst: int,
    transposed: bool,
    skip_loops: bool,
) -> Tensor:
    adj = found(edge_index, num_src, num_dst)
    return run_spmm_sum(
        adj, x, weight, Scales(src_scale, dst_scale, own_scale), transposed, skip_loops
    )


@_spmm_sum.register_fake
def _(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    own_scale: Tensor | None,
    num_src: int,
    num_dst: int,
    transposed: bool,
    skip_loops: bool,
) -> Tensor:
    return x.new_empty((num_src if transposed else num_dst, *x.shape[1:]))


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, edge_index, weight, src, dst, own, *ctx.rest = inputs
    ctx.save_for_backward(x, edge_index, weight, src, dst, own)


def _backward_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, edge_index, weight, *scales = ctx.saved_tensors
    num_src, num_dst, transposed, skip_loops = ctx.rest
    grad_x, grad_weight = _sum_gradients(
        Adj(None, edge_index, num_src, num_dst),
        x,
        weight,
        Scales(*scales),
        transposed,
        skip_loops,
        grad,
        ctx.needs_input_grad[0],
        ctx.needs_input_grad[2],
    )
    return grad_x, None, grad_weight, *[None] * 7


_spmm_sum.register_autograd(_backward_sum, setup_context=_setup_sum)


def sddmm_held(adj: Adj, a: Tensor, b: Tensor) -> Tensor:
    """The product behind :func:`gnnaccel.ops.sddmm`, unchecked."""
    out: Tensor
    if adj.graph is None:
        assert adj.edge_index is not None
        out = _sddmm(a, b, adj.edge_index)
    elif wants_grad(a, b):
        out = _Sddmm.apply(a, b, adj)
    else:
        out = _run_dot(adj, a, b)
    return out


def _run_dot(adj: Adj, a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = kernels.pick_for(a).sddmm(adj.grouping(False), a, b)
    return out


def _dot_gradients(
    adj: Adj, a: Tensor, b: Tensor, grad: Tensor, need_a: bool, need_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        spmm_sum(adj, b, grad) if need_a else None,
        spmm_sum(adj, a, grad, transposed=True) if need_b else None,
    )


class _Sddmm(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, adj: Adj) -> Tensor:
        return _run_dot(adj, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.adj = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return *_dot_gradients(ctx.adj, a, b, grad, *ctx.needs_input_grad[:2]), None


@torch.library.custom_op(
    "gnnaccel::sddmm",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor edge_index) -> Tensor",
)
def _sddmm(a: Tensor, b: Tensor, edge_index: Tensor) -> Tensor:
    return _run_dot(found(edge_index, b.size(0), a.size(0)), a, b)


@_sddmm.register_fake
def _(a: Tensor, b: Tensor, edge_index: Tensor) -> Tensor:
    return a.new_empty((edge_index.size(1), *a.shape[1:-1]))


def _setup_dot(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_dot(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, edge_index = ctx.saved_tensors
    adj = Adj(None, edge_index, b.size(0), a.size(0))
    return *_dot_gradients(adj, a, b, grad, *ctx.needs_input_grad[:2]), None


_sddmm.register_autograd(_backward_dot, setup_context=_setup_dot)
