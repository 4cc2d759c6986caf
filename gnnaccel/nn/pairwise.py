"""Messages that are affine in both ends of an edge, reduced without writing them down.

``reduce_j(z_i + y_j)``: both terms are made once per node, and what belongs to the
destination is added after the reduction.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.extreme import run_extreme, split
from gnnaccel.ops.function import Function


def ends(linear: Any, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor]:
    """``(y, z)`` of a linear layer on ``[x_i, x_j]``: ``z_i + y_j`` is its output.

    Args:
        linear: From ``2 F`` to ``F'`` features.
        x_src: ``[num_src, F]``.
        x_dst: ``[num_dst, F]``.

    Returns:
        ``y`` ``[num_src, F']``, and ``z`` ``[num_dst, F']`` with the bias.
    """
    first, second = linear.weight.chunk(2, dim=1)
    y = dense.linear(x_src, second)
    return y, dense.linear(x_dst, first, linear.bias)


def reduce_sum_of_ends(adj: Adj, y: Tensor, z: Tensor, reduce: str) -> Tensor:
    """``reduce_j(z_i + y_j)``; 0 where there is no neighbour.

    Args:
        adj: The graph; not while compiling.
        y: ``[num_src, F]``.
        z: ``[num_dst, F]``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[num_dst, F]``.
    """
    assert adj.graph is not None
    counts = adj.graph.in_degree.unsqueeze(-1)
    if reduce in ("max", "min"):
        if wants_grad(y, z):
            extreme: Tensor = _ShiftedExtreme.apply(y, z, adj, reduce == "max")[0]
            return extreme
        best, _ = run_extreme(adj, y, None, reduce == "max", False)
        return (best + z).masked_fill(counts == 0, 0)
    if reduce == "mean":
        counts = counts.clamp(max=1)
    return aggregate(adj, y, None, reduce) + counts.to(z.dtype) * z


class _ShiftedExtreme(Function):
    """A maximum of a sum has its ties where that of one term has them."""

    @staticmethod
    def forward(y: Tensor, z: Tensor, adj: Adj, is_max: bool) -> Any:
        best, ties = run_extreme(adj, y, None, is_max, True)
        assert adj.graph is not None and ties is not None
        none = (adj.graph.in_degree == 0).unsqueeze(-1)
        out = (best + z).masked_fill(none, 0)
        # torch counts the zero that it starts from as one more tie: it was that of
        # `best`, and is that of `out`.
        alike = ties - (best == 0).to(ties.dtype)
        return out, best, alike

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        y, _, ctx.adj, ctx.is_max = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        y, out, best, alike = ctx.saved_tensors
        # An empty row has a tie of its own, the zero, and nobody to pass it to.
        share = grad / (alike + (out == 0).to(alike.dtype))
        grad_y = grad_z = None
        if ctx.needs_input_grad[0]:
            grad_y = split(ctx.adj, share, y, best, None, ctx.is_max)
        if ctx.needs_input_grad[1]:
            grad_z = share * alike
        return grad_y, grad_z, None, None
