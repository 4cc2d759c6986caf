"""ops.sddmm against the plain dot product of each edge's ends."""

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, WIDTHS, cases, random_edges
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, assert_near, compare, compare_gradient_layouts
from oracles import sddmm as oracle_sddmm
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel import Graph, ops


def _graph(case) -> Graph:
    return Graph.of(case.edge_index, size=case.size)


def _ends(case, width, *heads):
    a = torch.randn(case.num_dst, *heads, width, dtype=torch.float64)
    b = torch.randn(case.num_src, *heads, width, dtype=torch.float64)
    return a.requires_grad_(), b.requires_grad_()


def _compare(case, args, dtype=torch.float64):
    return compare(
        lambda a, b: ops.sddmm(_graph(case), a, b),
        lambda a, b: oracle_sddmm(case.edge_index, a, b),
        args,
        dtype,
    )


@pytest.mark.parametrize("heads", [(), (1,), (3,)])
@pytest.mark.parametrize("name", ALL)
def test_every_graph(backend, name, heads):
    _compare(ALL[name], _ends(ALL[name], 5, *heads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_dtype(backend, width, heads, dtype):
    case = BIPARTITE["padded"]
    _compare(case, _ends(case, width, *heads), dtype)


def test_result_is_in_input_order(backend):
    """One-hot ends: edge e's product is one digit of e, so a permutation shows."""
    edge_index = torch.tensor([[2, 0, 1, 0], [2, 1, 0, 0]])
    a = torch.tensor([[1.0], [10.0], [100.0]])
    b = torch.tensor([[1.0], [2.0], [3.0]])
    out = ops.sddmm(Graph.from_edge_index(edge_index), a, b)
    assert out.tolist() == [300.0, 10.0, 2.0, 1.0]


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(backend, needs):
    case = BIPARTITE["wide"]
    args = tuple(
        t.detach().requires_grad_(n) for t, n in zip(_ends(case, 5), needs, strict=True)
    )
    found = _compare(case, args)
    assert ("grad of args[0]" in found, "grad of args[1]" in found) == needs


@pytest.mark.parametrize("layout", ["transposed", "expanded", "columns"])
def test_layouts(backend, layout):
    case = SQUARE["unsorted"]
    make = {
        "transposed": lambda: torch.randn(5, 13, dtype=torch.float64).t(),
        "expanded": lambda: torch.randn(1, 5, dtype=torch.float64).expand(13, 5),
        "columns": lambda: torch.randn(13, 10, dtype=torch.float64)[:, ::2],
    }[layout]
    _compare(case, (make().requires_grad_(), make().requires_grad_()))


@pytest.mark.parametrize("heads", [(), (3,)])
def test_layouts_of_the_incoming_gradient(backend, heads):
    case = BIPARTITE["wide"]
    compare_gradient_layouts(
        lambda a, b: ops.sddmm(_graph(case), a, b),
        lambda a, b: oracle_sddmm(case.edge_index, a, b),
        _ends(case, 4, *heads),
    )


def test_one_tensor_at_both_ends(backend):
    case = SQUARE["unsorted"]
    compare(
        lambda x: ops.sddmm(_graph(case), x, x),
        lambda x: oracle_sddmm(case.edge_index, x, x),
        (torch.randn(13, 4, dtype=torch.float64, requires_grad=True),),
    )


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("name", ["double_loops", "parallel", "wide"])
def test_first_and_second_derivatives(backend, name, heads):
    case = ALL[name]
    args = _ends(case, 3, *heads)
    assert gradcheck(lambda a, b: ops.sddmm(_graph(case), a, b), args)
    assert gradgradcheck(lambda a, b: ops.sddmm(_graph(case), a, b), args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poisoned_memory(backend, poisoned, dtype):
    for case in ALL.values():
        a, b = (t.detach().to(dtype).requires_grad_() for t in _ends(case, 9))
        out = ops.sddmm(Graph.from_edge_index(case.edge_index, size=case.size), a, b)
        out.sum().backward()
        for tensor in (out, a.grad, b.grad):
            assert bool(tensor.isfinite().all())


def test_two_runs_are_bit_equal(backend):
    case = SQUARE["hub"]
    a, b = (t.detach().float() for t in _ends(case, 33))
    runs = []
    for _ in range(2):
        p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = ops.sddmm(_graph(case), p, q)
        out.backward(torch.ones_like(out))
        runs.append((out, p.grad, q.grad))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_half_products_do_not_saturate(backend):
    x = torch.ones(1, 5000, dtype=torch.float16)
    assert ops.sddmm(
        Graph.from_edge_index(torch.zeros(2, 1).long()), x, x
    ).tolist() == [5000.0]


@given(case=cases(), heads=st.sampled_from([(), (2,)]))
def test_any_graph(backend, case, heads):
    _compare(case, _ends(case, 3, *heads))


@given(case=cases())
def test_bilinear(backend, case):
    a, b = (t.detach() for t in _ends(case, 3))
    c = torch.randn_like(a)
    graph = _graph(case)
    left = ops.sddmm(graph, 2 * a - c, b)
    right = 2 * ops.sddmm(graph, a, b) - ops.sddmm(graph, c, b)
    assert_near(left, right, torch.full_like(right, 100.0))


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        (torch.randn(5, 3), torch.randn(4, 3), "5"),
        (torch.randn(4, 3), torch.randn(7, 3), "7"),
        (torch.randn(4, 3), torch.randn(4, 2), "2"),
        (torch.randn(4, 2, 3), torch.randn(4, 5, 3), "5"),
        (torch.randn(4, 2, 3), torch.randn(4, 3), ""),
        (torch.randn(4), torch.randn(4), ""),
        (torch.randn(4, 3).to("meta"), torch.randn(4, 3), "meta"),
    ],
)
def test_bad_arguments_name_the_value(backend, a, b, value):
    graph = Graph.from_edge_index(random_edges(4, 4, 6), size=4)
    with pytest.raises((ValueError, RuntimeError, IndexError), match=value):
        ops.sddmm(graph, a, b)
