"""The reference backend: every kernel in plain torch, on any device and dtype.

It says what the kernels mean and serves wherever no faster backend does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.kernels.attention import (
    attention,
    attention_backward,
    head_dots,
    head_dots_backward,
)
from gnnaccel.kernels.grouping import Grouping, accumulator, index_dtype
from gnnaccel.kernels.message import message_sum, message_sum_backward

__all__ = [
    "attention",
    "attention_backward",
    "group",
    "head_dots",
    "head_dots_backward",
    "message_sum",
    "message_sum_backward",
    "reason",
    "sddmm",
    "serves",
    "softmax",
    "softmax_backward",
    "spmm_extreme",
    "spmm_select",
    "spmm_sum",
    "transpose",
]


def reason() -> str | None:
    """Why this backend can't be used; never."""
    return None


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this backend takes tensors of ``dtype`` on ``device``; always."""
    return True


def group(
    key: Tensor, rows: int, other: Tensor | None = None, others: int = 0
) -> tuple[Grouping | None, int, int]:
    """Groups entries by ``key``, stably.

    Args:
        key: ``[E]``, int32 or int64, what to group by.
        rows: Number of rows; keys lie in ``[0, rows)``.
        other: ``[E]``, the other end of each entry, of the same dtype.
        others: Number of values of ``other``.

    Returns:
        ``(grouping, 0, 0)``, or ``(None, end, value)`` for an index out of range:
        ``end`` is 1 for ``key`` and 2 for ``other``.
    """
    for end, index, size in ((1, key, rows), (2, other, others)):
        if index is not None and index.numel() > 0:
            for value in (int(index.min()), int(index.max())):
                if not 0 <= value < size:
                    return None, end, value
    dtype = index_dtype(key.numel(), rows, others)
    counts = torch.bincount(key.long(), minlength=rows)
    ptr = torch.zeros(rows + 1, dtype=dtype, device=key.device)
    ptr[1:] = counts.cumsum(0)
    is_sorted = bool((key[1:] >= key[:-1]).all())
    perm = None if is_sorted else torch.sort(key, stable=True).indices
    col = other if other is None or perm is None else other[perm]
    return (
        Grouping(
            ptr,
            None if col is None else col.to(dtype, copy=col is other),
            None if perm is None else perm.to(dtype),
            key.numel() if other is None else others,
            key.numel(),
            int(counts.max()) if rows else 0,
            0 if other is None else int((key == other).sum()),
        ),
        0,
        0,
    )


def transpose(g: Grouping) -> Grouping:
    """Regroups entries by column, stably; positions in the caller's order stay.

    Args:
        g: Entries with a ``col``.
    """
    assert g.col is not None
    t, _, _ = group(g.col, g.cols, g.row.to(g.ptr.dtype), g.rows)
    assert t is not None
    order = None if t.perm is None else t.perm.long()
    positions = g.perm
    if positions is None:
        positions = torch.arange(g.entries, device=g.ptr.device).to(g.ptr.dtype)
    perm = positions if order is None else positions[order]
    return Grouping(t.ptr, t.col, perm, t.cols, t.entries, t.max_degree, g.loops)


def _column(scale: Tensor, like: Tensor) -> Tensor:
    """Shapes ``[R]`` or ``[R, H]`` so that it scales ``like``, ``[R, (H,) F]``."""
    return scale.reshape(scale.shape + (1,) * (like.dim() - scale.dim()))


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index.long())


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
    """Sums scaled neighbour rows.

    ``out[i] = self_scale[i] x[i] + dst_scale[i] sum_e w[e] src_scale[col e] x[col e]
    + base_scale base[i]``

    Args:
        g: Entries grouped by output row.
        x: ``[cols, F]`` or ``[cols, H, F]``.
        w: ``[E]`` or ``[E, H]``, in the caller's order, of the dtype of ``x``.
        src_scale: ``[cols]``, of the accumulator dtype, as are the following.
        dst_scale: ``[rows]``.
        self_scale: ``[rows]`` (rows are columns then), or ``[1]`` for all rows.
        base: Like the result; added to it.
        base_scale: Multiplies ``base``.
        out: Like the result, contiguous: where it goes, which may be ``base``.

    Returns:
        ``[rows, F]`` or ``[rows, H, F]`` of the dtype of ``x``.
    """
    wide = x.to(accumulator(x.dtype))
    messages = wide if src_scale is None else wide * _column(src_scale, wide)
    messages = _take(messages, g.col)
    if w is not None:
        messages = messages * _column(_take(w, g.perm).to(wide.dtype), messages)
    total = wide.new_zeros((g.rows, *x.shape[1:])).index_add_(0, g.row, messages)
    if dst_scale is not None:
        total = total * _column(dst_scale, total)
    if self_scale is not None:
        total = total + _column(self_scale, wide) * wide
    if base is not None:
        total = total.add(base.to(wide.dtype), alpha=base_scale)
    return total.to(x.dtype) if out is None else out.copy_(total)


def _messages(g: Grouping, x: Tensor, w: Tensor | None) -> Tensor:
    messages = _take(x, g.col)
    return messages if w is None else _take(w, g.perm).unsqueeze(-1) * messages


def spmm_extreme(
    g: Grouping, x: Tensor, w: Tensor | None, is_max: bool, with_ties: bool
) -> tuple[Tensor, Tensor | None]:
    """Largest (or smallest) weighted neighbour per column; 0 for an empty row.

    Args:
        g: Entries grouped by output row.
        x: ``[cols, F]``.
        w: ``[E]`` or ``None``, in the caller's order, of the dtype of ``x``.
        is_max: Largest, else smallest.
        with_ties: Also return the ties.

    Returns:
        ``out`` ``[rows, F]`` and ``ties`` ``[rows, F]`` (accumulator dtype): by how
        much torch's ``scatter_reduce`` divides the gradient. That is the number of
        entries that attain the extreme, plus one where it is exactly 0 (torch counts
        the zero it starts from), and NaN where it is NaN.
    """
    messages = _messages(g, x, w)
    index = g.row.unsqueeze(-1).expand_as(messages)
    out = x.new_zeros(g.rows, x.size(1)).scatter_reduce_(
        0, index, messages, "amax" if is_max else "amin", include_self=False
    )
    if not with_ties:
        return out, None
    hits = (messages == out.index_select(0, g.row)).to(accumulator(x.dtype))
    ties = (out == 0).to(hits.dtype).index_add_(0, g.row, hits)
    return out, ties.masked_fill_(out.isnan(), float("nan"))


def spmm_select(
    g: Grouping,
    x: Tensor,
    best: Tensor,
    v: Tensor,
    w: Tensor | None,
    is_max: bool,
    transposed: bool,
) -> Tensor:
    """Sums ``v`` over the entries whose message attains the extreme.

    Transposed (rows are sources), it is the gradient of :func:`spmm_extreme`:
    ``out[j] = sum_e w[e] [w[e] x[j] attains best[col e]] v[col e]``. Otherwise (rows
    are destinations) its adjoint:
    ``out[i] = sum_e w[e] [w[e] x[col e] attains best[i]] v[col e]``.

    Args:
        g: Entries grouped by output row.
        x: ``[sources, F]``.
        best: ``[destinations, F]``, what :func:`spmm_extreme` returned.
        v: ``[cols, F]`` of the accumulator dtype.
        w: ``[E]`` or ``None``, in the caller's order.
        is_max: Whether ``best`` holds the largest.
        transposed: Whether rows are sources.

    Returns:
        ``[rows, F]`` of the dtype of ``x``.
    """
    weight = None if w is None else _take(w, g.perm).unsqueeze(-1)
    sources = x.index_select(0, g.row) if transposed else _take(x, g.col)
    messages = sources if weight is None else weight * sources
    extremes = _take(best, g.col) if transposed else best.index_select(0, g.row)
    # Negated, so that a NaN extreme selects all and passes NaN on.
    hit = ~(messages < extremes) if is_max else ~(messages > extremes)
    value = _take(v, g.col)
    value = value if weight is None else weight.to(v.dtype) * value
    value = torch.where(hit, value, value.new_zeros(()))
    return v.new_zeros(g.rows, v.size(1)).index_add_(0, g.row, value).to(x.dtype)


def sddmm(g: Grouping, a: Tensor, b: Tensor) -> Tensor:
    """Dot products of the two ends of every entry.

    Args:
        g: Entries grouped by the end that ``a`` belongs to.
        a: ``[rows, F]`` or ``[rows, H, F]``.
        b: ``[cols, F]`` or ``[cols, H, F]``.

    Returns:
        ``[E]`` or ``[E, H]`` in the caller's order.
    """
    wide = accumulator(a.dtype)
    products = a.to(wide).index_select(0, g.row) * _take(b.to(wide), g.col)
    return _to_caller(g, products.sum(-1).to(a.dtype))


def _to_caller(g: Grouping, grouped: Tensor) -> Tensor:
    if g.perm is None:
        return grouped
    return torch.empty_like(grouped).index_copy_(0, g.perm.long(), grouped)


def softmax(g: Grouping, z: Tensor, epsilon: float) -> Tensor:
    """Softmax over the entries of each row.

    Args:
        g: Entries grouped by row.
        z: ``[E, H]``, in the caller's order.
        epsilon: Added to the denominator.

    Returns:
        ``[E, H]``, in the caller's order.
    """
    grouped = _take(z, g.perm).to(accumulator(z.dtype))
    index = g.row.unsqueeze(-1).expand_as(grouped)
    zeros = grouped.new_zeros(g.rows, grouped.size(1))
    top = zeros.scatter_reduce(0, index, grouped, "amax", include_self=False)
    exponentials = (grouped - top.index_select(0, g.row)).exp()
    total = zeros.index_add(0, g.row, exponentials) + epsilon
    return _to_caller(g, (exponentials / total.index_select(0, g.row)).to(z.dtype))


def softmax_backward(g: Grouping, s: Tensor, grad: Tensor) -> Tensor:
    """``s (grad - sum over the row of s grad)``; all ``[E, H]``, the caller's order."""
    wide = accumulator(s.dtype)
    share, upstream = _take(s, g.perm).to(wide), _take(grad, g.perm).to(wide)
    total = share.new_zeros(g.rows, s.size(1)).index_add_(0, g.row, share * upstream)
    out = share * (upstream - total.index_select(0, g.row))
    return _to_caller(g, out.to(s.dtype))
