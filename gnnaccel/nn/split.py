"""A network of rows side by side, its outer linear maps taken per node.

The first linear map is a sum of maps of what stands side by side, and those of node
features are made once per node instead of once per edge. Where messages are added up,
the last linear map is made per node, too. If nothing stands between, or a ReLU alone,
no message is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph import grouping_of
from gnnaccel.kernels.message import Parts
from gnnaccel.nn import dense, sequence, written
from gnnaccel.nn.fused import may_reorder, plain_linear
from gnnaccel.nn.networks import Part, is_end
from gnnaccel.nn.pairwise import reduce_sum_of_ends
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.gather import gather
from gnnaccel.ops.message import SHALLOW, mean_of, sum_messages


class Split(NamedTuple):
    """The first linear map of a network: messages are the sum of all terms.

    Attributes:
        nodes: Terms ``[N, F']`` of either end of edges, ``"_i"`` or ``"_j"``; the bias
            is in one of them.
        edges: What is left to map for every edge: features ``[E, D]`` and their part
            of the weight, ``[F', D]``.
        rest: The modules that follow.
    """

    nodes: dict[str, Tensor]
    edges: list[tuple[Tensor, Tensor]]
    rest: list[Any]


def split(
    network: Any,
    parts: tuple[Part, ...],
    rows: dict[str, Tensor],
    edges: dict[str, Tensor],
) -> Split | None:
    """Takes the first linear map of a network apart.

    Args:
        network: A linear layer, or a ``Sequential`` that begins with one.
        parts: What stands side by side in its input; not features of edges alone.
        rows: Features of nodes ``[N, D]``, by the argument that is lifted.
        edges: Features of edges ``[E, D]``, by argument.

    Returns:
        The parts; ``None`` where the network begins with something else, or its input
        is not what it takes.
    """
    first, rest = sequence.first_linear(network)
    if first is None:
        return None
    weight = first.weight
    known = {**rows, **edges}
    if any(
        t.dim() != 2
        or t.dtype != weight.dtype
        or t.device != weight.device
        or not may_reorder(t)
        for t in known.values()
    ):
        return None
    widths = [known[part.plus].size(1) for part in parts]
    if sum(widths) != weight.size(1) or any(
        known[part.minus].size(1) != width
        for part, width in zip(parts, widths, strict=True)
        if part.minus is not None
    ):
        return None
    found = Split({}, [], rest)
    bias = first.bias
    for part, block in zip(parts, weight.split(widths, 1), strict=True):
        if not is_end(part.plus):
            found.edges.append((edges[part.plus], block))
            continue
        for name, x in _centred(part, rows):
            term = dense.linear(x, block if name == part.plus else -block, bias)
            bias = None
            end = name[-2:]
            others = found.nodes.get(end)
            found.nodes[end] = term if others is None else others + term
    return found


def _centred(part: Part, rows: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The rows of a part; those of a difference about a mean, which cancels.

    Far from the origin, a difference would drown in the rounding of what it is the
    difference of.
    """
    plus = rows[part.plus]
    if part.minus is None:
        return [(part.plus, plus)]
    minus = rows[part.minus]
    middle = _middle_of(minus)
    near = minus - middle
    return [
        (part.plus, near if plus is minus else plus - middle),
        (part.minus, near),
    ]


def _middle_of(x: Tensor) -> Tensor:
    """The mean of rows; 0 in a column that has none, which must not reach all rows."""
    if not x.size(0):
        return x.new_zeros(x.size(1))
    return x.detach().mean(0).nan_to_num_(0.0, 0.0, 0.0)


def reduced(
    found: Split,
    index: dict[str, Tensor],
    reduce: str | None,
    graph: Callable[[], Adj | None],
    aggregate: Callable[[Tensor], Tensor],
) -> Tensor:
    """What the network makes of every edge, reduced.

    Args:
        found: The parts of the network.
        index: ``[E]`` each: the nodes at either end of every edge.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; ``None``: whatever
            ``aggregate`` does.
        graph: The graph of these edges, if its kernels serve.
        aggregate: Reduces messages that were written down.

    Returns:
        What ``aggregate`` does, ``[N, F']`` where ``reduce`` is known.
    """
    rest, last = found.rest, None
    if reduce in ("sum", "mean") and rest and plain_linear(rest[-1]):
        *rest, last = rest
    found = found._replace(rest=rest)
    out = None if reduce is None else _unwritten(found, reduce, graph)
    if out is None:
        messages = _messages(found, index, graph)
        if last is not None and not _takes(last, messages, index["_i"]):
            messages, last = last(messages), None
        out = aggregate(messages)
    if last is None:
        return out
    return _after_reduction(last, out, index["_i"], reduce == "mean")


def _messages(
    found: Split, index: dict[str, Tensor], graph: Callable[[], Adj | None]
) -> Tensor:
    """What the network makes of every edge."""
    nodes, rest = found.nodes, found.rest
    entries = index["_i"].size(0)
    adj = None
    if "_j" in nodes and written.pays(nodes["_j"], entries):
        adj = graph()
    if adj is None or adj.graph is None or adj.graph.num_edges != entries:
        return sequence.through(rest, _gathered(found, index))
    ends = written.Ends(adj, index["_i"], index["_j"])
    relu = bool(rest) and sequence.is_relu(rest[0])
    if relu and len(rest) > 1 and plain_linear(rest[1]):
        weight, bias = rest[1].weight, rest[1].bias
        if dense.serves(nodes["_j"], weight, bias):
            out = written.messages(ends, _parts(found), relu, weight, bias)
            return sequence.through(rest[2:], out)
    out = written.messages(ends, _parts(found), relu)
    # What its ReLU returned, its gradient needs.
    return sequence.through(rest[relu:], out, owned=not relu)


def _parts(found: Split) -> Parts:
    """The terms of messages that a neighbour's is among."""
    edge = map_ = None
    if found.edges:
        features, blocks = zip(*found.edges, strict=True)
        edge = features[0] if len(features) == 1 else torch.cat(features, 1)
        weight = torch.cat(blocks, 1)
        if edge.size(1) > SHALLOW or wants_grad(edge):
            edge = dense.linear(edge, weight)
        else:
            map_ = weight.t()
    return Parts(found.nodes["_j"], edge, map_, None, found.nodes.get("_i"))


def _gathered(found: Split, index: dict[str, Tensor]) -> Tensor:
    """The first linear map of every edge, ``[E, F']``, which nobody else holds."""
    terms = [dense.linear(features, block) for features, block in found.edges]
    terms += [gather(term, index[end]) for end, term in found.nodes.items()]
    out, *others = terms
    for term in others:
        out = out.add_(term)
    return out


def _unwritten(
    found: Split, reduce: str, graph: Callable[[], Adj | None]
) -> Tensor | None:
    """The reduced messages, if that can be done without writing them down."""
    nodes = found.nodes
    relu = len(found.rest) == 1 and sequence.is_relu(found.rest[0])
    adds_up = reduce in ("sum", "mean")
    # The largest of what passes a ReLU is what of the largest does.
    linear = (
        not found.edges
        and len(nodes) == 2
        and (not found.rest or (relu and not adds_up))
    )
    adj = graph() if linear or (adds_up and relu and "_j" in nodes) else None
    if adj is None:
        return None
    if linear:
        out = reduce_sum_of_ends(adj, nodes["_j"], nodes["_i"], reduce)
        return out.relu() if relu else out
    total = sum_messages(adj, "add_relu", _parts(found))
    return mean_of(adj, total) if reduce == "mean" else total


def _takes(linear: Any, messages: Tensor, index: Tensor) -> bool:
    """Whether a linear map may be left until these messages are reduced."""
    return (
        messages.dim() == 2
        and messages.size(0) == index.size(0)
        and messages.size(1) == linear.weight.size(1)
        and messages.dtype == linear.weight.dtype
        and may_reorder(messages)
    )


def _after_reduction(linear: Any, out: Tensor, index: Tensor, mean: bool) -> Tensor:
    """A linear map of reduced messages, as if each had passed it.

    Args:
        linear: The map, from ``F`` to ``F'``.
        out: ``[N, F]``, a sum or a mean.
        index: ``[E]``, each message's destination.
        mean: Which of both.

    Returns:
        ``[N, F']``.
    """
    mapped = dense.linear(out, linear.weight)
    if linear.bias is None:
        return mapped
    counts = grouping_of(index, out.size(0)).counts
    if mean:
        counts = counts.clamp(max=1)
    return torch.addcmul(mapped, counts.unsqueeze(-1).to(out.dtype), linear.bias)
