"""PyG's ready models and readouts: stock, and the same under ``gnnaccel.optimize``.

Models of one large graph run on the setting's. Those of many small ones (GPS,
GraphUNet, readouts) run on 128 random graphs of about 30 nodes, those of molecules on
32 point clouds of 18 atoms, with a gradient for the positions, as forces need it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.models import dimenet
from torch_geometric.typing import WITH_TORCH_SPARSE
from torch_geometric.utils import softmax, to_dense_batch

from benchmarks import check
from benchmarks.ours import learnt
from benchmarks.registry import (
    OURS,
    STOCK,
    Implementation,
    Setting,
    Workload,
    case,
)


class Built(NamedTuple):
    """A model and what it is called with.

    Attributes:
        model: called as ``model(x, *inputs)``.
        x: the leaf.
        inputs: the rest.
        edges: how many there are.
    """

    model: torch.nn.Module
    x: Tensor
    inputs: tuple[Any, ...]
    edges: int


# Models that PyG has parts of only ---------------------------------------------------


class DeepGCN(torch.nn.Module):
    """DeeperGCN, as in PyG's example for ogbn-proteins, less the edge features."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            pyg.DeepGCNLayer(
                pyg.GENConv(width, width, aggr="softmax", learn_t=True, num_layers=2),
                torch.nn.LayerNorm(width),
                torch.nn.ReLU(),
                block="res+",
                dropout=0.0,
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


class GPS(torch.nn.Module):
    """Two GPS layers and a readout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            pyg.GPSConv(width, pyg.GINConv(torch.nn.Linear(width, width)), heads=4)
            for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index, batch)
        return pyg.global_add_pool(x, batch)


class RGCN(torch.nn.Module):
    """Two relational layers of 8 relations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = pyg.RGCNConv(width, width, 8)
        self.conv2 = pyg.RGCNConv(width, width, 8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.conv1(x, edge_index, edge_type).relu()
        return self.conv2(x, edge_index, edge_type)


class HGT(torch.nn.Module):
    """Two HGT layers on two types of nodes, one below the other in ``x``."""

    def __init__(self, width: int, edge_types: list[tuple[str, str, str]]) -> None:
        super().__init__()
        metadata = (["a", "b"], edge_types)
        self.convs = torch.nn.ModuleList(
            pyg.HGTConv(width, width, metadata, heads=4) for _ in range(2)
        )

    def forward(self, x: Tensor, edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        half = x.size(0) // 2
        nodes = {"a": x[:half], "b": x[half:]}
        for conv in self.convs:
            nodes = conv(nodes, edges)
        return torch.cat([nodes["a"], nodes["b"]])


class Classifier(torch.nn.Module):
    """Layers, pooling layers between them, and readouts: PyG's example of TopK."""

    def __init__(self, width: int, pool: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg.GraphConv(width, width) for _ in range(2))
        self.pools = torch.nn.ModuleList(pool(width, ratio=0.8) for _ in range(2))
        self.head = torch.nn.Linear(2 * width, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        total: Any = 0
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = conv(x, edge_index).relu()
            x, edge_index, _, batch, _, _ = pool(x, edge_index, None, batch)
            both = [pyg.global_max_pool(x, batch), pyg.global_mean_pool(x, batch)]
            total = total + torch.cat(both, dim=1)
        return self.head(total)


class Readout(torch.nn.Module):
    """A GIN and one aggregation of its nodes."""

    def __init__(self, width: int, readout: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.gnn = pyg.GIN(width, width, 2)
        self.readout = readout()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.readout(self.gnn(x, edge_index), batch)


class Energy(torch.nn.Module):
    """A model of molecules, called with what needs a gradient first."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pos: Tensor, z: Tensor, batch: Tensor) -> Tensor:
        return self.model(z, pos, batch)


# Inputs ------------------------------------------------------------------------------


def _on_graph(
    make: Callable[[int], torch.nn.Module], *more: Callable[[Setting], Any]
) -> Callable[[Setting], Built]:
    def build(setting: Setting) -> Built:
        x, problem = setting.x(), setting.problem
        inputs = (problem.edge_index, *(each(setting) for each in more))
        return Built(make(x.size(1)), x, inputs, problem.num_edges)

    return build


def _relations(setting: Setting) -> Tensor:
    return torch.randint(0, 8, (setting.problem.num_edges,))


def _pna(setting: Setting) -> Built:
    problem, x = setting.problem, setting.x()
    counts = torch.bincount(problem.edge_index[1], minlength=problem.num_nodes)
    model = pyg.PNA(
        x.size(1),
        x.size(1),
        2,
        aggregators=["mean", "max", "min", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=torch.bincount(counts),
    )
    return Built(model, x, (problem.edge_index,), problem.num_edges)


def _hgt(setting: Setting) -> Built:
    problem, x = setting.problem, setting.x()
    half = problem.num_nodes // 2
    src, dst = problem.edge_index
    edges = {}
    for a, first in (("a", src < half), ("b", src >= half)):
        for b, second in (("a", dst < half), ("b", dst >= half)):
            both = first & second
            ends = [src[both] - half * (a == "b"), dst[both] - half * (b == "b")]
            edges[a, "to", b] = torch.stack(ends)
    return Built(HGT(x.size(1), [*edges]), x, (edges,), problem.num_edges)


def _on_batch(make: Callable[[int], torch.nn.Module]) -> Callable[[Setting], Built]:
    def build(setting: Setting) -> Built:
        graphs = 8 if setting.quick else 128
        sizes = torch.randint(20, 41, (graphs,))
        batch = torch.arange(graphs).repeat_interleave(sizes)
        starts = (sizes.cumsum(0) - sizes)[batch]
        there = (torch.rand(4, len(batch)) * sizes[batch]).long() + starts
        here = torch.arange(len(batch)).expand_as(there)
        edge_index = torch.stack([there.flatten(), here.flatten()])
        x = setting.random(len(batch), setting.features).requires_grad_()
        return Built(make(setting.features), x, (edge_index, batch), here.numel())

    return build


def _molecules(setting: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, atomic numbers, molecules, and the pairs nearer than 3."""
    molecules, atoms = (2, 6) if setting.quick else (32, 18)
    batch = torch.arange(molecules).repeat_interleave(atoms)
    pos = (setting.random(len(batch), 3, seed=5) * 1.5).requires_grad_()
    near = torch.cdist(pos.detach(), pos.detach()) < 3
    near &= batch.unsqueeze(0) == batch.unsqueeze(1)
    near.fill_diagonal_(False)
    z = torch.randint(1, 10, (len(batch),))
    return pos, z, batch, near.nonzero().t().contiguous()


def _schnet(setting: Setting) -> Built:
    pos, z, batch, pairs = _molecules(setting)

    def interactions(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        # New at each call, as a search for neighbours makes it.
        edge_index = pairs.clone()
        return edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)

    model = pyg.SchNet(64, 64, 3, interaction_graph=interactions)
    return Built(Energy(model), pos, (z, batch), pairs.size(1))


def _dimenet(setting: Setting) -> Built:
    pos, z, batch, pairs = _molecules(setting)
    # PyG's own search for neighbours needs pyg-lib.
    dimenet.radius_graph = lambda *args, **kwargs: pairs.clone()
    model = pyg.DimeNetPlusPlus(64, 1, 2, 32, 8, 64, 4, 6)
    torch.nn.init.normal_(model.output_blocks[0].lin.weight)  # 0 from the start
    return Built(Energy(model), pos, (z, batch), pairs.size(1))


MODELS: dict[str, Callable[[Setting], Built]] = {
    "GCN": _on_graph(lambda f: pyg.GCN(f, f, 2)),
    "GraphSAGE": _on_graph(lambda f: pyg.GraphSAGE(f, f, 2)),
    "GIN": _on_graph(lambda f: pyg.GIN(f, f, 2)),
    "GAT": _on_graph(lambda f: pyg.GAT(f, f, 2, heads=4)),
    "GATv2": _on_graph(lambda f: pyg.GAT(f, f, 2, heads=4, v2=True)),
    "PNA": _pna,
    "EdgeCNN": _on_graph(lambda f: pyg.EdgeCNN(f, f, 2)),
    "DeepGCN": _on_graph(DeepGCN),
    "RGCN": _on_graph(RGCN, _relations),
    "HGT": _hgt,
    "JK cat": _on_graph(lambda f: pyg.GCN(f, f, 3, f, jk="cat")),
    "JK lstm": _on_graph(lambda f: pyg.GCN(f, f, 3, f, jk="lstm")),
    "JK max": _on_graph(lambda f: pyg.GCN(f, f, 3, f, jk="max")),
    "GPS": _on_batch(GPS),
    "GraphUNet": _on_batch(lambda f: pyg.GraphUNet(f, f, f, 2)),
    "TopK": _on_batch(lambda f: Classifier(f, pyg.TopKPooling)),
    "SAG": _on_batch(lambda f: Classifier(f, pyg.SAGPooling)),
    "readout max": _on_batch(lambda f: Readout(f, pyg.MaxAggregation)),
    "readout softmax": _on_batch(
        lambda f: Readout(f, lambda: pyg.SoftmaxAggregation(learn=True))
    ),
    "readout Set2Set": _on_batch(lambda f: Readout(f, lambda: pyg.Set2Set(f, 3))),
    "SchNet": _schnet,
}
if WITH_TORCH_SPARSE:  # which finds its triplets
    MODELS["DimeNet++"] = _dimenet


def built(name: str, setting: Setting) -> Built:
    """One of `MODELS`, always with the same parameters and inputs."""
    torch.manual_seed(4)
    return MODELS[name](setting)


@case("ready_models", group="models", variants=tuple(MODELS))
def ready_models(setting: Setting, variant: str) -> Workload:
    """PyG's ready models, whole."""
    model, x, inputs, edges = built(variant, setting)
    model.train()

    def bind(model: torch.nn.Module, note: str = "") -> Implementation:
        return Implementation(lambda x: model(x, *inputs), learnt(model), note=note)

    def ours() -> Implementation:
        import gnnaccel

        optimised = gnnaccel.optimize(copy.deepcopy(model))
        told = gnnaccel.explain(optimised)
        return bind(optimised, f"{told.fused} of {len(told.rows)} layers fused")

    def exact() -> dict[str, Tensor]:
        def wide(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.double() if is_float else value

        double, arguments = copy.deepcopy(model).double(), tuple(map(wide, inputs))
        implementation = Implementation(lambda x: double(x, *arguments), learnt(double))
        big = Workload(x.detach().double().requires_grad_(), {}, edges)
        found = check.results(big, implementation)
        return {name: value.to(x.dtype) for name, value in found.items()}

    makers = {STOCK: lambda: bind(copy.deepcopy(model)), OURS: ours}
    return Workload(x, makers, edges, exact=exact)


class Pooled(torch.nn.Module):
    """A model that is nothing but a readout by a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.function(x, batch, size)


POOLS: dict[str, Callable[..., Tensor]] = {
    "add": pyg.global_add_pool,
    "mean": pyg.global_mean_pool,
    "max": pyg.global_max_pool,
    "softmax": lambda x, batch, size: softmax(x, batch, num_nodes=size),
    "dense": lambda x, batch, size: to_dense_batch(x, batch, batch_size=size)[0],
}
#: Graphs and nodes.
BATCHES = {"128 of 30": (128, 3840), "256 of 128": (256, 32768)}


@case(
    "pooling",
    group="models",
    variants=tuple(f"{pool}, {size}" for size in BATCHES for pool in POOLS),
)
def pooling(setting: Setting, variant: str) -> Workload:
    """Readouts of many graphs by PyG's functions."""
    pool, _, size = variant.partition(", ")
    graphs, nodes = (4, 32) if setting.quick else BATCHES[size]
    batch = torch.arange(nodes) * graphs // nodes
    x = setting.random(nodes, setting.features).requires_grad_()

    def bind(model: torch.nn.Module) -> Implementation:
        return Implementation(lambda x: model(x, batch, graphs))

    def ours() -> Implementation:
        import gnnaccel

        return bind(gnnaccel.optimize(Pooled(POOLS[pool])))

    makers = {STOCK: lambda: bind(Pooled(POOLS[pool])), OURS: ours}
    return Workload(x, makers, nodes)
