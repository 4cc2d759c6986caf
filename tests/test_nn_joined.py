"""Layers that join a row with the edge's features, whoever wrote them."""

import copy

import pytest
import torch
import torch.nn.functional
import torch.nn.functional as F
import torch_geometric.nn as pyg
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import optimised_alike
from torch import nn
from torch.nn.functional import relu

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import joined, summing
from gnnaccel.nn.lifting import Lifting
from gnnaccel.nn.messages import Weight, joined_of
from gnnaccel.nn.summing import Joining

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))


class Added(pyg.MessagePassing):
    def __init__(self, width=5, **kwargs):
        super().__init__(**kwargs)
        self.lin = nn.Linear(width, 5)
        self.drop = nn.Sequential(nn.Linear(width, 5), nn.Dropout(0.5))

    def forward(self, x, edge_index, e, w=None, size=None):
        kwargs = {} if w is None else {"w": w}
        return self.propagate(edge_index, x=x, e=e, size=size, **kwargs)

    def message(self, x_j, e):
        return x_j + e


class Turned(Added):
    def message(self, x_j, e):
        return e + x_j


class Method(Added):
    def message(self, x_j, e):
        """A docstring is no statement."""
        return (x_j + e).relu()


class Functional(Added):
    def message(self, x_j, e):
        return F.relu(e + x_j)


class Torch(Added):
    def message(self, x_j, e):
        return torch.relu(x_j + e)


class Imported(Added):
    def message(self, x_j, e):
        return relu(x_j + e)


class Long(Added):
    def message(self, x_j, e):
        return torch.nn.functional.relu(x_j + e)


class Filtered(Added):
    def message(self, x_j, e):
        return x_j * e


class Through(Added):
    def message(self, x_j, e):
        return F.relu(x_j + self.lin(e))


class ThroughAdded(Added):
    def message(self, x_j, e):
        return self.lin(e) + x_j


class ThroughFilter(Added):
    def message(self, x_j, e):
        return x_j * self.lin(e)


class Dropped(Added):
    def message(self, x_j, e):
        return F.relu(x_j + self.drop(e))


class Weighted(Added):
    def message(self, x_j, e, w):
        return w.view(-1, 1) * F.relu(x_j + e)


class WeightedThrough(Added):
    def message(self, x_j, e, w):
        return (x_j + self.lin(e)).relu() * w.view(-1, 1)


class Leaky(Added):
    def message(self, x_j, e):
        return F.leaky_relu(x_j + e)


class Negative(Added):
    def message(self, x_j, e):
        return x_j - e


class Both(Added):
    def message(self, x_i, x_j):
        return x_j + x_i


class Twice(Added):
    def message(self, x_j, e):
        e = 2 * e
        return x_j + e


class Updated(Added):
    def update(self, inputs):
        return inputs + 1


FOUND = {
    Added: ("add", "e", None, None),
    Turned: ("add", "e", None, None),
    Method: ("add_relu", "e", None, None),
    Functional: ("add_relu", "e", None, None),
    Torch: ("add_relu", "e", None, None),
    Imported: ("add_relu", "e", None, None),
    Long: ("add_relu", "e", None, None),
    Filtered: ("mul", "e", None, None),
    Through: ("add_relu", "e", "lin", None),
    ThroughAdded: ("add", "e", "lin", None),
    ThroughFilter: ("mul", "e", "lin", None),
    Dropped: ("add_relu", "e", "drop", None),
    Weighted: ("add_relu", "e", None, Weight("w", True)),
    WeightedThrough: ("add_relu", "e", "lin", Weight("w", True)),
}
NOT_FOUND = [Leaky, Negative, Both, Twice, Updated]


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The kinds of message that were summed unwritten, call by call."""
    calls = []
    inner = summing.joined_sum

    def counted(adj, kind, *args):
        calls.append(kind)
        return inner(adj, kind, *args)

    monkeypatch.setattr(summing, "joined_sum", counted)
    return calls


@pytest.mark.parametrize("cls", [*FOUND, *NOT_FOUND])
def test_what_a_message_is_read_as(cls):
    assert joined_of(cls) == FOUND.get(cls)
    assert isinstance(gnnaccel.optimize(cls()), Joining) == (cls in FOUND)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_is_pygs(data):
    draw = data.draw
    cls = draw(st.sampled_from([c for c in FOUND if c is not Dropped]))
    found = FOUND[cls]
    bipartite = draw(st.booleans())
    n_src = draw(st.integers(1, 9))
    n_dst = draw(st.integers(1, 9)) if bipartite else n_src
    edges = draw(st.integers(0, 25))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    edge_index = torch.stack(
        [torch.randint(0, n, (edges,), generator=generator) for n in (n_src, n_dst)]
    )
    width = draw(st.sampled_from([3, 5, 20])) if found[2] else 5
    torch.manual_seed(1)
    layer = cls(
        width,
        aggr=draw(st.sampled_from(["sum", "mean", "max", "std"])),
        flow="source_to_target"
        if bipartite
        else draw(st.sampled_from(["source_to_target", "target_to_source"])),
    ).double()
    x = (random(n_src, 5), random(n_dst, 5)) if bipartite else random(n_src, 5)
    # Of one column, they are the same for all columns of a row.
    columns = width if found[2] else draw(st.sampled_from([1, 5]))
    e = random(edges, columns).requires_grad_(draw(st.booleans()))
    w = random(edges).requires_grad_(draw(st.booleans())) if found[3] else None
    optimised_alike(layer, x, edge_index, e, w)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("cls", [c for c in FOUND if c is not Dropped])
def test_each_is_pygs(cls, aggr, learnt, taken):
    x, edge_index, e = inputs()
    w = torch.rand(40).double() if FOUND[cls][3] else None
    layer = cls(aggr=aggr).double()
    optimised_alike(layer, x, edge_index, e.requires_grad_(learnt), w)
    assert taken == [FOUND[cls][0]]


def inputs(width=5):
    torch.manual_seed(0)
    edge_index = torch.randint(0, 11, (2, 40))  # the last node has no edge
    return torch.randn(12, 5).double(), edge_index, torch.randn(40, width).double()


@pytest.mark.parametrize("cls", FOUND)
def test_no_message_is_written(cls, taken, monkeypatch):
    layer = gnnaccel.optimize(cls().double())
    monkeypatch.setattr(Lifting, "_index_select", lambda *args: pytest.fail("lifted"))
    x, edge_index, e = inputs()
    w = torch.ones(40).double() if FOUND[cls][3] else None
    layer(x, edge_index, e, w)
    assert taken == [FOUND[cls][0]]


def test_a_module_on_the_way_draws_the_same_numbers(taken):
    x, edge_index, e = inputs()
    layer = Dropped().double()
    outs = []
    for module in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        torch.manual_seed(3)
        outs.append(module(x, edge_index, e))
    torch.testing.assert_close(outs[1], outs[0])
    assert taken == ["add_relu"]


def test_hooks_on_a_module_on_the_way_are_called_once():
    x, edge_index, e = inputs()
    layer = gnnaccel.optimize(Through().double())
    seen = []
    layer.lin.register_forward_hook(lambda *args: seen.append(1))
    layer(x, edge_index, e)
    assert seen == [1]


@pytest.mark.parametrize("shape", [(40, 4), (39, 5), (40,), (40, 1, 5)])
@pytest.mark.parametrize("cls", [Added, Method, Filtered, Through])
def test_features_that_do_not_fit_are_pygs_to_judge(cls, shape):
    x, edge_index, _ = inputs()
    e = torch.randn(shape).double()
    optimised_or_error(cls().double(), x, edge_index, e)


def optimised_or_error(layer, *args):
    outs = []
    for module in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        try:
            outs.append(module(*args))
        except (RuntimeError, IndexError, ValueError) as error:
            outs.append(type(error))
    if isinstance(outs[0], torch.Tensor):
        torch.testing.assert_close(outs[1], outs[0])
    else:
        assert outs[0] == outs[1]


def test_hooks_on_messages_take_pygs_path(taken):
    x, edge_index, e = inputs()
    stock = Method()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    for layer in (stock, ours):
        layer.double().register_message_forward_hook(lambda m, i, out: out * 2)
    torch.testing.assert_close(ours(x, edge_index, e), stock(x, edge_index, e))
    assert taken == []


@pytest.mark.parametrize("cls", [Added, Through, Filtered, WeightedThrough])
def test_second_derivatives(cls):
    x, edge_index, e = inputs()
    layer = gnnaccel.optimize(cls().double())
    w = torch.rand(40).double() if FOUND[cls][3] else None
    x, e = x[:, :5].requires_grad_(), e.requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x, e: layer(x, edge_index, e, w), (x, e), fast_mode=True
    )


def test_only_few_features_are_mapped_where_they_are_read(monkeypatch):
    """And only where they want no gradient: else the map's own product is faster."""
    maps = []
    inner = joined.sum_messages

    def seen(adj, kind, parts, own):
        maps.append(parts.map is not None)
        return inner(adj, kind, parts, own)

    monkeypatch.setattr(joined, "sum_messages", seen)
    for width, learnt in ((3, False), (3, True), (20, False)):
        x, edge_index, e = inputs(width)
        layer = gnnaccel.optimize(Through(width).double())
        layer(x, edge_index, e.requires_grad_(learnt))
    assert maps == [True, False, False]


def test_schnets_filter_is_read():
    from torch_geometric.nn.models.schnet import CFConv

    assert joined_of(CFConv) == ("mul", "W", None, None)
