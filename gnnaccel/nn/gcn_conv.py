"""GCNConv with its normalisation folded into the product."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gnnaccel.kernels.grouping import accumulator
from gnnaccel.nn import dense, mapped
from gnnaccel.nn.constants import kept_for
from gnnaccel.nn.fused import (
    HALVES,
    Fused,
    aggregation_columns,
    graph_for,
    may_reorder,
    plain_linear,
)
from gnnaccel.ops.adj import Adj, node_scale
from gnnaccel.ops.gather import Destinations, gather, reduce_groups, scatter
from gnnaccel.ops.product import Scales, spmm_sum


class GCNConv(Fused, torch_geometric.nn.GCNConv):
    """:class:`torch_geometric.nn.GCNConv`, fused.

    ``D^-1/2 (A + I) D^-1/2 X W + b``: the two scalings and the self-loops are applied
    inside the product, so that no normalised copy of the edges is made. The linear map
    goes before or after the product, whichever moves fewer columns.
    """

    _cached_edge_index: Any
    fused_by = "spmm(sum) with the normalisation folded in"
    keeps_sums = True

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum" and self.normalize:
            return f"aggr={self.aggr!r}: only sum is fused with the normalisation"
        return why

    def forward(
        self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """See :class:`torch_geometric.nn.GCNConv`."""
        if self._tries(x, edge_index) and self._reduce == "sum":
            out = self._fused(x, edge_index, edge_weight)
            if out is not None:
                return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_weight: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_weight)
        return stock

    def _fused(self, x: Any, edge_index: Any, edge_weight: Any) -> Tensor | None:
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return None  # sparse matrices: other rules for loops and weights
        if torch.is_autocast_enabled("cpu") and getattr(x, "dtype", None) in HALVES:
            return None  # what PyG's normalisation is rounded to then is its own affair
        normalize = self.normalize
        weight: Tensor | None = edge_weight
        if normalize and self.cached:
            if not isinstance(x, Tensor):
                return None
            if self._cached_edge_index is None:
                self._cached_edge_index = gcn_norm(
                    edge_index,
                    edge_weight,
                    x.size(self.node_dim),
                    self.improved,
                    self.add_self_loops,
                    self.flow,
                    x.dtype,
                )
            edge_index, weight = self._cached_edge_index
            normalize = False
        adj = graph_for(self, x, edge_index, None, weight)
        if adj is None:
            return None
        reorders = self._may_aggregate_first(x)
        kept = None
        if reorders and adj.reuse:
            key = ("gcn", normalize, self.add_self_loops, self.improved)
            kept = kept_for(adj, x, weight, key)
        if kept is not None:
            out = kept.get(lambda: self._aggregate(adj, x, weight, normalize))
            return dense.linear(out, self.lin.weight, self.bias)
        if reorders and self._aggregates_first(x):
            out = self._aggregate(adj, x, weight, normalize)
            return dense.linear(out, self.lin.weight, self.bias)
        terms = None
        if reorders and adj.graph is not None:
            terms = self._terms(adj, x, weight, normalize)
        if terms is not None and mapped.serves(
            adj, x, self.lin.weight, None, self.bias, terms[0]
        ):
            return mapped.mapped_sum(adj, x, self.lin.weight, None, self.bias, *terms)
        h = dense.apply(self.lin, x)
        # The coefficients are of the input's dtype, whatever autocast made of h.
        h = h.to(torch.promote_types(h.dtype, x.dtype))
        out = self._aggregate(adj, h, weight, normalize)
        if self.bias is None:
            return out
        # In place: the product made `out` for us, and nobody else holds it.
        return out.add_(self.bias) if self.bias.dtype == out.dtype else out + self.bias

    def _may_aggregate_first(self, x: Tensor) -> bool:
        return (
            may_reorder(x)
            and plain_linear(self.lin)
            and self.lin.bias is None
            and (self.bias is None or self.bias.dtype == x.dtype)
        )

    def _aggregates_first(self, x: Tensor) -> bool:
        first, second = aggregation_columns(self.lin, x)
        return first < second

    def _aggregate(
        self, adj: Adj, x: Tensor, weight: Tensor | None, normalize: bool
    ) -> Tensor:
        terms = self._terms(adj, x, weight, normalize)
        if terms is not None:
            weight, scales, skip_loops = terms
            return spmm_sum(adj, x, weight, scales, skip_loops=skip_loops)
        assert weight is not None
        w, own = _normalisation(adj, weight, self._fill())
        out = spmm_sum(adj, x, w)
        return out if own is None else out + own.unsqueeze(-1) * x

    def _terms(
        self, adj: Adj, x: Tensor, weight: Tensor | None, normalize: bool
    ) -> tuple[Tensor | None, Scales, bool] | None:
        """Weights, scales and whether to skip loops; ``None`` if they are not constant.

        What learns is new at every step, and fused optimizers write to it without a
        word to its version counter.
        """
        if not normalize:
            return weight, Scales(), False
        loops = self.add_self_loops
        if weight is None:
            scale = node_scale(adj, "gcn_loops" if loops else "gcn", x.dtype)
            own = None
            if loops:
                # Without weights PyG gives every loop weight 1, improved or not.
                own = (
                    scale * scale
                    if adj.graph is None
                    else adj.graph.derived(
                        ("gcn_own", scale.dtype), lambda: scale * scale
                    )
                )
            return None, Scales(scale, scale, own), loops
        if adj.graph is None or weight.requires_grad:
            return None
        fill = self._fill()
        w, own = adj.graph.memory.remember(
            weight, ("gcn", fill), lambda: _constants(adj, weight, fill)
        )
        return w, Scales(own=own), False

    def _fill(self) -> float | None:
        """The weight of a self-loop where the graph has none; ``None``: add none."""
        if not self.add_self_loops:
            return None
        return 2.0 if self.improved else 1.0


def _normalisation(
    adj: Adj, weight: Tensor, fill: float | None
) -> tuple[Tensor, Tensor | None]:
    """What :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm` makes of weights.

    Args:
        adj: The graph.
        weight: ``[E]``.
        fill: Weight of a self-loop where the graph has none; ``None``: add none.

    Returns:
        ``(w, own)``: the normalised weights ``[E]``, 0 at self-loops that ``own``
        ``[N]``, the normalised weight of each node's loop, stands for (of several at
        one node the last counts). Differentiable.
    """
    index = adj.edge_index if adj.graph is None else adj.graph.edge_index
    assert index is not None
    src, dst = index[0], index[1]
    n = adj.num_dst
    loop = None
    if fill is not None:
        if adj.graph is None or adj.graph.num_self_loops:
            is_loop = src == dst
            slot = torch.where(
                is_loop, src, n
            ).long()  # edges that are none share slot n
            loop = weight.new_full((n + 1,), fill).scatter(0, slot, weight)[:n]
            weight = weight.masked_fill(is_loop, 0)
        else:
            loop = weight.new_full((n,), fill)
    if adj.graph is None:
        degree = scatter(weight, dst, n)
    else:
        degree = reduce_groups(weight, Destinations(adj.graph), "sum")
    if loop is not None:
        degree = degree + loop
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0)
    # Per edge and not per node, so that a NaN stays where an edge carries it.
    weight = gather(scale, src) * weight * gather(scale, dst)
    return weight, None if loop is None else scale * loop * scale


def _constants(
    adj: Adj, weight: Tensor, fill: float | None
) -> tuple[Tensor, Tensor | None]:
    """The same without gradients, ``own`` in the accumulator dtype."""
    with torch.no_grad():
        w, own = _normalisation(adj, weight, fill)
    return w, None if own is None else own.to(accumulator(own.dtype))
