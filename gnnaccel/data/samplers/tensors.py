"""The bytes of a graph's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor


def num_bytes(graph: BaseData) -> int:
    """What the tensors of a graph weigh, nested ones included.

    A number counts as the tensor element that PyG's collate makes of it; strings,
    arrays and whatever else no batch turns into a tensor count nothing.
    """
    return sum(
        value_bytes(value)
        for store in graph.stores
        for key, value in store.items()
        if key != "num_nodes"
    )


def value_bytes(value: Any) -> int:
    """The share of one attribute in :func:`num_bytes`."""
    if isinstance(value, Tensor):
        return sum(part.numel() * part.element_size() for part in parts(value))
    if isinstance(value, SparseTensor):
        return sum(value_bytes(part) for part in value.coo())
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value).element_size()
    if isinstance(value, Mapping):
        return sum(value_bytes(part) for part in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        # Of lists, collate only makes tensors of those that hold tensors.
        return sum(
            value_bytes(part)
            for part in value
            if not isinstance(part, (bool, int, float, str))
        )
    return 0


def parts(value: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor of any layout consists of."""
    if value.layout == torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    if value.is_nested:
        return tuple(value.unbind())
    return (value,)
