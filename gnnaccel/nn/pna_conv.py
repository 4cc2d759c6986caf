"""PNAConv with its messages taken per node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.aggr import (
    DegreeScalerAggregation,
    MultiAggregation,
    StdAggregation,
    VarAggregation,
)

from gnnaccel.nn import dense, sequence
from gnnaccel.nn.fused import (
    REDUCE_OF,
    Fused,
    graph_for,
    may_reorder,
    plain_linear,
    watched,
)
from gnnaccel.nn.pairwise import reduce_all_sums_of_ends
from gnnaccel.nn.scaled import map_scaled
from gnnaccel.ops.adj import Adj


class PNAConv(Fused, torch_geometric.nn.PNAConv):
    """:class:`torch_geometric.nn.PNAConv`, fused without edge features.

    Its messages are a linear layer on ``[x_i, x_j]``, a sum of two of one end each; all
    its aggregations of them are sparse products.
    """

    graph_costs = 1 / 4
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
        first, rest = sequence.first_linear(network)
        return None if rest else first

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.PNAConv`."""
        if edge_attr is None and self._tries(x, edge_index):
            out = self._fused(x, edge_index)
            if out is not None:
                return out
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr)
        return stock

    def _fused(self, x: Any, edge_index: Any) -> Tensor | None:
        if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
            return None  # the tie rules of sparse products differ from those of scatter
        parts = self._parts()
        assert parts is not None
        adj = graph_for(self, x, edge_index, None)
        if adj is None or adj.graph is None or not may_reorder(x):
            return None
        if x.dtype != self.lin.weight.dtype or x.size(1) != self.in_channels:
            return None
        reductions = [_KINDS[type(part)] for part in parts]
        scale = self._scales(adj.graph.in_degree.to(x.dtype).unsqueeze(-1))
        outs = []
        for t, network in enumerate(self.pre_nns):
            own = x
            if self.divide_input:
                own = x[:, t * self.F_in : (t + 1) * self.F_in].contiguous()
            before = self._first(network)
            after, rest = sequence.first_linear(self.post_nns[t])
            if after is None:
                rest = [self.post_nns[t]]
            elif self.towers == 1 and not rest and plain_linear(self.lin):
                # Two linear layers are one.
                return _tower(
                    before, _one(after, self.lin), own, adj, reductions, scale
                )
            out = _tower(before, after, own, adj, reductions, scale)
            outs.append(sequence.through(rest, out))
        return dense.apply(self.lin, torch.cat(outs, dim=1))

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


class _Map(NamedTuple):
    """A linear layer's ``[F', F]`` and ``[F']`` or ``None``."""

    weight: Tensor
    bias: Tensor | None


def _one(first: Any, second: Any) -> _Map:
    """Two linear layers, one after the other, as one."""
    bias = second.bias
    if first.bias is not None:
        bias = F.linear(first.bias, second.weight, bias)
    return _Map(second.weight @ first.weight, bias)


def _tower(
    before: Any,
    after: Any,
    x: Tensor,
    adj: Adj,
    reductions: list[str],
    scale: list[Tensor | None],
) -> Tensor:
    """``after([x, s_1 r, s_2 r, ...])`` of the reductions ``r`` of all messages.

    Args:
        before: The linear layer on ``[x_i, x_j]`` that makes messages.
        after: A linear layer; ``None``: what stands side by side is returned.
        x: ``[N, F]``.
        adj: The graph.
        reductions: Their names.
        scale: ``[N, 1]`` or ``None`` each.
    """
    of_target, of_source = before.weight.chunk(2, dim=1)
    maps = [(of_source, None), (of_target, before.bias)]
    if after is None:
        y, z = dense.linear_all(x, maps)
        found = torch.cat(reduce_all_sums_of_ends(adj, y, z, reductions), dim=-1)
        return torch.cat([x, *(found if s is None else found * s for s in scale)], -1)
    of_own, of_found = after.weight.tensor_split([x.size(1)], dim=1)
    y, z, own = dense.linear_all(x, [*maps, (of_own, after.bias)])
    parts = reduce_all_sums_of_ends(adj, y, z, reductions)
    # In place: nobody else holds what came of them.
    return map_scaled(parts, of_found, scale).add_(own)


#: The reductions, by the aggregation that asks for them.
_KINDS: dict[type, str] = {**REDUCE_OF, VarAggregation: "var", StdAggregation: "std"}
