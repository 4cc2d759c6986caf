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
        source, target = graph.edge_index.long()
        pair = edge_type.long() * graph.num_dst + target
        found, place = torch.unique(pair, return_inverse=True)
        kinds = found.div(max(graph.num_dst, 1), rounding_mode="floor")
        counts = torch.bincount(kinds, minlength=relations)
        into = Graph.from_edge_index(
            torch.stack([source, place]), (graph.num_src, found.numel())
        )
        each = torch.stack([torch.arange(found.numel()), found - kinds * graph.num_dst])
        out = Graph.from_edge_index(each, (found.numel(), graph.num_dst))
        return Pairs(into, out, [0, *counts.cumsum(0).tolist()])

    return graph.memory.remember(edge_type, ("pairs", relations), build)


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
