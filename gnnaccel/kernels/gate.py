"""Sums of gated messages on the native backend, and what they mean.

The message of an edge ``j -> i``, by kind, with ``(e_x, e_y)[e] = edge[e]``, half its
columns each, or, with a map, ``edge[e] @ map`` (whose last row, if it has one more than
``edge[e]`` has columns, is added as it is):

- ``"sigmoid"``: ``sigmoid(x[j] + x_dst[i] + e_x) * (y[j] + e_y)``
- ``"crystal"``: ``sigmoid(x[j] + x_dst[i] + e_x) * softplus(y[j] + y_dst[i] + e_y)``
- ``"film"``: ``relu(y_dst[i] * x[j] + x_dst[i])``, without ``edge``
- ``"softmax"``: ``relu(x[j] + e_x) + epsilon``, all columns being ``e_x``'s, times the
  softmax over the edges into ``i`` of ``t`` times it, column by column

Messages into each ``i`` are added up. :func:`gnnaccel.ops.gate.compose` is the same in
differentiable operators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.kernels import library, memory
from gnnaccel.kernels.grouping import Grouping
from gnnaccel.kernels.native import address, dense_rows

_native = library.module
_DTYPES = {torch.float32: 0, torch.float64: 1}

#: The kinds of message, by the number the compiled kernels know them under.
KINDS = {"sigmoid": 0, "crystal": 1, "film": 2, "softmax": 3}
#: How many sums a kernel makes: that of the messages, and those that gradients need.
_SUMS = {"sigmoid": 2, "crystal": 3, "film": 3, "softmax": 4}


class Gates(NamedTuple):
    """The tensors of one sum of gated messages, all of one dtype.

    Attributes:
        x: ``[num_src, F]``.
        y: The same, or ``None`` where the kind has none.
        x_dst: ``[num_dst, F]``, or ``None`` where the kind has none, as ``y_dst``.
        y_dst: The same.
        edge: ``[E, 2F]`` (``[E, F]`` under ``"softmax"``), or ``[E, D]`` with a map, in
            the caller's order; ``None``: 0.
        map: ``[D, 2F]`` or ``[D + 1, 2F]`` (``F`` columns under ``"softmax"``); the
            edge gets no gradient then.
        t: ``[F]``, under ``"softmax"``.
    """

    x: Tensor
    y: Tensor | None = None
    x_dst: Tensor | None = None
    y_dst: Tensor | None = None
    edge: Tensor | None = None
    map: Tensor | None = None
    t: Tensor | None = None


def gate_sum(
    g: Grouping, kind: str, gates: Gates, epsilon: float, with_sums: bool
) -> list[Tensor]:
    """Sums the messages of each row's entries.

    Args:
        g: Entries grouped by destination, int32.
        kind: One of :data:`KINDS`.
        gates: The tensors; float32 or float64.
        epsilon: Under ``"softmax"``.
        with_sums: Whether what gradients need is wanted, too.

    Returns:
        The sum ``[num_dst, F]`` and, if wanted, by kind and of the same shape each:

        - ``"sigmoid"``: its derivative by ``x_dst``;
        - ``"crystal"``, ``"film"``: those by ``x_dst`` and by ``y_dst``;
        - ``"softmax"``: the largest logit, the sum of exponentials less it (1 where
          there is no edge), and the same sum of squared messages times exponentials.
    """
    shape = (g.rows, gates.x.size(1))
    wanted = _SUMS[kind] if with_sums else 1
    out = [memory.empty(shape, gates.x.dtype) for _ in range(wanted)]
    targets = [gates.x_dst, gates.y_dst]
    _run(g, kind, gates, epsilon, targets, out, None, None, None)
    return out


def gate_sum_backward(
    transposed: Grouping,
    kind: str,
    gates: Gates,
    epsilon: float,
    targets: list[Tensor | None],
    grad: Tensor | None,
    need_edge: bool,
) -> Gates:
    """Gradients of :func:`gate_sum` along the edges.

    Args:
        transposed: Entries grouped by source, int32.
        kind: See there, as ``gates`` and ``epsilon``.
        gates: The tensors.
        epsilon: A number.
        targets: ``x_dst`` and ``y_dst``. Under ``"softmax"`` what its gradient by a
            message ``m`` is made of, ``exp(t m - c[0]) * (c[1] + c[2] m)``.
        grad: ``[num_dst, F]``, the gradient of the sum; ``None`` under ``"softmax"``.
        need_edge: Whether that of ``edge`` is wanted; never with a map.

    Returns:
        Gradients of ``x`` and ``y``, of the map if there is one and of the edge if
        wanted.
    """
    x = gates.x
    sources = [tensor for tensor in (gates.x, gates.y) if tensor is not None]
    out = [memory.empty(x.shape, x.dtype) for _ in sources]
    of_edge = of_map = None
    if need_edge and gates.edge is not None:
        of_edge = memory.empty(gates.edge.shape, x.dtype)
    if gates.map is not None:
        of_map = gates.map.new_empty(gates.map.shape)
    if grad is not None:
        grad = grad.contiguous()
    _run(transposed, kind, gates, epsilon, targets, out, grad, of_edge, of_map)
    found = Gates(out[0], edge=of_edge, map=of_map)
    return found if gates.y is None else found._replace(y=out[1])


def _run(
    g: Grouping,
    kind: str,
    gates: Gates,
    epsilon: float,
    targets: list[Tensor | None],
    out: list[Tensor],
    grad: Tensor | None,
    of_edge: Tensor | None,
    of_map: Tensor | None,
) -> None:
    sources = [dense_rows(t) for t in (gates.x, gates.y) if t is not None]
    ends = [dense_rows(t) for t in targets if t is not None]
    edge, map_, t = (
        None if tensor is None else tensor.contiguous()
        for tensor in (gates.edge, gates.map, gates.t)
    )
    _native.gate_sum(
        *g.addresses,
        _DTYPES[gates.x.dtype],
        KINDS[kind],
        grad is not None or len(ends) == 3,
        [(x.data_ptr(), stride) for x, stride in sources],
        [(x.data_ptr(), stride) for x, stride in ends],
        address(edge),
        address(map_),
        0 if edge is None else edge.size(1),
        0 if map_ is None else map_.size(0),
        address(t),
        epsilon,
        gates.x.size(1),
        [x.data_ptr() for x in out],
        address(grad),
        address(of_edge),
        address(of_map),
    )
