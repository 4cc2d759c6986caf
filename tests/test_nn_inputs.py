"""Every form of graph that PyG's layers take, and the errors for those they don't."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import SQUARE
from layers import CONFIGS, assert_alike, inputs, make
from torch_geometric import EdgeIndex

import gnnaccel
from gnnaccel.errors import EdgeIndexError

KINDS = (
    "gcn",
    "gcn_no_loops",
    "gcn_plain",
    "gcn_mean",
    "gcn_backwards",
    "sage",
    "sage_sum",
    "sage_max",
    "sage_project",
    "sage_backwards",
    "graph",
    "graph_mean",
    "graph_max",
    "gin_train_eps",
    "gin_max",
)


def _simple_edges() -> torch.Tensor:
    """Directed, without parallel edges, with two self-loops and an isolated node."""
    return torch.tensor(
        [[0, 0, 3, 2, 1, 5, 5, 2, 6, 4], [1, 2, 3, 0, 4, 5, 2, 6, 1, 1]]
    )


def _x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)


def _matrix(layout: str, value: torch.Tensor | None) -> torch.Tensor:
    """The graph as PyG wants a matrix: rows are destinations."""
    edge_index = _simple_edges()
    if value is None:
        value = torch.ones(edge_index.shape[1], dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), value, (8, 8))
    if layout == "coo_uncoalesced":
        return matrix
    matrix = matrix.coalesce()
    return {
        "coo": lambda: matrix,
        "csr": lambda: matrix.to_sparse_csr(),
        "csc": lambda: matrix.to_sparse_csc(),
    }[layout]()


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC)")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["coo", "coo_uncoalesced", "csr", "csc"])
@pytest.mark.parametrize("name", KINDS)
def test_torch_sparse(route, name, layout, weighted):
    """SAGE and GIN use the values of these, unlike those of a SparseTensor."""
    value = torch.rand(10, dtype=torch.float64) + 0.1 if weighted else None
    assert_alike(*make(name), _x(), _matrix(layout, value))
    assert_alike(*make(name), _x().detach(), _matrix(layout, value))


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC)")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", ["gcn", "gcn_plain", "sage_sum", "graph", "gin"])
def test_gradient_of_the_values_of_torch_sparse(name, layout):
    grads = []
    for layer in make(name):
        value = torch.linspace(0.1, 1, 10, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(4)
        x = _x()
        try:
            layer(x, _matrix(layout, value)).square().sum().backward()
        except (RuntimeError, NotImplementedError) as error:
            grads.append(error)
        else:
            grads.append((x.grad, value.grad))
    expected, actual = grads
    if isinstance(expected, Exception):
        # Where PyG can't, ours may; where it can, so must ours.
        pytest.skip(f"PyG: {expected}")
    assert not isinstance(actual, Exception), actual
    for wanted, got in zip(expected, actual, strict=True):
        assert (wanted is None) == (got is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("weight", [None, "fixed", "learned"])
@pytest.mark.parametrize("name", KINDS)
def test_sparse_tensor(route, name, weight):
    torch_sparse = pytest.importorskip("torch_sparse")
    edge_index = _simple_edges()
    value = None
    if weight is not None:
        value = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    grads = []
    stock, ours = make(name)
    for layer in (stock, ours):
        leaf = None if value is None else value.clone()
        if weight == "learned":
            leaf.requires_grad_()
        adj = torch_sparse.SparseTensor.from_edge_index(
            edge_index, leaf, sparse_sizes=(8, 8)
        ).t()
        torch.manual_seed(4)
        x = _x()
        try:
            out = layer(x, adj)
            out.square().sum().backward()
        except Exception as error:
            grads.append(error)
        else:
            grads.append((out, x.grad, None if leaf is None else leaf.grad))
    expected, actual = grads
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), actual
        return
    assert not isinstance(actual, Exception), actual
    for wanted, got in zip(expected, actual, strict=True):
        assert (wanted is None) == (got is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["sage", "graph", "gin"])
def test_two_sides_of_a_sparse_tensor(name):
    torch_sparse = pytest.importorskip("torch_sparse")
    edge_index = torch.tensor([[0, 1, 2, 3, 7], [0, 0, 1, 1, 2]])
    adj = torch_sparse.SparseTensor.from_edge_index(edge_index, sparse_sizes=(8, 4)).t()
    stock, ours = make(name)
    assert_alike(stock, ours, (_x(8), _x(4)), adj)
    assert_alike(stock, ours, (_x(8), None), adj)


@pytest.mark.parametrize("name", ["sage_max", "graph_max", "gin_max"])
def test_ties_under_a_sparse_tensor(name):
    """That path elects one winner where a plain edge_index splits among the ties."""
    torch_sparse = pytest.importorskip("torch_sparse")
    adj = torch_sparse.SparseTensor.from_edge_index(
        _simple_edges(), sparse_sizes=(8, 8)
    ).t()
    x = torch.randint(-1, 2, (8, 5)).double().requires_grad_()
    assert_alike(*make(name), x, adj)


@pytest.mark.parametrize("name", ["gcn", "gcn_plain", "graph"])
def test_edge_weight_beside_a_sparse_tensor(name):
    """PyG ignores it."""
    torch_sparse = pytest.importorskip("torch_sparse")
    adj = torch_sparse.SparseTensor.from_edge_index(
        _simple_edges(), sparse_sizes=(8, 8)
    ).t()
    assert_alike(*make(name), _x(), adj, torch.rand(10, dtype=torch.float64))


def test_cached_sparse_tensor():
    torch_sparse = pytest.importorskip("torch_sparse")
    stock, ours = make("gcn", cached=True)
    adj = torch_sparse.SparseTensor.from_edge_index(
        _simple_edges(), sparse_sizes=(8, 8)
    ).t()
    assert_alike(stock, ours, _x(), adj)
    assert ours._cached_adj_t is not None
    # Another matrix, the cached result.
    assert_alike(stock, ours, _x(), adj.t())


@pytest.mark.parametrize("order", [None, "row", "col"])
@pytest.mark.parametrize("name", KINDS)
def test_edge_index_class(route, name, order):
    adj = EdgeIndex(_simple_edges(), sparse_size=(8, 8))
    if order is not None:
        adj = adj.sort_by(order).values
    # Its own product is of float32 only.
    stock, ours = (layer.float() for layer in make(name))
    x = _x().detach().float().requires_grad_()
    assert_alike(stock, ours, x, adj)
    if name.startswith(("gcn", "graph")):
        weight = torch.rand(10, requires_grad=True)
        assert_alike(stock, ours, x, adj, weight)


@pytest.mark.parametrize("name", ["gcn", "sage", "sage_max", "graph", "gin"])
def test_edge_index_class_without_sizes(name):
    assert_alike(*make(name), _x(), EdgeIndex(_simple_edges()))
    undirected = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    adj = EdgeIndex(
        undirected, sparse_size=(8, 8), sort_order="row", is_undirected=True
    )
    assert_alike(*make(name), _x(), adj)


def test_matrix_and_edge_index_agree_on_the_direction():
    """A public report: the sparse input silently reversed the edges."""
    torch.manual_seed(10)
    x = torch.rand(4, 5, dtype=torch.float64)
    edge_index = torch.tensor([[0, 0, 1, 2, 3], [2, 3, 3, 0, 0]])
    matrix = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(5, dtype=torch.float64), (4, 4)
    ).to_sparse_csr()
    for name in ("gcn", "sage", "graph", "gin"):
        _, ours = make(name)
        torch.testing.assert_close(ours(x, matrix), ours(x, edge_index))


NAN = float("nan")

BAD_EDGES = {
    "float": (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), None),
    "float_empty": (torch.empty(2, 0), None),
    "bool": (torch.ones(2, 4, dtype=torch.bool), None),
    "int16": (torch.tensor([[0, 1], [1, 0]], dtype=torch.int16), None),
    "uint8": (torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8), None),
    "int8": (torch.tensor([[0, 1], [1, 0]], dtype=torch.int8), None),
    "three_dimensions": (torch.zeros(1, 2, 3, dtype=torch.long), None),
    "one_dimension": (torch.zeros(4, dtype=torch.long), None),
    "three_rows": (torch.zeros(3, 4, dtype=torch.long), None),
    "one_row": (torch.zeros(1, 4, dtype=torch.long), None),
    "negative_source": (torch.tensor([[0, -3], [1, 2]]), "-3"),
    "negative_destination": (torch.tensor([[0, 1], [1, -2]]), "-2"),
    "large_source": (torch.tensor([[0, 93], [1, 2]]), "93"),
    "large_destination": (torch.tensor([[0, 1], [1, 93]]), "93"),
    "first_too_large": (torch.tensor([[8, 1], [1, 2]]), "8"),
    "huge_source": (torch.tensor([[0, 2**40], [1, 2]]), str(2**40)),
    "wraps_in_32_bits": (torch.tensor([[0, 2**32], [1, 2]]), str(2**32)),
    "int32_negative": (torch.tensor([[0, -3], [1, 2]], dtype=torch.int32), "-3"),
    "list": ([[0, 1], [1, 0]], None),
    "none": (None, None),
    "string": ("edges", None),
    "numpy": (torch.tensor([[0, 1], [1, 0]]).numpy(), None),
}


@pytest.mark.parametrize("bad", BAD_EDGES)
@pytest.mark.parametrize("name", KINDS)
def test_bad_edges_fail_as_in_pyg(name, bad):
    """Or work as in PyG, which takes a few of these."""
    edge_index, value = BAD_EDGES[bad]
    stock, ours = make(name)
    found = assert_alike(stock, ours, _x(), edge_index)
    if value is not None:
        assert isinstance(found, Exception)
        assert value in str(found)
    # A good call afterwards is as good as ever.
    assert_alike(stock, ours, _x(), _simple_edges())


BAD_WEIGHTS = {
    "short": torch.rand(3, dtype=torch.float64),
    "long": torch.rand(11, dtype=torch.float64),
    "empty": torch.rand(0, dtype=torch.float64),
    "two_columns": torch.rand(10, 2, dtype=torch.float64),
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "integers": torch.ones(10, dtype=torch.long),
    "float32": torch.rand(10),
    "list": [1.0] * 10,
    "meta": torch.rand(10, device="meta"),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.weighted])
def test_bad_weights_fail_as_in_pyg(name, bad):
    stock, ours = make(name)
    assert_alike(stock, ours, _x(), _simple_edges(), BAD_WEIGHTS[bad])


@pytest.mark.parametrize("name", ["graph_weighted", "gcn_plain_weighted"])
@pytest.mark.parametrize("length", [3, 11])
def test_a_weight_of_wrong_length_is_named(name, length):
    _, ours = make(name)
    with pytest.raises(RuntimeError, match=str(length)):
        ours(_x(), _simple_edges(), torch.rand(length, dtype=torch.float64))


BAD_FEATURES = {
    "vector": torch.randn(8, dtype=torch.float64),
    "scalar": torch.tensor(1.0, dtype=torch.float64),
    "wrong_width": torch.randn(8, 7, dtype=torch.float64),
    "no_width": torch.randn(8, 0, dtype=torch.float64),
    "float32": torch.randn(8, 5),
    "integers": torch.ones(8, 5, dtype=torch.long),
    "too_few_rows": torch.randn(4, 5, dtype=torch.float64),
    "none": None,
    "list": [[1.0] * 5] * 8,
    "meta": torch.randn(8, 5, dtype=torch.float64, device="meta"),
    "triple": (
        torch.randn(8, 5, dtype=torch.float64),
        torch.randn(8, 5, dtype=torch.float64),
        torch.randn(8, 5, dtype=torch.float64),
    ),
    "pair_of_none": (None, None),
    "only_destinations": (None, torch.randn(8, 5, dtype=torch.float64)),
}


@pytest.mark.parametrize("bad", BAD_FEATURES)
@pytest.mark.parametrize("name", KINDS)
def test_bad_features_fail_as_in_pyg(name, bad):
    stock, ours = make(name)
    assert_alike(stock, ours, BAD_FEATURES[bad], _simple_edges())


@pytest.mark.parametrize("name", ["sage", "sage_max", "graph", "gin"])
@pytest.mark.parametrize("shape", [(3, 8, 5), (1, 8, 5), (8, 1, 5), (5,), ()], ids=str)
def test_destinations_of_other_dimensions(name, shape):
    """PyG adds what broadcasts."""
    stock, ours = make(name)
    other = torch.randn(shape, dtype=torch.float64)
    assert_alike(stock, ours, (_x(), other), _simple_edges())


@pytest.mark.parametrize("name", KINDS)
def test_features_that_are_negated_lazily(name):
    """The imaginary part of a conjugate carries its sign as a bit of the tensor."""
    stock, ours = make(name, 1)
    x = torch.randn(8, 1, dtype=torch.complex128).conj().imag
    assert x.is_neg()
    args = (x, _simple_edges())
    if CONFIGS[name].weighted:
        args += (torch.rand(10, dtype=torch.float64),)
    with torch.no_grad():
        torch.testing.assert_close(ours(*args), stock(*args))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [8, 1 << 15])
def test_beside_another_default_device(name, rows):
    """What new tensors without a device get is not what those at hand have."""
    stock, ours = make(name)
    args = (torch.randn(rows, 5, dtype=torch.float64), _simple_edges())
    if CONFIGS[name].weighted:
        args += (torch.rand(10, dtype=torch.float64, requires_grad=True),)
    with torch.device("meta"):
        expected, actual = stock(*args), ours(*args)
        actual.sum().backward()
    assert (
        ours.get_parameter(next(iter(dict(ours.named_parameters())))).grad is not None
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["sage", "sage_max", "graph", "gin"])
@pytest.mark.parametrize(
    "size",
    [(8, 5), (5, 8), (9, 9), (7, 8), (-1, 8), (8,), (8, 8, 8), 8, "ab", (None, 8)],
    ids=str,
)
def test_size_is_checked_as_in_pyg(name, size):
    stock, ours = make(name)
    for x in (_x(), (_x(), None), (_x(), _x())):
        found = assert_alike(stock, ours, x, _simple_edges(), size=size)
        if isinstance(found, EdgeIndexError):
            assert "[0, 5)" in str(found)
        elif isinstance(found, ValueError) and isinstance(size, tuple):
            assert -1 in size or "8" in str(found)


@pytest.mark.parametrize("name", ["sage", "sage_max", "graph", "gin"])
def test_edges_beyond_the_size(name):
    """In range for x, out of range for the destinations that size speaks of."""
    stock, ours = make(name)
    error = assert_alike(stock, ours, (_x(), None), _simple_edges(), size=(8, 5))
    assert isinstance(error, Exception)
    assert "6" in str(error)


@pytest.mark.parametrize("name", KINDS)
def test_wrong_number_of_arguments(name):
    stock, ours = make(name)
    assert isinstance(assert_alike(stock, ours, _x()), TypeError)
    assert isinstance(
        assert_alike(stock, ours, _x(), _simple_edges(), color=3), TypeError
    )


@pytest.mark.parametrize("name", ["gcn", "graph", "sage", "gin"])
def test_arguments_by_name(name):
    stock, ours = make(name)
    for layer_args in (
        {"x": _x(), "edge_index": _simple_edges()},
        {"edge_index": _simple_edges(), "x": _x()},
    ):
        torch.testing.assert_close(ours(**layer_args), stock(**layer_args))
    if name in ("gcn", "graph"):
        weight = torch.rand(10, dtype=torch.float64)
        assert_alike(stock, ours, _x(), _simple_edges(), edge_weight=weight)


@pytest.mark.parametrize(
    "name", ["sage", "sage_max", "graph_weighted", "gin", "gcn_plain"]
)
def test_shapes_alone_on_the_meta_device(name):
    stock, ours = make(name)
    args = inputs(name, SQUARE["unsorted"], grad=False)
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    expected = stock.to("meta")(*meta)
    actual = ours.to("meta")(*meta)
    assert actual.device == expected.device
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype


def test_gin_of_another_dtype():
    """PyG's ``(1 + eps) * x`` takes the features to the layer's dtype."""
    case = SQUARE["unsorted"]
    x = torch.randn(case.num_src, 6)
    stock = pyg.GINConv(torch.nn.Linear(6, 4)).double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    edge_index = case.edge_index.long()
    torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))
