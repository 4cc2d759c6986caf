"""Graph: the same edges in every form, whatever they came as."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from graphs import ALL, SQUARE, cases, random_edges
from hypothesis import given
from torch_geometric import EdgeIndex

from gnnaccel import Graph, cache, ops
from gnnaccel.errors import EdgeIndexError


def _check(graph: Graph, case, stable: bool = True) -> None:
    """Every field of ``graph`` against the plain list of edges.

    ``stable``: edges of one destination stand in input order, as in a graph that was
    built from edges; a transposed one may order them otherwise.
    """
    edge_index = case.edge_index.long()
    src, dst = edge_index
    assert (graph.num_src, graph.num_dst) == case.size
    assert graph.num_edges == case.num_edges
    assert torch.equal(graph.edge_index, edge_index)
    assert graph.edge_index.dtype == torch.int64
    assert torch.equal(graph.src, src)
    assert torch.equal(graph.dst, dst)

    degree = torch.zeros(case.num_dst, dtype=torch.long).index_add(
        0, dst, torch.ones_like(dst)
    )
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)])
    assert torch.equal(graph.rowptr.long(), rowptr)
    assert graph.rowptr.dtype == graph.col.dtype == graph.index_dtype
    order = dst.argsort(stable=True)
    perm = torch.arange(case.num_edges) if graph.perm is None else graph.perm.long()
    if stable:
        assert torch.equal(perm, order)
    # Grouped by destination, whatever the order inside a group.
    assert torch.equal(perm.sort().values, torch.arange(case.num_edges))
    assert torch.equal(dst[perm], dst[order])
    assert torch.equal(graph.col.long(), src[perm])

    assert torch.equal(graph.in_degree, degree)
    assert graph.in_degree.dtype == graph.out_degree.dtype == torch.int64
    out_degree = torch.zeros(case.num_src, dtype=torch.long).index_add(
        0, src, torch.ones_like(src)
    )
    assert torch.equal(graph.out_degree, out_degree)
    assert graph.max_degree == (int(degree.max()) if case.num_dst else 0)
    assert graph.num_self_loops == int((src == dst).sum())
    assert graph.device == torch.device("cpu")


def _flipped(case):
    return case._replace(
        edge_index=case.edge_index.flip(0), num_src=case.num_dst, num_dst=case.num_src
    )


@pytest.mark.parametrize("name", ALL)
def test_fields_and_transpose(name):
    case = ALL[name]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    _check(graph, case)
    _check(graph.t, _flipped(case), stable=False)
    assert graph.t.t is graph
    assert graph.t is graph.t


@given(case=cases())
def test_fields_of_any_graph(case):
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    _check(graph, case)
    _check(graph.t, _flipped(case), stable=False)


@given(case=cases())
def test_csr_round_trip(case):
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    again = Graph.from_csr(graph.rowptr, graph.col, graph.num_src)
    order = case.edge_index[1].long().argsort(stable=True)
    _check(again, case._replace(edge_index=case.edge_index[:, order]))
    assert again.perm is None
    _check(
        again.t,
        _flipped(case._replace(edge_index=case.edge_index[:, order])),
        stable=False,
    )


def test_grouped_input_has_no_permutation():
    graph = Graph.from_edge_index(SQUARE["sorted"].edge_index, size=13)
    assert graph.perm is None
    assert (
        Graph.from_edge_index(SQUARE["unsorted"].edge_index, size=13).perm is not None
    )


@pytest.mark.parametrize("size", [None, 13, (13, 13), [13, 13], torch.Size([13, 13])])
def test_size_forms(size):
    edge_index = torch.tensor([[0, 12, 3], [12, 1, 3]])
    graph = Graph.from_edge_index(edge_index, size=size)
    assert (graph.num_src, graph.num_dst) == (13, 13)


def test_inferred_size_is_the_largest_index_plus_one():
    graph = Graph.from_edge_index(torch.tensor([[0, 4], [1, 2]]))
    assert (graph.num_src, graph.num_dst) == (5, 5)
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long))
    assert (empty.num_src, empty.num_dst, empty.num_edges) == (0, 0, 0)
    assert empty.rowptr.tolist() == [0]


def test_small_graphs_use_int32_and_huge_ones_int64():
    edge_index = torch.tensor([[0, 5], [1, 0]])
    assert Graph.from_edge_index(edge_index).index_dtype == torch.int32
    far = 2**31 + 5
    graph = Graph.from_edge_index(
        torch.tensor([[far, 7, far - 1], [1, 1, 0]]), size=(far + 1, 2)
    )
    assert graph.index_dtype == torch.int64
    assert graph.num_src == far + 1
    assert graph.col.tolist() == [far - 1, far, 7]
    assert graph.edge_index[0].tolist() == [far, 7, far - 1]


def _values(graph: Graph) -> torch.Tensor:
    """The graph as a dense matrix of edge counts, by way of its CSR."""
    dense = torch.zeros(graph.num_dst, graph.num_src)
    rows = torch.arange(graph.num_dst).repeat_interleave(graph.rowptr.long().diff())
    dense.index_put_((rows, graph.col.long()), torch.ones(graph.num_edges), True)
    return dense


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "coo_uncoalesced"])
def test_from_torch_sparse(kind):
    """Rows are destinations; weights in the order of the matrix's own values."""
    edge_index = torch.unique(random_edges(9, 4, 30), dim=1)
    coo = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.rand(edge_index.shape[1]), (4, 9)
    )
    adj = {
        "csr": lambda: coo.to_sparse_csr(),
        "csc": lambda: coo.to_sparse_csc(),
        "coo": lambda: coo.coalesce(),
        # Out of order and with one repeated entry.
        "coo_uncoalesced": lambda: torch.sparse_coo_tensor(
            torch.cat([edge_index.flip(0, 1), edge_index.flip(0)[:, :1]], dim=1),
            torch.rand(edge_index.shape[1] + 1),
            (4, 9),
        ),
    }[kind]()
    graph = Graph.of(adj)
    assert (graph.num_src, graph.num_dst) == (9, 4)
    pattern = torch.zeros(4, 9)
    if kind == "coo_uncoalesced":
        indices = adj._indices()
        pattern.index_put_(tuple(indices), torch.ones(indices.shape[1]), True)
    else:
        pattern[coo.to_dense() != 0] = 1
    assert torch.equal(_values(graph), pattern)
    weight = adj._values() if kind.startswith("coo") else adj.values()
    x = torch.randn(9, 3)
    expected = adj.to_dense() @ x
    torch.testing.assert_close(ops.spmm(adj, x, weight), expected)


def test_from_sparse_tensor():
    torch_sparse = pytest.importorskip("torch_sparse")
    case = ALL["wide"]
    value = torch.rand(case.num_edges)
    adj = torch_sparse.SparseTensor.from_edge_index(
        case.edge_index, value, sparse_sizes=case.size
    )
    graph = Graph.of(adj.t())
    assert (graph.num_src, graph.num_dst) == case.size
    reference = Graph.from_edge_index(case.edge_index, size=case.size)
    assert torch.equal(_values(graph), _values(reference))
    x = torch.randn(case.num_src, 3)
    expected = ops.spmm(reference, x, value)
    actual = ops.spmm(graph, x, adj.t().storage.value())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("order", [None, "row", "col"])
def test_from_edge_index_class(order):
    case = ALL["wide"]
    adj = EdgeIndex(case.edge_index, sparse_size=case.size)
    if order is not None:
        adj = adj.sort_by(order).values
    graph = Graph.of(adj)
    plain = adj.as_tensor()
    _check(graph, case._replace(edge_index=plain))
    _check(graph.t, _flipped(case._replace(edge_index=plain)), stable=False)


def test_of_a_graph_is_itself():
    graph = Graph.from_edge_index(random_edges(5, 5, 9))
    assert Graph.of(graph) is graph


def test_of_is_cached_per_tensor():
    edge_index = random_edges(5, 5, 9)
    graph = Graph.of(edge_index, size=5)
    assert Graph.of(edge_index, size=5) is graph
    assert Graph.of(edge_index, size=(5, 5)) is graph
    other = edge_index.clone()
    assert Graph.of(other, size=5) is not graph


def test_of_follows_the_size():
    edge_index = random_edges(5, 5, 9)
    for size in (5, 8, (6, 5), 5, (5, 9)):
        graph = Graph.of(edge_index, size=size)
        wanted = (size, size) if isinstance(size, int) else size
        assert (graph.num_src, graph.num_dst) == wanted
        assert graph.rowptr.numel() == wanted[1] + 1


@pytest.mark.parametrize("through", ["itself", "view", "row", "base", "data"])
def test_of_sees_changes_in_place(through):
    base = random_edges(6, 6, 12)
    edge_index = base[:, 1:]
    Graph.of(edge_index, size=6)
    if through == "itself":
        edge_index[0, 0] = (edge_index[0, 0] + 1) % 6
    elif through == "view":
        edge_index.t()[0].copy_(torch.tensor([5, 5]))
    elif through == "row":
        edge_index[1].zero_()
    elif through == "base":
        base.fill_(3)
    else:
        # Assignment of .data leaves identity and version alone.
        edge_index.data = random_edges(6, 6, 30, seed=5)
    graph = Graph.of(edge_index, size=6)
    assert torch.equal(graph.edge_index, edge_index)
    assert torch.equal(
        _values(graph), _values(Graph.from_edge_index(edge_index, size=6))
    )


def test_of_never_reuses_the_graph_of_a_dead_tensor():
    """Fifty graphs whose tensors die at once and so share addresses (and ids)."""
    for seed in range(50):
        edge_index = random_edges(7, 7, 20, seed=seed)
        graph = Graph.of(edge_index, size=7)
        assert torch.equal(graph.edge_index, random_edges(7, 7, 20, seed=seed))
        del edge_index, graph


def test_cache_does_not_outlive_the_tensor():
    edge_index = random_edges(7, 7, 20)
    graph = weakref.ref(Graph.of(edge_index, size=7))
    assert graph() is not None
    graph().t  # noqa: B018
    del edge_index
    gc.collect()
    assert graph() is None


def test_transposed_graphs_do_not_leak():
    graph = Graph.from_edge_index(random_edges(7, 7, 20))
    alive = weakref.ref(graph)
    flipped = graph.t
    del graph
    gc.collect()
    # Whichever half is held, both directions work; with none held, nothing stays.
    assert flipped.t.t is flipped
    del flipped
    gc.collect()
    assert alive() is None


def test_of_in_inference_mode():
    """Inference tensors have no version counter, so a change can't be seen later."""
    with torch.inference_mode():
        edge_index = random_edges(6, 6, 12)
        x = torch.randn(6, 3)
        for _ in range(3):
            expected = torch.zeros(6, 3).index_add(0, edge_index[1], x[edge_index[0]])
            torch.testing.assert_close(ops.spmm(edge_index, x, size=(6, 6)), expected)
            edge_index[1] = (edge_index[1] + 1) % 6


def test_graph_keeps_its_edges_when_the_input_changes():
    edge_index = random_edges(6, 6, 12)
    kept = edge_index.clone()
    graph = Graph.from_edge_index(edge_index, size=6)
    edge_index.zero_()
    assert torch.equal(graph.edge_index, kept)
    assert torch.equal(graph.t.edge_index, kept.flip(0))
    assert torch.equal(graph.out_degree, torch.bincount(kept[0], minlength=6))
    assert torch.equal(
        _values(graph.t), _values(Graph.from_edge_index(kept.flip(0), size=6))
    )


def test_graph_keeps_its_csr_when_the_input_changes():
    kept = Graph.from_edge_index(SQUARE["sorted"].edge_index, size=13)
    rowptr, col = kept.rowptr.clone(), kept.col.clone()
    graph = Graph.from_csr(rowptr, col, 13)
    rowptr.zero_()
    col.zero_()
    _check(graph, SQUARE["sorted"])
    _check(graph.t, _flipped(SQUARE["sorted"]), stable=False)


def test_graph_is_immutable():
    graph = Graph.from_edge_index(random_edges(6, 6, 12))
    with pytest.raises(AttributeError):
        graph.num_dst = 9


@pytest.mark.parametrize("transposed_first", [False, True])
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy", "to", "torch_save"])
@pytest.mark.parametrize("name", ["unsorted", "sorted", "padded", "empty"])
def test_copies(name, how, transposed_first, tmp_path):
    case = ALL[name]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    if transposed_first:
        assert graph.t is not None
    if how == "pickle":
        again = pickle.loads(pickle.dumps(graph))
    elif how == "copy":
        again = copy.copy(graph)
    elif how == "deepcopy":
        again = copy.deepcopy(graph)
    elif how == "to":
        again = graph.to("cpu")
    else:
        torch.save(graph, tmp_path / "graph.pt")
        again = torch.load(tmp_path / "graph.pt", weights_only=False)
    _check(again, case)
    _check(again.t, _flipped(case), stable=False)
    assert again.t.t is again


def test_to_another_device():
    graph = Graph.from_edge_index(random_edges(6, 6, 12))
    moved = graph.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.rowptr.device == moved.col.device == torch.device("meta")
    assert (moved.num_src, moved.num_dst, moved.num_edges) == (6, 6, 12)
    assert graph.device == torch.device("cpu")


def test_pin_memory_does_as_tensors_do():
    case = SQUARE["unsorted"]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    try:
        torch.zeros(1).pin_memory()
    except RuntimeError as error:
        with pytest.raises(type(error)):
            graph.pin_memory()
    else:
        pinned = graph.pin_memory()
        assert pinned.col.is_pinned()
        _check(pinned, case)


def test_repr_tells_the_sizes():
    text = repr(Graph.from_edge_index(random_edges(6, 4, 12), size=(6, 4)))
    assert "6" in text
    assert "4" in text
    assert "12" in text


@pytest.mark.parametrize(
    ("edges", "size", "value"),
    [
        ([[0, -1], [1, 2]], (4, 4), "-1"),
        ([[0, 1], [1, -7]], (4, 4), "-7"),
        ([[0, 9], [1, 2]], (4, 4), "9"),
        ([[0, 1], [1, 11]], (4, 4), "11"),
        # In range for the other side only.
        ([[0, 1], [1, 5]], (6, 4), "5"),
        ([[0, 5], [1, 3]], (4, 6), "5"),
        ([[0, 2**40], [1, 2]], (4, 4), str(2**40)),
        # These wrap to valid numbers in 32 bits.
        ([[0, 2**32], [1, 2]], (4, 4), str(2**32)),
        ([[0, 1], [1, 2**32 + 1]], (4, 4), str(2**32 + 1)),
        ([[0, 1], [1, -(2**32)]], (4, 4), str(-(2**32))),
        ([[0, -1], [1, 2]], None, "-1"),
        ([[0], [0]], (0, 0), "0"),
    ],
)
def test_bad_indices_name_the_value(edges, size, value):
    edge_index = torch.tensor(edges)
    for build in (Graph.from_edge_index, Graph.of):
        with pytest.raises(EdgeIndexError, match=rf"(?<!\d){value}(?!\d)") as caught:
            build(edge_index, size=size)
        assert isinstance(caught.value, IndexError)
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("adj", "value"),
    [
        (torch.zeros(2, 3), "float32"),
        (torch.zeros(2, 3, dtype=torch.bool), "bool"),
        (torch.zeros(2, 0), "float32"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "3"),
        (torch.zeros(3, dtype=torch.long), "1"),
        (torch.zeros(3, 4, dtype=torch.long), "3"),
        (torch.zeros(1, 4, dtype=torch.long), "1"),
    ],
)
def test_bad_edge_index_names_what_it_got(adj, value):
    for build in (Graph.from_edge_index, Graph.of):
        with pytest.raises(ValueError, match=value):
            build(adj)


@pytest.mark.parametrize("adj", [None, "graph", 3, [[0, 1], [1, 0]]])
def test_not_a_graph_at_all(adj):
    with pytest.raises((TypeError, ValueError)):
        Graph.of(adj)


@pytest.mark.parametrize(
    "size", [(3,), (3, 3, 3), (-1, 3), (3, -1), -2, "ab", (2.5, 3)]
)
def test_bad_size(size):
    with pytest.raises((TypeError, ValueError)):
        Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), size=size)


@pytest.mark.parametrize(
    ("rowptr", "col", "num_src"),
    [
        ([0, 2, 1, 3], [0, 1, 2], 3),  # falls
        ([0, 1, 2], [0, 1, 2], 3),  # ends early
        ([0, 1, 5], [0, 1, 2], 3),  # ends late
        ([1, 2, 3], [0, 1, 2], 3),  # does not begin at zero
        ([-1, 1, 3], [0, 1, 2], 3),
        ([], [], 3),  # not even the zero
        ([0, 1, 3], [0, 1, 3], 3),  # column too large
        ([0, 1, 3], [0, -1, 2], 3),
    ],
)
def test_bad_csr(rowptr, col, num_src):
    with pytest.raises((ValueError, IndexError)):
        Graph.from_csr(
            torch.tensor(rowptr, dtype=torch.long),
            torch.tensor(col, dtype=torch.long),
            num_src,
        )


def test_poisoned_build(poisoned):
    for case in ALL.values():
        graph = Graph.from_edge_index(case.edge_index.clone(), size=case.size)
        _check(graph, case)
        _check(graph.t, _flipped(case), stable=False)


def test_uses_are_counted_until_a_tensor_changes():
    index = torch.arange(6).view(2, 3)
    assert [cache.uses(index) for _ in range(3)] == [1, 2, 3]
    # A view is asked for anew each time, and is not the whole.
    assert [cache.uses(index[0]) for _ in range(2)] == [1, 2]
    assert [cache.uses(index[1]) for _ in range(2)] == [1, 2]
    index.add_(1)
    assert cache.uses(index) == 1
    with torch.inference_mode():
        assert [cache.uses(torch.ones(2)) for _ in range(2)] == [1, 1]


def test_uses_of_tensors_without_memory_are_not_counted():
    for matrix in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert [cache.uses(matrix) for _ in range(2)] == [1, 1]
    seen = []

    def mapped(index):
        seen.append([cache.uses(index) for _ in range(2)])
        return index

    torch.vmap(mapped)(torch.arange(6).view(2, 3))
    assert seen == [[1, 1]]


def test_counts_go_with_their_tensors():
    before = len(cache._counts)
    index = torch.arange(6).view(2, 3)
    cache.uses(index), cache.uses(index[1])
    assert len(cache._counts) == before + 2
    del index
    gc.collect()
    assert len(cache._counts) == before
