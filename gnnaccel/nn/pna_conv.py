"""PNAConv with its messages taken per node."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.aggr import (
    DegreeScalerAggregation,
    MultiAggregation,
    StdAggregation,
    VarAggregation,
)

from gnnaccel.nn import dense
from gnnaccel.nn.fused import REDUCE_OF, Fused, graph_for, may_reorder, watched
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.pairwise import ends, reduce_sum_of_ends
from gnnaccel.ops.adj import Adj


class PNAConv(Fused, torch_geometric.nn.PNAConv):
    """:class:`torch_geometric.nn.PNAConv`, fused without edge features.

    Its messages are a linear layer on ``[x_i, x_j]``, a sum of two of one end each; all
    its aggregations of them are sparse products.
    """

    fused_by = "its linear messages per node, all aggregations as sparse products"

    def _why_not_aggregated(self) -> str | None:
        scaled = self.aggr_module
        if type(scaled) is not DegreeScalerAggregation or watched(scaled):
            return "its aggregation was replaced or is hooked"
        if self._parts() is None:
            return "only sum, mean, max, min, var and std are fused"
        if self.edge_dim is not None:
            return "it takes edge features"
        if any(self._first(network) is None for network in self.pre_nns):
            return "its messages are no single linear layer"
        return None

    @staticmethod
    def _first(network: Any) -> Any:
        first, rest = dense.first_linear(network)
        return None if rest else first

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.PNAConv`."""
        if edge_attr is None and self.why_not_fused() is None:
            out = self._fused(x, edge_index)
            if out is not None:
                return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr)
        return stock

    def _fused(self, x: Any, edge_index: Any) -> Tensor | None:
        if type(edge_index) is not Tensor:
            return None
        parts = self._parts()
        assert parts is not None
        adj = graph_for(self, x, edge_index, None)
        if adj is None or adj.graph is None or not may_reorder(x):
            return None
        if x.dtype != self.lin.weight.dtype or x.size(1) != self.in_channels:
            return None
        scale = self._scales(adj.graph.in_degree.to(x.dtype).unsqueeze(-1))
        outs = []
        for t, network in enumerate(self.pre_nns):
            own = x
            if self.divide_input:
                own = x[:, t * self.F_in : (t + 1) * self.F_in].contiguous()
            y, z = ends(self._first(network), own, own)
            found = torch.cat([_reduced(adj, y, z, part) for part in parts], dim=-1)
            outs.append(_post(self.post_nns[t], own, found, scale))
        result: Tensor = self.lin(torch.cat(outs, dim=1))
        return result

    def _parts(self) -> list[Any] | None:
        """The aggregations; ``None`` if one of them is of another kind."""
        multi: Any = self.aggr_module.aggr
        parts: list[Any] = [multi]
        if type(multi) is MultiAggregation:
            if multi.mode != "cat" or watched(multi):
                return None
            parts = list(multi.aggrs)
        for part in parts:
            if type(part) not in _KINDS or watched(part):
                return None
            if type(part) is StdAggregation and watched(part.var_aggr):
                return None
            variance = part.var_aggr if type(part) is StdAggregation else part
            if getattr(variance, "semi_grad", False):
                return None
        return parts

    def _scales(self, degree: Tensor) -> list[Tensor | None]:
        """Factors ``[N, 1]`` as DegreeScalerAggregation makes them; ``None`` for 1."""
        scaled: Any = self.aggr_module
        linear, log = scaled.avg_deg_lin, scaled.avg_deg_log
        some = degree.clamp(min=1)
        makers = {
            "identity": lambda: None,
            "amplification": lambda: torch.log(degree + 1) / log,
            "attenuation": lambda: log / torch.log(some + 1),
            "linear": lambda: degree / linear,
            "inverse_linear": lambda: linear / some,
        }
        return [makers[name]() for name in scaled.scaler]


def _post(
    network: Any, own: Tensor, found: Tensor, scale: list[Tensor | None]
) -> Tensor:
    """``network([own, s_1 found, s_2 found, ...])``.

    A scale per row may wait until the linear layer has made few columns of many.
    """
    first, rest = dense.first_linear(network)
    if first is None:
        scaled = [found if s is None else found * s for s in scale]
        whole: Tensor = network(torch.cat([own, *scaled], dim=-1))
        return whole
    sizes = [own.size(1)] + [found.size(1)] * len(scale)
    weights = first.weight.split(sizes, dim=1)
    out = dense.linear(own, weights[0], first.bias)
    parts = dense.linear_all(found, [(weight, None) for weight in weights[1:]])
    for s, part in zip(scale, parts, strict=True):
        # In place: nobody else holds what the layer made.
        out = out.add_(part) if s is None else out.addcmul_(part, s)
    for module in rest:
        out = module(out)
    return out


_KINDS = (*REDUCE_OF, VarAggregation, StdAggregation)


def _reduced(adj: Adj, y: Tensor, z: Tensor, part: Any) -> Tensor:
    if type(part) in REDUCE_OF:
        return reduce_sum_of_ends(adj, y, z, REDUCE_OF[type(part)])
    # What belongs to the destination shifts all its messages: no variance comes of it.
    mean = aggregate(adj, y, None, "mean")
    variance = aggregate(adj, y * y, None, "mean").addcmul_(mean, mean, value=-1)
    if type(part) is VarAggregation:
        return variance
    # As StdAggregation does.
    out = variance.clamp(min=1e-5).sqrt()
    return out.masked_fill(out <= 1e-5**0.5, 0.0)
