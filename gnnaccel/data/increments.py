"""``__inc__``, ``__cat_dim__`` and ``num_nodes`` of many graphs at once.

PyG asks every graph of every batch. Where a class leaves PyG's rules alone they are
computed for all graphs together; where it overrides one, each graph is asked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, EdgeStorage

from gnnaccel.data.leaves import NotPackable, Rows, prefix_sums

#: dtypes whose increments the copy itself adds.
_COUNTED = (torch.int64, torch.int32)


def store_of(graph: BaseData, key: Any) -> BaseStorage:
    """The storage of a graph with that key, which it has."""
    if isinstance(graph, Data):
        return graph._store
    if key is None:
        return graph._global_store
    if isinstance(key, tuple):
        return graph._edge_store_dict[key]
    return graph._node_store_dict[key]


class Rules:
    """The rules of one store of the graphs.

    Args:
        cls: The graphs' class.
        key: The store's key.
        graphs: The graphs that have the store; touched only where a rule is overridden.
        counts: The nodes of each of these graphs by the key of the node store, prefix
            sums ``[n + 1]``; ``None`` where a graph does not know.
    """

    def __init__(
        self,
        cls: type[Any],
        key: Any,
        graphs: Sequence[BaseData],
        counts: dict[Any, Tensor | None],
    ) -> None:
        self._key = key
        self._graphs = graphs
        self._counts = counts
        base = HeteroData if issubclass(cls, HeteroData) else Data
        self._hetero = base is HeteroData
        self._own_cat_dim = cls.__cat_dim__ is not base.__cat_dim__
        self._own_inc = cls.__inc__ is not base.__inc__
        self._own_num_nodes = cls.num_nodes is not base.num_nodes

    @property
    def default(self) -> bool:
        """Whether increments of a graph without this store are known all the same."""
        return not self._own_inc

    def cat_dim(self, name: str, values: Sequence[Any] | None = None) -> int | None:
        """Along which dimension the attribute's tensors are joined.

        Raises:
            NotPackable: The graphs don't agree, or it is no dimension.
        """
        if not self._own_cat_dim:
            index = "index" in name or (name == "face" and not self._hetero)
            edges = not self._hetero or isinstance(self._key, tuple)
            return -1 if index and edges else 0
        found = set()
        for i, graph in enumerate(self._graphs):
            store = store_of(graph, self._key)
            value = store[name] if values is None else values[i]
            found.add(graph.__cat_dim__(name, value, store))
            if len(found) > 1:
                raise NotPackable
        (dim,) = found
        if dim is not None and type(dim) is not int:
            raise NotPackable
        return dim

    def increments(self, name: Any, rows: Rows) -> None:
        """Finds what is added to the attribute in each graph, and notes it in ``rows``.

        Raises:
            NotPackable: The copy can't add that.
        """
        found = self._asked(name, rows) if self._own_inc else self._computed(name, rows)
        if not found:
            return
        column = len(found) > 1 or rows.inc_column
        if rows.data.dtype not in _COUNTED:
            raise NotPackable
        if column and (
            # int32 + int64 [2, 1] is int64 in torch; and shapes must fit.
            rows.data.dtype is not torch.int64
            or rows.stacked
            or rows.data.dim() != 2
            or rows.dim != 1
            or rows.data.shape[0] != len(found)
        ):
            raise NotPackable
        rows.inc = tuple(found)

    def _computed(self, name: Any, rows: Rows) -> list[Tensor]:
        if not isinstance(name, str):
            raise NotPackable
        if "batch" in name and rows.numbers is None:
            return [prefix_sums(_largest(rows))]
        if "index" not in name and (self._hetero or name != "face"):
            return []
        if not self._hetero:
            return [self._nodes(None)]
        if not isinstance(self._key, tuple):
            return []
        if rows.numbers is not None:
            raise NotPackable
        rows.inc_column = True
        return [self._nodes(self._key[0]), self._nodes(self._key[-1])]

    def _nodes(self, key: Any) -> Tensor:
        if self._own_num_nodes and not self._hetero:
            numbers = [graph.num_nodes for graph in self._graphs]
            if not all(type(n) is int for n in numbers):
                raise NotPackable
            return prefix_sums(numbers)
        counts = self._counts.get(key)
        if counts is None:
            raise NotPackable
        return counts

    def _asked(self, name: Any, rows: Rows) -> list[Tensor]:
        answers = []
        for i, graph in enumerate(self._graphs):
            store = store_of(graph, self._key)
            answers.append(graph.__inc__(name, rows.joined(i), store))
        first = answers[0]
        if all(type(a) is int for a in answers):
            return [prefix_sums(answers)] if any(answers) else []
        if not all(
            isinstance(a, Tensor)
            and a.dtype is torch.int64
            and a.device.type == "cpu"
            and a.shape == first.shape
            for a in answers
        ):
            raise NotPackable
        if first.dim() == 0:
            return [prefix_sums(torch.stack(answers))]
        if first.dim() != 2 or first.shape[1] != 1 or rows.numbers is not None:
            raise NotPackable
        rows.inc_column = True
        columns = torch.stack(answers).squeeze(-1)
        return [prefix_sums(columns[:, r]) for r in range(columns.shape[1])]


def _largest(rows: Rows) -> list[int]:
    """One more than the largest number of each graph: what ``batch`` vectors add."""
    try:
        found = [int(rows.joined(i).max()) + 1 for i in range(len(rows.starts) - 1)]
    except (RuntimeError, ValueError, OverflowError):  # an empty one: PyG's own error
        raise NotPackable from None
    return found


def node_counts(
    stores: Sequence[BaseStorage],
) -> tuple[Tensor, Tensor | None]:
    """How many nodes each store has; ``(as batches count them, as graphs know them)``.

    Both are prefix sums ``[n + 1]``. PyG numbers the nodes of a graph that doesn't know
    as none, but can't increment its indices: the second is then ``None``.
    """
    numbers = [store.num_nodes for store in stores]
    counts = prefix_sums([n or 0 for n in numbers])
    return counts, None if any(n is None for n in numbers) else counts


def is_edge_store(store: BaseStorage) -> bool:
    """Whether it holds edges only."""
    return isinstance(store, EdgeStorage)
