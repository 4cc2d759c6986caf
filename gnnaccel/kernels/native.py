"""The native backend: C++ kernels on torch's own threads, for CPU tensors.

The functions have the signatures of :mod:`gnnaccel.kernels.reference`. They hand
addresses to the compiled module and keep the tensors alive meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.kernels import library, memory
from gnnaccel.kernels.grouping import Grouping, accumulator, index_dtype
from gnnaccel.kernels.message import KINDS, Parts
from gnnaccel.kernels.native_attention import (
    attention,
    attention_backward,
    head_dots,
    head_dots_backward,
)

__all__ = [
    "attention",
    "attention_backward",
    "available",
    "gather_rows",
    "group",
    "head_dots",
    "head_dots_backward",
    "isa",
    "message_sum",
    "message_sum_backward",
    "read_rows",
    "reason",
    "sddmm",
    "serves",
    "softmax",
    "softmax_backward",
    "spmm_extreme",
    "spmm_select",
    "spmm_sum",
    "threads",
    "transpose",
    "use_isa",
]

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
}
_native = library.module


def reason() -> str | None:
    """Why the native kernels can't be used, or ``None``."""
    return library.reason


def available() -> bool:
    """Whether the native kernels can be used."""
    return library.reason is None


def isa() -> str:
    """The instruction set in use: ``"avx512"``, ``"avx2"`` or ``"baseline"``."""
    name: str = _native.isa()
    return name


def use_isa(name: str) -> None:
    """Chooses the instruction set, for tests and comparisons.

    Raises:
        ValueError: This CPU or this build has no kernels of that name.
    """
    if not _native.use_isa(name):
        raise ValueError(f"No kernels for {name!r} on this machine")


def threads() -> int:
    """Threads the kernels run on: those of torch."""
    n: int = _native.threads()
    return n


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this backend takes tensors of ``dtype`` on ``device``."""
    return library.reason is None and device.type == "cpu" and dtype in _DTYPES


def address(tensor: Tensor | None) -> int:
    """Where a tensor's numbers lie; 0 for ``None``."""
    return 0 if tensor is None else tensor.data_ptr()


def dense_rows(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with dense rows, and the elements between one row and the next."""
    x = x.resolve_neg()
    if x.is_contiguous():
        return x, x.stride(0) if x.dim() > 1 else 1
    if x.numel() > 0 and x[0].is_contiguous() and x.stride(0) >= 0:
        return x, x.stride(0)
    x = x.contiguous()
    return x, x.stride(0)


def group(
    key: Tensor, rows: int, other: Tensor | None = None, others: int = 0
) -> tuple[Grouping | None, int, int]:
    """See :func:`gnnaccel.kernels.reference.group`."""
    if other is None:
        return _group(key, rows, None, key.numel(), None)
    return _group(key, rows, other, others, None)


def transpose(g: Grouping) -> Grouping:
    """See :func:`gnnaccel.kernels.reference.transpose`."""
    assert g.col is not None
    transposed, _, _ = _group(g.col, g.cols, None, g.rows, g)
    assert transposed is not None
    transposed.loops = g.loops
    return transposed


def _group(
    key: Tensor, rows: int, other: Tensor | None, others: int, origin: Grouping | None
) -> tuple[Grouping | None, int, int]:
    entries = key.numel()
    dtype = index_dtype(entries, rows, others)
    ptr = torch.empty(rows + 1, dtype=dtype, device="cpu")
    perm = torch.empty(entries, dtype=dtype, device="cpu")
    with_col = other is not None or origin is not None
    col = torch.empty_like(perm) if with_col else None
    bad_end, bad_value, is_sorted, loops, max_degree = _native.group(
        key.data_ptr(),
        key.stride(0),
        address(other),
        1 if other is None else other.stride(0),
        key.dtype == torch.int64,
        entries,
        rows,
        others,
        0 if origin is None else origin.ptr.data_ptr(),
        0 if origin is None else address(origin.perm),
        ptr.data_ptr(),
        perm.data_ptr(),
        address(col),
        dtype == torch.int64,
    )
    if bad_end:
        return None, bad_end, bad_value
    keep = not is_sorted or origin is not None
    grouping = Grouping(
        ptr, col, perm if keep else None, others, entries, max_degree, loops
    )
    return grouping, 0, 0


def spmm_sum(
    g: Grouping,
    x: Tensor,
    w: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_scale: Tensor | None = None,
    base: Tensor | None = None,
    base_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`gnnaccel.kernels.reference.spmm_sum`."""
    x, stride = dense_rows(x)
    if w is not None:
        w = w.contiguous()
    heads = x.size(1) if x.dim() == 3 else 1
    if base is not out and base is not None:
        base = base.resolve_neg().contiguous()
    if out is None:
        out = memory.empty((g.rows, *x.shape[1:]), x.dtype)
    _native.spmm_sum(
        *g.addresses,
        _DTYPES[x.dtype],
        x.data_ptr(),
        stride,
        out.data_ptr(),
        heads,
        x.size(-1),
        address(w),
        heads if w is not None and w.dim() == 2 else 1,
        address(src_scale),
        address(dst_scale),
        address(self_scale),
        0 if self_scale is None or self_scale.numel() == 1 else 1,
        address(base),
        base_scale,
    )
    return out


def gather_rows(x: Tensor, index: Tensor) -> Tensor | None:
    """``x[index]``; ``None`` if an index is out of range.

    Args:
        x: ``[N, *]``, of any dtype.
        index: ``[E]``, int32 or int64.
    """
    x, stride = dense_rows(x)
    out = memory.empty((index.numel(), *x.shape[1:]), x.dtype)
    row = out.stride(0) if out.dim() > 1 else 1
    bad: int = _native.gather_rows(
        index.data_ptr(),
        index.stride(0),
        index.dtype == torch.int64,
        index.numel(),
        x.size(0),
        x.data_ptr(),
        stride * x.element_size(),
        row * x.element_size(),
        out.data_ptr(),
    )
    return out if bad < 0 else None


def spmm_extreme(
    g: Grouping, x: Tensor, w: Tensor | None, is_max: bool, with_ties: bool
) -> tuple[Tensor, Tensor | None]:
    """See :func:`gnnaccel.kernels.reference.spmm_extreme`."""
    x, stride = dense_rows(x)
    if w is not None:
        w = w.contiguous()
    out = memory.empty((g.rows, x.size(1)), x.dtype)
    ties = memory.empty(out.shape, accumulator(x.dtype)) if with_ties else None
    _native.spmm_extreme(
        *g.addresses,
        _DTYPES[x.dtype],
        x.data_ptr(),
        stride,
        out.data_ptr(),
        address(ties),
        x.size(1),
        address(w),
        is_max,
    )
    return out, ties


def spmm_select(
    g: Grouping,
    x: Tensor,
    best: Tensor,
    v: Tensor,
    w: Tensor | None,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    """See :func:`gnnaccel.kernels.reference.spmm_select`."""
    x, stride = dense_rows(x)
    best, v = best.contiguous(), v.contiguous()
    if w is not None:
        w = w.contiguous()
    out = memory.empty((g.rows, x.size(1)), x.dtype)
    _native.spmm_select(
        *g.addresses,
        _DTYPES[x.dtype],
        x.data_ptr(),
        stride,
        best.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        x.size(1),
        address(w),
        is_max,
        transposed,
    )
    return out


def sddmm(g: Grouping, a: Tensor, b: Tensor) -> Tensor:
    """See :func:`gnnaccel.kernels.reference.sddmm`."""
    a, a_stride = dense_rows(a)
    b, b_stride = dense_rows(b)
    out = a.new_empty((g.entries, *a.shape[1:-1]))
    _native.sddmm(
        *g.addresses,
        _DTYPES[a.dtype],
        a.data_ptr(),
        a_stride,
        b.data_ptr(),
        b_stride,
        out.data_ptr(),
        a.size(1) if a.dim() == 3 else 1,
        a.size(-1),
    )
    return out


def message_sum(g: Grouping, kind: str, parts: Parts, own: float = 0.0) -> Tensor:
    """See :func:`gnnaccel.kernels.message.message_sum`."""
    return _message_sum(g, kind, parts, own, None, None, None)


def message_sum_backward(
    transposed: Grouping,
    kind: str,
    parts: Parts,
    own: float,
    grad: Tensor,
    need_edge: bool,
) -> Parts:
    """See :func:`gnnaccel.kernels.message.message_sum_backward`."""
    edge, map_ = parts.edge, parts.map
    of_edge = None
    if need_edge and edge is not None:
        of_edge = memory.empty(edge.shape, edge.dtype)
    of_map = None if map_ is None else map_.new_empty(map_.shape)
    of_x = _message_sum(
        transposed, kind, parts, own, grad.contiguous(), of_edge, of_map
    )
    return Parts(of_x, of_edge, of_map)


def _message_sum(
    g: Grouping,
    kind: str,
    parts: Parts,
    own: float,
    grad: Tensor | None,
    of_edge: Tensor | None,
    of_map: Tensor | None,
) -> Tensor:
    x, stride = dense_rows(parts.x)
    edge, map_, weight, x_dst = (
        None if tensor is None else tensor.contiguous() for tensor in parts[1:]
    )
    out = memory.empty((g.rows, x.size(1)), x.dtype)
    _native.message_sum(
        *g.addresses,
        _DTYPES[x.dtype],
        KINDS[kind],
        x.data_ptr(),
        stride,
        address(edge),
        address(map_),
        0 if edge is None else edge.size(1),
        0 if map_ is None else map_.size(0),
        address(weight),
        address(x_dst),
        own,
        x.size(1),
        out.data_ptr(),
        address(grad),
        address(of_edge),
        address(of_map),
    )
    return out


def softmax(g: Grouping, z: Tensor, epsilon: float) -> Tensor:
    """See :func:`gnnaccel.kernels.reference.softmax`."""
    return _softmax(g, z.contiguous(), None, epsilon)


def softmax_backward(g: Grouping, s: Tensor, grad: Tensor) -> Tensor:
    """See :func:`gnnaccel.kernels.reference.softmax_backward`."""
    return _softmax(g, s.contiguous(), grad.contiguous(), 0.0)


def _softmax(g: Grouping, z: Tensor, grad: Tensor | None, epsilon: float) -> Tensor:
    out = memory.empty(z.shape, z.dtype)
    _native.softmax(
        *g.addresses,
        _DTYPES[z.dtype],
        z.data_ptr(),
        address(grad),
        out.data_ptr(),
        z.size(1),
        epsilon,
    )
    return out


def read_rows(g: Grouping, x: Tensor) -> float:
    """Reads every row that a sum would read and writes nothing: a yardstick.

    Args:
        g: A grouping with int32 indices.
        x: ``[cols, F]``, contiguous float32.

    Returns:
        A checksum without meaning.
    """
    total: float = _native.read_rows(*g.addresses, x.data_ptr(), x.size(1))
    return total
