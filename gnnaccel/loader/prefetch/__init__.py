"""Batches on the device before they are needed.

Read `loader` for what it does, `iterator` for how the stages are put together, `lane`
for what waits for what, and `ahead` for the threads.
"""

from __future__ import annotations

from gnnaccel.loader.prefetch.accelerator import Accelerator
from gnnaccel.loader.prefetch.loader import PrefetchLoader

__all__ = ["Accelerator", "PrefetchLoader"]
