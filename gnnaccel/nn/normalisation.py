"""PyG's ``gcn_norm``, remembered for each graph.

Layers that are not told ``cached=True`` normalise anew at every call, into a new
``edge_index`` that then would have to be grouped anew, too.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import gcn_conv

from gnnaccel.cache import Memory, remember
from gnnaccel.kernels import transforming
from gnnaccel.ops.adj import tracing

_STOCK = gcn_conv.gcn_norm


def gcn_norm(
    edge_index: Any, edge_weight: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """See :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm`; the result is shared."""
    if (
        type(edge_index) is not Tensor
        or edge_index.layout != torch.strided
        or tracing(edge_index, edge_weight)
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or transforming(edge_index)
        or not (
            edge_weight is None
            or (type(edge_weight) is Tensor and not edge_weight.requires_grad)
        )
    ):
        return _STOCK(edge_index, edge_weight, *args, **kwargs)

    def build() -> tuple[Tensor | None, Tensor]:
        with torch.no_grad():
            index, weight = _STOCK(edge_index, edge_weight, *args, **kwargs)
        # What is remembered of a tensor must not keep it alive.
        return (None if index is edge_index else index), weight

    key = ("gcn_norm", args, tuple(sorted(kwargs.items())))
    if edge_weight is None:
        index, weight = remember(edge_index, key, build)
    else:
        memory = remember(edge_index, "gcn_norm of weights", Memory)
        index, weight = memory.remember(edge_weight, key, build)
    return (edge_index if index is None else index), weight


def remembering(cls: Any) -> dict[str, Any]:
    """Copies of a PyG class's methods that call ``gcn_norm``, to call ours."""
    if not cls.__module__.startswith("torch_geometric."):
        return {}
    methods = {}
    for name, method in vars(cls).items():
        if (
            isinstance(method, types.FunctionType)
            and "gcn_norm" in method.__code__.co_names
            and method.__globals__.get("gcn_norm") is _STOCK
        ):
            copied = types.FunctionType(
                method.__code__,
                {**method.__globals__, "gcn_norm": gcn_norm},
                name,
                method.__defaults__,
                method.__closure__,
            )
            copied.__kwdefaults__ = method.__kwdefaults__
            copied.__doc__ = method.__doc__
            copied.__qualname__ = method.__qualname__
            methods[name] = copied
    return methods
