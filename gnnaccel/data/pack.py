"""``Pack``: what a data set's graphs are made of, and one graph out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from gnnaccel.data.flat import flat, is_flat
from gnnaccel.data.gather import gather
from gnnaccel.data.leaves import Signature, Store, plain
from gnnaccel.data.shell import new_graph


class Pack:
    """Graphs in packed form; it does not change once made.

    Attributes:
        n: How many graphs.
        stores: The storages that any graph has, by key.
        signatures: What a graph may consist of.
        which: int64 ``[n]``, the signature of each graph; ``None`` if there is but one.
        prototypes: An empty graph of each signature.
    """

    def __init__(
        self,
        n: int,
        stores: Sequence[Store],
        signatures: list[Signature],
        which: list[int] | None,
        prototypes: list[BaseData],
    ) -> None:
        self.n = n
        self.stores = {store.key: store for store in stores}
        self.signatures = signatures
        self.which = None if which is None else torch.tensor(which)
        self.prototypes = prototypes

    @classmethod
    def of_graphs(cls, graphs: Sequence[BaseData]) -> Pack:
        """Packs graphs that are Python objects.

        Raises:
            ValueError: There is none.
            TypeError: One is neither ``Data`` nor ``HeteroData``.
        """
        if len(graphs) == 0:
            raise ValueError("Expected at least one graph to pack (got none)")
        stores, signatures, which = gather(graphs)
        numbers = range(len(signatures))
        firsts = [0] if which is None else [which.index(s) for s in numbers]
        prototypes = [new_graph(graphs[i]) for i in firsts]
        return cls(len(graphs), stores, signatures, which, prototypes)

    @classmethod
    def of_storage(cls, dataset: InMemoryDataset) -> Pack:
        """Packs all graphs of an ``InMemoryDataset``, subset or not, untransformed."""
        found = flat(dataset) if is_flat(dataset) else None
        if found is None:
            return cls.of_graphs([dataset.get(i) for i in range(dataset.len())])
        stores, signature = found
        kind = HeteroData if issubclass(signature.cls, HeteroData) else Data
        # PyG makes the graphs of such a data set without arguments, too.
        made = signature.cls() if signature.cls is not kind else kind()
        return cls(dataset.len(), stores, [signature], None, [new_graph(made)])

    def signature(self, i: int) -> int:
        """The number of the signature of graph ``i``."""
        return 0 if self.which is None else int(self.which[i])

    def graph(self, i: int) -> BaseData:
        """Graph ``i`` as a PyG object, whose tensors are views of the pack."""
        number = self.signature(i)
        graph = new_graph(self.prototypes[number])
        for key, names in self.signatures[number].stores:
            packed = self.stores[key]
            store = _store(graph, key)
            if packed.private is not None:
                store.__dict__.update(packed.private[i])
            for name in names:
                if name == "num_nodes" and packed.num_nodes is not None:
                    store[name] = packed.num_nodes[i]
                else:
                    store[name] = packed.attrs[name].value(i)
        return graph


def _store(graph: BaseData, key: Any) -> BaseStorage:
    if isinstance(graph, Data):
        return graph._store
    if key is None:
        return graph._global_store
    if isinstance(key, tuple):
        return graph.get_edge_store(*key)
    return graph.get_node_store(key)


class Marks:
    """Notices when the storage of an ``InMemoryDataset`` is replaced or written to."""

    def __init__(self, dataset: InMemoryDataset) -> None:
        self._dataset = dataset
        self._seen = self._look()
        # Over the memory that they have now, wherever torch moves that.
        self._memory = [
            (value, value.detach()) for value, _ in self._seen if plain(value)
        ]

    def __reduce__(self) -> Any:
        # A pack that was sent or copied has its storage to itself: nothing to notice.
        return type(None), ()

    def _look(self) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = [(self._dataset._data, 0)]
        _walk(self._dataset.slices, found)
        for store in self._dataset._data.stores:
            _walk(store._mapping, found)
            _walk(store.__dict__.get("_num_nodes"), found)
        return found

    def changed(self) -> bool:
        """Whether it was."""
        now = self._look()
        return (
            len(now) != len(self._seen)
            or any(
                a is not b or x != y
                for (a, x), (b, y) in zip(now, self._seen, strict=True)
            )
            or not all(value.is_set_to(memory) for value, memory in self._memory)
        )


def _walk(value: Any, found: list[tuple[Any, Any]]) -> None:
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        found.append((value, (version, value.requires_grad)))
    elif isinstance(value, dict):
        found.append((value, len(value)))
        for item in value.values():
            _walk(item, found)
    elif isinstance(value, list):
        found.append((value, len(value)))
        if value and isinstance(value[0], (Tensor, dict, list)):
            for item in value:
                _walk(item, found)
    else:
        found.append((value, 0))
