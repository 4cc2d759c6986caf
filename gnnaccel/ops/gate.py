"""Sums of gated messages: no number per edge and column is written down."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.kernels import gate, transforming
from gnnaccel.kernels.gate import Gates
from gnnaccel.kernels.message import mapped
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.softmax import softmax


class Kind(NamedTuple):
    """Which messages are summed.

    Attributes:
        name: One of :data:`gnnaccel.kernels.gate.KINDS`.
        epsilon: Under ``"softmax"``, added to each message.
        constant: Under ``"softmax"``, whether shares are held constant in the backward
            pass.
    """

    name: str
    epsilon: float = 0.0
    constant: bool = False


def gated_sum(adj: Adj, kind: Kind, gates: Gates) -> Tensor:
    """Sums gated messages; see :mod:`gnnaccel.kernels.gate` for their kinds.

    Args:
        adj: The graph; not while compiling.
        kind: Which messages.
        gates: The tensors, which fit each other and the graph.

    Returns:
        ``[num_dst, F]``; 0 for a node without incoming edges.
    """
    x = gates.x
    assert adj.graph is not None
    if (
        transforming(x)
        or x.dtype not in (torch.float32, torch.float64)
        or kernels.pick_for(x) is not kernels.native
        or 0 in (x.numel(), adj.graph.num_edges)
        or adj.graph.rows.ptr.dtype != torch.int32
    ):
        return compose(adj, kind, gates)
    if wants_grad(*gates):
        out: Tensor = _GatedSum.apply(*gates, adj, kind)[0]
        return out
    return gate.gate_sum(adj.graph.rows, kind.name, gates, kind.epsilon, False)[0]


class _GatedSum(Function):
    @staticmethod
    def forward(*args: Any) -> Any:
        *tensors, adj, kind = args
        gates = Gates(*tensors)
        rows = adj.graph.rows
        return tuple(gate.gate_sum(rows, kind.name, gates, kind.epsilon, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.adj, ctx.kind = inputs
        sums = output[1:]
        ctx.mark_non_differentiable(*sums)
        ctx.set_materialize_grads(False)
        # The sum itself only where it is needed: its owner may write to it.
        own = output[:1] if ctx.kind.name == "softmax" else ()
        ctx.save_for_backward(*tensors, *own, *sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        count = len(Gates._fields)
        if grad is None:
            return (None,) * (count + 2)
        saved = ctx.saved_tensors  # asked for once: checkpoints allow no more
        gates, sums = Gates(*saved[:count]), saved[count:]
        adj, kind, wanted = ctx.adj, ctx.kind, ctx.needs_input_grad[:count]
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda *tensors: compose(adj, kind, Gates(*tensors)),
                gates,
                grad,
                wanted,
            )
            return *found, None, None
        need = Gates(*wanted)
        targets: list[Tensor | None] = [gates.x_dst, gates.y_dst]
        flow: Tensor | None = grad
        of_t = None
        if kind.name == "softmax":
            flow = None
            targets, of_t = _softmax_terms(gates, kind, grad, sums, bool(need.t))
        grads = Gates(None)  # type: ignore[arg-type]
        if need.x or need.y or need.edge or need.map:
            grads = gate.gate_sum_backward(
                adj.graph.t.rows,
                kind.name,
                gates,
                kind.epsilon,
                targets,
                flow,
                bool(need.edge),
            )
        grads = grads._replace(t=of_t)
        if need.x_dst:
            grads = grads._replace(x_dst=grad * sums[0])
        if need.y_dst:
            grads = grads._replace(y_dst=grad * sums[1])
        return (
            *(g if w else None for g, w in zip(grads, wanted, strict=True)),
            None,
            None,
        )


def _softmax_terms(
    gates: Gates,
    kind: Kind,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    need_t: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """What the gradient by a message is made of, and the gradient of ``t``."""
    out, top, total, squares = saved
    t = gates.t
    assert t is not None
    share = grad / total
    if kind.constant:
        return [top, share, torch.zeros_like(share)], None
    of_t = None
    if need_t:
        # grad times the variance of messages under their shares
        of_t = (share * squares).sum(0) - (grad * out.square()).sum(0)
    return [top, torch.addcmul(share, share * out, t, value=-1), share * t], of_t


def compose(adj: Adj, kind: Kind, gates: Gates) -> Tensor:
    """The same out of other operators, which differentiate to any order."""
    assert adj.graph is not None
    source, target = adj.graph.edge_index
    edge, map_ = gates.edge, gates.map
    if edge is not None and map_ is not None:
        edge = mapped(edge, map_)
    x = gather(gates.x, source)
    if kind.name == "softmax":
        assert gates.t is not None
        m = (x if edge is None else x + edge).relu() + kind.epsilon
        shares = softmax(m * gates.t, target, adj.num_dst)
        messages = m * (shares.detach() if kind.constant else shares)
        return scatter(messages, target, adj.num_dst)
    assert gates.x_dst is not None
    if kind.name == "film":
        assert gates.y_dst is not None
        product = gather(gates.y_dst, target) * x
        messages = (product + gather(gates.x_dst, target)).relu()
        return scatter(messages, target, adj.num_dst)
    assert gates.y is not None
    x, y = x + gather(gates.x_dst, target), gather(gates.y, source)
    if gates.y_dst is not None:
        y = y + gather(gates.y_dst, target)
    if edge is not None:
        e_x, e_y = edge.chunk(2, dim=1)
        x, y = x + e_x, y + e_y
    messages = x.sigmoid() * (F.softplus(y) if kind.name == "crystal" else y)
    return scatter(messages, target, adj.num_dst)
