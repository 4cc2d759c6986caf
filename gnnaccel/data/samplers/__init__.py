"""Batch samplers: which graphs go together into one mini-batch."""

from gnnaccel.data.samplers.bucket import BucketBatchSampler
from gnnaccel.data.samplers.budget import BudgetBatchSampler

__all__ = ["BucketBatchSampler", "BudgetBatchSampler"]
