"""MFConv: nodes sorted by degree once, one product per degree."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn.fused import Fused, graph_for, may_reorder, plain_linear, sizes
from gnnaccel.nn.hetero_linear import Sorted, map_by_type, sorted_by, stacked
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj


class MFConv(Fused, torch_geometric.nn.MFConv):
    """:class:`torch_geometric.nn.MFConv`, fused for sum, mean, max and min."""

    fused_by = "spmm, and one product per degree on sorted nodes"
    graph_costs = 4

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and not all(map(plain_linear, (*self.lins_l, *self.lins_r))):
            why = "one of its linear layers has hooks, or is none of PyG's"
        return why

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.MFConv`."""
        if type(edge_index) is Tensor and self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            adj = None
            if ok and edge_index.layout == torch.strided and _served(x_src, x_dst):
                adj = graph_for(self, x_src, edge_index, num_dst)
            if adj is not None and adj.graph is not None:
                out = self._fused(adj, x_src, x_dst)
                if out is not None:
                    return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor)
        stock: Tensor = super().forward(x, edge_index, size)
        return stock

    def _fused(self, adj: Adj, x_src: Tensor, x_dst: Tensor | None) -> Tensor | None:
        """``None`` where the linear layers of its degrees differ in kind."""
        at_source, at_target = stacked(self.lins_l), stacked(self.lins_r)
        if at_source is None or at_target is None:
            return None
        rows = _by_degree(adj, self.max_degree)
        out = aggregate(adj, x_src, None, self._reduce)
        out = map_by_type(out, *at_source, rows)
        return out if x_dst is None else out + map_by_type(x_dst, *at_target, rows)


def _served(x_src: Tensor, x_dst: Tensor | None) -> bool:
    # PyG counts as many degrees as there are destinations it was told of.
    return may_reorder(x_src) and (x_dst is None or x_dst.dtype == x_src.dtype)


def _by_degree(adj: Adj, most: int) -> Sorted:
    graph = adj.graph
    assert graph is not None
    return graph.derived(
        ("by degree", most),
        lambda: sorted_by(graph.rows.counts.clamp(max=most), most + 1),
    )
