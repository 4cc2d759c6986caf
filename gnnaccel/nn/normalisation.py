"""PyG's ``gcn_norm``, remembered for each graph.

Layers that are not told ``cached=True`` normalise anew at every call, into a new
``edge_index`` that then would have to be grouped anew, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import gcn_conv

from gnnaccel.cache import Memory, remember
from gnnaccel.kernels import transforming
from gnnaccel.nn import worth
from gnnaccel.ops.adj import tracing

#: PyG's own.
STOCK = gcn_conv.gcn_norm


def rememberable(edge_index: Any) -> bool:
    """Whether what follows from an ``edge_index`` may be remembered."""
    return (
        type(edge_index) is Tensor
        and edge_index.layout == torch.strided
        and not tracing(edge_index)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not transforming(edge_index)
    )


def to_remember(edge_index: Any) -> bool:
    """Whether what follows from an ``edge_index`` is better remembered."""
    return rememberable(edge_index) and worth.new_pays(edge_index)


def gcn_norm(
    edge_index: Any, edge_weight: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """See :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm`; the result is shared."""
    if not to_remember(edge_index) or not (
        edge_weight is None
        or (
            type(edge_weight) is Tensor
            and not edge_weight.requires_grad
            and worth.new_pays(edge_weight)
        )
    ):
        return STOCK(edge_index, edge_weight, *args, **kwargs)

    def build() -> tuple[Tensor | None, Tensor]:
        with torch.no_grad():
            index, weight = STOCK(edge_index, edge_weight, *args, **kwargs)
        # What is remembered of a tensor must not keep it alive.
        return (None if index is edge_index else index), weight

    key = ("gcn_norm", args, tuple(sorted(kwargs.items())))
    if edge_weight is None:
        index, weight = remember(edge_index, key, build)
    else:
        memory = remember(edge_index, "gcn_norm of weights", Memory)
        index, weight = memory.remember(edge_weight, key, build)
    return (edge_index if index is None else index), weight
