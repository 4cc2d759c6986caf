"""ops.edge_softmax and ops.softmax against torch_geometric.utils.softmax."""

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, cases, random_edges
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, assert_near, compare, compare_gradient_layouts
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import softmax as pyg_softmax

from gnnaccel import Graph, ops


def _graph(case) -> Graph:
    return Graph.of(case.edge_index, size=case.size)


def _compare(case, logits, dtype=torch.float64, **options):
    index = case.edge_index[1].long()
    compare(
        lambda x: ops.edge_softmax(_graph(case), x),
        lambda x: pyg_softmax(x, index, num_nodes=case.num_dst),
        (logits,),
        dtype,
        absolute=False,
        **options,
    )
    compare(
        lambda x: ops.softmax(x, case.edge_index[1], case.num_dst),
        lambda x: pyg_softmax(x, index, num_nodes=case.num_dst),
        (logits,),
        dtype,
        absolute=False,
        **options,
    )


def _logits(case, *heads):
    shape = (case.num_edges, *heads)
    return (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("heads", [(), (1,), (4,)])
@pytest.mark.parametrize("name", ALL)
def test_every_graph(backend, name, heads):
    _compare(ALL[name], _logits(ALL[name], *heads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8, 17])
def test_every_dtype(backend, heads, dtype):
    # The gradient p * (g - <p, g>) rounds its inputs once more in low precision.
    _compare(BIPARTITE["wide"], _logits(BIPARTITE["wide"], heads), dtype, slack=4)


def test_large_logits_do_not_overflow(backend):
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4])
    graph = Graph.from_edge_index(edge_index)
    assert ops.edge_softmax(graph, logits).tolist() == [0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_special_values_spread_as_in_pyg(backend, special):
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    for logits in (
        torch.tensor([special, special, special, special, 1.0, 2.0]),
        torch.tensor([special, 0.0, 1.0, -1.0, 1.0, 2.0]),
    ):
        expected = pyg_softmax(logits.double(), index, num_nodes=4)
        assert_near(ops.softmax(logits, index, 4), expected)
        graph = Graph.from_edge_index(torch.stack([torch.zeros_like(index), index]), 4)
        assert_near(ops.edge_softmax(graph, logits), expected)


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("name", ["double_loops", "parallel", "wide", "no_edges"])
def test_derivatives(backend, name, heads):
    case = ALL[name]
    logits = torch.randn(
        case.num_edges, *heads, dtype=torch.float64, requires_grad=True
    )
    index = case.edge_index[1]
    for function in (
        lambda x: ops.edge_softmax(_graph(case), x),
        lambda x: ops.softmax(x, index, case.num_dst),
    ):
        assert gradcheck(function, (logits,))
        assert gradgradcheck(function, (logits,))


@pytest.mark.parametrize("layout", ["transposed", "expanded", "columns"])
def test_layouts(backend, layout):
    case = SQUARE["unsorted"]
    logits = {
        "transposed": torch.randn(3, 60, dtype=torch.float64).t(),
        "expanded": torch.randn(60, 1, dtype=torch.float64).expand(60, 3),
        "columns": torch.randn(60, 6, dtype=torch.float64)[:, ::2],
    }[layout]
    _compare(case, logits.requires_grad_())


@pytest.mark.parametrize("heads", [(), (3,)])
def test_layouts_of_the_incoming_gradient(backend, heads):
    case = SQUARE["unsorted"]
    index = case.edge_index[1]
    for function in (
        lambda x: ops.edge_softmax(_graph(case), x),
        lambda x: ops.softmax(x, index, 13),
    ):
        compare_gradient_layouts(
            function,
            lambda x: pyg_softmax(x, index, num_nodes=13),
            (_logits(case, *heads),),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poisoned_memory(backend, poisoned, dtype):
    for case in ALL.values():
        logits = _logits(case, 3).detach().to(dtype).requires_grad_()
        graph = Graph.from_edge_index(case.edge_index, size=case.size)
        out = ops.edge_softmax(graph, logits)
        out.pow(2).sum().backward()
        assert bool(out.isfinite().all())
        assert bool(logits.grad.isfinite().all())


def test_two_runs_are_bit_equal(backend):
    case = SQUARE["hub"]
    source = _logits(case, 3).detach().float()
    runs = []
    for _ in range(2):
        logits = source.clone().requires_grad_()
        out = ops.edge_softmax(_graph(case), logits)
        out.pow(2).sum().backward()
        runs.append((out, logits.grad))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_denominators_do_not_saturate(backend, dtype):
    """4096 equal logits: a denominator that stops at 2048 doubles every share."""
    index = torch.zeros(4096, dtype=torch.long)
    out = ops.softmax(torch.zeros(4096, dtype=dtype), index, 1)
    assert_near(out, torch.full((4096,), 2.0**-12).double())


@given(case=cases(), heads=st.sampled_from([(), (3,)]))
def test_any_graph(backend, case, heads):
    _compare(case, _logits(case, *heads))


@given(case=cases(), shift=st.floats(-50, 50))
def test_sums_to_one_and_ignores_a_shift(backend, case, shift):
    logits = _logits(case, 2).detach()
    graph = _graph(case)
    out = ops.edge_softmax(graph, logits)
    total = torch.zeros(case.num_dst, 2, dtype=torch.float64)
    total.index_add_(0, case.edge_index[1].long(), out)
    filled = (graph.in_degree > 0).double()[:, None].expand_as(total)
    assert_near(total, filled, torch.ones_like(total))
    shifted = ops.edge_softmax(graph, logits + shift)
    assert_near(shifted, out, torch.ones_like(out), slack=100)


def test_index_changed_in_place(backend):
    index = torch.tensor([0, 1, 1, 0, 2])
    for _ in range(3):
        compare(
            lambda x: ops.softmax(x, index, 9),
            lambda x: pyg_softmax(x, index, num_nodes=9),
            (torch.randn(5, 2, dtype=torch.float64, requires_grad=True),),
            absolute=False,
        )
        index.mul_(2)


def test_number_of_nodes_is_inferred(backend):
    index = torch.tensor([0, 3, 3, 0])
    x = torch.randn(4, 2)
    torch.testing.assert_close(ops.softmax(x, index), pyg_softmax(x, index))


@pytest.mark.parametrize(
    ("logits", "value"),
    [
        (torch.randn(5), "5"),
        (torch.randn(7, 2), "7"),
        (torch.randn(6, 2).to("meta"), "meta"),
        (torch.randn(()), ""),
    ],
)
def test_bad_logits_name_the_value(backend, logits, value):
    graph = Graph.from_edge_index(random_edges(4, 4, 6), size=4)
    with pytest.raises((ValueError, RuntimeError, IndexError), match=value):
        ops.edge_softmax(graph, logits)


@pytest.mark.parametrize(
    ("index", "size", "value"),
    [
        (torch.tensor([0, 1, 9]), 4, "9"),
        (torch.tensor([0, 1, -1]), 4, "-1"),
        (torch.tensor([0, 1]), 4, "2"),
        (torch.tensor([0.0, 1.0, 1.0]), 4, "float32"),
    ],
)
def test_bad_softmax_names_the_value(backend, index, size, value):
    with pytest.raises((ValueError, RuntimeError, IndexError, TypeError), match=value):
        ops.softmax(torch.randn(3, 2), index, size)
