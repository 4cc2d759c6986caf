"""Many graphs packed into a few large tensors, and batches out of them."""

from gnnaccel.data.batcher import Batcher, Layout
from gnnaccel.data.packed import PackedDataset

__all__ = ["Batcher", "Layout", "PackedDataset"]
