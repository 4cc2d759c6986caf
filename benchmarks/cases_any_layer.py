"""Layers beyond the four: relations, pairs of nodes, propagation, and a user's own.

Stock is PyG's layer on a plain ``edge_index``. The peer, where the layer takes it, is
PyG's layer on a SparseTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from benchmarks import bounds, check, formats
from benchmarks.graphs import Problem
from benchmarks.ours import accelerated
from benchmarks.registry import (
    OURS,
    STOCK,
    Implementation,
    Maker,
    Reading,
    Setting,
    Workload,
    case,
)


class Taught(pyg.MessagePassing):
    """A GCN without self-loops, written as PyG's tutorial teaches it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(fan_in, fan_out)

    def forward(self, x: Tensor, edge_index: Tensor, norm: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), norm=norm)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Unseen(pyg.MessagePassing):
    """A user's layer with a network on both ends and the features of an edge."""

    def __init__(self, fan_in: int, fan_out: int, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(2 * fan_in + 4, fan_out), torch.nn.ReLU()
        )

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.network(torch.cat([x_i, x_j, e], dim=-1))


class Bonds(pyg.MessagePassing):
    """A user's layer that learns what kinds of edges add, as OGB's examples do."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(aggr="add")
        self.encoder = torch.nn.Linear(4, fan_in)
        self.lin = torch.nn.Linear(fan_in, fan_out)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x, e=self.encoder(e)))

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return torch.relu(x_j + e)


class Again(torch.nn.Module):
    """A layer that also takes the features its network began with: the same ones."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x, edge_index)


class Signed(torch.nn.Module):
    """SignedConv on a graph whose first half is friends, whose second half is foes."""

    def __init__(self, problem: Problem, f: int) -> None:
        super().__init__()
        self.halves = problem.edge_index.chunk(2, dim=1)
        self.conv = pyg.SignedConv(f, f, first_aggr=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, *self.halves)


class TwoTypes(torch.nn.Module):
    """HGTConv on a graph whose nodes are of two types, by turns: four of edges."""

    def __init__(self, problem: Problem, f: int) -> None:
        super().__init__()
        source, target = problem.edge_index
        self.edges = {}
        for i, a in enumerate("ab"):
            for j, b in enumerate("ab"):
                chosen = (source % 2 == i) & (target % 2 == j)
                ends = torch.stack([source[chosen], target[chosen]]) // 2
                self.edges[a, f"to_{b}", b] = ends
        metadata = (["a", "b"], list(self.edges))
        self.conv = pyg.HGTConv(f, f, metadata, heads=1 if f % 4 else 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = self.conv({"a": x[::2], "b": x[1::2]}, self.edges)
        return torch.cat([found["a"], found["b"]])


def _pna(problem: Problem, f: int) -> torch.nn.Module:
    counts = torch.bincount(problem.edge_index[1], minlength=problem.num_nodes)
    return pyg.PNAConv(
        f,
        f,
        ["mean", "max", "min", "std"],
        ["identity", "amplification", "attenuation"],
        torch.bincount(counts),
    )


def _mlp(f: int) -> torch.nn.Module:
    layers = [torch.nn.Linear(2 * f, f), torch.nn.ReLU(), torch.nn.Linear(f, f)]
    return torch.nn.Sequential(*layers)


def _types(problem: Problem) -> tuple[Tensor]:
    return (torch.randint(0, 8, (problem.num_edges,)),)


def _weights(problem: Problem) -> tuple[Tensor]:
    return (torch.rand(problem.num_edges),)


def _features(problem: Problem) -> tuple[Tensor]:
    return (torch.randn(problem.num_edges, 4),)


def _nothing(problem: Problem) -> tuple[()]:
    return ()


class Entry(NamedTuple):
    """A layer to benchmark, and what no implementation of it can avoid.

    Attributes:
        make: The layer, for a graph and F.
        more: Its further arguments, for a graph.
        maps: Dense products of all nodes, F to F, in its forward; ``None``: how many
            there must be depends on the graph.
        reads: How often it must read the row of each edge's other end, F columns.
        edge_maps: Dense products of all edges.
        sparse: Whether a SparseTensor may take the place of edge_index.
    """

    make: Callable[[Problem, int], Any]
    more: Callable[[Problem], tuple[Any, ...]]
    maps: int | None
    reads: int = 1
    edge_maps: int = 0
    sparse: bool = False


LAYERS: dict[str, Entry] = {
    "rgcn": Entry(lambda p, f: pyg.RGCNConv(f, f, 8), _types, None),
    "edge_conv": Entry(
        lambda p, f: pyg.EdgeConv(torch.nn.Linear(2 * f, f)), _nothing, 2
    ),
    "edge_conv_relu": Entry(lambda p, f: pyg.EdgeConv(_mlp(f)[:2]), _nothing, 2),
    "edge_conv_mlp": Entry(
        lambda p, f: pyg.EdgeConv(_mlp(f)), _nothing, 2, edge_maps=1
    ),
    # Two maps before the sums, thirteen times F columns to F and one more after them.
    "pna": Entry(_pna, _nothing, 16),
    "sg": Entry(lambda p, f: pyg.SGConv(f, f, 2), _nothing, 1, 2, sparse=True),
    "ssg": Entry(lambda p, f: pyg.SSGConv(f, f, 0.1, 3), _nothing, 1, 3, sparse=True),
    "appnp": Entry(lambda p, f: pyg.APPNP(5, 0.1), _nothing, 0, 5, sparse=True),
    "tag": Entry(lambda p, f: pyg.TAGConv(f, f, 3), _nothing, 4, 3, sparse=True),
    "lg": Entry(lambda p, f: pyg.LGConv(), _nothing, 0, sparse=True),
    "cheb": Entry(lambda p, f: pyg.ChebConv(f, f, 3), _nothing, 3, 2),
    "cluster": Entry(lambda p, f: pyg.ClusterGCNConv(f, f), _nothing, 2),
    "le": Entry(lambda p, f: pyg.LEConv(f, f), _weights, 3),
    "mf": Entry(lambda p, f: pyg.MFConv(f, f), _nothing, 2, sparse=True),
    # Its bases have half as many columns as its result.
    "eg": Entry(
        lambda p, f: pyg.EGConv(f, f if f % 8 == 0 else 8), _nothing, None, sparse=True
    ),
    "signed": Entry(Signed, _nothing, 4),
    "general": Entry(lambda p, f: pyg.GeneralConv(f, f, 4), _features, 2),
    "gmm": Entry(lambda p, f: pyg.GMMConv(f, f, 4, 2), _features, 3, 2),
    "nn_conv": Entry(
        lambda p, f: pyg.NNConv(f, 8, torch.nn.Linear(4, f * 8), aggr="mean"),
        _features,
        None,
    ),
    # Twice a map and a GRU of six.
    "gated": Entry(lambda p, f: pyg.GatedGraphConv(f, 2), _nothing, 14, 2, sparse=True),
    "gine": Entry(
        lambda p, f: pyg.GINEConv(torch.nn.Linear(f, f), edge_dim=4), _features, 1
    ),
    "res_gated": Entry(lambda p, f: pyg.ResGatedGraphConv(f, f), _nothing, 4, 2),
    "res_gated_edges": Entry(
        lambda p, f: pyg.ResGatedGraphConv(f, f, edge_dim=4), _features, 4, 2
    ),
    "cg": Entry(lambda p, f: pyg.CGConv(f), _nothing, 4, 2),
    "cg_edges": Entry(lambda p, f: pyg.CGConv(f, dim=4), _features, 4, 2),
    "film": Entry(lambda p, f: pyg.FiLMConv(f, f), _nothing, 6),
    "film_relations": Entry(lambda p, f: pyg.FiLMConv(f, f, 8), _types, None),
    "fa": Entry(lambda p, f: Again(pyg.FAConv(f)), _nothing, 0),
    # Its network widens to 2 F.
    "gen": Entry(lambda p, f: pyg.GENConv(f, f, learn_t=True), _nothing, 4),
    "gen_edges": Entry(lambda p, f: pyg.GENConv(f, f, edge_dim=4), _features, 4),
    "gen_power": Entry(
        lambda p, f: pyg.GENConv(f, f, aggr="powermean", p=2.0), _nothing, 4
    ),
    "hgt": Entry(TwoTypes, _nothing, None),
    "agnn": Entry(lambda p, f: pyg.AGNNConv(), _nothing, 0),
    # Not in training, where it samples pairs for its own loss.
    "supergat": Entry(
        lambda p, f: pyg.SuperGATConv(f, f // 4, heads=4).eval(), _nothing, 1
    ),
    "own_taught": Entry(lambda p, f: Taught(f, f), _weights, 1),
    "own_bonds": Entry(lambda p, f: Bonds(f, f), _features, 1),
    "own_mlp_sum": Entry(lambda p, f: Unseen(f, f, "add"), _features, 2),
    "own_mlp_max": Entry(lambda p, f: Unseen(f, f, "max"), _features, 2),
}


def workload(name: str, setting: Setting) -> Workload:
    """Builds one of `LAYERS`, F_in = F_out."""
    entry = LAYERS[name]
    problem = setting.problem
    x = setting.x()
    torch.manual_seed(4)
    layer = entry.make(problem, x.size(1))
    arguments = entry.more(problem)
    readings, limits = _bound(entry, problem, x)

    def bind(module: Any, graph: Any, note: str = "") -> Implementation:
        return Implementation(
            lambda x: module(x, graph, *arguments),
            dict(module.named_parameters()),
            note=note,
        )

    def stock() -> Implementation:
        return bind(copy.deepcopy(layer), problem.edge_index)

    def peer() -> Implementation:
        adjacency = formats.sparse_tensor(problem, None).fill_cache_()
        return bind(copy.deepcopy(layer), adjacency)

    def ours() -> Implementation:
        module, note = accelerated(layer)
        return bind(module, problem.edge_index, note)

    def exact() -> dict[str, Tensor]:
        # In float32 PyG's own gradients of a maximum of sums are off by 7e-4.
        double = copy.deepcopy(layer).double()
        wide = tuple(a.double() if a.is_floating_point() else a for a in arguments)
        implementation = Implementation(
            lambda x: double(x, problem.edge_index, *wide),
            dict(double.named_parameters()),
        )
        big = Workload(
            x=x.detach().double().requires_grad_(x.requires_grad),
            makers={},
            edges=problem.num_edges,
        )
        found = check.results(big, implementation)
        return {name: value.to(x.dtype) for name, value in found.items()}

    makers: dict[str, Maker] = {STOCK: stock}
    if entry.sparse:
        makers["SparseTensor"] = peer
    return Workload(
        x=x,
        makers=makers | {OURS: ours},
        edges=problem.num_edges,
        readings=readings,
        bounds=limits,
        bound_name=bounds.DENSE_AND_ROWS,
        exact=exact,
    )


def _bound(
    entry: Entry, problem: Problem, x: Tensor
) -> tuple[dict[str, Reading], dict[str, tuple[str, ...]]]:
    if entry.maps is None:
        return {}, {}
    per_node = problem.num_edges // max(problem.num_nodes, 1)
    maps = entry.maps + entry.edge_maps * per_node
    return bounds.dense_and_rows(problem, x, x.size(1), maps, x, entry.reads)


def _register(name: str) -> None:
    def build(setting: Setting, variant: str) -> Workload:
        return workload(name, setting)

    build.__doc__ = f"The layer {name}, F_in = F_out."
    case(name, group="any_layer")(build)


for _name in LAYERS:
    _register(_name)
