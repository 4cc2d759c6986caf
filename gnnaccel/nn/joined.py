"""Messages that join a neighbour's row with the edge's features, summed unwritten."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.utils
from torch import Tensor

from gnnaccel.kernels.message import Parts
from gnnaccel.nn import dense
from gnnaccel.nn.fused import may_reorder, plain_linear
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.message import SHALLOW, mean_of, sum_messages


def joined_sum(
    adj: Adj,
    kind: str,
    x: Tensor,
    edge: Tensor,
    through: Any,
    weight: Tensor | None,
    reduce: str,
    own: float = 0.0,
) -> Tensor:
    """The sum or mean of messages.

    Args:
        adj: The graph.
        kind: One of :data:`gnnaccel.ops.message.MESSAGES`.
        x: ``[num_src, F]``.
        edge: ``[E, *]``, in input edge order.
        through: A module that it passes first, or ``None``.
        weight: ``[E]``, multiplies messages, without a gradient; or ``None``.
        reduce: ``"sum"`` or ``"mean"``.
        own: So much of each row of ``x`` is added; only to a sum.

    Returns:
        ``[num_dst, F]``.
    """
    map_ = None
    if kind != "mul" and edge.dim() == 2 and shallow(through, x, edge):
        map_ = through.weight.t()
        if through.bias is not None:
            map_ = torch.cat([map_, through.bias.unsqueeze(0)])
    elif through is not None:
        entries = edge.size(0)
        edge = dense.apply(through, edge)
        if type(edge) is not Tensor or edge.dim() == 0 or edge.size(0) != entries:
            return _broadcast(adj, kind, x, edge, weight, reduce)
    if map_ is None and (edge.shape[1:] != x.shape[1:] or edge.dtype != x.dtype):
        out = _written(adj, kind, x, edge, weight, reduce)
        return out + own * x if own else out
    out = sum_messages(adj, kind, Parts(x, edge, map_, weight), own)
    return mean_of(adj, out) if reduce == "mean" else out


def shallow(through: Any, x: Tensor, edge: Tensor) -> bool:
    """Whether edges' features are better mapped where they are read."""
    return (
        through is not None
        and plain_linear(through)
        and through.weight.shape == (x.size(1), edge.size(1))
        and edge.size(1) <= SHALLOW
        and through.weight.dtype == edge.dtype == x.dtype
        and may_reorder(x)
        and not wants_grad(edge)
    )


def _written(
    adj: Adj, kind: str, x: Tensor, edge: Tensor, weight: Tensor | None, reduce: str
) -> Tensor:
    """The same with a message per edge, for features that are not as wide as rows."""
    if kind == "mul" and edge.shape[1:] == (1,) and edge.dtype == x.dtype:
        column = edge.squeeze(1) if weight is None else edge.squeeze(1) * weight
        return aggregate(adj, x, column, reduce)
    return _broadcast(adj, kind, x, edge, weight, reduce)


def _broadcast(
    adj: Adj, kind: str, x: Tensor, edge: Any, weight: Tensor | None, reduce: str
) -> Tensor:
    """The same for features of any shape that a module may make of edges'."""
    index = adj.edge_index if adj.graph is None else adj.graph.edge_index
    assert index is not None
    messages = gather(x, index[0])
    messages = messages * edge if kind == "mul" else messages + edge
    messages = messages.relu() if kind == "add_relu" else messages
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    if messages.dim() != 2:
        return torch_geometric.utils.scatter(
            messages, index[1].long(), -2, adj.num_dst, reduce
        )
    return scatter(messages, index[1], adj.num_dst, reduce)
