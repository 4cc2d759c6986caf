"""How many batches may be made ahead without anyone noticing but the clock."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

#: Batches made ahead by default: more never helped.
DEPTH = 2

# Their order is settled when iteration begins.
_SETTLED = (
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def depth(sampler: Any) -> int:
    """The default number of batches to make ahead for ``sampler``.

    Args:
        sampler: Of batches.

    Returns:
        `DEPTH`, or 0 where being asked early could change what the sampler gives, or
        what it leaves for others: it may react to the training loop, or draw from a
        generator that the loop uses too.
    """
    if _iterates_like(sampler, BatchSampler):
        sampler = sampler.sampler
    if isinstance(sampler, (list, tuple, range)):
        return DEPTH
    if _iterates_like(sampler, RandomSampler):
        once = not sampler.replacement and sampler.num_samples <= len(
            sampler.data_source
        )
        return DEPTH if sampler.generator is None or once else 0
    return DEPTH if any(_iterates_like(sampler, kind) for kind in _SETTLED) else 0


def _iterates_like(sampler: Any, kind: type) -> bool:
    """Whether ``sampler`` is of ``kind`` and iterates as that does."""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]
