"""Linear maps whose results come from the memory pool.

They compute what ``torch.nn.functional.linear`` does, with the same products, but do
not take fresh memory for every result and every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.kernels import memory, transforming
from gnnaccel.nn.fused import plain_linear
from gnnaccel.ops.adj import tracing, wants_grad
from gnnaccel.ops.function import Function

#: Parts of a long sum, and the rows of one from which parts pay.
_PARTS = 8
_LONG = 1024


def apply(module: Any, x: Tensor) -> Tensor:
    """``module(x)``."""
    if plain_linear(module):
        return linear(x, module.weight, module.bias)
    result: Tensor = module(x)
    return result


def apply_all(modules: Sequence[Any], x: Tensor) -> list[Tensor]:
    """``[module(x) for module in modules]``; gradients of ``x`` add up in place."""
    if all(plain_linear(m) for m in modules):
        return linear_all(x, [(m.weight, m.bias) for m in modules])
    return [apply(module, x) for module in modules]


def linear_all(x: Tensor, maps: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """``[linear(x, weight, bias) for weight, bias in maps]``, as :func:`apply_all`."""
    if wants_grad(x) and len(maps) > 1 and all(pays(x, w, b) for w, b in maps):
        weights, biases = zip(*maps, strict=True)
        return list(_Linears.apply(x, *weights, *biases))
    return [linear(x, weight, bias) for weight, bias in maps]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``.

    Args:
        x: ``[N, F_in]``.
        weight: ``[F_out, F_in]``.
        bias: ``[F_out]`` or ``None``.

    Returns:
        ``[N, F_out]``.
    """
    if not pays(x, weight, bias):
        return F.linear(x, weight, bias)
    if wants_grad(x, weight, bias):
        out: Tensor = _Linears.apply(x, weight, bias)[0]
        return out
    return product(x, weight.t(), bias)


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``.

    Args:
        x: ``[N, F]``.
        y: ``[N, F]`` or ``[F]``.
    """
    if not (
        x.dim() == 2
        and y.shape in (x.shape, x.shape[1:])
        and pays(x, x.new_empty(1, x.size(1)), None)
        and y.dtype == x.dtype
        and y.device == x.device
        and not tracing(y)
    ):
        return x + y
    if wants_grad(x, y):
        out: Tensor = _Sum.apply(x, y)
        return out
    return torch.add(x, y, out=memory.empty(x.shape, x.dtype))


def pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the arguments of :func:`linear` are served, and large enough to pay."""
    return (
        x.dim() == 2
        and x.size(0) * max(weight.shape) * x.element_size() >= memory.THRESHOLD
        and serves(x, weight, bias)
    )


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`product` and :func:`outer` do what torch does with these."""
    return (
        x.dim() == 2
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.size(1) == weight.size(1)
        and not torch.is_autocast_enabled("cpu")
        and not transforming(x)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not tracing(x, weight, bias)
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a b + bias`` for matrices, without autograd."""
    out = memory.empty((a.size(0), b.size(1)), a.dtype)
    # MKL adds to a matrix sooner than it overwrites one (8 % at [131072, 128]).
    return torch.addmm(a.new_zeros(()) if bias is None else bias, a, b, out=out)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """``grad^T x``, the gradient of a weight: in parts where that is faster.

    Args:
        grad: ``[N, F_out]``.
        x: ``[N, F_in]``.

    Returns:
        ``[F_out, F_in]``.
    """
    rows = x.size(0) // _PARTS
    if (
        rows < _LONG
        or torch.is_grad_enabled()
        or transforming(grad)
        or not grad.is_contiguous()
    ):
        return grad.t() @ x
    # MKL shares a product out by its result, here too small to share; parts of the
    # long sum keep all threads busy (by 8 to 20 %).
    whole = rows * _PARTS
    left = grad[:whole].view(_PARTS, rows, -1).transpose(1, 2)
    out = torch.bmm(left, x[:whole].unflatten(0, (_PARTS, rows))).sum(0)
    return out if whole == x.size(0) else out.addmm_(grad[whole:].t(), x[whole:])


class _Sum(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=memory.empty(x.shape, x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of_row = inputs[1].dim() == 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_y = None
        if ctx.needs_input_grad[1]:
            of_y = grad.sum(0) if ctx.of_row else grad
        return grad, of_y


class _Linears(Function):
    @staticmethod
    def forward(x: Tensor, *parameters: Any) -> Any:
        weights, biases = _halves(parameters)
        return tuple(product(x, w.t(), b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *parameters = inputs
        need_x, *need = ctx.needs_input_grad
        weights = _halves(parameters)[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if any(_halves(need)[0]) else None,
            *(weight if need_x else None for weight in weights),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad
        need_weights, need_biases = _halves(need)
        grad_x: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * len(grads)
        of_biases: list[Tensor | None] = [None] * len(grads)
        # One map after the other, while its gradient is in the cache, and the last map
        # first: gradients are most often made in order.
        for k in reversed(range(len(grads))):
            grad, weight = grads[k], weights[k]
            if grad is None:
                continue
            if need_biases[k]:
                of_biases[k] = grad.sum(0)
            if need_weights[k]:
                of_weights[k] = outer(grad, x)
            if not need_x:
                continue
            # Derivatives of derivatives are asked for, or a batch of gradients.
            second = torch.is_grad_enabled() or transforming(grad)
            if grad_x is None:
                grad_x = grad @ weight if second else product(grad, weight)
            elif second:
                grad_x = grad_x + grad @ weight
            else:
                grad_x.addmm_(grad, weight)
        return grad_x, *of_weights, *of_biases


def _halves(parameters: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The weights and the biases."""
    middle = len(parameters) // 2
    return parameters[:middle], parameters[middle:]
