"""What a training loop iterates over."""

from __future__ import annotations

from gnnaccel.loader.dataloader import DataLoader

__all__ = ["DataLoader"]
