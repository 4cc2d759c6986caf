"""How large the graphs of a data set are: nodes, edges, bytes.

Sizes are what PyG itself reports for ``dataset[i]``. They are read off the slices of
an ``InMemoryDataset`` where that gives the same; other data sets are gone through once,
graph by graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from torch_geometric.data.data import BaseData

from gnnaccel.data.samplers.slices import sliced_size
from gnnaccel.data.samplers.tensors import num_bytes

Ints = NDArray[np.int64]


def graph_sizes(dataset: Any, kinds: Sequence[str]) -> Ints:
    """The sizes of every graph.

    A data set that knows them better says so by a method ``graph_sizes(kind)``, which
    returns ``[n]`` integers, or ``None`` if each graph has to be asked after all;
    ``kind`` is one of those below.

    Args:
        dataset: Any data set with a length: PyG's, torch's, a list of graphs. An item
            may also be a tuple, list or dict of graphs, whose sizes are added up.
        kinds: Which sizes: ``"nodes"`` and ``"edges"`` (of all types together),
            ``"bytes"`` (of the tensors).

    Returns:
        ``[len(kinds), n]``, int64.

    Raises:
        TypeError: The data set has no length, or an item is no graph.
        ValueError: A graph does not say how many nodes it has.
    """
    if not hasattr(type(dataset), "__len__"):
        raise TypeError(
            f"Expected a data set with a length (got {type(dataset).__name__}): wrap "
            f"an iterable data set in a list"
        )
    n = len(dataset)
    if not kinds:
        return np.zeros((0, n), dtype=np.int64)
    if type(dataset) is Subset:
        return graph_sizes(dataset.dataset, kinds)[:, _integers(dataset.indices, n)]
    if type(dataset) is ConcatDataset:
        parts = [graph_sizes(part, kinds) for part in dataset.datasets]
        return np.concatenate(parts, axis=1)
    if hasattr(type(dataset), "graph_sizes"):
        known = {kind: dataset.graph_sizes(kind) for kind in kinds}
    else:
        known = {kind: sliced_size(dataset, kind) for kind in kinds}
    unknown = [kind for kind in kinds if known[kind] is None]
    if unknown:
        known.update(zip(unknown, _measure(dataset, unknown, n), strict=True))
    return np.stack([_integers(known[kind], n) for kind in kinds])


def _integers(values: Any, n: int) -> Ints:
    found = np.asarray(values, dtype=np.int64).reshape(-1)
    if len(found) != n:
        raise ValueError(f"Expected a size for each of {n} graphs (got {len(found)})")
    return found


def _measure(dataset: Any, kinds: Sequence[str], n: int) -> Ints:
    """One pass over the data set: ``[len(kinds), n]``."""
    sizes = np.zeros((len(kinds), n), dtype=np.int64)
    with _same_randomness():
        for index in range(n):
            graphs = list(_graphs(dataset[index], index))
            for row, kind in enumerate(kinds):
                sizes[row, index] = sum(_size(graph, kind, index) for graph in graphs)
    return sizes


@contextmanager
def _same_randomness() -> Iterator[None]:
    """What random transforms draw inside leaves the generators as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _graphs(item: Any, index: int) -> Iterator[BaseData]:
    if isinstance(item, BaseData):
        yield item
    elif isinstance(item, (tuple, list, Mapping)):
        for part in item.values() if isinstance(item, Mapping) else item:
            if isinstance(part, (BaseData, tuple, list, Mapping)):
                yield from _graphs(part, index)
    else:
        raise TypeError(
            f"Expected item {index} of the data set to be a graph, or a tuple or dict "
            f"of graphs (got {type(item).__name__})"
        )


def _size(graph: BaseData, kind: str, index: int) -> int:
    if kind == "bytes":
        return num_bytes(graph)
    size: Any = graph.num_nodes if kind == "nodes" else graph.num_edges
    if size is None:
        raise ValueError(
            f"Graph {index} does not say how many {kind} it has (got {graph}): set its "
            f"'num_{kind}'"
        )
    return int(size.item() if isinstance(size, Tensor) else size)
