"""GATv2Conv on attention: logits out of both ends' features."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn import dense
from gnnaccel.nn.attention import (
    Attends,
    attention_graph,
    edge_features,
    looped_attributes,
    pair_ok,
)
from gnnaccel.nn.fused import sizes


class GATv2Conv(Attends, torch_geometric.nn.GATv2Conv):
    """:class:`torch_geometric.nn.GATv2Conv`, fused.

    Logits, softmax and sum are one kernel that reads each neighbour's features once.
    """

    fused_by = "attention, logits inside the kernel"

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See :class:`torch_geometric.nn.GATv2Conv`."""
        if not return_attention_weights and self.why_not_fused() is None:
            out = self._fused(x, edge_index, edge_attr)
            if out is not None:
                return out
        # PyG reads the next lines, by this class's name, to write its methods.
        # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
        # propagate_type: (x: PairTensor, alpha: Tensor)
        return super().forward(x, edge_index, edge_attr, return_attention_weights)

    def _fused(self, x: Any, edge_index: Any, edge_attr: Any) -> Tensor | None:
        x_src, x_dst, num_dst, ok = sizes(self, x, None)
        if not ok or x_dst is None or not pair_ok(x_src, x_dst):
            return None
        if edge_attr is not None and not (
            isinstance(edge_index, Tensor)
            and edge_features(self.lin_edge, edge_attr, x_src, edge_index.size(-1))
        ):
            return None
        loops = min(x_src.size(0), x_dst.size(0)) if self.add_self_loops else None
        adj = attention_graph(self, x_src, edge_index, num_dst, loops)
        if adj is None:
            return None
        if isinstance(x, Tensor) and self.share_weights:
            key = query = self._by_head(self.lin_l, x_src)
        elif x_dst is x_src:
            key, query = self._all_by_head([self.lin_l, self.lin_r], x_src)
        else:
            key = self._by_head(self.lin_l, x_src)
            query = self._by_head(self.lin_r, x_dst)
        edge: dict[str, Tensor] = {}
        if edge_attr is not None:
            if loops is not None:
                edge_attr = looped_attributes(
                    edge_index, edge_attr, loops, self.fill_value
                )
            if edge_attr.dim() == 1:
                edge_attr = edge_attr.unsqueeze(1)
            edge = self._edge(self.lin_edge, edge_attr)
        out = self._attend(
            adj,
            Score("mlp", self.negative_slope),
            Inputs(query, key, att=self.att[0], **edge),
        )
        if self.res is not None:
            out = dense.add(out, dense.apply(self.res, x_dst))
        return out if self.bias is None else dense.add(out, self.bias)
