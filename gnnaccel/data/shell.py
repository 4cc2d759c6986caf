"""Empty graphs and batches, made without running their constructor each time."""

from __future__ import annotations

import weakref
from typing import Any

from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import (
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
)

from gnnaccel.data.storage import SLAB_CLASSES

_OWN = frozenset(("_store", "_global_store", "_node_store_dict", "_edge_store_dict"))


def new_graph(prototype: BaseData) -> BaseData:
    """A graph like ``prototype``, without any storage of its type's nodes and edges.

    Classes may ask for arguments, so no constructor is called.
    """
    cls: Any = type(prototype)
    graph: BaseData = cls.__new__(cls)
    fields = graph.__dict__
    fields.update((k, v) for k, v in prototype.__dict__.items() if k not in _OWN)
    if isinstance(prototype, HeteroData):
        fields["_global_store"] = BaseStorage(_parent=graph)
        fields["_node_store_dict"] = {}
        fields["_edge_store_dict"] = {}
    else:
        fields["_store"] = GlobalStorage(_parent=graph)
    return graph


class BatchShell:
    """Makes empty batches of one class of graphs, each with the storages it asks for.

    Args:
        cls: The graphs' class.
    """

    def __init__(self, cls: type[Any]) -> None:
        self._base = cls
        self._hetero = issubclass(cls, HeteroData)
        sample = self._construct()
        self._cls: Any = type(sample)
        self._fields = {k: v for k, v in sample.__dict__.items() if k not in _OWN}
        init = HeteroData.__init__ if self._hetero else Data.__init__
        # A constructor of its own may set whatever it likes; then it runs.
        self._plain = cls.__init__ is init or issubclass(cls, Batch)

    def _construct(self) -> Batch:
        return Batch(_base_cls=self._base)

    def __call__(self, keys: list[Any]) -> tuple[Batch, list[BaseStorage]]:
        """An empty batch and its storages with these keys, in that order."""
        if not self._plain:
            return self._constructed(keys)
        batch: Batch = self._cls.__new__(self._cls)
        fields = batch.__dict__
        fields.update(self._fields)
        parent = weakref.ref(batch)
        stores: list[BaseStorage] = []
        if not self._hetero:
            store = _new_store(GlobalStorage, parent, None)
            fields["_store"] = store
            return batch, [store]
        nodes: dict[Any, Any] = {}
        edges: dict[Any, Any] = {}
        fields["_global_store"] = None
        fields["_node_store_dict"] = nodes
        fields["_edge_store_dict"] = edges
        for key in keys:
            if key is None:
                store = fields["_global_store"] = _new_store(BaseStorage, parent, None)
            elif isinstance(key, tuple):
                store = edges[key] = _new_store(EdgeStorage, parent, key)
            else:
                store = nodes[key] = _new_store(NodeStorage, parent, key)
            stores.append(store)
        return batch, stores

    def _constructed(self, keys: list[Any]) -> tuple[Batch, list[BaseStorage]]:
        batch = self._construct()
        stores = []
        for key in keys:
            if not self._hetero:
                store = batch._store
            elif key is None:
                store = batch._global_store
            elif isinstance(key, tuple):
                store = batch.get_edge_store(*key)
            else:
                store = batch.get_node_store(key)
            # A storage takes plain assignments for attributes of the graph.
            object.__setattr__(store, "__class__", SLAB_CLASSES[type(store)])
            stores.append(store)
        return batch, stores


def _new_store(kind: type[Any], parent: weakref.ref[Any], key: Any) -> BaseStorage:
    cls: Any = SLAB_CLASSES[kind]
    store: BaseStorage = cls.__new__(cls)
    fields = store.__dict__
    fields["_mapping"] = {}
    fields["_parent"] = parent
    if key is not None:
        fields["_key"] = key
    return store
