"""Data sets of many small graphs for the loading cases."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from benchmarks import graphs


class Stored(InMemoryDataset):
    """An ``InMemoryDataset`` around storage that is there already."""

    def __init__(self, data: Data | HeteroData, slices: dict) -> None:
        super().__init__(None)
        self._data, self.slices = data, slices


def _starts(sizes: Tensor) -> Tensor:
    """Where each graph begins, and where the last ends: [n + 1]."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


class Random:
    """Draws the parts of random graphs of 10 to 40 nodes, all of them at once."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.count = count
        self.nodes = self.whole(10, 41, count)
        self.starts = _starts(self.nodes)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def edges(self, degree: int) -> tuple[Tensor, Tensor]:
        """Edges [2, E] inside each graph, ``degree`` for each node; their starts."""
        sizes = self.nodes * degree
        among = self.nodes.repeat_interleave(sizes)
        uniform = torch.rand(2, len(among), generator=self.generator)
        return (uniform * among).long().clamp_(max=among - 1), _starts(sizes)


@functools.lru_cache(maxsize=2)
def molecules(count: int, seed: int = 0) -> Stored:
    """``x`` [n, 9] int64, ``edge_attr`` [2 n, 3] int64 and ``y`` [1, 1] per graph."""
    draw = Random(count, seed)
    edge_index, edge_starts = draw.edges(2)
    total = int(draw.starts[-1])
    data = Data(
        x=draw.whole(0, 100, total, 9),
        edge_index=edge_index,
        edge_attr=draw.whole(0, 5, edge_index.size(1), 3),
        y=draw.whole(0, 2, count, 1).float(),
    )
    slices = {
        "x": draw.starts,
        "edge_index": edge_starts,
        "edge_attr": edge_starts,
        "y": torch.arange(count + 1),
    }
    return Stored(data, slices)


@functools.lru_cache(maxsize=1)
def bipartite(count: int, seed: int = 0) -> Stored:
    """Graphs of two node types and two edge types, as large as `molecules`."""
    draw = Random(count, seed)
    total = int(draw.starts[-1])
    data, slices = HeteroData(), {}
    for kind in ("atom", "ring"):
        data[kind].x = draw.whole(0, 100, total, 5)
        slices[kind] = {"x": draw.starts}
    for relation in (("atom", "bond", "atom"), ("atom", "in", "ring")):
        edge_index, starts = draw.edges(1)
        data[relation].edge_index = edge_index
        data[relation].edge_attr = draw.whole(0, 5, edge_index.size(1), 3)
        slices[relation] = {"edge_index": starts, "edge_attr": starts}
    data.y = draw.whole(0, 2, count, 1).float()
    slices["_global_store"] = {"y": torch.arange(count + 1)}
    return Stored(data, slices)


def from_folder(name: str, folder: Path) -> Stored:
    """The data set ``name`` of many graphs that ``folder`` has.

    Raises:
        ValueError: the folder has no ``load.py``, or the data set isn't a list.
    """
    loaded = graphs.from_folder(name, folder)
    if not isinstance(loaded, list):
        raise ValueError(f"data set {name!r} isn't a list of graphs")
    return Stored(*InMemoryDataset.collate(loaded))
