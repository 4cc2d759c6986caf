"""GMMConv: one weight per edge and kernel, rows of which are summed unwritten."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel import ops
from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, sizes
from gnnaccel.nn.gaussian import gaussians
from gnnaccel.ops.adj import Adj


class GMMConv(Fused, torch_geometric.nn.GMMConv):
    """:class:`torch_geometric.nn.GMMConv`, fused for sum and mean.

    ``sum_j sum_k g_k(e_ij) W_k x_j`` is a sum of heads whose weights are the Gaussians.
    """

    fused_by = "spmm, its Gaussians as weights of heads"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce not in ("sum", "mean"):
            why = f"aggr={self.aggr!r}: only sum and mean are fused"
        if why is None and self.separate_gaussians:
            why = "separate_gaussians=True"
        return why

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        """See :class:`torch_geometric.nn.GMMConv`."""
        if (
            type(edge_index) is Tensor
            and self._tries(x, edge_index)
            and type(edge_attr) is Tensor
            and edge_attr.dim() == 2
        ):
            x_src, x_dst, num_dst, ok = sizes(self, x, size)
            adj = None
            if ok and edge_index.layout == torch.strided and may_reorder(x_src):
                adj = graph_for(self, x_src, edge_index, num_dst)
            if (
                adj is not None
                and adj.graph is not None
                and edge_attr.shape == (edge_index.size(1), self.mu.size(1))
                and edge_attr.dtype == x_src.dtype
            ):
                return self._fused(adj, x_src, x_dst, edge_attr)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr, size)
        return stock

    def _fused(
        self, adj: Adj, x_src: Tensor, x_dst: Tensor | None, edge_attr: Tensor
    ) -> Tensor:
        kernels = self.kernel_size
        mapped = dense.linear(x_src, self.g.t()).view(-1, kernels, self.out_channels)
        weights = gaussians(edge_attr, self.mu, self.sigma)
        out = ops.spmm(adj.graph, mapped, weights, self._reduce).sum(dim=1)
        if x_dst is not None and self.root is not None:
            out = out + self.root(x_dst)
        return out if self.bias is None else out + self.bias
