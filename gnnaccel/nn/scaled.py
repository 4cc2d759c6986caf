"""A linear map of rows side by side, several times over with a scale per row each.

``[s_1 r, s_2 r, ...] W^T`` with ``r = [r_1, r_2, ...]`` side by side: each scale may
wait until the map has made few columns of many, and neither ``r`` nor a scaled copy of
it is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import memory, transforming
from gnnaccel.nn import dense
from gnnaccel.ops.adj import wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients

Scale = Sequence[Tensor | None]


def map_scaled(parts: Sequence[Tensor], weight: Tensor, scale: Scale) -> Tensor:
    """See above.

    Args:
        parts: ``[N, D]`` each, ``K`` of them.
        weight: ``[F', S K D]``.
        scale: ``S`` scales ``[N, 1]``, or ``None`` for 1.

    Returns:
        ``[N, F']``, which nobody else holds.
    """
    if any(map(wants_grad, scale)) or not dense.pays(
        parts[0], weight[:, : parts[0].size(1)], None
    ):
        return _compose(parts, weight, scale)
    out: Tensor
    if wants_grad(weight, *parts):
        out = _MapScaled.apply(scale, weight, *parts)
    else:
        out = _map(scale, _stacked(weight, len(scale)), parts)
    return out


def _compose(parts: Sequence[Tensor], weight: Tensor, scale: Scale) -> Tensor:
    """The same out of other operators, which differentiate to any order."""
    whole = torch.cat([*parts], dim=-1)
    out: Tensor | None = None
    for s, block in zip(scale, weight.chunk(len(scale), 1), strict=True):
        mapped = whole @ block.t()
        if s is not None:
            mapped = mapped * s
        out = mapped if out is None else out + mapped
    assert out is not None
    return out


def _stacked(weight: Tensor, scales: int) -> Tensor:
    """The maps of each scale below each other: ``[S F', K D]``."""
    return torch.cat(weight.chunk(scales, 1))


def _map(scale: Scale, weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The map by a weight that is stacked, without autograd."""
    wide = memory.empty((parts[0].size(0), weight.size(0)), weight.dtype)
    total = weight.new_zeros(())
    for part, block in zip(parts, weight.chunk(len(parts), 1), strict=True):
        total = torch.addmm(total, part, block.t(), out=wide)
    if len(scale) == 1 and scale[0] is None:
        return wide
    out: Tensor | None = None
    for s, mapped in zip(scale, wide.chunk(len(scale), 1), strict=True):
        if out is None:
            out = memory.empty(mapped.shape, wide.dtype)
            out = out.copy_(mapped) if s is None else torch.mul(mapped, s, out=out)
        else:
            out = out.add_(mapped) if s is None else out.addcmul_(mapped, s)
    assert out is not None
    return out


class _MapScaled(Function):
    @staticmethod
    def forward(scale: Scale, weight: Tensor, *parts: Tensor) -> Tensor:
        return _map(scale, _stacked(weight, len(scale)), parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *parts = ctx.saved_tensors
        scale, wanted = ctx.scale, ctx.needs_input_grad[1:]
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda weight, *parts: _compose(parts, weight, scale),
                (weight, *parts),
                grad,
                wanted,
            )
            return None, *found
        wide = memory.empty((grad.size(0), len(scale) * grad.size(1)), grad.dtype)
        for s, scaled in zip(scale, wide.chunk(len(scale), 1), strict=True):
            if s is None:
                scaled.copy_(grad)
            else:
                torch.mul(grad, s, out=scaled)
        of_weight = None
        if wanted[0]:
            stacked = torch.cat([dense.outer(wide, part) for part in parts], 1)
            of_weight = torch.cat(stacked.chunk(len(scale)), 1)
        of_parts: Sequence[Tensor | None] = [None] * len(parts)
        if any(wanted[1:]):
            whole = dense.product(wide, _stacked(weight, len(scale)))
            of_parts = whole.chunk(len(parts), 1)
        return None, of_weight, *of_parts
