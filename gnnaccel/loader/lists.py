"""Plain lists of graphs: packed once they are iterated again, and watched from then on.

Unlike a data set's storage, a list shares nothing with its pack. So every graph of a
batch is looked at when the batch is handed out: is it the same object with the same
attributes, none of them written to since? If not, PyG's own path makes the batch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData

from gnnaccel.data import PackedDataset

#: Share of the free memory that a pack, a second copy of the graphs, may take.
MEMORY_SHARE = 0.25

# What can't change behind an attribute's back. Tensors tell by a version number.
_CONSTANT = (type(None), bool, int, float, str)

#: Of one store: its keys, their values, the tensors among them, what these are told by.
_Mark = tuple[tuple[str, ...], tuple[Any, ...], tuple[Tensor, ...], list[Any]]


class PackedList:
    """A list of graphs and its pack.

    Args:
        graphs: The list; one that `survey` finds packable.
    """

    def __init__(self, graphs: Sequence[BaseData]) -> None:
        self.graphs = graphs
        # Before packing, so that what is written meanwhile is noticed.
        self._known = [(graph, _marks(graph)) for graph in graphs]
        self.packed = PackedDataset(list(graphs))

    def complete(self) -> bool:
        """Whether the list still has as many graphs."""
        return len(self.graphs) == len(self._known)

    def unchanged(self, positions: Tensor) -> bool:
        """Whether some graphs are what they were when they were packed.

        Args:
            positions: Which, int64 [B].
        """
        graphs, known = self.graphs, self._known
        if len(graphs) != len(known):
            return False
        for position in positions.tolist():
            graph, marks = known[position]
            if graphs[position] is not graph:
                return False
            stores = graph.stores
            if len(stores) != len(marks):
                return False
            for store, (keys, values, tensors, seen) in zip(stores, marks, strict=True):
                mapping = store._mapping
                if (
                    tuple(mapping) != keys
                    or not all(map(operator.is_, mapping.values(), values))
                    or [(t._version, t.requires_grad) for t in tensors] != seen
                ):
                    return False
        return True


def _marks(graph: BaseData) -> list[_Mark]:
    marks = []
    for store in graph.stores:
        values = tuple(store._mapping.values())
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        seen = [(tensor._version, tensor.requires_grad) for tensor in tensors]
        marks.append((tuple(store._mapping), values, tensors, seen))
    return marks


def survey(graphs: Sequence[Any]) -> tuple[bool, bool]:
    """Looks through a list once.

    Returns:
        Whether its graphs can be watched and packed: not if there is an attribute that
        could change unseen (a list, a NumPy array), or too little memory for a second
        copy. And whether all have the same stores and attributes.
    """
    nbytes = 0
    schemas = set()
    hetero = isinstance(graphs[0], HeteroData)
    for graph in graphs:
        if not isinstance(graph, HeteroData if hetero else Data):
            return False, False
        schema: list[Any] = [type(graph)]
        for store in graph.stores:
            schema += [store._key, *store._mapping]
            for value in store._mapping.values():
                if type(value) is Tensor:
                    if not _plain(value):
                        return False, False
                    nbytes += value.nbytes
                elif type(value) not in _CONSTANT:
                    return False, False
        schemas.add(tuple(schema))
    return nbytes <= MEMORY_SHARE * _free_memory(), len(schemas) <= 1


def _plain(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_inference()
    )


def _free_memory() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
