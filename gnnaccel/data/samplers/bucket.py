"""Mini-batches of graphs of like size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Generator

from gnnaccel.data.samplers.budget import BudgetBatchSampler
from gnnaccel.data.samplers.checks import check_choice, check_count
from gnnaccel.data.samplers.plan import Ints


class BucketBatchSampler(BudgetBatchSampler):
    """Batches of graphs of like size, in random order.

    Graphs are sorted by size into buckets of equally many. An epoch shuffles the
    graphs within each bucket, cuts the buckets one after the other into batches, and
    shuffles these. Dense batches (``to_dense_batch``) then need little padding, and
    on several ranks the batches of one step are of like size, so that no rank waits
    for another.

    All else (budgets, length, ranks, resume) is :class:`BudgetBatchSampler`'s.

    Args:
        dataset: See :class:`BudgetBatchSampler`.
        max_nodes: Most nodes in a batch.
        max_edges: Most edges in a batch.
        max_graphs: Most graphs in a batch: a plain batch size.
        max_bytes: Most bytes of tensors in a batch.
        by: The size that counts: ``"nodes"``, ``"edges"`` or ``"bytes"``.
        buckets: How many. More of them make sizes more alike and batches less random.
            ``None``: as many as leave about four batches in each, at most 32.
        shuffle: Whether each epoch has a new random order. Without it graphs come by
            bucket, and in a bucket by position in the data set.
        too_big: See :class:`BudgetBatchSampler`.
        generator: See :class:`BudgetBatchSampler`.
        rank: See :class:`BudgetBatchSampler`.
        world_size: See :class:`BudgetBatchSampler`.

    Raises:
        ValueError: As there, or ``by`` or ``buckets`` is out of range.
        TypeError: As there.

    Example::

        sampler = BucketBatchSampler(dataset, max_graphs=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        by: str = "nodes",
        buckets: int | None = None,
        shuffle: bool = True,
        too_big: str = "error",
        generator: Generator | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.by = check_choice("by", by, ("nodes", "edges", "bytes"))
        if buckets is not None:
            buckets = check_count("buckets", buckets, 1)
        super().__init__(
            dataset,
            max_nodes=max_nodes,
            max_edges=max_edges,
            max_graphs=max_graphs,
            max_bytes=max_bytes,
            shuffle=shuffle,
            too_big=too_big,
            generator=generator,
            rank=rank,
            world_size=world_size,
        )
        self.buckets = self._usual_buckets() if buckets is None else buckets
        # `_bucket` [n]: the bucket of each graph.
        (size,) = self._extra
        n = len(size)
        place = np.empty(n, dtype=np.int64)
        place[np.argsort(size, kind="stable")] = np.arange(n)
        self._bucket = place * self.buckets // max(n, 1)

    def _usual_buckets(self) -> int:
        fewest = [
            -(-int(row.sum()) // int(limit))
            for row, limit in zip(self._sizes, self.limits.values, strict=True)
        ]
        if self.limits.max_graphs is not None:
            fewest.append(-(-len(self._graphs) // self.limits.max_graphs))
        return min(max(max(fewest) // 4, 1), 32)

    def _also_measured(self) -> tuple[str, ...]:
        return (self.by,)

    def _order(self, generator: Generator | None) -> Ints:
        mixed = super()._order(generator)
        return mixed[np.argsort(self._bucket[mixed], kind="stable")]

    def _deal(self, steps: int, generator: Generator | None) -> Ints:
        if generator is None:
            return np.arange(steps)
        return torch.randperm(steps, generator=generator).numpy()
