"""GeneralConv without attention: its maps per node, not per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, plain_linear, sizes
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.gather import Destinations, reduce_groups


class GeneralConv(Fused, torch_geometric.nn.GeneralConv):
    """:class:`torch_geometric.nn.GeneralConv`, fused for sum and mean, no attention.

    A message is then a sum of linear maps of both ends and of the edge; each is taken
    once per node, that of the edges' features after their sum.
    """

    fused_by = "spmm after its maps"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce not in ("sum", "mean"):
            why = f"aggr={self.aggr!r}: only sum and mean are fused"
        if why is None and self.attention:
            why = "attention=True is not fused"
        if why is None and not all(map(plain_linear, self._maps())):
            why = "one of its linear layers has hooks, or is none of PyG's"
        return why

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        """See :class:`torch_geometric.nn.GeneralConv`."""
        if type(edge_index) is Tensor and self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            adj = None
            if (
                ok
                and x_dst is not None
                and edge_index.layout == torch.strided
                and may_reorder(x_src)
                and self._takes(edge_attr, x_src, edge_index)
            ):
                adj = graph_for(self, x_src, edge_index, num_dst)
            if adj is not None and adj.graph is not None:
                out = self._fused(adj, x_src, x_dst, edge_attr)
                out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
                out = out + self.lin_self(x_dst)
                return F.normalize(out, p=2, dim=-1) if self.normalize_l2 else out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr, size)
        return stock

    def _maps(self) -> list[Any]:
        maps = [self.lin_msg]
        maps += [] if self.directed_msg else [self.lin_msg_i]
        return maps + ([] if self.in_edge_channels is None else [self.lin_edge])

    def _takes(self, edge_attr: Any, x: Tensor, edge_index: Tensor) -> bool:
        return edge_attr is None or (
            self.in_edge_channels is not None
            and type(edge_attr) is Tensor
            and edge_index.dim() == 2
            and edge_attr.shape == (edge_index.size(1), self.in_edge_channels)
            and edge_attr.dtype == x.dtype
        )

    def _fused(
        self, adj: Adj, x_src: Tensor, x_dst: Tensor, edge_attr: Tensor | None
    ) -> Tensor:
        reduce = self._reduce
        out = aggregate(adj, dense.apply(self.lin_msg, x_src), None, reduce)
        if self.directed_msg and edge_attr is None:
            return out
        graph = adj.graph
        assert graph is not None
        # How often the sum, or the mean, adds up what is the same for all edges.
        times = graph.rows.counts.to(x_src.dtype)
        times = (times if reduce == "sum" else times.clamp(max=1)).unsqueeze(-1)
        if not self.directed_msg:
            out = out + times * dense.apply(self.lin_msg_i, x_dst)
        if edge_attr is not None:
            summed = reduce_groups(edge_attr, Destinations(graph), reduce)
            out = out + F.linear(summed, self.lin_edge.weight)
            if self.lin_edge.bias is not None:
                out = out + times * self.lin_edge.bias
        return out
