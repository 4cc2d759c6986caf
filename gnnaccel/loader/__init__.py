"""What a training loop iterates over."""

from __future__ import annotations

from gnnaccel.data.samplers import BucketBatchSampler, BudgetBatchSampler
from gnnaccel.loader.dataloader import DataLoader
from gnnaccel.loader.prefetch import PrefetchLoader

__all__ = ["BucketBatchSampler", "BudgetBatchSampler", "DataLoader", "PrefetchLoader"]
