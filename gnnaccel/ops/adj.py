"""How the ops hold on to a graph: as an object, or as an index while compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnaccel.graph import Graph, Size, check_edge_index, split_size
from gnnaccel.kernels.grouping import Grouping, accumulator


@dataclass(frozen=True)
class Adj:
    """A graph as an op sees it.

    Attributes:
        graph: The graph, or ``None`` while torch.compile traces: then ``edge_index``
            is all there is, and the registered op looks the graph up when it runs.
        edge_index: ``[2, E]``, or ``None`` with a graph at hand.
        num_src: Number of sources.
        num_dst: Number of destinations.
        reuse: Whether layers may keep what follows from constant features on it.
    """

    graph: Graph | None
    edge_index: Tensor | None
    num_src: int
    num_dst: int
    reuse: bool = False

    def grouping(self, transposed: bool, skip_loops: bool = False) -> Grouping:
        """The edges grouped by destination, or by source if ``transposed``."""
        assert self.graph is not None
        graph = self.graph.without_self_loops if skip_loops else self.graph
        return (graph.t if transposed else graph).rows


def hold(adj: Any, size: Size, *tensors: Tensor | None) -> Adj:
    """Resolves what a public op got as its graph.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        size: See there.
        tensors: The op's other tensors, which tell whether torch is tracing.
    """
    if tracing(*tensors):
        if isinstance(adj, Graph):
            return Adj(None, adj.edge_index, adj.num_src, adj.num_dst)
        if type(adj) is Tensor or tracing(adj):
            check_edge_index(adj)
            num_src, num_dst = split_size(size)
            if num_src is None or num_dst is None:
                raise ValueError(
                    "torch.compile needs the number of nodes of an 'edge_index': pass "
                    f"size=(num_src, num_dst) (got {size})"
                )
            return Adj(None, adj, num_src, num_dst)
    graph = Graph.of(adj, size)
    return Adj(graph, None, graph.num_src, graph.num_dst)


def check_tensors(**tensors: Any) -> None:
    """Raises ``TypeError`` for an argument that is neither a tensor nor ``None``."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"Expected '{name}' to be a tensor (got "
                f"{type(value).__name__}: {value!r})"
            )


def check_device(adj: Adj, name: str, tensor: Tensor | None) -> None:
    """Raises ``ValueError`` unless ``tensor`` lies where the graph does."""
    device = adj.graph.device if adj.graph is not None else adj.edge_index.device  # type: ignore[union-attr]
    if tensor is not None and tensor.device != device:
        raise ValueError(
            f"Expected '{name}' on the device of the graph, {device} (got "
            f"{tensor.device}): move one of them with .to()"
        )


def found(edge_index: Tensor, num_src: int, num_dst: int) -> Adj:
    """The graph of a registered op's ``edge_index``, at run time."""
    graph = Graph.of(edge_index, (num_src, num_dst))
    return Adj(graph, None, num_src, num_dst)


def tracing(*tensors: Any) -> bool:
    """Whether the registered ops must be used: torch looks on, not through.

    That is while torch.compile or torch.export traces, and for tensor subclasses,
    FakeTensor among them.
    """
    if torch.compiler.is_compiling():
        return True
    return any(
        isinstance(t, Tensor) and type(t) is not Tensor and type(t) is not _PARAMETER
        for t in tensors
    )


_PARAMETER = torch.nn.Parameter


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must hear of an op on ``tensors``."""
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )


def node_scale(adj: Adj, kind: str, dtype: torch.dtype) -> Tensor:
    """A factor per destination that follows from the structure alone.

    Args:
        adj: The graph.
        kind: ``"mean"``: one over the number of incoming edges, at least 1;
            ``"gcn"``: ``deg^-1/2`` of it, 0 for none; ``"gcn_loops"``: the same with
            exactly one self-loop at every node.
        dtype: Of the features; the scale has their accumulator dtype.

    Returns:
        ``[num_dst]``.
    """
    if adj.graph is None:
        assert adj.edge_index is not None
        return _node_scale(adj.edge_index, adj.num_src, adj.num_dst, kind, dtype)
    return _compute_scale(adj.graph, kind, dtype)


def _compute_scale(graph: Graph, kind: str, dtype: torch.dtype) -> Tensor:
    wide = accumulator(dtype)

    def build() -> Tensor:
        looped = kind == "gcn_loops"
        ptr = (graph.without_self_loops if looped else graph).rows.ptr
        degree = (ptr[1:] - ptr[:-1]).to(wide)
        if kind == "mean":
            return degree.clamp_(min=1).reciprocal_()
        if looped:
            return degree.add_(1).pow_(-0.5)
        degree = degree.pow_(-0.5)
        return degree.masked_fill_(degree == float("inf"), 0)

    return graph.derived((kind, wide), build)


@torch.library.custom_op(
    "gnnaccel::node_scale",
    mutates_args=(),
    schema="(Tensor edge_index, SymInt num_src, SymInt num_dst, str kind, "
    "ScalarType dtype) -> Tensor",
)
def _node_scale(
    edge_index: Tensor, num_src: int, num_dst: int, kind: str, dtype: torch.dtype
) -> Tensor:
    # A copy: what the cache holds must not become a buffer of the compiled program.
    return _compute_scale(Graph.of(edge_index, (num_src, num_dst)), kind, dtype).clone()


@_node_scale.register_fake
def _(
    edge_index: Tensor, num_src: int, num_dst: int, kind: str, dtype: torch.dtype
) -> Tensor:
    return edge_index.new_empty(num_dst, dtype=accumulator(dtype))
