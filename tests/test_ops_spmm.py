"""ops.spmm against gather, weigh and PyG's scatter in float64."""

import itertools

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, WIDTHS, cases, random_edges
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, assert_near, compare, compare_gradient_layouts, dense
from oracles import spmm as oracle_spmm
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel import Graph, ops
from gnnaccel.errors import EdgeIndexError
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.product import Scales, run_spmm_sum

REDUCES = ("sum", "mean", "max", "min")
LINEAR = ("sum", "mean")


def _features(rows: int, width: int, *heads: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, *heads, width, dtype=torch.float64, requires_grad=grad)


def _distinct(rows: int, width: int) -> torch.Tensor:
    """Values that differ within a column and are exact in every floating dtype."""
    columns = [torch.randperm(rows) for _ in range(width)]
    values = torch.stack(columns, dim=1) if rows else torch.zeros(0, width)
    return (values.double() - rows // 2 + 0.5).requires_grad_()


def _compare(case, x, weight, reduce, dtype=torch.float64, **options):
    return compare(
        lambda x, w: ops.spmm(case.edge_index, x, w, reduce, size=case.size),
        lambda x, w: oracle_spmm(case.edge_index, x, w, reduce, case.num_dst),
        (x, weight),
        dtype,
        absolute=reduce in LINEAR,
        **options,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", ALL)
def test_every_graph(backend, name, reduce, weighted):
    case = ALL[name]
    weight = None
    if weighted:
        weight = torch.randn(case.num_edges, dtype=torch.float64, requires_grad=True)
    _compare(case, _features(case.num_src, 5), weight, reduce)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_and_dtype(backend, dtype, width, reduce, weighted):
    case = BIPARTITE["padded"]
    weight = None
    if weighted:
        # Powers of two, so that the order of the products is exact in half precision.
        exponents = torch.randint(-2, 3, (case.num_edges,))
        weight = (2.0**exponents).double().requires_grad_()
    x = _features(case.num_src, width) if reduce in LINEAR else None
    if x is None:
        x = _distinct(case.num_src, width)
        # Products of equal size would tie in one precision and not in another.
        weight = None if weight is None else weight.detach().abs().fill_(2.0)
        weight = None if weight is None else weight.requires_grad_()
    _compare(case, x, weight, reduce, dtype)


@pytest.mark.parametrize("per_head", [None, False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("heads", "width"), [(1, 4), (2, 1), (3, 5), (4, 65)])
def test_heads(backend, heads, width, reduce, per_head):
    case = BIPARTITE["wide"]
    weight = None
    if per_head is not None:
        shape = (case.num_edges, heads) if per_head else (case.num_edges,)
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    _compare(case, _features(case.num_src, width, heads), weight, reduce)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_heads_in_low_precision(backend, reduce, dtype):
    case = BIPARTITE["wide"]
    x = _distinct(case.num_src, 15).detach().view(-1, 3, 5).requires_grad_()
    weight = torch.full((case.num_edges, 3), 0.5).double().requires_grad_()
    _compare(case, x, weight, reduce, dtype)


@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("weight_grad", [None, False, True])
@pytest.mark.parametrize("reduce", REDUCES)
def test_only_the_gradients_that_are_needed(backend, reduce, x_grad, weight_grad):
    case = SQUARE["unsorted"]
    weight = None
    if weight_grad is not None:
        weight = torch.randn(
            case.num_edges, dtype=torch.float64, requires_grad=weight_grad
        )
    found = _compare(case, _features(case.num_src, 5, grad=x_grad), weight, reduce)
    assert ("grad of args[0]" in found) == x_grad
    assert ("grad of args[1]" in found) == bool(weight_grad)


LAYOUTS = {
    "columns": lambda n: torch.randn(n, 10).double()[:, 1::2],
    "transposed": lambda n: torch.randn(5, n).double().t(),
    "offset": lambda n: torch.randn(n * 5 + 1).double()[1:].view(n, 5),
    "every_second_row": lambda n: torch.randn(2 * n, 5).double()[::2],
    "padded_rows": lambda n: torch.randn(n, 8).double()[:, :5],
    "one_row": lambda n: torch.randn(1, 5).double().expand(n, 5),
    "one_column": lambda n: torch.randn(n, 1).double().expand(n, 5),
    "one_value": lambda n: torch.randn(()).double().expand(n, 5),
    "heads_last": lambda n: torch.randn(n, 4, 3).double().transpose(1, 2),
    "heads_expanded": lambda n: torch.randn(n, 1, 4).double().expand(n, 3, 4),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x(backend, layout, reduce, weighted):
    case = SQUARE["unsorted"]
    weight = None
    if weighted:
        weight = torch.rand(case.num_edges, dtype=torch.float64, requires_grad=True)
    _compare(case, LAYOUTS[layout](case.num_src).requires_grad_(), weight, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    "layout", ["strided", "expanded", "heads_transposed", "offset"]
)
def test_layouts_of_the_weight(backend, layout, reduce):
    case = SQUARE["unsorted"]
    num = case.num_edges
    weight, heads = {
        "strided": (torch.randn(2 * num).double()[::2], ()),
        "expanded": (torch.tensor(1.5).double().expand(num), ()),
        "heads_transposed": (torch.randn(3, num).double().t(), (3,)),
        "offset": (torch.randn(num + 1).double()[1:], ()),
    }[layout]
    _compare(case, _features(13, 4, *heads), weight.requires_grad_(), reduce)


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
def test_layouts_of_the_incoming_gradient(backend, reduce, weighted, heads):
    case = SQUARE["unsorted"]
    weight = None
    if weighted:
        weight = torch.rand(60, dtype=torch.float64, requires_grad=True)
    compare_gradient_layouts(
        lambda x, w: ops.spmm(case.edge_index, x, w, reduce, size=13),
        lambda x, w: oracle_spmm(case.edge_index, x, w, reduce, 13),
        (_features(13, 4, *heads), weight),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weighted", "factor", "in_place"),
    [(False, 1.0, True), (True, -2.5, True), (True, 0.5, False), (False, -1.0, False)],
)
@pytest.mark.parametrize("name", ["wide", "isolated", "hub"])
def test_added_to_something(backend, name, weighted, factor, in_place, dtype):
    case = ALL[name]
    x = torch.randn(case.num_src, 5, dtype=torch.float64).to(dtype)
    weight = torch.rand(case.num_edges, dtype=torch.float64).to(dtype)
    weight = weight if weighted else None
    before = torch.randn(case.num_dst, 5, dtype=torch.float64).to(dtype)
    scale = torch.rand(case.num_dst, dtype=torch.float64).float().double() + 0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = Scales(dst=scale.to(wide))
    base = before.clone()
    graph = Graph.of(case.edge_index, size=case.size)
    adj = Adj(graph, None, case.num_src, case.num_dst)
    into = base if in_place else None
    out = run_spmm_sum(adj, x, weight, scales, base=base, base_scale=factor, out=into)
    assert (out is base) == in_place
    assert in_place or base.equal(before)

    def total(x, weight, before):
        summed = oracle_spmm(case.edge_index, x, weight, "sum", case.num_dst)
        return before + scale.unsqueeze(-1) * summed

    before = factor * before.double()
    double = [None if t is None else t.double() for t in (x, weight, before)]
    magnitude = total(*(None if t is None else t.abs() for t in double))
    assert_near(out, total(*double), magnitude, slack=2)


def test_dense_formula(backend):
    """A second oracle that shares no code with scatter."""
    case = BIPARTITE["wide"]
    weight = torch.randn(case.num_edges, dtype=torch.float64)
    x = torch.randn(case.num_src, 7, dtype=torch.float64)
    matrix = dense(case.edge_index, weight, *case.size)
    assert_near(ops.spmm(case.edge_index, x, weight, size=case.size), matrix @ x)


def test_loop_formula_of_max(backend):
    case = SQUARE["double_loops"]
    x = torch.randn(4, 3, dtype=torch.float64)
    weight = torch.randn(case.num_edges, dtype=torch.float64)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for node in range(4):
        rows = [
            weight[e] * x[case.edge_index[0, e]]
            for e in range(case.num_edges)
            if case.edge_index[1, e] == node
        ]
        if rows:
            expected[node] = torch.stack(rows).amax(dim=0)
    assert_near(ops.spmm(case.edge_index, x, weight, "max", size=4), expected)


def test_directed_backward_goes_against_the_edges(backend):
    """One edge 0 -> 1: the gradient of node 1's output belongs to node 0 alone."""
    x = torch.zeros(3, 1, requires_grad=True)
    ops.spmm(torch.tensor([[0], [1]]), x, size=3).sum().backward()
    assert x.grad.flatten().tolist() == [1.0, 0.0, 0.0]


def test_add_is_sum(backend):
    case = SQUARE["unsorted"]
    x = torch.randn(13, 4)
    total = ops.spmm(case.edge_index, x, reduce="sum", size=13)
    assert torch.equal(ops.spmm(case.edge_index, x, reduce="add", size=13), total)
    assert torch.equal(ops.spmm(case.edge_index, x, size=13), total)


def test_a_graph_and_its_edge_index_are_alike(backend):
    case = BIPARTITE["padded"]
    x = torch.randn(case.num_src, 4)
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    plain = ops.spmm(case.edge_index, x, size=case.size)
    assert torch.equal(ops.spmm(graph, x), plain)
    csr = Graph.from_csr(graph.rowptr, graph.col, graph.num_src)
    assert torch.equal(ops.spmm(csr, x), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_ties_share_the_gradient_as_in_torch(backend, reduce, dtype, weighted):
    """Few distinct values, zero among them: a zero extreme counts one tie more."""
    case = ALL["unsorted"]
    x = torch.randint(-1, 2, (13, 6)).double().requires_grad_()
    weight = None
    if weighted:
        weight = torch.randint(-1, 2, (case.num_edges,)).double().requires_grad_()
    _compare(case, x, weight, reduce, dtype)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_zero_extreme_counts_one_tie_more(backend, reduce):
    x = torch.zeros(3, 1, requires_grad=True)
    edge_index = torch.tensor([[0, 1, 2], [0, 0, 0]])
    ops.spmm(edge_index, x, reduce=reduce, size=3).sum().backward()
    assert x.grad.flatten().tolist() == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extremes_ignore_the_fill(backend, reduce, sign):
    """The maximum of negative values is negative; an empty row is zero."""
    x = sign * torch.tensor([[0.1], [0.2], [0.3]])
    edge_index = torch.tensor([[0, 1, 2], [0, 1, 0]])
    out = ops.spmm(edge_index, x, reduce=reduce, size=(3, 4))
    first = getattr(x[[0, 2]], f"a{reduce}")()
    assert out.flatten().tolist() == [float(first), float(x[1]), 0.0, 0.0]


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_go_where_pyg_sends_them(backend, dtype, reduce, weighted):
    case = SQUARE["unsorted"]
    generator = torch.Generator().manual_seed(3)
    pick = torch.randint(len(SPECIAL), (13, 40), generator=generator)
    x = torch.tensor(SPECIAL, dtype=torch.float64)[pick]
    # Most columns finite, so that every row sees both.
    x[torch.rand(13, 40, generator=generator) < 0.7] = 3.0
    weight = torch.ones(case.num_edges, dtype=torch.float64) if weighted else None
    low = x.to(dtype)
    w = None if weight is None else weight.to(dtype)
    actual = ops.spmm(case.edge_index, low, w, reduce, size=13)
    expected = oracle_spmm(case.edge_index, low.double(), weight, reduce, 13)
    assert_near(actual, expected, torch.full_like(expected, 40.0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_gradients_beside_nan_and_infinity(backend, special, reduce, weighted):
    """Torch's maximum of a row with NaN sends NaN back along all of its edges."""
    case = SQUARE["unsorted"]
    x = torch.randn(13, 4, dtype=torch.float64)
    x[3, 1] = x[9, 1] = x[5, 2] = special
    weight = torch.full((60,), 2.0, dtype=torch.float64) if weighted else None
    _compare(case, x.requires_grad_(), weight, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
def test_nan_weight_and_its_gradients(backend, reduce):
    case = SQUARE["unsorted"]
    weight = torch.rand(case.num_edges, dtype=torch.float64)
    weight[4] = float("nan")
    _compare(
        case,
        _features(13, 3),
        weight.requires_grad_(),
        reduce,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_sums_do_not_saturate(backend, dtype):
    """Five thousand ones: an accumulator in half precision stops at 2048 (or 256)."""
    edge_index = torch.stack([torch.zeros(5000).long(), torch.zeros(5000).long()])
    x = torch.ones(1, 3, dtype=dtype, requires_grad=True)
    out = ops.spmm(edge_index, x, size=1)
    assert_near(out, torch.full((1, 3), 5000.0).double())
    out.sum().backward()
    assert_near(x.grad, torch.full((1, 3), 5000.0).double())
    weight = torch.full((5000,), 0.5, dtype=dtype)
    out = ops.spmm(edge_index, x.detach(), weight, size=1)
    assert_near(out, torch.full((1, 3), 2500.0).double())


def test_half_mean_does_not_overflow(backend):
    """A thousand neighbours of value 100 pass through 100,000, beyond float16."""
    edge_index = torch.stack([torch.arange(1000), torch.zeros(1000).long()])
    x = torch.full((1000, 2), 100.0, dtype=torch.float16)
    out = ops.spmm(edge_index, x, reduce="mean", size=(1000, 1))
    assert out.flatten().tolist() == [100.0, 100.0]


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("name", ["double_loops", "padded"])
def test_first_and_second_derivatives(backend, name, reduce, heads):
    case = ALL[name]
    # Distinct magnitudes far apart: the winner can't change within the step.
    count = case.num_src * 2 * (heads[0] if heads else 1)
    x = (torch.randperm(count).double() + 1).view(case.num_src, *heads, 2)
    x.requires_grad_()
    weight = 1 + torch.randperm(case.num_edges).double() / 97
    weight = weight.view(-1, *([1] * len(heads))).expand(-1, *heads).clone()
    weight.requires_grad_()

    def weighted(x, weight):
        return ops.spmm(case.edge_index, x, weight, reduce, size=case.size)

    def unweighted(x):
        return ops.spmm(case.edge_index, x, None, reduce, size=case.size)

    for function, inputs in ((unweighted, (x,)), (weighted, (x, weight))):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("reduce", REDUCES)
def test_second_derivative_equals_the_oracles(backend, reduce):
    case = SQUARE["hub"]
    found = []
    for ours in (True, False):
        torch.manual_seed(2)
        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        w = torch.randn(case.num_edges, dtype=torch.float64, requires_grad=True)
        if ours:
            out = ops.spmm(case.edge_index, x, w, reduce, size=40)
        else:
            out = oracle_spmm(case.edge_index, x, w, reduce, 40)
        first = torch.autograd.grad(out.pow(2).sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w))
        found.append([*first, *second])
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected, slack=100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_poisoned_memory_and_deterministic_mode(backend, poisoned, reduce, dtype):
    for name, case in ALL.items():
        if name.startswith("hub") and dtype != torch.float32:
            continue
        edge_index = case.edge_index.clone()
        x = _distinct(case.num_src, 9).detach().to(dtype).requires_grad_()
        w = torch.ones(case.num_edges, dtype=dtype, requires_grad=True)
        out = ops.spmm(edge_index, x, w, reduce, size=case.size)
        out.sum().backward()
        for tensor in (out, x.grad, w.grad):
            assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", ["hub", "hub_source", "unsorted"])
def test_two_runs_are_bit_equal(backend, name, reduce):
    case = ALL[name]
    x = torch.randn(case.num_src, 33)
    w = torch.randn(case.num_edges)
    runs = []
    for _ in range(2):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        # A clone, so that the graph is built afresh.
        out = ops.spmm(case.edge_index.clone(), a, b, reduce, size=case.size)
        out.backward(torch.ones_like(out))
        runs.append((out, a.grad, b.grad))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("reduce", REDUCES)
def test_weight_changed_in_place_between_calls(backend, reduce):
    case = SQUARE["unsorted"]
    x = torch.randn(13, 4, dtype=torch.float64)
    weight = torch.rand(case.num_edges, dtype=torch.float64)
    for step in range(3):
        actual = ops.spmm(case.edge_index, x, weight, reduce, size=13)
        assert_near(actual, oracle_spmm(case.edge_index, x, weight, reduce, 13))
        weight.mul_(-1.5)
        weight[step] = 7.0


@pytest.mark.parametrize("reduce", REDUCES)
def test_weight_used_again_and_again(backend, reduce):
    """What is worth remembering from the second call on is right in every call."""
    case, other = SQUARE["unsorted"], random_edges(13, 13, 60, seed=4)
    weight = torch.rand(60, dtype=torch.float64)
    for _ in range(2):
        for edge_index in (case.edge_index, other) * 4:
            compare(
                lambda x, e=edge_index: ops.spmm(e, x, weight, reduce, size=13),
                lambda x, e=edge_index: oracle_spmm(e, x, weight, reduce, 13),
                (_features(13, 4),),
                absolute=False,
            )
        weight.mul_(-2)


@pytest.mark.parametrize("reduce", REDUCES)
def test_edge_index_changed_in_place_between_calls(backend, reduce):
    edge_index = random_edges(13, 13, 60)
    for _ in range(3):
        x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
        compare(
            lambda x: ops.spmm(edge_index, x, None, reduce, size=13),
            lambda x: oracle_spmm(edge_index, x, None, reduce, 13),
            (x,),
            absolute=False,
        )
        edge_index[0] = (edge_index[0] + 1) % 13
        edge_index[1, ::3] = 2


def test_backward_uses_the_edges_of_its_forward(backend):
    """The edge index changes between the forward pass and its backward."""
    edge_index = random_edges(13, 13, 60)
    kept = edge_index.clone()
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    out = ops.spmm(edge_index, x, size=13)
    edge_index.zero_()
    ops.spmm(edge_index, x, size=13)
    actual = torch.autograd.grad(out.sum(), x)[0]
    expected = torch.autograd.grad(oracle_spmm(kept, x, None, "sum", 13).sum(), x)[0]
    assert_near(actual, expected)


def test_weight_changed_before_backward_is_refused(backend):
    """As for every torch op: autograd's own check on saved tensors."""
    edge_index = random_edges(13, 13, 60)
    x = torch.randn(13, 4, requires_grad=True)
    weight = torch.rand(60)
    out = ops.spmm(edge_index, x, weight, size=13)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_fifty_graphs_that_reuse_memory(backend, weighted):
    for seed in range(50):
        edge_index = random_edges(13, 13, 60, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        weight = None
        if weighted:
            weight = torch.rand(60, generator=generator, dtype=torch.float64)
            weight.requires_grad_()
        x = torch.rand(13, 4, generator=generator, dtype=torch.float64)
        compare(
            lambda x, w, e=edge_index: ops.spmm(e, x, w, "mean", size=13),
            lambda x, w, e=edge_index: oracle_spmm(e, x, w, "mean", 13),
            (x.requires_grad_(), weight),
        )
        del edge_index, weight, x


def test_sizes_change_between_calls(backend):
    edge_index = random_edges(5, 5, 12)
    for num_src, num_dst in itertools.product((5, 9, 7), (6, 5, 11)):
        x = torch.randn(num_src, 3, dtype=torch.float64, requires_grad=True)
        compare(
            lambda x, s=(num_src, num_dst): ops.spmm(
                edge_index, x, None, "mean", size=s
            ),
            lambda x, n=num_dst: oracle_spmm(edge_index, x, None, "mean", n),
            (x,),
        )


def test_rows_past_two_to_the_31(backend):
    """Element offsets beyond 32 bits; only the touched pages are ever real memory."""
    if backend != "native":
        pytest.skip("torch's own offsets; and the others widen half types whole")
    rows, width = 2**26, 33
    try:
        x = torch.empty(rows, width, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for {rows} x {width}: {error}")
    far = [rows - 1, rows - 2, 0, 5]
    for row in far:
        x[row] = row % 7 + 1
    edge_index = torch.tensor([[rows - 1, 0, rows - 2, 5], [0, 0, 1, 2]])
    out = ops.spmm(edge_index, x, size=(rows, 3))
    wanted = [(rows - 1) % 7 + 1 + 1, (rows - 2) % 7 + 1, 6]
    assert out.float().mean(dim=1).tolist() == [float(v) for v in wanted]
    best = ops.spmm(edge_index, x, reduce="max", size=(rows, 3))
    wanted[0] = max((rows - 1) % 7 + 1, 1)
    assert best.float().mean(dim=1).tolist() == [float(v) for v in wanted]


@given(case=cases(), data=st.data())
def test_order_of_the_edges_does_not_matter(backend, case, data):
    order = torch.tensor(data.draw(st.permutations(range(case.num_edges)))).long()
    reduce = data.draw(st.sampled_from(REDUCES))
    x = torch.randn(case.num_src, 3, dtype=torch.float64)
    weight = torch.randn(case.num_edges, dtype=torch.float64)
    first = ops.spmm(case.edge_index, x, weight, reduce, size=case.size)
    shuffled = case.edge_index[:, order]
    second = ops.spmm(shuffled, x, weight[order], reduce, size=case.size)
    assert_near(second, first, torch.full_like(first, 30.0))


@given(case=cases(), reduce=st.sampled_from(LINEAR))
def test_linear_in_x_and_in_the_weight(backend, case, reduce):
    x, y = torch.randn(2, case.num_src, 3, dtype=torch.float64)
    v, w = torch.randn(2, case.num_edges, dtype=torch.float64)

    def call(x, w):
        return ops.spmm(case.edge_index, x, w, reduce, size=case.size)

    scale = torch.full((case.num_dst, 3), 300.0, dtype=torch.float64)
    assert_near(call(2 * x - 3 * y, w), 2 * call(x, w) - 3 * call(y, w), scale)
    assert_near(call(x, 2 * v - 3 * w), 2 * call(x, v) - 3 * call(x, w), scale)


@given(case=cases())
def test_transpose_is_the_adjoint(backend, case):
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    x = torch.randn(case.num_src, 3, dtype=torch.float64)
    y = torch.randn(case.num_dst, 3, dtype=torch.float64)
    w = torch.randn(case.num_edges, dtype=torch.float64)
    left = (ops.spmm(graph, x, w) * y).sum()
    right = (x * ops.spmm(graph.t, y, w)).sum()
    assert_near(left, right, torch.tensor(1000.0))


@given(case=cases(), data=st.data())
def test_any_graph_any_arguments(backend, case, data):
    reduce = data.draw(st.sampled_from(REDUCES))
    heads = data.draw(st.sampled_from([(), (1,), (3,)]))
    width = data.draw(st.sampled_from([1, 2, 4, 7]))
    kind = data.draw(st.sampled_from(["none", "edge", "head"]))
    weight = None
    if kind != "none":
        shape = (case.num_edges, *(heads if kind == "head" else ()))
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    _compare(case, _features(case.num_src, width, *heads), weight, reduce)


def _call(**changes):
    arguments = {
        "graph": torch.tensor([[0, 1, 2], [1, 2, 0]]),
        "x": torch.randn(4, 3),
        "weight": torch.rand(3),
        "reduce": "sum",
        "size": (4, 4),
    } | changes
    graph, x = arguments.pop("graph"), arguments.pop("x")
    return ops.spmm(graph, x, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "value"),
    [
        ({"graph": torch.tensor([[0, -3], [1, 2]]), "weight": None}, IndexError, "-3"),
        ({"graph": torch.tensor([[0, 1], [1, 77]]), "weight": None}, IndexError, "77"),
        ({"graph": torch.rand(2, 3)}, ValueError, "float32"),
        ({"graph": torch.zeros(3, 3).long()}, ValueError, "3"),
        ({"x": torch.randn(6, 3)}, (ValueError, RuntimeError), "6"),
        ({"x": torch.randn(3, 3)}, (ValueError, RuntimeError), "3"),
        ({"weight": torch.rand(2)}, (ValueError, RuntimeError), "2"),
        ({"weight": torch.rand(9)}, (ValueError, RuntimeError), "9"),
        ({"weight": torch.rand(3, 5)}, (ValueError, RuntimeError), "5"),
        (
            {"x": torch.randn(4, 2, 3), "weight": torch.rand(3, 7)},
            (ValueError, RuntimeError),
            "7",
        ),
        ({"x": torch.randn(())}, (ValueError, RuntimeError, IndexError), ""),
        ({"x": torch.randn(4, 3).to("meta")}, (ValueError, RuntimeError), "meta"),
        ({"weight": torch.rand(3).to("meta")}, (ValueError, RuntimeError), "meta"),
        ({"reduce": "median"}, ValueError, "median"),
        ({"reduce": None}, (ValueError, TypeError), "None"),
        ({"x": [[1.0]]}, (TypeError, ValueError, AttributeError), "list"),
        (
            {"weight": [1.0, 1.0, 1.0]},
            (TypeError, ValueError, AttributeError),
            "list",
        ),
    ],
)
def test_bad_arguments_name_the_value(backend, changes, error, value):
    assert _call().shape == (4, 3)
    with pytest.raises(error, match=value):
        _call(**changes)


def test_bad_indices_are_both_kinds_of_error(backend):
    """PyG raises IndexError for sources and RuntimeError for destinations."""
    assert issubclass(EdgeIndexError, IndexError)
    assert issubclass(EdgeIndexError, RuntimeError)
    for edges in ([[0, 4], [0, 0]], [[0, 0], [0, 4]]):
        with pytest.raises(EdgeIndexError, match="4"):
            ops.spmm(torch.tensor(edges), torch.randn(4, 2), size=4)


def test_index_changed_to_bad_after_a_good_call(backend):
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    x = torch.randn(3, 2)
    ops.spmm(edge_index, x, size=3)
    edge_index[1, 1] = 1000
    with pytest.raises(EdgeIndexError, match="1000"):
        ops.spmm(edge_index, x, size=3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend, mode):
    case = SQUARE["unsorted"]
    x = torch.randn(13, 4, requires_grad=True)
    with mode():
        out = ops.spmm(case.edge_index, x, torch.rand(60), size=13)
    assert not out.requires_grad
