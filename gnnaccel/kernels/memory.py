"""Memory for large results: blocks that are reused, not returned to the system.

``torch.empty`` takes a large tensor from the system and gives it back when it dies, so
that every training step pays a page fault for every 4 KiB it writes. That is often more
than the computation itself costs. Blocks of the pool stay mapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import library

#: Bytes from which the pool serves: smaller tensors torch reuses well itself.
THRESHOLD = 1 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor, out of the pool if it is large.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < THRESHOLD or library.module is None or _filled():
        return torch.empty(shape, dtype=dtype, device="cpu")
    block: Tensor | None = library.module.block(size)
    if block is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # No view of the block: a view may not be changed in place once an autograd
    # function returned it.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    storage = block.untyped_storage()
    return tensor.set_(storage, 0, tuple(shape))  # type: ignore[call-overload]


def _filled() -> bool:
    """Whether torch was told to fill fresh memory, as it does in ``torch.empty``."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )


def stats() -> dict[str, Any]:
    """What the pool holds and did.

    Returns:
        ``in_use``, ``cached`` and ``peak`` in bytes; ``fresh`` and ``reused``, how many
        blocks came from the system and from the pool; ``fragmentation``, the cached
        share of all bytes held.
    """
    names = ("in_use", "cached", "peak", "fresh", "reused")
    module = library.module
    held_and_done = (0,) * len(names) if module is None else module.pool_stats()
    found: dict[str, Any] = dict(zip(names, held_and_done, strict=True))
    held = found["in_use"] + found["cached"]
    found["fragmentation"] = found["cached"] / held if held else 0.0
    return found


def limit(size: int) -> None:
    """Keeps at most ``size`` bytes for reuse; the default is 1 GiB.

    Raises:
        ValueError: ``size`` is negative.
    """
    if size < 0:
        raise ValueError(f"Expected a limit of at least 0 bytes (got {size})")
    if library.module is not None:
        library.module.pool_limit(size)


def empty_cache() -> None:
    """Gives what is kept for reuse back to the system."""
    if library.module is not None:
        library.module.pool_trim()
