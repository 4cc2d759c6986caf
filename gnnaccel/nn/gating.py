"""PyG's layers whose messages are gated: ``propagate`` sums them unwritten.

Everything else of these layers is theirs: what they do before and after, their errors,
and, where somebody wants to see messages or gives a function that we do not know, the
messages, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import aggr

from gnnaccel import kernels
from gnnaccel.kernels.gate import Gates
from gnnaccel.nn import dense
from gnnaccel.nn.film_relations import summed_relations
from gnnaccel.nn.fused import (
    REDUCE_OF,
    has_own_propagate,
    is_served,
    may_reorder,
    plain_linear,
    watched,
)
from gnnaccel.nn.joined import joined_sum, shallow
from gnnaccel.nn.lifting import made_from
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.reading import else_stock, of_methods
from gnnaccel.nn.stand_in import stock_of
from gnnaccel.nn.summing import Summing, found_graph
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.gate import Kind, gated_sum
from gnnaccel.ops.gather import gather
from gnnaccel.ops.message import SHALLOW, mean_of


class Gated(Summing):
    """Mixed in where a layer of PyG's has a message that a kernel knows."""

    done_by = "gated_sum: its messages inside the sum"
    pays_small = False
    #: The arguments of the message.
    _names: frozenset[str]
    #: Which of them are rows, lifted to edges; the first one at the source.
    _rows: tuple[str, ...]

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        if (
            self._found(gate_of) is None
            or kwargs.keys() - self._names
            or self._looked_into(edge_index)
        ):
            return None
        layer: Any = self
        known = layer._check_input(edge_index, size)
        rows = [self._end(name, known, kwargs) for name in self._rows]
        x = rows[0]
        if x is None or not _unwritten(x):
            return None
        if any(row is None or row.dtype != x.dtype for row in rows):
            return None
        edge = kwargs.get("edge_attr")
        if edge is not None and not (
            type(edge) is Tensor
            and edge.layout == torch.strided
            and edge.dim() == 2
            and edge.size(0) == edge_index.size(1)
            and edge.dtype == x.dtype
            and edge.device == x.device
        ):
            return None
        # The nodes that messages go to: as many as is known, else as many as send them.
        i = int(self.flow == "source_to_target")
        num_dst = known[1 - i] if known[i] is None else known[i]
        adj = found_graph(self, x, edge_index, num_dst, None)
        return None if adj is None else self._gated(adj, rows, edge, kwargs)

    def _lifted(self) -> str:
        return self._rows[0][:-2]

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The reduced messages; ``None`` where the layer's own path is needed.

        Args:
            adj: The graph.
            rows: What ``_rows`` names, ``[N, *]`` each.
            edge: ``[E, D]`` or ``None``.
            kwargs: What ``propagate`` was given.
        """
        raise NotImplementedError

    @property
    def _aggregation(self) -> Any:
        kind = type(self.aggr_module)
        return made_from(kind) or kind

    def _reduced(self, adj: Adj, kind: str, gates: Gates) -> Tensor | None:
        """The sum or mean of gated messages, if these fit each other."""
        reduce = REDUCE_OF.get(self._aggregation)
        tensors = (gates.x, gates.y, gates.x_dst, gates.y_dst)
        columns = {t.size(1) for t in tensors if t is not None}
        if reduce not in ("sum", "mean") or len(columns) != 1:
            return None
        out = gated_sum(adj, Kind(kind), gates)
        return mean_of(adj, out) if reduce == "mean" else out


class ResGated(Gated):
    """Mixed into ResGatedGraphConv: ``sigmoid(k_i + q_j) * v_j``."""

    _names = frozenset(("k", "q", "v", "edge_attr"))
    _rows = ("q_j", "v_j", "k_i")
    act: Any
    edge_dim: int | None
    lin_key: Any
    lin_query: Any
    lin_value: Any

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        query, value, key = rows
        if not _is(self.act, torch.nn.Sigmoid, (torch.sigmoid, F.sigmoid)) or (
            edge is None
        ) != (self.edge_dim is None):
            return None
        if edge is None:
            return self._reduced(adj, "sigmoid", Gates(query, value, key))
        linears = (self.lin_query, self.lin_value, self.lin_key)
        blocks = [_blocks(each, x, edge) for each, x in zip(linears, rows, strict=True)]
        if query is not value or None in blocks:
            return None
        (q, q_edge), (v, v_edge), (k, k_edge) = blocks  # type: ignore[misc]
        # Both ends map the edge's features; the gate sees the sum.
        edge, map_ = _of_edges(edge, torch.cat([q_edge + k_edge, v_edge]))
        sources, targets = _at_both(
            (query, torch.cat([q, v]), _biases(self.lin_query, self.lin_value)),
            (key, k, self.lin_key.bias),
        )
        x, y = sources.chunk(2, dim=1)
        return self._reduced(adj, "sigmoid", Gates(x, y, targets, None, edge, map_))


class Crystal(Gated):
    """Mixed into CGConv: ``sigmoid(lin_f(z)) * softplus(lin_s(z))``."""

    _names = frozenset(("x", "edge_attr"))
    _rows = ("x_j", "x_i")
    lin_f: Any
    lin_s: Any

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        x_j, x_i = rows
        parts = [x_i, x_j] if edge is None else [x_i, x_j, edge]
        found = [_blocks(linear, *parts) for linear in (self.lin_f, self.lin_s)]
        if None in found:
            return None
        biases = _biases(self.lin_f, self.lin_s)
        of_i, of_j, *of_edge = map(torch.cat, zip(*found, strict=True))
        sources, targets = _at_both((x_j, of_j, None), (x_i, of_i, biases))
        map_ = None
        if edge is not None:
            edge, map_ = _of_edges(edge, of_edge[0])
        x, y = sources.chunk(2, dim=1)
        x_dst, y_dst = targets.chunk(2, dim=1)
        return self._reduced(adj, "crystal", Gates(x, y, x_dst, y_dst, edge, map_))


class Modulated(Gated):
    """Mixed into FiLMConv: ``relu(gamma_i * x_j + beta_i)``."""

    _names = frozenset(("x", "beta", "gamma"))
    _rows = ("x_j", "beta_i", "gamma_i")
    act: Any
    film_skip: Any
    lin_skip: Any
    num_relations: int
    out_channels: int
    _stock_forward: Any

    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
        """See :class:`torch_geometric.nn.FiLMConv`."""
        x_src, x_dst = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, x)
        summed = self._relations(x_src, x_dst, edge_index, edge_type)
        if summed is None:
            stock: Tensor = self._stock_forward(x, edge_index, edge_type)
            return stock
        beta, gamma = self.film_skip(x_dst).split(self.out_channels, dim=-1)
        out: Tensor = self.act(gamma * self.lin_skip(x_dst) + beta) + summed
        return out

    def _relations(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_type: Any
    ) -> Tensor | None:
        """What several relations add up to, if that can be done at once."""
        cls: Any = type(self)
        if (
            self.num_relations <= 1
            or stock_of(cls).forward is not pyg.FiLMConv.forward
            or has_own_propagate(self)
            or not self._pays(edge_index, {"x": x_src})
            or self._found(gate_of) is None
            or self._looked_into(edge_index)
            or not (is_served(x_src) and is_served(x_dst) and _unwritten(x_src))
            or type(edge_type) is not Tensor
            or edge_type.dtype not in (torch.int64, torch.int32)
            or edge_type.shape != edge_index.shape[1:]
            or not _is(self.act, torch.nn.ReLU, (torch.relu, F.relu))
        ):
            return None
        reduce = REDUCE_OF.get(self._aggregation)
        if reduce not in ("sum", "mean"):
            return None
        adj = found_graph(self, x_src, edge_index, x_dst.size(0), None)
        if adj is None:
            return None
        return summed_relations(self, adj, x_src, x_dst, edge_type, reduce)

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        if not _is(self.act, torch.nn.ReLU, (torch.relu, F.relu)):
            return None
        x, beta, gamma = rows
        return self._reduced(adj, "film", Gates(x, None, beta, gamma))


class Softened(Gated):
    """Mixed into GENConv: ``relu(x_j + e) + eps``, most often by a softmax of them."""

    _names = frozenset(("x", "edge_attr"))
    _rows = ("x_j",)
    eps: float

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        (x,) = rows
        through = None if edge is None else getattr(self, "lin_edge", None)
        if through is not None:
            if not plain_linear(through) or through.weight.size(0) != x.size(1):
                return None
        elif edge is not None and edge.size(1) != x.size(1):
            return None
        kind: Any = self._aggregation
        if kind is aggr.SoftmaxAggregation:
            return self._softened(adj, x, edge, through)
        reduce = REDUCE_OF.get(kind)
        if edge is None:
            messages = x.relu() + self.eps
            if kind is aggr.PowerMeanAggregation:
                return _power_mean(self.aggr_module, adj, messages)
            return None if reduce is None else aggregate(adj, messages, None, reduce)
        if reduce not in ("sum", "mean"):
            return None
        out = joined_sum(adj, "add_relu", x, edge, through, None, reduce)
        assert adj.graph is not None
        counts = adj.graph.in_degree.unsqueeze(-1)
        if reduce == "mean":
            counts = counts.clamp(max=1)
        return torch.add(out, counts.to(out.dtype), alpha=self.eps)

    def _softened(
        self, adj: Adj, x: Tensor, edge: Tensor | None, through: Any
    ) -> Tensor | None:
        module: Any = self.aggr_module
        t = module.t
        if not isinstance(t, Tensor):
            t = x.new_full((x.size(1),), float(t))
        elif t.numel() in (1, x.size(1)) and t.dtype == x.dtype:
            t = t.reshape(-1).expand(x.size(1))
        else:
            return None
        map_ = None
        if edge is not None and through is not None:
            if shallow(through, x, edge):
                map_ = through.weight.t()
                if through.bias is not None:
                    map_ = torch.cat([map_, through.bias.unsqueeze(0)])
            else:
                edge = dense.apply(through, edge)
        constant = module.semi_grad and not module.learn
        kind = Kind("softmax", float(self.eps), constant)
        return gated_sum(adj, kind, Gates(x, edge=edge, map=map_, t=t))


class Frequencies(Gated):
    """Mixed into FAConv: ``tanh(alpha_i + alpha_j)``, a weight of rows."""

    done_by = "spmm: its message is a row times a weight"
    graph_costs = 2
    _names = frozenset(("x", "alpha", "edge_weight"))
    _rows = ("x_j", "alpha_j", "alpha_i")
    dropout: float
    training: bool
    _alpha: Tensor | None

    def _gated(
        self, adj: Adj, rows: list[Any], edge: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        x, alpha_j, alpha_i = rows
        weight = kwargs.get("edge_weight")
        assert adj.graph is not None
        reduce = REDUCE_OF.get(self._aggregation)
        if (
            reduce is None
            or type(weight) is not Tensor
            or weight.shape != (adj.graph.num_edges,)
            or weight.dtype != x.dtype
            or alpha_j.size(1) != 1
            or alpha_i.size(1) != 1
        ):
            return None
        source, target = adj.graph.edge_index
        alpha = gather(alpha_j, source) + gather(alpha_i, target)
        alpha = alpha.tanh().squeeze(-1)
        self._alpha = alpha
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return aggregate(adj, x, alpha * weight, reduce)


_GATES: dict[Any, type[Gated]] = {
    pyg.CGConv.message: Crystal,
    pyg.FAConv.message: Frequencies,
    pyg.FiLMConv.message: Modulated,
    pyg.GENConv.message: Softened,
    pyg.ResGatedGraphConv.message: ResGated,
}


@of_methods
def gate_of(cls: Any) -> type[Gated] | None:
    """What is to be mixed into a message passing class with one of PyG's messages.

    Args:
        cls: Any message passing class.
    """
    return _GATES.get(cls.message) if else_stock(cls) else None


def _unwritten(x: Tensor) -> bool:
    """Whether messages of such rows need not be written down.

    They need not by the native kernels only; by the others they are, as in PyG.
    """
    return may_reorder(x) and kernels.pick_for(x) is kernels.native


def _is(act: Any, module: type, functions: tuple[Any, ...]) -> bool:
    """Whether calling ``act`` is calling one of ``functions``, and nothing else."""
    if type(act) is module:
        return not watched(act)
    return any(act is function for function in functions)


def _blocks(linear: Any, *parts: Tensor) -> list[Tensor] | None:
    """A linear layer's weight, by what stands side by side in its input."""
    widths = [part.size(1) for part in parts]
    if (
        not plain_linear(linear)
        or linear.weight.size(1) != sum(widths)
        or linear.weight.dtype != parts[0].dtype
    ):
        return None
    return list(linear.weight.split(widths, 1))


def _biases(*linears: Any) -> Tensor | None:
    """The biases side by side; ``None`` if one has none."""
    biases = [linear.bias for linear in linears]
    return None if None in biases else torch.cat(biases)


def _of_edges(edge: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Edges' features and the map that is left to the kernel."""
    if edge.size(1) > SHALLOW or wants_grad(edge):
        return dense.linear(edge, weight), None
    return edge, weight.t()


def _at_both(*ends: tuple[Tensor, Tensor, Tensor | None]) -> list[Tensor]:
    """Linear maps ``(rows, weight, bias)``, those of the same rows at once."""
    (x, weight, bias), (y, *_) = ends
    if x is y:
        return dense.linear_all(x, [(weight, bias), ends[1][1:]])
    return [dense.linear(*end) for end in ends]


def _power_mean(module: Any, adj: Adj, x: Tensor) -> Tensor | None:
    """PyG's power mean, whose powers are those of nodes here."""
    p = module.p
    if isinstance(p, Tensor) and p.numel() not in (1, x.size(1)):
        return None
    powers = isinstance(p, Tensor) or p != 1
    if powers:
        x = x.clamp(min=module.min_value, max=module.max_value).pow(p)
    out = aggregate(adj, x, None, "mean")
    if powers:
        out = out.clamp(min=module.min_value, max=module.max_value).pow(1.0 / p)
    return out
