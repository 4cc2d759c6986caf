"""Sums of neighbours that pass through a linear map, in one autograd step.

``out = S(x W_rel^T) + x W_root^T + b`` with ``S`` a sum over neighbours and its scales.
As the sum and the maps commute, the order is ours to choose. On kernels that multiply a
tile of sums while it is in the cache, nothing but the result is ever written; elsewhere
the map comes first, and of features, only the input is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.kernels import linear, native, transforming
from gnnaccel.nn import dense
from gnnaccel.nn.fused import may_reorder
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.function import Function
from gnnaccel.ops.product import Scales, arranged, run_spmm_sum, spmm_sum


def serves(
    adj: Adj,
    x: Tensor,
    rel: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
) -> bool:
    """Whether :func:`mapped_sum` computes what separate steps would."""
    return (
        adj.graph is not None
        and may_reorder(x)
        and not wants_grad(weight)
        and dense.serves(x, rel, bias)
        and (root is None or (root.dtype == x.dtype and adj.num_src == adj.num_dst))
    )


def mapped_sum(
    adj: Adj,
    x: Tensor,
    rel: Tensor,
    root: Tensor | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    scales: Scales = Scales(),  # noqa: B008 - immutable
    skip_loops: bool = False,
) -> Tensor:
    """``spmm_sum(x rel^T) + x root^T + bias``.

    Args:
        adj: The graph; see :func:`serves`.
        x: ``[N, F_in]``.
        rel: ``[F_out, F_in]``.
        root: The same, or ``None``; sources are destinations then.
        bias: ``[F_out]`` or ``None``.
        weight: ``[E]`` or ``None``; gets no gradient.
        scales: See :func:`gnnaccel.ops.product.spmm_sum`.
        skip_loops: See there.

    Returns:
        ``[N, F_out]``.
    """
    arguments = x, rel, root, bias, adj, weight, scales, skip_loops
    if not wants_grad(x, rel, root, bias):
        return _forward(*arguments)
    out: Tensor = _MappedSum.apply(*arguments)
    return out


def _forward(
    x: Tensor,
    rel: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    adj: Adj,
    weight: Tensor | None,
    scales: Scales,
    skip_loops: bool,
) -> Tensor:
    out: Tensor | None
    narrow = rel.size(1) <= rel.size(0)
    if narrow and fuses(adj, x, rel.size(0), False, skip_loops):
        grouping, weight = arranged(adj, weight, False, skip_loops)
        out = linear.spmm_linear(
            grouping,
            x,
            weight,
            scales,
            rel.t(),
            None if root is None else root.t(),
            bias,
        ).out
        assert out is not None
        return out
    mapped = dense.product(x, rel.t())
    if root is not None:
        out = dense.product(x, root.t(), bias)
        return run_spmm_sum(
            adj, mapped, weight, scales, skip_loops=skip_loops, base=out, out=out
        )
    out = spmm_sum(adj, mapped, weight, scales, skip_loops=skip_loops)
    return out if bias is None else out.add_(bias)


def fuses(
    adj: Adj, x: Tensor, columns: int, transposed: bool, skip_loops: bool = False
) -> bool:
    """Whether a kernel multiplies sums of ``x`` while these are cached, and faster.

    Args:
        adj: The graph, held.
        x: ``[N, F]``.
        columns: Of the product.
        transposed: See :func:`gnnaccel.ops.product.spmm_sum`.
        skip_loops: See there.
    """
    return kernels.pick_for(x) is native and linear.serves(
        adj.grouping(transposed, skip_loops), x, columns
    )


class _MappedSum(Function):
    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, rel, root, _, ctx.adj, weight, ctx.scales, ctx.skip_loops = inputs
        ctx.save_for_backward(x, rel, root, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rel, root, weight = ctx.saved_tensors
        need_x, need_rel, need_root, need_bias = ctx.needs_input_grad[:4]
        adj, scales, skip_loops = ctx.adj, ctx.scales, ctx.skip_loops
        scales = Scales(scales.dst, scales.src, scales.own)
        of_bias = grad.sum(0) if need_bias else None
        # Derivatives of derivatives are asked for, or a batch of gradients.
        second = torch.is_grad_enabled() or transforming(grad)
        of_x = of_rel = of_root = None
        if not second and fuses(adj, grad, x.size(1), True, skip_loops):
            grouping, weight = arranged(adj, weight, True, skip_loops)
            of_x, _, of_rel, of_root = linear.spmm_linear(
                grouping,
                grad,
                weight,
                scales,
                rel,
                root,
                with_out=need_x,
                y=x if need_rel or need_root else None,
                with_map=need_rel,
                with_root=need_root,
            )
            return of_x, of_rel, of_root, of_bias, None, None, None, None
        if need_x or need_rel:
            back = spmm_sum(adj, grad, weight, scales, True, skip_loops)
            if need_rel:
                of_rel = dense.outer(back, x)
            if need_x and second:
                of_x = back @ rel if root is None else back @ rel + grad @ root
            elif need_x:
                of_x = dense.product(back, rel)
                of_x = of_x if root is None else of_x.addmm_(grad, root)
        if need_root:
            of_root = dense.outer(grad, x)
        return of_x, of_rel, of_root, of_bias, None, None, None, None
