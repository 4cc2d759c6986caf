"""Layers that nobody foresaw: the generic path against PyG's own."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import assert_alike, optimised_alike
from torch import nn

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import functions, lifting, worth
from gnnaccel.nn.lifting import Lifting, Reaching

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

PARTS = ("x_i", "x_j", "e", "index", "size_i")


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    """Graphs of a few edges take the path of large ones."""
    monkeypatch.setattr(worth, "WORTH_NEW", 0)
    for name in ("WORTH_SUM", "WORTH_EXTREME", "WORTH_SOFTMAX"):
        monkeypatch.setattr(functions, name, 0)


class Drawn(pyg.MessagePassing):
    """A layer whose message takes what it was told to."""

    def __init__(self, parts, **kwargs):
        super().__init__(**kwargs)
        self.parts = parts
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, edge_index, e, size=None):
        return self.propagate(edge_index, x=x, e=e, size=size)

    def message(self, x_i, x_j, e, index, size_i):
        out = x_j * self.scale
        if "x_i" in self.parts:
            out = out + torch.tanh(x_i) * x_j
        if "e" in self.parts:
            out = out * e
        if "index" in self.parts:
            out = out + index.to(out.dtype).view(*index.shape, *[1] * (out.dim() - 1))
        if "size_i" in self.parts:
            out = out / size_i
        return out


def check(layer, *inputs):
    ours = optimised_alike(layer, *inputs)
    assert isinstance(ours, Lifting)
    return ours


AGGRS = ("sum", "mean", "max", "min", "mul", "var", "std", "softmax", "powermean")


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_drawn_layer_is_pygs(data):
    draw = data.draw
    bipartite = draw(st.booleans())
    n_src = draw(st.integers(1, 9))
    n_dst = draw(st.integers(1, 9)) if bipartite else n_src
    backwards = draw(st.booleans()) and not bipartite
    edges = draw(st.integers(0, 25))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    edge_index = torch.stack(
        [torch.randint(0, n, (edges,), generator=generator) for n in (n_src, n_dst)]
    )
    leading = draw(st.booleans())  # nodes first and more dimensions behind
    shape = (draw(st.sampled_from([1, 3])),) if not leading else (2, 3)

    def features(n):
        return torch.rand(n, *shape, generator=generator, dtype=torch.float64) + 0.1

    layer = Drawn(
        draw(st.sets(st.sampled_from(PARTS))),
        aggr=draw(st.sampled_from(AGGRS)),
        flow="target_to_source" if backwards else "source_to_target",
        node_dim=0 if leading else -2,
    ).double()
    x = (features(n_src), features(n_dst)) if bipartite else features(n_src)
    e = features(edges)
    # Where no group has two different messages, a variance is nothing but rounding.
    varies = layer.aggr not in ("var", "std") or layer(x, edge_index, e).max() > 1e-9
    assume(bool(varies))
    check(layer, x, edge_index, e)


def layer_and_input(aggr="sum"):
    torch.manual_seed(0)
    edge_index = torch.randint(0, 12, (2, 40))
    x, e = torch.rand(12, 3).double(), torch.rand(40, 3).double()
    return Drawn({"x_i", "e"}, aggr=aggr).double(), (x, edge_index, e)


@pytest.mark.parametrize("aggr", [["mean", "max", "std"], "median", "lstm"])
def test_other_aggregations(aggr):
    if aggr == "lstm":
        aggr = pyg.aggr.LSTMAggregation(3, 3)
    layer, (x, edge_index, e) = layer_and_input(aggr)
    edge_index = edge_index[:, edge_index[1].argsort()]
    check(layer, x, edge_index, e)


def test_edge_indices_that_change_in_place():
    layer, (x, edge_index, e) = layer_and_input()
    ours = check(layer, x, edge_index, e)
    edge_index[:, :20] = edge_index[:, :20].flip(0)
    torch.testing.assert_close(ours(x, edge_index, e), layer(x, edge_index, e))


def test_hooks_and_explain_mode_work():
    layer, inputs = layer_and_input()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    seen = []
    for each in (layer, ours):
        each.register_message_forward_hook(lambda m, i, out: out * 2)
        each.register_aggregate_forward_hook(lambda m, i, out: seen.append(out.shape))
    torch.testing.assert_close(ours(*inputs), layer(*inputs))
    assert len(seen) == 2
    for each in (layer, ours):
        each.explain = True
        each._edge_mask = torch.linspace(-1, 1, 40).double()
        each._loop_mask = torch.ones(40, dtype=torch.bool)
        each._apply_sigmoid = True
    torch.testing.assert_close(ours(*inputs), layer(*inputs))


def test_messages_are_made_in_the_order_of_the_edges():
    class Ordered(Drawn):
        def message(self, x_j, index):
            return x_j * torch.arange(index.numel()).unsqueeze(-1)

    layer = Ordered(set()).double()
    _, inputs = layer_and_input()
    check(layer, *inputs)


@pytest.mark.parametrize("bad", [-1, 99])
def test_indices_out_of_range_raise_pygs_error(bad):
    layer, (x, edge_index, e) = layer_and_input()
    edge_index[0, 3] = bad
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    errors = []
    for each in (layer, ours):
        with pytest.raises(IndexError, match=str(bad)) as error:
            each(x, edge_index, e)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_copies_pickles_and_restore():
    layer, inputs = layer_and_input("mean")
    expected = layer(*inputs)
    ours = gnnaccel.optimize(layer)
    assert isinstance(ours.aggr_module, Reaching)
    for clone in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours):
        assert type(clone) is type(ours)
        torch.testing.assert_close(clone(*inputs), expected)
        back = gnnaccel.restore(clone)
        assert type(back) is Drawn
        assert type(back.aggr_module) is pyg.aggr.MeanAggregation
        torch.testing.assert_close(back(*inputs), expected)


def test_a_class_can_opt_out():
    class Left(Drawn):
        leave_to_pyg = True

    layer = gnnaccel.optimize(Left(set()))
    assert type(layer) is Left
    assert "leave_to_pyg" in gnnaccel.explain(layer).rows[0].why


@pytest.mark.parametrize("make", [pyg.SumAggregation, pyg.MaxAggregation])
def test_readouts_are_reduced_too(make):
    torch.manual_seed(0)
    model = nn.ModuleDict({"readout": make()})
    x, batch = torch.rand(9, 4).double(), torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3])
    stock = copy.deepcopy(model["readout"])
    gnnaccel.optimize(model)
    assert isinstance(model["readout"], Reaching)
    assert_alike(stock, model["readout"], x.requires_grad_(), batch, None, 6)


def test_second_derivatives():
    layer, (x, edge_index, e) = layer_and_input()
    ours = gnnaccel.optimize(layer)
    x = x[:, :2].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ours(x, edge_index, e[:, :2]), (x,))


def test_an_index_is_grouped_once_it_keeps_coming_back(monkeypatch):
    monkeypatch.setattr(worth, "WORTH_NEW", 1 << 30)
    monkeypatch.setattr(worth, "WORTH_NEW_ROWS", 1 << 30)
    seen = []
    monkeypatch.setattr(
        lifting, "gather", lambda src, index: seen.append(index) or src[index]
    )
    layer, (x, edge_index, e) = layer_and_input()
    ours = gnnaccel.optimize(layer)
    for _ in range(20):
        ours(x, edge_index.clone(), e)
    assert not seen
    for _ in range(20):
        ours(x, edge_index, e)
    assert len(seen) == 2 * (20 - worth.USUAL)
