"""HEATConv with its logits and values made per node, not per edge."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.attention import Attends, attention_graph, edge_features
from gnnaccel.nn.fused import is_served, may_reorder, plain_linear, watched
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.product import spmm_sum
from gnnaccel.ops.softmax import edge_softmax


class HEATConv(Attends, torch_geometric.nn.HEATConv):
    """:class:`torch_geometric.nn.HEATConv`, fused.

    Both linear layers on what an edge and its ends have side by side are sums over
    those: what belongs to a node is made once per node.
    """

    fused_by = "edge_softmax and spmm, its linear layers per node"
    negative_slope: float
    root_weight: bool

    def forward(
        self,
        x: Any,
        edge_index: Any,
        node_type: Any,
        edge_type: Any,
        edge_attr: Any = None,
    ) -> Tensor:
        """See :class:`torch_geometric.nn.HEATConv`."""
        if self.why_not_fused() is None and self._serves(x, edge_type, edge_attr):
            adj = attention_graph(self, x, edge_index, None)
            if adj is not None and edge_attr.size(0) == edge_index.size(1):
                h = self.hetero_lin(x, node_type)
                out = self._attended(adj, h, edge_type, edge_attr)
                if self.concat:
                    out = out + h.unsqueeze(1) if self.root_weight else out
                    return out.flatten(1)
                out = out.mean(1)
                return out + h if self.root_weight else out
        # PyG reads the next lines, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_type_emb: Tensor,
        #                  edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, node_type, edge_type, edge_attr)
        return stock

    def _serves(self, x: Any, edge_type: Any, edge_attr: Any) -> bool:
        """Whether the fused path takes this input."""
        return (
            is_served(x)
            and may_reorder(x)
            and all(plain_linear(m) for m in (self.att, self.lin, self.edge_attr_emb))
            and not watched(self.edge_type_emb)
            and x.dtype == self.att.weight.dtype
            and type(edge_type) is Tensor
            and isinstance(edge_attr, Tensor)
            and edge_attr.dim() == 2
            and edge_features(self.edge_attr_emb, edge_attr, x, edge_type.size(0))
        )

    def _attended(
        self, adj: Adj, h: Tensor, edge_type: Tensor, edge_attr: Tensor
    ) -> Tensor:
        """``[N, H, C]`` of the nodes' transformed features ``[N, C]``."""
        assert adj.graph is not None
        slope, width = self.negative_slope, h.size(1)
        source, target = adj.graph.edge_index
        kinds = F.leaky_relu(self.edge_type_emb.weight, slope)
        own = F.leaky_relu(dense.apply(self.edge_attr_emb, edge_attr), slope)
        parts = [width, width, kinds.size(1), own.size(1)]
        of_target, of_source, of_kind, of_own = self.att.weight.split(parts, dim=1)
        near, far = dense.linear_all(h, [(of_target, None), (of_source, None)])
        logits = gather(far, source) + gather(near, target)
        logits = logits + gather(kinds @ of_kind.t(), edge_type)
        logits = logits + own @ of_own.t()
        shares = edge_softmax(adj.graph, F.leaky_relu(logits, slope))
        # Drawn as PyG draws it: in the order of the edges.
        shares = F.dropout(shares, p=self.dropout, training=self.training)
        of_row, of_edge = self.lin.weight.split([width, own.size(1)], dim=1)
        rows = dense.linear(h, of_row, self.lin.bias).unsqueeze(1)
        out = spmm_sum(adj, rows.repeat(1, self.heads, 1), shares)
        # The edges' own features are summed as narrow as they are.
        weighted = shares.unsqueeze(-1) * own.unsqueeze(1)
        return out + scatter(weighted, target, adj.num_dst) @ of_edge.t()
