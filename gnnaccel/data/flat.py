"""Packs an ``InMemoryDataset``: its storage is packed already, and taken as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.data.separate import _separate, separate
from torch_geometric.data.storage import (
    N_KEYS,
    BaseStorage,
    NodeStorage,
)
from torch_geometric.typing import SparseTensor

from gnnaccel.data.increments import Rules, node_counts, store_of
from gnnaccel.data.leaves import (
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


def is_flat(dataset: Any) -> bool:
    """Whether the data set's own storage says what its graphs are.

    A class that makes its graphs in another way overrides ``get`` (or more).
    """
    if not isinstance(dataset, InMemoryDataset):
        return False
    cls = type(dataset)
    return (
        cls.get is InMemoryDataset.get
        and cls.len is InMemoryDataset.len
        and cls.__getitem__ is InMemoryDataset.__getitem__
        and isinstance(dataset._data, (Data, HeteroData))
        and dataset.slices is not None
        and dataset.len() > 1
    )


class _Graphs(Sequence[BaseData]):
    """The graphs of a storage, made when one of them is asked for, and kept."""

    def __init__(self, data: BaseData, slices: Any, n: int) -> None:
        self._data, self._slices, self._n = data, slices, n
        self._made: list[BaseData] = []

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        if not self._made:
            cls = self._data.__class__
            self._made = [
                separate(cls, self._data, j, self._slices, decrement=False)
                for j in range(self._n)
            ]
        return self._made[i]


class _Attribute:
    """One attribute's storage on the walk through it."""

    def __init__(
        self, data: BaseData, store: BaseStorage, n: int, rules: Rules
    ) -> None:
        self.data, self.store, self.n, self.rules = data, store, n, rules

    def pack(self, name: Any, value: Any, slices: Any) -> Tree:
        """The tree of the part ``value``, by the cases of PyG's ``_separate``."""
        if isinstance(value, Tensor):
            try:
                return self._rows(str(name), value, slices)
            except NotPackable:
                return self._objects(name, value, slices)
        if type(value) is dict and isinstance(slices, Mapping):
            return Fields({k: self.pack(k, v, slices[k]) for k, v in value.items()})
        if (
            isinstance(value, list)
            and value
            and isinstance(value[0], (Tensor, SparseTensor))
            and isinstance(slices, Sequence)
        ):
            parts = zip(value, slices, strict=True)
            return Items(list, [self.pack(name, v, s) for v, s in parts])
        return self._objects(name, value, slices)

    def _objects(self, name: Any, value: Any, slices: Any) -> Objects:
        def one(i: int) -> Any:
            return _separate(
                name, value, i, slices, None, self.data, self.store, decrement=False
            )

        return Objects([one(i) for i in range(self.n)])

    def _rows(self, name: str, value: Tensor, slices: Any) -> Rows:
        if not (plain(value) and isinstance(slices, Tensor) and slices.dim() == 1):
            raise NotPackable
        # Tensors of our own over the same memory: PyG's may be given another.
        value, slices = value.detach(), slices.detach()
        starts = slices.to("cpu", torch.int64).contiguous()
        cat_dim = self.data.__cat_dim__(name, value, self.store)
        if cat_dim is not None and type(cat_dim) is not int:
            raise NotPackable
        dim = cat_dim or 0
        if not -value.dim() <= dim < value.dim():
            raise NotPackable
        dim %= value.dim()
        sizes = starts.diff()
        if (
            len(starts) != self.n + 1
            or int(sizes.min()) < 0
            or int(starts[0]) < 0
            or int(starts[-1]) > value.shape[dim]
        ):
            raise NotPackable
        stacked = cat_dim is None
        if stacked and not bool((sizes == 1).all()):
            raise NotPackable
        rows = Rows(value.contiguous(), dim, starts, stacked)
        if self.rules.cat_dim(name, _Values(rows)) != cat_dim:
            raise NotPackable
        self.rules.increments(name, rows)
        return rows


class _Values(Sequence[Any]):
    """The values of ``rows``, made when they are asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows.starts) - 1

    def __getitem__(self, i: Any) -> Any:
        return self._rows.value(i)


def flat(dataset: InMemoryDataset) -> tuple[list[Store], Signature] | None:
    """Packs the whole storage of a data set that :func:`is_flat`.

    Returns:
        Its storages and the signature of its graphs; ``None`` if graphs differ in what
        they have (a ``None`` among an attribute's values).
    """
    data, slices, n = dataset._data, dataset.slices, dataset.len()
    graphs = _Graphs(data, slices, n)
    cls = type(data)
    found: list[Store] = []
    names: list[tuple[Any, tuple[str, ...]]] = []
    # Nodes first: the indices of edges are incremented by how many there are.
    counts: dict[Any, Tensor | None] = {}
    plans = [_plan(data, store, slices) for store in data.stores]
    for part, (attrs, numbers) in zip(data.stores, plans, strict=True):
        key = part._key
        store = Store(key)
        found.append(store)
        names.append((key, (*attrs, *(["num_nodes"] if numbers is not None else []))))
        if numbers is not None:
            if any(number is None for number in numbers):
                return None
            store.num_nodes = numbers
        if isinstance(part, NodeStorage) and _infers(names[-1][1], part):
            store.counts, counts[key] = _counts(part, attrs, numbers, graphs, data)
    for part, store, (attrs, _) in zip(data.stores, found, plans, strict=True):
        walk = _Attribute(data, part, n, Rules(cls, part._key, graphs, counts))
        for name, where in attrs.items():
            tree = walk.pack(name, part[name], where)
            if isinstance(tree, Objects) and any(v is None for v in tree.values):
                return None
            store.attrs[name] = tree
    return found, Signature(cls, tuple(names))


def _plan(
    data: BaseData, store: BaseStorage, slices: Any
) -> tuple[dict[str, Any], list[Any] | None]:
    """The slices of what a graph gets, in order, and its ``num_nodes``."""
    if store._key is None:
        attrs = {name: s for name, s in slices.items() if name in store._mapping}
    else:
        attrs = dict(slices.get(store._key, {}))
    numbers = store.__dict__.get("_num_nodes")
    if "num_nodes" in attrs:
        # Written by an old PyG: not a leaf, since PyG sums it in a batch.
        where, values = attrs.pop("num_nodes"), store["num_nodes"]
        if numbers is None:
            numbers = [
                _separate(
                    "num_nodes", values, i, where, None, data, store, decrement=False
                )
                for i in range(len(where) - 1)
            ]
    return attrs, None if numbers is None else list(numbers)


def _infers(names: Sequence[str], store: BaseStorage) -> bool:
    probe = NodeStorage()
    probe._mapping = dict.fromkeys(names)
    return bool(probe.can_infer_num_nodes)


def _counts(
    store: BaseStorage,
    attrs: dict[str, Any],
    numbers: list[Any] | None,
    graphs: _Graphs,
    data: BaseData,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`increments.node_counts`, out of the slices wherever they say it."""
    if numbers is not None and all(type(number) is int for number in numbers):
        counts = prefix_sums(numbers)
        return counts, counts
    if numbers is None:
        order = [name for name in attrs if name in N_KEYS] or [
            name for name in attrs if "node" in name
        ]
        for name in order:
            value, where = store[name], attrs[name]
            if not (isinstance(value, Tensor) and isinstance(where, Tensor)):
                break
            if type(data).__cat_dim__ not in (Data.__cat_dim__, HeteroData.__cat_dim__):
                break
            counts = prefix_sums(where.to("cpu", torch.int64).diff())
            return counts, counts
    made = list(graphs)  # a store only lives, and knows its rules, as long as its graph
    return node_counts([store_of(graph, store._key) for graph in made])
