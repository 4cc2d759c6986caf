"""PyG's layers whose messages are gated, their sums made without writing them down."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from layers import assert_alike, optimised_alike
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import gating, worth
from gnnaccel.nn.film_relations import summed_relations
from gnnaccel.nn.lifting import Lifting

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Whether the kernel's path was taken, call by call; on graphs of any size."""
    calls = []
    for cls in gating._GATES.values():

        def counted(self, *args, inner=cls._gated):
            out = inner(self, *args)
            calls.append(out is not None)
            return out

        monkeypatch.setattr(cls, "_gated", counted)
    return calls


def graph(n=12, edges=40, width=5):
    torch.manual_seed(0)
    edge_index = torch.randint(0, n - 1, (2, edges))  # the last node has no edge
    return torch.randn(n, width).double(), edge_index


def features(columns=3, edges=40):
    torch.manual_seed(1)
    return torch.randn(edges, columns).double()


#: By name: the layer, and how many columns the features of its edges have, if any.
LAYERS = {
    "gated": (lambda **k: pyg.ResGatedGraphConv(5, 6, **k), None),
    "gated_plain": (
        lambda **k: pyg.ResGatedGraphConv(5, 6, root_weight=False, bias=False, **k),
        None,
    ),
    "gated_function": (lambda **k: pyg.ResGatedGraphConv(5, 6, F.sigmoid, **k), None),
    "gated_edges": (lambda **k: pyg.ResGatedGraphConv(5, 6, edge_dim=3, **k), 3),
    "gated_wide": (lambda **k: pyg.ResGatedGraphConv(5, 6, edge_dim=20, **k), 20),
    "crystal": (lambda **k: pyg.CGConv(5, **k), None),
    "crystal_norm": (lambda **k: pyg.CGConv(5, batch_norm=True, **k), None),
    "crystal_edges": (lambda **k: pyg.CGConv(5, dim=3, **k), 3),
    "crystal_no_bias": (lambda **k: pyg.CGConv(5, dim=20, bias=False, **k), 20),
    "film": (lambda **k: pyg.FiLMConv(5, 6, **k), None),
    "film_network": (
        lambda **k: pyg.FiLMConv(
            5, 6, nn=nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 12)), **k
        ),
        None,
    ),
    "softened": (lambda **k: pyg.GENConv(5, 5, **k), None),
    "softened_edges": (lambda **k: pyg.GENConv(5, 5, edge_dim=3, norm=None, **k), 3),
    "softened_wide": (lambda **k: pyg.GENConv(5, 5, edge_dim=20, **k), 20),
    "softened_as_wide": (lambda **k: pyg.GENConv(5, 5, **k), 5),
}
#: GENConv's ways to reduce, and whether they are fused beside features of edges, too.
REDUCTIONS = {
    "softmax": ({"t": 0.5}, True),
    "softmax_learnt": ({"learn_t": True, "t": 2.0}, True),
    "softmax_constant": ({"aggr": "softmax_sg", "t": 0.1}, True),
    "softmax_by_channel": (
        {"aggr_kwargs": {"learn": True, "channels": 6}},
        True,
    ),
    "add": ({"aggr": "add"}, True),
    "mean": ({"aggr": "mean"}, True),
    "max": ({"aggr": "max"}, False),
    "power_mean": ({"aggr": "powermean", "p": 2.0}, False),
    "power_mean_learnt": ({"aggr": "powermean", "learn_p": True, "p": 1.5}, False),
    "power_mean_of_one": ({"aggr": "powermean"}, False),
    "normed": ({"msg_norm": True, "learn_msg_scale": True}, True),
}


def built(name, **kwargs):
    make, columns = LAYERS[name]
    edge = () if columns is None else (features(columns),)
    return make(**kwargs).double(), edge


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_pygs(name, flow, taken, route):
    layer, edge = built(name, flow=flow)
    optimised_alike(layer, *graph(), *edge)
    assert taken == [True] * (route != "reference")


@pytest.mark.parametrize("name", LAYERS)
def test_edge_features_that_learn(name, taken):
    layer, edge = built(name)
    if not edge:
        pytest.skip("it has none")
    optimised_alike(layer, *graph(), edge[0].requires_grad_())
    assert taken == [True]


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
@pytest.mark.parametrize("name", ["gated", "crystal_edges", "film"])
def test_other_reductions(name, aggr, taken):
    layer, edge = built(name, aggr=aggr)
    optimised_alike(layer, *graph(), *edge)
    assert taken == [aggr == "mean"]


@pytest.mark.parametrize("columns", [None, 6, 3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_of_gen_conv(name, columns, taken):
    kwargs, beside_edges = REDUCTIONS[name]
    layer = pyg.GENConv(5, 6, edge_dim=columns, bias=True, norm=None, **kwargs).double()
    edge = () if columns is None else (features(columns),)
    optimised_alike(layer, *graph(), *edge)
    assert taken == [columns is None or beside_edges]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("edges", [0, 1])
def test_with_hardly_an_edge(name, edges):
    make, columns = LAYERS[name]
    edge = () if columns is None else (features(columns, edges),)
    optimised_alike(make().double(), *graph(edges=edges), *edge)


BIPARTITE = {
    "gated": lambda **k: pyg.ResGatedGraphConv((5, 4), 6, edge_dim=3, **k),
    "crystal": lambda **k: pyg.CGConv((5, 4), dim=3, **k),
    "film": lambda **k: pyg.FiLMConv((5, 4), 6, **k),
    "softened": lambda **k: pyg.GENConv((5, 4), 6, edge_dim=3, norm=None, **k),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_between_two_kinds_of_nodes(name, taken):
    x, edge_index = graph()
    edge_index[1] %= 7
    pair = (x, torch.randn(7, 4).double())
    layer = BIPARTITE[name]().double()
    args = () if name == "film" else (features(),)
    optimised_alike(layer, pair, edge_index, *args)
    assert taken == [True]


@pytest.mark.parametrize("name", BIPARTITE)
def test_two_features_of_nodes_against_the_flow(name):
    x, edge_index = graph()
    layer = BIPARTITE[name](flow="target_to_source").double()
    args = () if name == "film" else (features(),)
    optimised_alike(layer, (x, x[:, :4].cos()), edge_index, *args)


def test_gen_conv_without_features_of_destinations(taken):
    x, edge_index = graph()
    layer = pyg.GENConv(5, 6, norm=None).double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for size in (None, (12, 14)):
        found = ours((x, None), edge_index, size=size)
        expected = layer((x, None), edge_index, size=size)
        torch.testing.assert_close(found, expected)
    assert taken == [True, True]


@pytest.fixture
def at_once(monkeypatch):
    """Whether FiLM's relations were summed at once, call by call."""
    calls = []

    def counted(*args):
        out = summed_relations(*args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(gating, "summed_relations", counted)
    return calls


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_film_conv_of_relations(aggr, flow, taken, at_once):
    layer = pyg.FiLMConv(5, 6, num_relations=4, aggr=aggr, flow=flow).double()
    optimised_alike(layer, *graph(), torch.arange(40) % 3)  # one has no edge
    assert at_once == [True] and not taken


def test_film_conv_of_relations_between_two_kinds_of_nodes(at_once):
    x, edge_index = graph()
    layer = pyg.FiLMConv((5, 4), 6, num_relations=3).double()
    optimised_alike(layer, (x, x[:, :4].cos()), edge_index, torch.arange(40) % 3)
    assert at_once == [True]


def test_second_derivatives_of_relations(at_once):
    x, edge_index = graph()
    ours = gnnaccel.optimize(pyg.FiLMConv(5, 2, num_relations=2).double())
    x = x.detach()[:, :5].requires_grad_()
    kinds = torch.arange(40) % 2
    assert torch.autograd.gradgradcheck(lambda x: ours(x, edge_index, kinds), (x,))
    assert all(at_once)


class Louder(pyg.FiLMConv):
    def forward(self, x, edge_index, edge_type):
        return 2 * super().forward(x, edge_index, edge_type)


@pytest.mark.parametrize(
    ("make_layer", "kinds", "expected"),
    [
        # PyG ignores edges of other types.
        (lambda: pyg.FiLMConv(5, 6, 2), torch.arange(40) % 3, [False]),
        (lambda: pyg.FiLMConv(5, 6, 2), torch.arange(40) % 3 - 1, [False]),
        (lambda: pyg.FiLMConv(5, 6, 2), (torch.arange(40) % 2).double(), []),
        (lambda: pyg.FiLMConv(5, 6, 2, aggr="max"), torch.arange(40) % 2, []),
        (lambda: pyg.FiLMConv(5, 6, 2, act=None), torch.arange(40) % 2, []),
        (lambda: Louder(5, 6, 2), torch.arange(40) % 2, []),
        (
            lambda: pyg.FiLMConv(5, 6, 2, nn=nn.Sequential(nn.Linear(5, 12))),
            torch.arange(40) % 2,
            [False],
        ),
    ],
)
def test_relations_that_are_summed_one_by_one(make_layer, kinds, expected, at_once):
    optimised_alike(make_layer().double(), *graph(), kinds)
    assert at_once == expected


def _replace(maps, number, linear):
    maps[number] = linear


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: [_replace(c.lins, i, nn.Linear(5, 6)) for i in (0, 1)], True),
        (lambda c: _replace(c.lins, 1, nn.Linear(5, 6)), False),
        (lambda c: _replace(c.films, 1, nn.Linear(5, 12, bias=False)), False),
        (lambda c: c.lins.pop(1), False),
        (lambda c: c.films.pop(1), False),
        (lambda c: setattr(c, "num_relations", 3), False),
    ],
)
def test_maps_of_relations_that_were_replaced(change, expected, at_once):
    layer = pyg.FiLMConv(5, 6, num_relations=2)
    change(layer)
    optimised_alike(layer.double(), *graph(), torch.arange(40) % 2)
    assert at_once == [expected]


@pytest.mark.parametrize("change", [nn.Linear(5, 12), nn.Linear(5, 13).double()])
def test_pyg_words_what_is_wrong_with_maps_of_relations(change):
    layer = pyg.FiLMConv(5, 6, num_relations=2).double()
    layer.films[1] = change
    x, edge_index = graph()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    error = assert_alike(layer, ours, x, edge_index, torch.arange(40) % 2)
    assert isinstance(error, Exception)


def test_hooks_on_maps_of_relations_run(at_once):
    layer = gnnaccel.optimize(pyg.FiLMConv(5, 6, num_relations=2).double())
    seen = []
    layer.lins[1].register_forward_hook(lambda *_: seen.append(1))
    layer(*graph(), torch.arange(40) % 2)
    assert seen and at_once == [False]


def test_relations_that_do_not_fit():
    ours = gnnaccel.optimize(pyg.FiLMConv(5, 6, num_relations=2).double())
    with pytest.raises(IndexError):
        ours(*graph(), torch.zeros(39, dtype=torch.long))
    with pytest.raises(AssertionError):
        ours(*graph())


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"eps": 0.0, "cached": True}, {"add_self_loops": False}]
)
def test_fa_conv_is_pygs(kwargs, flow, taken):
    x, edge_index = graph()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.FAConv(5, flow=flow, **kwargs)

        def forward(self, x, edge_index):
            out, (_, alpha) = self.conv(
                x, x.cos(), edge_index, return_attention_weights=True
            )
            return torch.cat([out, alpha.unsqueeze(1).expand(-1, 5)])

    optimised_alike(Layer().double(), x, edge_index)
    assert taken == [True] * (flow == "source_to_target")


def test_fa_conv_with_weights_and_dropout(taken):
    x, edge_index = graph()
    weight = torch.rand(40).double().requires_grad_()
    layer = pyg.FAConv(5, normalize=False).double()
    optimised_alike(layer, x, x + 1, edge_index, weight)
    dropping = pyg.FAConv(5, normalize=False, dropout=0.5).double()
    ours = gnnaccel.optimize(copy.deepcopy(dropping))
    torch.manual_seed(3)
    expected = dropping(x, x, edge_index, weight)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, x, edge_index, weight), expected)
    assert taken == [True, True]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(name, dtype, taken):
    layer, edge = built(name)
    x, edge_index = graph()
    low = gnnaccel.optimize(copy.deepcopy(layer)).to(dtype)
    edge = tuple(e.to(dtype) for e in edge)
    rounded = copy.deepcopy(low).double()
    gnnaccel.restore(rounded)
    found = low(x.to(dtype), edge_index, *edge)
    expected = rounded(x.to(dtype).double(), edge_index, *(e.double() for e in edge))
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert taken == ([True] if dtype == torch.float32 else [])


class Leaky(nn.Module):
    def forward(self, x):
        return F.leaky_relu(x)


@pytest.mark.parametrize("act", [nn.Tanh(), torch.relu, Leaky(), "hooked"])
def test_another_function_at_the_gate_goes_the_other_way(act, taken):
    for make, own in (
        (lambda act: pyg.ResGatedGraphConv(5, 6, act=act), nn.Sigmoid),
        (lambda act: pyg.FiLMConv(5, 6, act=act), nn.ReLU),
    ):
        given = act
        if act == "hooked":
            given = own()
            given.register_forward_hook(lambda module, args, out: 2 * out)
        if own is nn.ReLU and act is torch.relu:
            continue
        optimised_alike(make(given).double(), *graph())
    assert not any(taken)


def test_film_conv_without_a_function(taken):
    optimised_alike(pyg.FiLMConv(5, 6, act=None).double(), *graph())
    assert taken == [False]


class Doubled(pyg.CGConv):
    def message(self, x_i, x_j, edge_attr):
        return 2 * super().message(x_i, x_j, edge_attr)


class Updated(pyg.CGConv):
    def update(self, inputs):
        return inputs + 1


class Before(pyg.CGConv):
    """The same message of other features."""

    def forward(self, x, edge_index):
        return super().forward(x.tanh(), edge_index)


def test_subclasses(taken):
    for cls in (Doubled, Updated):
        assert gating.gate_of(cls) is None
        optimised_alike(cls(5).double(), *graph())
    assert taken == []
    optimised_alike(Before(5).double(), *graph())
    assert taken == [True]


def test_hooks_see_messages(taken):
    x, edge_index = graph()
    layer = gnnaccel.optimize(pyg.CGConv(5).double())
    seen = []
    handle = layer.register_message_forward_hook(
        lambda module, args, out: seen.append(out)
    )
    hooked = layer(x, edge_index)
    assert seen[0].shape == (40, 5) and taken == []
    handle.remove()
    torch.testing.assert_close(layer(x, edge_index), hooked)
    assert taken == [True]
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = torch.ones(40).double(), False
    torch.testing.assert_close(layer(x, edge_index), hooked)
    assert taken == [True]


def test_a_hook_on_a_linear_layer_sees_every_edge(taken):
    layer = pyg.CGConv(5).double()
    layer.lin_f.register_forward_hook(lambda module, args, out: 2 * out)
    optimised_alike(layer, *graph())
    assert taken == [False]


def test_a_message_that_is_replaced_later(taken, monkeypatch):
    x, edge_index = graph()
    layer = gnnaccel.optimize(pyg.CGConv(5).double())
    layer(x, edge_index)
    monkeypatch.setattr(pyg.CGConv, "message", lambda self, x_i, x_j, edge_attr: x_j)
    assert layer(x, edge_index).shape == x.shape
    assert taken == [True]


def test_small_graphs_are_left_alone(taken, monkeypatch):
    monkeypatch.setattr(worth, "WORTH_GRAPH", 1 << 17)
    optimised_alike(pyg.CGConv(5).double(), *graph())
    assert taken == []


def test_errors_are_pygs():
    x, edge_index = graph()
    for layer, args in (
        (pyg.ResGatedGraphConv(5, 6), (features(),)),
        (pyg.ResGatedGraphConv(5, 6, edge_dim=3), ()),
        (pyg.CGConv(5, dim=3), ()),
        (pyg.CGConv(5), (features(),)),
        (pyg.GENConv(5, 6), (features(),)),
        (pyg.FAConv(5), (x, edge_index, torch.rand(40))),
    ):
        ours = gnnaccel.optimize(copy.deepcopy(layer).double())
        with pytest.raises((RuntimeError, AssertionError)) as expected:
            layer.double()(x, edge_index, *args)
        with pytest.raises(type(expected.value)):
            ours(x, edge_index, *args)


def test_an_index_out_of_range():
    x, edge_index = graph()
    edge_index[0, 3] = 12
    layer = pyg.CGConv(5).double()
    for each in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        with pytest.raises(IndexError):
            each(x, edge_index)


@pytest.mark.parametrize("name", ["gated_edges", "crystal_edges", "film", "softened"])
def test_second_derivatives(name, taken):
    layer, edge = built(name)
    x, edge_index = graph(6, 12)
    edge = tuple(e[:12] for e in edge)
    layer = gnnaccel.optimize(layer)
    x = x.requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: layer(x.sin(), edge_index, *edge), (x,), atol=1e-4
    )
    assert all(taken)


def test_not_a_number_reaches_whom_it_reaches_in_pyg(taken):
    for name in LAYERS:
        layer, edge = built(name)
        x, edge_index = graph()
        x[3, 1] = torch.nan
        optimised_alike(layer.eval(), x, edge_index, *edge)
    assert all(taken)


def test_copies_and_pickles(tmp_path, taken):
    x, edge_index = graph()
    layer = gnnaccel.optimize(pyg.CGConv(5).double())
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert isinstance(loaded, Lifting) and type(loaded) is type(layer)
    torch.testing.assert_close(loaded(x, edge_index), layer(x, edge_index))
    assert taken == [True, True]
    assert type(gnnaccel.restore(loaded)) is pyg.CGConv


def test_what_explain_says():
    model = nn.ModuleList([pyg.CGConv(5), pyg.FAConv(5)])
    said = str(gnnaccel.explain(gnnaccel.optimize(model)))
    assert "gated_sum: its messages inside the sum" in said
    assert "spmm: its message is a row times a weight" in said


@pytest.mark.parametrize("name", ["gated", "crystal_edges", "film", "softened"])
def test_checkpointing(name, taken):
    """What is saved may be asked for once."""
    make, columns = LAYERS[name]
    x, edge_index = graph()
    edge = [] if columns is None else [features(columns)]
    stock = make().double()
    grads = []
    for layer in (stock, gnnaccel.optimize(copy.deepcopy(stock))):
        leaf = x.clone().requires_grad_()
        out = checkpoint(layer, leaf, edge_index, *edge, use_reentrant=False)
        out.square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    assert taken and all(taken)
