"""Polynomials of a graph: operators against dense matrices, layers against PyG."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import SQUARE, random_edges
from hypothesis import given
from hypothesis import strategies as st
from layers import optimised_alike
from oracles import compare, dense
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel
from gnnaccel import Graph, ops
from gnnaccel.kernels import linear, native
from gnnaccel.nn import filters, polynomial
from gnnaccel.nn.polynomial import Matrix, Step, expanded, filtered, summed
from gnnaccel.ops.adj import Adj

NODES, EDGES = 67, 600


def _matrix(weighted=True, transposed=False):
    """A graph and the same as a dense matrix; three nodes have no edges."""
    edge_index = random_edges(NODES - 3, NODES - 3, EDGES)
    weight = torch.rand(EDGES, dtype=torch.float64) / 9 if weighted else None
    weight = None if weight is None else weight.float().double()
    adj = Adj(Graph.of(edge_index, size=(NODES, NODES)), None, NODES, NODES)
    found = dense(
        edge_index,
        torch.ones(EDGES, dtype=torch.float64) if weight is None else weight,
        NODES,
        NODES,
    )

    def of(dtype):
        return Matrix(adj, None if weight is None else weight.to(dtype), transposed)

    return of, found.t() if transposed else found


def _leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _powers(matrix, x, count, chebyshev=False):
    """The terms ``t_k(A) x``, by their definition."""
    terms = [x, matrix @ x]
    while len(terms) < count:
        term = matrix @ terms[-1]
        terms.append(2 * term - terms[-2] if chebyshev else term)
    return terms[:count]


def _steps(matrix, x, steps):
    y = x
    for by, plus in steps:
        y = by * (matrix @ y) + plus * x
    return y


STEPS = {
    "one": [Step()],
    "power": [Step(), Step(), Step()],
    "pagerank": [Step(0.9, 0.1)] * 3,
    "sum": [Step(plus=1.0), Step(0.3, -0.1)],
}


def _compare_filter(dtype, kind, width, columns, bias=True, **options):
    of, matrix = _matrix(**options)
    args = [_leaf(NODES, width)]
    if columns:
        args += [_leaf(columns, width), _leaf(columns) if bias else None]

    def oracle(x, weight=None, bias=None):
        y = _steps(matrix, x, STEPS[kind])
        y = y if weight is None else y @ weight.t()
        return y if bias is None else y + bias

    for _ in range(2):  # constant weights are put in order at their second use
        compare(
            lambda x, *map: filtered(of(dtype), x, STEPS[kind], *map),
            oracle,
            tuple(args),
            dtype,
            absolute=False,
            slack=20,
        )


def _compare_expansion(dtype, count, width, columns, chebyshev, bias=True, **options):
    of, matrix = _matrix(**options)

    def ours(x, bias, *weights):
        return expanded(of(dtype), x, weights, bias, chebyshev)

    def oracle(x, bias, *weights):
        terms = _powers(matrix, x, count, chebyshev)
        out = sum(term @ w.t() for term, w in zip(terms, weights, strict=True))
        return out if bias is None else out + bias

    weights = [_leaf(columns, width) for _ in range(count)]
    args = (_leaf(NODES, width), _leaf(columns) if bias else None, *weights)
    for _ in range(2):
        compare(ours, oracle, args, dtype, absolute=False, slack=20)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("columns", [None, 16, 32])
@pytest.mark.parametrize("kind", STEPS)
def test_filters(isa, kind, columns, weighted):
    _compare_filter(torch.float32, kind, 16, columns, weighted=weighted)


@pytest.mark.parametrize("columns", [None, 5])
@pytest.mark.parametrize("kind", STEPS)
def test_filters_on_every_backend(backend, kind, columns):
    for dtype in (torch.float32, torch.float64):
        _compare_filter(dtype, kind, 16, columns, bias=False, transposed=True)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("chebyshev", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_expansions(isa, count, chebyshev, weighted):
    _compare_expansion(torch.float32, count, 32, 16, chebyshev, weighted=weighted)


@pytest.mark.parametrize("chebyshev", [True, False])
@pytest.mark.parametrize("width", [5, 16])
def test_expansions_on_every_backend(backend, width, chebyshev):
    for dtype in (torch.float32, torch.float64):
        _compare_expansion(dtype, 4, width, width, chebyshev, False, transposed=True)


@pytest.mark.parametrize("chebyshev", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_of_what_is_mapped_already(count, chebyshev):
    of, matrix = _matrix()

    def oracle(*xs):
        return sum(_powers(matrix, x, count, chebyshev)[k] for k, x in enumerate(xs))

    compare(
        lambda *xs: summed(of(torch.float64), xs, chebyshev),
        oracle,
        tuple(_leaf(NODES, 3) for _ in range(count)),
        absolute=False,
        slack=20,
    )


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
def test_each_sum_is_read_where_it_is_mapped(monkeypatch):
    """One kernel for each power of the graph: no sum is read again to be mapped."""
    calls = []
    for owner, name in ((native, "spmm_sum"), (linear, "spmm_linear")):
        kernel = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, _k=kernel, _n=name, **options: (
                calls.append(_n) or _k(*args, **options)
            ),
        )
    if native.isa() == "baseline":
        pytest.skip("torch multiplies faster there")
    of, _ = _matrix()
    x, weights = torch.randn(NODES, 16), [torch.randn(16, 16) for _ in range(4)]
    for leaf in (x, *weights):
        leaf.requires_grad_()
    expanded(of(torch.float32), x, weights).sum().backward()
    assert calls == ["spmm_linear"] * 6
    calls.clear()
    filtered(of(torch.float32), x, STEPS["power"], weights[0]).sum().backward()
    assert calls == ["spmm_sum", "spmm_sum", "spmm_linear"] * 2


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("wanted", range(1, 8))
def test_only_the_gradients_that_are_needed(wanted, width):
    of, matrix = _matrix()
    args = [torch.randn(NODES, width), torch.randn(width, width), torch.randn(width)]
    for k, leaf in enumerate(args):
        leaf.requires_grad_(bool(wanted >> k & 1))
    x, weight, bias = args
    for run in (
        lambda: filtered(of(torch.float32), x, STEPS["sum"], weight, bias),
        lambda: expanded(of(torch.float32), x, [weight, weight], bias),
    ):
        for leaf in args:
            leaf.grad = None
        for create in (False, True):
            leaves = [leaf for leaf in args if leaf.requires_grad]
            torch.autograd.grad(run().sum(), leaves, create_graph=create)
        run().sum().backward()
        assert [leaf.grad is not None for leaf in args] == [
            leaf.requires_grad for leaf in args
        ]


def test_all_orders_of_derivatives():
    of, _ = _matrix()
    matrix = of(torch.float64)
    x, first, second, bias = _leaf(NODES, 2), _leaf(3, 2), _leaf(3, 2), _leaf(3)
    for function, inputs in (
        (lambda x: filtered(matrix, x, STEPS["pagerank"]), (x,)),
        (lambda *a: filtered(matrix, a[0], STEPS["sum"], *a[1:]), (x, first, bias)),
        (
            lambda x, b, *w: expanded(matrix, x, w, b, chebyshev=True),
            (x, bias, first, second, first),
        ),
    ):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs, fast_mode=True)
        # gradgradcheck passes over gradients that are not there.
        firsts = [
            torch.autograd.grad(
                function(*inputs).sin().sum(), inputs, create_graph=create
            )
            for create in (False, True)
        ]
        torch.testing.assert_close(firsts[1], firsts[0])


@pytest.mark.parametrize("width", [16, 5])
def test_features_and_gradients_of_any_layout(width):
    of, matrix = _matrix()
    wide = torch.randn(width, 2 * NODES).t()[::2].requires_grad_()
    weights = [torch.randn(4, width).t().contiguous().t() for _ in range(3)]
    out = expanded(of(torch.float32), wide, weights, chebyshev=True)
    out = out.sum() + filtered(of(torch.float32), wide, STEPS["pagerank"]).sum()
    grad = torch.autograd.grad(out, wide)[0]
    x = wide.detach().double().requires_grad_()
    terms = _powers(matrix, x, 3, chebyshev=True)
    total = sum((t @ w.double().t()).sum() for t, w in zip(terms, weights, strict=True))
    total = total + _steps(matrix, x, STEPS["pagerank"]).sum()
    expected = torch.autograd.grad(total, x)[0]
    torch.testing.assert_close(out.double(), total, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-3)


# Layers

WIDTH = 6
BACK = {"flow": "target_to_source"}
LAYERS = {
    "sg": lambda out, **k: pyg.SGConv(WIDTH, out, 3, **k),
    "sg_no_loops": lambda out, **k: pyg.SGConv(
        WIDTH, out, add_self_loops=False, bias=False, **k
    ),
    "ssg": lambda out, **k: pyg.SSGConv(WIDTH, out, 0.2, 3, **k),
    "ssg_one": lambda out, **k: pyg.SSGConv(WIDTH, out, 0.0, 1, bias=False, **k),
    "tag": lambda out, **k: pyg.TAGConv(WIDTH, out, **k),
    "tag_plain": lambda out, **k: pyg.TAGConv(
        WIDTH, out, 1, bias=False, normalize=False, **k
    ),
    "cheb": lambda out, **k: pyg.ChebConv(WIDTH, out, 4, **k),
    "appnp": lambda out, **k: pyg.APPNP(3, 0.1, **k),
    "appnp_plain": lambda out, **k: pyg.APPNP(2, 1.0, normalize=False, **k),
}


@pytest.fixture
def taken(monkeypatch):
    """Which ways were taken."""
    found = []
    for module, name in (
        (filters, "filtered"),
        (filters, "expanded"),
        (filters, "summed"),
    ):
        function = getattr(module, name)

        def spy(*args, _function=function, _name=name, **options):
            found.append(_name)
            return _function(*args, **options)

        monkeypatch.setattr(module, name, spy)
    return found


def _layer(name, out=WIDTH, **kwargs):
    layer = LAYERS[name](out, **kwargs).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def _inputs(weighted=False, learnt=False):
    x = torch.randn(13, WIDTH, dtype=torch.float64)
    edge_index = SQUARE["unsorted"].edge_index.long()
    weight = ()
    if weighted:
        weight = torch.rand(edge_index.size(1), dtype=torch.float64) + 0.1
        weight = (weight.requires_grad_(learnt),)
    return x, edge_index, *weight


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("name", LAYERS)
def test_every_graph(name, graph):
    case = SQUARE[graph]
    if name == "cheb" and not case.num_src:
        pytest.skip("PyG asks for the largest of no weights")
    x = torch.randn(case.num_src, WIDTH, dtype=torch.float64)
    optimised_alike(_layer(name), x, case.edge_index.long())


@pytest.mark.parametrize("weight", ["none", "constant", "learnt"])
@pytest.mark.parametrize("out", [3, WIDTH, 9])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_widths(taken, name, out, weight):
    x, *edges = _inputs(weight != "none", weight == "learnt")
    for _ in range(2):
        optimised_alike(_layer(name, out), x, *edges)
    assert bool(taken) == (weight != "learnt")
    assert ("summed" in taken) == (
        name[:3] in ("tag", "che") and out < WIDTH and weight != "learnt"
    )


@pytest.mark.parametrize("options", [BACK, {"aggr": "mean"}, {"aggr": "max"}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_flow_and_aggregation(taken, name, options):
    x, edge_index = _inputs()
    layer = _layer(name, **options)
    ours = optimised_alike(layer, x, edge_index)
    if options is BACK and name == "ssg":
        assert taken
    if "aggr" in options:
        assert not taken
    assert isinstance(ours, (filters.Filter, gnnaccel.nn.ChebConv))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", ["sg", "ssg", "tag", "cheb", "appnp"])
def test_what_wants_gradients(taken, name, wants, frozen):
    """Sums of constant features are kept for the maps' gradients, not made again."""
    x, edge_index = _inputs()
    stock = _layer(name)
    stock.requires_grad_(not frozen)
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    found = []
    for layer in (stock, ours):
        leaf = x.clone().requires_grad_(wants)
        out = layer(leaf, edge_index)
        if out.requires_grad:
            out.square().sum().backward()
        found.append([out.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b)
    assert bool(taken) == (wants or frozen or name == "appnp")


@pytest.mark.parametrize("name", ["sg", "ssg", "appnp"])
def test_what_a_layer_caches_is_pygs(name):
    x, edge_index = _inputs()
    stock = _layer(name, cached=True)
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    x.requires_grad_()
    for factor in (1, 2):
        torch.testing.assert_close(
            ours(factor * x, edge_index), stock(factor * x, edge_index)
        )
    kept = {"sg": "_cached_x", "ssg": "_cached_h", "appnp": "_cached_edge_index"}[name]
    for a, b in zip(
        torch.utils._pytree.tree_leaves(getattr(ours, kept)),
        torch.utils._pytree.tree_leaves(getattr(stock, kept)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    gnnaccel.restore(ours)
    torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))


def test_dropout_of_edges_is_pygs(taken):
    x, edge_index = _inputs()
    stock = _layer("appnp", dropout=0.5)
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    outs = []
    for layer in (stock, ours):
        torch.manual_seed(3)
        outs.append(layer(x, edge_index))
    torch.testing.assert_close(*outs)
    assert not taken
    torch.testing.assert_close(ours.eval()(x, edge_index), stock.eval()(x, edge_index))
    assert taken


@pytest.mark.parametrize("name", ["sg", "ssg", "tag", "cheb"])
def test_hooks_of_maps_are_called(taken, name):
    x, edge_index = _inputs()
    layer = _layer(name)
    linear = layer.lins[0] if hasattr(layer, "lins") else layer.lin
    linear.register_forward_hook(lambda module, args, out: 2 * out)
    optimised_alike(layer, x, edge_index)
    assert not taken


class Halved(pyg.SGConv):
    def message(self, x_j, edge_weight):
        return 0.5 * edge_weight.view(-1, 1) * x_j


class Doubled(pyg.TAGConv):
    def update(self, out):
        return 2 * out


class Shifted(pyg.SSGConv):
    def propagate(self, edge_index, **kwargs):
        return 1 + super().propagate(edge_index, **kwargs)


class Plain(pyg.SGConv):
    """Changes nothing."""


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: Halved(WIDTH, 4, 2), False),
        (lambda: Doubled(WIDTH, 8, 2), False),
        (lambda: Shifted(WIDTH, 8, 0.5, 2), False),
        (lambda: Plain(WIDTH, 8, 2), True),
    ],
)
def test_subclasses(taken, make, known):
    x, edge_index = _inputs()
    optimised_alike(make().double(), x, edge_index)
    assert bool(taken) == known


def test_methods_of_an_instance(taken):
    x, edge_index = _inputs()
    x.requires_grad_()
    layer = _layer("ssg")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    ours.explain = True
    ours.explain = None  # leaves PyG's own on the instance
    torch.testing.assert_close(ours(x, edge_index), layer(x, edge_index))
    assert taken
    taken.clear()
    for each in (layer, ours):
        each.propagate = lambda edge_index, x, **kwargs: x + 1
    torch.testing.assert_close(ours(x, edge_index), layer(x, edge_index))
    assert not taken


def test_a_message_that_is_replaced_later(taken, monkeypatch):
    x, edge_index = _inputs()
    x.requires_grad_()
    layer = _layer("ssg")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    monkeypatch.setattr(pyg.SSGConv, "message", lambda self, x_j, edge_weight: 2 * x_j)
    torch.testing.assert_close(ours(x, edge_index), layer(x, edge_index))
    assert not taken


@pytest.mark.parametrize("name", ["sg", "appnp"])
def test_half_types_and_autocast_are_left_to_products(taken, name):
    x, edge_index = _inputs()
    x = x.float().requires_grad_()
    ours = gnnaccel.optimize(_layer(name).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours(x, edge_index)
    ours.bfloat16()(x.bfloat16(), edge_index)
    assert not taken


def test_features_that_a_filter_does_not_need_may_change():
    x, edge_index = _inputs()
    stock = _layer("appnp")
    found = []
    for layer in (stock, gnnaccel.optimize(copy.deepcopy(stock))):
        leaf = x.clone().requires_grad_()
        before = leaf * 1
        out = layer(before, edge_index)
        before.add_(1)
        found.append(torch.autograd.grad(out.sin().sum(), leaf)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.SGConv(WIDTH, 8, 0),
        lambda: pyg.TAGConv(WIDTH, 8, 0),
        lambda: pyg.APPNP(0, 0.1),
    ],
)
def test_no_steps(make):
    optimised_alike(make().double(), *_inputs())


@given(
    steps=st.lists(
        st.tuples(
            st.integers(-8, 8).map(lambda k: k / 4), st.sampled_from([0.0, 1.0, -0.5])
        ),
        min_size=1,
        max_size=4,
    ),
    columns=st.sampled_from([None, 1, 16]),
    width=st.sampled_from([1, 16]),
)
def test_any_steps(steps, columns, width):
    of, matrix = _matrix()
    steps = [Step(*step) for step in steps]
    args = (_leaf(NODES, width), *([_leaf(columns, width)] if columns else []))

    def oracle(x, weight=None):
        y = _steps(matrix, x, steps)
        return y if weight is None else y @ weight.t()

    compare(
        lambda x, *map: filtered(of(torch.float32), x, steps, *map),
        oracle,
        args,
        torch.float32,
        absolute=False,
        floor=1e-3,
        slack=50,
    )


@pytest.mark.parametrize("name", ["reference", "native"])
def test_memory_of_the_backward_pass(name):
    """Of features, only those that came in are kept for it."""
    if ops.backends()[name] is not None:
        pytest.skip(str(ops.backends()[name]))
    of, _ = _matrix()
    x = torch.randn(NODES, 16, requires_grad=True)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(5)]
    kept = []
    with (
        ops.backend(name),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t) or t, lambda t: t
        ),
    ):
        polynomial.expanded(of(torch.float32), x, weights)
    assert sorted(t.numel() for t in kept) == [256] * 5 + [NODES * 16]
