"""Which class stands in for one that nobody foresaw.

Any message passing layer, a user's own included, gets our gather and reductions, and
more where its code tells what a message is (:mod:`gnnaccel.nn.summing`). Aggregations,
pooling layers and models that call PyG's functions are here, too.
"""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch.nn.modules.lazy import LazyModuleMixin
from torch_geometric.nn import Aggregation, MessagePassing

from gnnaccel.nn import filters
from gnnaccel.nn.gated_graph import GatedGraph
from gnnaccel.nn.gating import gate_of
from gnnaccel.nn.lifting import Lifting, Reaching, make
from gnnaccel.nn.messages import joined_of, weight_of
from gnnaccel.nn.networks import network_of
from gnnaccel.nn.stand_in import StandIn
from gnnaccel.nn.summing import Joining, Multiplying, Splitting

#: What is mixed into layers of weighted rows whose ``forward`` is one of these.
_WHOLE: dict[Any, type[Multiplying]] = {
    pyg.APPNP.forward: filters.Personalised,
    pyg.GatedGraphConv.forward: GatedGraph,
    pyg.SGConv.forward: filters.Simple,
    pyg.SSGConv.forward: filters.SimpleSpectral,
    pyg.TAGConv.forward: filters.Adaptive,
}


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
        known = gate_of(cls)
        if known is not None:
            return make(known, cls)
        if weight_of(cls) is not None:
            mixin: Any = _WHOLE.get(cls.forward, Multiplying)
            return make(mixin, cls)
        if joined_of(cls) is not None:
            return make(Joining, cls)
        return make(Lifting if network_of(cls) is None else Splitting, cls)
    if issubclass(cls, Aggregation) or cls.__module__.startswith(
        "torch_geometric.nn.pool."
    ):
        return make(Reaching, cls)
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
        return make(Reaching, cls)
    except Exception:  # whatever a metaclass or __init_subclass__ thinks of it
        return None
