"""What follows from inputs that cannot change, done once: asked for, never by default.

``gnnaccel.optimize(model, reuse_constant_inputs=True)`` marks the layers. Their sums
over neighbours are kept for as long as the features live and stay what they are, on the
same graph, and want no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cache import Memory
from gnnaccel.kernels import memory, transforming
from gnnaccel.ops.adj import Adj, tracing

#: Attribute of layers that reuse constant inputs.
REUSE = "_gnnaccel_reuse"


def reuses(layer: Any) -> bool:
    """Whether a layer reuses what it made of constant inputs."""
    return REUSE in vars(layer)


class Kept:
    """A result that is kept, never written to and never handed to a user."""

    __slots__ = ("met", "value")

    def __init__(self) -> None:
        self.met = False
        self.value: Tensor | None = None

    def get(self, build: Callable[[], Tensor]) -> Tensor:
        """``build()``, or what it once was: only to be read."""
        if self.value is None:
            # Kept beyond this call: an inference tensor can't be saved for a backward
            # pass.
            with torch.inference_mode(False), torch.no_grad():
                self.value = build()
        return self.value

    def copy(self, build: Callable[[], Tensor]) -> Tensor:
        """The same for the caller to do with as it likes.

        As long as nobody writes to it, it is known to be constant itself.
        """
        value = self.get(build)
        out = memory.empty(value.shape, value.dtype).copy_(value)
        _origins(out, "kept", lambda: self)
        return out


#: Of which kept result a tensor is an unchanged copy.
_origins = Memory().remember


def kept_for(adj: Adj, x: Tensor, weight: Tensor | None, key: Hashable) -> Kept | None:
    """Where the result of a sum over neighbours is kept.

    Args:
        adj: The graph.
        x: Features.
        weight: Edge weights or ``None``.
        key: Tells apart what is made of them.

    Returns:
        ``None`` where nothing is to be reused, and at first sight: most tensors never
        come back, and to keep what was made of them would only cost memory.
    """
    if (
        not adj.reuse
        or adj.graph is None
        or not _constant(x)
        or not (weight is None or _constant(weight))
    ):
        return None
    find = adj.graph.memory.remember
    origin: Kept | None = _origins(x, "kept", lambda: None)
    if origin is not None and origin.value is not None:
        x = origin.value
    if weight is None:
        kept = find(x, ("kept", key), Kept)
    else:
        kept = find(x, ("kept with weights", key), Memory).remember(weight, "", Kept)
    if not kept.met and origin is None:
        kept.met = True
        return None
    return kept


def _constant(x: Tensor) -> bool:
    return not (x.requires_grad or x.is_inference() or tracing(x) or transforming(x))
