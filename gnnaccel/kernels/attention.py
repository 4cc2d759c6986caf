"""What attention kernels take, and their meaning in plain torch.

The logit of an edge ``j -> i`` in one head, by kind of score:

- ``"sum"`` (Velickovic et al., 2018): ``lrelu(query[i] + key[j] + bias[e])``
- ``"mlp"`` (Brody et al., 2022): ``<att, lrelu(query[i] + key[j] + edge[e])>``
- ``"dot"`` (Shi et al., 2021): ``scale <query[i], key[j] + edge[e]>``

A softmax over the edges into each ``i`` makes shares of them, ``keep`` multiplies
those, and the values (``value[j]``, plus ``edge[e]`` under ``"dot"``) are added up by
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnaccel.kernels.grouping import Grouping

#: The kinds of score, by the number the compiled kernels know them under.
SCORES = {"sum": 0, "mlp": 1, "dot": 2}
#: Added to the denominator, as in :func:`torch_geometric.utils.softmax`.
EPSILON = 1e-16


class Score(NamedTuple):
    """How logits are made.

    Attributes:
        kind: One of :data:`SCORES`.
        slope: Of the leaky ReLU, for ``"sum"`` and ``"mlp"``.
        scale: Of the products, for ``"dot"``.
    """

    kind: str
    slope: float = 0.2
    scale: float = 1.0


class Inputs(NamedTuple):
    """The tensors of one attention, all of one dtype; H heads of C columns.

    Attributes:
        query: ``[rows, H]`` or ``None`` for ``"sum"``, else ``[rows, H, C]``.
        key: ``[cols, H]`` for ``"sum"``, else ``[cols, H, C]``.
        value: ``[cols, H, C]``; ``None``: the key.
        att: ``[H, C]``, for ``"mlp"``.
        edge: ``[E, H, C]`` or ``None``, for ``"mlp"`` and ``"dot"``; in the caller's
            order, like all that stands per edge. With a map ``[E, D]``.
        bias: ``[E, H]`` or ``None``, for ``"sum"``.
        keep: ``[E, H]`` or ``None``: factors of the shares, without a gradient.
        map: ``[D, H, C]`` or ``None``: makes ``[E, H, C]`` of the edges' features.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor | None = None
    att: Tensor | None = None
    edge: Tensor | None = None
    bias: Tensor | None = None
    keep: Tensor | None = None
    map: Tensor | None = None

    def mapped(self) -> Inputs:
        """The same with edges as the map makes them, and no map."""
        if self.edge is None or self.map is None:
            return self
        flat = self.edge @ self.map.flatten(1)
        return self._replace(edge=flat.view(-1, *self.map.shape[1:]), map=None)

    @property
    def values(self) -> Tensor:
        """What is added up, ``[cols, H, C]``."""
        return self.key if self.value is None else self.value


def attention(
    g: Grouping, score: Score, inputs: Inputs, with_shares: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention over the entries of each row.

    Args:
        g: Entries grouped by destination.
        score: How logits are made.
        inputs: The tensors.
        with_shares: Also return what :func:`attention_backward` needs.

    Returns:
        ``[rows, H, C]``, 0 for an empty row; and what this backend's
        :func:`attention_backward` needs, or ``None``. Here that are the shares
        ``[E, H]`` in grouped order, before ``keep``. Under ``"sum"`` their sign is that
        of the sum inside the leaky ReLU (-0 is negative).
    """
    x = _by_entry(g, inputs)
    logits, inner = _logits(score, x)
    index = g.row.unsqueeze(-1).expand_as(logits)
    zeros = logits.new_zeros(g.rows, logits.size(1))
    top = zeros.scatter_reduce(0, index, logits, "amax", include_self=False)
    shares = (logits - top.index_select(0, g.row)).exp()
    total = zeros.index_add(0, g.row, shares) + EPSILON
    shares = shares / total.index_select(0, g.row)
    kept = shares if x.keep is None else shares * x.keep
    out = x.values.new_zeros((g.rows, *x.values.shape[1:]))
    out.index_add_(0, g.row, kept.unsqueeze(-1) * _terms(score, x))
    if not with_shares:
        return out, None
    if score.kind == "sum":
        shares = torch.where(inner > 0, shares, -shares)
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
    edge_wanted: bool = True,
) -> Inputs:
    """Gradients of :func:`attention`.

    Args:
        g: Entries grouped by destination.
        transposed: The same by source.
        positions: ``[E]``: where in ``g`` each entry of ``transposed`` stands;
            ``None``: at the same place. Not looked at under ``"sum"``.
        score: How logits are made.
        inputs: The tensors.
        out: ``[rows, H, C]``, the result.
        shares: What came with it, from the same backend.
        grad: ``[rows, H, C]``, the gradient of the result.
        edge_wanted: Whether that of ``edge`` is; it may be left out otherwise.

    Returns:
        A gradient for each input that is one, save ``keep``. Without a ``value`` that
        of ``key`` holds both.
    """
    x = _by_entry(g, inputs)
    upstream = grad.index_select(0, g.row)
    share = shares.abs() if score.kind == "sum" else shares
    kept = share if x.keep is None else share * x.keep
    of_share = (upstream * _terms(score, x)).sum(-1)
    if x.keep is not None:
        of_share = of_share * x.keep
    mean = (grad * out).sum(-1).index_select(0, g.row)
    of_logit = share * (of_share - mean)
    of_term = kept.unsqueeze(-1) * upstream

    def to_rows(entries: Tensor) -> Tensor:
        zeros = entries.new_zeros((g.rows, *entries.shape[1:]))
        return zeros.index_add_(0, g.row, entries)

    def to_cols(entries: Tensor) -> Tensor:
        zeros = entries.new_zeros((g.cols, *entries.shape[1:]))
        return zeros.index_add_(0, _col(g), entries)

    of_att = of_edge = of_bias = of_map = None
    if score.kind == "sum":
        of_key = torch.where(shares.signbit(), score.slope * of_logit, of_logit)
        of_query = of_key
        of_bias = None if inputs.bias is None else _to_caller(g, of_key)
    elif score.kind == "mlp":
        assert x.att is not None
        inner = _inner(x)
        flat = of_logit.unsqueeze(-1).expand_as(inner)
        flat = torch.where(inner > 0, flat, score.slope * flat)
        of_key = of_query = flat * x.att
        of_att = (flat * inner).sum(0)
        of_edge = None if inputs.edge is None else _to_caller(g, of_query)
    else:
        assert x.query is not None
        scaled = score.scale * of_logit.unsqueeze(-1)
        of_key, of_query = scaled * x.query, scaled * _with_edge(x.key, x.edge)
        if inputs.edge is not None:
            of_edge = _to_caller(g, of_key + of_term)
    if inputs.map is not None and inputs.edge is not None and of_edge is not None:
        of_rows = of_edge.flatten(1)
        of_edge = of_rows @ inputs.map.flatten(1).t()
        of_map = (inputs.edge.t() @ of_rows).view_as(inputs.map)
    key_grad, value_grad = to_cols(of_key), to_cols(of_term)
    if inputs.value is None:
        key_grad = key_grad + value_grad
    return Inputs(
        None if inputs.query is None else to_rows(of_query),
        key_grad,
        None if inputs.value is None else value_grad,
        of_att,
        of_edge,
        of_bias,
        map=of_map,
    )


def head_dots(x: Tensor, atts: Sequence[Tensor]) -> list[Tensor]:
    """Products of each head of a row with a vector.

    Args:
        x: ``[N, H, C]``.
        atts: One or two of ``[H, C]``.

    Returns:
        ``[N, H]`` for each of ``atts``.
    """
    return [(x * att).sum(-1) for att in atts]


def head_dots_backward(
    x: Tensor, atts: Sequence[Tensor], grads: Sequence[Tensor], of_x: Tensor
) -> list[Tensor]:
    """Gradients of :func:`head_dots`.

    Args:
        x: ``[N, H, C]``.
        atts: One or two of ``[H, C]``.
        grads: ``[N, H]`` for each of ``atts``.
        of_x: ``[N, H, C]``; the gradient of ``x`` is added to it.

    Returns:
        The gradient of each of ``atts``.
    """
    for att, grad in zip(atts, grads, strict=True):
        of_x += grad.unsqueeze(-1) * att
    return [(grad.unsqueeze(-1) * x).sum(0) for grad in grads]


def _col(g: Grouping) -> Tensor:
    assert g.col is not None
    return g.col.long()


def _by_entry(g: Grouping, inputs: Inputs) -> Inputs:
    """Every tensor with one row per entry, in grouped order."""

    def near(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.index_select(0, g.row)

    inputs = inputs.mapped()

    def own(x: Tensor | None) -> Tensor | None:
        return x if x is None or g.perm is None else x.index_select(0, g.perm.long())

    col = _col(g)
    return Inputs(
        near(inputs.query),
        inputs.key.index_select(0, col),
        None if inputs.value is None else inputs.value.index_select(0, col),
        inputs.att,
        own(inputs.edge),
        own(inputs.bias),
        own(inputs.keep),
    )


def _with_edge(x: Tensor, edge: Tensor | None) -> Tensor:
    return x if edge is None else x + edge


def _terms(score: Score, x: Inputs) -> Tensor:
    return _with_edge(x.values, x.edge) if score.kind == "dot" else x.values


def _inner(x: Inputs) -> Tensor:
    """What the leaky ReLU of ``"mlp"`` takes."""
    assert x.query is not None
    return _with_edge(x.key + x.query, x.edge)


def _logits(score: Score, x: Inputs) -> tuple[Tensor, Tensor]:
    """Logits ``[E, H]``, and what a leaky ReLU took for them."""
    if score.kind == "dot":
        assert x.query is not None
        logits = score.scale * (x.query * _with_edge(x.key, x.edge)).sum(-1)
        return logits, logits
    if score.kind == "mlp":
        assert x.att is not None
        inner = _inner(x)
        return (x.att * leaky_relu(inner, score.slope)).sum(-1), inner
    inner = x.key if x.query is None else x.key + x.query
    inner = inner if x.bias is None else inner + x.bias
    return leaky_relu(inner, score.slope), inner


def _to_caller(g: Grouping, grouped: Tensor) -> Tensor:
    if g.perm is None:
        return grouped
    return torch.empty_like(grouped).index_copy_(0, g.perm.long(), grouped)
