"""ClusterGCNConv with its self-loops and its division by degree inside the sum."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.graph import Graph
from gnnaccel.nn.branches import sum_and_root
from gnnaccel.nn.fused import Fused, graph_for, may_reorder
from gnnaccel.ops.product import Scales


class ClusterGCNConv(Fused, torch_geometric.nn.ClusterGCNConv):
    """:class:`torch_geometric.nn.ClusterGCNConv`, fused for ``aggr="add"``."""

    fused_by = "spmm with the self-loops and the degrees folded in"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum":
            why = f"aggr={self.aggr!r}: only sum is fused"
        if why is None and self.flow != "source_to_target":
            why = f"flow={self.flow!r}: PyG divides by the other end's degree"
        if why is None and not self.add_self_loops:
            why = "add_self_loops=False is not fused"
        return why

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.ClusterGCNConv`."""
        if type(edge_index) is Tensor and self._tries(x, edge_index):
            strided = edge_index.layout == torch.strided
            served = strided and isinstance(x, Tensor) and may_reorder(x)
            adj = graph_for(self, x, edge_index, None) if served else None
            if adj is not None and adj.graph is not None:
                scales = _scales(adj.graph, self.diag_lambda, x.dtype)
                return sum_and_root(
                    self.lin_out, self.lin_root, adj, x, None, scales, skip_loops=True
                )
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_weight: OptTensor)
        stock: Tensor = super().forward(x, edge_index)
        return stock


def _scales(graph: Graph, diagonal: float, dtype: torch.dtype) -> Scales:
    """``1 / degree``, and for the node itself ``(1 + diagonal) / degree``."""
    # In which PyG counts, whatever the features are.
    counted = torch.get_default_dtype()

    def build() -> tuple[Tensor, Tensor]:
        scale = 1.0 / (graph.without_self_loops.rows.counts + 1).to(counted)
        return scale.to(dtype), (scale + diagonal * scale).to(dtype)

    scale, own = graph.derived(("cluster", diagonal, dtype, counted), build)
    return Scales(dst=scale, own=own)
