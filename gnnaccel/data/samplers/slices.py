"""Sizes of the graphs of an ``InMemoryDataset``, read off its slices.

PyG infers the number of nodes and edges of a graph from the first attribute, in the
order of keys, whose name tells (``NodeStorage.num_nodes``, ``EdgeStorage.num_edges``);
these functions follow that search on the collated storage. Wherever it would take
another turn (an inference from the largest index, an attribute that is no tensor, a
class with its own ``num_nodes``) they return ``None``: ask each graph instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData, InMemoryDataset
from torch_geometric.data.storage import E_KEYS, N_KEYS, BaseStorage

from gnnaccel.data.samplers.tensors import value_bytes


def sliced_size(dataset: Any, kind: str) -> Tensor | None:
    """The sizes of the graphs of a data set, if its slices tell them.

    Args:
        dataset: Anything.
        kind: ``"nodes"``, ``"edges"`` or ``"bytes"``.

    Returns:
        ``[len(dataset)]``, int64, or ``None``.
    """
    if not _is_plain(dataset):
        return None
    data, n = dataset._data, dataset.len()
    measure = {"nodes": _nodes, "edges": _edges, "bytes": _bytes}[kind]
    stores = {"nodes": data.node_stores, "edges": data.edge_stores}
    total = torch.zeros(n, dtype=torch.int64)
    for store in stores.get(kind, data.stores):
        key = store._key
        slices = dataset.slices if key is None else dataset.slices.get(key)
        found = None if slices is None else measure(data, store, slices, n)
        if found is None:
            return None
        total += found
    if dataset._indices is None:
        return total
    return total[torch.as_tensor(list(dataset._indices), dtype=torch.int64)]


def _is_plain(dataset: Any) -> bool:
    """Whether ``dataset[i]`` is what the slices say, and reports PyG's own sizes."""
    if not isinstance(dataset, InMemoryDataset):
        return False
    own, kind = type(dataset), type(dataset._data)
    stock = Data if isinstance(dataset._data, Data) else HeteroData
    return (
        dataset.transform is None
        and own.get is InMemoryDataset.get
        and own.__getitem__ is Dataset.__getitem__
        and isinstance(dataset.slices, Mapping)
        and dataset.len() > 1
        and issubclass(kind, stock)
        and kind.num_nodes in (Data.num_nodes, HeteroData.num_nodes)
        and kind.num_edges is stock.num_edges
    )


def _nodes(data: Any, store: BaseStorage, slices: Any, n: int) -> Tensor | None:
    given = store.__dict__.get("_num_nodes")
    if given is not None:
        known = len(given) == n and None not in given
        return torch.as_tensor(given, dtype=torch.int64) if known else None
    if "num_nodes" in slices:
        return None
    return _first(data, store, slices, N_KEYS, "node")


def _edges(data: Any, store: BaseStorage, slices: Any, n: int) -> Tensor | None:
    if {"num_edges", "adj", "adj_t"}.intersection(slices):
        return None
    if not any(key in E_KEYS or "edge" in key for key in slices if key in store):
        return torch.zeros(n, dtype=torch.int64)
    return _first(data, store, slices, E_KEYS, "edge")


def _first(
    data: Any, store: BaseStorage, slices: Any, names: set[str], part: str
) -> Tensor | None:
    """The extents of the first attribute that is named so, or else has ``part``."""
    keys = [key for key in slices if key in store]
    telling = [key for key in keys if key in names]
    telling += [key for key in keys if part in key]
    if not telling:
        return None
    key = telling[0]
    value = store[key]
    if not isinstance(value, Tensor) or data.__cat_dim__(key, value, store) is None:
        return None
    return _extents(slices[key])


def _extents(slices: Tensor) -> Tensor:
    return (slices[1:] - slices[:-1]).to("cpu", torch.int64)


def _bytes(data: Any, store: BaseStorage, slices: Any, n: int) -> Tensor | None:
    total = torch.zeros(n, dtype=torch.int64)
    for key in slices:
        if key in store:
            found = _value_bytes(data, store, key, store[key], slices[key], n)
            if found is None:
                return None
            total += found
    return total


def _value_bytes(
    data: Any, store: BaseStorage, key: str, value: Any, slices: Any, n: int
) -> Tensor | None:
    """``[n]``: what the graphs' shares of one attribute weigh."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            return None
        dim = data.__cat_dim__(str(key), value, store) or 0
        extents = _extents(slices)
        if len(extents) != n or value.dim() == 0 or extents.sum() != value.size(dim):
            return None
        row = value.element_size() * value.numel() // max(value.size(dim), 1)
        return extents * row
    nested: list[tuple[str, Any, Any]] | None = None
    if isinstance(value, Mapping):
        nested = [(name, part, slices[name]) for name, part in value.items()]
    elif isinstance(value, Sequence) and not isinstance(slices, Tensor):
        nested = [(key, *pair) for pair in zip(value, slices, strict=True)]
    if nested is not None:
        shares = [_value_bytes(data, store, *part, n) for part in nested]
        found = [share for share in shares if share is not None]
        whole = torch.zeros(n, dtype=torch.int64)
        return sum(found, whole) if len(found) == len(shares) else None
    if isinstance(value, Sequence) and len(value) == n:
        # One object per graph. Numbers became a tensor, so these are none.
        return torch.tensor([value_bytes(part) for part in value])
    return None
