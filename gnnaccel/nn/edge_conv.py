"""EdgeConv with the outer linear layers of its network taken per node."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import split
from gnnaccel.nn.fused import Fused, graph_for, sizes
from gnnaccel.nn.networks import Part
from gnnaccel.ops.gather import gather, scatter

#: What stands side by side in the input of the network.
_PARTS = (Part("x_i"), Part("x_j", "x_i"))


class EdgeConv(Fused, torch_geometric.nn.EdgeConv):
    """:class:`torch_geometric.nn.EdgeConv`, fused.

    See :mod:`gnnaccel.nn.split` for what becomes of its network. Where that begins with
    no linear layer, rows are lifted and messages reduced by our operators.
    """

    pays_small = False
    fused_by = (
        "the linear layers of its network per node, not per edge, where they may be"
    )

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.EdgeConv`."""
        out = self._fused(x, edge_index) if self._tries(x, edge_index) else None
        if out is not None:
            return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: PairTensor)
        stock: Tensor = super().forward(x, edge_index)
        return stock

    def _fused(self, x: Any, edge_index: Any) -> Tensor | None:
        x_src, x_dst, num_dst, ok = sizes(self, x, None)
        if not ok or type(edge_index) is not Tensor or not isinstance(x_dst, Tensor):
            return None
        adj = graph_for(self, x_src, edge_index, num_dst)
        if adj is None or adj.graph is None:
            return None
        source, target = edge_index
        if self.flow == "target_to_source":
            source, target = target, source

        def aggregate(messages: Tensor) -> Tensor:
            if messages.dim() == 2 and messages.size(0) == target.size(0):
                return scatter(messages, target, adj.num_dst, self._reduce)
            stock: Tensor = self.aggregate(messages, target, None, adj.num_dst)
            return stock

        found = split.split(self.nn, _PARTS, {"x_i": x_dst, "x_j": x_src}, {})
        if found is None:
            x_i, x_j = gather(x_dst, target), gather(x_src, source)
            return aggregate(self.message(x_i, x_j))
        index = {"_i": target, "_j": source}
        return split.reduced(found, index, self._reduce, lambda: adj, aggregate)
