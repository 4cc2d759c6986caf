"""Layers beyond the four: relations, pairs of nodes, propagation, and a user's own.

Stock is PyG's layer on a plain ``edge_index``. The peer, where the layer takes it, is
PyG's layer on a SparseTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from benchmarks import check, formats
from benchmarks.graphs import Problem
from benchmarks.ours import accelerated
from benchmarks.registry import (
    OURS,
    STOCK,
    Implementation,
    Maker,
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


#: The layer for a graph and F, its further arguments, and whether a SparseTensor may
#: take the place of edge_index.
Entry = tuple[Callable[[Problem, int], Any], Callable[..., Any], bool]
LAYERS: dict[str, Entry] = {
    "rgcn": (lambda p, f: pyg.RGCNConv(f, f, 8), _types, False),
    "edge_conv": (
        lambda p, f: pyg.EdgeConv(torch.nn.Linear(2 * f, f)),
        _nothing,
        False,
    ),
    "edge_conv_mlp": (lambda p, f: pyg.EdgeConv(_mlp(f)), _nothing, False),
    "pna": (_pna, _nothing, False),
    "sg": (lambda p, f: pyg.SGConv(f, f, 2), _nothing, True),
    "ssg": (lambda p, f: pyg.SSGConv(f, f, 0.1, 3), _nothing, True),
    "appnp": (lambda p, f: pyg.APPNP(5, 0.1), _nothing, True),
    "tag": (lambda p, f: pyg.TAGConv(f, f, 3), _nothing, True),
    "lg": (lambda p, f: pyg.LGConv(), _nothing, True),
    "cheb": (lambda p, f: pyg.ChebConv(f, f, 3), _nothing, False),
    "cluster": (lambda p, f: pyg.ClusterGCNConv(f, f), _nothing, False),
    "le": (lambda p, f: pyg.LEConv(f, f), _weights, False),
    "mf": (lambda p, f: pyg.MFConv(f, f), _nothing, True),
    "eg": (lambda p, f: pyg.EGConv(f, f if f % 8 == 0 else 8), _nothing, True),
    "signed": (Signed, _nothing, False),
    "general": (lambda p, f: pyg.GeneralConv(f, f, 4), _features, False),
    "gmm": (lambda p, f: pyg.GMMConv(f, f, 4, 2), _features, False),
    "nn_conv": (
        lambda p, f: pyg.NNConv(f, 8, torch.nn.Linear(4, f * 8), aggr="mean"),
        _features,
        False,
    ),
    "gated": (lambda p, f: pyg.GatedGraphConv(f, 2), _nothing, True),
    "gine": (
        lambda p, f: pyg.GINEConv(torch.nn.Linear(f, f), edge_dim=4),
        _features,
        False,
    ),
    "res_gated": (lambda p, f: pyg.ResGatedGraphConv(f, f), _nothing, False),
    "res_gated_edges": (
        lambda p, f: pyg.ResGatedGraphConv(f, f, edge_dim=4),
        _features,
        False,
    ),
    "cg": (lambda p, f: pyg.CGConv(f), _nothing, False),
    "cg_edges": (lambda p, f: pyg.CGConv(f, dim=4), _features, False),
    "film": (lambda p, f: pyg.FiLMConv(f, f), _nothing, False),
    "film_relations": (lambda p, f: pyg.FiLMConv(f, f, 8), _types, False),
    "fa": (lambda p, f: Again(pyg.FAConv(f)), _nothing, False),
    "gen": (lambda p, f: pyg.GENConv(f, f, learn_t=True), _nothing, False),
    "gen_edges": (lambda p, f: pyg.GENConv(f, f, edge_dim=4), _features, False),
    "gen_power": (
        lambda p, f: pyg.GENConv(f, f, aggr="powermean", p=2.0),
        _nothing,
        False,
    ),
    "hgt": (TwoTypes, _nothing, False),
    "agnn": (lambda p, f: pyg.AGNNConv(), _nothing, False),
    # Not in training, where it samples pairs for its own loss.
    "supergat": (
        lambda p, f: pyg.SuperGATConv(f, f // 4, heads=4).eval(),
        _nothing,
        False,
    ),
    "own_taught": (lambda p, f: Taught(f, f), _weights, False),
    "own_bonds": (lambda p, f: Bonds(f, f), _features, False),
    "own_mlp_sum": (lambda p, f: Unseen(f, f, "add"), _features, False),
    "own_mlp_max": (lambda p, f: Unseen(f, f, "max"), _features, False),
}


def workload(name: str, setting: Setting) -> Workload:
    """Builds one of `LAYERS`, F_in = F_out."""
    make, more, sparse = LAYERS[name]
    problem = setting.problem
    x = setting.x()
    torch.manual_seed(4)
    layer = make(problem, x.size(1))
    arguments = more(problem)

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
    if sparse:
        makers["SparseTensor"] = peer
    return Workload(
        x=x,
        makers=makers | {OURS: ours},
        edges=problem.num_edges,
        exact=exact,
    )


def _register(name: str) -> None:
    def build(setting: Setting, variant: str) -> Workload:
        return workload(name, setting)

    build.__doc__ = f"The layer {name}, F_in = F_out."
    case(name, group="any_layer")(build)


for _name in LAYERS:
    _register(_name)
