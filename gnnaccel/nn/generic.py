"""Any message passing layer, a user's own included, on our gather and reductions.

Aggregations, pooling layers and models that call PyG's functions are here, too.

PyG's ``propagate`` stays as it is, with its hooks, and so do ``message`` and
``update``: messages are made for every edge, in the order in which the edges stand.
Only how rows are lifted to edges and how messages are reduced (by way of
:mod:`gnnaccel.nn.reach`) changes. Both go over the grouping of the ``edge_index``,
which is made once, and their gradients are each other.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch_geometric.nn import Aggregation, MessagePassing

from gnnaccel import kernels
from gnnaccel.cache import remember
from gnnaccel.errors import EdgeIndexError
from gnnaccel.nn import reach
from gnnaccel.nn.fused import REDUCE_OF, graph_for, hooked_method, sizes, watched
from gnnaccel.nn.messages import weight_of
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.normalisation import remembering
from gnnaccel.nn.stand_in import LayerStandIn, StandIn
from gnnaccel.ops.gather import gather

#: Numbers in a lifted tensor from which a grouping that is there pays.
WORTH = 1 << 15
#: Numbers, or rows, from which it pays to make one for an index that may not come back.
WORTH_NEW = 1 << 19
WORTH_NEW_ROWS = 1 << 13
#: Lifts after which an index is expected to come back.
_USUAL = 8


class Copied(StandIn):
    """Copies and pickles of an instance name the class it was made from."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See :meth:`object.__reduce_ex__`."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made  # a way of its own
        return (_new, (made_from(type(self)),), *made[2:])


class Reaching(Copied):
    """Mixed into any class of modules: while one runs, PyG's functions are ours."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`torch.nn.Module.__call__`."""
        call: Any = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        outer = reach.enter()
        try:
            return call(*args, **kwargs)
        finally:
            reach.leave(outer)


class Lifting(Reaching, LayerStandIn):
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


class Multiplying(Lifting):
    """Mixed in where a message is a row times a weight: sums by a sparse product."""

    flow: str
    aggr_module: torch.nn.Module

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        out = self._product(edge_index, size, kwargs)
        if out is None:
            out = super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        return out

    def _product(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        """The product; ``None`` where the layer's own path is needed."""
        found = weight_of(made_from(type(self)))
        assert found is not None
        name, flattens = found
        reduce = REDUCE_OF.get(
            made_from(type(self.aggr_module)) or type(self.aggr_module)
        )
        if (
            type(edge_index) is not Tensor
            or edge_index.layout != torch.strided
            or kwargs.keys() - {"x", name}
            or self.node_dim not in (-2, 0)
            or reduce is None
            or _observed(self)
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()  # type: ignore[attr-defined]
        ):
            return None
        x = kwargs.get("x")
        shape = None
        if isinstance(x, Tensor) and x.dim() == 3 and self.node_dim == -2:
            shape = x.shape  # [K, N, F]: one graph, all its columns side by side
            x = x.transpose(0, 1).flatten(1)
        x_src, _, num_dst, ok = sizes(self, x, size)
        weight = None if name is None else kwargs.get(name)
        if isinstance(weight, Tensor):
            if weight.numel() != edge_index.size(-1) or (
                weight.dim() != 1 and not flattens
            ):
                return None
            weight = weight.reshape(-1)
        try:
            adj = graph_for(self, x_src, edge_index, num_dst, weight) if ok else None
        except EdgeIndexError:
            return None  # PyG words its own
        if adj is None or adj.graph is None:
            return None
        out = aggregate(adj, x_src, weight, reduce)
        return out if shape is None else out.unflatten(1, shape[::2]).transpose(0, 1)


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


def _comes_back(index: Tensor) -> bool:
    lifts: list[int] = remember(index, "lifts", lambda: [0])
    lifts[0] += 1
    return lifts[0] > _USUAL


def _served(x: Tensor, index: Tensor, size: int) -> bool:
    return (
        size >= WORTH
        and x.device.type == "cpu"
        and index.device == x.device
        and index.dtype in (torch.int64, torch.int32)
        and not torch.compiler.is_compiling()
        and not kernels.transforming(x)
        and kernels.pick_for(x) is kernels.native
        and (size >= WORTH_NEW or index.numel() >= WORTH_NEW_ROWS or _comes_back(index))
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
        return _made(Lifting if weight_of(cls) is None else Multiplying, cls)
    if issubclass(cls, Aggregation) or cls.__module__.startswith(
        "torch_geometric.nn.pool."
    ):
        return _made(Reaching, cls)
    return None


def reaching(cls: Any) -> type | None:
    """The class that stands in for a model's, whose own ``forward`` calls functions.

    Args:
        cls: Any class of modules.

    Returns:
        A subclass of the same name; ``None`` for torch's own classes and whatever
        else can't be subclassed so.
    """
    if (
        issubclass(cls, (StandIn, LazyModuleMixin))
        or getattr(cls, "leave_to_pyg", False)
        or cls.__module__.partition(".")[0] == "torch"
        or cls.__module__.startswith("torch_geometric.nn.dense.")
    ):
        return None
    try:
        return _made(Reaching, cls)
    except Exception:  # whatever a metaclass or __init_subclass__ thinks of it
        return None


@cache
def _made(mixin: Any, cls: Any) -> type:
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if issubclass(cls, MessagePassing):
        names |= remembering(cls)
    made = type(cls.__name__, (mixin, cls), names)
    made.__qualname__ = cls.__qualname__
    return made


def made_from(cls: type) -> type | None:
    """What :func:`generic` was given to make ``cls``; ``None`` if it did not."""
    return (
        cls.__bases__[-1]
        if cls.__bases__[0] in (Lifting, Multiplying, Reaching)
        else None
    )


def _new(cls: type) -> Any:
    made: Any = generic(cls) or reaching(cls)
    return made.__new__(made)
