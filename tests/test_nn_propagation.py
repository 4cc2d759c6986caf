"""Layers whose message is a row times a weight: sparse products, whoever wrote them."""

import copy
import gc
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import optimised_alike
from oracles import assert_near, results
from torch import nn
from torch_geometric.utils import add_self_loops, degree

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn.fused import Fused
from gnnaccel.nn.messages import weight_of
from gnnaccel.nn.normalisation import gcn_norm
from gnnaccel.nn.summing import Multiplying

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))


class Plain(pyg.MessagePassing):
    def forward(self, x, edge_index, w=None, size=None):
        return self.propagate(edge_index, x=x, w=w, size=size)

    def message(self, x_j):
        """A docstring is no statement."""
        return x_j


class Weighted(Plain):
    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class Unsqueezed(Plain):
    def message(self, x_j, w):
        return x_j * w.unsqueeze(-1)


class Optional(Plain):
    def message(self, x_j, w):
        return x_j if w is None else w.view(-1, 1) * x_j


class Negative(Plain):
    def message(self, x_j, w):
        return -w.view(-1, 1) * x_j


class Doubled(Plain):
    def message(self, x_j, w):
        w = 2 * w
        return w.view(-1, 1) * x_j


class PerNode(Plain):
    def forward(self, x, edge_index, w=None, size=None):
        return self.propagate(edge_index, x=x, w=x[:, :1], size=size)

    def message(self, x_j, w_i):
        return w_i.view(-1, 1) * x_j


class Wrong(Plain):
    def message(self, x_j, w):
        return w.view(1, -1) * x_j


class Updated(Weighted):
    def update(self, inputs):
        return inputs + 1


class Summed(Weighted):
    def aggregate(self, inputs, index, dim_size=None):
        return super().aggregate(inputs, index, dim_size=dim_size) * 2


class OwnPropagate(Weighted):
    def propagate(self, edge_index, size=None, **kwargs):
        return kwargs["x"] * 3


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Plain, (None, False)),
        (Weighted, ("w", True)),
        (Unsqueezed, ("w", False)),
        (Optional, ("w", True)),
        (Negative, None),
        (Doubled, None),
        (PerNode, None),
        (Wrong, None),
        (Updated, None),
        (Summed, None),
        (OwnPropagate, None),
    ],
)
def test_what_a_message_is_read_as(cls, found):
    read = weight_of(cls)
    assert (None if read is None else read[:2]) == found


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_is_pygs(data):
    draw = data.draw
    cls = draw(
        st.sampled_from(
            [Plain, Weighted, Unsqueezed, Optional, Negative, PerNode, Updated, Summed]
        )
    )
    bipartite = draw(st.booleans()) and cls is not PerNode
    n_src = draw(st.integers(1, 9))
    n_dst = draw(st.integers(1, 9)) if bipartite else n_src
    edges = draw(st.integers(0, 25))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    edge_index = torch.stack(
        [torch.randint(0, n, (edges,), generator=generator) for n in (n_src, n_dst)]
    )
    layer = cls(
        aggr=draw(st.sampled_from(["sum", "mean", "max", "min", "std", "mul"])),
        flow=draw(st.sampled_from(["source_to_target", "target_to_source"]))
        if not bipartite
        else "source_to_target",
    )
    x = (random(n_src, 3), random(n_dst, 3)) if bipartite else random(n_src, 3)
    w = random(edges, *draw(st.sampled_from([(), (1,)])))
    if cls is Optional and draw(st.booleans()):
        w = None
    if w is not None:
        w.requires_grad_()
    optimised_alike(layer, x, edge_index, w)


class Tutorial(pyg.MessagePassing):
    """The GCN that PyG's documentation teaches to write."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(5, 6, bias=False)

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        return self.propagate(edge_index, x=x, norm=scale[row] * scale[col])

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


FAMILY = {
    "Tutorial": Tutorial,
    "SGConv": lambda: pyg.SGConv(5, 6, 2),
    "SSGConv": lambda: pyg.SSGConv(5, 6, 0.1, 3),
    "APPNP": lambda: pyg.APPNP(3, 0.1),
    "TAGConv": lambda: pyg.TAGConv(5, 6),
    "ARMAConv": lambda: pyg.ARMAConv(5, 6, 2, 2),
    "ClusterGCNConv": lambda: pyg.ClusterGCNConv(5, 6),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(5, 2),
    "SimpleConv": lambda: pyg.SimpleConv("mean"),
    "LGConv": lambda: pyg.LGConv(),
    "ChebConv": lambda: pyg.ChebConv(5, 6, 3),
    "MixHopConv": lambda: pyg.MixHopConv(5, 6),
    "MFConv": lambda: pyg.MFConv(5, 6),
}
WEIGHTED = (
    "SGConv",
    "APPNP",
    "TAGConv",
    "ARMAConv",
    "LGConv",
    "ChebConv",
    "SimpleConv",
)


def inputs():
    torch.manual_seed(0)
    edge_index = torch.randint(0, 11, (2, 40))  # the last node has no edge
    edge_index[:, 3] = 7  # a loop
    return torch.randn(12, 5).double(), edge_index


def outcome(layer, x, edge_index, *weight):
    """Output and gradients; of the very weights, which may be remembered."""
    layer.zero_grad()
    for w in weight:
        w.grad = None
    leaf = x.clone().requires_grad_()
    found = results(layer, (leaf, edge_index, *weight), dict(layer.named_parameters()))
    return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("weight", ["none", "constant", "learnt"])
def test_the_family_is_pygs(name, weight):
    if weight != "none" and name not in WEIGHTED:
        pytest.skip("takes no weights")
    x, edge_index = inputs()
    stock = FAMILY[name]().double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    assert isinstance(ours, (Multiplying, Fused))
    more = ()
    if weight != "none":
        w = torch.rand(40).double()
        more = (w.requires_grad_(weight == "learnt"),)
    expected = outcome(stock, x, edge_index, *more)
    for _ in range(2):  # and from memory
        found = outcome(ours, x, edge_index, *more)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_near(value, expected[name], slack=10, name=name)


@pytest.mark.parametrize("changed", ["edges", "weights"])
def test_normalisation_sees_changes_in_place(changed):
    x, edge_index = inputs()
    w = torch.rand(40).double()
    stock = pyg.SGConv(5, 6).double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    ours(x, edge_index, w)
    if changed == "edges":
        edge_index[:, :20] = edge_index[:, :20].flip(0)
    else:
        w[:20] *= 2
    torch.testing.assert_close(ours(x, edge_index, w), stock(x, edge_index, w))


@pytest.mark.parametrize("loops", [True, False])
def test_a_normalised_graph_goes_with_its_edges(loops):
    _, edge_index = inputs()
    first = gcn_norm(edge_index, None, 12, False, loops, "source_to_target")
    again = gcn_norm(edge_index, None, 12, False, loops, "source_to_target")
    assert first[0] is again[0] and first[1] is again[1]
    gone = weakref.ref(edge_index)
    del edge_index, first, again
    gc.collect()
    assert gone() is None


def test_hooks_on_messages_take_pygs_path():
    x, edge_index = inputs()
    stock = pyg.SimpleConv("sum")
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    for layer in (stock, ours):
        layer.register_message_forward_hook(lambda m, i, out: out * 2)
    torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("bad", [-1, 99])
def test_errors_are_pygs(end, bad):
    x, edge_index = inputs()
    edge_index[end, 2] = bad
    errors = []
    for layer in (pyg.SimpleConv("sum"), gnnaccel.optimize(pyg.SimpleConv("sum"))):
        with pytest.raises((IndexError, ValueError, RuntimeError)) as error:
            layer(x, edge_index)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("name", ["SimpleConv", "SGConv", "LGConv"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_compiled_by_torchscript(name, how):
    x, edge_index = inputs()
    stock = FAMILY[name]().double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    if how == "script":
        fixed = torch.jit.script(ours)
    else:
        fixed = torch.jit.trace(ours, (x, edge_index))
    torch.testing.assert_close(fixed(x, edge_index), stock(x, edge_index))
    assert isinstance(ours, Multiplying)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_sparse_matrices_take_pygs_path(layout):
    x, edge_index = inputs()
    edge_index = torch.unique(edge_index, dim=1)
    ones = torch.ones(edge_index.size(1)).double()
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (12, 12)).coalesce()
    matrix = matrix if layout == torch.sparse_coo else matrix.to_sparse_csr()
    stock = pyg.SimpleConv("sum")
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    torch.testing.assert_close(ours(x, matrix), stock(x, matrix))


def test_second_derivatives():
    x, edge_index = inputs()
    layer = gnnaccel.optimize(pyg.APPNP(2, 0.1))
    x = x[:, :2].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x.sin(), edge_index), (x,))
