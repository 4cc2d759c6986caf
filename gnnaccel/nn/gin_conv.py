"""GINConv on spmm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.grouping import accumulator
from gnnaccel.nn import dense, mapped, sequence
from gnnaccel.nn.constants import kept_for
from gnnaccel.nn.fused import (
    Fused,
    aggregation_columns,
    graph_for,
    may_reorder,
    sizes,
)
from gnnaccel.nn.neighbours import aggregate, matrix_weight
from gnnaccel.ops.adj import Adj, node_scale, wants_grad
from gnnaccel.ops.product import Scales


class GINConv(Fused, torch_geometric.nn.GINConv):
    """:class:`torch_geometric.nn.GINConv`, fused.

    ``(1 + eps) x`` is added inside the kernel. Where the network begins with a linear
    layer that does not widen, that layer goes before the sum.
    """

    fused_by = "spmm with the node's own term folded in"
    keeps_sums = True

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.GINConv`."""
        if self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            # Another dtype of eps makes PyG's sum one of that dtype.
            ok = ok and (x_dst is None or self._same_dtype(x_src))
            adj = graph_for(self, x_src, edge_index, num_dst) if ok else None
            if adj is not None:
                weight = matrix_weight(edge_index, x_src, of_sparse_tensor=False)
                first, rest = sequence.first_linear(self.nn)
                kept = kept_for(adj, x_src, weight, self._reduce)
                bare = replace(adj, reuse=False)
                if kept is not None:
                    take = kept.copy if x_dst is None else kept.get
                    out = take(partial(aggregate, bare, x_src, weight, self._reduce))
                    if x_dst is not None:
                        out = out + (1 + self.eps) * x_dst
                    return dense.apply(self.nn, out)
                if (
                    first is not None
                    and x_dst is x_src
                    and self._transforms_first(first, x_src)
                ):
                    out = self._combine_mapped(bare, x_src, first, weight)
                    return sequence.through(rest, out)
                return dense.apply(self.nn, self._combine(bare, x_src, x_dst, weight))
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor)
        stock: Tensor = super().forward(x, edge_index, size)
        return stock

    def _same_dtype(self, x: Tensor) -> bool:
        return self.eps.dtype == x.dtype or torch.is_autocast_enabled("cpu")

    def _transforms_first(self, first: Any, x: Tensor) -> bool:
        if self._reduce not in ("sum", "mean") or not may_reorder(x):
            return False
        aggregate_first, transform_first = aggregation_columns(first, x)
        # Of two orders at one price, this one keeps no sum for the backward pass.
        return transform_first <= aggregate_first

    def _combine_mapped(
        self, adj: Adj, x: Tensor, linear: Any, weight: Tensor | None
    ) -> Tensor:
        """``linear`` of :meth:`_combine`, for a linear map that may come first."""
        matrix, bias = linear.weight, linear.bias
        if self._own_is_constant(adj, x) and mapped.serves(
            adj, x, matrix, None, bias, weight
        ):
            scale = node_scale(adj, "mean", x.dtype) if self._reduce == "mean" else None
            scales = Scales(dst=scale, own=self._own(x))
            return mapped.mapped_sum(adj, x, matrix, None, bias, weight, scales)
        h = dense.linear(x, matrix)
        out = self._combine(adj, h, h, weight)
        return out if bias is None else out.add_(bias)

    def _own(self, x: Tensor) -> Tensor:
        """``[1]``: what the node itself is multiplied by."""
        return (1 + self.eps).to(accumulator(x.dtype))

    def _own_is_constant(self, adj: Adj, x: Tensor) -> bool:
        return (
            self._reduce in ("sum", "mean")
            and adj.num_src == adj.num_dst
            and self.eps.dtype == x.dtype
            and not wants_grad(self.eps)
        )

    def _combine(
        self, adj: Adj, x_src: Tensor, x_dst: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """Sum over neighbours plus ``(1 + eps)`` times the node itself."""
        if x_dst is x_src and self._own_is_constant(adj, x_src):
            own = Scales(own=self._own(x_src))
            return aggregate(adj, x_src, weight, self._reduce, own)
        out = aggregate(adj, x_src, weight, self._reduce)
        return out if x_dst is None else out + (1 + self.eps) * x_dst
