"""Messages that are sums of a term of either end, reduced without writing them down.

``reduce_j(z_i + y_j)``: both terms are made once per node, and what belongs to the
destination is added after the reduction. Several reductions of the same messages share
what they have in common, and their gradients add up in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cache import remember
from gnnaccel.kernels import memory, transforming
from gnnaccel.ops.adj import Adj, node_scale, wants_grad
from gnnaccel.ops.extreme import run_extreme, split
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.product import Scales, spmm_sum

#: Variances below count as 0 under a root, as StdAggregation has it.
_LEAST = 1e-5


def reduce_sum_of_ends(adj: Adj, y: Tensor, z: Tensor, reduce: str) -> Tensor:
    """``reduce_j(z_i + y_j)``; 0 where there is no neighbour.

    Args:
        adj: The graph; not while compiling.
        y: ``[num_src, F]``, float32 or float64.
        z: ``[num_dst, F]``.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"var"`` or ``"std"``.

    Returns:
        ``[num_dst, F]``.
    """
    return reduce_all_sums_of_ends(adj, y, z, [reduce])[0]


def reduce_all_sums_of_ends(
    adj: Adj, y: Tensor, z: Tensor, reductions: Sequence[str]
) -> list[Tensor]:
    """``[reduce_sum_of_ends(adj, y, z, reduce) for reduce in reductions]``."""
    if transforming(y) or transforming(z):
        return _compose(y, z, adj, reductions)
    if wants_grad(y, z):
        return list(_Reductions.apply(y, z, adj, reductions)[: len(reductions)])
    return _reduce(y, z, adj, reductions, with_ties=False)[0]


def _reduce(
    y: Tensor, z: Tensor, adj: Adj, reductions: Sequence[str], with_ties: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The reductions, and what their gradients need besides: see :class:`_Reductions`.

    Args:
        y: ``[num_src, F]``.
        z: ``[num_dst, F]``.
        adj: The graph.
        reductions: Their names.
        with_ties: Whether gradients are wanted.
    """
    outs: list[Tensor] = []
    more: list[Tensor] = []
    z = _where_met(adj, _like(z).copy_(z))
    mean = None
    if not {"mean", "var", "std"}.isdisjoint(reductions):
        mean = _mean(adj, y)
        more.append(mean)
    for reduce in reductions:
        if reduce == "sum":
            out = spmm_sum(adj, y).addcmul_(_counts(adj, z), z)
        elif reduce == "mean":
            assert mean is not None
            out = torch.add(mean, z, out=_like(z))
        elif reduce in ("var", "std"):
            assert mean is not None
            # What belongs to the destination shifts all messages: no variance of it.
            out = _mean(adj, torch.mul(y, y, out=_like(y)))
            out = out.addcmul_(mean, mean, value=-1)
            if reduce == "std":
                out = torch.threshold_(out.clamp_(min=_LEAST).sqrt_(), _LEAST**0.5, 0.0)
        else:
            best, ties = run_extreme(adj, y, None, reduce == "max", with_ties)
            out = torch.add(best, z, out=_like(z))
            if ties is not None:
                # torch counts the zero that it starts from as one more tie: it was that
                # of `best`, and is that of `out`.
                more += [best, ties.sub_(_are_zero(best))]
        outs.append(out)
    return outs, more


def _where_met(adj: Adj, out: Tensor) -> Tensor:
    """Rows ``[num_dst, F]``, in place made 0 where there is no neighbour."""
    assert adj.graph is not None
    degree = adj.graph.in_degree
    rows = remember(degree, "alone", lambda: (degree == 0).nonzero().flatten())
    return out.index_fill_(0, rows, 0)


def _counts(adj: Adj, z: Tensor) -> Tensor:
    """How many neighbours there are, ``[num_dst, 1]``, of the dtype of ``z``."""
    assert adj.graph is not None
    return adj.graph.in_degree.unsqueeze(-1).to(z.dtype)


def _are_zero(x: Tensor) -> Tensor:
    """``x == 0``, as numbers."""
    return torch.eq(x, 0, out=_like(x))


def _mean(adj: Adj, x: Tensor) -> Tensor:
    return spmm_sum(adj, x, scales=Scales(dst=node_scale(adj, "mean", x.dtype)))


def _like(x: Tensor) -> Tensor:
    """Uninitialised, contiguous."""
    return memory.empty(x.shape, x.dtype)


def _compose(y: Tensor, z: Tensor, adj: Adj, reductions: Sequence[str]) -> list[Tensor]:
    """The same out of messages, which differentiates to any order."""
    assert adj.graph is not None
    source, target = adj.graph.edge_index
    messages = gather(y, source) + gather(z, target)

    def reduced(x: Tensor, reduce: str) -> Tensor:
        return scatter(x, target, adj.num_dst, reduce)

    outs = []
    for reduce in reductions:
        if reduce in ("var", "std"):
            mean = reduced(messages, "mean")
            out = reduced(messages * messages, "mean") - mean * mean
            if reduce == "std":
                out = out.clamp(min=_LEAST).sqrt()
                out = out.masked_fill(out <= _LEAST**0.5, 0.0)
        else:
            out = reduced(messages, reduce)
        outs.append(out)
    return outs


class _Reductions(Function):
    """All reductions, followed by what their gradients need.

    That is the mean of ``y`` if a mean or a variance is among them, and for every
    extreme that of ``y`` and how many messages attain it.
    """

    @staticmethod
    def forward(y: Tensor, z: Tensor, adj: Adj, reductions: Sequence[str]) -> Any:
        outs, more = _reduce(y, z, adj, reductions, with_ties=True)
        return (*outs, *more)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        y, z, ctx.adj, ctx.reductions = inputs
        ctx.mark_non_differentiable(*output[len(ctx.reductions) :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, z, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        y, z, *output = ctx.saved_tensors
        adj, reductions = ctx.adj, ctx.reductions
        given = {
            number: grad
            for number, grad in enumerate(grads[: len(reductions)])
            if grad is not None
        }
        if not given:
            return None, None, None, None
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or any(map(transforming, given.values())):
            wanted = [reductions[number] for number in given]
            found = differentiable_gradients(
                lambda y, z: torch.cat(_compose(y, z, adj, wanted), -1),
                (y, z),
                torch.cat([*given.values()], -1),
                ctx.needs_input_grad[:2],
            )
            return *found, None, None
        return *_gradients(y, z, adj, reductions, given, output), None, None


def _gradients(
    y: Tensor,
    z: Tensor,
    adj: Adj,
    reductions: Sequence[str],
    grads: dict[int, Tensor],
    output: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The gradients of ``y`` and ``z``.

    Args:
        y: ``[num_src, F]``.
        z: ``[num_dst, F]``.
        adj: The graph.
        reductions: Their names.
        grads: Their gradients ``[num_dst, F]``, by position.
        output: What :class:`_Reductions` returned.
    """
    outs, more = output[: len(reductions)], iter(output[len(reductions) :])
    share = node_scale(adj, "mean", y.dtype).unsqueeze(-1)
    mean = None
    if not {"mean", "var", "std"}.isdisjoint(reductions):
        mean = next(more)
    of_y: Tensor | None = None
    of_z: Tensor | None = None
    of_sum: Tensor | None = None  # of the sum of y
    for number, reduce in enumerate(reductions):
        extras = (next(more), next(more)) if reduce in ("max", "min") else None
        grad = grads.get(number)
        if grad is None:
            continue
        if reduce == "sum":
            of_z = _plus_product(of_z, grad, _counts(adj, z))
            of_sum = _plus_product(of_sum, grad, 1)
        elif reduce == "mean":
            of_z = _plus_product(of_z, grad, 1)
            of_sum = _plus_product(of_sum, grad, share)
        elif reduce in ("var", "std"):
            assert mean is not None
            of_var = torch.mul(grad, share, out=_like(z))
            if reduce == "std":  # whose derivative is half its inverse, or 0
                deviation = _like(z).copy_(outs[number])
                of_var.mul_(0.5).div_(torch.threshold_(deviation, 0.0, float("inf")))
            squares = spmm_sum(adj, of_var, transposed=True)
            of_y = _plus_product(of_y, squares.mul_(y), 2)
            of_sum = _plus_product(of_sum, of_var.mul_(mean), -2)
        else:
            assert extras is not None
            best, alike = extras
            # An empty row has a tie of its own, the zero, and nobody to pass it to.
            each = _are_zero(outs[number]).add_(alike)
            each = torch.div(grad, each, out=each)
            of_z = _plus_product(of_z, each, alike)
            found = split(adj, each, y, best, None, reduce == "max")
            of_y = found if of_y is None else of_y.add_(found)
    if of_sum is not None:
        found = spmm_sum(adj, of_sum, transposed=True)
        of_y = found if of_y is None else of_y.add_(found)
    assert of_y is not None
    return of_y, torch.zeros_like(z) if of_z is None else _where_met(adj, of_z)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor | int) -> Tensor:
    """``total + a * b``, in place; a tensor of our own where there is no total yet."""
    if total is None:
        return torch.mul(a, b, out=_like(a))
    return total.addcmul_(a, b) if isinstance(b, Tensor) else total.add_(a, alpha=b)
