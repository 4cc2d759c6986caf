"""The contestant: what gnnaccel makes of a layer, and what there is to learn."""

from __future__ import annotations

import copy
import importlib

import torch
from torch import Tensor


def accelerated(layer: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """A copy of ``layer`` under ``gnnaccel.optimize``, and what to say about it.

    Raises:
        RuntimeError: optimize left the layer as it is: PyG would race itself.
    """
    gnnaccel = importlib.import_module("gnnaccel")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    pairs = zip(ours.modules(), layer.modules(), strict=True)
    swapped = [module for module, was in pairs if type(module) is not type(was)]
    if not swapped:
        raise RuntimeError(f"optimize left {type(layer).__name__} as it is")
    if not hasattr(swapped[0], "why_not_fused"):
        return ours, "generic"
    reason = swapped[0].why_not_fused()
    return ours, f"not fused: {reason}" if reason else ""


def learnt(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of ``module`` that want a gradient."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad}
