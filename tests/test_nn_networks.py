"""Layers whose message is a network of rows side by side, against PyG's own."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from layers import assert_alike, optimised_alike
from torch import cat, nn

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import split, worth
from gnnaccel.nn.lifting import Lifting
from gnnaccel.nn.networks import Part, network_of
from gnnaccel.nn.summing import Splitting

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

F, D, H = 3, 2, 4


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    """Graphs of a few edges take the path of large ones."""
    monkeypatch.setattr(worth, "WORTH_NEW", 0)


def linear(width):
    return nn.Linear(width, H)


def one_hidden(width):
    return nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, H))


def two_hidden(width):
    return nn.Sequential(
        nn.Linear(width, 5, bias=False),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, H, bias=False),
    )


def random(width):
    return nn.Sequential(nn.Linear(width, 5), nn.Dropout(0.5), nn.Linear(5, H))


def other_start(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, H))


def pygs(width):
    return pyg.MLP([width, 5, H], norm=None)


def pygs_one(width):
    return pyg.MLP([width, H])


def pygs_norms(width):
    return pyg.MLP([width, 5, H], act="elu", act_first=True, plain_last=False)


def pygs_random(width):
    return pyg.MLP([width, 5, H], dropout=[0.5, 0.2], norm=None)


def activated(width):
    return nn.Sequential(nn.Linear(width, H), nn.ReLU())


NETWORKS = (linear, activated, one_hidden, two_hidden, pygs, pygs_one, pygs_norms)


class Layer(pyg.MessagePassing):
    """What the layers below share."""

    width = 2 * F + D

    def __init__(self, network=one_hidden, **kwargs):
        super().__init__(**kwargs)
        self.network = network(self.width)

    def forward(self, x, edge_index, e, size=None):
        return self.propagate(edge_index, x=x, e=e, size=size)


class Both(Layer):
    def message(self, x_i, x_j, e):
        """Both ends, and what stands on the edge."""
        return self.network(torch.cat([x_i, x_j, e], dim=-1))


class Taught(Layer):
    """As PyG's tutorial writes EdgeConv."""

    width = 2 * F

    def message(self, x_i, x_j):
        tmp = torch.cat([x_i, x_j - x_i], dim=1)
        return self.network(tmp)


class Source(Layer):
    width = F + D

    def message(self, x_j, e):
        out = self.network(cat((e, x_j), -1))
        return out


class Apart(Layer):
    width = F + D

    def message(self, x_i, x_j, e):
        return self.network(torch.cat([x_i - x_j, e], dim=-1))


class Named(Layer):
    """Its rows are not called x."""

    def forward(self, x, edge_index, e, size=None):
        return self.propagate(edge_index, h=x, e=e, size=size)

    def message(self, h_i, h_j, e):
        return self.network(torch.cat([h_i, h_j, e], dim=-1))


class Twice(Layer):
    width = 3 * F

    def message(self, x_j, x_i):
        z = x_i - x_j
        return self.network(torch.concat([x_j, z, z], axis=1))


class Updated(Both):
    """Its own steps after the message, one of which takes rows."""

    def aggregate(self, inputs, index, dim_size=None):
        return super().aggregate(inputs.sin(), index, dim_size=dim_size)

    def update(self, out, x):
        return out + (x[1] if isinstance(x, tuple) else x).sum(-1, keepdim=True)


class Waved(Both):
    """PyG's aggregation, and an update of its own."""

    def update(self, out):
        return out.sin()


READ = (Both, Named, Taught, Source, Apart, Twice, Updated, Waved)


def inputs(bipartite=False, edges=30):
    torch.manual_seed(1)
    n_src, n_dst = (9, 7) if bipartite else (9, 9)
    x = torch.randn(n_src, F).double()
    if bipartite:
        x = (x, torch.randn(n_dst, F).double())
    # The last node has no neighbour.
    edge_index = torch.stack(
        [torch.randint(0, n_src, (edges,)), torch.randint(0, n_dst - 1, (edges,))]
    )
    return x, edge_index, torch.randn(edges, D).double()


@pytest.mark.parametrize("cls", READ)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min", ["mean", "std"]])
@pytest.mark.parametrize("bipartite", [False, True], ids=["square", "bipartite"])
def test_every_layer_is_pygs(cls, network, aggr, bipartite, monkeypatch):
    taken = []
    inner = split.split
    monkeypatch.setattr(split, "split", lambda *a: taken.append(inner(*a)) or taken[-1])
    layer = cls(network, aggr=aggr).double()
    assert isinstance(optimised_alike(layer, *inputs(bipartite)), Splitting)
    assert taken and None not in taken


@pytest.mark.parametrize("cls", READ)
@pytest.mark.parametrize("edges", [0, 1, 30])
def test_flow_and_few_edges(cls, edges):
    layer = cls(aggr="add", flow="target_to_source").double()
    optimised_alike(layer, *inputs(edges=edges))


@pytest.mark.parametrize("size", [(9, 9), (9, 12), (12, 9), (9, 7)])
@pytest.mark.parametrize("cls", [Both, Source])
def test_sizes(cls, size):
    layer = cls(aggr="mean").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    assert_alike(layer, ours, *inputs(), size=size)


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_gradients_of_edges_and_of_gradients(aggr):
    layer = Both(aggr=aggr).double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    x, edge_index, e = inputs()
    found = []
    for each in (layer, ours):
        leaves = [x.clone().requires_grad_(), e.clone().requires_grad_()]
        out = each(leaves[0], edge_index, leaves[1])
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([*first, *second])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("network", [random, pygs_random])
def test_dropout_draws_the_same(network):
    layer = Both(network, aggr="mean").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    results = []
    for each in (layer, ours):
        torch.manual_seed(7)
        results.append(each(*inputs()))
    torch.testing.assert_close(results[1], results[0])


def test_differences_far_from_the_origin():
    torch.manual_seed(3)
    layer = Apart(aggr="mean")
    x, edge_index, e = inputs()
    x, e = x.float() + 1e4, e.float()
    right = copy.deepcopy(layer).double()(x.double(), edge_index, e.double())
    own = (layer(x, edge_index, e) - right).abs().max()
    ours = (gnnaccel.optimize(copy.deepcopy(layer))(x, edge_index, e) - right).abs()
    assert ours.max() <= 10 * own


@pytest.mark.parametrize("where", [None, 0, 1, 2])
def test_hooks_see_every_edge(where):
    layer = Both(aggr="sum").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    seen = []
    for each in (layer, ours):
        module = each.network if where is None else each.network[where]
        module.register_forward_hook(
            lambda module, args, out: seen.extend([*args, out])
        )
        each(*inputs())
    torch.testing.assert_close(seen[2:], seen[:2])


def test_message_hooks():
    layer = Both(aggr="sum").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for each in (layer, ours):
        each.register_message_forward_hook(lambda module, args, out: out * 2)
    assert_alike(layer, ours, *inputs())


@pytest.mark.parametrize(
    "change",
    [
        lambda x, edge_index, e: (x, edge_index, e[:5]),
        lambda x, edge_index, e: (x, edge_index, e[:, 0]),
        lambda x, edge_index, e: (x, edge_index, None),
        lambda x, edge_index, e: (x, edge_index, e.float()),
        lambda x, edge_index, e: (x[:, :2], edge_index, e),
        lambda x, edge_index, e: (x[:4], edge_index, e),
        lambda x, edge_index, e: (x, edge_index - 3, e),
        lambda x, edge_index, e: (x, edge_index.double(), e),
        lambda x, edge_index, e: ((x, None), edge_index, e),
        lambda x, edge_index, e: ((x, x, x), edge_index, e),
        lambda x, edge_index, e: (None, edge_index, e),
    ],
)
def test_bad_input_fails_as_in_pyg(change):
    layer = Both(aggr="sum").double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    assert_alike(layer, ours, *change(*inputs()))


class OtherDimension(Layer):
    def message(self, x_i, x_j, e):
        return self.network(torch.cat([x_i, x_j], dim=0))


class Scaled(Layer):
    def message(self, x_i, x_j, e):
        return self.network(torch.cat([x_i, 2 * x_j, e], dim=-1))


class Index(Layer):
    def message(self, x_i, index):
        return self.network(torch.cat([x_i, index], dim=-1))


class Edges(Layer):
    def message(self, e):
        return self.network(torch.cat([e, e], dim=-1))


class Changed(Layer):
    def message(self, x_i, x_j, e):
        x_i.add_(1)
        return self.network(torch.cat([x_i, x_j, e], dim=-1))


class Branched(Layer):
    def message(self, x_i, x_j, e):
        if self.training:
            e = e * 2
        return self.network(torch.cat([x_i, x_j, e], dim=-1))


class Activated(Layer):
    def message(self, x_i, x_j, e):
        return self.network(torch.cat([x_i, x_j, e], dim=-1)).relu()


class Propagates(Both):
    def propagate(self, edge_index, size=None, **kwargs):
        return super().propagate(edge_index, size=size, **kwargs) * 2


def shadowed():
    class torch:  # noqa: N801
        @staticmethod
        def cat(tensors, dim):
            return tensors[0]

    class Shadowed(Layer):
        def message(self, x_i, x_j):
            return self.network(torch.cat([x_i, x_j], dim=-1))

    return Shadowed


@pytest.mark.parametrize(
    "cls",
    [
        OtherDimension,
        Scaled,
        Index,
        Edges,
        Changed,
        Branched,
        Activated,
        Propagates,
        shadowed(),
    ],
)
def test_what_is_not_read(cls):
    assert network_of(cls) is None


def test_rows_that_a_later_step_wants():
    class Wanting(Both):
        def aggregate(self, inputs, index, x_j, dim_size=None):
            return super().aggregate(inputs * x_j[:, :1], index, dim_size=dim_size)

    ours = optimised_alike(Wanting(aggr="sum").double(), *inputs())
    assert isinstance(ours, Lifting)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("conv", [pyg.EdgeConv, pyg.GINConv])
def test_fused_layers_look_into_networks(conv, aggr, network):
    x, edge_index, _ = inputs()
    width = 2 * F if conv is pyg.EdgeConv else F
    optimised_alike(conv(network(width), aggr=aggr).double(), x, edge_index)


def test_networks_that_begin_with_something_else():
    optimised_alike(Both(other_start, aggr="sum").double(), *inputs())


def test_messages_of_more_dimensions():
    def folding(width):
        return nn.Sequential(
            nn.Linear(width, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, H)
        )

    optimised_alike(Both(folding, aggr="sum", node_dim=0).double(), *inputs())


def test_what_is_read():
    assert network_of(Both) == ("network", (Part("x_i"), Part("x_j"), Part("e")))
    assert network_of(Taught).parts == (Part("x_i"), Part("x_j", "x_i"))
    assert network_of(Twice).parts[1:] == (Part("x_i", "x_j"),) * 2


def test_explain_names_the_path():
    (row,) = gnnaccel.explain(gnnaccel.optimize(Both())).rows
    assert "per node" in row.why


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("aggr", ["max", "sum", "mean"])
@pytest.mark.parametrize("network", [*NETWORKS, None])
def test_point_nets(network, aggr, loops, monkeypatch):
    calls = []
    reduced = split.reduced
    monkeypatch.setattr(
        split, "reduced", lambda *args: calls.append(1) or reduced(*args)
    )
    local = None if network is None else network(F + D)
    width = F + D if local is None else H
    layer = pyg.PointNetConv(local, nn.Linear(width, 2), loops, aggr=aggr)
    layer = layer.double().eval()
    edge_index = torch.randint(9, (2, 30))
    x, pos = torch.randn(9, F).double(), 100 + torch.rand(9, D).double()
    optimised_alike(layer, x, pos.requires_grad_(), edge_index)
    assert bool(calls) == (network not in (None, other_start))
    calls.clear()
    if network is None:
        return
    alone = copy.deepcopy(layer)
    alone.local_nn = network(D).double().eval()
    ours = gnnaccel.optimize(copy.deepcopy(alone))
    assert_alike(alone, ours, None, pos, edge_index)
    assert not calls
    x_dst, pos_dst = torch.randn(5, F).double(), torch.rand(5, D).double()
    edge_index = torch.stack([torch.randint(9, (30,)), torch.randint(5, (30,))])
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for pair in ((x, None), (x, x_dst)):
        assert_alike(layer, ours, pair, (pos, pos_dst), edge_index)
