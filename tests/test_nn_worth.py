"""Small graphs that may not come back are left to PyG."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from layers import optimised_alike
from torch.nn import Linear, ReLU, Sequential

import gnnaccel
from gnnaccel import Graph
from gnnaccel.kernels import native
from gnnaccel.nn import worth

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(4, 4),
    "SAGEConv": lambda: pyg.SAGEConv(4, 4),
    "EGConv": lambda: pyg.EGConv(4, 4, num_heads=2),
    "EdgeConv": lambda: pyg.EdgeConv(Sequential(Linear(8, 4), ReLU(), Linear(4, 4))),
    "SGConv": lambda: pyg.SGConv(4, 4, K=1),  # by what its message is made of
    "CGConv": lambda: pyg.CGConv(4),
}
PAYS_LATE = ("EdgeConv", "CGConv")


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The sizes of all graphs that are made; every graph counts as small."""
    monkeypatch.setattr(worth, "WORTH_GRAPH", 1 << 30)
    monkeypatch.setattr(worth, "WORTH_NEW_ROWS", 1 << 30)
    sizes = []
    inner = Graph.from_edge_index.__func__

    def counted(cls, edge_index, size=None):
        sizes.append(size)
        return inner(cls, edge_index, size)

    monkeypatch.setattr(Graph, "from_edge_index", classmethod(counted))
    return sizes


def inputs():
    torch.manual_seed(0)
    return torch.randn(7, 4).double(), torch.randint(7, (2, 30))


@pytest.mark.parametrize("name", LAYERS)
def test_no_graph_is_made_for_new_ones(name, made):
    x, edge_index = inputs()
    layer = LAYERS[name]().double()
    optimised_alike(layer, x, edge_index)
    ours = gnnaccel.optimize(layer)
    for _ in range(3 * worth.USUAL):
        ours(x, edge_index.clone())
    assert made == []


@pytest.mark.parametrize("name", LAYERS)
def test_one_is_made_once_it_keeps_coming_back(name, made):
    x, edge_index = inputs()
    ours = gnnaccel.optimize(LAYERS[name]().double())
    for _ in range(3 * worth.USUAL):
        ours(x, edge_index)
    assert made == [(7, 7)]


@pytest.mark.parametrize("name", LAYERS)
def test_one_is_made_at_once_where_messages_are_many(name, made, monkeypatch):
    x, edge_index = inputs()
    layer = LAYERS[name]().double()
    monkeypatch.setattr(worth, "WORTH_GRAPH", 30 * 4)
    optimised_alike(layer, x, edge_index)
    assert made


@pytest.mark.parametrize("name", PAYS_LATE)
def test_some_pay_late_on_any_graph(name, made, monkeypatch):
    x, edge_index = inputs()
    ours = gnnaccel.optimize(LAYERS[name]().double())
    monkeypatch.setattr(worth, "WORTH", 30 * 4 + 1)
    for _ in range(3 * worth.USUAL):
        ours(x, edge_index)
    assert made == []


def test_batches_of_indices(made):
    x, _ = inputs()
    indices = torch.randint(7, (3, 2, 30))
    layer = pyg.SimpleConv()
    ours = gnnaccel.optimize(pyg.SimpleConv())
    expected = torch.stack([layer(x, index) for index in indices])
    found = torch.vmap(lambda index: ours(x, index))(indices)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "SGConv"])
def test_sparse_matrices_are_no_new_indices(name):
    x, edge_index = inputs()
    adj = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(30, dtype=torch.double), (7, 7)
    ).to_sparse_csr()
    optimised_alike(LAYERS[name]().double(), x, adj)


GENERIC = {
    "SGConv": lambda: pyg.SGConv(4, 4, K=2),
    "TAGConv": lambda: pyg.TAGConv(4, 4),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(4, 1),
}


@pytest.mark.parametrize("name", GENERIC)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_small_sparse_matrices_are_pygs(name, layout):
    x, edge_index = inputs()
    values = torch.rand(30, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index, values, (7, 7)).coalesce()
    optimised_alike(GENERIC[name]().double(), x, matrix.to_sparse(layout=layout))


@pytest.mark.parametrize("name", GENERIC)
def test_transforms_go_through_small_graphs(name):
    x, edge_index = inputs()
    stock = GENERIC[name]().double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))

    def gradient(layer):
        loss = torch.func.grad(lambda x, index: layer(x, index).square().sum())
        return loss(x, edge_index)

    torch.testing.assert_close(gradient(ours), gradient(stock))
    tangent = [
        torch.func.jvp(lambda x, layer=layer: layer(x, edge_index), (x,), (x,))[1]
        for layer in (ours, stock)
    ]
    torch.testing.assert_close(*tangent)
