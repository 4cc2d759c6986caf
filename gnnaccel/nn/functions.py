"""PyG's functions on groups of rows, by our kernels where these are faster.

Each has the arguments of the function of :mod:`torch_geometric.utils` of the same name
and returns ``None`` where that one has to run: for what the kernels do not serve, where
there is nothing to win, and for wrong arguments, which PyG words its own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.cache import remember
from gnnaccel.errors import EdgeIndexError
from gnnaccel.graph import grouping_of
from gnnaccel.nn import dense
from gnnaccel.ops.gather import Groups, are_runs, groups_of_runs, reduce_groups
from gnnaccel.ops.softmax import softmax_groups

#: Numbers from which each pays even where the index is new at every call. torch adds
#: rows fast, but for the gradients of extremes and for a softmax it takes many passes.
WORTH_SUM = 1 << 20
#: Rows, of at least four numbers, from which a sum pays.
WORTH_SUM_ROWS = 1 << 15
WORTH_EXTREME = 1 << 14
WORTH_SOFTMAX = 1 << 9
WORTH_DENSE = 1 << 12
#: Indices from which counting them pays.
WORTH_COUNT = 1 << 15


def scatter(
    src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any
) -> Tensor | None:
    """See :func:`torch_geometric.utils.scatter`."""
    if reduce in ("max", "min"):
        worth = WORTH_EXTREME
    elif reduce in ("sum", "add", "mean"):
        worth = WORTH_SUM
        if isinstance(src, Tensor) and src.dim() and src.size(0) >= WORTH_SUM_ROWS:
            worth = min(worth, 4 * src.size(0))
    else:
        return None
    if not _rows(src, worth, dim) or not _indexes(index, src):
        return None
    groups = _groups(index, dim_size)
    return None if groups is None else reduce_groups(src, groups, reduce)


def softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Tensor | None:
    """See :func:`torch_geometric.utils.softmax`."""
    # Autocast has an opinion on the steps that it sees in PyG's.
    if not _rows(src, WORTH_SOFTMAX, dim) or torch.is_autocast_enabled("cpu"):
        return None
    if ptr is not None:
        groups = _runs(ptr, src)
    elif _indexes(index, src):
        groups = _groups(index, num_nodes)
    else:
        return None
    return None if groups is None else softmax_groups(src, groups)


def segment(src: Any, ptr: Any, reduce: Any) -> Tensor | None:
    """See :func:`torch_geometric.utils.segment`."""
    if reduce not in ("sum", "mean") or not _rows(src, WORTH_SUM, 0):
        return None
    groups = _runs(ptr, src)
    return None if groups is None else reduce_groups(src, groups, reduce)


def degree(index: Any, num_nodes: Any, dtype: Any) -> Tensor | None:
    """See :func:`torch_geometric.utils.degree`."""
    if (
        not isinstance(index, Tensor)
        or index.numel() < WORTH_COUNT
        or not _plain(index)
        or not _is_index(index)
    ):
        return None
    groups = _groups(index, num_nodes)
    if groups is None:
        return None
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return groups.grouping.counts.to(dtype, copy=True)


def to_dense_batch(
    x: Any, batch: Any, fill_value: Any, max_num_nodes: Any, batch_size: Any
) -> tuple[Tensor, Tensor] | None:
    """See :func:`torch_geometric.utils.to_dense_batch`."""
    if not _rows(x, WORTH_DENSE, 0) or not _indexes(batch, x):
        return None
    groups = _groups(batch, batch_size)
    if groups is None or groups.grouping.perm is not None:
        return None
    grouping = groups.grouping
    width = grouping.max_degree if max_num_nodes is None else max_num_nodes
    if type(width) is not int or width < grouping.max_degree:
        return None  # rows that find no place

    def build() -> tuple[Tensor, Tensor]:
        place = torch.arange(batch.numel()) - grouping.ptr.long()[batch]
        slot = place + batch * width
        mask = torch.zeros(grouping.rows * width, dtype=torch.bool)
        return slot, mask.index_fill_(0, slot, True).view(grouping.rows, width)

    slot, mask = remember(batch, ("dense", grouping.rows, width), build)
    shape = (grouping.rows * width, *x.shape[1:])
    if isinstance(fill_value, (int, float)):
        out = x.new_full(shape, fill_value)
    elif type(fill_value) is Tensor and not fill_value.requires_grad:
        out = fill_value.to(x).expand(shape).clone()
    else:
        return None
    out = out.index_copy_(0, slot, x)
    return out.view(grouping.rows, width, *x.shape[1:]), mask.clone()


def linear(module: Any, x: Any) -> Tensor | None:
    """See :meth:`torch_geometric.nn.Linear.forward`: the result is pooled memory."""
    weight, bias = module.weight, module.bias
    if not (
        type(x) in (Tensor, torch.nn.Parameter)
        and type(weight) is torch.nn.Parameter
        and dense.pays(x, weight, bias)
    ):
        return None
    return dense.linear(x, weight, bias)


def _rows(src: Any, worth: int, dim: Any) -> bool:
    """Whether ``src`` has rows that the kernels take, and enough of them."""
    return (
        isinstance(src, Tensor)
        and src.numel() >= worth
        and src.dim() > 0
        and type(dim) is int
        and dim in (0, -src.dim())
        and src.is_floating_point()
        and type(src) in (Tensor, torch.nn.Parameter)
        and _plain(src)
        and kernels.pick_for(src) is kernels.native
    )


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not kernels.transforming(tensor)
    )


def _is_index(index: Any) -> bool:
    return (
        type(index) is Tensor
        and index.dtype == torch.int64
        and index.dim() == 1
        and index.device.type == "cpu"
    )


def _indexes(index: Any, src: Tensor) -> bool:
    return _is_index(index) and index.numel() == src.size(0)


def _groups(index: Tensor, rows: Any) -> Groups | None:
    """The groups that an index makes; ``None`` if it does not fit ``rows``."""
    if index.numel() == 0:
        return None
    if rows is None:
        rows = remember(index, "rows", lambda: int(index.max()) + 1)
    if type(rows) is not int or rows < 0:
        return None
    try:
        return Groups(index, grouping_of(index, rows))
    except EdgeIndexError:
        return None


def _runs(ptr: Any, src: Tensor) -> Groups | None:
    """The groups whose ends are given; ``None`` if they do not cover ``src``."""
    if not _is_index(ptr) or ptr.numel() == 0:
        return None
    entries = src.size(0)

    def build() -> Groups | None:
        return groups_of_runs(ptr, entries) if are_runs(ptr, entries) else None

    return remember(ptr, ("runs", entries), build)
