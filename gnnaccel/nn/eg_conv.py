"""EGConv: all its aggregators are sparse products."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops

from gnnaccel.cache import remember
from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for, is_served, may_reorder
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.normalisation import gcn_norm, rememberable
from gnnaccel.ops.adj import Adj


class EGConv(Fused, torch_geometric.nn.EGConv):
    """:class:`torch_geometric.nn.EGConv`, fused where it caches nothing itself."""

    fused_by = "spmm for each aggregator"
    _node_dims = (0,)

    def _why_not_aggregated(self) -> str | None:
        if self.cached:
            return "cached=True: the graph that it keeps is PyG's"
        return None

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.EGConv`."""
        if (
            rememberable(edge_index)
            and self._tries(x, edge_index)
            and is_served(x)
            and may_reorder(x)
        ):
            index, weight = self._normalised(x, edge_index)
            adj = graph_for(self, x, index, None, weight)
            if adj is not None and adj.graph is not None:
                return self._fused(adj, x, weight)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, symnorm_weight: OptTensor)
        stock: Tensor = super().forward(x, edge_index)
        return stock

    def _normalised(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Any]:
        if "symnorm" in self.aggregators:
            index, weight = gcn_norm(
                edge_index,
                None,
                num_nodes=x.size(0),
                improved=False,
                add_self_loops=self.add_self_loops,
                flow=self.flow,
                dtype=x.dtype,
            )
            return index, weight
        if not self.add_self_loops:
            return edge_index, None
        looped = remember(
            edge_index,
            "with remaining loops",
            lambda: add_remaining_self_loops(edge_index)[0],
        )
        return looped, None

    def _fused(self, adj: Adj, x: Tensor, weight: Tensor | None) -> Tensor:
        bases, weightings = dense.apply_all([self.bases_lin, self.comb_lin], x)
        outs = [_aggregated(adj, bases, weight, name) for name in self.aggregators]
        each = self.num_bases * len(self.aggregators)
        width = self.out_channels // self.num_heads
        aggregated = torch.stack(outs, dim=1) if len(outs) > 1 else outs[0]
        out = torch.matmul(
            weightings.view(-1, self.num_heads, each), aggregated.view(-1, each, width)
        ).view(-1, self.out_channels)
        return out if self.bias is None else out + self.bias


def _aggregated(adj: Adj, x: Tensor, weight: Tensor | None, name: str) -> Tensor:
    if name == "symnorm":
        return aggregate(adj, x, weight, "sum")
    if name not in ("var", "std"):
        return aggregate(adj, x, None, name)
    mean = aggregate(adj, x, None, "mean")
    variance = aggregate(adj, x * x, None, "mean") - mean * mean
    return variance if name == "var" else variance.clamp(min=1e-5).sqrt()
