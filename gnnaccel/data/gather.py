"""Packs graphs that are Python objects: one walk over their storages and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, NodeStorage
from torch_geometric.typing import SparseTensor

from gnnaccel.data.increments import Rules, node_counts, store_of
from gnnaccel.data.leaves import (
    ABSENT,
    Fields,
    Items,
    NotPackable,
    Objects,
    Rows,
    Signature,
    Store,
    Tree,
    plain,
    prefix_sums,
)


def signature_of(graph: BaseData) -> Signature:
    """What the graph consists of.

    Raises:
        TypeError: It is neither ``Data`` nor ``HeteroData``.
    """
    if not isinstance(graph, (Data, HeteroData)):
        raise TypeError(
            "Expected graphs of type Data or HeteroData "
            f"(got {type(graph).__module__}.{type(graph).__qualname__})"
        )
    stores = tuple((store._key, tuple(store._mapping)) for store in graph.stores)
    return Signature(type(graph), stores)


def gather(
    graphs: Sequence[BaseData],
) -> tuple[list[Store], list[Signature], list[int] | None]:
    """Packs a sequence of graphs.

    Returns:
        The storages that any of them has; the signatures that occur; and which of these
        each graph has, ``None`` if there is but one.

    Raises:
        TypeError: A graph is neither ``Data`` nor ``HeteroData``, or there are both.
    """
    numbers: dict[Signature, int] = {}
    which = [numbers.setdefault(signature_of(g), len(numbers)) for g in graphs]
    if len({issubclass(signature.cls, HeteroData) for signature in numbers}) > 1:
        raise TypeError("Expected graphs of one kind (got both Data and HeteroData)")
    keys: dict[Any, dict[str, None]] = {}
    for signature in numbers:
        for key, names in signature.stores:
            keys.setdefault(key, {}).update(dict.fromkeys(names))
    counts: dict[Any, tuple[Tensor, Tensor | None]] = {}
    for key in keys:
        present = [i for i, g in enumerate(graphs) if _has(g, key)]
        held = [store_of(graphs[i], key) for i in present]
        if isinstance(held[0], NodeStorage) and _numbers_nodes(held):
            found, known = node_counts(held)
            spread = _spread(found, present, len(graphs))
            counts[key] = spread, spread if known is not None else None
    known_counts = {key: known for key, (_, known) in counts.items()}
    stores = []
    for key, names_of_all in keys.items():
        store = Store(key, private=_private(graphs, key))
        if key in counts:
            store.counts = counts[key][0]
        for name in names_of_all:
            present = [i for i, g in enumerate(graphs) if _holds(g, key, name)]
            holders = [graphs[i] for i in present]
            values = [store_of(g, key)._mapping[name] for g in holders]
            if name == "num_nodes":
                store.num_nodes = _scatter(values, present, len(graphs))
                continue
            rules = Rules(type(holders[0]), key, holders, known_counts)
            if len({type(g) for g in holders}) > 1:
                tree: Tree = Objects(values)
            else:
                tree = _pack(name, values, rules)
            store.attrs[name] = _spread_tree(tree, present, len(graphs))
        stores.append(store)
    return stores, list(numbers), which if len(numbers) > 1 else None


def _has(graph: BaseData, key: Any) -> bool:
    if key is None:
        return True
    if isinstance(key, tuple):
        return key in graph._edge_store_dict
    return key in graph._node_store_dict


def _holds(graph: BaseData, key: Any, name: str) -> bool:
    return _has(graph, key) and name in store_of(graph, key)._mapping


_KNOWN = frozenset(("_mapping", "_parent", "_key", "_cached_attr", "_blocks"))


def _private(graphs: Sequence[BaseData], key: Any) -> list[Any] | None:
    """The private fields of each graph's storage: a graph may be a batch itself."""
    held = (store_of(g, key).__dict__ if _has(g, key) else {} for g in graphs)
    found = [{k: v for k, v in d.items() if k not in _KNOWN} for d in held]
    return found if any(found) else None


def _numbers_nodes(stores: Sequence[BaseStorage]) -> bool:
    return any(store.can_infer_num_nodes for store in stores)


def _pack(name: Any, values: list[Any], rules: Rules) -> Tree:
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        return Objects(values)
    try:
        if kind is Tensor:
            return _pack_tensors(str(name), values, rules)
        if kind in (int, float, bool):
            return _pack_numbers(name, values, rules)
    except NotPackable:
        return Objects(values)
    if kind is dict:
        names = list(first)
        if all(list(value) == names for value in values):
            return Fields({k: _pack(k, [v[k] for v in values], rules) for k in names})
    elif kind in (list, tuple) and first:
        tensors = isinstance(first[0], (Tensor, SparseTensor))
        if tensors and all(len(value) == len(first) for value in values):
            columns = zip(*values, strict=True)
            return Items(kind, [_pack(name, list(v), rules) for v in columns])
    return Objects(values)


def _pack_tensors(name: str, values: list[Tensor], rules: Rules) -> Rows:
    first = values[0]
    dtype, ndim = first.dtype, first.dim()
    if not all(plain(v) and v.dtype is dtype and v.dim() == ndim for v in values):
        raise NotPackable
    cat_dim = rules.cat_dim(name, values)
    dim = cat_dim or 0
    stacked = cat_dim is None or ndim == 0
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise NotPackable
    try:
        if stacked:
            dim = 0
            data = torch.stack(values)
            starts = torch.arange(len(values) + 1)
        else:
            dim %= ndim
            data = torch.cat(values, dim).contiguous()
            starts = prefix_sums([v.shape[dim] for v in values])
    except RuntimeError:  # shapes that don't fit: a batch of them is PyG's own error
        raise NotPackable from None
    rows = Rows(data, dim, starts, stacked)
    rules.increments(name, rows)
    return rows


def _pack_numbers(name: Any, values: list[Any], rules: Rules) -> Rows:
    try:
        data = torch.tensor(values)
    except (RuntimeError, OverflowError, ValueError):  # too large for an int64
        raise NotPackable from None
    rows = Rows(data, 0, torch.arange(len(values) + 1), True, numbers=values)
    rules.increments(name, rows)
    return rows


def _scatter(values: list[Any], present: list[int], n: int) -> list[Any]:
    if len(present) == n:
        return values
    out = [ABSENT] * n
    for i, value in zip(present, values, strict=True):
        out[i] = value
    return out


def _spread(prefix: Tensor, present: list[int], n: int) -> Tensor:
    """Prefix sums over all graphs, from those over the graphs that have the store."""
    if len(present) == n or len(prefix) != len(present) + 1:
        return prefix
    sizes = torch.zeros(n, dtype=torch.int64)
    sizes[torch.tensor(present)] = prefix.diff()
    return prefix_sums(sizes)


def _spread_tree(tree: Tree, present: list[int], n: int) -> Tree:
    if len(present) == n:
        return tree
    if isinstance(tree, Rows):
        tree.starts = _spread(tree.starts, present, n)
        tree.inc = tuple(
            inc if len(inc) == n + 1 else _spread(inc, present, n) for inc in tree.inc
        )
        if tree.numbers is not None:
            tree.numbers = _scatter(tree.numbers, present, n)
    elif isinstance(tree, Objects):
        tree.values = _scatter(tree.values, present, n)
    else:
        items = tree.items.values() if isinstance(tree.items, Mapping) else tree.items
        for item in items:
            _spread_tree(item, present, n)
    return tree
