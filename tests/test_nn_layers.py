"""The layers against PyG's in float64: outputs and every gradient, on the grid."""

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, WIDTHS, cases, random_edges
from hypothesis import given
from hypothesis import strategies as st
from layers import (
    ATTENTION,
    CONFIGS,
    UNFUSED,
    assert_alike,
    compare_layers,
    inputs,
    make,
)
from oracles import DTYPES
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel.nn
from gnnaccel import ops

# One of each way of computing, where the whole table would say nothing more.
KINDS = (
    "gcn",
    "gcn_weighted",
    "gcn_plain_weighted",
    "sage",
    "sage_max",
    "graph_weighted",
    "gin_train_eps",
    "gine",
    "gine_dim_constant",
    "gat_heads",
    "gatv2_heads",
    "transformer_heads",
)


def _compare(name, case, width=5, fout=4, dtype=torch.float64, **options):
    config = (CONFIGS | UNFUSED)[name]
    stock, ours = make(config, width, fout)
    args = inputs(config, case, width)
    return compare_layers(stock, ours, args, dtype, absolute=config.absolute, **options)


def _repeats(route, name):
    """Whether the table of configurations was told all of this by another route."""
    return route != "auto" and name not in KINDS


def _fout(route):
    """For large tensors, more columns out than in: there the sum goes first."""
    return 6 if route == "large" else 4


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_graph(route, name, graph):
    if _repeats(route, name):
        pytest.skip("by the default route only")
    _compare(name, SQUARE[graph], fout=_fout(route))


@pytest.mark.parametrize("graph", BIPARTITE)
@pytest.mark.parametrize(
    "name", [n for n, c in CONFIGS.items() if c.bipartite and "flow" not in c.kwargs]
)
def test_every_bipartite_graph(route, name, graph):
    if _repeats(route, name):
        pytest.skip("by the default route only")
    _compare(name, BIPARTITE[graph], fout=_fout(route))


@pytest.mark.parametrize("name", UNFUSED)
def test_what_is_not_fused_is_pygs(name):
    _compare(name, SQUARE["sorted"])


@pytest.mark.parametrize("name", KINDS)
def test_every_backend(backend, name):
    for graph in ("unsorted", "double_loops", "isolated", "int32"):
        _compare(name, SQUARE[graph])


@pytest.mark.parametrize("fout", [1, 64])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", KINDS)
def test_every_width(name, width, fout):
    """Wide to narrow and narrow to wide: the order of the two products may differ."""
    _compare(name, SQUARE["unsorted"], width, fout)


@pytest.mark.parametrize("width", [5, 65])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_dtype(route, name, dtype, width):
    if _repeats(route, name) or (route != "auto" and width != 5):
        pytest.skip("by the default route only")
    if name == "sage_project_max" and dtype != torch.float32:
        pytest.skip("rounding after the projection makes and breaks ties")
    # In half precision each product of the layer rounds its inputs again.
    slack = 5 if dtype == torch.float32 else 16
    _compare(name, SQUARE["unsorted"], width, 3, dtype, slack=slack)


@pytest.mark.parametrize("name", CONFIGS)
def test_inputs_that_need_no_gradient(name):
    stock, ours = make(name)
    args = inputs(name, SQUARE["unsorted"], grad=False)
    found = compare_layers(stock, ours, args, absolute=CONFIGS[name].absolute)
    assert not any("args" in key for key in found)
    for layer in (stock, ours):
        layer.requires_grad_(False)
    compare_layers(stock, ours, args, absolute=CONFIGS[name].absolute)
    found = compare_layers(
        stock,
        ours,
        inputs(name, SQUARE["unsorted"]),
        absolute=CONFIGS[name].absolute,
    )
    assert "grad of args[0]" in found


@pytest.mark.parametrize("name", ["gcn_weighted", "graph_weighted", "graph_max"])
def test_only_the_weight_needs_a_gradient(name):
    stock, ours = make(name)
    for layer in (stock, ours):
        layer.requires_grad_(False)
    x, edge_index, weight = inputs(name, SQUARE["loops"])
    found = compare_layers(
        stock,
        ours,
        (x.detach(), edge_index, weight),
        absolute=CONFIGS[name].absolute,
    )
    assert found.keys() == {"out", "grad of args[2]"}


@pytest.mark.parametrize("layout", ["expanded", "transposed", "columns", "offset"])
@pytest.mark.parametrize("name", KINDS)
def test_layouts_of_x(route, name, layout):
    x = {
        "expanded": torch.randn(1, 5, dtype=torch.float64).expand(13, 5),
        "transposed": torch.randn(5, 13, dtype=torch.float64).t(),
        "columns": torch.randn(13, 10, dtype=torch.float64)[:, ::2],
        "offset": torch.randn(66, dtype=torch.float64)[1:].view(13, 5),
    }[layout].requires_grad_()
    stock, ours = make(name)
    args = (x, *inputs(name, SQUARE["unsorted"])[1:])
    compare_layers(stock, ours, args, absolute=CONFIGS[name].absolute)


@pytest.mark.parametrize("layout", ["column", "one", "expanded", "strided", "float64"])
@pytest.mark.parametrize(
    "name",
    ["gcn_weighted", "gcn_plain_weighted", "gcn_no_loops_weighted", "graph_weighted"],
)
def test_layouts_of_the_weight(name, layout):
    stock, ours = make(name)
    x, edge_index, weight = inputs(name, SQUARE["loops"])
    weight = weight.detach()
    weight = {
        "column": weight.view(-1, 1),
        "one": weight[:1],
        "expanded": weight[:1].expand_as(weight),
        "strided": weight.repeat_interleave(2)[::2],
        "float64": weight,
    }[layout].requires_grad_()
    if layout == "float64":
        # PyG promotes, or refuses, a weight wider than x.
        stock, ours, x = stock.float(), ours.float(), x.detach().float()
    assert_alike(stock, ours, x, edge_index, weight)


@pytest.mark.parametrize("shape", [(2, 13, 5), (1, 13, 5), (2, 3, 13, 5)])
@pytest.mark.parametrize("name", KINDS)
def test_leading_batch_dimension(name, shape):
    stock, ours = make(name)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_alike(stock, ours, x, *inputs(name, SQUARE["unsorted"])[1:])


@pytest.mark.parametrize("node_dim", [0, 1, -2, -1])
@pytest.mark.parametrize("shape", [(13, 5), (13, 2, 5), (2, 13, 5)])
@pytest.mark.parametrize("name", [k for k in KINDS if CONFIGS[k].cls not in ATTENTION])
def test_node_dim(name, shape, node_dim):
    stock, ours = make(name, node_dim=node_dim)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_alike(stock, ours, x, *inputs(name, SQUARE["unsorted"])[1:])


@pytest.mark.parametrize("name", ["sage", "sage_max", "graph_weighted", "gin"])
@pytest.mark.parametrize("graph", ["wide", "tall", "padded"])
def test_sizes_of_both_sides(name, graph):
    """``size`` given; a destination side without features; both; lists for tuples."""
    case = BIPARTITE[graph]
    stock, ours = make(name)
    (x, y), *rest = inputs(name, case)
    for pair in ((x, y), (x, None), [x, y]):
        for size in (case.size, list(case.size), torch.Size(case.size), None):
            assert_alike(stock, ours, pair, *rest, size=size)
    assert_alike(stock, ours, (x, None), *rest, size=(None, case.num_dst))


@pytest.mark.parametrize("name", ["sage", "graph_weighted"])
def test_sides_of_different_width(name):
    case = BIPARTITE["wide"]
    stock, ours = make(name, fin=(5, 3))
    (x, _), *rest = inputs(name, case)
    y = torch.randn(case.num_dst, 3, dtype=torch.float64, requires_grad=True)
    compare_layers(stock, ours, ((x, y), *rest))


@pytest.mark.parametrize("name", ["sage", "graph_weighted", "gin"])
def test_two_sides_under_reversed_flow(name):
    stock, ours = make(name, flow="target_to_source")
    for graph in ("wide", "tall"):
        args = inputs(name, BIPARTITE[graph], size=True)
        assert_alike(stock, ours, *args)
        case = BIPARTITE[graph]
        flipped = (args[0], case.edge_index.flip(0), *args[2:-1], case.size)
        assert_alike(stock, ours, *flipped)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("graph", ["loops", "isolated", "parallel"])
def test_first_and_second_derivatives(route, name, graph):
    _, ours = make(name, 2, 2)
    case = SQUARE[graph]
    x, edge_index, *rest = inputs(name, case, 2)
    if "max" in name:
        # Distinct, and no zero: a zero maximum counts one tie more.
        order = 1 + torch.randperm(x.numel()).double().view_as(x)
        x = order.requires_grad_()
    tensors = [x, *[t for t in rest if isinstance(t, torch.Tensor)]]

    def function(x, *weights):
        return ours(x, edge_index, *weights)

    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize("name", KINDS)
def test_second_derivatives_equal_pygs(route, name):
    """A gradient penalty on x, back to the parameters."""
    stock, ours = make(name, fout=_fout(route))
    args = inputs(name, SQUARE["double_loops"])
    found = []
    for layer in (stock, ours):
        x = args[0].detach().requires_grad_()
        out = layer(x, *args[1:])
        (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        found.append([slope, x.grad, *grads])
    assert len(found[0]) == len(found[1])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_poisoned_memory_and_deterministic_mode(route, poisoned, name):
    if _repeats(route, name):
        pytest.skip("by the default route only")
    for graph in ("unsorted", "isolated", "no_edges", "loops", "hub"):
        case = SQUARE[graph]
        _compare(name, case._replace(edge_index=case.edge_index.clone()))


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_are_bit_equal(name):
    _, ours = make(name, 9, 7)
    ours = ours.float()
    case = SQUARE["hub"]
    args = inputs(name, case, 9, grad=False)
    runs = []
    for _ in range(2):
        ours.zero_grad(set_to_none=True)
        x = args[0].float().requires_grad_()
        rest = [a.float() if isinstance(a, torch.Tensor) else a for a in args[2:]]
        out = ours(x, case.edge_index.clone(), *rest)
        out.square().sum().backward()
        grads = [p.grad for p in ours.parameters() if p.grad is not None]
        runs.append([out, x.grad, *grads])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    "name", ["sage_max", "sage_min", "graph_max", "gin_max", "gcn_max"]
)
def test_ties_share_the_gradient_as_in_pyg(route, name):
    """Small whole numbers, zeros among them, and whole weights: ties in most rows."""
    stock, ours = make(name)
    for layer in (stock, ours):
        for parameter in layer.parameters():
            parameter.data.round_()
    x = torch.randint(-1, 2, (13, 5)).double().requires_grad_()
    args = [x, SQUARE["unsorted"].edge_index]
    if CONFIGS[name].weighted:
        args.append(torch.randint(1, 3, (60,)).double().requires_grad_())
    assert_alike(stock, ours, *args)


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.weighted])
def test_nan_weights(name):
    stock, ours = make(name)
    x, edge_index, weight = inputs(name, SQUARE["loops"])
    weight = weight.detach().clone()
    weight[1] = float("nan")
    assert_alike(stock, ours, x, edge_index, weight.requires_grad_())


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", KINDS)
def test_special_features(name, special):
    stock, ours = make(name)
    x, *rest = inputs(name, SQUARE["unsorted"], grad=False)
    x[4, 2] = special
    for layer in (stock, ours):
        layer.requires_grad_(False)
    assert_alike(stock, ours, x, *rest)


@given(case=cases(square=True), name=st.sampled_from(sorted(CONFIGS)))
def test_any_graph(case, name):
    config = CONFIGS[name]
    stock, ours = make(config, 3, 2)
    compare_layers(stock, ours, inputs(config, case, 3), absolute=config.absolute)


@given(
    case=cases(), name=st.sampled_from(["sage", "sage_max", "graph_weighted", "gin"])
)
def test_any_bipartite_graph(case, name):
    config = CONFIGS[name]
    stock, ours = make(config, 3, 2)
    args = inputs(config, case, 3)
    if case.num_src == case.num_dst:
        args = ((args[0], args[0].detach() + 1), *args[1:])
    compare_layers(stock, ours, args, absolute=config.absolute)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_follows_pyg(name):
    """Twenty steps of Adam: the losses of both stay together."""
    case = ALL["unsorted"]
    losses = []
    for layer in make(name, 5, 4):
        torch.manual_seed(3)
        args = inputs(name, case, grad=False)
        args = (torch.randn(13, 5, dtype=torch.float64), *args[1:])
        if CONFIGS[name].weighted:
            args = (*args[:2], torch.linspace(0.1, 1, 60, dtype=torch.float64))
        target = torch.randn(layer(*args).shape, dtype=torch.float64)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (layer(*args) - target).square().mean()
            loss.backward()
            optimizer.step()
            history.append(float(loss))
        losses.append(history)
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", KINDS)
def test_edge_order_does_not_matter(name):
    _, ours = make(name)
    x, edge_index, *rest = inputs(name, SQUARE["unsorted"], grad=False)
    order = torch.randperm(60)
    shuffled = [w[order] if isinstance(w, torch.Tensor) else w for w in rest]
    first = ours(x, edge_index, *rest)
    second = ours(x, edge_index[:, order], *shuffled)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learnt", [False, True])
def test_a_stack_of_layers_shares_its_inputs(learnt):
    """Layers of every configuration on the same tensors, interleaved twice."""
    edge_index = random_edges(13, 13, 60, seed=9)
    x = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(60, dtype=torch.float64) + 0.1
    weight.requires_grad_(learnt)
    pairs = [(make(c), c.weighted) for c in CONFIGS.values() if not c.edged]
    for _ in range(3):
        for (stock, ours), weighted in pairs:
            assert_alike(stock, ours, x, edge_index, *([weight] if weighted else []))


def test_fused_by_default():
    """Else the whole file would compare PyG with PyG."""
    for name in CONFIGS:
        _, ours = make(name)
        if name in ("gcn_mean", "gcn_max"):
            # The folded normalisation has no kernel for these.
            assert "aggr" in ours.why_not_fused()
            continue
        assert ours.why_not_fused() is None, name
        assert isinstance(type(ours).fused_by, str)
    with ops.backend("reference"):
        _, ours = make("gcn")
        assert ours.why_not_fused() is None


def test_unfused_says_why():
    for name, config in UNFUSED.items():
        _, ours = make(config)
        reason = ours.why_not_fused()
        assert isinstance(reason, str), name
        assert "aggr" in reason, reason


@pytest.mark.parametrize(
    "layer",
    [
        gnnaccel.nn.SAGEConv(6, 6),
        gnnaccel.nn.GraphConv(6, 6),
        gnnaccel.nn.GINConv(torch.nn.Linear(6, 6)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_sum_keeps_no_features_for_the_backward_pass(layer):
    """Memory: of features, only the input outlives the forward pass."""
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, 6, requires_grad=True)
    kept = []

    def keep(tensor):
        if tensor.dim() == 2 and tensor.size(0) == case.num_src:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, case.edge_index)
    assert kept
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in kept)
