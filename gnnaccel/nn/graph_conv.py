"""GraphConv on spmm."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import is_sparse

from gnnaccel.nn.branches import neighbours_and_root
from gnnaccel.nn.fused import Fused, graph_for, sizes
from gnnaccel.nn.neighbours import matrix_weight


class GraphConv(Fused, torch_geometric.nn.GraphConv):
    """:class:`torch_geometric.nn.GraphConv`, fused for sum, mean, max and min."""

    fused_by = "spmm, edge weights inside the kernel"
    keeps_sums = True

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        size: Any = None,
    ) -> Tensor:
        """See :class:`torch_geometric.nn.GraphConv`."""
        if self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            adj = (
                graph_for(self, x_src, edge_index, num_dst, edge_weight) if ok else None
            )
            if adj is not None:
                # Beside a matrix, which brings its own values, weights are ignored.
                weight = edge_weight
                if is_sparse(edge_index):
                    weight = matrix_weight(edge_index, x_src, of_sparse_tensor=True)
                return neighbours_and_root(
                    self.lin_rel,
                    self.lin_root,
                    adj,
                    x_src,
                    x_dst,
                    weight,
                    self._reduce,
                )
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor, edge_weight: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_weight, size)
        return stock
