"""Layers of users that are not what they look like, against PyG's own path."""

import copy
import functools
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from layers import assert_alike, optimised_alike
from torch import nn

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import worth

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    """Graphs of a few edges take the path of large ones."""
    monkeypatch.setattr(worth, "WORTH_NEW", 0)


class Layer(pyg.MessagePassing):
    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.mlp = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
        self.lin = nn.Linear(3, 3)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)


def inputs():
    torch.manual_seed(2)
    edge_index = torch.randint(0, 9, (2, 40))
    return torch.randn(9, 3).double(), edge_index, torch.randn(40, 3).double()


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


class WrappedNetwork(Layer):
    def message(self, x_i, x_j):
        return self.mlp(torch.cat([x_i, x_j], dim=-1))

    message = doubled(message)


class WrappedSum(Layer):
    def message(self, x_j, e):
        return F.relu(x_j + e)

    message = doubled(message)


class WrappedRow(Layer):
    def message(self, x_j):
        return x_j

    message = doubled(message)


class FewRows(Layer):
    def encode(self, e):
        return e.mean(0, keepdim=True)

    def message(self, x_j, e):
        return F.relu(x_j + self.encode(e))


class Number(Layer):
    def encode(self, e):
        return 0.5

    def message(self, x_j, e):
        return x_j + self.encode(e)


class Drawing(Layer):
    def message(self, x_i, x_j):
        unused = F.dropout(x_j, 0.5)  # noqa: F841
        return self.mlp(torch.cat([x_i, x_j], dim=-1))


class Doubling:
    @staticmethod
    def relu(x):
        return 2 * x.relu()


class Shadowing(Layer):
    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e, F=Doubling)

    def message(self, x_j, e, F):
        return F.relu(x_j + e)


class Private(Layer):
    def __init__(self):
        super().__init__()
        self.__net = nn.Linear(6, 3)

    def message(self, x_i, x_j):
        return self.__net(torch.cat([x_i, x_j], dim=-1))


class OwnSum(Layer):
    def __init__(self):
        super().__init__(aggr=None)

    def message(self, x_i, x_j):
        return self.mlp(torch.cat([x_i, x_j], dim=-1))

    def aggregate(self, inputs, index, dim_size=None):
        out = inputs.new_zeros(dim_size, inputs.size(1))
        return out.index_add(0, index, inputs)


ODD = (
    WrappedNetwork,
    WrappedSum,
    WrappedRow,
    FewRows,
    Number,
    Shadowing,
    Private,
    OwnSum,
)


@pytest.mark.parametrize("cls", ODD)
def test_is_pygs(cls):
    optimised_alike(cls().double(), *inputs())


def test_what_is_drawn_for_nothing_is_drawn():
    states = []
    for layer in (Drawing().double(), gnnaccel.optimize(Drawing().double())):
        args = inputs()
        torch.manual_seed(5)
        layer(*args)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Weighted(pyg.MessagePassing):
    def forward(self, x, edge_index, w=None):
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class Numbered(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index):
        return index.view(-1, 1) * x_j


@pytest.mark.parametrize("cls", [Weighted, Numbered])
def test_weights_that_are_none(cls):
    layer = cls()
    assert_alike(layer, gnnaccel.optimize(copy.deepcopy(layer)), *inputs()[:2])


@pytest.mark.parametrize("name", ["message", "update", "aggregate"])
def test_methods_replaced_after_optimize(name, monkeypatch):
    class Mine(Layer):
        def message(self, x_j, e):
            return x_j + e

    layer = Mine().double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    assert_alike(layer, ours, *inputs())
    monkeypatch.setattr(Mine, name, doubled(getattr(Mine, name)))
    assert_alike(layer, ours, *inputs())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_stays_where_it_is_reached(value):
    x, edge_index, _ = inputs()
    x[3, 2] = value
    layer = pyg.EdgeConv(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    ours = gnnaccel.optimize(copy.deepcopy(layer.double()))
    wanted = layer(x, edge_index).isfinite()
    assert not wanted.all() and wanted.any()
    assert torch.equal(ours(x, edge_index).isfinite(), wanted)


def test_code_that_changed_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "layer_of_a_user.py"
    source = (
        "import torch_geometric.nn as pyg\n\n\n"
        "class Mine(pyg.MessagePassing):\n"
        "    def forward(self, x, edge_index, e):\n"
        "        return self.propagate(edge_index, x=x, e=e)\n\n"
        "    def message(self, x_j, e):\n"
        "        return x_j * e\n"
    )
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        layer = __import__(path.stem).Mine()
        path.write_text(source.replace("x_j * e", "x_j + e"))
        assert_alike(layer, gnnaccel.optimize(copy.deepcopy(layer)), *inputs())
    finally:
        sys.modules.pop(path.stem, None)


def test_registers_of_subclasses_see_only_the_users():
    register = {}

    class Base(Layer):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            assert cls.__name__ not in register
            register[cls.__name__] = cls

    class Mine(Base):
        def message(self, x_j, e):
            return x_j * e

    optimised_alike(Mine().double(), *inputs())
    assert register == {"Mine": Mine}


def test_classes_that_torch_changes():
    class Scaled(Layer):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def message(self, x_j, e):
            return x_j * e

    layer = Scaled().double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for each in (layer, ours):
        nn.utils.parametrize.register_parametrization(each, "scale", nn.Tanh())
    torch.testing.assert_close(ours(*inputs()), layer(*inputs()))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol):
    ours = gnnaccel.optimize(WrappedRow().double())
    again = pickle.loads(pickle.dumps(ours, protocol))
    torch.testing.assert_close(again(*inputs()), ours(*inputs()))


def test_compiled_and_then_restored():
    torch._dynamo.reset()
    model = gnnaccel.optimize(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    wrapped = gnnaccel.optimize(pyg.Sequential("x", [(nn.Linear(3, 3), "x -> x")]))
    for module in (model, wrapped):
        compiled = torch.compile(module, backend="eager")
        x = torch.randn(4, 3)
        first = compiled(x)
        gnnaccel.restore(compiled)
        torch.testing.assert_close(compiled(x), first)
