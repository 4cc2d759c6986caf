"""torch.compile(fullgraph=True) of ops and layers: one graph, the same numbers."""

import pytest
import torch
import torch._dynamo
from graphs import BIPARTITE, SQUARE, random_edges
from layers import inputs, make
from oracles import assert_near
from oracles import spmm as oracle_spmm
from torch._dynamo.testing import CompileCounterWithBackend

from gnnaccel import Graph, ops

KINDS = (
    "gcn",
    "gcn_weighted",
    "gcn_no_loops",
    "gcn_plain_weighted",
    "sage",
    "sage_max",
    "sage_project",
    "graph_weighted",
    "graph_mean",
    "gin_train_eps",
)


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    # What was dynamic in one test must not be so in the next.
    torch._dynamo.pgo.reset_code_state()
    yield
    torch._dynamo.reset()


def _gradients(function, args):
    leaves = [
        a.detach().clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    out = function(*leaves)
    out.square().sum().backward()
    return [
        out.detach(),
        *(
            t.grad
            for t in leaves
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ),
    ]


def _same(compiled, eager, args):
    for got, wanted in zip(
        _gradients(compiled, args), _gradients(eager, args), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_layers(name, dynamic):
    stock, ours = make(name)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    args = inputs(name, SQUARE["unsorted"])
    _same(compiled, stock, args)
    # The same code on another graph of the same sizes: nothing may be frozen in it.
    other = (args[0], random_edges(13, 13, 60, seed=6), *args[2:])
    _same(compiled, stock, other)


@pytest.mark.parametrize("name", KINDS)
def test_layers_see_changes_in_place(name):
    stock, ours = make(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    edge_index = random_edges(13, 13, 60)
    x, _, *rest = inputs(name, SQUARE["unsorted"])
    for _ in range(3):
        _same(compiled, stock, (x, edge_index, *rest))
        edge_index[0] = (edge_index[0] + 1) % 13
        edge_index[1, ::4] = 3


@pytest.mark.parametrize("name", KINDS)
def test_dynamic_sizes_do_not_recompile_each_time(name):
    """Sampled batches: nodes and edges differ at every step."""
    stock, ours = make(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    for nodes, edges in ((13, 60), (17, 41), (29, 100), (8, 33)):
        case = SQUARE["unsorted"]._replace(
            edge_index=random_edges(nodes, nodes, edges), num_src=nodes, num_dst=nodes
        )
        _same(compiled, stock, inputs(name, case))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["sage", "graph_weighted", "gin"])
def test_bipartite_layers(name):
    stock, ours = make(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    case = BIPARTITE["wide"]
    (x, y), edge_index, *rest = inputs(name, case)
    rest = [r for r in rest if r is not None]

    def call(layer):
        return lambda x, y, *w: layer((x, y), edge_index, *w)

    _same(call(compiled), call(stock), (x, y, *rest))


@pytest.mark.parametrize("name", ["gcn", "sage_max"])
def test_layers_through_inductor(name):
    stock, ours = make(name)
    compiled = torch.compile(ours, fullgraph=True)
    _same(compiled, stock, inputs(name, SQUARE["unsorted"]))


def test_a_model_of_layers():
    """A whole training step's forward in one graph, and its parameters' gradients."""

    class Net(torch.nn.Module):
        def __init__(self, side):
            super().__init__()
            pairs = [make(name, 5, 5) for name in ("gcn", "sage", "graph", "gin")]
            self.layers = torch.nn.ModuleList([pair[side] for pair in pairs])

        def forward(self, x, edge_index):
            for layer in self.layers:
                x = layer(x, edge_index).relu()
            return x

    stock, ours = Net(0), Net(1)
    ours.load_state_dict(stock.state_dict())
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(13, 5, dtype=torch.float64)
    edge_index = SQUARE["unsorted"].edge_index
    compiled(x, edge_index).square().sum().backward()
    stock(x, edge_index).square().sum().backward()
    for wanted, got in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_spmm(backend, reduce, dynamic):
    case = BIPARTITE["padded"]

    def function(edge_index, x, w):
        return ops.spmm(edge_index, x, w, reduce, size=case.size)

    def oracle(edge_index, x, w):
        return oracle_spmm(edge_index, x, w, reduce, case.num_dst)

    compiled = torch.compile(
        function, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    x = torch.randn(case.num_src, 5, dtype=torch.float64)
    weight = torch.rand(case.num_edges, dtype=torch.float64)
    # A clone: torch.compile leaves marks on tensors that it saw as dynamic.
    _same(compiled, oracle, (case.edge_index.clone(), x, weight))
    _same(compiled, oracle, (random_edges(4, 3, 20, seed=8), x, weight))


def test_edges_dynamic_and_weights_not():
    """Two symbols for one number: a check of shapes must still find them equal."""
    case = BIPARTITE["padded"]
    edge_index = case.edge_index.clone()
    torch._dynamo.maybe_mark_dynamic(edge_index, 1)

    def function(x, w):
        return ops.spmm(edge_index, x, w, size=case.size)

    def oracle(x, w):
        return oracle_spmm(edge_index, x, w, "sum", case.num_dst)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(case.num_src, 5, dtype=torch.float64)
    weight = torch.rand(case.num_edges, dtype=torch.float64)
    _same(compiled, oracle, (x, weight))


@pytest.mark.parametrize("size", [5, (5, 5), [5, 5], None])
def test_forms_of_size(size):
    edge_index = random_edges(5, 5, 12)

    def function(x):
        return ops.spmm(edge_index, x, size=size)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _same(compiled, function, (torch.randn(5, 3, dtype=torch.float64),))


def test_a_graph_may_be_captured():
    """A ready-made Graph used inside the compiled function."""
    graph = Graph.from_edge_index(SQUARE["unsorted"].edge_index, 13)
    assert graph.t is not None

    def function(x):
        return ops.spmm(graph, x, reduce="mean")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _same(compiled, function, (torch.randn(13, 5, dtype=torch.float64),))


def test_a_graph_may_be_an_argument():
    def function(graph, x):
        return ops.spmm(graph, x)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(13, 5, dtype=torch.float64)
    for seed in (1, 2, 3):
        edge_index = random_edges(13, 13, 60, seed=seed)
        out = compiled(Graph.from_edge_index(edge_index, 13), x)
        assert_near(out, oracle_spmm(edge_index, x, None, "sum", 13))


INDEX = torch.tensor([3, 0, 3, 5, 0, 3, 1])
PTR = torch.tensor([0, 0, 3, 3, 4, 7, 7])

OTHERS = {
    "sddmm": lambda a, b: ops.sddmm(SQUARE["loops"].edge_index, a[:5], b[:5]),
    "gather": lambda a, b: ops.gather(a, INDEX) * b,
    "scatter_sum": lambda a, b: ops.scatter(a * b, INDEX, 8),
    "scatter_max": lambda a, b: ops.scatter(a * b, INDEX, 8, "max"),
    "scatter_mul": lambda a, b: ops.scatter(a * b, INDEX, 8, "mul"),
    "segment_mean": lambda a, b: ops.segment(a * b, PTR, "mean"),
    "segment_min": lambda a, b: ops.segment(a * b, PTR, "min"),
    "softmax": lambda a, b: ops.softmax(a, INDEX, 8) * b,
    "edge_softmax": lambda a, b: (
        ops.edge_softmax(SQUARE["loops"].edge_index, a[:5], size=(5, 5)) * b[:5]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ops(backend, name):
    """Against themselves run eagerly, which other files hold against PyG."""
    compiled = torch.compile(OTHERS[name], fullgraph=True, backend="aot_eager")
    args = tuple(torch.randn(7, 3, dtype=torch.float64) for _ in range(2))
    _same(compiled, OTHERS[name], args)


def test_a_custom_op_error_survives_compilation():
    """A bad index in a compiled step is an error, not a read out of bounds."""

    def function(edge_index, x):
        return ops.spmm(edge_index, x, size=(5, 5))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3)
    compiled(torch.tensor([[0, 1], [1, 2]]), x)
    with pytest.raises((IndexError, RuntimeError), match="77"):
        compiled(torch.tensor([[0, 1], [1, 77]]), x)
