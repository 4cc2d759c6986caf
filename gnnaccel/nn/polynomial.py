"""Polynomials of a graph's matrix times features, in one autograd step.

With ``A`` the (weighted) matrix, ``p(A) x`` and ``sum_k t_k(A) x W_k^T`` have gradients
of the same form: of ``x`` by ``A^T``, and ``t_k(A^T) g`` times the plain ``x`` is that
of ``W_k``. So no power of ``A`` times features is kept for the backward pass, all terms
add up in place, and on kernels that multiply a tile of sums while it is in the cache,
each sum is read there alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.kernels import linear, transforming
from gnnaccel.nn import dense
from gnnaccel.nn.mapped import fuses
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.product import Scales, arranged, run_spmm_sum, spmm_sum


class Matrix(NamedTuple):
    """A square matrix: a graph with constant weights.

    Attributes:
        adj: The graph, held, with as many sources as destinations.
        weight: ``[E]`` or ``None``.
        transposed: Whether its transpose is meant.
    """

    adj: Adj
    weight: Tensor | None
    transposed: bool = False

    @property
    def t(self) -> Matrix:
        """The transpose."""
        return self._replace(transposed=not self.transposed)


class Step(NamedTuple):
    """``y <- by A y + plus x``."""

    by: float = 1.0
    plus: float = 0.0


def filtered(
    matrix: Matrix,
    x: Tensor,
    steps: Sequence[Step],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``p(A) x W^T + b`` with ``p(A) x`` what ``steps`` make of ``y = x``.

    Args:
        matrix: ``A``.
        x: ``[N, F]``, float32 or float64.
        steps: At least one.
        weight: ``[F', F]`` as :func:`gnnaccel.nn.dense.serves` takes it; ``None``: the
            identity, and no bias.
        bias: ``[F']`` or ``None``.

    Returns:
        ``[N, F']``.
    """
    if not wants_grad(x, weight, bias):
        return _filter(matrix, x, steps, weight, bias)
    out: Tensor = _Filtered.apply(matrix, steps, x, weight, bias)
    return out


def expanded(
    matrix: Matrix,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    chebyshev: bool = False,
) -> Tensor:
    """``sum_k t_k(A) x W_k^T + b``.

    Args:
        matrix: ``A``.
        x: ``[N, F]``, float32 or float64.
        weights: ``[F', F]`` each, as :func:`gnnaccel.nn.dense.serves` takes them.
        bias: ``[F']`` or ``None``.
        chebyshev: Whether ``t_k`` is the Chebyshev polynomial of the first kind, of
            which ``t_k = 2 A t_(k-1) - t_(k-2)``; else the power ``A^k``.

    Returns:
        ``[N, F']``.
    """
    if not wants_grad(x, bias, *weights):
        return _expand(matrix, x, [w.t() for w in weights], bias, chebyshev)[0]
    out: Tensor = _Expanded.apply(matrix, chebyshev, x, bias, *weights)
    return out


def summed(matrix: Matrix, terms: Sequence[Tensor], chebyshev: bool = False) -> Tensor:
    """``sum_k t_k(A) x_k``, by Horner's scheme or that of Clenshaw.

    Args:
        matrix: ``A``.
        terms: ``x_k``, ``[N, F]`` each.
        chebyshev: See :func:`expanded`.
    """
    out, after = terms[-1], None
    for k, term in reversed(list(enumerate(terms[:-1]))):
        by = 2.0 if chebyshev and k > 0 else 1.0
        total = spmm_sum(matrix.adj, out, matrix.weight, _by(by, out)).add_(term)
        if chebyshev and after is not None:
            total = total.sub_(after)
        after, out = out, total
    return out


def _filter(
    matrix: Matrix,
    x: Tensor,
    steps: Sequence[Step],
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """:func:`filtered` without autograd."""
    if weight is None:
        return _stepped(matrix, x, steps, x)
    y = _stepped(matrix, x, steps[:-1], x)
    mapped = _map_last(matrix, x, steps[-1], y, weight.t(), bias, None)
    assert mapped.out is not None
    return mapped.out


def _stepped(matrix: Matrix, x: Tensor, steps: Sequence[Step], y: Tensor) -> Tensor:
    for step in steps:
        y = _multiplied(matrix, y, step.by, x, step.plus)
    return y


def _multiplied(
    matrix: Matrix, y: Tensor, by: float, base: Tensor | None, plus: float
) -> Tensor:
    """``by A y + plus base``."""
    return run_spmm_sum(
        matrix.adj,
        y,
        matrix.weight,
        _by(by, y),
        matrix.transposed,
        base=base if plus else None,
        base_scale=plus,
    )


def _by(factor: float, y: Tensor) -> Scales:
    if factor == 1:
        return Scales()
    return Scales(dst=y.new_full((y.size(0),), factor))


def _map_last(
    matrix: Matrix,
    x: Tensor,
    step: Step,
    y: Tensor,
    map: Tensor,
    bias: Tensor | None,
    beside: Tensor | None,
    with_out: bool = True,
) -> linear.Mapped:
    """The last step, its map ``[F, F']``, and the gradient of the map.

    Args:
        matrix: See :func:`filtered`, as are ``x`` and ``bias``.
        x: See there.
        step: The last one.
        y: What the steps before it have made.
        map: ``[F, F']``.
        bias: See there.
        beside: ``[N, F']``, what the map was given, if its gradient is wanted.
        with_out: Whether the result is wanted.
    """
    if fuses(matrix.adj, y, map.size(1), matrix.transposed):
        grouping, weight = arranged(
            matrix.adj, matrix.weight, matrix.transposed, skip_loops=False
        )
        return linear.spmm_linear(
            grouping,
            y,
            weight,
            _by(step.by, y),
            map,
            bias=bias,
            base=x if step.plus else None,
            base_scale=step.plus,
            with_out=with_out,
            y=beside,
            with_map=beside is not None,
        )
    y = _multiplied(matrix, y, step.by, x, step.plus)
    return linear.Mapped(
        dense.product(y, map, bias) if with_out else None,
        None,
        None if beside is None else dense.outer(y, beside),
        None,
    )


def _expand(
    matrix: Matrix,
    x: Tensor,
    maps: Sequence[Tensor],
    bias: Tensor | None,
    chebyshev: bool,
    beside: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """:func:`expanded` without autograd, and the gradients of its maps.

    Args:
        matrix: See :func:`expanded`, as are ``x`` and ``bias``.
        x: See there.
        maps: ``[F, F']`` each.
        bias: See there.
        chebyshev: See there.
        beside: ``[N, F']``, what the maps were given, if their gradients are wanted.
    """
    first, *others = maps
    out = dense.product(x, first, bias)
    of_maps = [] if beside is None else [dense.outer(x, beside)]
    before, term = None, x
    for k, map in enumerate(others, 1):
        # The first of Chebyshev's is a plain product, too.
        by = 2.0 if chebyshev and k > 1 else 1.0
        base, before = (before if chebyshev else None), term
        last = k == len(others)
        if fuses(matrix.adj, term, map.size(1), matrix.transposed):
            grouping, weight = arranged(
                matrix.adj, matrix.weight, matrix.transposed, skip_loops=False
            )
            _, sums, of_map, _ = linear.spmm_linear(
                grouping,
                term,
                weight,
                _by(by, term),
                map,
                base=base,
                base_scale=-1.0,
                into=out,
                with_sums=not last,
                y=beside,
                with_map=beside is not None,
            )
            term = term if sums is None else sums
        else:
            term = _multiplied(matrix, term, by, base, 0.0 if base is None else -1.0)
            out.addmm_(term, map)
            of_map = None if beside is None else dense.outer(term, beside)
        if of_map is not None:
            of_maps.append(of_map)
    return out, of_maps


def _composed(matrix: Matrix, x: Tensor, steps: Sequence[Step]) -> Tensor:
    """:func:`filtered` without a map, of operators that differentiate to any order."""
    y = x
    for by, plus in steps:
        product = spmm_sum(matrix.adj, y, matrix.weight, transposed=matrix.transposed)
        y = by * product + plus * x
    return y


def _compose_expanded(
    matrix: Matrix, chebyshev: bool, x: Tensor, *weights: Tensor
) -> Tensor:
    """:func:`expanded` without a bias, by operators that differentiate to any order."""
    first, *others = weights
    out = x @ first.t()
    before, term = None, x
    for weight in others:
        product = spmm_sum(matrix.adj, term, matrix.weight)
        if chebyshev and before is not None:
            product = 2 * product - before
        before, term = term, product
        out = out + term @ weight.t()
    return out


class _Filtered(Function):
    @staticmethod
    def forward(
        matrix: Matrix,
        steps: Sequence[Step],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return _filter(matrix, x, steps, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.matrix, ctx.steps, x, weight, _ = inputs
        # Without a map, nothing is needed of the features.
        ctx.save_for_backward(None if weight is None else x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matrix, steps = ctx.matrix, ctx.steps
        need_x, need_weight, need_bias = ctx.needs_input_grad[2:]
        of_bias = grad.sum(0) if need_bias else None
        of_x = of_weight = None
        if torch.is_grad_enabled() or transforming(grad):
            # Derivatives of derivatives are asked for, or a batch of gradients.
            y = _composed(matrix.t, grad, steps)
            of_x = y if weight is None else y @ weight
            of_weight = y.t() @ x if need_weight else None
        elif weight is None:
            of_x = _stepped(matrix.t, grad, steps, grad)
        elif need_x or need_weight:
            y = _stepped(matrix.t, grad, steps[:-1], grad)
            beside = x if need_weight else None
            of_x, _, of_weight, _ = _map_last(
                matrix.t, grad, steps[-1], y, weight, None, beside, need_x
            )
        return None, None, of_x, of_weight, of_bias


class _Expanded(Function):
    @staticmethod
    def forward(
        matrix: Matrix,
        chebyshev: bool,
        x: Tensor,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        return _expand(matrix, x, [w.t() for w in weights], bias, chebyshev)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.matrix, ctx.chebyshev, x, _, *weights = inputs
        ctx.save_for_backward(x, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        matrix, chebyshev = ctx.matrix, ctx.chebyshev
        need_x, need_bias, *need_weights = ctx.needs_input_grad[2:]
        of_bias = grad.sum(0) if need_bias else None
        if torch.is_grad_enabled() or transforming(grad):
            of_x, *found = differentiable_gradients(
                lambda *tensors: _compose_expanded(matrix, chebyshev, *tensors),
                (x, *weights),
                grad,
                (need_x, *need_weights),
            )
            return None, None, of_x, of_bias, *found
        of_x = None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if need_x or any(need_weights):
            beside = x if any(need_weights) else None
            of_x, of_maps = _expand(matrix.t, grad, weights, None, chebyshev, beside)
            of_weights = of_maps or of_weights
        return (
            None,
            None,
            of_x if need_x else None,
            of_bias,
            *of_weights,
        )
