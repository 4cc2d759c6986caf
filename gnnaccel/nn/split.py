"""A network of rows side by side, its outer linear maps taken per node.

The first linear map is a sum of maps of what stands side by side, and those of node
features are made once per node instead of once per edge. Where messages are added up,
the last linear map is made per node, too; if only a ReLU stands between, no message is
written down.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph import grouping_of
from gnnaccel.kernels.message import Parts
from gnnaccel.nn import dense
from gnnaccel.nn.fused import REDUCE_OF, may_reorder, plain_linear, watched
from gnnaccel.nn.networks import Part, is_end
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.gather import gather
from gnnaccel.ops.message import SHALLOW, mean_of, sum_messages


class Split(NamedTuple):
    """The first linear map of a network: messages are the sum of all terms.

    Attributes:
        nodes: Terms ``[N, F']`` of either end of edges: ``"_i"``, ``"_j"``.
        edges: What is left to map for every edge: features ``[E, D]`` and their part
            of the weight, ``[F', D]``.
        bias: ``[F']`` or ``None``.
        rest: The modules that follow.
    """

    nodes: dict[str, Tensor]
    edges: list[tuple[Tensor, Tensor]]
    bias: Tensor | None
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
        parts: What stands side by side in its input.
        rows: Features of nodes ``[N, D]``, by the argument that is lifted.
        edges: Features of edges ``[E, D]``, by argument.

    Returns:
        The parts; ``None`` where the network begins with something else, or its input
        is not what it takes.
    """
    first, rest = dense.first_linear(network)
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
    found = Split({}, [], first.bias, rest)
    for part, block in zip(parts, weight.split(widths, 1), strict=True):
        if not is_end(part.plus):
            found.edges.append((edges[part.plus], block))
            continue
        for name, x in _centred(part, rows):
            term = dense.linear(x, block if name == part.plus else -block)
            end = name[-2:]
            others = found.nodes.get(end)
            found.nodes[end] = term if others is None else others + term
    return found


def _centred(part: Part, rows: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The rows of a part; those of a difference about a mean, which cancels.

    Far from the origin, a difference would drown in the rounding of what it is the
    difference of.
    """
    if part.minus is None:
        return [(part.plus, rows[part.plus])]
    middle = middle_of(rows[part.minus])
    return [(name, rows[name] - middle) for name in part.names]


def middle_of(x: Tensor) -> Tensor:
    """The mean of rows; 0 in a column that has none, which must not reach all rows."""
    if not x.size(0):
        return x.new_zeros(x.size(1))
    return x.detach().mean(0).nan_to_num_(0.0, 0.0, 0.0)


def written(found: Split, index: dict[str, Tensor]) -> Tensor:
    """The first linear map of every edge, ``[E, F']``, which nobody else holds.

    Args:
        found: Its parts.
        index: ``[E]`` each: the nodes at either end of every edge.
    """
    out: Tensor | None = None
    bias = found.bias
    for features, block in found.edges:
        mapped = dense.linear(features, block, bias)
        bias = None
        out = mapped if out is None else out.add_(mapped)
    for end, term in found.nodes.items():
        lifted = gather(term if bias is None else term + bias, index[end])
        bias = None
        out = lifted if out is None else out.add_(lifted)
    assert out is not None
    return out


def only_relu(modules: list[Any]) -> bool:
    """Whether these modules are a ReLU and, perhaps, a linear layer."""
    return (
        0 < len(modules) <= 2
        and type(modules[0]) is torch.nn.ReLU
        and not watched(modules[0])
        and all(plain_linear(module) for module in modules[1:])
    )


def summed(found: Split, adj: Adj, mean: bool) -> Tensor:
    """The sum or mean of ``relu`` of the first linear map, without writing it down.

    Args:
        found: Its parts, of which one belongs to sources.
        adj: The graph.
        mean: Instead of a sum.

    Returns:
        ``[num_dst, F']``.
    """
    x, x_dst = found.nodes["_j"], found.nodes.get("_i")
    if found.bias is not None:
        x = x + found.bias
    edge = map_ = None
    if found.edges:
        features, blocks = zip(*found.edges, strict=True)
        edge = features[0] if len(features) == 1 else torch.cat(features, 1)
        weight = torch.cat(blocks, 1)
        if edge.size(1) > SHALLOW or wants_grad(edge):
            edge = dense.linear(edge, weight)
        else:
            map_ = weight.t()
    total = sum_messages(adj, "add_relu", Parts(x, edge, map_, None, x_dst))
    return mean_of(adj, total) if mean else total


def through(modules: list[Any], messages: Tensor) -> Tensor:
    """Passes messages that nobody else holds through modules."""
    for number, module in enumerate(modules):
        if number == 0 and type(module) is torch.nn.ReLU and not watched(module):
            messages = messages.relu_()
        else:
            messages = module(messages)
    return messages


def ends_in_linear(modules: list[Any], aggregation: Any) -> bool:
    """Whether the last of the modules may be left until messages are reduced."""
    reduction = REDUCE_OF.get(aggregation)
    return reduction in ("sum", "mean") and bool(modules) and plain_linear(modules[-1])


def takes(linear: Any, messages: Tensor, index: Tensor) -> bool:
    """Whether a linear map may be left until these messages are reduced."""
    return (
        messages.dim() == 2
        and messages.size(0) == index.size(0)
        and messages.size(1) == linear.weight.size(1)
        and messages.dtype == linear.weight.dtype
        and may_reorder(messages)
    )


def after_reduction(linear: Any, out: Tensor, index: Tensor, mean: bool) -> Tensor:
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
