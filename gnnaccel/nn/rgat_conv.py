"""RGATConv on attention between pairs of a node and a relation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn import dense
from gnnaccel.nn.attention import Attends, attention_graph, edge_features
from gnnaccel.nn.fused import is_served
from gnnaccel.nn.relations import with_relations
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.attention import attend
from gnnaccel.ops.gather import gather


class RGATConv(Attends, torch_geometric.nn.RGATConv):
    """:class:`torch_geometric.nn.RGATConv`, fused for plain additive attention.

    Each node's features are transformed once per relation, not once per edge, and a
    source of the attention is a pair of the two.
    """

    fused_by = "attention over pairs of node and relation"
    negative_slope: float
    num_relations: int
    num_bases: int | None
    num_blocks: int | None
    bias: Tensor | None

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self.attention_mode != "additive-self-attention":
            why = f"attention_mode={self.attention_mode!r}: only additive is fused"
        if why is None and self.mod is not None:
            why = f"mod={self.mod!r}: attention is not modified on the fused path"
        return why

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_type: Any = None,
        edge_attr: Any = None,
        size: Any = None,
        return_attention_weights: Any = None,
    ) -> Any:
        """See :class:`torch_geometric.nn.RGATConv`."""
        if (
            self.why_not_fused() is None
            and size is None
            and return_attention_weights is None
        ):
            out = self._fused(x, edge_index, edge_type, edge_attr)
            if out is not None:
                return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_type: OptTensor, edge_attr: OptTensor)
        return super().forward(
            x, edge_index, edge_type, edge_attr, size, return_attention_weights
        )

    def _fused(self, x: Any, edge_index: Any, edge_type: Any, edge_attr: Any) -> Any:
        if not (
            is_served(x)
            and x.dtype == self.q.dtype
            and x.dtype in (torch.float32, torch.float64)
            and type(edge_type) is Tensor
            and edge_type.dim() == 1
        ):
            return None
        adj = attention_graph(self, x, edge_index, None)
        if adj is None or adj.graph is None:
            return None
        bias = None
        if edge_attr is not None:
            bias = self._of_edges(x, edge_attr, adj.graph.num_edges)
            if bias is None:
                return None
        relations, within = self.num_relations, self.attention_mechanism
        apart = within == "within-relation"
        pairs = with_relations(adj.graph, edge_type, relations, True, apart)
        if pairs is None:
            return None
        rows = dense.linear(x, self._maps()).view(x.size(0) * relations, -1)
        maps: list[tuple[Tensor, Tensor | None]]
        maps = [(self.q.t(), None), (self.k.t(), None)]
        query, key = dense.linear_all(rows, maps)
        if not apart:
            # It depends on the relation, too, and so on the edge.
            target = adj.graph.edge_index[1]
            of_target = gather(query, target * relations + edge_type)
            bias = of_target if bias is None else bias + of_target
        value = rows.view(-1, self.heads, self.out_channels)
        inputs = Inputs(query if apart else None, key, value, bias=bias)
        if self.training and self.dropout > 0:
            ones = key.new_ones(adj.graph.num_edges, self.heads)
            inputs = inputs._replace(keep=F.dropout(ones, self.dropout))
        between = Adj(pairs, None, pairs.num_src, pairs.num_dst)
        out = attend(between, Score("sum", slope=self.negative_slope), inputs)
        if apart:
            out = out.unflatten(0, (-1, relations)).sum(1)
        out = out.flatten(1) if self.concat else out.mean(1)
        return out if self.bias is None else out + self.bias

    def _maps(self) -> Tensor:
        """What transforms a node's features for every relation, ``[R * H * C, F]``."""
        if self.num_blocks is not None:
            weight = torch.stack([torch.block_diag(*blocks) for blocks in self.weight])
        elif self.num_bases is not None:
            weight = (self.att @ self.basis.flatten(1)).view(-1, *self.basis.shape[1:])
        else:
            weight = self.weight
        return weight.transpose(1, 2).flatten(0, 1)

    def _of_edges(self, x: Tensor, edge_attr: Any, edges: int) -> Tensor | None:
        """What edge features add to the logits, ``[E, H]``."""
        if not edge_features(self.lin_edge, edge_attr, x, edges):
            return None
        wide = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        return dense.apply(self.lin_edge, wide) @ self.e
