"""A GRU cell in one autograd step, whose gates are computed where they lie.

torch's own takes fresh memory for each of its steps, and for its gradients joins what
it has taken apart.

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n = tanh(W_in x + b_in + r (W_hn h + b_hn))
    h' = n + z (h - n)

Source: :class:`torch.nn.GRUCell`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import memory, transforming
from gnnaccel.nn import dense
from gnnaccel.nn.fused import watched
from gnnaccel.ops.adj import wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients

_gate_gradient = torch.ops.aten.sigmoid_backward.grad_input
_new_gradient = torch.ops.aten.tanh_backward.grad_input


def is_plain(cell: Any) -> bool:
    """Whether a module is torch's GRU cell, and nobody looks on."""
    return type(cell) is torch.nn.GRUCell and not watched(cell)


def apply(cell: Any, x: Tensor, h: Tensor) -> Tensor:
    """``cell(x, h)``.

    Args:
        cell: A plain GRU cell: see :func:`is_plain`.
        x: ``[N, F]``.
        h: ``[N, H]``.

    Returns:
        ``[N, H]``.
    """
    arguments = x, h, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    if not (
        dense.pays(x, cell.weight_ih, cell.bias_ih)
        and dense.serves(h, cell.weight_hh, cell.bias_hh)
        and h.size(0) == x.size(0)
    ):
        out: Tensor = cell(x, h)
    elif wants_grad(*arguments):
        out = _Cell.apply(*arguments)[0]
    else:
        out = _forward(*arguments)[0]
    return out


def _forward(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the gates ``[r, z, n]``, and what these get of ``h``."""
    gates = dense.product(x, weight_ih.t(), bias_ih)
    of_h = dense.product(h, weight_hh.t(), bias_hh)
    size = h.size(1)
    gates[:, : 2 * size].add_(of_h[:, : 2 * size]).sigmoid_()
    r, z, n = gates.chunk(3, 1)
    n.addcmul_(r, of_h[:, 2 * size :]).tanh_()
    out = torch.lerp(n, h, z, out=memory.empty(h.shape, h.dtype))
    return out, gates, of_h


def _compose(
    x: Tensor, h: Tensor, weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor | None
) -> Tensor:
    """The same out of operators that differentiate to any order."""
    return torch.gru_cell(x, h, weight_ih, weight_hh, *biases)


class _Cell(Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, gates, of_h = output
        ctx.mark_non_differentiable(gates, of_h)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, gates, of_h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *inputs, gates, of_h = ctx.saved_tensors
        x, h, weight_ih, weight_hh, *_ = inputs
        wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * 6
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            return tuple(differentiable_gradients(_compose, inputs, grad, wanted))
        need_x, need_h, need_ih, need_hh, need_bias_ih, need_bias_hh = wanted
        r, z, n = gates.chunk(3, 1)
        before = memory.empty(gates.shape, gates.dtype)  # gradients before the gates
        of_r, of_z, of_n = before.chunk(3, 1)
        torch.sub(h, n, out=of_z).mul_(grad)
        _gate_gradient(of_z, z, grad_input=of_z)
        torch.addcmul(grad, grad, z, value=-1, out=of_n)
        _new_gradient(of_n, n, grad_input=of_n)
        torch.mul(of_n, of_h[:, 2 * h.size(1) :], out=of_r)
        _gate_gradient(of_r, r, grad_input=of_r)
        of_x = dense.product(before, weight_ih) if need_x else None
        of_ih = dense.outer(before, x) if need_ih else None
        of_bias_ih = before.sum(0) if need_bias_ih else None
        of_n.mul_(r)
        of_old = None
        if need_h:
            of_old = dense.product(before, weight_hh).addcmul_(grad, z)
        of_hh = dense.outer(before, h) if need_hh else None
        of_bias_hh = before.sum(0) if need_bias_hh else None
        return of_x, of_old, of_ih, of_hh, of_bias_ih, of_bias_hh
