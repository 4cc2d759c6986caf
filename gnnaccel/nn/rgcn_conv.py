"""RGCNConv and FastRGCNConv: each relation's neighbours summed, mapped, added up."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for
from gnnaccel.nn.hetero_linear import Sorted, map_by_type
from gnnaccel.nn.neighbours import aggregate_to_read
from gnnaccel.nn.relations import pairs_of
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.product import spmm_sum


class _Relational(Fused):
    """``forward`` of both: they have the same parameters and compute the same.

    Neighbours are reduced for every pair of a destination and a relation that has an
    edge, ``[P, F_in]``; the pairs of a relation stand together and are mapped by its
    weight, and each destination adds up its own.
    """

    fused_by = "spmm into pairs of destination and relation, a dense product for each"
    keeps_sums = True
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
        if self._tries(x, edge_index):
            out = self._fused(x, edge_index, edge_type)
            if out is not None:
                return out
        stock: Any = super()
        result: Tensor = stock.forward(x, edge_index, edge_type)
        return result

    def _fused(self, x: Any, edge_index: Any, edge_type: Any) -> Tensor | None:
        x_src, x_dst = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
        if not (
            isinstance(x_src, Tensor)
            and isinstance(x_dst, Tensor)
            and x_dst.dim() == 2
            and x_src.dtype == x_dst.dtype == self.weight.dtype
            and x_src.dtype in (torch.float32, torch.float64)
            and type(edge_index) is Tensor
            and type(edge_type) is Tensor
            and edge_type.dim() == 1
            and edge_type.dtype in (torch.int64, torch.int32)
            and not torch.is_autocast_enabled("cpu")
        ):
            return None
        adj = graph_for(self, x_src, edge_index, x_dst.size(0))
        if adj is None or adj.graph is None:
            return None
        pairs = pairs_of(adj.graph, edge_type, self.num_relations)
        if pairs is None:
            return None
        count = pairs.bounds[-1]
        into = Adj(pairs.into, None, adj.num_src, count, adj.reuse)
        reduced = aggregate_to_read(into, x_src, None, self._reduce)
        mapped = self._mapped(reduced, Sorted(pairs.bounds, None, None))
        out = spmm_sum(Adj(pairs.out, None, count, adj.num_dst), mapped)
        # In place: the sum made `out` for us, and nobody else holds it.
        if self.root is not None:
            out.add_(dense.linear(x_dst, self.root.t(), self.bias))
        elif self.bias is not None:
            out.add_(self.bias)
        return out

    def _mapped(self, reduced: Tensor, rows: Sorted) -> Tensor:
        """The rows of each relation, by its weight."""
        weight = self.weight
        if self.num_bases is not None:
            weight = self.comp @ weight.view(self.num_bases, -1)
        if self.num_blocks is None:
            weight = weight.view(-1, self.in_channels_l, self.out_channels)
            return map_by_type(reduced, weight, None, rows)
        counts = [part.stop - part.start for part in rows.parts()]
        blocks = reduced.unflatten(1, weight.shape[1:3]).split(counts)
        return torch.cat(
            [
                torch.einsum("pbc,bcd->pbd", block, each).flatten(1)
                for block, each in zip(blocks, weight, strict=True)
            ]
        )


class RGCNConv(_Relational, torch_geometric.nn.RGCNConv):
    """:class:`torch_geometric.nn.RGCNConv`, fused.

    ``root(x_i) + sum_r W_r reduce_{j in N_r(i)} x_j``.
    """

    # PyG reads the next line, by this class's name, to write its `propagate`.
    # propagate_type: (x: Tensor, edge_type_ptr: OptTensor)


class FastRGCNConv(_Relational, torch_geometric.nn.FastRGCNConv):
    """:class:`torch_geometric.nn.FastRGCNConv`, fused: the same as RGCNConv."""

    # See RGCNConv.
    # propagate_type: (x: Tensor, edge_type: OptTensor)
