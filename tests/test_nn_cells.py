"""Steps that torch takes one by one, done at once: cells, Gaussians, linear maps."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import SQUARE
from layers import optimised_alike
from oracles import compare
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.kernels import memory
from gnnaccel.nn import dense, functions, gaussian, gru, sequence

WIDTH, OUT = 5, 6


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """What pays on large tensors only is done on all."""
    monkeypatch.setattr(memory, "THRESHOLD", 0)


def _cell(bias=True):
    return nn.GRUCell(WIDTH, OUT, bias=bias).double()


def _cell_arguments(bias=True):
    cell = _cell(bias)
    leaf = [torch.randn(9, n, dtype=torch.float64) for n in (WIDTH, OUT)]
    parameters = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    return [None if t is None else t.detach() for t in (*leaf, *parameters)]


class _Cell:
    """A cell of given parameters."""

    def __init__(self, weight_ih, weight_hh, bias_ih=None, bias_hh=None):
        self.weight_ih, self.weight_hh = weight_ih, weight_hh
        self.bias_ih, self.bias_hh = bias_ih, bias_hh


def _apply(x, h, *parameters):
    return gru.apply(_Cell(*parameters), x, h)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cells(dtype, bias):
    args = tuple(
        None if t is None else t.requires_grad_() for t in _cell_arguments(bias)
    )
    compare(_apply, torch.gru_cell, args, dtype, absolute=False, slack=10)


@pytest.mark.parametrize("wanted", range(1, 64))
def test_only_the_gradients_of_a_cell_that_are_needed(wanted):
    args = _cell_arguments()
    for k, leaf in enumerate(args):
        leaf.requires_grad_(bool(wanted >> k & 1))
    found = []
    for function in (torch.gru_cell, _apply):
        for leaf in args:
            leaf.grad = None
        function(*args).sin().sum().backward()
        found.append([leaf.grad for leaf in args])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_derivatives_of_cells():
    args = [t.requires_grad_() for t in _cell_arguments()]
    assert gradcheck(_apply, args)
    assert gradgradcheck(_apply, args, fast_mode=True)
    firsts = [
        torch.autograd.grad(f(*args).sin().sum(), args, create_graph=True)
        for f in (_apply, torch.gru_cell)
    ]
    torch.testing.assert_close(*firsts)


def test_a_cell_is_not_used_twice_the_same():
    """The gradients of one pass do not write to what another needs."""
    args = [t.requires_grad_() for t in _cell_arguments()]
    out = _apply(*args).sin().sum()
    first = torch.autograd.grad(out, args, retain_graph=True)
    second = torch.autograd.grad(out, args)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def _gaussian_arguments(edges=40, kernels=3, dim=2):
    return (
        torch.rand(edges, dim, dtype=torch.float64),
        torch.randn(kernels, dim, dtype=torch.float64),
        torch.rand(kernels, dim, dtype=torch.float64) + 0.2,
    )


def _gaussians(x, mu, sigma):
    away = x.unsqueeze(1) - mu.unsqueeze(0)
    return torch.exp(-0.5 * (away**2 / (1e-15 + sigma**2)).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("edges", "kernels", "dim"), [(40, 3, 2), (7, 1, 1), (0, 2, 3)]
)
def test_gaussians(dtype, edges, kernels, dim):
    args = tuple(t.requires_grad_() for t in _gaussian_arguments(edges, kernels, dim))
    compare(
        gaussian.gaussians,
        _gaussians,
        args,
        dtype,
        absolute=False,
        floor=1e-2,
        slack=20,
    )


@pytest.mark.parametrize("wanted", range(1, 8))
def test_derivatives_of_gaussians(wanted):
    args = _gaussian_arguments(6)
    for k, leaf in enumerate(args):
        leaf.requires_grad_(bool(wanted >> k & 1))
    assert gradcheck(gaussian.gaussians, args)
    assert gradgradcheck(gaussian.gaussians, args, fast_mode=True)
    leaves = [leaf for leaf in args if leaf.requires_grad]
    firsts = [
        torch.autograd.grad(f(*args).sin().sum(), leaves, create_graph=True)
        for f in (gaussian.gaussians, _gaussians)
    ]
    torch.testing.assert_close(*firsts)


def test_gaussians_keep_no_terms():
    x, mu, sigma = (t.requires_grad_() for t in _gaussian_arguments(50, 8, 4))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        gaussian.gaussians(x, mu, sigma)
    assert max(kept) == 50 * 8


# GatedGraphConv

GATED = {
    "two": lambda **k: pyg.GatedGraphConv(OUT, 2, **k),
    "no_bias": lambda **k: pyg.GatedGraphConv(OUT, 1, bias=False, **k),
    "none": lambda **k: pyg.GatedGraphConv(OUT, 0, **k),
    "back": lambda **k: pyg.GatedGraphConv(OUT, 2, flow="target_to_source", **k),
    "max": lambda **k: pyg.GatedGraphConv(OUT, 2, aggr="max", **k),
}


@pytest.fixture
def cells(monkeypatch):
    """How often our cells ran."""
    found = []
    apply = gru.apply

    def spy(*args):
        found.append(1)
        return apply(*args)

    monkeypatch.setattr(gru, "apply", spy)
    return found


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("name", GATED)
def test_gated_graphs(name, graph):
    case = SQUARE[graph]
    x = torch.randn(case.num_src, WIDTH, dtype=torch.float64)
    optimised_alike(GATED[name]().double(), x, case.edge_index.long())


@pytest.mark.parametrize("weight", ["none", "constant", "learnt"])
@pytest.mark.parametrize("name", ["two", "no_bias", "none", "max"])
def test_weighted_gated_graphs(cells, name, weight):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, OUT, dtype=torch.float64)
    more = ()
    if weight != "none":
        w = torch.rand(case.num_edges, dtype=torch.float64)
        more = (w.requires_grad_(weight == "learnt"),)
    optimised_alike(GATED[name]().double(), x, case.edge_index.long(), *more)
    assert bool(cells) == (name in ("two", "no_bias") and weight != "learnt")


def test_a_cell_with_hooks_is_called(cells):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, OUT, dtype=torch.float64)
    layer = GATED["two"]().double()
    layer.rnn.register_forward_hook(lambda module, args, out: 2 * out)
    optimised_alike(layer, x, case.edge_index.long())
    assert not cells


def test_errors_of_gated_graphs_are_pygs():
    case = SQUARE["unsorted"]
    wide = torch.randn(case.num_src, OUT + 1)
    bad = case.edge_index.long().clone()
    bad[0, 1] = 99
    for x, edge_index in ((wide, case.edge_index.long()), (wide[:, 1:], bad)):
        errors = []
        for layer in (GATED["two"](), gnnaccel.optimize(GATED["two"]())):
            with pytest.raises((ValueError, IndexError, RuntimeError)) as error:
                layer(x, edge_index)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]


# PyG's linear layers inside optimised modules


@pytest.fixture
def maps(monkeypatch):
    """How often PyG's linear layers were mapped by ours."""
    found = []
    linear = functions.dense.linear

    def spy(*args):
        found.append(1)
        return linear(*args)

    monkeypatch.setattr(functions.dense, "linear", spy)
    return found


class Own(pyg.MessagePassing):
    def __init__(self):
        super().__init__("add")
        self.lin = pyg.Linear(WIDTH, OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)).sin()

    def message(self, x_j, x_i):
        return (x_i - x_j).tanh()


def test_linear_layers_inside_optimised_ones(maps):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, WIDTH, dtype=torch.float64)
    layer = Own().double()
    layer(x, case.edge_index.long())
    assert not maps
    optimised_alike(layer, x, case.edge_index.long())
    assert maps
    maps.clear()
    layer(x, case.edge_index.long())
    layer.lin(x)
    assert not maps


def test_a_linear_layer_that_is_computed_again(maps):
    """Both times the same way, or their saved tensors differ in number."""
    layer = gnnaccel.optimize(nn.Sequential(Own()))[0].double()
    x = torch.randn(13, WIDTH, dtype=torch.float64, requires_grad=True)
    edge_index = SQUARE["unsorted"].edge_index.long()
    expected = torch.autograd.grad(layer(x, edge_index).sum(), x)
    out = checkpoint(layer, x, edge_index, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), expected)


@pytest.mark.parametrize("shape", [(2, 13), (), (0,), (13,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_linear_layers(shape, bias):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = pyg.Linear(WIDTH, OUT, bias=bias)
            self.conv = pyg.SimpleConv()

        def forward(self, x):
            return self.lin(x)

    stock = Model()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    x = torch.randn(*shape, WIDTH)
    torch.testing.assert_close(ours(x), stock(x))
    for wrong in (torch.randn(*shape, WIDTH + 1), x.double()):
        errors = []
        for model in (stock, ours):
            with pytest.raises(RuntimeError) as error:
                model(wrong)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


def test_linear_layers_under_autocast_and_transforms(maps):
    layer = gnnaccel.optimize(nn.Sequential(Own()))[0]
    x = torch.randn(13, WIDTH)
    edge_index = SQUARE["unsorted"].edge_index.long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, edge_index)
    torch.func.grad(lambda x: layer(x, edge_index).sum())(x)
    assert not maps
    assert dense.pays(x, layer.lin.weight, layer.lin.bias)


# A ReLU before a linear map, and networks


def _relu_linear(x, weight, bias=None):
    return sequence.relu_linear_(x.clone(), weight, bias)


def _stock_relu_linear(x, weight, bias=None):
    return nn.functional.linear(x.relu(), weight, bias)


def _map_arguments():
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    x[3] = 0  # where a ReLU has no derivative
    return [x, torch.randn(OUT, WIDTH).double(), torch.randn(OUT).double()]


def test_relus():
    x = _map_arguments()[0].requires_grad_()

    def ours(x):
        return sequence.relu_(x.clone())

    compare(ours, torch.relu, (x,))
    x = (x.detach() + 0.01).requires_grad_()
    assert gradcheck(ours, x)
    assert gradgradcheck(lambda x: ours(x).square(), x, fast_mode=True)
    firsts = [
        torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        for f in (ours, torch.relu)
    ]
    torch.testing.assert_close(*firsts)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sequence.relu_(x.tanh()).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_relu_and_map(dtype, bias):
    args = _map_arguments() if bias else [*_map_arguments()[:2], None]
    args = tuple(None if t is None else t.requires_grad_() for t in args)
    compare(_relu_linear, _stock_relu_linear, args, dtype, slack=3)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_derivatives_of_relu_and_map(wanted):
    args = _map_arguments()
    args[0][3] = 1  # gradcheck wants derivatives
    for k, leaf in enumerate(args):
        leaf.requires_grad_(bool(wanted >> k & 1))
    assert gradcheck(_relu_linear, args)
    assert gradgradcheck(lambda *a: _relu_linear(*a).square(), args, fast_mode=True)
    leaves = [leaf for leaf in args if leaf.requires_grad]
    firsts = [
        torch.autograd.grad(f(*args).sin().sum(), leaves, create_graph=True)
        for f in (_relu_linear, _stock_relu_linear)
    ]
    torch.testing.assert_close(*firsts)


def test_what_a_producer_kept_is_not_overwritten_unseen():
    x, weight, bias = (t.requires_grad_() for t in _map_arguments())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sequence.relu_linear_(x.tanh(), weight, bias).sum().backward()


NETWORKS = {
    "relus": lambda n: nn.Sequential(
        nn.Linear(n, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, OUT)
    ),
    "ends_in_relu": lambda n: nn.Sequential(nn.Linear(n, OUT), nn.ReLU()),
    "norms": lambda n: nn.Sequential(
        nn.Linear(n, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, OUT)
    ),
    "twice": lambda n: nn.Sequential(
        nn.Linear(n, 7), nn.ReLU(), nn.ReLU(), nn.Tanh(), nn.Linear(7, OUT)
    ),
    "pygs": lambda n: pyg.MLP([n, 7, OUT]),
    "pygs_plain": lambda n: pyg.MLP([n, 7, 7, OUT], norm=None, plain_last=False),
}
LAYERS = {
    "edge": lambda make: pyg.EdgeConv(make(2 * WIDTH)),
    "edge_sum": lambda make: pyg.EdgeConv(make(2 * WIDTH), aggr="add"),
    "edge_min": lambda make: pyg.EdgeConv(make(2 * WIDTH), aggr="min"),
    "gin": lambda make: pyg.GINConv(make(WIDTH), train_eps=True),
    "gin_mean": lambda make: pyg.GINConv(make(WIDTH), aggr="mean"),
    "nn": lambda make: pyg.NNConv(
        WIDTH, OUT, nn.Sequential(make(3), nn.Linear(OUT, WIDTH * OUT))
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", LAYERS)
def test_networks(name, network):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, WIDTH, dtype=torch.float64)
    edge_index = case.edge_index.long()
    more = (torch.rand(case.num_edges, 3, dtype=torch.float64),) * (name == "nn")
    layer = LAYERS[name](NETWORKS[network]).double().eval()
    optimised_alike(layer, x, edge_index, *more)
    linears = [m for m in layer.modules() if isinstance(m, (nn.Linear, pyg.Linear))]
    seen = []
    for linear in linears:
        linear.register_forward_hook(lambda m, args, out: seen.append(out))
    optimised_alike(layer, x, edge_index, *more)
    assert len(seen) == 2 * len(linears)  # PyG's layer and ours, on a copy's hooks


def test_features_of_edges_are_left_as_they_are():
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, WIDTH)
    edge = torch.randn(case.num_edges, 3)
    before = edge.clone()
    network = nn.Sequential(nn.ReLU(), nn.Linear(3, WIDTH * OUT))
    for steps in (network, NETWORKS["relus"](3)[:3]):
        layer = pyg.NNConv(WIDTH, OUT, steps) if steps is network else None
        if layer is not None:
            gnnaccel.optimize(layer)(x, case.edge_index.long(), edge)
        sequence.through(list(steps), edge, owned=False)
        assert edge.equal(before)


def test_messages_pass_a_relu_without_a_copy():
    """Neither the ReLU nor its gradient takes memory of its own."""
    x, weight, _ = (t.float() for t in _map_arguments())
    x.requires_grad_()
    before = x.clone()
    out = sequence.relu_linear_(before, weight)
    assert before.equal(x.relu())
    kept = out.grad_fn.saved_tensors
    assert kept[0].data_ptr() == before.data_ptr()
