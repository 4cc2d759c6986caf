"""Any message passing layer, a user's own included, on our gather and reductions.

PyG's ``propagate`` stays as it is, with its hooks, and so do ``message`` and
``update``: messages are made for every edge, in the order in which the edges stand.
Only how rows are lifted to edges and how messages are reduced changes. Both go over
the grouping of the ``edge_index``, which is made once, and their gradients are each
other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, aggr

from gnnaccel import kernels
from gnnaccel.errors import EdgeIndexError
from gnnaccel.nn.fused import REDUCE_OF, graph_for, hooked_method, sizes, watched
from gnnaccel.nn.joined import joined_sum
from gnnaccel.nn.messages import Weight, joined_of, weight_of
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.replaced import replacing
from gnnaccel.nn.stand_in import LayerStandIn, StandIn
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.gather import gather, scatter

#: Numbers in a lifted or reduced tensor from which the grouping pays.
WORTH = 1 << 15

#: Aggregations that reduce by :meth:`torch_geometric.nn.aggr.Aggregation.reduce`.
REDUCING = (
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.VarAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
)


class Copied(StandIn):
    """Copies and pickles of an instance name the class it was made from."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See :meth:`object.__reduce_ex__`."""
        made: Any = super().__reduce_ex__(protocol)
        return (_new, (made_from(type(self)),), *made[2:])


class Lifting(Copied, LayerStandIn):
    """Mixed into a message passing class: lifts rows by :func:`gnnaccel.ops.gather`."""

    node_dim: int

    def _index_select(self, src: Tensor, index: Tensor) -> Tensor:
        if (
            not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and type(index) is Tensor
            and src.dim() > 1
            and self.node_dim in (0, -src.dim())
            and _served(
                src, index, index.numel() * (src.numel() // max(src.size(0), 1))
            )
        ):
            try:
                return gather(src, index)
            except EdgeIndexError:
                pass  # PyG words its own
        selected: Tensor = super()._index_select(src, index)  # type: ignore[misc]
        return selected


class Summing(Lifting):
    """Mixed in where it is known what a message is made of: none is written down."""

    flow: str
    aggr_module: torch.nn.Module

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        out = self._sum(edge_index, size, kwargs)
        if out is None:
            out = super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        return out

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        """What is asked for; ``None`` where the layer's own path is needed."""
        raise NotImplementedError

    def _reduction(
        self, edge_index: Any, kwargs: dict[str, Any], names: set[str | None]
    ) -> str | None:
        """How messages are reduced, if that can be done without writing them down.

        Args:
            edge_index: What the user passed.
            kwargs: What else; only ``names`` are known.
            names: Of arguments.
        """
        reduce = REDUCE_OF.get(
            made_from(type(self.aggr_module)) or type(self.aggr_module)
        )
        if (
            type(edge_index) is not Tensor
            or edge_index.layout != torch.strided
            or kwargs.keys() - names
            or self.node_dim not in (-2, 0)
            or _observed(self)
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()  # type: ignore[attr-defined]
        ):
            return None
        return reduce


class Multiplying(Summing):
    """Mixed in where a message is a row times a weight: sums by a sparse product."""

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        found = weight_of(made_from(type(self)))
        assert found is not None
        reduce = self._reduction(edge_index, kwargs, {"x", found.name})
        if reduce is None:
            return None
        x = kwargs.get("x")
        shape = None
        if isinstance(x, Tensor) and x.dim() == 3 and self.node_dim == -2:
            shape = x.shape  # [K, N, F]: one graph, all its columns side by side
            x = x.transpose(0, 1).flatten(1)
        x_src, _, num_dst, ok = sizes(self, x, size)
        weight = None if found.name is None else kwargs.get(found.name)
        if isinstance(weight, Tensor):
            weight = _per_edge(found, weight, edge_index)
            if weight is None:
                return None
        adj = _graph(self, x_src, edge_index, num_dst, weight) if ok else None
        if adj is None:
            return None
        out = aggregate(adj, x_src, weight, reduce)
        return out if shape is None else out.unflatten(1, shape[::2]).transpose(0, 1)


class Joining(Summing):
    """Mixed in where a message joins a row with the edge's features."""

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        found = joined_of(made_from(type(self)))
        assert found is not None
        name = None if found.weight is None else found.weight.name
        reduce = self._reduction(edge_index, kwargs, {"x", found.edge, name})
        edge = kwargs.get(found.edge)
        if (
            reduce not in ("sum", "mean")
            or type(edge) is not Tensor
            or edge.layout != torch.strided
            or edge.dim() != 2
            or edge.size(0) != edge_index.size(1)
        ):
            return None
        x_src, _, num_dst, ok = sizes(self, kwargs.get("x"), size)
        weight = None
        if found.weight is not None:
            weight = _per_edge(
                found.weight, kwargs.get(found.weight.name or ""), edge_index
            )
            if weight is None or wants_grad(weight):
                return None
        adj = _graph(self, x_src, edge_index, num_dst, weight) if ok else None
        if adj is None:
            return None
        through = None if found.through is None else getattr(self, found.through)
        return joined_sum(adj, found.kind, x_src, edge, through, weight, reduce)


def _per_edge(found: Weight, weight: Any, edge_index: Tensor) -> Tensor | None:
    """A weight ``[E]``; ``None`` if it has another shape than the message takes."""
    if not isinstance(weight, Tensor) or weight.numel() != edge_index.size(-1):
        return None
    return weight.reshape(-1) if weight.dim() == 1 or found.flattens else None


def _graph(
    layer: Any, x_src: Any, edge_index: Tensor, num_dst: int | None, weight: Any
) -> Adj | None:
    try:
        adj = graph_for(layer, x_src, edge_index, num_dst, weight)
    except EdgeIndexError:
        return None  # PyG words its own
    return None if adj is None or adj.graph is None else adj


class Reducing(Copied):
    """Mixed into an aggregation: reduces by :func:`gnnaccel.ops.scatter`."""

    def reduce(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        reduce: str = "sum",
    ) -> Tensor:
        """See :meth:`torch_geometric.nn.aggr.Aggregation.reduce`."""
        if (
            not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and ptr is None
            and type(index) is Tensor
            and index.dim() == 1
            and x.dim() > 1
            and dim in (0, -x.dim())
            and index.size(0) == x.size(0)
            and dim_size is not None
            and reduce in ("sum", "add", "mean", "max", "min")
            and _served(x, index, x.numel())
        ):
            try:
                return scatter(x, index, dim_size, reduce)
            except EdgeIndexError:
                pass
        stock: Any = super()
        reduced: Tensor = stock.reduce(x, index, ptr, dim_size, dim, reduce)
        return reduced


def _observed(layer: Any) -> bool:
    """Whether somebody wants to see messages, or replaced a method on the instance."""
    state = vars(layer)
    return (
        state["_explain"]
        or layer.decomposed_layers > 1
        or hooked_method(layer) is not None
        or any(name in state for name in ("message", "aggregate", "update"))
        or watched(layer.aggr_module)
    )


def _served(x: Tensor, index: Tensor, size: int) -> bool:
    return (
        size >= WORTH
        and x.device.type == "cpu"
        and index.device == x.device
        and index.dtype in (torch.int64, torch.int32)
        and not torch.compiler.is_compiling()
        and not kernels.transforming(x)
        and kernels.pick_for(x) is kernels.native
    )


def generic(cls: Any) -> type | None:
    """The class that stands in for a message passing layer's or an aggregation's.

    Args:
        cls: Any class of modules.

    Returns:
        A subclass of the same name; ``None`` if there is nothing to win, or if the
        class has a true attribute ``leave_to_pyg``.
    """
    if getattr(cls, "leave_to_pyg", False) or issubclass(cls, StandIn):
        return None
    if issubclass(cls, MessagePassing):
        if cls._index_select is not MessagePassing._index_select:
            return None
        if weight_of(cls) is not None:
            return _made(Multiplying, cls)
        return _made(Lifting if joined_of(cls) is None else Joining, cls)
    if cls in REDUCING:
        return _made(Reducing, cls)
    return None


@cache
def _made(mixin: Any, cls: Any) -> type:
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    names |= replacing(cls, _served)
    made = type(cls.__name__, (mixin, cls), names)
    made.__qualname__ = cls.__qualname__
    return made


def made_from(cls: type) -> type | None:
    """What :func:`generic` was given to make ``cls``; ``None`` if it did not."""
    return (
        cls.__bases__[-1]
        if cls.__bases__[0] in (Lifting, Multiplying, Joining, Reducing)
        else None
    )


def _new(cls: type) -> Any:
    made: Any = generic(cls)
    return made.__new__(made)
