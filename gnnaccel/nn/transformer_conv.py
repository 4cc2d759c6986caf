"""TransformerConv on attention: logits out of dot products."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn import dense
from gnnaccel.nn.attention import Attends, attention_graph, edge_features, pair_ok
from gnnaccel.nn.fused import sizes


class TransformerConv(Attends, torch_geometric.nn.TransformerConv):
    """:class:`torch_geometric.nn.TransformerConv`, fused."""

    fused_by = "attention, logits inside the kernel"

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See :class:`torch_geometric.nn.TransformerConv`."""
        if (
            not isinstance(return_attention_weights, bool)
            and self.why_not_fused() is None
        ):
            out = self._fused(x, edge_index, edge_attr)
            if out is not None:
                return out
        # PyG reads the next lines, by this class's name, to write its `propagate`.
        # propagate_type: (query: Tensor, key:Tensor, value: Tensor,
        #                  edge_attr: OptTensor)
        return super().forward(x, edge_index, edge_attr, return_attention_weights)

    def _fused(self, x: Any, edge_index: Any, edge_attr: Any) -> Tensor | None:
        x_src, x_dst, num_dst, ok = sizes(self, x, None)
        if not ok or x_dst is None or not pair_ok(x_src, x_dst):
            return None
        if (edge_attr is None) != (self.lin_edge is None):
            return None  # an error of the caller's, or edge features as they are
        if edge_attr is not None and not (
            isinstance(edge_index, Tensor)
            and edge_features(self.lin_edge, edge_attr, x_src, edge_index.size(-1))
        ):
            return None
        adj = attention_graph(self, x_src, edge_index, num_dst)
        if adj is None:
            return None
        edge: dict[str, Tensor] = {}
        if edge_attr is not None and edge_attr.dim() == 2:
            edge = self._edge(self.lin_edge, edge_attr)
        elif edge_attr is not None:
            edge = {"edge": self._by_head(self.lin_edge, edge_attr)}
        of_dst = [self.lin_query, *([self.lin_skip] if self.root_weight else [])]
        of_src = [self.lin_key, self.lin_value]
        if x_dst is x_src:
            query, *skip, key, value = dense.apply_all([*of_dst, *of_src], x_src)
        else:
            query, *skip = dense.apply_all(of_dst, x_dst)
            key, value = dense.apply_all(of_src, x_src)
        shape = (-1, self.heads, self.out_channels)
        out = self._attend(
            adj,
            Score("dot", scale=1 / math.sqrt(self.out_channels)),
            Inputs(query.view(shape), key.view(shape), value.view(shape), **edge),
        )
        if not skip:
            return out
        (root,) = skip
        if self.lin_beta is None:
            return dense.add(out, root)
        beta = self.lin_beta(torch.cat([out, root, out - root], -1)).sigmoid()
        mixed: Tensor = beta * root + (1 - beta) * out
        return mixed
