"""Which data sets the packed path serves, and where a sampler's indices lie in them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_geometric.data import Dataset, InMemoryDataset

from gnnaccel.data import PackedDataset

Locate = Callable[[Any], Tensor | None]

# What decides which graph an index stands for: a class that has its own of these is
# asked graph by graph.
_READERS = ("__getitem__", "__len__", "get", "indices", "len")


def unwrap(dataset: Any) -> tuple[Any, list[Subset]]:
    """The data set under any ``Subset``, and those subsets, outermost first."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


def serves(dataset: Any) -> bool:
    """Whether every graph of ``dataset`` is what lies in its storage."""
    for base in (PackedDataset, InMemoryDataset):
        if isinstance(dataset, base):
            return dataset.transform is None and _reads_like(dataset, base)
    return False


def _reads_like(dataset: Dataset, base: type) -> bool:
    own, kind = vars(dataset), type(dataset)
    return not any(
        name in own or getattr(kind, name) is not getattr(base, name)
        for name in _READERS
    )


def state(dataset: Any) -> tuple[Any, ...]:
    """The objects that make up ``dataset``; another identity: another content."""
    if isinstance(dataset, PackedDataset):
        return (dataset,)
    return (dataset, dataset._data, dataset.slices, dataset._indices)


def locator(subsets: list[Subset]) -> Locate:
    """Maps what a sampler gives for one batch to positions in the data set.

    Args:
        subsets: What lies between the sampler and the data set, outermost first.

    Returns:
        A function that gives int64 [B], or None for what is not plainly a list of
        integers.
    """

    def locate(index: Any) -> Tensor | None:
        if isinstance(index, Tensor) and not subsets:
            plain = index.dtype == torch.int64 and index.dim() == 1
            return index.cpu().contiguous() if plain and len(index) else None
        if isinstance(index, (Tensor, np.ndarray)):
            index = index.tolist()
        if not isinstance(index, (list, tuple, range)) or not index:
            return None
        for subset in subsets:
            indices = subset.indices
            index = [indices[i] for i in index]
        try:
            # The one conversion that takes integers of any kind and nothing else.
            numbers = array("q", index)
        except (TypeError, OverflowError):
            return None
        return torch.frombuffer(numbers, dtype=torch.int64)

    return locate
