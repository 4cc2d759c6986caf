"""RGCNConv and FastRGCNConv: one sum over all relations, one dense product."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for
from gnnaccel.nn.neighbours import aggregate_to_read
from gnnaccel.nn.relations import with_relations
from gnnaccel.ops.adj import Adj


class _Relational(Fused):
    """``forward`` of both: they have the same parameters and compute the same.

    Destinations are split into pairs with each relation: neighbours are reduced to
    ``[num_dst * R, F_in]``, and side by side, as ``[num_dst, R * F_in]``, all relations
    are one product with the weights.
    """

    fused_by = "spmm over pairs of destination and relation, one dense product"
    num_relations: int
    num_bases: int | None
    num_blocks: int | None
    in_channels_l: int
    out_channels: int
    weight: Tensor
    comp: Tensor
    root: Tensor | None
    bias: Tensor | None

    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.RGCNConv`."""
        if self.why_not_fused() is None:
            out = self._fused(x, edge_index, edge_type)
            if out is not None:
                return out
        stock: Any = super()
        result: Tensor = stock.forward(x, edge_index, edge_type)
        return result

    def _fused(self, x: Any, edge_index: Any, edge_type: Any) -> Tensor | None:
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        if not (
            isinstance(x_src, Tensor)
            and isinstance(x_dst, Tensor)
            and x_dst.dim() == 2
            and x_src.dtype == x_dst.dtype == self.weight.dtype
            and x_src.dtype in (torch.float32, torch.float64)
            and type(edge_index) is Tensor
            and type(edge_type) is Tensor
            and edge_type.dim() == 1
            and not torch.is_autocast_enabled("cpu")
        ):
            return None
        adj = graph_for(self, x_src, edge_index, x_dst.size(0))
        if adj is None or adj.graph is None:
            return None
        pairs = self._pairs(adj, edge_type)
        if pairs is None:
            return None
        neighbours = aggregate_to_read(pairs, x_src, None, self._reduce)
        weight = self.weight
        if self.num_bases is not None:
            weight = self.comp @ weight.view(self.num_bases, -1)
        if self.num_blocks is None:
            wide = neighbours.view(x_dst.size(0), -1)
            weight = weight.reshape(-1, self.out_channels)
            out = dense.linear(wide, weight.t(), self.bias)
        else:
            blocks = neighbours.view(x_dst.size(0), *weight.shape[:3])
            out = torch.einsum("nrbc,rbcd->nbd", blocks, weight).flatten(1)
            out = out if self.bias is None else out + self.bias
        if self.root is not None:
            # In place: the product made `out` for us, and nobody else holds it.
            out.add_(dense.linear(x_dst, self.root.t()))
        return out

    def _pairs(self, adj: Adj, edge_type: Tensor) -> Adj | None:
        """The graph from sources to pairs; ``None``: PyG's path is needed."""
        relations, graph = self.num_relations, adj.graph
        assert graph is not None
        found = with_relations(graph, edge_type, relations, False, True)
        if found is None:
            return None
        return Adj(found, None, adj.num_src, adj.num_dst * relations, adj.reuse)


class RGCNConv(_Relational, torch_geometric.nn.RGCNConv):
    """:class:`torch_geometric.nn.RGCNConv`, fused.

    ``root(x_i) + sum_r W_r reduce_{j in N_r(i)} x_j``.
    """

    # PyG reads the next line, by this class's name, to write its `propagate`.
    # propagate_type: (x: Tensor, edge_type_ptr: OptTensor)


class FastRGCNConv(_Relational, torch_geometric.nn.FastRGCNConv):
    """:class:`torch_geometric.nn.FastRGCNConv`, fused: the same as RGCNConv."""

    # See RGCNConv.
    # propagate_type: (x: Tensor, edge_type: OptTensor, size: Size)
