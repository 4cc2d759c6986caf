"""Messages that are written down, with the linear map after them, against a formula."""

import pytest
import torch
from graphs import ALL
from oracles import compare
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel import Graph
from gnnaccel.kernels import memory, native
from gnnaccel.kernels.message import Parts
from gnnaccel.kernels.rows import message_rows
from gnnaccel.nn import written
from gnnaccel.ops.adj import Adj

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

DEPTH = 3
#: Which of (destinations, edges, a map of edges, a linear map, its bias) there are.
FORMS = {
    "sources": (False, False, False, False, False),
    "ends": (True, False, False, False, False),
    "edges": (True, True, False, False, False),
    "map": (False, True, True, False, False),
    "all": (True, True, True, True, True),
    "no_bias": (True, False, False, True, False),
}


def _ends(case):
    source, target = case.edge_index.long()
    adj = Adj(Graph.of(case.edge_index, size=case.size), None, *case.size)
    return written.Ends(adj, target, source)


def _arguments(case, form, width, columns=5):
    def leaf(wanted, *shape):
        return torch.randn(*shape, dtype=torch.float64) if wanted else None

    dst, edge, map_, linear, bias = FORMS[form]
    return (
        leaf(True, case.num_src, width),
        leaf(dst, case.num_dst, width),
        leaf(edge, case.num_edges, DEPTH if map_ else width),
        leaf(map_, DEPTH, width),
        leaf(linear, columns, width),
        leaf(bias, columns),
    )


def _ours(case, relu):
    ends = _ends(case)

    def function(x, x_dst, edge, map_, weight, bias):
        parts = Parts(x, edge, map_, None, x_dst)
        return written.messages(ends, parts, relu, weight, bias)

    return function


def _oracle(case, relu):
    source, target = case.edge_index.long()

    def function(x, x_dst, edge, map_, weight, bias):
        out = x[source]
        if x_dst is not None:
            out = out + x_dst[target]
        if edge is not None:
            out = out + (edge if map_ is None else edge @ map_)
        out = out.relu() if relu else out
        out = out if weight is None else out @ weight.t()
        return out if bias is None else out + bias

    return function


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_every_graph(name, form, relu):
    case = ALL[name]
    args = _arguments(case, form, 4)
    args = tuple(None if t is None else t.requires_grad_() for t in args)
    compare(_ours(case, relu), _oracle(case, relu), args, slack=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 16, 48, 64, 130])
@pytest.mark.parametrize("form", ["edges", "map", "no_bias"])
def test_widths(isa, form, width, dtype):
    case = ALL["unsorted"]
    args = tuple(
        None if t is None else t.requires_grad_() for t in _arguments(case, form, width)
    )
    compare(_ours(case, True), _oracle(case, True), args, dtype, slack=5)


@pytest.mark.parametrize("index_width", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["ends", "map"])
def test_every_thread_finds_its_rows(form, index_width):
    """Entries are dealt to threads, also those of one row."""
    nodes, edges = 50, 9000
    source = torch.randint(nodes, (edges,))
    for target in (
        torch.full((edges,), 7),
        torch.randint(nodes, (edges,)).sort().values,
        torch.randint(nodes, (edges,)),
    ):
        edge_index = torch.stack([source, target]).to(index_width)
        grouping = Graph.of(edge_index, size=(nodes, nodes)).rows
        x, x_dst, edge, map_, *_ = (
            None if t is None else t.float()
            for t in _arguments(ALL["unsorted"], form, 16)
        )
        x, x_dst = torch.randn(nodes, 16), torch.randn(nodes, 16)
        edge = None if edge is None else torch.randn(edges, DEPTH)
        found = message_rows(grouping, Parts(x, edge, map_, None, x_dst), True)
        expected = x[source] + x_dst[target]
        if edge is not None:
            expected = expected + edge @ map_
        torch.testing.assert_close(found, expected.relu(), rtol=1e-4, atol=1e-5)


def test_large_results_pass_the_caches(isa):
    edges, width = (40 << 20) // 256, 64
    edge_index = torch.randint(100, (2, edges))
    x, x_dst = torch.randn(100, width), torch.randn(100, width)
    grouping = Graph.of(edge_index, size=(100, 100)).rows
    found = message_rows(grouping, Parts(x, None, None, None, x_dst), False)
    assert found.equal(x_dst[edge_index[1]] + x[edge_index[0]])


def test_nan_passes_the_relu():
    case = ALL["unsorted"]
    args = list(_arguments(case, "ends", 4))
    args[0][2] = torch.nan
    found = _ours(case, True)(*args)
    assert torch.equal(found.isnan(), _oracle(case, True)(*args).isnan())
    assert found.isnan().any()


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("wanted", range(1, 64))
def test_only_the_gradients_that_are_needed(wanted, relu):
    case = ALL["unsorted"]
    args = _arguments(case, "all", 4)
    for k, leaf in enumerate(args):
        leaf.requires_grad_(bool(wanted >> k & 1))
    leaves = [leaf for leaf in args if leaf.requires_grad]
    expected = torch.autograd.grad(_oracle(case, relu)(*args).sin().sum(), leaves)
    for create in (False, True):
        out = _ours(case, relu)(*args).sin().sum()
        found = torch.autograd.grad(out, leaves, create_graph=create)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form, relu):
    case = ALL["isolated"]
    args = [t for t in _arguments(case, form, 2, 2) if t is not None]
    places = [t is not None for t in _arguments(case, form, 2, 2)]

    def function(*given):
        rest = iter(given)
        return _ours(case, relu)(*(next(rest) if there else None for there in places))

    for leaf in args:
        leaf.requires_grad_()
    assert gradcheck(function, args)
    assert gradgradcheck(lambda *a: function(*a).square(), args, fast_mode=True)


def test_only_what_a_gradient_needs_is_kept():
    case = ALL["unsorted"]
    args = [
        t.requires_grad_() if t is not None else None
        for t in _arguments(case, "ends", 4)
    ]
    assert _ours(case, False)(*args).grad_fn.saved_tensors[-1] is None
    assert _ours(case, True)(*args).grad_fn.saved_tensors[-1] is not None


def test_a_gradient_is_left_as_it_is(monkeypatch):
    """Without a linear map, the gradient that comes in is somebody else's."""
    monkeypatch.setattr(memory, "THRESHOLD", 0)
    case = ALL["unsorted"]
    args = [
        None if t is None else t.requires_grad_() for t in _arguments(case, "ends", 4)
    ]
    out = _ours(case, True)(*args)
    grad = torch.ones_like(out)
    torch.autograd.grad(out, args[0], grad)
    assert grad.equal(torch.ones_like(out))
