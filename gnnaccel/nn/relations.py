"""Graphs whose ends are pairs of a node and a relation."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.graph import Graph


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
        if edge_type.numel() != graph.num_edges:
            return None
        if edge_type.numel() and not (
            0 <= int(edge_type.min()) and int(edge_type.max()) < relations
        ):
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
