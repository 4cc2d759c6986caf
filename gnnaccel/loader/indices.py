"""From what a sampler gives to positions in the data set below any subsets."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

Locate = Callable[[Any], Tensor | None]


def unwrap(dataset: Any) -> tuple[Any, list[Subset]]:
    """The data set under any ``Subset``, and those subsets, outermost first."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, subsets


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
