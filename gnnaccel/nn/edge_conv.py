"""EdgeConv with the first linear layer of its network taken per node."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, sizes
from gnnaccel.nn.pairwise import difference_ends, reduce_sum_of_ends
from gnnaccel.nn.split import through
from gnnaccel.ops.gather import gather, scatter


class EdgeConv(Fused, torch_geometric.nn.EdgeConv):
    """:class:`torch_geometric.nn.EdgeConv`, fused.

    A linear layer on ``[x_i, x_j - x_i]`` is a sum of two, of one end each. Where it is
    the whole network nothing is left to do per edge; else the rest of it is.
    """

    fused_by = "its first linear layer per node, not per edge"

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.EdgeConv`."""
        out = self._fused(x, edge_index) if self.why_not_fused() is None else None
        if out is not None:
            return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: PairTensor)
        stock: Tensor = super().forward(x, edge_index)
        return stock

    def _fused(self, x: Any, edge_index: Any) -> Tensor | None:
        x_src, x_dst, num_dst, ok = sizes(self, x, None)
        first, rest = dense.first_linear(self.nn)
        if not ok or first is None or not isinstance(x_dst, Tensor):
            return None
        adj = graph_for(self, x_src, edge_index, num_dst)
        if (
            adj is None
            or adj.graph is None
            or type(edge_index) is not Tensor
            or not may_reorder(x_src)
            or not x_src.dtype == x_dst.dtype == first.weight.dtype
            or first.weight.size(1) != 2 * x_src.size(1)
            or x_src.size(1) != x_dst.size(1)
        ):
            return None
        y, z = difference_ends(first, x_src, x_dst)
        if not rest:
            return reduce_sum_of_ends(adj, y, z, self._reduce)
        source, target = edge_index
        if self.flow == "target_to_source":
            source, target = target, source
        messages = through(rest, gather(y, source).add_(gather(z, target)))
        if messages.dim() != 2:
            return None
        return scatter(messages, target, adj.num_dst, self._reduce)
