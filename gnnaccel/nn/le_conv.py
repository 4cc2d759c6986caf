"""LEConv as one sum of neighbours: what the node itself gives is taken out of it."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense, mapped
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, plain_linear, sizes
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.gather import Destinations, reduce_groups
from gnnaccel.ops.product import spmm_sum


class LEConv(Fused, torch_geometric.nn.LEConv):
    """:class:`torch_geometric.nn.LEConv`, fused for ``aggr="add"``.

    ``sum_j w_ij (a_j - b_i) = sum_j w_ij a_j - (sum_j w_ij) b_i``.
    """

    fused_by = "spmm, the node's own term outside of it"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum":
            why = f"aggr={self.aggr!r}: only sum is fused"
        # What they return would have to be looked at: weights are of its dtype.
        linears = self.lin1, self.lin2, self.lin3
        if why is None and not all(map(plain_linear, linears)):
            why = "one of its linear layers has hooks, or is none of PyG's"
        return why

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.LEConv`."""
        if type(edge_index) is Tensor and self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, None)
            adj = None
            if (
                ok
                and x_dst is not None
                and edge_index.layout == torch.strided
                and may_reorder(x_src)
            ):
                adj = graph_for(self, x_src, edge_index, num_dst, edge_weight)
            if adj is not None and adj.graph is not None:
                return self._fused(adj, x_src, x_dst, edge_weight)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (a: Tensor, b: Tensor, edge_weight: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_weight)
        return stock

    def _fused(
        self, adj: Adj, x_src: Tensor, x_dst: Tensor, weight: Tensor | None
    ) -> Tensor:
        lin1, lin2, lin3 = self.lin1, self.lin2, self.lin3
        total = _total(adj, weight, x_src.dtype).unsqueeze(-1)
        if (
            x_dst is x_src
            and lin1.weight.size(1) >= lin1.weight.size(0)
            and mapped.serves(adj, x_src, lin1.weight, lin3.weight, lin3.bias, weight)
        ):
            own = dense.linear(x_src, -lin2.weight, lin1.bias)
            out = mapped.mapped_sum(
                adj, x_src, lin1.weight, lin3.weight, lin3.bias, weight
            )
            return torch.addcmul(out, total, own)
        a = dense.apply(lin1, x_src)
        b, out = dense.apply_all([lin2, lin3], x_dst)
        return spmm_sum(adj, a, weight) - total * b + out


def _total(adj: Adj, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[num_dst]``: the weights of each node's edges, added up."""
    graph = adj.graph
    assert graph is not None
    if weight is None:
        return graph.derived(("in degree", dtype), lambda: graph.rows.counts.to(dtype))

    def add_up() -> Tensor:
        return reduce_groups(weight, Destinations(graph), "sum")

    if weight.requires_grad:
        return add_up()
    return graph.memory.remember(weight, "total", add_up)
