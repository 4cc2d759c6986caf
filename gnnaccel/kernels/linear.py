"""Sums of neighbour rows that are multiplied by a matrix while they are cached.

On the native backend alone: elsewhere these are two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.kernels import library, memory
from gnnaccel.kernels.grouping import Grouping
from gnnaccel.kernels.native import address, dense_rows, isa, threads

_native = library.module

#: Columns up to which a sum is mapped: matrices that stay in a core's own cache.
_WIDEST = 256


def serves(g: Grouping, x: Tensor, columns: int) -> bool:
    """Whether :func:`spmm_linear` serves, and is faster than a sum and a product."""
    return (
        x.dtype == torch.float32
        and x.dim() == 2
        and x.size(1) % 16 == columns % 16 == 0
        and 0 < x.size(1) <= _WIDEST
        and 0 < columns <= _WIDEST
        and g.ptr.dtype == torch.int32
        # A long row is not cut into slices: it must not keep the other threads waiting.
        and g.max_degree * threads() * 16 <= max(g.entries, 1 << 16)
        and isa() != "baseline"  # where torch multiplies faster
    )


class Mapped(NamedTuple):
    """What :func:`spmm_linear` returns, ``None`` where it isn't wanted.

    Attributes:
        out: ``[rows, C]``.
        sums: ``[rows, F]``.
        of_map: ``[F, C]``, the gradient of ``map``.
        of_root: ``[F, C]``, that of ``root``.
    """

    out: Tensor | None
    sums: Tensor | None
    of_map: Tensor | None
    of_root: Tensor | None


def spmm_linear(
    g: Grouping,
    x: Tensor,
    w: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    map: Tensor,
    root: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    base: Tensor | None = None,
    base_scale: float = 1.0,
    into: Tensor | None = None,
    with_sums: bool = False,
    with_out: bool = True,
    y: Tensor | None = None,
    with_map: bool = False,
    with_root: bool = False,
) -> Mapped:
    """``spmm_sum(...) @ map + x @ root + bias``, and gradients of the two matrices.

    Args:
        g: Entries grouped by output row; see :func:`serves`.
        x: ``[cols, F]``.
        w: ``[E]`` or ``None``: see :func:`gnnaccel.kernels.reference.spmm_sum`, as
            are the scales.
        scales: Of sources, destinations and the row itself.
        map: ``[F, C]``.
        root: ``[F, C]`` where rows are columns, or ``None``.
        bias: ``[C]`` or ``None``.
        base: ``[rows, F]``, contiguous: see there, as is its scale.
        base_scale: See there.
        into: ``[rows, C]``, contiguous: added to in place; no bias then.
        with_sums: Whether the sums are wanted themselves.
        with_out: Whether the first result is wanted.
        y: ``[rows, C]``, where a gradient is wanted.
        with_map: Whether ``spmm_sum(...)^T y`` is.
        with_root: Whether ``x^T y`` is.

    Returns:
        What is wanted.
    """
    x, stride = dense_rows(x)
    y, y_stride = (None, 0) if y is None else dense_rows(y)
    src_scale, dst_scale, self_scale = scales
    base = None if base is None else base.resolve_neg().contiguous()
    map = map.contiguous()
    root = None if root is None else root.contiguous()
    bias = None if bias is None else bias.contiguous()
    w = None if w is None else w.contiguous()
    out = into
    if out is None and with_out:
        out = memory.empty((g.rows, map.size(1)), x.dtype)
    sums = memory.empty((g.rows, x.size(1)), x.dtype) if with_sums else None
    g_map = torch.empty_like(map) if with_map else None
    g_root = torch.empty_like(map) if with_root else None
    _native.spmm_linear(
        *g.addresses,
        x.data_ptr(),
        stride,
        x.size(1),
        address(w),
        address(src_scale),
        address(dst_scale),
        address(self_scale),
        0 if self_scale is None or self_scale.numel() == 1 else 1,
        address(base),
        base_scale,
        address(sums),
        map.size(1),
        map.data_ptr(),
        address(root),
        address(bias),
        address(out),
        into is not None,
        address(y),
        y_stride,
        address(g_map),
        address(g_root),
    )
    return Mapped(out, sums, g_map, g_root)
