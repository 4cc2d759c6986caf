"""Neighbours and the node itself, each through a linear map, in one step.

``out = agg(x) W_rel^T + x W_root^T + b``, as SAGEConv and GraphConv compute it. One
autograd function for the whole lets both products and both gradients of ``x`` add up in
place, where separate ones would write and add whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import transforming
from gnnaccel.nn import dense, mapped
from gnnaccel.nn.fused import aggregation_columns, may_reorder, plain_linear
from gnnaccel.nn.neighbours import add_to, aggregate, linear_of_neighbours
from gnnaccel.ops.adj import Adj, node_scale, wants_grad
from gnnaccel.ops.extreme import run_extreme, split
from gnnaccel.ops.function import Function
from gnnaccel.ops.product import Scales, spmm_sum


def neighbours_and_root(
    rel: Any,
    root: Any,
    adj: Adj,
    x_src: Tensor,
    x_dst: Tensor | None,
    weight: Tensor | None,
    reduce: str,
) -> Tensor:
    """``rel(aggregate(x_src)) + root(x_dst)``.

    Args:
        rel: The linear layer of the neighbours.
        root: That of the node itself, or ``None``.
        adj: The graph.
        x_src: ``[num_src, F]``.
        x_dst: ``[num_dst, F']``, or ``None``: no term of its own.
        weight: ``[E]`` or ``None``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[num_dst, F_out]``.
    """
    if root is None or x_dst is None:
        return linear_of_neighbours(rel, adj, x_src, weight, reduce)
    if (
        x_dst is x_src
        and adj.graph is not None
        and not (adj.reuse and not x_src.requires_grad)
        and adj.num_src == adj.num_dst
        and plain_linear(rel)
        and plain_linear(root)
        and (rel.bias is None or root.bias is None)
        and may_reorder(x_src)
        and not wants_grad(weight)
        and wants_grad(x_src, rel.weight, root.weight)
        and dense.serves(x_src, rel.weight, _bias(rel, root))
        and root.weight.dtype == x_src.dtype
    ):
        first, second = aggregation_columns(rel, x_src)
        tensors = x_src, rel.weight, root.weight, _bias(rel, root)
        if reduce in ("sum", "mean") and second <= first:
            scale = node_scale(adj, "mean", x_src.dtype) if reduce == "mean" else None
            return mapped.mapped_sum(adj, *tensors, weight, Scales(dst=scale))
        out: Tensor = _Branches.apply(*tensors, adj, weight, reduce)[0]
        return out
    out = linear_of_neighbours(rel, adj, x_src, weight, reduce)
    return add_to(out, dense.apply(root, x_dst), rel)


def _bias(rel: Any, root: Any) -> Tensor | None:
    """The bias of the two, of which only one may have one."""
    bias: Tensor | None = root.bias if rel.bias is None else rel.bias
    return bias


def sum_and_root(
    rel: Any,
    root: Any,
    adj: Adj,
    x: Tensor,
    weight: Tensor | None,
    scales: Scales,
    skip_loops: bool = False,
) -> Tensor:
    """``rel(spmm_sum(x)) + root(x)``.

    Args:
        rel: The linear layer of the neighbours.
        root: That of the node itself, without a bias.
        adj: The graph, of one kind of nodes.
        x: ``[N, F]``.
        weight: ``[E]`` or ``None``.
        scales: See :func:`gnnaccel.ops.product.spmm_sum`.
        skip_loops: See there.

    Returns:
        ``[N, F_out]``.
    """
    if plain_linear(rel) and plain_linear(root) and root.bias is None:
        first, second = aggregation_columns(rel, x)
        tensors = rel.weight, root.weight, rel.bias, weight
        if second <= first and mapped.serves(adj, x, *tensors):
            return mapped.mapped_sum(adj, x, *tensors, scales, skip_loops)
    summed = spmm_sum(adj, x, weight, scales, skip_loops=skip_loops)
    return add_to(dense.apply(rel, summed), dense.apply(root, x), rel)


class _Branches(Function):
    """The neighbours' map comes after the aggregation."""

    @staticmethod
    def forward(
        x: Tensor,
        rel: Tensor,
        root: Tensor,
        bias: Tensor | None,
        adj: Adj,
        weight: Tensor | None,
        reduce: str,
    ) -> Any:
        ties = None
        if reduce in ("max", "min"):
            neighbours, ties = run_extreme(adj, x, weight, reduce == "max", True)
        else:
            neighbours = aggregate(adj, x, weight, reduce)
        out = dense.product(neighbours, rel.t(), bias).addmm_(x, root.t())
        return out, neighbours, ties

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, rel, root, _, ctx.adj, weight, ctx.reduce = inputs
        _, neighbours, ties = output
        ctx.mark_non_differentiable(*output[1 : 2 + (ties is not None)])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rel, root, weight, neighbours, ties)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, rel, root, weight, neighbours, ties = ctx.saved_tensors
        need_x, need_rel, need_root, need_bias = ctx.needs_input_grad[:4]
        # Derivatives of derivatives are asked for, or a batch of gradients.
        second = torch.is_grad_enabled() or transforming(grad)
        grad_x = None
        if need_x:
            back = grad @ rel if second else dense.product(grad, rel)
            if ties is None:
                grad_x = _to_sources(ctx.adj, back, weight, ctx.reduce)
            else:
                share = back / ties if second else back.div_(ties)
                grad_x = split(
                    ctx.adj, share, x, neighbours, weight, ctx.reduce == "max"
                )
            grad_x = grad_x + grad @ root if second else grad_x.addmm_(grad, root)
        if need_rel and second:
            neighbours = aggregate(ctx.adj, x, weight, ctx.reduce)
        return (
            grad_x,
            dense.outer(grad, neighbours) if need_rel else None,
            dense.outer(grad, x) if need_root else None,
            grad.sum(0) if need_bias else None,
            None,
            None,
            None,
        )


def _to_sources(adj: Adj, grad: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """The gradient of what was summed, or averaged, over the neighbours."""
    scale = node_scale(adj, "mean", grad.dtype) if reduce == "mean" else None
    return spmm_sum(adj, grad, weight, Scales(src=scale), transposed=True)
