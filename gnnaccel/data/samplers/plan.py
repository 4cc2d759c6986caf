"""Cutting an order of graphs into batches: plain NumPy, no data set, no randomness.

A plan is the list of its bounds: batch ``b`` holds ``order[bounds[b]:bounds[b + 1]]``.
Batches are runs of the order, so no graph can be lost or come twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

#: Graphs per batch from which searching once per batch is the quicker way.
MANY = 24


def cut(sizes: Ints, limits: Ints, max_graphs: int | None) -> Ints:
    """The bounds of the longest batches that keep to every limit.

    Args:
        sizes: ``[k, n]``, int64: ``k`` sizes of each graph, in the order to cut.
        limits: ``[k]``, int64: what the sizes of one batch may add up to. A graph that
            is larger by itself becomes a batch of its own.
        max_graphs: Most graphs in one batch, if limited.

    Returns:
        ``[B + 1]``, int64, rising from 0 to ``n`` without a repeat.
    """
    n = sizes.shape[1]
    befores = [np.concatenate([[0], np.cumsum(row)]) for row in sizes]
    # No limit above the total: adding it could overflow.
    most = [min(lim, b[-1]) for lim, b in zip(limits, befores, strict=True)]
    ranges = list(zip(befores, most, strict=True))
    longest = n if max_graphs is None else max_graphs
    fewest = max([before[-1] / max(limit, 1) for before, limit in ranges], default=0)
    if fewest * MANY > n:
        return _cut_everywhere(ranges, longest, n)
    bounds = [0]
    while (start := bounds[-1]) < n:
        end = min(start + longest, n)
        for before, limit in ranges:
            end = min(end, before.searchsorted(before[start] + limit, "right") - 1)
        bounds.append(max(int(end), start + 1))
    return np.array(bounds, dtype=np.int64)


def _cut_everywhere(ranges: list[tuple[Ints, int]], longest: int, n: int) -> Ints:
    """:func:`cut`, at its best where batches are short.

    Finds the end of a batch for every start, in one search for each size, instead of
    searching once per batch.
    """
    starts = np.arange(n)
    ends = np.minimum(starts + longest, n)
    for before, limit in ranges:
        found = np.searchsorted(before, before[:-1] + limit, side="right")
        ends = np.minimum(ends, found - 1)
    ends = np.maximum(ends, starts + 1)
    bounds = [0]
    while bounds[-1] < n:
        bounds.append(ends.item(bounds[-1]))
    return np.array(bounds, dtype=np.int64)


def split(bounds: Ints, count: int) -> Ints:
    """Halves the batches with the most graphs until there are ``count`` batches.

    Args:
        bounds: ``[B + 1]``, as from :func:`cut`.
        count: How many batches there shall be: at least ``B``, at most one per graph.

    Returns:
        ``[count + 1]``, int64.
    """
    while (missing := count + 1 - len(bounds)) > 0:
        lengths = np.diff(bounds)
        largest = np.argsort(-lengths, kind="stable")[:missing]
        largest = largest[lengths[largest] > 1]
        middles = bounds[largest] + lengths[largest] // 2
        bounds = np.sort(np.concatenate([bounds, middles]))
    return bounds
