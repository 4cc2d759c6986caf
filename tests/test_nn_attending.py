"""AGNNConv, SuperGATConv, RGATConv and HEATConv beside PyG's own."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from layers import assert_alike, optimised_alike
from oracles import results

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import (
    agnn_conv,
    functions,
    heat_conv,
    rgat_conv,
    supergat_conv,
    worth,
)

RELATIONS = 3
CONFIGS = {
    "agnn": lambda **k: pyg.AGNNConv(**k),
    "agnn_fixed": lambda **k: pyg.AGNNConv(requires_grad=False, **k),
    "agnn_no_loops": lambda **k: pyg.AGNNConv(add_self_loops=False, **k),
    "supergat": lambda **k: pyg.SuperGATConv(4, 3, heads=2, **k),
    "supergat_sd": lambda **k: pyg.SuperGATConv(
        4, 3, heads=2, attention_type="SD", concat=False, **k
    ),
    "supergat_no_loops": lambda **k: pyg.SuperGATConv(
        4, 6, add_self_loops=False, bias=False, **k
    ),
    "heat": lambda **k: pyg.HEATConv(4, 3, 2, RELATIONS, 2, 5, 4, heads=2, **k),
    "heat_mean": lambda **k: pyg.HEATConv(
        4, 3, 2, RELATIONS, 2, 5, 4, heads=2, concat=False, **k
    ),
    "heat_bare": lambda **k: pyg.HEATConv(
        4, 3, 2, RELATIONS, 2, 5, 4, root_weight=False, bias=False, **k
    ),
    **{
        f"rgat_{name}": lambda kwargs=kwargs, **k: pyg.RGATConv(
            4, 3, RELATIONS, **kwargs, **k
        )
        for name, kwargs in {
            "across": {"heads": 2},
            "within": {"heads": 2, "attention_mechanism": "within-relation"},
            "bases": {"num_bases": 2, "concat": False, "heads": 2},
            "blocks": {"num_blocks": 2, "heads": 2, "bias": False},
            "edges": {"heads": 2, "edge_dim": 5},
            "edges_within": {
                "heads": 2,
                "edge_dim": 5,
                "attention_mechanism": "within-relation",
            },
        }.items()
    },
}


def make(name, n=9, edges=60, **kwargs):
    torch.manual_seed(0)
    layer = CONFIGS[name](**kwargs).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    edge_index = torch.randint(0, n - 1, (2, edges))  # the last node has no edge
    args = [torch.randn(n, 4).double(), edge_index]
    if name.startswith("heat"):
        args.append(torch.arange(n) % 2)
    if name.startswith(("rgat", "heat")):
        args.append(torch.randint(0, RELATIONS, (edges,)))
    if "edges" in name or name.startswith("heat"):
        args.append(torch.randn(edges, 5).double().requires_grad_())
    return layer, args


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Counts how often the fused path was taken."""
    calls = []

    def count(owner, name):
        inner = getattr(owner, name)

        def counted(*args):
            calls.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, counted)

    count(agnn_conv, "attend")
    count(rgat_conv, "attend")
    count(supergat_conv.SuperGATConv, "_propagated")
    count(heat_conv.HEATConv, "_attended")
    return calls


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", CONFIGS)
def test_is_pygs(name, flow, taken):
    layer, args = make(name, flow=flow)
    optimised_alike(layer, *args)
    assert taken


@pytest.mark.parametrize("name", CONFIGS)
def test_in_float32(name, taken):
    layer, args = make(name)
    args = [a.float().detach() if a.is_floating_point() else a for a in args]
    stock = copy.deepcopy(layer)
    ours = gnnaccel.optimize(layer.float())
    wide = [a.double() if a.is_floating_point() else a for a in args]
    torch.testing.assert_close(ours(*args).double(), stock(*wide), rtol=1e-4, atol=1e-5)
    assert taken


@pytest.mark.parametrize("edges", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_hardly_an_edge(name, edges):
    layer, args = make(name, edges=edges)
    optimised_alike(layer, *args)


@pytest.mark.parametrize("name", CONFIGS)
def test_second_derivatives(name, taken):
    layer, (x, *rest) = make(name, edges=24)
    ours = gnnaccel.optimize(layer)
    rest = [a.detach() for a in rest]
    assert torch.autograd.gradgradcheck(lambda x: ours(x, *rest), (x.requires_grad_(),))
    assert taken


@pytest.mark.parametrize("name", ["supergat", "supergat_sd", "rgat_across", "heat"])
def test_dropout_drops_the_same_shares(name, taken):
    layer, args = make(name, dropout=0.5)
    layer.train()
    if name.startswith("super"):
        # Its negative samples are drawn by NumPy.
        args.append(torch.randint(0, 9, (2, 7)))
    found = []
    for module in (layer, gnnaccel.optimize(copy.deepcopy(layer))):
        torch.manual_seed(4)
        x = args[0].clone().requires_grad_()
        found.append(results(module, (x, *args[1:]), dict(module.named_parameters())))
        if name.startswith("super"):
            found[-1]["loss"] = module.get_attention_loss()
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value)
    assert taken


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mode": "multiplicative-self-attention", "dim": 2},
        {"mod": "scaled"},
        {"mod": "f-additive"},
        {"aggr": "mean"},
    ],
)
def test_other_kinds_of_rgat_are_pygs(change):
    torch.manual_seed(0)
    layer = pyg.RGATConv(4, 3, RELATIONS, heads=2, **change).double()
    with torch.no_grad():
        # PyG leaves these as memory was.
        for name in ("l1", "b1", "l2", "b2"):
            getattr(layer, name).normal_()
    _, args = make("rgat_across")
    ours = optimised_alike(layer, *args)
    assert isinstance(ours.why_not_fused(), str)


def test_attention_weights_are_pygs():
    layer, args = make("rgat_across")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    expected = layer(*args, return_attention_weights=True)
    found = ours(*args, return_attention_weights=True)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][1], expected[1][1])


def test_few_edges_for_the_relations_are_left_to_pyg(taken):
    layer, args = make("rgat_across", edges=2)
    optimised_alike(layer, *args)
    assert not taken


@pytest.mark.parametrize("name", ["agnn", "supergat", "rgat_across"])
def test_changes_in_place_are_seen(name):
    layer, args = make(name)
    ours = optimised_alike(layer, *args)
    args[1][:, :20] = args[1][:, :20].flip(0)
    torch.testing.assert_close(ours(*args), layer(*args))
    if name.startswith("rgat"):
        args[2][:20] = (args[2][:20] + 1) % RELATIONS
        torch.testing.assert_close(ours(*args), layer(*args))


class Halved(pyg.SuperGATConv):
    def message(self, edge_index_i, x_i, x_j, size_i):
        return super().message(edge_index_i, x_i, x_j, size_i) / 2


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("name", ["agnn", "supergat", "rgat_across", "heat"])
def test_errors_are_pygs(name, end):
    layer, args = make(name)
    args[1][end, 2] = 99
    assert isinstance(
        assert_alike(layer, gnnaccel.optimize(copy.deepcopy(layer)), *args), Exception
    )


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: pyg.GENConv(4, 6, edge_dim=5),
        lambda: Halved(4, 3, heads=2),
    ],
)
def test_the_softmax_of_other_layers_is_ours(make_layer, monkeypatch):
    monkeypatch.setattr(functions, "WORTH_SOFTMAX", 0)
    monkeypatch.setattr(worth, "WORTH_GRAPH", 1 << 30)  # not GENConv's own sum
    calls = []
    inner = functions.softmax_groups

    def counted(*args):
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(functions, "softmax_groups", counted)
    torch.manual_seed(0)
    layer = make_layer().double().eval()
    _, (x, edge_index, _, attr) = make("rgat_edges")
    args = [x, edge_index]
    if isinstance(layer, pyg.GENConv):
        args.append(attr.detach())
    optimised_alike(layer, *args)
    assert calls


def test_self_loops_are_remembered():
    layer, args = make("supergat")
    seen = []
    ours = gnnaccel.optimize(layer)
    ours.register_propagate_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for _ in range(2):
        ours(*args)
    assert seen[0] is seen[1]
    args[1][0, 3] = args[1][1, 3]
    ours(*args)
    assert seen[2] is not seen[0]
