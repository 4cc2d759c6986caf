"""HeteroLinear beside PyG's own."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from layers import optimised_alike
from torch import nn

import gnnaccel
from gnnaccel.nn import hetero_linear
from gnnaccel.nn.hetero_linear import HeteroLinear

TYPES = 4


@pytest.fixture
def taken(monkeypatch):
    """Counts how often rows were sorted by ours."""
    calls = []
    inner = hetero_linear._HeteroLinear.forward

    def counted(*args):
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(hetero_linear._HeteroLinear, "forward", staticmethod(counted))
    return calls


def make(n=20, order="random", **kwargs):
    torch.manual_seed(0)
    layer = pyg.HeteroLinear(5, 3, TYPES, **kwargs).double()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    kinds = torch.randint(0, TYPES - 1, (n,))  # none of the last type
    kinds = kinds.sort().values if order == "sorted" else kinds
    return layer, torch.randn(n, 5).double(), kinds


@pytest.mark.parametrize("n", [0, 1, 20, 20_000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["random", "sorted"])
def test_is_pygs(n, bias, order, taken):
    layer, x, kinds = make(n, order, bias=bias)
    ours = optimised_alike(layer, x, kinds)
    assert type(ours) is HeteroLinear and taken


def test_told_to_be_sorted(taken):
    layer, x, kinds = make(order="sorted", is_sorted=True)
    optimised_alike(layer, x, kinds)
    assert taken
    taken.clear()
    # In any other order PyG mixes up types: that is left to it.
    layer, x, kinds = make(is_sorted=True)
    assert gnnaccel.optimize(layer)(x, kinds).shape == (20, 3) and not taken


def test_types_that_change_in_place_are_seen():
    layer, x, kinds = make()
    ours = optimised_alike(layer, x, kinds)
    kinds[:9] = (kinds[:9] + 1) % TYPES
    torch.testing.assert_close(ours(x, kinds), layer(x, kinds))


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_derivatives(order):
    layer, x, kinds = make(9, order)
    ours = gnnaccel.optimize(layer)
    leaves = (x.requires_grad_(), *ours.parameters())

    def function(x, weight, bias):
        return torch.func.functional_call(
            ours, {"weight": weight, "bias": bias}, (x.sin(), kinds)
        )

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_copies_restore_and_filter():
    model = nn.ModuleDict({"lin": make()[0], "conv": pyg.HEATConv(4, 3, 2, 3, 2, 5, 4)})
    gnnaccel.optimize(model)
    inner = model["conv"].hetero_lin
    assert type(model["lin"]) is type(inner) is HeteroLinear
    again = pickle.loads(pickle.dumps(model))
    assert type(again["lin"]) is HeteroLinear
    for module in (model, again):
        gnnaccel.restore(module)
        assert type(module["lin"]) is type(module["conv"].hetero_lin)
        assert type(module["lin"]) is pyg.HeteroLinear
    gnnaccel.optimize(model, lambda name, layer: False)
    assert type(model["conv"].hetero_lin) is pyg.HeteroLinear


@pytest.mark.parametrize("value", [-1, TYPES])
def test_a_type_out_of_range_is_named(value):
    layer, x, kinds = make()
    kinds[2] = value
    with pytest.raises(IndexError, match=str(value)):
        gnnaccel.optimize(layer)(x, kinds)


def test_what_is_not_served_is_pygs(taken):
    layer, x, kinds = make()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for args in ((x.float(), kinds), (x[:, :4], kinds)):
        with pytest.raises((RuntimeError, IndexError)) as ours_error:
            ours(*args)
        with pytest.raises(ours_error.type):
            layer(*args)
    lazy = pyg.HeteroLinear(-1, 3, TYPES).double()
    assert gnnaccel.optimize(lazy)(x, kinds).shape == (20, 3)
    compiled = torch.compile(ours, backend="eager")
    torch.testing.assert_close(compiled(x, kinds), layer(x, kinds))
