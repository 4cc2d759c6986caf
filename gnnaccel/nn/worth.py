"""From which size on our kernels pay; below it, a layer is PyG's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.cache import uses

#: Numbers in a lifted tensor, or in messages, from which a grouping that is there pays.
WORTH = 1 << 15
#: Numbers, or rows, from which it pays to make one for an index that may not come back.
WORTH_NEW = 1 << 19
WORTH_NEW_ROWS = 1 << 13
#: Numbers in the messages of a fused layer from which it pays to make a graph that may
#: not come back; so many times as many as the layer's class says.
WORTH_GRAPH = 1 << 17
#: Uses after which an index is expected to come back.
USUAL = 8


def comes_back(index: Tensor) -> bool:
    """Whether an index was used so often that it will be used again.

    Args:
        index: Any tensor; each call counts as one use of it.
    """
    return uses(index) > USUAL


def new_pays(index: Tensor) -> bool:
    """Whether it pays to remember what follows from an index, which may be a new one.

    Args:
        index: ``[*, E]``.
    """
    return index.size(-1) >= WORTH_NEW_ROWS or comes_back(index)


def served(x: Tensor, index: Tensor, size: int) -> bool:
    """Whether our kernels serve a lift or a reduction, and pay.

    Args:
        x: What is lifted or reduced.
        index: ``[E]``.
        size: Numbers in the result of a lift.
    """
    return (
        size >= WORTH
        and x.device.type == "cpu"
        and index.device == x.device
        and index.dtype in (torch.int64, torch.int32)
        and not torch.compiler.is_compiling()
        and kernels.pick_for(x) is kernels.native
        and (size >= WORTH_NEW or new_pays(index))
    )


def graph_pays(layer: Any, x: Any, edge_index: Any) -> bool | None:
    """Whether a fused layer wins more than the graph of an index may cost.

    This is quicker to tell than whether the layer can be fused, and asked first.

    Args:
        layer: The layer, whose class tells what its graph costs.
        x: Features ``[*, F]``, or those of sources and destinations.
        edge_index: What the user passed.

    Returns:
        ``None`` where that is no question: while a program is traced or compiled, for
        a graph that is no plain index, and for features of other kinds.
    """
    if (
        type(edge_index) is not Tensor
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or edge_index.layout != torch.strided
        or edge_index.dim() != 2
    ):
        return None
    x = x[0] if isinstance(x, (tuple, list)) and x else x
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    size = edge_index.size(1) * x.size(-1)
    if not layer.pays_small and size < WORTH:
        return False
    return size >= WORTH_GRAPH * layer.graph_costs or comes_back(edge_index)
