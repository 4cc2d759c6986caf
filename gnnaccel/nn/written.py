"""Messages that have to be written down, and the linear map that follows, in one step.

``relu(x[j] + x_dst[i] + edge[e] map) W^T + b``, where the ReLU, the map of edges and
the linear map may be missing. What the linear map is given is written once, and the
gradient of that takes the ReLU's in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.kernels import memory, native, transforming
from gnnaccel.kernels.message import Parts
from gnnaccel.kernels.rows import message_rows
from gnnaccel.nn import dense, sequence
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather, scatter


class Ends(NamedTuple):
    """A graph, and the same as the nodes at either end of each edge, ``[E]``."""

    adj: Adj
    target: Tensor
    source: Tensor


def pays(x: Tensor, entries: int) -> bool:
    """Whether :func:`messages` serves ``[N, F]`` of so many edges, and pays."""
    return (
        x.dtype in (torch.float32, torch.float64)
        and kernels.pick_for(x) is native
        and entries * x.size(1) * x.element_size() >= memory.THRESHOLD
        and not transforming(x)
    )


def messages(
    ends: Ends,
    parts: Parts,
    relu: bool,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See above.

    Args:
        ends: The graph.
        parts: float32 or float64; without a weight, the map without a row more.
        relu: Whether there is a ReLU.
        weight: ``[F', F]``, which :func:`gnnaccel.nn.dense.serves`; or ``None``.
        bias: ``[F']`` or ``None``.

    Returns:
        ``[E, F']``, which nobody else holds.
    """
    tensors = parts.x, parts.x_dst, parts.edge, parts.map, weight, bias
    if wants_grad(*tensors):
        out: Tensor = _Messages.apply(ends, relu, *tensors)[0]
        return out
    return _forward(ends, relu, *tensors)[0]


def _forward(
    ends: Ends,
    relu: bool,
    x: Tensor,
    x_dst: Tensor | None,
    edge: Tensor | None,
    map_: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """The result and, if there is a linear map, what it was given."""
    parts = Parts(x, edge, map_, None, x_dst)
    rows = message_rows(ends.adj.grouping(False), parts, relu)
    if weight is None:
        return (rows,)
    return dense.product(rows, weight.t(), bias), rows


def _compose(
    ends: Ends,
    relu: bool,
    x: Tensor,
    x_dst: Tensor | None,
    edge: Tensor | None,
    map_: Tensor | None,
    weight: Tensor | None,
) -> Tensor:
    """The same, without a bias, by operators that differentiate to any order."""
    out = gather(x, ends.source)
    if x_dst is not None:
        out = out + gather(x_dst, ends.target)
    if edge is not None:
        out = out + (edge if map_ is None else edge @ map_)
    out = out.relu() if relu else out
    return out if weight is None else out @ weight.t()


class _Messages(Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.ends, ctx.relu, *tensors, _ = inputs
        out, *given = output
        ctx.mark_non_differentiable(*given)
        ctx.set_materialize_grads(False)
        rows = given[0] if given else out if ctx.relu else None
        ctx.save_for_backward(*tensors, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, rows = ctx.saved_tensors
        x, x_dst, edge, map_, weight = tensors
        *wanted, need_bias = ctx.needs_input_grad[2:]
        need_x, need_dst, need_edge, need_map, need_weight = wanted
        if grad is None:
            return (None,) * 8
        of_bias = grad.sum(0) if need_bias else None
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda *tensors: _compose(ctx.ends, ctx.relu, *tensors),
                tensors,
                grad,
                wanted,
            )
            return None, None, *found, of_bias
        of_weight = dense.outer(grad, rows) if need_weight else None
        of_rows = grad
        if any(wanted[:4]):
            if weight is not None:
                of_rows = dense.product(grad, weight)
            if ctx.relu:
                of_rows = sequence.relu_gradient(of_rows, rows, weight is not None)
        return (
            None,
            None,
            scatter(of_rows, ctx.ends.source, x.size(0)) if need_x else None,
            scatter(of_rows, ctx.ends.target, x_dst.size(0)) if need_dst else None,
            _of_edge(of_rows, map_) if need_edge else None,
            dense.outer(edge, of_rows) if need_map else None,
            of_weight,
            of_bias,
        )


def _of_edge(of_rows: Tensor, map_: Tensor | None) -> Tensor:
    return of_rows if map_ is None else dense.product(of_rows, map_.t())
