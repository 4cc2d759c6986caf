"""Networks, module by module: what can be done at once, or in place.

What nobody else holds may be written to: a ReLU then needs no memory of its own, nor
does its gradient where a linear map follows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.models import MLP

from gnnaccel.kernels import memory, transforming
from gnnaccel.nn import dense
from gnnaccel.nn.fused import plain_linear, watched
from gnnaccel.ops.adj import wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


def first_linear(network: Any) -> tuple[Any, list[Any]]:
    """The plain linear layer that a network begins with, and what follows.

    Args:
        network: Any callable; a ``Sequential`` and PyG's ``MLP`` are looked into.

    Returns:
        The layer and the modules, or functions, to be called one after the other;
        ``(None, [])`` if it does not begin with one.
    """
    if plain_linear(network):
        return network, []
    steps: list[Any] = []
    if type(network) is torch.nn.Sequential and not watched(network):
        steps = list(network)
    elif type(network) is MLP and not watched(network):
        steps = _steps(network)
    if steps and plain_linear(steps[0]):
        return steps[0], steps[1:]
    return None, []


def _steps(mlp: MLP) -> list[Any]:
    """What an MLP calls one after the other."""
    steps: list[Any] = []
    for lin, norm, p in zip(mlp.lins, mlp.norms, mlp.dropout, strict=False):
        steps.append(lin)
        act = [] if mlp.act is None else [mlp.act]
        idle = type(norm) is torch.nn.Identity and not watched(norm)
        norms = [] if idle else [norm]
        steps += act + norms if mlp.act_first else norms + act
        steps += _dropout(mlp, p)
    if mlp.plain_last:
        steps += [mlp.lins[-1], *_dropout(mlp, mlp.dropout[-1])]
    return steps


def _dropout(mlp: MLP, p: float) -> list[Any]:
    if p == 0 or not mlp.training:
        return []
    return [functools.partial(F.dropout, p=p, training=True)]


def through(modules: Sequence[Any], x: Tensor, owned: bool = True) -> Tensor:
    """Passes features through modules, one after the other.

    Args:
        modules: Of a network.
        x: ``[N, F]``.
        owned: Whether nobody else holds ``x``, nor needs what is in it.
    """
    left = list(modules)
    while left:
        module = left.pop(0)
        if owned and is_relu(module) and left and plain_linear(left[0]):
            linear = left.pop(0)
            x = relu_linear_(x, linear.weight, linear.bias)
        elif owned and is_relu(module):
            x, owned = relu_(x), False  # its gradient needs its result
        else:
            x = dense.apply(module, x)
            owned = plain_linear(module)
    return x


def is_relu(module: Any) -> bool:
    """Whether a module is a ReLU, and nobody looks on."""
    return type(module) is torch.nn.ReLU and not watched(module)


def relu_(x: Tensor) -> Tensor:
    """``x.relu_()``, its gradient out of the pool; ``x`` as :func:`relu_linear_`."""
    if not wants_grad(x) or not dense.pays(x, x.new_empty(1, x.size(-1)), None):
        return x.relu_()
    out: Tensor = _Relu.apply(x)
    return out


def relu_gradient(grad: Tensor, out: Tensor, owned: bool) -> Tensor:
    """What a ReLU lets through of a gradient, without autograd.

    Args:
        grad: ``[N, F]``.
        out: What the ReLU returned.
        owned: Whether ``grad`` may be written to.
    """
    to = grad if owned else memory.empty(grad.shape, grad.dtype)
    result: Tensor = _threshold_backward(grad, out, 0, grad_input=to)
    return result


def relu_linear_(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``relu(x) W^T + b``, with the ReLU in place and its gradient, too.

    Args:
        x: ``[N, F_in]``, which nobody else holds.
        weight: ``[F_out, F_in]``.
        bias: ``[F_out]`` or ``None``.

    Returns:
        ``[N, F_out]``.
    """
    if not dense.pays(x, weight, bias):
        return F.linear(x.relu_(), weight, bias)
    if wants_grad(x, weight, bias):
        out: Tensor = _ReluLinear.apply(x, weight, bias)
        return out
    return dense.product(x.relu_(), weight.t(), bias)


class _Relu(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.relu_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        if torch.is_grad_enabled() or transforming(grad):
            return grad * (out > 0)
        return relu_gradient(grad, out, owned=False)


class _ReluLinear(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dense.product(x.relu_(), weight.t(), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        # What made it needs it no more, and where a ReLU let nothing through, its
        # result says so.
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        of_bias = grad.sum(0) if need_bias else None
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda x, weight: x.relu() @ weight.t(),
                (x, weight),
                grad,
                (need_x, need_weight),
            )
            return *found, of_bias
        of_x = None
        if need_x:
            of_x = relu_gradient(dense.product(grad, weight), x, owned=True)
        return of_x, dense.outer(grad, x) if need_weight else None, of_bias
