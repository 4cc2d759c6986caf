"""GATConv on attention: logits out of one number per node and head."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.attention import Score
from gnnaccel.nn import dense
from gnnaccel.nn.attention import (
    Attends,
    attention_graph,
    edge_features,
    looped_attributes,
    pair_ok,
)
from gnnaccel.nn.fused import may_reorder, plain_linear, sizes
from gnnaccel.ops.attention import Nodes, attend_nodes


class GATConv(Attends, torch_geometric.nn.GATConv):
    """:class:`torch_geometric.nn.GATConv`, fused.

    Softmax and sum are one kernel over ``[E, H]`` shares. Self-loops are added once per
    ``edge_index``, not at every call.
    """

    fused_by = "attention, self-loops added once per edge_index"

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See :class:`torch_geometric.nn.GATConv`."""
        if not return_attention_weights and self.why_not_fused() is None:
            out = self._fused(x, edge_index, edge_attr, size)
            if out is not None:
                return out
        # PyG reads the next lines, by this class's name, to write its methods.
        # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor)
        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        return super().forward(x, edge_index, edge_attr, size, return_attention_weights)

    def _fused(
        self, x: Any, edge_index: Any, edge_attr: Any, size: Any
    ) -> Tensor | None:
        x_src, x_dst, num_dst, ok = sizes(self, x, size)
        if not ok or not pair_ok(x_src, x_dst) or (size is not None and None in size):
            return None
        if isinstance(edge_index, Tensor) and edge_attr is not None:
            if not edge_features(self, edge_attr, x_src, edge_index.size(-1)):
                return None
        loops = None
        if self.add_self_loops:
            loops = x_src.size(0) if num_dst is None else min(x_src.size(0), num_dst)
        adj = attention_graph(self, x_src, edge_index, num_dst, loops)
        if adj is None:
            return None
        shared = self.lin is not None
        h_src = self._by_head(self.lin if shared else self.lin_src, x_src)
        h_dst: Tensor | None = h_src
        if x_dst is None:
            h_dst = None
        elif not (shared and x_dst is x_src):
            h_dst = self._by_head(self.lin if shared else self.lin_dst, x_dst)
        bias = None
        if edge_attr is not None and self.lin_edge is not None:
            if loops is not None:
                edge_attr = looped_attributes(
                    edge_index, edge_attr, loops, self.fill_value
                )
            bias = self._edge_logits(edge_attr)
        nodes = Nodes(
            h_src,
            self.att_src[0],
            None if h_dst is h_src else h_dst,
            None if h_dst is None else self.att_dst[0],
            bias,
            self._keep(adj, h_src),
        )
        out = self._joined(attend_nodes(adj, Score("sum", self.negative_slope), nodes))
        if self.res is not None and x_dst is not None:
            out = dense.add(out, dense.apply(self.res, x_dst))
        return out if self.bias is None else dense.add(out, self.bias)

    def _edge_logits(self, edge_attr: Tensor) -> Tensor:
        """The part of the edges in the logits, ``[E, H]``."""
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.unsqueeze(1)
        assert self.lin_edge is not None and self.att_edge is not None
        if may_reorder(edge_attr) and plain_linear(self.lin_edge):
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
            weight = self.att_edge[0].unsqueeze(1) @ weight
            return dense.linear(edge_attr, weight.squeeze(1))
        return (self._by_head(self.lin_edge, edge_attr) * self.att_edge).sum(-1)
