"""The layers against PyG's own, on every kind of adjacency that PyG takes.

Stock is PyG's layer on a plain ``edge_index``, as people use it. The peers are the
same layer on the formats with which PyG fuses the aggregation: they show how much of
the speed-up a user could have had without gnnaccel. All formats are built before the
clock starts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    TransformerConv,
)

from benchmarks import bounds, formats
from benchmarks.graphs import Problem
from benchmarks.ours import accelerated, learnt
from benchmarks.registry import (
    OURS,
    STOCK,
    Implementation,
    Maker,
    Reading,
    Setting,
    Unavailable,
    Workload,
    case,
)


@dataclass(frozen=True)
class Layer:
    """A layer to benchmark.

    Attributes:
        make: given F_in and F_out, PyG's layer.
        linear_maps: dense products in its forward.
        weighted: its call gets edge weights.
        transforms_first: it can apply its linear map before it aggregates.
        has_peers: PyG fuses its aggregation on some sparse format.
    """

    make: Callable[[int, int], torch.nn.Module]
    linear_maps: int
    weighted: bool = False
    transforms_first: bool = True
    has_peers: bool = True


def _in_heads(columns: int) -> dict[str, int]:
    """Four heads where they come to so many columns, else one."""
    heads = 1 if columns % 4 else 4
    return {"out_channels": columns // heads, "heads": heads}


def _transformer(fan_in: int, fan_out: int) -> torch.nn.Module:
    layer = TransformerConv(fan_in, **_in_heads(fan_out))
    # A softmax ignores what shifts all keys alike: the gradient of their bias is 0, and
    # what is computed is rounding, which can't be compared.
    assert isinstance(layer.lin_key.bias, Tensor)
    layer.lin_key.bias.requires_grad_(False)
    return layer


LAYERS = {
    "gcn": Layer(GCNConv, 1),
    "sage_mean": Layer(SAGEConv, 2),
    # A maximum doesn't commute with a linear map.
    "sage_max": Layer(
        lambda a, b: SAGEConv(a, b, aggr="max"), 2, transforms_first=False
    ),
    # GIN's map is a module of the user's: nothing is known about it.
    "gin": Layer(
        lambda a, b: GINConv(torch.nn.Linear(a, b)), 1, transforms_first=False
    ),
    "graph_conv": Layer(GraphConv, 2, weighted=True),
    "gat": Layer(lambda a, b: GATConv(a, **_in_heads(b)), 1, has_peers=False),
    "gatv2": Layer(lambda a, b: GATv2Conv(a, **_in_heads(b)), 2, has_peers=False),
    "transformer": Layer(_transformer, 4, has_peers=False),
}


def makers(
    name: str, problem: Problem, layer: torch.nn.Module, weight: Tensor | None
) -> dict[str, Maker]:
    """Implementations of ``layer``, a copy of it in each."""
    plain = (problem.edge_index,) if weight is None else (problem.edge_index, weight)

    def bind(module: torch.nn.Module, *graph: Any, note: str = "") -> Implementation:
        return Implementation(
            lambda x: module(x, *graph),
            learnt(module),
            note=note,
        )

    def stock() -> Implementation:
        return bind(copy.deepcopy(layer), *plain)

    def ours() -> Implementation:
        module, note = accelerated(layer)
        return bind(module, *plain, note=note)

    def sparse() -> Implementation:
        # Both groupings, as PyG's ToSparseTensor leaves it.
        adjacency = formats.sparse_tensor(problem, weight).fill_cache_()
        return bind(copy.deepcopy(layer), adjacency)

    def csr() -> Implementation:
        # To a torch.sparse adjacency GCNConv adds a loop even where there is one.
        graph = problem.without_self_loops() if name == "gcn" else problem
        adjacency = formats.torch_csr(graph, weight)
        return bind(copy.deepcopy(layer), adjacency)

    def edge_index() -> Implementation:
        size = (problem.num_nodes, problem.num_nodes)
        unsorted = EdgeIndex(problem.edge_index, sparse_size=size)
        ordered = unsorted.sort_by("col")
        graph = ordered.values.fill_cache_()
        if weight is None:
            raise Unavailable("PyG fuses EdgeIndex in GraphConv only")
        return bind(copy.deepcopy(layer), graph, weight[ordered.indices])

    if not LAYERS[name].has_peers:
        return {STOCK: stock, OURS: ours}
    found = {STOCK: stock, "SparseTensor": sparse, "torch_csr": csr}
    if name == "graph_conv":
        found["EdgeIndex"] = edge_index
    return found | {OURS: ours}


def bound(
    layer: Layer, problem: Problem, x: Tensor, fan_out: int
) -> tuple[dict[str, Reading], dict[str, tuple[str, ...]]]:
    """Readings and bounds of one of `LAYERS`.

    The rows are as narrow as the layer's algebra allows: F_in, or F_out where the
    linear map may come first.
    """
    narrow = layer.transforms_first and fan_out < x.size(1)
    rows = torch.randn(x.size(0), fan_out).to(x.dtype) if narrow else x
    return bounds.dense_and_rows(problem, x, fan_out, layer.linear_maps, rows)


def workload(
    name: str, setting: Setting, fan_in: int | None = None, fan_out: int | None = None
) -> Workload:
    """Builds one of `LAYERS`; F_in and F_out are the setting's width by default."""
    layer = LAYERS[name]
    problem = setting.problem
    x = setting.x(fan_in)
    fan_out = setting.features if fan_out is None else fan_out
    torch.manual_seed(4)
    module = layer.make(x.size(1), fan_out)
    weight = setting.edge_weight() if layer.weighted else None
    readings, limits = bound(layer, problem, x, fan_out)
    return Workload(
        x=x,
        makers=makers(name, problem, module, weight),
        edges=problem.num_edges,
        readings=readings,
        bounds=limits,
        bound_name=bounds.DENSE_AND_ROWS,
    )


def _register(name: str, summary: str) -> None:
    def build(setting: Setting, variant: str) -> Workload:
        return workload(name, setting)

    build.__doc__ = summary
    case(name, group="layers")(build)


_register("gcn", "GCNConv(F, F), normalisation and self-loops included.")
_register("sage_mean", "SAGEConv(F, F).")
_register("sage_max", 'SAGEConv(F, F, aggr="max").')
_register("gin", "GINConv(Linear(F, F)).")
_register("graph_conv", "GraphConv(F, F) with edge weights that need no gradient.")
_register("gat", "GATConv(F, F / 4, heads=4), self-loops included.")
_register("gatv2", "GATv2Conv(F, F / 4, heads=4), self-loops included.")
_register("transformer", "TransformerConv(F, F / 4, heads=4).")
