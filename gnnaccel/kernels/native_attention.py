"""Attention on the native backend; float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel.kernels import library, memory
from gnnaccel.kernels.attention import EPSILON, SCORES, Inputs, Score
from gnnaccel.kernels.grouping import Grouping

_native = library.module
_DTYPES = {torch.float32: 0, torch.float64: 1}


def attention(
    g: Grouping, score: Score, inputs: Inputs, with_shares: bool
) -> tuple[Tensor, Tensor | None]:
    """See :func:`gnnaccel.kernels.attention.attention`.

    Under ``"sum"`` what comes with the result are not the shares, which its gradients
    make again, but what they need for that of each node: see :func:`_apart`.
    """
    inputs = _contiguous(inputs)
    values = inputs.values
    heads, columns = values.shape[1:]
    out = memory.empty((g.rows, heads, columns), values.dtype)
    kept = shares = None
    if with_shares and score.kind == "sum":
        kept = memory.empty((g.rows * heads * (columns + 3),), values.dtype)
    elif with_shares:
        kept = shares = memory.empty((g.entries, heads), values.dtype)
    _native.attention(
        *g.addresses,
        _DTYPES[values.dtype],
        SCORES[score.kind],
        heads,
        columns,
        *_addresses(inputs),
        score.slope,
        score.scale,
        EPSILON,
        out.data_ptr(),
        0 if shares is None else shares.data_ptr(),
        *_map(inputs),
        *_apart(score, kept, out),
    )
    return out, kept


def attention_backward(
    g: Grouping,
    transposed: Grouping,
    positions: Tensor | None,
    score: Score,
    inputs: Inputs,
    out: Tensor,
    shares: Tensor,
    grad: Tensor,
    edge_wanted: bool = True,
) -> Inputs:
    """See :func:`gnnaccel.kernels.attention.attention_backward`."""
    inputs = _contiguous(inputs)
    grad = grad.contiguous()
    heads, columns = out.shape[1:]
    of_sums = score.kind == "sum"
    scratch = (g.rows, 4 * heads) if of_sums else (g.entries, 2 * heads)
    pair = memory.empty(scratch, out.dtype)
    query, key, value, att, edge, bias, _, map_ = (
        None if x is None else memory.empty(x.shape, x.dtype)
        for x in (inputs if edge_wanted else inputs._replace(edge=None))
    )
    assert key is not None
    _native.attention_backward(
        *g.addresses,
        *transposed.addresses,
        0 if positions is None else positions.data_ptr(),
        _DTYPES[out.dtype],
        SCORES[score.kind],
        heads,
        columns,
        *_addresses(inputs),
        score.slope,
        score.scale,
        out.data_ptr(),
        0 if of_sums else shares.data_ptr(),
        grad.data_ptr(),
        pair.data_ptr(),
        *(0 if x is None else x.data_ptr() for x in (query, key, value, att)),
        *(0 if x is None else x.data_ptr() for x in (edge, bias)),
        *_map(inputs),
        0 if map_ is None else map_.data_ptr(),
        *_apart(score, shares, out),
    )
    return Inputs(query, key, value, att, edge, bias, map=map_)


def head_dots(x: Tensor, atts: Sequence[Tensor]) -> list[Tensor]:
    """See :func:`gnnaccel.kernels.attention.head_dots`."""
    x = x.contiguous()
    outs = [memory.empty(x.shape[:2], x.dtype) for _ in atts]
    _head_dots(x, atts, outs, [], None, [])
    return outs


def head_dots_backward(
    x: Tensor, atts: Sequence[Tensor], grads: Sequence[Tensor], of_x: Tensor
) -> list[Tensor]:
    """See :func:`gnnaccel.kernels.attention.head_dots_backward`."""
    of_atts = [torch.empty_like(att) for att in atts]
    _head_dots(x.contiguous(), atts, [], grads, of_x, of_atts)
    return of_atts


def _head_dots(
    x: Tensor,
    atts: Sequence[Tensor],
    outs: Sequence[Tensor],
    grads: Sequence[Tensor],
    of_x: Tensor | None,
    of_atts: Sequence[Tensor],
) -> None:
    # Held until the kernel is done with them.
    atts, grads = ([t.contiguous() for t in tensors] for tensors in (atts, grads))

    def pair(tensors: Sequence[Tensor]) -> list[int]:
        return ([t.data_ptr() for t in tensors] + [0, 0])[:2]

    _native.head_dots(
        _DTYPES[x.dtype],
        *x.shape,
        x.data_ptr(),
        *pair(atts),
        *pair(outs),
        *pair(grads),
        0 if of_x is None else of_x.data_ptr(),
        *pair(of_atts),
    )


def _apart(score: Score, kept: Tensor | None, out: Tensor) -> tuple[int, int]:
    """Where ``"sum"`` keeps what its gradients need.

    Args:
        score: How logits are made.
        kept: One after the other ``[rows, H, C]``, the part of the result whose leaky
            ReLU was on the positive side, and ``[rows, 3, H]``: the largest logit, 1 /
            the sum of exponentials, the sum of the shares on the positive side.
        out: The result.
    """
    if kept is None or score.kind != "sum":
        return 0, 0
    return kept.data_ptr(), kept.data_ptr() + out.numel() * out.element_size()


def _contiguous(inputs: Inputs) -> Inputs:
    key, *rest = (None if x is None else x.contiguous() for x in inputs[1:])
    assert key is not None
    query = inputs.query
    return Inputs(None if query is None else query.contiguous(), key, *rest)


def _map(inputs: Inputs) -> tuple[int, int]:
    """Address and rows of the map."""
    return (0, 0) if inputs.map is None else (inputs.map.data_ptr(), len(inputs.map))


def _addresses(inputs: Inputs) -> tuple[int, ...]:
    """Of query, key, value, att, edge, bias and keep; the key may be the value."""
    tensors = inputs._replace(value=inputs.values)[:-1]
    return tuple(0 if x is None else x.data_ptr() for x in tensors)
