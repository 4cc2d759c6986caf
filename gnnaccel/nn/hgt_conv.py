"""HGTConv: one attention over all types of edges."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.dense import HeteroDictLinear

from gnnaccel.cache import Memory, remember
from gnnaccel.graph import Graph
from gnnaccel.kernels import transforming
from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn import dense
from gnnaccel.nn.fused import (
    Fused,
    is_index,
    is_served,
    may_reorder,
    plain_linear,
    watched,
)
from gnnaccel.nn.hetero_linear import HeteroLinear
from gnnaccel.ops.adj import Adj, tracing
from gnnaccel.ops.attention import attend

EdgeType = tuple[str, str, str]

#: PyG's and ours.
_LINEAR = (torch_geometric.nn.HeteroLinear, HeteroLinear)


class HGTConv(Fused, torch_geometric.nn.HGTConv):
    """:class:`torch_geometric.nn.HGTConv`, fused.

    The maps of an edge type, and its prior, go into the linear layer of its sources,
    so that keys and values are one product each. All types of edges are one attention.
    """

    fused_by = "attention over all types of edges, their maps taken per node"
    _node_dims = (0,)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """See :class:`torch_geometric.nn.HGTConv`."""
        if self.why_not_fused() is None and self._serves(x_dict, edge_index_dict):
            return self._leave(x_dict, self._attend(x_dict, edge_index_dict))
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (k: Tensor, q: Tensor, v: Tensor, edge_attr: Tensor)
        return super().forward(x_dict, edge_index_dict)

    def _serves(self, x_dict: Any, edge_index_dict: Any) -> bool:
        """Whether the fused path takes this input."""
        if not (
            isinstance(x_dict, dict) and isinstance(edge_index_dict, dict) and x_dict
        ):
            return False
        known = [
            edge_type for edge_type in self.edge_types if edge_type in edge_index_dict
        ]
        first = next(iter(x_dict.values()))
        lins = self.kqv_lin.lins if type(self.kqv_lin) is HeteroDictLinear else {}
        return (
            # In any other order PyG mixes up the types' maps.
            bool(known)
            and list(edge_index_dict) == known
            and self.flow == "source_to_target"
            and not any(watched(m) for m in (self.kqv_lin, self.k_rel, self.v_rel))
            and type(self.k_rel) in _LINEAR
            and type(self.v_rel) in _LINEAR
            and all(
                key in lins
                and plain_linear(lins[key])
                and is_served(x)
                and x.dtype == first.dtype == lins[key].weight.dtype
                and x.size(1) == lins[key].weight.size(1)
                and not tracing(x)
                for key, x in x_dict.items()
            )
            and may_reorder(first)
            and not transforming(first)
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and all(
                type(edge_index) is Tensor
                and edge_index.layout == torch.strided
                and is_index(edge_index, first)
                and edge_type[0] in x_dict
                and edge_type[-1] in x_dict
                for edge_type, edge_index in edge_index_dict.items()
            )
        )

    def _attend(self, x_dict: Any, edge_index_dict: Any) -> dict[str, Tensor]:
        """What reaches the nodes of every type, ``[N, F]``."""
        queries: dict[str, Tensor] = {}
        keys: dict[EdgeType, Tensor] = {}
        values: dict[EdgeType, Tensor] = {}
        for name, lin in self.kqv_lin.lins.items():
            if name not in x_dict:
                continue
            out_of = [et for et in edge_index_dict if et[0] == name]
            key, query, value = zip(*map(_thirds, (lin.weight, lin.bias)), strict=True)
            maps = [query]
            for edge_type in out_of:
                maps.append(self._through(self.k_rel, edge_type, key, scaled=True))
                maps.append(self._through(self.v_rel, edge_type, value))
            queries[name], *rest = dense.linear_all(x_dict[name], maps)
            keys |= zip(out_of, rest[::2], strict=True)
            values |= zip(out_of, rest[1::2], strict=True)
        heads = (-1, self.heads, self.out_channels // self.heads)
        inputs = Inputs(
            torch.cat(list(queries.values())).view(heads),
            torch.cat([keys[et] for et in edge_index_dict]).view(heads),
            torch.cat([values[et] for et in edge_index_dict]).view(heads),
        )
        adj = _bipartite(edge_index_dict, keys, queries)
        score = Score("dot", scale=heads[-1] ** -0.5)
        out = attend(adj, score, inputs).flatten(1)
        sizes = [x.size(0) for x in queries.values()]
        return dict(zip(queries, out.split(sizes), strict=True))

    def _through(
        self, rel: Any, edge_type: EdgeType, linear: Any, scaled: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """A linear map and after it that of an edge type, head by head, as one."""
        weight, bias = linear
        heads, width = self.heads, self.out_channels // self.heads
        number = self.edge_types_map[edge_type]
        own = rel.weight.view(heads, len(self.edge_types), width, width)[:, number]
        if scaled:
            own = own * self.p_rel["__".join(edge_type)].view(heads, 1, 1)
        own = own.transpose(1, 2)
        both = (own @ weight.view(heads, width, -1)).flatten(0, 1)
        if bias is None:
            return both, None
        return both, (own @ bias.view(heads, width, 1)).flatten()

    def _leave(self, x_dict: Any, reached: dict[str, Tensor]) -> dict[str, Tensor]:
        """The output layers, as PyG has them."""
        received = {k: v for k, v in reached.items() if k in self.dst_node_types}
        outs = self.out_lin(
            {k: torch.nn.functional.gelu(v) for k, v in received.items()}
        )
        found = {}
        for name in received:
            out = outs[name]
            if out.size(-1) == x_dict[name].size(-1):
                alpha = self.skip[name].sigmoid()
                out = alpha * out + (1 - alpha) * x_dict[name]
            found[name] = out
        return found


def _thirds(x: Tensor | None) -> tuple[Tensor | None, ...]:
    """The parts of a linear layer's parameter that make keys, queries and values."""
    return (None, None, None) if x is None else x.chunk(3)


def _bipartite(
    edge_index_dict: dict[EdgeType, Tensor],
    sources: dict[EdgeType, Tensor],
    targets: dict[str, Tensor],
) -> Adj:
    """From the sources of all edge types, one after the other, to all nodes.

    Remembered as long as none of the ``edge_index`` changes.
    """
    num_src = [sources[edge_type].size(0) for edge_type in edge_index_dict]
    num_dst = [x.size(0) for x in targets.values()]
    size = (sum(num_src), sum(num_dst))

    def build() -> Graph:
        begin = dict(zip(targets, _starts(num_dst), strict=True))
        moved = [
            edge_index.long() + edge_index.new_tensor([[start], [begin[et[-1]]]]).long()
            for (et, edge_index), start in zip(
                edge_index_dict.items(), _starts(num_src), strict=True
            )
        ]
        return Graph.from_edge_index(torch.cat(moved, dim=1), size)

    *others, last = edge_index_dict.values()
    find = remember
    for edge_index in others:
        find = find(edge_index, "among types", Memory).remember
    key = (tuple(edge_index_dict), tuple(targets), tuple(num_src), tuple(num_dst))
    return Adj(find(last, key, build), None, *size)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
