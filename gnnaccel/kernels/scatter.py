"""The backend of torch-scatter and torch-sparse, where they are installed.

Sums go through torch-sparse's product, which does not materialise messages; what these
libraries have no kernel for is left to the reference.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gnnaccel.kernels import reference
from gnnaccel.kernels.grouping import Grouping, accumulator
from gnnaccel.kernels.reference import (
    attention,
    attention_backward,
    group,
    head_dots,
    head_dots_backward,
    message_sum,
    message_sum_backward,
    sddmm,
    softmax,
    softmax_backward,
    spmm_extreme,
    spmm_select,
    transpose,
)

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


@cache
def reason() -> str | None:
    """Why this backend can't be used, or ``None``."""
    try:
        import torch_sparse  # noqa: F401
    except (ImportError, OSError) as error:
        return (
            f"torch-sparse does not load ({error}); with torch installed, "
            "pip install --no-build-isolation torch-scatter torch-sparse"
        )
    return None


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this backend takes tensors of ``dtype`` on ``device``."""
    return (
        device.type in ("cpu", "cuda") and dtype.is_floating_point and reason() is None
    )


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
    # Half types would be summed in half, weights per head have no kernel, and
    # torch-sparse divides by the number of columns.
    if (
        x.dim() != 2
        or accumulator(x.dtype) != x.dtype
        or g.entries == 0
        or x.numel() == 0
    ):
        return reference.spmm_sum(
            g, x, w, src_scale, dst_scale, self_scale, base, base_scale, out
        )
    import torch_sparse

    scaled = x if src_scale is None else x * src_scale.unsqueeze(-1)
    col = torch.arange(g.entries, device=x.device) if g.col is None else g.col.long()
    value = None if w is None else (w if g.perm is None else w[g.perm.long()])
    matrix = torch_sparse.SparseTensor(
        rowptr=g.ptr.long(),
        col=col,
        value=value,
        sparse_sizes=(g.rows, g.cols),
        is_sorted=True,
        trust_data=True,
    )
    total: Tensor = torch_sparse.matmul(matrix, scaled.contiguous(), "sum")
    if dst_scale is not None:
        total = total * dst_scale.unsqueeze(-1)
    if self_scale is not None:
        total = total + self_scale.unsqueeze(-1) * x
    if base is not None:
        total = total.add(base, alpha=base_scale)
    return total if out is None else out.copy_(total)
