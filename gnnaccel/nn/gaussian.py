"""Gaussians of edge features, as GMMConv weighs its messages by them.

    w[e, k] = exp(-1/2 sum_d (x[e, d] - mu[k, d])^2 / (epsilon + sigma[k, d]^2))

Their terms ``[E, K, D]`` are not written down, nor kept for the backward pass: each is
made where it is added, from one column of features at a time. Source:
:class:`torch_geometric.nn.GMMConv`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import memory, transforming
from gnnaccel.nn import dense
from gnnaccel.ops.adj import wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients

#: As in PyG, against a division by zero.
EPSILON = 1e-15


def gaussians(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    """See above.

    Args:
        x: ``[E, D]``.
        mu: ``[K, D]``, of the same dtype.
        sigma: ``[K, D]``.

    Returns:
        ``[E, K]``.
    """
    # What holds of a linear map holds here: no autocast, no transforms, large enough.
    if mu.dtype != sigma.dtype or not dense.pays(x, mu, None):
        return _compose(x, mu, sigma)
    if wants_grad(x, mu, sigma):
        out: Tensor = _Gaussians.apply(x, mu, sigma)
        return out
    return _forward(x, mu, sigma)


def _compose(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    """PyG's steps, which differentiate to any order."""
    squares = -0.5 * (x.unsqueeze(1) - mu).pow(2)
    return torch.exp((squares / (EPSILON + sigma.pow(2))).sum(dim=-1))


def _columns(x: Tensor) -> Tensor:
    """``[D, E]``, each column of ``[E, D]`` in one piece."""
    return memory.empty((x.size(1), x.size(0)), x.dtype).copy_(x.t())


def _forward(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    columns = _columns(x)
    factors = (-0.5 / (EPSILON + sigma.pow(2))).tolist()
    logits = memory.empty((mu.size(0), x.size(0)), x.dtype).zero_()
    away = memory.empty((x.size(0),), x.dtype)
    for k, logit in enumerate(logits):
        for d, column in enumerate(columns):
            torch.sub(column, mu[k, d], out=away)
            logit.addcmul_(away, away, value=factors[k][d])
    return _columns(logits.exp_())


class _Gaussians(Function):
    @staticmethod
    def forward(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
        return _forward(x, mu, sigma)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mu, sigma, out = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            return tuple(
                differentiable_gradients(_compose, (x, mu, sigma), grad, wanted)
            )
        variance = EPSILON + sigma.pow(2)
        columns = _columns(x)
        of_logits = _columns(grad * out)
        of_columns = torch.zeros_like(columns) if wanted[0] else None
        firsts, seconds = torch.zeros_like(mu), torch.zeros_like(mu)
        away, pulled = (memory.empty((x.size(0),), x.dtype) for _ in range(2))
        for k, of_logit in enumerate(of_logits):
            for d, column in enumerate(columns):
                torch.sub(column, mu[k, d], out=away)
                torch.mul(away, of_logit, out=pulled)
                firsts[k, d] = pulled.sum()
                seconds[k, d] = pulled.dot(away)
                if of_columns is not None:
                    of_columns[d].sub_(pulled.div_(variance[k, d]))
        return (
            None if of_columns is None else of_columns.t(),
            firsts / variance,
            seconds * sigma / variance.pow(2),
        )
