"""FiLM over several relations: its maps of those nodes only that have such an edge."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.kernels.gate import Gates
from gnnaccel.nn.fused import plain_linear
from gnnaccel.nn.hetero_linear import Sorted, Stack, map_by_type, stacked
from gnnaccel.nn.relations import End, paired_ends_of
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.gate import Kind, gated_sum
from gnnaccel.ops.gather import gather
from gnnaccel.ops.message import mean_of
from gnnaccel.ops.product import spmm_sum


def summed_relations(
    layer: Any, adj: Adj, x_src: Tensor, x_dst: Tensor, edge_type: Tensor, reduce: str
) -> Tensor | None:
    """What a FiLMConv adds up over its relations.

    Args:
        layer: The layer, whose activation is a ReLU.
        adj: The graph.
        x_src: ``[num_src, F]``.
        x_dst: ``[num_dst, F']``.
        edge_type: ``[E]``.
        reduce: ``"sum"`` or ``"mean"``, within each relation.

    Returns:
        ``[num_dst, F_out]``; ``None`` where its maps are no plain linear layers, or the
        types are not what PyG expects.
    """
    assert adj.graph is not None
    if not (
        len(layer.lins) == len(layer.films) == layer.num_relations
        and all(map(plain_linear, (*layer.lins, *layer.films)))
    ):
        return None
    values, films = stacked(layer.lins), stacked(layer.films)
    if (
        values is None
        or films is None
        or values.weight.shape[1:] != (x_src.size(1), layer.out_channels)
        or films.weight.shape[1:] != (x_dst.size(1), 2 * layer.out_channels)
        or not values.weight.dtype == films.weight.dtype == x_src.dtype == x_dst.dtype
    ):
        return None
    ends = paired_ends_of(adj.graph, edge_type, layer.num_relations)
    if ends is None:
        return None
    x = _mapped(values, x_src, ends.source)
    beta, gamma = _mapped(films, x_dst, ends.target).chunk(2, dim=1)
    pairs = ends.graph.num_dst
    between = Adj(ends.graph, None, ends.graph.num_src, pairs)
    out = gated_sum(between, Kind("film"), Gates(x, None, beta, gamma))
    if reduce == "mean":
        out = mean_of(between, out)
    return spmm_sum(Adj(ends.out, None, pairs, adj.num_dst), out)


def _mapped(linears: Stack, x: Tensor, end: End) -> Tensor:
    """The rows of the pairs at one end, by the map of their relation."""
    return map_by_type(gather(x, end.nodes), *linears, Sorted(end.bounds, None, None))
