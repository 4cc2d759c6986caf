"""The one structure every kernel reads: entries grouped by row."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Grouping:
    """Entries (edges, messages) grouped by row: a CSR structure, immutable.

    Attributes:
        ptr: ``[rows + 1]``, int32 or int64; row ``i`` holds entries
            ``ptr[i] .. ptr[i + 1]``.
        col: ``[entries]``, the row of the input that each entry reads, or ``None``:
            entry ``e`` reads row ``e``.
        perm: ``[entries]``, the position of each entry in the caller's order, or
            ``None``: the caller's order is grouped already.
        rows: Number of rows.
        cols: Number of rows of the input.
        max_degree: Entries in the longest row.
        loops: Entries whose two ends are equal.
    """

    def __init__(
        self,
        ptr: Tensor,
        col: Tensor | None,
        perm: Tensor | None,
        cols: int,
        entries: int,
        max_degree: int,
        loops: int = 0,
    ) -> None:
        self.ptr = ptr
        self.col = col
        self.perm = perm
        self.rows = ptr.numel() - 1
        self.cols = cols
        self.entries = entries
        self.max_degree = max_degree
        self.loops = loops
        self._row: Tensor | None = None
        self._counts: Tensor | None = None
        self._mean_scale: dict[torch.dtype, Tensor] = {}

    # Not `cached_property`, whose lock torch.compile cannot trace.
    @property
    def row(self) -> Tensor:
        """``[entries]``, int64: the row of each entry, in grouped order."""
        if self._row is None:
            counts = self.counts
            self._row = torch.repeat_interleave(counts, output_size=self.entries)
        return self._row

    @property
    def counts(self) -> Tensor:
        """``[rows]``, int64: entries per row."""
        if self._counts is None:
            self._counts = (self.ptr[1:] - self.ptr[:-1]).long()
        return self._counts

    def mean_scale(self, dtype: torch.dtype) -> Tensor:
        """``[rows]`` of ``dtype``: one over the entries per row, at least 1."""
        scale = self._mean_scale.get(dtype)
        if scale is None:
            with torch.inference_mode(False):
                scale = self.counts.clamp(min=1).to(dtype).reciprocal_()
            self._mean_scale[dtype] = scale
        return scale

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int, int, bool]:
        """The leading arguments of every native kernel."""
        return (
            self.ptr.data_ptr(),
            0 if self.col is None else self.col.data_ptr(),
            0 if self.perm is None else self.perm.data_ptr(),
            self.rows,
            self.entries,
            self.max_degree,
            self.ptr.dtype == torch.int64,
        )

    @cached_property
    def in_order(self) -> Grouping:
        """The same, for weights that stand in grouped order."""
        return Grouping(
            self.ptr,
            self.col,
            None,
            self.cols,
            self.entries,
            self.max_degree,
            self.loops,
        )

    @cached_property
    def over_entries(self) -> Grouping:
        """The same rows over inputs that stand in the caller's order of entries."""
        return Grouping(
            self.ptr, self.perm, None, self.entries, self.entries, self.max_degree
        )


def index_dtype(*sizes: int) -> torch.dtype:
    """int32 where every size and every index below it fits, else int64."""
    return torch.int32 if max(sizes, default=0) < 2**31 - 1 else torch.int64


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over ``dtype`` are kept: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
