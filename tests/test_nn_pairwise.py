"""EdgeConv and PNAConv, whose messages are linear in both ends of an edge."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from layers import optimised_alike
from same import outcome
from torch import nn

import gnnaccel
from gnnaccel.kernels import memory
from gnnaccel.nn import edge_conv, pna_conv

AGGRS = ("sum", "mean", "max", "min")


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Whether the fused path was taken, call by call."""
    calls = []
    for cls in (edge_conv.EdgeConv, pna_conv.PNAConv):

        def counted(self, *args, inner=cls._fused):
            out = inner(self, *args)
            calls.append(out is not None)
            return out

        monkeypatch.setattr(cls, "_fused", counted)
    return calls


def graph(n=12, edges=40):
    torch.manual_seed(0)
    edge_index = torch.randint(0, n - 1, (2, edges))  # the last node has no edge
    return torch.randn(n, 5).double(), edge_index


def check(layer, x, edge_index):
    return optimised_alike(layer.double(), x, edge_index)


NETWORKS = {
    "linear": lambda: nn.Linear(10, 6),
    "no_bias": lambda: nn.Sequential(nn.Linear(10, 6, bias=False)),
    "mlp": lambda: nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6)),
}


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("network", NETWORKS)
def test_edge_conv_is_pygs(network, aggr, flow, taken):
    check(pyg.EdgeConv(NETWORKS[network](), aggr=aggr, flow=flow), *graph())
    assert taken == [True]


@pytest.mark.parametrize("network", NETWORKS)
def test_edge_conv_between_two_kinds_of_nodes(network, taken):
    x, edge_index = graph()
    edge_index[1] %= 4
    check(pyg.EdgeConv(NETWORKS[network]()), (x, x[:6]), edge_index)
    assert taken == [True]


@pytest.mark.parametrize("edges", [0, 1])
@pytest.mark.parametrize("aggr", AGGRS)
def test_edge_conv_with_hardly_an_edge(aggr, edges):
    check(pyg.EdgeConv(nn.Linear(10, 6), aggr=aggr), *graph(edges=edges))


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_edge_conv_shares_gradients_of_ties_as_in_pyg(aggr):
    x, edge_index = graph()
    x[3:] = x[:1]  # many equal messages
    check(pyg.EdgeConv(nn.Linear(10, 6), aggr=aggr), x, edge_index)
    zero = pyg.EdgeConv(nn.Linear(10, 6, bias=False), aggr=aggr)
    check(zero, torch.zeros_like(x), edge_index)


def test_edge_conv_far_from_the_origin():
    torch.manual_seed(0)
    _, edge_index = graph()
    x = 1e4 + torch.randn(12, 5)
    layer = pyg.EdgeConv(nn.Linear(10, 6))
    with torch.no_grad():
        layer.nn.weight[:, :5] = 0  # only differences count
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    exact = copy.deepcopy(layer).double()(x.double(), edge_index)
    error = (ours(x, edge_index) - exact).abs().max()
    assert error <= 4 * (layer(x, edge_index) - exact).abs().max() + 1e-5


def starts_otherwise():
    return nn.Sequential(nn.Tanh(), nn.Linear(10, 6))


def hooked():
    network = nn.Linear(10, 6)
    network.register_forward_hook(lambda module, args, out: out * 2)
    return network


@pytest.mark.parametrize("network", [starts_otherwise, hooked])
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_edge_conv_with_other_networks(network, aggr, flow, taken):
    check(pyg.EdgeConv(network(), aggr=aggr, flow=flow), *graph())
    assert taken == [True]


@pytest.mark.parametrize("network", [*NETWORKS, "starts_otherwise"])
def test_edge_conv_under_autocast(network):
    x, edge_index = graph()
    make = NETWORKS.get(network, starts_otherwise)
    layer = pyg.EdgeConv(make())
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    with torch.autocast("cpu"):
        found, wanted = (each(x.float(), edge_index) for each in (ours, layer))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)


def test_edge_conv_draws_and_counts_once():
    network = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    layer = pyg.EdgeConv(network, aggr="mean").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    inputs = graph()
    found = []
    for each in (layer, ours):
        torch.manual_seed(7)
        found.append([each(*inputs), *each.nn.buffers()])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("node_dim", [-2, 0])
def test_edge_conv_with_messages_of_more_dimensions(node_dim):
    network = nn.Sequential(
        nn.Linear(10, 6), nn.Unflatten(1, (2, 3)), nn.Dropout(0.5), nn.Linear(3, 4)
    )
    layer = pyg.EdgeConv(network, aggr="sum", node_dim=node_dim).double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    inputs = graph()
    found = []
    for each in (layer, ours):
        torch.manual_seed(7)
        found.append(outcome(lambda each=each: each(*inputs)))
    (stock, error), (out, ours_error) = found
    assert type(ours_error) is type(error)
    torch.testing.assert_close(out, stock)


def degrees(edge_index):
    counts = torch.bincount(edge_index[1], minlength=12)
    return torch.bincount(counts)


PNA = {
    "all": {"aggregators": ["sum", "mean", "max", "min", "var", "std"]},
    "towers": {"towers": 2},
    "divided": {"towers": 2, "divide_input": True, "channels": 6},
    "post": {"post_layers": 2},
    "learnt": {"train_norm": True},
    "backwards": {"flow": "target_to_source"},
    "one": {"aggregators": ["max"], "scalers": ["identity"]},
}
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def pna(channels=5, aggregators=("mean", "max", "std"), scalers=SCALERS, **kwargs):
    x, edge_index = graph()
    x = torch.cat([x, x[:, :1]], dim=1)[:, :channels]
    layer = pyg.PNAConv(
        channels, 8, list(aggregators), list(scalers), degrees(edge_index), **kwargs
    )
    return layer, x, edge_index


@pytest.fixture(params=[1, memory.THRESHOLD], ids=["as_if_large", "small"])
def threshold(request, monkeypatch):
    """Products of a few numbers take the path of large ones, or do not."""
    monkeypatch.setattr(memory, "THRESHOLD", request.param)


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("name", PNA)
def test_pna_is_pygs(name, taken):
    check(*pna(**PNA[name]))
    assert taken == [True]


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "aggregators", [[a] for a in AGGRS] + [["var", "max"], ["std", "min"]]
)
def test_pna_with_few_aggregators_and_one_scaler(aggregators, scaler, taken):
    check(*pna(aggregators=aggregators, scalers=[scaler]))
    assert taken == [True]


@pytest.mark.parametrize("aggregator", ["var", "std"])
def test_pna_with_variances_alone(aggregator):
    layer, x, edge_index = pna(aggregators=[aggregator])
    layer = layer.double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for each in (layer, ours):
        each(x, edge_index).square().sum().backward()
    for p, q in zip(layer.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parametrize("edges", [0, 1])
def test_pna_with_hardly_an_edge(edges, taken):
    layer, x, edge_index = pna(**PNA["all"])
    check(layer, x, edge_index[:, :edges])
    assert taken == [True]


@pytest.mark.parametrize("module", ["lin", "post_nns.0", "post_nns.0.0"])
def test_hooks_see_what_pna_passes_on(module):
    layer, x, edge_index = pna()
    layer = layer.double()
    seen = []
    for each in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        each.get_submodule(module).register_forward_hook(
            lambda module, args, out: seen.extend([*args, out])
        )
        each(x, edge_index)
    torch.testing.assert_close(seen[2:], seen[:2])


def test_sparse_matrices_and_tracing_leave_pna_to_pyg():
    layer, x, edge_index = pna()
    layer = layer.double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    values = torch.ones(edge_index.size(1), dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index, values, (len(x), len(x))).coalesce()
    torch.testing.assert_close(ours(x, matrix), layer(x, matrix))
    traced = torch.jit.trace(ours, (x, edge_index), check_trace=False)
    torch.testing.assert_close(traced(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_node_without_neighbours_adds_nothing(value):
    layer, x, edge_index = pna(**PNA["all"])
    for each in (layer, *(pyg.EdgeConv(nn.Linear(10, 6), aggr=a) for a in AGGRS)):
        each = each.double()
        ours = gnnaccel.optimize(copy.deepcopy(each))
        spoilt = x.clone()
        spoilt[-1] = value
        # The node is one of an edge's ends alone.
        out, stock = (layer(spoilt, edge_index) for layer in (ours, each))
        torch.testing.assert_close(out, stock, equal_nan=True)


@pytest.mark.parametrize("kwargs", [{"pre_layers": 2}, {"aggregators": ["mul"]}])
def test_pna_of_another_kind_goes_to_pyg(kwargs, taken):
    check(*pna(**kwargs))
    assert taken == []


def test_pna_with_edge_features_goes_to_pyg(taken):
    layer, x, edge_index = pna(edge_dim=2)
    layer = layer.double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    e = torch.randn(40, 2).double()
    torch.testing.assert_close(ours(x, edge_index, e), layer(x, edge_index, e))
    assert taken == []


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggregators", [["sum", "mean", "var"], ["max", "min", "std"]])
def test_second_derivatives_of_pna(aggregators, flow):
    layer, x, edge_index = pna(aggregators=aggregators, flow=flow)
    layer = layer.double()
    found = []
    for each in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        leaves = [x.clone().requires_grad_(), *each.parameters()]
        out = each(leaves[0], edge_index).sin().sum()
        first = torch.autograd.grad(out, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([*first, *second])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("aggr", AGGRS)
def test_second_derivatives(aggr):
    x, edge_index = graph(5, 12)
    layer = gnnaccel.optimize(pyg.EdgeConv(nn.Linear(10, 2), aggr=aggr).double())
    x = x.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x.sin(), edge_index), (x,))
