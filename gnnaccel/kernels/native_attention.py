"""Attention on the native backend; float32 and float64."""

from __future__ import annotations

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
    """See :func:`gnnaccel.kernels.attention.attention`."""
    inputs = _contiguous(inputs)
    values = inputs.values
    heads, columns = values.shape[1:]
    out = memory.empty((g.rows, heads, columns), values.dtype)
    shares = memory.empty((g.entries, heads), values.dtype) if with_shares else None
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
        0,
        0,
    )
    return out, shares


def attention_backward(
    g: Grouping,
    transposed: Grouping,
    positions: Tensor | None,
    score: Score,
    inputs: Inputs,
    out: Tensor,
    shares: Tensor,
    grad: Tensor,
) -> Inputs:
    """See :func:`gnnaccel.kernels.attention.attention_backward`."""
    inputs = _contiguous(inputs)
    grad = grad.contiguous()
    heads, columns = out.shape[1:]
    pair = memory.empty((g.entries, 2 * heads), out.dtype)
    query, key, value, att, edge, bias, _ = (
        None if x is None else memory.empty(x.shape, x.dtype) for x in inputs
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
        shares.data_ptr(),
        grad.data_ptr(),
        pair.data_ptr(),
        *(0 if x is None else x.data_ptr() for x in (query, key, value, att)),
        *(0 if x is None else x.data_ptr() for x in (edge, bias)),
        0,
        0,
        0,
    )
    return Inputs(query, key, value, att, edge, bias)


def _contiguous(inputs: Inputs) -> Inputs:
    key, *rest = (None if x is None else x.contiguous() for x in inputs[1:])
    assert key is not None
    query = inputs.query
    return Inputs(None if query is None else query.contiguous(), key, *rest)


def _addresses(inputs: Inputs) -> tuple[int, ...]:
    """Of query, key, value, att, edge, bias and keep; the key may be the value."""
    tensors = inputs._replace(value=inputs.values)
    return tuple(0 if x is None else x.data_ptr() for x in tensors)
