"""The steps that layers over plain neighbour sums share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gnnaccel.nn import dense, mapped
from gnnaccel.nn.constants import kept_for
from gnnaccel.nn.fused import aggregation_columns, may_reorder, plain_linear
from gnnaccel.ops.adj import Adj, node_scale
from gnnaccel.ops.product import Scales, spmm_sum
from gnnaccel.ops.spmm import reduce_extreme


def aggregate(
    adj: Adj,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    scales: Scales = Scales(),  # noqa: B008 - immutable
) -> Tensor:
    """Reduces neighbours.

    Args:
        adj: The graph.
        x: ``[num_src, F]``.
        weight: ``[E]`` of the dtype of ``x``, or ``None``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        scales: Folded into a sum or mean.

    Returns:
        ``[num_dst, F]``.
    """
    plain = all(scale is None for scale in scales)
    kept = kept_for(adj, x, weight, reduce) if plain else None
    if kept is not None:
        return kept.copy(lambda: _aggregate(adj, x, weight, reduce))
    return _aggregate(adj, x, weight, reduce, scales)


def aggregate_to_read(
    adj: Adj, x: Tensor, weight: Tensor | None, reduce: str
) -> Tensor:
    """:func:`aggregate` for a caller that neither writes to the result nor returns it.

    It may be kept for the next call.
    """
    kept = kept_for(adj, x, weight, reduce)
    if kept is not None:
        return kept.get(lambda: _aggregate(adj, x, weight, reduce))
    return _aggregate(adj, x, weight, reduce)


def _aggregate(
    adj: Adj,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    scales: Scales = Scales(),  # noqa: B008 - immutable
) -> Tensor:
    if reduce in ("max", "min"):
        return reduce_extreme(adj, x, weight, reduce)
    if reduce == "mean":
        scales = scales._replace(dst=node_scale(adj, "mean", x.dtype))
    return spmm_sum(adj, x, weight, scales)


def linear_of_neighbours(
    linear: Any, adj: Adj, x: Tensor, weight: Tensor | None, reduce: str
) -> Tensor:
    """``linear(aggregate(x))``, the linear map first where that moves fewer columns."""
    kept = kept_for(adj, x, weight, reduce)
    if kept is not None:
        # Hooks may write to what they see.
        take = kept.get if plain_linear(linear) else kept.copy
        return dense.apply(linear, take(lambda: _aggregate(adj, x, weight, reduce)))
    if reduce in ("sum", "mean") and may_reorder(x) and plain_linear(linear):
        aggregate_first, transform_first = aggregation_columns(linear, x)
        if transform_first <= aggregate_first:
            scale = node_scale(adj, "mean", x.dtype) if reduce == "mean" else None
            if mapped.serves(adj, x, linear.weight, None, linear.bias, weight):
                return mapped.mapped_sum(
                    adj,
                    x,
                    linear.weight,
                    bias=linear.bias,
                    weight=weight,
                    scales=Scales(dst=scale),
                )
        if transform_first < aggregate_first:
            out = aggregate(adj, dense.linear(x, linear.weight), weight, reduce)
            return out if linear.bias is None else out.add_(linear.bias)
    return dense.apply(linear, _aggregate(adj, x, weight, reduce))


def add_to(out: Tensor, more: Tensor, made_by: Any) -> Tensor:
    """``out + more``, in place where ``out`` is ours alone.

    A fresh tensor of this size costs more (page faults) than the addition.

    Args:
        out: What :func:`linear_of_neighbours` returned.
        more: Of the same shape.
        made_by: The linear layer that made ``out``: where a hook saw its output, the
            output must stay what it was.
    """
    if plain_linear(made_by) and out.dtype == more.dtype:
        return out.add_(more)
    return out + more


def matrix_weight(matrix: Any, x: Tensor, of_sparse_tensor: bool) -> Tensor | None:
    """The values of a sparse matrix in the edge order of its graph; ``None`` if none.

    Args:
        matrix: What the user passed as ``edge_index``.
        x: Features, whose dtype the values take.
        of_sparse_tensor: Whether the values of a ``SparseTensor`` count.
    """
    if isinstance(matrix, SparseTensor):
        value = matrix.storage.value() if of_sparse_tensor else None
    elif is_torch_sparse_tensor(matrix):
        value = (
            matrix._values() if matrix.layout == torch.sparse_coo else matrix.values()
        )
    else:
        return None
    return None if value is None else value.to(x.dtype)
