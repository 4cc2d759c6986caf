"""NNConv without a matrix per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel import ops
from gnnaccel.nn import sequence
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, plain_linear, sizes
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj

#: Features of an edge, for each output column, up to which rows times them are smaller
#: than its matrix.
_MOST = 4


class NNConv(Fused, torch_geometric.nn.NNConv):
    """:class:`torch_geometric.nn.NNConv`, fused for sum and mean.

    Where the network of the edges ends in a linear map ``W h + b``, a message is
    ``sum_d h_d (x_j W_d) + x_j b``: the sums of ``h_d x_j`` come first, and after them
    the map, once per node.
    """

    graph_costs = 1 / 16
    fused_by = "spmm of rows times the edges' features, the last map after it"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce not in ("sum", "mean"):
            why = f"aggr={self.aggr!r}: only sum and mean are fused"
        if why is None and self._steps() is None:
            why = "its network does not begin and end with a plain linear layer"
        return why

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        """See :class:`torch_geometric.nn.NNConv`."""
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
                and edge_attr.size(0) == edge_index.size(1)
                and edge_attr.dtype == x_src.dtype
                and x_src.size(1) == self.in_channels_l
            ):
                out = self._summed(adj, x_src, edge_attr)
                if x_dst is not None and self.root_weight:
                    out = out + self.lin(x_dst)
                return out if self.bias is None else out + self.bias
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr, size)
        return stock

    def _steps(self) -> list[Any] | None:
        """What the network calls one after the other, the last one a linear layer."""
        first, rest = sequence.first_linear(self.nn)
        steps = [first, *rest]
        last = steps[-1]
        if (
            first is None
            or not plain_linear(last)
            or last.weight.size(1) > _MOST * self.out_channels
        ):
            return None
        return steps

    def _summed(self, adj: Adj, x: Tensor, edge_attr: Tensor) -> Tensor:
        steps = self._steps()
        assert steps is not None
        last = steps[-1]
        edge_attr = sequence.through(steps[:-1], edge_attr, owned=False)
        depth = edge_attr.size(1)
        fan_in, fan_out = self.in_channels_l, self.out_channels
        rows = x.unsqueeze(1).expand(-1, depth, -1)
        summed = ops.spmm(adj.graph, rows, edge_attr, self._reduce)
        matrix = last.weight.t().reshape(depth * fan_in, fan_out)
        out = summed.flatten(1) @ matrix
        if last.bias is None:
            return out
        plain = aggregate(adj, x, None, self._reduce)
        return out + plain @ last.bias.view(fan_in, fan_out)
