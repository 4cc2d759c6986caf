"""Graphs whose ends are pairs of a node and a relation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph import Graph


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

    Remembered as long as the graph lives and ``edge_type`` does not change.

    Args:
        graph: The graph.
        edge_type: ``[E]``, in its input order.
        relations: How many there are.

    Returns:
        The pairs; ``None`` where a type is out of range, which is PyG's to judge.
    """

    def build() -> Pairs | None:
        if not _fit(graph, edge_type, relations):
            return None
        source, target = graph.edge_index
        place, nodes, bounds = _paired(target, edge_type, graph.num_dst, relations)
        into = Graph.from_edge_index(
            torch.stack([source, place]), (graph.num_src, nodes.numel())
        )
        return Pairs(into, _to_nodes(nodes, graph.num_dst), bounds)

    return graph.memory.remember(edge_type, ("pairs", relations), build)


class PairedEnds(NamedTuple):
    """The pairs of a node and a relation that have an edge, at both ends of edges.

    Attributes:
        graph: Edges from pairs to pairs.
        sources: The node of each pair at the source of an edge, by relation.
        source_bounds: ``[relations + 1]``, where those of each relation begin.
        targets: The same at the destination.
        target_bounds: See there.
        out: One edge from each pair to its destination.
    """

    graph: Graph
    sources: Tensor
    source_bounds: list[int]
    targets: Tensor
    target_bounds: list[int]
    out: Graph


def paired_ends_of(
    graph: Graph, edge_type: Tensor, relations: int
) -> PairedEnds | None:
    """Splits both ends of a graph's edges by the relations of these.

    Remembered as long as the graph lives and ``edge_type`` does not change.

    Args:
        graph: The graph.
        edge_type: ``[E]``, in its input order.
        relations: How many there are.

    Returns:
        The pairs; ``None`` where a type is out of range.
    """

    def build() -> PairedEnds | None:
        if not _fit(graph, edge_type, relations):
            return None
        source, target = graph.edge_index
        at_source, sources, source_bounds = _paired(
            source, edge_type, graph.num_src, relations
        )
        at_target, targets, target_bounds = _paired(
            target, edge_type, graph.num_dst, relations
        )
        between = Graph.from_edge_index(
            torch.stack([at_source, at_target]), (sources.numel(), targets.numel())
        )
        out = _to_nodes(targets, graph.num_dst)
        return PairedEnds(between, sources, source_bounds, targets, target_bounds, out)

    return graph.memory.remember(edge_type, ("paired ends", relations), build)


def _paired(
    end: Tensor, edge_type: Tensor, nodes: int, relations: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Numbers the pairs of a node and a relation that have an edge, by relation.

    Args:
        end: ``[E]``, the node at one end.
        edge_type: ``[E]``.
        nodes: How many there are.
        relations: How many there are.

    Returns:
        The pair of each edge ``[E]``, the node of each pair, and where the pairs of
        each relation begin, ``[relations + 1]``.
    """
    found, place = torch.unique(edge_type.long() * nodes + end, return_inverse=True)
    kinds = found.div(max(nodes, 1), rounding_mode="floor")
    counts = torch.bincount(kinds, minlength=relations)
    return place, found - kinds * nodes, [0, *counts.cumsum(0).tolist()]


def _to_nodes(nodes: Tensor, num_nodes: int) -> Graph:
    """One edge from each pair to its node."""
    each = torch.stack([torch.arange(nodes.numel()), nodes])
    return Graph.from_edge_index(each, (nodes.numel(), num_nodes))


def _fit(graph: Graph, edge_type: Tensor, relations: int) -> bool:
    return edge_type.numel() == graph.num_edges and (
        not edge_type.numel()
        or (0 <= int(edge_type.min()) and int(edge_type.max()) < relations)
    )


def with_relations(
    graph: Graph, edge_type: Tensor, relations: int, source: bool, target: bool
) -> Graph | None:
    """A graph whose edges run from or to a pair of a node and their relation.

    Pair ``(i, r)`` is number ``i * relations + r``. Remembered as long as the graph
    lives and ``edge_type`` does not change.

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

    def build() -> Graph | None:
        if not _fit(graph, edge_type, relations):
            return None
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

    key = ("relations", relations, source, target)
    return graph.memory.remember(edge_type, key, build)
