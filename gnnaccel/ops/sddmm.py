"""sddmm: dot products of the two ends of every edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.graph import Size
from gnnaccel.ops.adj import check_device, check_tensors, hold
from gnnaccel.ops.product import sddmm_held


def sddmm(adj: Any, a: Tensor, b: Tensor, *, size: Size = None) -> Tensor:
    """Multiplies two dense matrices where the graph has edges.

    ``out[e] = <a[dst e], b[src e]>``, per head if there are heads.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        a: ``[num_dst, F]`` or ``[num_dst, H, F]``, floating point.
        b: ``[num_src, F]`` or ``[num_src, H, F]``.
        size: ``(num_src, num_dst)`` of a plain ``edge_index``; default: as many as
            ``b`` and ``a`` have rows.

    Returns:
        ``[E]`` or ``[E, H]`` in input edge order, of the promoted dtype.

    Raises:
        TypeError: ``a`` or ``b`` is no tensor.
        ValueError: Shapes, dtypes or devices don't fit.
        EdgeIndexError: An edge names a node that does not exist.
    """
    check_tensors(a=a, b=b)
    if (
        a.dim() not in (2, 3)
        or a.shape[1:] != b.shape[1:]
        or not (a.is_floating_point() and b.is_floating_point())
    ):
        raise ValueError(
            "Expected 'a' and 'b' to be floating point tensors of shapes [num_dst, "
            f"(H,) F] and [num_src, (H,) F] (got {list(a.shape)}, {a.dtype} and "
            f"{list(b.shape)}, {b.dtype})"
        )
    if size is None and isinstance(adj, Tensor) and adj.layout == torch.strided:
        size = (b.size(0), a.size(0))
    held = hold(adj, size, a, b)
    if (b.size(0), a.size(0)) != (held.num_src, held.num_dst):
        raise ValueError(
            f"Expected 'a' and 'b' to have {held.num_dst} and {held.num_src} rows (got "
            f"{a.size(0)} and {b.size(0)})"
        )
    check_device(held, "a", a)
    check_device(held, "b", b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return sddmm_held(held, a.to(dtype), b.to(dtype))
