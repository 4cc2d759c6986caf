"""What the attention layers share: their graphs, self-loops, dropout and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from gnnaccel.cache import remember
from gnnaccel.graph import Graph
from gnnaccel.kernels import transforming
from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn import dense
from gnnaccel.nn.fused import (
    Fused,
    is_index,
    is_served,
    may_reorder,
    plain_linear,
)
from gnnaccel.ops.adj import Adj, tracing
from gnnaccel.ops.attention import SHALLOW, attend
from gnnaccel.ops.gather import scatter


class Attends(Fused):
    """Mixed into an attention layer of PyG's, before it in the list of bases."""

    _node_dims = (0,)
    concat: bool
    dropout: float
    heads: int
    out_channels: int
    training: bool

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum":
            why = f"aggr={self._reduce!r}: only sum is fused with attention"
        return why

    def _by_head(self, linear: Any, x: Tensor) -> Tensor:
        """``linear(x)`` as ``[N, H, C]``."""
        return dense.apply(linear, x).view(-1, self.heads, self.out_channels)

    def _all_by_head(self, linears: Sequence[Any], x: Tensor) -> list[Tensor]:
        """``[linear(x) for linear in linears]``, ``[N, H, C]`` each."""
        shape = (-1, self.heads, self.out_channels)
        return [out.view(shape) for out in dense.apply_all(linears, x)]

    def _edge(self, linear: Any, edge_attr: Tensor) -> dict[str, Tensor]:
        """What attention is told of the edges: their features and the map, if it can.

        Args:
            linear: The layer's map of edge features.
            edge_attr: ``[E, D]``.
        """
        if (
            plain_linear(linear)
            and linear.bias is None
            and may_reorder(edge_attr)
            and edge_attr.size(1) == linear.weight.size(1) <= SHALLOW
            and edge_attr.dtype == linear.weight.dtype
        ):
            shape = (-1, self.heads, self.out_channels)
            return {"edge": edge_attr, "map": linear.weight.t().reshape(shape)}
        return {"edge": self._by_head(linear, edge_attr)}

    def _keep(self, adj: Adj, x: Tensor) -> Tensor | None:
        """The layer's dropout: factors of the shares, ``[E, H]``.

        They are drawn as PyG draws them, from torch's generator and for the same edges
        in the same order: after the same seed, both drop the same shares.
        """
        if not self.training or self.dropout == 0:
            return None
        assert adj.graph is not None
        ones = x.new_ones(adj.graph.num_edges, self.heads)
        return F.dropout(ones, self.dropout)

    def _attend(self, adj: Adj, score: Score, inputs: Inputs) -> Tensor:
        """Attention with the layer's dropout, its heads side by side or their mean."""
        inputs = inputs._replace(keep=self._keep(adj, inputs.key))
        return self._joined(attend(adj, score, inputs))

    def _joined(self, out: Tensor) -> Tensor:
        return out.flatten(1) if self.concat else out.mean(1)


def pair_ok(x_src: Any, x_dst: Any) -> bool:
    """Whether features are what the fused path takes; ``x_dst`` may be ``None``."""
    return is_served(x_src) and (
        x_dst is None or (is_served(x_dst) and x_dst.dtype == x_src.dtype)
    )


def attention_graph(
    layer: Any,
    x_src: Tensor,
    edge_index: Any,
    num_dst: int | None,
    num_loops: int | None = None,
) -> Adj | None:
    """The graph that an attention layer attends over if the fused path takes it.

    Args:
        layer: The layer; its ``flow`` counts.
        x_src: Features of the sources, as :func:`pair_ok` admits them.
        edge_index: What the user passed as ``edge_index``.
        num_dst: Number of destinations, or ``None``: as many as sources.
        num_loops: Replace self-loops by one at each of so many nodes; ``None``: don't.

    Returns:
        The graph or ``None``. Its input order is PyG's: the edges without self-loops,
        then the new loops.

    Raises:
        EdgeIndexError: An edge names a node that does not exist.
    """
    if not (
        type(edge_index) is Tensor
        and edge_index.layout == torch.strided
        and is_index(edge_index, x_src)
        and not torch.is_autocast_enabled("cpu")
        and not tracing(x_src, edge_index)
        and not transforming(x_src)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
    ):
        return None
    size = (x_src.size(0), x_src.size(0) if num_dst is None else num_dst)
    forward = layer.flow == "source_to_target"
    ends = size if forward else size[::-1]
    if num_loops is None:
        graph = Graph.of(edge_index, ends)
    else:
        graph = remember(
            edge_index,
            ("looped", *ends, num_loops),
            lambda: _looped(edge_index, ends, num_loops),
        )
    return Adj(graph if forward else graph.t, None, *size)


def _looped(edge_index: Tensor, size: tuple[int, int], num_loops: int) -> Graph:
    # Out of range ends are reported before they become one end too many.
    edges, _ = remove_self_loops(edge_index)
    edges, _ = add_self_loops(edges, num_nodes=num_loops)
    return Graph.from_edge_index(edges, size)


def looped_attributes(
    edge_index: Tensor, edge_attr: Tensor, num_loops: int, fill_value: Any
) -> Tensor:
    """Edge features in the order of the graph with replaced self-loops.

    Args:
        edge_index: ``[2, E]``.
        edge_attr: ``[E, *]``.
        num_loops: See :func:`attention_graph`.
        fill_value: Features of the new loops, as in
            :func:`torch_geometric.utils.add_self_loops`.

    Returns:
        ``[E', *]``.
    """
    kept = remember(edge_index, "kept", lambda: _kept(edge_index))
    index = edge_index[1]
    if kept is not None:
        edge_attr, index = edge_attr[kept], index[kept]
    shape = (num_loops, *edge_attr.shape[1:])
    if isinstance(fill_value, str):
        loops = scatter(edge_attr, index, num_loops, fill_value)
    elif isinstance(fill_value, Tensor):
        fill = fill_value.to(edge_attr.device, edge_attr.dtype)
        fill = fill if fill.dim() == edge_attr.dim() else fill.unsqueeze(0)
        loops = fill.expand(shape)
    else:
        loops = edge_attr.new_full(shape, 1.0 if fill_value is None else fill_value)
    return torch.cat([edge_attr, loops])


def _kept(edge_index: Tensor) -> Tensor | None:
    """Positions of the edges that are no self-loops; ``None``: all of them."""
    keep = edge_index[0] != edge_index[1]
    return None if bool(keep.all()) else keep.nonzero().squeeze(1)


def edge_features(linear: Any, edge_attr: Any, x: Tensor, edges: int) -> bool:
    """Whether edge features are what the fused path takes."""
    return (
        linear is not None
        and isinstance(edge_attr, Tensor)
        and edge_attr.layout == torch.strided
        and edge_attr.dim() in (1, 2)
        and edge_attr.size(0) == edges
        and edge_attr.dtype == x.dtype
        and edge_attr.device == x.device
        and not tracing(edge_attr)
    )
