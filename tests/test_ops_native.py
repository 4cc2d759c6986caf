"""The native kernels in each form that they are compiled: ISA, index width, slices."""

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, WIDTHS, random_edges
from oracles import DTYPES, compare
from oracles import sddmm as oracle_sddmm
from oracles import spmm as oracle_spmm
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import softmax as pyg_softmax

import gnnaccel.graph
from gnnaccel import Graph, ops
from gnnaccel.kernels import native, reference

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

REDUCES = ("sum", "mean", "max", "min")


@pytest.fixture(params=["int32", "int64"])
def index_width(request, monkeypatch):
    """int64 structures, which only a graph beyond 2^31 would otherwise have."""
    if request.param == "int64":
        for module in (gnnaccel.graph, native, reference):
            monkeypatch.setattr(module, "index_dtype", lambda *sizes: torch.int64)
    graph = Graph.from_edge_index(SQUARE["unsorted"].edge_index)
    assert graph.index_dtype == getattr(torch, request.param)
    assert graph.t.index_dtype == getattr(torch, request.param)
    return request.param


def _exact(rows: int, width: int) -> torch.Tensor:
    """Distinct within a column, and of few digits: exact in every floating dtype."""
    columns = [torch.randperm(rows) for _ in range(width)]
    return (torch.stack(columns, dim=1).double() + 0.5 - rows // 2).requires_grad_()


def _fresh(case):
    """A graph of the index width of the hour, not one from the cache."""
    return Graph.from_edge_index(case.edge_index, size=case.size)


def _compare_spmm(case, x, weight, reduce, dtype, slack=1.0):
    graph = _fresh(case)
    compare(
        lambda x, w: ops.spmm(graph, x, w, reduce),
        lambda x, w: oracle_spmm(case.edge_index, x, w, reduce, case.num_dst),
        (x, weight),
        dtype,
        absolute=reduce in ("sum", "mean"),
        slack=slack,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("width", (*WIDTHS, 2, 4, 7, 8, 12, 17, 31, 33, 128, 130))
def test_spmm(isa, index_width, width, reduce, dtype):
    """Every tile of columns and its remainders."""
    if index_width == "int64" and width not in (3, 65, 300):
        pytest.skip("fewer tiles are compiled for these")
    case = BIPARTITE["padded"]
    for weighted in (False, True):
        weight = None
        if weighted:
            weight = torch.full((case.num_edges,), 0.5).double().requires_grad_()
        _compare_spmm(case, _exact(case.num_src, width), weight, reduce, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 16, 37])
def test_spmm_with_heads(isa, index_width, width, dtype):
    case = BIPARTITE["wide"]
    x = torch.randn(case.num_src, 3, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(case.num_edges, 3, dtype=torch.float64, requires_grad=True)
    for reduce in ("sum", "mean"):
        _compare_spmm(case, x, weight, reduce, dtype)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.float64), (5, torch.bfloat16), (16, torch.float32), (65, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", ["hub", "hub_source"])
def test_a_hub_is_cut_into_slices(isa, index_width, name, width, dtype, reduce):
    case = ALL[name]
    weight = None
    if index_width == "int64" and width != 16:
        pytest.skip("one width says enough")
    if width != 16:
        weight = torch.full((case.num_edges,), 0.5).double().requires_grad_()
    # Five hundred equal terms in a row: their roundings don't cancel.
    slack = 10 if dtype == torch.float32 else 1
    _compare_spmm(case, _exact(case.num_src, width), weight, reduce, dtype, slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("width", WIDTHS)
def test_sddmm(isa, index_width, width, heads, dtype):
    case = BIPARTITE["padded"]
    a = torch.randn(case.num_dst, *heads, width, dtype=torch.float64)
    b = torch.randn(case.num_src, *heads, width, dtype=torch.float64)
    graph = _fresh(case)
    compare(
        lambda a, b: ops.sddmm(graph, a, b),
        lambda a, b: oracle_sddmm(case.edge_index, a, b),
        (a.requires_grad_(), b.requires_grad_()),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8, 17])
@pytest.mark.parametrize("name", ["wide", "hub", "isolated"])
def test_softmax(isa, index_width, name, heads, dtype):
    case = ALL[name]
    if name == "hub" and (heads != 3 or index_width == "int64"):
        pytest.skip("one case of it says enough")
    graph = _fresh(case)
    logits = 3 * torch.randn(case.num_edges, heads, dtype=torch.float64)
    compare(
        lambda x: ops.edge_softmax(graph, x),
        lambda x: pyg_softmax(x, case.edge_index[1], num_nodes=case.num_dst),
        (logits.requires_grad_(),),
        dtype,
        absolute=False,
        slack=4,
    )


@pytest.mark.parametrize("scale", [1.0, 30.0, 80.0, 1000.0])
def test_softmax_over_the_whole_range_of_exp(isa, scale):
    """A vectorised exp must be right, or zero, far below the maximum too."""
    logits = torch.linspace(-scale, 0, 4001, dtype=torch.float64)
    index = torch.zeros(4001, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        low = logits.to(dtype)
        actual = ops.softmax(low, index, 1).double()
        expected = low.double().softmax(0)
        tiny = torch.finfo(dtype).tiny * 4001
        relative = 1e-13 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=relative, atol=tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_scatter(isa, index_width, reduce, dtype):
    index = torch.tensor([3, 0, 3, 5, 0, 3, 1])
    for width in WIDTHS:
        compare(
            lambda x: ops.scatter(x, index.clone(), 8, reduce),
            lambda x: pyg_scatter(x, index, 0, 8, reduce),
            (_exact(7, width),),
            dtype,
            absolute=reduce in ("sum", "mean"),
        )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ["unsorted", "sorted", "reversed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_parallel_sort(index_width, dtype, order, threads):
    """Enough edges for several parts; both directions, and the counts on the way."""
    if dtype == torch.int32 and order != "unsorted":
        pytest.skip("the order is not a matter of the dtype")
    edge_index = random_edges(300, 170, 50_000)
    if order != "unsorted":
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    if order == "reversed":
        edge_index = edge_index.flip(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ops.backend("native"):
            graph = Graph.from_edge_index(edge_index.to(dtype), size=(300, 170))
            flipped = graph.t
    finally:
        torch.set_num_threads(before)
    src, dst = edge_index
    perm = dst.argsort(stable=True)
    assert (graph.perm is None) == (order == "sorted")
    if graph.perm is not None:
        assert torch.equal(graph.perm.long(), perm)
    assert torch.equal(graph.col.long(), src[perm])
    degree = torch.bincount(dst, minlength=170)
    assert torch.equal(graph.in_degree, degree)
    assert graph.max_degree == int(degree.max())
    assert graph.num_self_loops == int((src == dst).sum())
    out_degree = torch.bincount(src, minlength=300)
    assert torch.equal(flipped.in_degree, out_degree)
    assert flipped.max_degree == int(out_degree.max())
    assert torch.equal(src[flipped.perm.long()], src.sort().values)
    assert torch.equal(flipped.col.long(), dst[flipped.perm.long()])


@pytest.mark.parametrize("where", [0, 30_000, 49_999])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [-1, 300, 2**33])
def test_a_bad_index_is_found_in_any_part(value, row, where):
    edge_index = random_edges(300, 300, 50_000)
    edge_index[row, where] = value
    with ops.backend("native"), pytest.raises(IndexError, match=str(value)):
        Graph.from_edge_index(edge_index, size=300)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_split_among_threads(isa, threads, reduce):
    """More work than the serial limit, hub rows next to empty ones."""
    edges = torch.cat(
        [
            random_edges(400, 250, 9_000),
            torch.stack([torch.arange(400).repeat(20), torch.full((8_000,), 399)]),
        ],
        dim=1,
    )
    case = SQUARE["unsorted"]._replace(edge_index=edges, num_src=400, num_dst=420)
    weight = torch.full((case.num_edges,), 0.5).double().requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _compare_spmm(case, _exact(400, 33), weight, reduce, torch.float32)
    finally:
        torch.set_num_threads(before)
