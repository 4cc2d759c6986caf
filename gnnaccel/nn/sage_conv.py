"""SAGEConv on spmm."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn.branches import neighbours_and_root
from gnnaccel.nn.fused import Fused, graph_for, sizes
from gnnaccel.nn.neighbours import matrix_weight


class SAGEConv(Fused, torch_geometric.nn.SAGEConv):
    """:class:`torch_geometric.nn.SAGEConv`, fused for mean, sum, max and min."""

    fused_by = "spmm"
    keeps_sums = True

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.SAGEConv`."""
        if self._tries(x, edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            adj = graph_for(self, x_src, edge_index, num_dst) if ok else None
            if adj is not None:
                if self.project and hasattr(self, "lin"):
                    x_src = self.lin(x_src).relu()
                # SparseTensor's values are dropped, torch.sparse's are not.
                weight = matrix_weight(edge_index, x_src, of_sparse_tensor=False)
                root = self.lin_r if self.root_weight else None
                out = neighbours_and_root(
                    self.lin_l, root, adj, x_src, x_dst, weight, self._reduce
                )
                return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor)
        stock: Tensor = super().forward(x, edge_index, size)
        return stock
