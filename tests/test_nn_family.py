"""Layers whose messages are linear in the features: fused, beside PyG's own."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import BIPARTITE, SQUARE
from layers import assert_alike, optimised_alike
from torch import nn

import gnnaccel
from gnnaccel.kernels import linear, native
from gnnaccel.nn import SWAPS

FIN, FOUT = 6, 4
BACK = {"flow": "target_to_source"}


def network(*widths):
    steps = []
    for a, b in zip(widths, widths[1:], strict=False):
        steps += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*steps[:-1])


#: How to make each, for features of a width or of two.
LAYERS = {
    "cluster": lambda n, **k: pyg.ClusterGCNConv(n, FOUT, **k),
    "cluster_widens": lambda n, **k: pyg.ClusterGCNConv(n, 9, 0.3, **k),
    "cheb": lambda n, **k: pyg.ChebConv(n, FOUT, 4, **k),
    "cheb_one": lambda n, **k: pyg.ChebConv(n, FOUT, 1, bias=False, **k),
    "cheb_rw": lambda n, **k: pyg.ChebConv(n, FOUT, 2, normalization="rw", **k),
    "cheb_plain": lambda n, **k: pyg.ChebConv(n, FOUT, 3, normalization=None, **k),
    "le": lambda n, **k: pyg.LEConv(n, FOUT, **k),
    "le_widens": lambda n, **k: pyg.LEConv(n, 9, bias=False, **k),
    "mf": lambda n, **k: pyg.MFConv(n, FOUT, max_degree=4, **k),
    "mf_max": lambda n, **k: pyg.MFConv(n, FOUT, aggr="max", bias=False, **k),
    "eg": lambda n, **k: pyg.EGConv(n, 8, num_heads=4, num_bases=3, **k),
    "eg_all": lambda n, **k: pyg.EGConv(
        n,
        8,
        ["sum", "mean", "symnorm", "min", "max", "var", "std"],
        num_heads=2,
        add_self_loops=False,
        **k,
    ),
    "eg_loops": lambda n, **k: pyg.EGConv(n, 8, ["mean", "std"], bias=False, **k),
    "general": lambda n, **k: pyg.GeneralConv(n, FOUT, heads=2, **k),
    "general_mean": lambda n, **k: pyg.GeneralConv(
        n, FOUT, aggr="mean", l2_normalize=True, bias=False, **k
    ),
}
#: Their edges have features, three each.
EDGED = {
    "general_edges": lambda n, **k: pyg.GeneralConv(n, FOUT, 3, heads=2, **k),
    "general_ends": lambda n, **k: pyg.GeneralConv(
        n, FOUT, 3, directed_msg=False, aggr="mean", **k
    ),
    "gmm": lambda n, **k: pyg.GMMConv(n, FOUT, dim=3, kernel_size=2, **k),
    "gmm_sum": lambda n, **k: pyg.GMMConv(
        n, FOUT, dim=3, kernel_size=1, aggr="add", bias=False, **k
    ),
    "nn": lambda n, **k: pyg.NNConv(
        n, FOUT, nn.Linear(3, (n if type(n) is int else n[0]) * FOUT), **k
    ),
    "nn_deep": lambda n, **k: pyg.NNConv(
        n,
        FOUT,
        network(3, 5, (n if type(n) is int else n[0]) * FOUT),
        aggr="mean",
        root_weight=False,
        bias=False,
        **k,
    ),
}
WEIGHTED = ("cheb", "cheb_one", "cheb_rw", "le", "le_widens")
ONE_SIDED = ("cluster", "cheb", "eg")  # names begin with these


def fused(layer):
    """Whether PyG's own ``forward`` is not taken, whatever the input."""
    return type(layer) in SWAPS.values() and layer.why_not_fused() is None


def alike(layer, x, *args):
    """Compares, twice: what is remembered counts at the second call."""
    layer = layer.double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = optimised_alike(layer, x, *args)
    assert fused(ours)
    optimised_alike(layer, x, *args)


@pytest.fixture
def calls(monkeypatch):
    """How often our kernels summed neighbours."""
    found = []
    kernels = (
        (native, "spmm_sum"),
        (native, "spmm_extreme"),
        (linear, "spmm_linear"),
    )

    def spy(kernel):
        def called(*args, **options):
            found.append(kernel)
            return kernel(*args, **options)

        return called

    for owner, name in kernels:
        monkeypatch.setattr(owner, name, spy(getattr(owner, name)))
    return found


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("name", LAYERS)
def test_every_graph(name, graph):
    case = SQUARE[graph]
    if name.startswith("cheb") and not case.num_src:
        pytest.skip("PyG asks for the largest of no weights")
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    alike(LAYERS[name](FIN), x, case.edge_index.long())


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("name", EDGED)
def test_every_graph_with_features_of_edges(name, learnt, graph):
    case = SQUARE[graph]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    edge = torch.rand(case.num_edges, 3, dtype=torch.float64)
    alike(EDGED[name](FIN), x, case.edge_index.long(), edge.requires_grad_(learnt))


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights(name, learnt):
    for case in (SQUARE["unsorted"], SQUARE["isolated"]):
        x = torch.randn(case.num_src, FIN, dtype=torch.float64)
        # Away from 0, and from what makes a gradient cancel to nothing.
        weight = torch.rand(case.num_edges, dtype=torch.float64) + 0.1
        weight.requires_grad_(learnt)
        alike(LAYERS[name](FIN), x, case.edge_index.long(), weight)


@pytest.mark.parametrize("name", [n for n in LAYERS | EDGED])
def test_bipartite(name):
    if name.startswith(ONE_SIDED):
        pytest.skip("takes one kind of nodes")
    for case in BIPARTITE.values():
        x = (
            torch.randn(case.num_src, FIN, dtype=torch.float64),
            torch.randn(case.num_dst, 5, dtype=torch.float64),
        )
        edge = [torch.rand(case.num_edges, 3, dtype=torch.float64)]
        width = (FIN, 5)
        if name == "general_ends":  # PyG maps both ends by the sources' width
            width, x = (FIN, FIN), (x[0], torch.randn(case.num_dst, FIN).double())
        make = (LAYERS | EDGED)[name]
        args = edge if name in EDGED else []
        alike(make(width), x, case.edge_index.long(), *args)


@pytest.mark.parametrize("name", [n for n in LAYERS | EDGED])
def test_against_the_edges(name):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    edge = [torch.rand(case.num_edges, 3, dtype=torch.float64)] * (name in EDGED)
    layer = (LAYERS | EDGED)[name](FIN, **BACK).double()
    ours = optimised_alike(layer, x, case.edge_index.long(), *edge)
    assert fused(ours) == (not name.startswith("cluster"))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_signed(first, aggr):
    case = SQUARE["unsorted"]
    width = FIN if first else 2 * FIN
    x = torch.randn(case.num_src, width, dtype=torch.float64)
    pos, neg = case.edge_index.long().chunk(2, dim=1)
    for bias in (True, False):
        layer = pyg.SignedConv(FIN, FOUT, first, bias=bias, aggr=aggr)
        alike(layer, x, pos.contiguous(), neg.contiguous())
        layer = pyg.SignedConv(FIN, FOUT, first, aggr=aggr).double()
        other = torch.randn(case.num_dst, width, dtype=torch.float64)
        alike(layer, (x, other), pos.contiguous(), neg.contiguous())


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize("name", [n for n in LAYERS | EDGED] + ["signed"])
def test_the_kernels_are_reached(name, calls):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN)
    edge = [torch.rand(case.num_edges, 3)] * (name in EDGED)
    makers = LAYERS | EDGED | {"signed": lambda n: pyg.SignedConv(n, FOUT, True)}
    layer = gnnaccel.optimize(makers[name](FIN))
    more = [case.edge_index.long()] * (name == "signed")
    layer(x, case.edge_index.long(), *more, *edge)
    assert calls or name == "cheb_one"


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.ClusterGCNConv(FIN, FOUT, aggr="max"),
        lambda: pyg.ChebConv(FIN, FOUT, 3, aggr="mean"),
        lambda: pyg.LEConv(FIN, FOUT, aggr="max"),
        lambda: pyg.EGConv(FIN, 8, cached=True),
        lambda: pyg.GeneralConv(FIN, FOUT, aggr="max"),
        lambda: pyg.GeneralConv(FIN, FOUT, attention=True),
        lambda: pyg.SignedConv(FIN, FOUT, True, aggr="median"),
    ],
)
def test_what_is_left_to_pyg(make):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    layer = make().double()
    more = [case.edge_index.long()] * isinstance(layer, pyg.SignedConv)
    ours = optimised_alike(layer, x, case.edge_index.long(), *more)
    assert not fused(ours)


@pytest.mark.parametrize("maps", ["lins_l", "lins_r"])
def test_maps_of_degrees_that_were_replaced(maps):
    layer = LAYERS["mf"](FIN)
    getattr(layer, maps)[2] = nn.Linear(FIN, FOUT, bias=maps == "lins_r")
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    optimised_alike(layer.double(), x, case.edge_index.long())


def test_an_index_of_one_dimension_is_pygs_to_refuse():
    case = SQUARE["unsorted"]
    layer = EDGED["general_edges"](FIN).double()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    edge = torch.rand(case.num_edges, 3, dtype=torch.float64)
    error = assert_alike(layer, ours, x, case.edge_index[0].long(), edge)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.NNConv(FIN, FOUT, nn.Linear(3, FIN * FOUT), aggr="max"),
        lambda: pyg.NNConv(FIN, FOUT, network(3, 40, FIN * FOUT)),
        lambda: pyg.NNConv(FIN, FOUT, nn.Sequential(nn.Tanh(), nn.Linear(3, 24))),
        lambda: pyg.GMMConv(FIN, FOUT, 3, 2, separate_gaussians=True),
        lambda: pyg.GMMConv(FIN, FOUT, 3, 2, aggr="max"),
    ],
)
def test_what_is_left_to_pyg_with_features_of_edges(make):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    edge = torch.rand(case.num_edges, 3, dtype=torch.float64)
    ours = optimised_alike(make().double(), x, case.edge_index.long(), edge)
    assert not fused(ours)


@pytest.mark.parametrize("options", [{"lambda_max": 1.7}, {"lambda_max": None}])
@pytest.mark.parametrize("batched", [True, False])
def test_cheb_of_a_batch(options, batched):
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    batch = torch.zeros(case.num_src, dtype=torch.long) if batched else None
    highest = options["lambda_max"]
    if batched and highest is not None:
        highest = torch.tensor([highest]).double()
    layer = pyg.ChebConv(FIN, FOUT, 3)
    alike(layer, x, case.edge_index.long(), None, batch, highest)


@pytest.mark.parametrize("changed", ["edges", "weights"])
def test_cheb_sees_changes_in_place(changed):
    case = SQUARE["unsorted"]
    edge_index = case.edge_index.long().clone()
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    weight = torch.rand(case.num_edges, dtype=torch.float64)
    stock = pyg.ChebConv(FIN, FOUT, 3).double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    ours(x, edge_index, weight)
    if changed == "edges":
        edge_index[:, ::2] = edge_index[:, ::2].flip(0)
    else:
        weight[::2] *= 2
    torch.testing.assert_close(
        ours(x, edge_index, weight), stock(x, edge_index, weight)
    )


def _doubled(layer):
    for module in layer.modules():
        if type(module) in (nn.Linear, pyg.Linear):
            module.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


@pytest.mark.parametrize("name", LAYERS | EDGED)
def test_hooks_on_linear_layers(name):
    """ChebConv calls some of its layers past their hooks; so do we."""
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, FIN, dtype=torch.float64)
    edge = [torch.rand(case.num_edges, 3, dtype=torch.float64)] * (name in EDGED)
    layer = _doubled((LAYERS | EDGED)[name](FIN).double())
    optimised_alike(layer, x, case.edge_index.long(), *edge)


def test_weights_of_another_dtype_than_what_is_summed():
    """Under autocast, or past a hook, LEConv's rows aren't of the weights' dtype."""
    case = SQUARE["unsorted"]
    edge_index, x = case.edge_index.long(), torch.randn(case.num_src, FIN)
    weight = torch.rand(case.num_edges)
    stock = pyg.LEConv(FIN, FOUT)
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, out = stock(x, edge_index, weight), ours(x, edge_index, weight)
    torch.testing.assert_close(out, wanted, rtol=0.05, atol=0.05)
    for layer in (stock, ours):
        layer.lin1.register_forward_hook(lambda module, args, out: out.double())
    torch.testing.assert_close(
        ours(x, edge_index, weight), stock(x, edge_index, weight)
    )


def test_features_of_edges_that_do_not_fit():
    """GMMConv's one column isn't taken for all of them."""
    case = SQUARE["unsorted"]
    layer = gnnaccel.optimize(pyg.GMMConv(FIN, FOUT, dim=3, kernel_size=2))
    x = torch.randn(case.num_src, FIN)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        layer(x, case.edge_index.long(), torch.rand(case.num_edges, 1))
