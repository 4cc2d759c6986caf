"""What message kernels take, and their meaning in plain torch.

The message of an edge ``j -> i``, by kind, with ``y[e] = edge[e]`` or, with a map,
``edge[e] @ map`` (whose last row, if it has one more than ``edge[e]`` has columns, is
added as it is):

- ``"add_relu"``: ``relu(x[j] + x_dst[i] + y[e])``
- ``"mul"``: ``x[j] * y[e]``, without a map and ``x_dst``
- ``"active"``: 1 where ``"add_relu"`` is positive or NaN, else 0

``weight[e]`` multiplies it, and the messages into each ``i`` are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.kernels.grouping import Grouping, accumulator

#: The kinds of message, by the number the compiled kernels know them under.
KINDS = {"add_relu": 0, "mul": 1, "active": 2}


class Parts(NamedTuple):
    """The tensors of one sum of messages, all of one dtype.

    Attributes:
        x: ``[cols, F]``.
        edge: ``[E, F]``, or ``[E, D]`` with a map; in the caller's order. ``None``, not
            under ``"mul"`` nor with a map: ``y`` is 0.
        map: ``[D, F]``, ``[D + 1, F]`` or ``None``; not in half types.
        weight: ``[E]`` or ``None``, in the caller's order; gets no gradient.
        x_dst: ``[rows, F]``, of destinations, or ``None``.
    """

    x: Tensor
    edge: Tensor | None = None
    map: Tensor | None = None
    weight: Tensor | None = None
    x_dst: Tensor | None = None


def message_sum(g: Grouping, kind: str, parts: Parts, own: float = 0.0) -> Tensor:
    """Sums the messages of each row's entries.

    Args:
        g: Entries grouped by destination.
        kind: One of :data:`KINDS`.
        parts: The tensors.
        own: So much of each row of ``x`` is added; rows are columns, unless it is 0.

    Returns:
        ``[rows, F]`` of the dtype of ``x``.
    """
    assert g.col is not None
    edge, weight = _by_entry(g, parts)
    x = parts.x.to(edge.dtype).index_select(0, g.col.long())
    if kind == "mul":
        messages = x * edge
    else:
        if parts.x_dst is not None:
            x = x + parts.x_dst.to(x.dtype).index_select(0, g.row)
        messages = (x + edge).relu()
        if kind == "active":
            messages = (messages != 0).to(x.dtype)
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    out = messages.new_zeros(g.rows, x.size(1)).index_add_(0, g.row, messages)
    if own:
        out = out + own * parts.x.to(edge.dtype)
    return out.to(parts.x.dtype)


def message_sum_backward(
    transposed: Grouping,
    kind: str,
    parts: Parts,
    own: float,
    grad: Tensor,
    need_edge: bool,
) -> Parts:
    """Gradients of :func:`message_sum`.

    Args:
        transposed: Entries grouped by source.
        kind: See there, as ``parts`` and ``own``.
        parts: The tensors.
        own: A number.
        grad: ``[cols, F]``, the gradient of the result.
        need_edge: Whether that of ``edge`` is wanted; never with a map.

    Returns:
        Gradients of ``x``, of ``edge`` if wanted, and of the map if there is one. That
        of ``x_dst`` is ``grad`` times the sum of ``"active"``.
    """
    g = transposed
    assert g.col is not None
    edge, weight = _by_entry(g, parts)
    wide = edge.dtype
    x = parts.x.to(wide).index_select(0, g.row)
    flow = grad.to(wide).index_select(0, g.col.long())
    if weight is not None:
        flow = flow * weight.unsqueeze(-1)
    if kind == "add_relu":
        if parts.x_dst is not None:
            x = x + parts.x_dst.to(wide).index_select(0, g.col.long())
        # Written so that NaN passes.
        of_x = of_edge = torch.where(x + edge <= 0, flow.new_zeros(()), flow)
    else:
        of_x, of_edge = flow * edge, flow * x
    x_grad = of_x.new_zeros(g.rows, of_x.size(1)).index_add_(0, g.row, of_x)
    if own:
        x_grad = x_grad + own * grad.to(wide)
    edge_grad = map_grad = None
    if parts.edge is None:
        pass
    elif parts.map is not None:
        rows = _in_order(g, parts.edge).to(wide)
        map_grad = rows.t() @ of_edge
        if parts.map.size(0) > rows.size(1):
            map_grad = torch.cat([map_grad, of_edge.sum(0, keepdim=True)])
        map_grad = map_grad.to(parts.map.dtype)
    elif need_edge:
        grouped = of_edge.to(parts.edge.dtype)
        edge_grad = grouped
        if g.perm is not None:
            edge_grad = torch.empty_like(grouped)
            edge_grad.index_copy_(0, g.perm.long(), grouped)
    return Parts(x_grad.to(parts.x.dtype), edge_grad, map_grad)


def mapped(edge: Tensor, map: Tensor) -> Tensor:
    """``edge`` through a map, ``[E, F]``."""
    out = edge @ map[: edge.size(1)]
    return out if map.size(0) == edge.size(1) else out + map[-1]


def _in_order(g: Grouping, x: Tensor) -> Tensor:
    return x if g.perm is None else x.index_select(0, g.perm.long())


def _by_entry(g: Grouping, parts: Parts) -> tuple[Tensor, Tensor | None]:
    """What each edge brings, and its weight, in grouped order and summable."""
    wide = accumulator(parts.x.dtype)
    if parts.edge is None:
        edge = parts.x.new_zeros((), dtype=wide)
    else:
        edge = _in_order(g, parts.edge).to(wide)
    if parts.map is not None:
        edge = mapped(edge, parts.map.to(wide))
    weight = parts.weight
    return edge, None if weight is None else _in_order(g, weight).to(wide)
