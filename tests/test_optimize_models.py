"""optimize() and restore() on the models people nest layers in: PyG is the judge."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import typing

import gnnaccel

NODES, EDGES, FEATURES = 60, 400, 6
METADATA = (
    ["user", "item"],
    [("user", "buys", "item"), ("item", "bought_by", "user"), ("item", "like", "item")],
)


def homogeneous():
    x = torch.randn(NODES, FEATURES, dtype=torch.double)
    return x, torch.randint(NODES, (2, EDGES))


def heterogeneous():
    sizes = {"user": 30, "item": 50}
    x_dict = {
        kind: torch.randn(size, FEATURES, dtype=torch.double)
        for kind, size in sizes.items()
    }
    edge_index_dict = {
        (src, rel, dst): torch.stack(
            [torch.randint(sizes[src], (EDGES,)), torch.randint(sizes[dst], (EDGES,))]
        )
        for src, rel, dst in METADATA[1]
    }
    return x_dict, edge_index_dict


class TwoHops(nn.Module):
    """Two layers of one width: what ``to_hetero`` takes."""

    def __init__(self, conv, width):
        super().__init__()
        self.conv1 = conv(width, 8)
        self.conv2 = conv(8 if isinstance(width, int) else (8, 8), 3)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Branches(nn.Module):
    """Layers in a ModuleDict and a ModuleList, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "in": pyg.GraphConv(FEATURES, 8, aggr="max"),
                "gat": pyg.GATConv(8, 8),
            }
        )
        shared = pyg.SAGEConv(8, 8)
        self.rest = nn.ModuleList([shared, pyg.GCNConv(8, 8), shared])

    def forward(self, x, edge_index):
        x = self.parts["in"](x, edge_index) + 1
        x = self.parts["gat"](x, edge_index)
        for conv in self.rest:
            x = conv(x, edge_index).tanh()
        return x


def gin():
    return pyg.GINConv(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU()), train_eps=True)


def sequential():
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(FEATURES, 8), "x, edge_index -> x1"),
            nn.ReLU(),
            (pyg.SAGEConv(8, 8), "x1, edge_index -> x2"),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (pyg.JumpingKnowledge("cat", 8, num_layers=2), "xs -> x"),
            nn.Linear(16, 3),
        ],
    )


def hetero_conv():
    buys, bought_by, like = METADATA[1]
    return pyg.HeteroConv(
        {
            buys: pyg.SAGEConv((-1, -1), 8),
            bought_by: pyg.GATConv((-1, -1), 8, add_self_loops=False),
            like: pyg.GCNConv(-1, 8),
        }
    )


def to_hetero():
    return pyg.to_hetero(TwoHops(pyg.SAGEConv, (-1, -1)), METADATA)


def optimized_to_hetero():
    """``to_hetero`` copies the layers of a model that is swapped already."""
    model = TwoHops(pyg.SAGEConv, (-1, -1))
    return gnnaccel.restore(pyg.to_hetero(gnnaccel.optimize(model), METADATA))


def to_hetero_with_bases():
    return pyg.to_hetero_with_bases(TwoHops(pyg.GraphConv, FEATURES), METADATA, 2)


# name: (model, inputs, layers that run fused, layers that do not)
CASES = {
    "GCNConv": (lambda: pyg.GCNConv(FEATURES, 4), homogeneous, 1, 0),
    "SAGEConv": (lambda: pyg.SAGEConv(FEATURES, 4, aggr="max"), homogeneous, 1, 0),
    "GraphConv": (lambda: pyg.GraphConv(FEATURES, 4), homogeneous, 1, 0),
    "GINConv": (gin, homogeneous, 1, 0),
    "SAGEConv-median": (lambda: pyg.SAGEConv(6, 4, "median"), homogeneous, 0, 1),
    "GCN": (lambda: pyg.GCN(FEATURES, 8, 3, 4, jk="cat"), homogeneous, 3, 0),
    "GCN-norm": (lambda: pyg.GCN(FEATURES, 8, 2, norm="batch"), homogeneous, 2, 0),
    "GraphSAGE": (lambda: pyg.GraphSAGE(FEATURES, 8, 3, jk="lstm"), homogeneous, 3, 0),
    "GIN": (lambda: pyg.GIN(FEATURES, 8, 2, jk="max"), homogeneous, 2, 0),
    "GAT": (lambda: pyg.GAT(FEATURES, 8, 2), homogeneous, 2, 0),
    "GAE": (lambda: pyg.GAE(pyg.GCN(FEATURES, 8, 2)), homogeneous, 2, 0),
    "GraphUNet": (lambda: pyg.GraphUNet(FEATURES, 8, 3, 1), homogeneous, 3, 0),
    "AntiSymmetric": (lambda: pyg.AntiSymmetricConv(FEATURES), homogeneous, 1, 0),
    "Sequential": (sequential, homogeneous, 2, 0),
    "ModuleDict and ModuleList": (Branches, homogeneous, 4, 0),
    "HeteroConv": (hetero_conv, heterogeneous, 3, 0),
    "to_hetero": (to_hetero, heterogeneous, 6, 0),
    "to_hetero of an optimised model": (optimized_to_hetero, heterogeneous, 6, 0),
    "to_hetero_with_bases": (to_hetero_with_bases, heterogeneous, 0, 4),
}


def tensors_of(out):
    if isinstance(out, dict):
        return {key: value for key, value in sorted(out.items())}
    return {"out": out}


def run(model, inputs):
    """Return the outputs and all gradients of one training step, freshly seeded."""
    model.zero_grad()
    inputs = copy.deepcopy(inputs)
    x = inputs[0]
    leaves = list(x.values()) if isinstance(x, dict) else [x]
    for leaf in leaves:
        leaf.requires_grad_()
    torch.manual_seed(1)
    out = tensors_of(model(*inputs))
    sum((t * torch.randn_like(t)).sum() for t in out.values()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    grads.update({f"input {i}": leaf.grad for i, leaf in enumerate(leaves)})
    return {key: t.detach() for key, t in out.items()}, grads


def prepare(name):
    """Build a case in double precision, lazy parameters initialised."""
    build, make_inputs, fused, left = CASES[name]
    torch.manual_seed(0)
    model, inputs = build(), make_inputs()
    model.double()
    with torch.no_grad():
        model(*inputs)
    return model, inputs, fused, left


@pytest.mark.parametrize("name", CASES)
def test_results_are_pygs_before_and_after(name):
    model, inputs, fused, left = prepare(name)
    assert gnnaccel.explain(model).fused == 0
    stock = run(model, inputs)

    assert gnnaccel.optimize(model) is model
    told = gnnaccel.explain(model)
    assert (told.fused, len(told.rows) - told.fused) == (fused, left), told
    torch.testing.assert_close(run(model, inputs), stock, rtol=1e-9, atol=1e-10)

    assert gnnaccel.restore(model) is model
    assert gnnaccel.explain(model).fused == 0
    torch.testing.assert_close(run(model, inputs), stock, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_copy_of_an_optimised_model_computes_the_same(name):
    model, inputs, fused, left = prepare(name)
    stock = run(model, inputs)
    clone = copy.deepcopy(gnnaccel.optimize(model))
    told = gnnaccel.explain(clone)
    assert (told.fused, len(told.rows) - told.fused) == (fused, left), told
    torch.testing.assert_close(run(clone, inputs), stock, rtol=1e-9, atol=1e-10)
    gnnaccel.restore(clone)
    torch.testing.assert_close(run(clone, inputs), stock, rtol=0, atol=0)
    assert gnnaccel.explain(model).fused == fused  # the original is still swapped


@pytest.mark.parametrize(
    "name", [name for name, (_, _, fused, left) in CASES.items() if fused and not left]
)
def test_fused_means_that_no_message_is_built(name, monkeypatch):
    model, inputs, _, _ = prepare(name)
    built = []
    for conv in gnnaccel.nn.SWAPS:

        def message(self, *args, message=conv.message, **kwargs):
            built.append(self)
            return message(self, *args, **kwargs)

        # PyG reads signatures at construction only, and both classes see this one.
        monkeypatch.setattr(conv, "message", message)
    model(*inputs)
    assert built
    built.clear()
    gnnaccel.optimize(model)(*inputs)
    assert not built


def test_lazy_layers_are_initialised_under_the_fused_forward():
    torch.manual_seed(0)
    inputs = heterogeneous()
    stock = to_hetero().double()
    torch.manual_seed(0)
    heterogeneous()
    fast = gnnaccel.optimize(to_hetero().double())
    torch.manual_seed(2)
    expected = stock(*inputs)
    torch.manual_seed(2)
    torch.testing.assert_close(fast(*inputs), expected)
    torch.testing.assert_close(fast.state_dict(), stock.state_dict())


@pytest.mark.skipif(
    not (typing.WITH_TORCH_SPARSE or typing.WITH_PYG_LIB),
    reason="PyG's NeighborLoader needs torch-sparse or pyg-lib",
)
def test_inference_of_a_pyg_model_by_layers():
    """BasicGNN.inference() calls the layers one by one, outside ``forward``."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    torch.manual_seed(0)
    x, edge_index = homogeneous()
    model = pyg.GraphSAGE(FEATURES, 8, 2, 3).double().eval()
    data = Data(x=x, edge_index=edge_index)
    try:
        loader = NeighborLoader(data, num_neighbors=[-1], batch_size=16)
    except ImportError as missing:  # PyG samples with torch-sparse or pyg-lib
        pytest.skip(str(missing))
    expected = model.inference(loader)
    gnnaccel.optimize(model)
    torch.testing.assert_close(model.inference(loader), expected)
    torch.testing.assert_close(model(x, edge_index), expected)
