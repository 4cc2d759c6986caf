"""ops.gate.gated_sum against its formula, with PyG's own scatter and softmax."""

import pytest
import torch
import torch.nn.functional as F
from graphs import ALL, BIPARTITE, SQUARE
from oracles import compare
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import scatter, softmax

import gnnaccel.graph
from gnnaccel import Graph
from gnnaccel.kernels import native, reference
from gnnaccel.kernels.gate import Gates
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.gate import Kind, gated_sum

#: What the edge brings: nothing, its row, or that through a map, with and without bias.
FORMS = ("none", "plain", "mapped", "biased")
KINDS = {
    "sigmoid": Kind("sigmoid"),
    "crystal": Kind("crystal"),
    "film": Kind("film"),
    "softmax": Kind("softmax", 0.25),
    "constant": Kind("softmax", 0.25, constant=True),
}
CASES = [(kind, form) for kind in KINDS for form in FORMS]
CASES = [case for case in CASES if case[0] != "film" or case[1] == "none"]


def _tensors(case, name, form, width=5, depth=3):
    """Named float64 leaves for one call; the edge's features learn without a map."""
    terms = 1 if KINDS[name].name == "softmax" else 2
    shapes = {"x": (case.num_src, width)}
    if name in ("sigmoid", "crystal"):
        shapes["y"] = (case.num_src, width)
    if terms == 2:
        shapes["x_dst"] = (case.num_dst, width)
    else:
        shapes["t"] = (width,)
    if name in ("crystal", "film"):
        shapes["y_dst"] = (case.num_dst, width)
    mapped = form in ("mapped", "biased")
    if form != "none":
        shapes["edge"] = (case.num_edges, depth if mapped else terms * width)
    if mapped:
        shapes["map"] = (depth + (form == "biased"), terms * width)
    return {
        key: torch.randn(shape, dtype=torch.float64).requires_grad_(
            not (mapped and key == "edge")
        )
        for key, shape in shapes.items()
    }


def _oracle(case, kind, x, y=None, x_dst=None, y_dst=None, edge=None, map=None, t=None):
    src, dst = case.edge_index.long()
    if map is not None:
        rows = edge.size(1)
        edge = edge @ map[:rows] + (map[rows] if map.size(0) > rows else 0)
    if kind.name == "film":
        messages = (y_dst[dst] * x[src] + x_dst[dst]).relu()
    elif kind.name == "softmax":
        m = (x[src] + (0 if edge is None else edge)).relu() + kind.epsilon
        shares = softmax(m * t, dst, num_nodes=case.num_dst)
        messages = m * (shares.detach() if kind.constant else shares)
    else:
        a, b = (0, 0) if edge is None else edge.chunk(2, 1)
        gate = (x[src] + x_dst[dst] + a).sigmoid()
        if kind.name == "crystal":
            messages = gate * F.softplus(y[src] + y_dst[dst] + b)
        else:
            messages = gate * (y[src] + b)
    return scatter(messages, dst, 0, case.num_dst)


def _functions(case, name, tensors, graph=None):
    graph = Graph.of(case.edge_index, size=case.size) if graph is None else graph
    adj, kind, names = Adj(graph, None, *case.size), KINDS[name], list(tensors)

    def named(values):
        return dict(zip(names, values, strict=True))

    return (
        lambda *values: gated_sum(adj, kind, Gates(**named(values))),
        lambda *values: _oracle(case, kind, **named(values)),
    )


def _compare(case, name, form, dtype=torch.float64, graph=None, slack=30, **sizes):
    tensors = _tensors(case, name, form, **sizes)
    ours, oracle = _functions(case, name, tensors, graph)
    values = tuple(tensors.values())
    return compare(ours, oracle, values, dtype, absolute=False, slack=slack)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("name", ALL)
def test_every_graph(name, kind, form):
    _compare(ALL[name], kind, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 16, 17, 65, 130])
def test_every_form_of_the_kernels(isa, width, dtype):
    """Each instruction set and register tile."""
    for kind, form in CASES:
        _compare(BIPARTITE["wide"], kind, form, dtype, width=width)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_wide_indices(monkeypatch, kind, form):
    for module in (gnnaccel.graph, native, reference):
        monkeypatch.setattr(module, "index_dtype", lambda *sizes: torch.int64)
    case = BIPARTITE["wide"]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    assert graph.index_dtype == torch.int64
    _compare(case, kind, form, graph=graph)


@pytest.mark.parametrize("name", ["hub", "hub_source"])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_hub_is_cut_into_slices(isa, kind, form, name):
    _compare(ALL[name], kind, form, width=17)
    # Twenty thousand roundings in one sum of either sign.
    _compare(ALL[name], kind, form, torch.float32, width=17, slack=200)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("name", ["double_loops", "isolated"])
def test_derivatives(backend, name, kind, form):
    if kind == "constant":
        pytest.skip("its gradient is none of its sum")
    tensors = _tensors(ALL[name], kind, form, 2, 2)
    ours, _ = _functions(ALL[name], kind, tensors)
    assert gradcheck(ours, tuple(tensors.values()))
    assert gradgradcheck(ours, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_any_input_may_be_the_only_one_to_learn(kind, form):
    case = BIPARTITE["padded"]
    for name in _tensors(case, kind, form):
        if name == "edge" and form in ("mapped", "biased"):
            continue
        tensors = {
            k: v.detach().requires_grad_(k == name)
            for k, v in _tensors(case, kind, form).items()
        }
        ours, oracle = _functions(case, kind, tensors)
        values = tuple(tensors.values())
        if kind == "constant" and name == "t":
            continue  # PyG's has no gradient at all
        assert len(compare(ours, oracle, values, absolute=False, slack=30)) == 2


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_rows_that_are_views(kind, form):
    case = SQUARE["unsorted"]
    tensors = _tensors(case, kind, form)
    ours, oracle = _functions(case, kind, tensors)
    for spread in (
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: x.t().contiguous().t(),
    ):
        values = tuple(
            spread(x.detach()).requires_grad_(x.requires_grad) for x in tensors.values()
        )
        compare(ours, oracle, values, absolute=False, slack=30)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_what_is_not_finite_or_large(kind, form, odd):
    """It reaches whom it reaches in torch, forward and backward."""
    case = SQUARE["unsorted"]
    tensors = _tensors(case, kind, form, width=19)
    for name, x in tensors.items():
        if name in ("map", "edge", "t"):
            continue
        for sign in (1, -1):
            given = tensors | {name: x.detach().clone()}
            given[name][1, 3] = sign * odd
            given[name][2, 18] = sign * odd
            values = tuple(v.detach().requires_grad_() for v in given.values())
            if form in ("mapped", "biased"):
                values = tuple(
                    v.requires_grad_(k != "edge")
                    for k, v in zip(given, values, strict=True)
                )
            ours, oracle = _functions(case, kind, tensors)
            found, expected = ours(*values), oracle(*values)
            torch.testing.assert_close(found, expected, equal_nan=True)
            if odd in (float("inf"), -float("inf")):
                continue  # what is 0 times infinity depends on the order of factors
            learnt = [v for v in values if v.requires_grad]
            for a, b in zip(
                torch.autograd.grad(found.sum(), learnt, allow_unused=True),
                torch.autograd.grad(expected.sum(), learnt, allow_unused=True),
                strict=True,
            ):
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, equal_nan=True)
