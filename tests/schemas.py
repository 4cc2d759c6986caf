"""Random kinds of graphs: a schema says what every graph of a data set has."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64),
    *(torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64),
]


class Pair(Data):
    """Two graphs in one: increments that depend on the attribute, [2, 1] ones too."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_s":
            return self.x_s.size(0)
        if key == "edge_index_st":
            return torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
        if key == "odd_index":
            return -self.shift
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key == "whole":
            return None
        if key == "wide":
            return 1
        return super().__cat_dim__(key, value, *args, **kwargs)


class Fickle(Data):
    """Rules that depend on the very graph."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "odd_index":
            return self.shift if self.shift % 2 else torch.tensor(self.shift)
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key == "wide":
            return 1 if self.shift % 2 else 0
        return super().__cat_dim__(key, value, *args, **kwargs)


class Maker:
    """Draws values with torch's own generator: quick, and hypothesis gives the seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low, high):
        """An integer in [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def tensor(self, *shape, dtype=torch.float32, high=50):
        """Random numbers."""
        numbers = torch.randint(0, max(high, 1), shape, generator=self.generator)
        return numbers.to(dtype)

    def edges(self, nodes, others=None):
        """[2, e]; none where there is no node."""
        others = nodes if others is None else others
        count = self.number(0, 6) if nodes and others else 0
        src = self.tensor(count, dtype=torch.int64, high=nodes)
        return torch.stack([src, self.tensor(count, dtype=torch.int64, high=others)])


def _sparse(m, n, make):
    edges = m.edges(n)
    return make(edges, n)


def _sparse_tensor(edges, n):
    return SparseTensor(row=edges[0], col=edges[1], sparse_sizes=(n, n))


def _torch_coo(edges, n):
    return torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (n, n)).coalesce()


def _torch_csr(edges, n):
    return _torch_coo(edges, n).to_sparse_csr()


def _edge_index(edges, n):
    return EdgeIndex(edges, sparse_size=(n, n)).sort_by("row").values


def _nested(m, n):
    return {
        "a": m.tensor(n, 2),
        "deep": {"index": m.tensor(n, dtype=torch.int64), "text": "t", "none": None},
        "list": [m.tensor(1), m.tensor(n, 3)],
    }


#: Attributes by name: each a function of the maker and the number of nodes.
ATTRIBUTES = {
    "y": lambda m, n: m.tensor(1),
    "scalar": lambda m, n: m.tensor(),
    "scalar_index": lambda m, n: m.tensor(dtype=torch.int64),
    "count": lambda m, n: m.number(0, 9),
    "weight": lambda m, n: m.number(0, 9) / 7,
    "flag": lambda m, n: bool(m.number(0, 1)),
    "blend": lambda m, n: [1, 0.5, True][m.number(0, 2)],
    "number_index": lambda m, n: m.number(0, 3),
    "name": lambda m, n: f"graph {m.number(0, 99)}",
    "words": lambda m, n: ["a"] * m.number(0, 2),
    "numbers": lambda m, n: [1, 2, m.number(0, 9)],
    "empty_list": lambda m, n: [],
    "array": lambda m, n: np.arange(n),
    "nothing": lambda m, n: torch.empty(0),
    "no_columns": lambda m, n: torch.empty(n, 0),
    "node_cube": lambda m, n: m.tensor(n, 2, 3),
    "nested": _nested,
    "empty_dict": lambda m, n: {},
    "tensors": lambda m, n: [m.tensor(n), m.tensor(n, 2)],
    "pair": lambda m, n: (m.tensor(n), m.tensor(1)),
    "some_index": lambda m, n: m.tensor(n, dtype=torch.int64),
    "int_index": lambda m, n: m.tensor(2, n, dtype=torch.int32),
    "float_index": lambda m, n: m.tensor(n),
    "mask_index": lambda m, n: m.tensor(n, dtype=torch.bool, high=2),
    "face": lambda m, n: m.tensor(3, m.number(0, 2), dtype=torch.int64),
    "y_batch": lambda m, n: m.tensor(n + 1, dtype=torch.int64, high=3),
    "mixed": lambda m, n: m.tensor(n, dtype=DTYPES[m.number(0, 4)]),
    "ragged": lambda m, n: m.tensor(*[1] * m.number(1, 3)),
    "adj": lambda m, n: _sparse(m, n, _torch_coo),
    "adj_csr": lambda m, n: _sparse(m, n, _torch_csr),
    "sorted_edges": lambda m, n: _sparse(m, n, _edge_index),
    "class_of": lambda m, n: Index(m.tensor(n, dtype=torch.int64), dim_size=50),
    "with_grad": lambda m, n: m.tensor(n).requires_grad_(),
    "nans": lambda m, n: torch.full((n,), torch.nan),
    "strided": lambda m, n: m.tensor(3, n).t(),
}
if WITH_TORCH_SPARSE:
    ATTRIBUTES["adj_t"] = lambda m, n: _sparse(m, n, _sparse_tensor)

NAMES = sorted(ATTRIBUTES)
_CUSTOM = ("edge_index_s", "edge_index_st", "odd_index", "whole", "wide")


def _some(draw, names, most):
    return draw(st.lists(st.sampled_from(names), unique=True, max_size=most))


@st.composite
def data_lists(draw):
    """A list of 2 to 6 ``Data`` (or of a class with rules of its own) of one schema."""
    m = Maker(draw(st.integers(0, 2**31)))
    cls = draw(st.sampled_from([Data, Data, Pair, Fickle]))
    names = _some(draw, NAMES, 5)
    nodes_by = draw(st.sampled_from(["x", "num_nodes", "both", "neither"]))
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=6))
    graphs = []
    for n in sizes:
        graph = cls()
        if nodes_by in ("x", "both"):
            graph.x = m.tensor(n, 3, dtype=dtype)
        graph.edge_index = m.edges(n)
        if nodes_by in ("num_nodes", "both"):
            graph.num_nodes = n
        if cls is not Data:
            _custom(m, graph, n)
        for name in names:
            graph[name] = ATTRIBUTES[name](m, n)
        graphs.append(graph)
    return graphs


def _custom(m, graph, n):
    graph.shift = m.number(0, 3)
    graph.x_s, graph.x_t = m.tensor(n, 2), m.tensor(n + 1, 2)
    graph.edge_index_s = m.edges(n)
    graph.edge_index_st = m.edges(n, n + 1)
    graph.odd_index = m.tensor(2, dtype=torch.int64)
    graph.whole = m.tensor(2, 2)
    graph.wide = m.tensor(2, 2)


NODE_TYPES = ("paper", "author", "venue")
_TYPED = [name for name in NAMES if name not in ("face",)]


@st.composite
def hetero_lists(draw, absent=False):
    """A list of 2 to 5 ``HeteroData``; with ``absent``, each may lack whole types."""
    m = Maker(draw(st.integers(0, 2**31)))
    types = draw(st.lists(st.sampled_from(NODE_TYPES), unique=True, min_size=1))
    ends = [(a, "to", b) for a in types for b in types]
    edge_types = draw(st.lists(st.sampled_from(ends), unique=True, max_size=3))
    by_type = {t: [] if absent else _some(draw, _TYPED, 2) for t in types}
    by_type |= {t: [] if absent else _some(draw, _TYPED, 2) for t in edge_types}
    on_graph = ["y", "name"] if absent else _some(draw, _TYPED, 2)
    counted = draw(st.booleans())
    graphs = []
    for _ in range(draw(st.integers(2, 5))):
        graph = HeteroData()
        sizes = {t: m.number(0, 4) for t in types}
        for name in on_graph:
            graph[name] = ATTRIBUTES[name](m, 2)
        for t in types:
            if absent and m.number(0, 2) == 0:
                del sizes[t]
                continue
            graph[t].x = m.tensor(sizes[t], 2)
            if counted:
                graph[t].num_nodes = sizes[t]
            for name in by_type[t]:
                graph[t][name] = ATTRIBUTES[name](m, sizes[t])
        for t in edge_types:
            if absent and (
                t[0] not in sizes or t[2] not in sizes or m.number(0, 2) == 0
            ):
                continue
            graph[t].edge_index = m.edges(sizes[t[0]], sizes[t[2]])
            graph[t].edge_attr = m.tensor(graph[t].edge_index.shape[1], 2)
            for name in by_type[t]:
                graph[t][name] = ATTRIBUTES[name](m, sizes[t[0]])
        graphs.append(graph)
    return graphs
