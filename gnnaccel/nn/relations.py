"""Graphs whose ends are pairs of a node and a relation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gnnaccel.graph import Graph

T = TypeVar("T")


class Pairs(NamedTuple):
    """The pairs of a destination and a relation that have an edge, by relation.

    Attributes:
        into: Edges from sources to pairs.
        out: One edge from each pair to its destination.
        bounds: ``[relations + 1]``, where the pairs of each relation begin.
    """

    into: Graph
    out: Graph
    bounds: list[int]


def pairs_of(graph: Graph, edge_type: Tensor, relations: int) -> Pairs | None:
    """Splits the destinations of a graph by the relations of their edges.

    Args:
        graph: The graph.
        edge_type: ``[E]``, in its input order.
        relations: How many there are.

    Returns:
        The pairs; ``None`` where a type is out of range, which is PyG's to judge.
    """

    def build() -> Pairs:
        source, target = graph.edge_index
        pairs = _paired(target, edge_type, graph.num_dst, relations)
        into = Graph.from_edge_index(
            torch.stack([source, pairs.of_edges]), (graph.num_src, pairs.nodes.numel())
        )
        return Pairs(into, _to_nodes(pairs.nodes, graph.num_dst), pairs.bounds)

    return _remembered(graph, edge_type, relations, "pairs", build)


class End(NamedTuple):
    """The pairs of a node at one end of edges and their relation, by relation.

    Attributes:
        of_edges: ``[E]``, the pair of each edge.
        nodes: The node of each pair.
        bounds: ``[relations + 1]``, where the pairs of each relation begin.
    """

    of_edges: Tensor
    nodes: Tensor
    bounds: list[int]


class PairedEnds(NamedTuple):
    """A graph whose nodes are pairs at both ends.

    Attributes:
        graph: Edges from pairs to pairs.
        source: The pairs at the source of an edge.
        target: Those at the destination.
        out: One edge from each of these to its destination.
    """

    graph: Graph
    source: End
    target: End
    out: Graph


def paired_ends_of(
    graph: Graph, edge_type: Tensor, relations: int
) -> PairedEnds | None:
    """Splits both ends of a graph's edges by the relations of these.

    See :func:`pairs_of`.
    """

    def build() -> PairedEnds:
        sources, targets = graph.edge_index
        source = _paired(sources, edge_type, graph.num_src, relations)
        target = _paired(targets, edge_type, graph.num_dst, relations)
        between = Graph.from_edge_index(
            torch.stack([source.of_edges, target.of_edges]),
            (source.nodes.numel(), target.nodes.numel()),
        )
        return PairedEnds(
            between, source, target, _to_nodes(target.nodes, graph.num_dst)
        )

    return _remembered(graph, edge_type, relations, "paired ends", build)


def _paired(end: Tensor, edge_type: Tensor, nodes: int, relations: int) -> End:
    """Numbers the pairs of the nodes ``[E]`` at one end and their relations."""
    found, place = torch.unique(edge_type.long() * nodes + end, return_inverse=True)
    kinds = found.div(max(nodes, 1), rounding_mode="floor")
    counts = torch.bincount(kinds, minlength=relations)
    return End(place, found - kinds * nodes, [0, *counts.cumsum(0).tolist()])


def _to_nodes(nodes: Tensor, num_nodes: int) -> Graph:
    """One edge from each pair to its node."""
    each = torch.stack([torch.arange(nodes.numel()), nodes])
    return Graph.from_edge_index(each, (nodes.numel(), num_nodes))


def _remembered(
    graph: Graph,
    edge_type: Tensor,
    relations: int,
    key: Hashable,
    build: Callable[[], T],
) -> T | None:
    """``build()``, for as long as the graph lives and ``edge_type`` does not change.

    ``None`` where there is not a type for each edge, or one is out of range.
    """
    return graph.memory.remember(
        edge_type,
        (key, relations),
        lambda: build() if _fit(graph, edge_type, relations) else None,
    )


def _fit(graph: Graph, edge_type: Tensor, relations: int) -> bool:
    return edge_type.numel() == graph.num_edges and (
        not edge_type.numel()
        or (0 <= int(edge_type.min()) and int(edge_type.max()) < relations)
    )


def with_relations(
    graph: Graph, edge_type: Tensor, relations: int, source: bool, target: bool
) -> Graph | None:
    """A graph whose edges run from or to a pair of a node and their relation.

    Pair ``(i, r)`` is number ``i * relations + r``.

    Args:
        graph: The graph.
        edge_type: ``[E]``, in its input order.
        relations: How many there are.
        source: Whether sources are pairs.
        target: Whether destinations are pairs.

    Returns:
        The graph, or ``None``: where most pairs would have no edge, so that it does not
        pay; and where a type is out of range, which is PyG's to judge.
    """
    nodes = max(graph.num_src if source else 0, graph.num_dst if target else 0)
    if nodes * relations > 2 * graph.num_edges + nodes:
        return None

    def build() -> Graph:
        kinds = edge_type.long()
        ends = [
            end * relations + kinds if paired else end
            for end, paired in zip(graph.edge_index, (source, target), strict=True)
        ]
        size = (
            graph.num_src * (relations if source else 1),
            graph.num_dst * (relations if target else 1),
        )
        return Graph.from_edge_index(torch.stack(ends), size)

    key = ("relations", source, target)
    return _remembered(graph, edge_type, relations, key, build)
