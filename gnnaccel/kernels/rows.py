"""Messages of edges, written down one by one, for what else is done to each of them.

On the native backend alone: elsewhere their terms are gathered and added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.kernels import library, memory
from gnnaccel.kernels.grouping import Grouping
from gnnaccel.kernels.message import Parts
from gnnaccel.kernels.native import address, dense_rows

_native = library.module
_DTYPES = {torch.float32: 0, torch.float64: 1}


def message_rows(g: Grouping, parts: Parts, relu: bool) -> Tensor:
    """``x[j] + x_dst[i] + y[e]``: see :mod:`gnnaccel.kernels.message`.

    Args:
        g: Entries grouped by destination.
        parts: float32 or float64; without a weight.
        relu: Whether a ReLU of that is wanted.

    Returns:
        ``[E, F]``, in the caller's order of edges.
    """
    x, stride = dense_rows(parts.x)
    edge, map_, x_dst = (
        None if tensor is None else tensor.resolve_neg().contiguous()
        for tensor in (parts.edge, parts.map, parts.x_dst)
    )
    out = memory.empty((g.entries, x.size(1)), x.dtype)
    _native.message_rows(
        *g.addresses,
        _DTYPES[x.dtype],
        x.data_ptr(),
        stride,
        address(edge),
        address(map_),
        0 if edge is None else edge.size(1),
        0 if map_ is None else map_.size(0),
        address(x_dst),
        x.size(1),
        out.data_ptr(),
        relu,
    )
    return out
