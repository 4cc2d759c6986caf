"""SignedConv on spmm."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.branches import neighbours_and_root
from gnnaccel.nn.fused import Fused, graph_for, sizes
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj


class SignedConv(Fused, torch_geometric.nn.SignedConv):
    """:class:`torch_geometric.nn.SignedConv`, fused for mean, sum, max and min."""

    fused_by = "spmm over the positive and over the negative edges"

    def forward(self, x: Any, pos_edge_index: Any, neg_edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.SignedConv`."""
        if self._tries(x, pos_edge_index) and self._tries(x, neg_edge_index):
            x_src, x_dst, num_dst, ok = sizes(self, x, None)
            ok = ok and x_dst is not None
            if ok and _is_plain(pos_edge_index) and _is_plain(neg_edge_index):
                pos = graph_for(self, x_src, pos_edge_index, num_dst)
                neg = graph_for(self, x_src, neg_edge_index, num_dst)
                if pos is not None and neg is not None:
                    combine = self._first if self.first_aggr else self._further
                    return combine(x_src, x_dst, pos, neg)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: PairTensor)
        stock: Tensor = super().forward(x, pos_edge_index, neg_edge_index)
        return stock

    def _first(self, x_src: Tensor, x_dst: Tensor, pos: Adj, neg: Adj) -> Tensor:
        outs = [
            neighbours_and_root(own, root, adj, x_src, x_dst, None, self._reduce)
            for own, root, adj in (
                (self.lin_pos_l, self.lin_pos_r, pos),
                (self.lin_neg_l, self.lin_neg_r, neg),
            )
        ]
        return torch.cat(outs, dim=-1)

    def _further(self, x_src: Tensor, x_dst: Tensor, pos: Adj, neg: Adj) -> Tensor:
        # Balanced halves come first: friends of friends, and enemies of enemies.
        half = self.in_channels
        friends = aggregate(pos, x_src, None, self._reduce)
        enemies = aggregate(neg, x_src, None, self._reduce)
        balanced = torch.cat([friends[:, :half], enemies[:, half:]], dim=-1)
        unbalanced = torch.cat([friends[:, half:], enemies[:, :half]], dim=-1)
        out_pos = dense.apply(self.lin_pos_l, balanced)
        out_neg = dense.apply(self.lin_neg_l, unbalanced)
        out_pos = out_pos + self.lin_pos_r(x_dst[:, :half])
        out_neg = out_neg + self.lin_neg_r(x_dst[:, half:])
        return torch.cat([out_pos, out_neg], dim=-1)


def _is_plain(edge_index: Any) -> bool:
    return type(edge_index) is Tensor and edge_index.layout == torch.strided
