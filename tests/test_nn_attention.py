"""What only attention layers have: edge features, loops of their own, dropout."""

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import BIPARTITE, SQUARE
from layers import ATTENTION, assert_alike, make
from torch.autograd import gradgradcheck

import gnnaccel.nn
from gnnaccel.kernels import memory, native
from gnnaccel.nn import attention as shared
from gnnaccel.nn import gat_conv

KINDS = ("gat_heads", "gatv2_heads", "transformer_heads")


@pytest.fixture
def calls(monkeypatch):
    """Counts what was computed on the fused path."""
    found = []

    def count(module, name):
        real = getattr(module, name)

        def counted(*args):
            found.append(args)
            return real(*args)

        monkeypatch.setattr(module, name, counted)

    count(shared, "attend")
    count(gat_conv, "attend_nodes")
    return found


def _x(rows, width=5):
    return torch.randn(rows, width, dtype=torch.float64, requires_grad=True)


def _pair(cls, *args, **kwargs):
    torch.manual_seed(1)
    stock = getattr(pyg, cls)(*args, **kwargs).double()
    ours = getattr(gnnaccel.nn, cls)(*args, **kwargs).double()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize(
    "fill", ["mean", "add", "max", "mul", 2.0, torch.tensor(0.5), None]
)
@pytest.mark.parametrize("graph", ["loops", "double_loops", "unsorted", "int32"])
@pytest.mark.parametrize("cls", ["GATConv", "GATv2Conv"])
def test_edge_features(calls, cls, graph, fill, dim):
    case = SQUARE[graph]
    if graph == "int32" and isinstance(fill, str):
        case = case._replace(edge_index=case.edge_index.long())
    stock, ours = _pair(cls, 5, 4, heads=2, edge_dim=dim, fill_value=fill)
    attr = _x(case.num_edges, dim)
    assert_alike(stock, ours, _x(case.num_src), case.edge_index, attr)
    assert len(calls) == 1
    if dim == 1:
        flat = attr.detach().squeeze(1).requires_grad_()
        assert_alike(stock, ours, _x(case.num_src), case.edge_index, flat)
        assert len(calls) == 2
    # Layers without a map for them ignore them, or complain.
    assert_alike(stock, ours, _x(case.num_src), case.edge_index)
    without = _pair(cls, 5, 4)
    assert_alike(*without, _x(case.num_src), case.edge_index, attr)


@pytest.mark.parametrize("graph", ["loops", "unsorted", "no_edges"])
def test_edge_features_of_transformers(calls, graph):
    case = SQUARE[graph]
    stock, ours = _pair("TransformerConv", 5, 4, heads=2, edge_dim=3)
    attr = _x(case.num_edges, 3)
    assert_alike(stock, ours, _x(case.num_src), case.edge_index, attr)
    assert len(calls) == 1
    assert_alike(stock, ours, _x(case.num_src), case.edge_index)
    assert_alike(
        *_pair("TransformerConv", 5, 4), _x(5), SQUARE["loops"].edge_index, attr
    )


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("graph", ["wide", "tall", "padded"])
@pytest.mark.parametrize("cls", ATTENTION)
def test_two_sides(calls, cls, graph, loops):
    case = BIPARTITE[graph]
    options = {} if cls == "TransformerConv" else {"add_self_loops": loops}
    stock, ours = _pair(cls, (5, 3), 4, heads=2, **options)
    x = (_x(case.num_src), _x(case.num_dst, 3))
    assert_alike(stock, ours, x, case.edge_index)
    assert len(calls) == 1
    stock, ours = _pair(cls, 5, 4, heads=2, **options)
    x = (_x(case.num_src), _x(case.num_dst))
    assert_alike(stock, ours, x, case.edge_index)
    assert len(calls) == 2
    assert_alike(stock, ours, (x[0], None), case.edge_index)


@pytest.mark.parametrize("graph", ["wide", "tall", "padded"])
def test_sizes_of_gat(calls, graph):
    case = BIPARTITE[graph]
    stock, ours = _pair("GATConv", (5, 3), 4, heads=2)
    x = (_x(case.num_src), _x(case.num_dst, 3))
    assert_alike(stock, ours, x, case.edge_index, size=case.size)
    assert_alike(stock, ours, (x[0], None), case.edge_index, size=case.size)
    assert len(calls) == 2
    for size in ((case.num_src, None), (case.num_src, case.num_dst + 1), (1, 1)):
        assert_alike(stock, ours, x, case.edge_index, size=size)
    one = _x(7)
    stock, ours = _pair("GATConv", (5, 5), 4)
    assert_alike(stock, ours, one, SQUARE["loops"].edge_index)


@pytest.mark.parametrize("graph", ["loops", "unsorted", "no_edges"])
@pytest.mark.parametrize("cls", ATTENTION)
def test_dropout_drops_what_pyg_drops(calls, cls, graph):
    """From the same state of torch's generator, in training; nothing in eval."""
    case = SQUARE[graph]
    stock, ours = _pair(cls, 5, 4, heads=3, dropout=0.4)
    x = _x(case.num_src)
    for training in (True, False):
        outs = []
        for layer in (stock.train(training), ours.train(training)):
            torch.manual_seed(7)
            layer.zero_grad(set_to_none=True)
            leaf = x.detach().requires_grad_()
            out = layer(leaf, case.edge_index)
            out.square().sum().backward()
            grads = [p.grad for p in layer.parameters()]
            outs.append([out, leaf.grad, *grads, torch.rand(3)])
        for expected, actual in zip(*outs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert len(calls) == 2
    _, ours = _pair(cls, 5, 4, dropout=1.0)
    assert bool(torch.isfinite(ours(x, case.edge_index)).all())


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("cls", ATTENTION)
def test_attention_weights_are_pygs(cls, wanted):
    case = SQUARE["loops"]
    layers = _pair(cls, 5, 4, heads=2)
    found = [
        layer(_x(5).detach() * 0 + 1, case.edge_index, return_attention_weights=wanted)
        for layer in layers
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", KINDS)
def test_loops_are_added_once(monkeypatch, name):
    built = []
    real = shared._looped
    monkeypatch.setattr(shared, "_looped", lambda *a: built.append(a) or real(*a))
    _, ours = make(name)
    edge_index = SQUARE["loops"].edge_index.clone()
    for _ in range(3):
        ours(_x(5), edge_index).sum().backward()
    assert len(built) == (0 if "transformer" in name else 1)
    edge_index[0, 0] = 3
    stock, ours = make(name)
    assert_alike(stock, ours, _x(5), edge_index)


@pytest.mark.parametrize("name", [*KINDS, "gat_no_loops", "gatv2_shared"])
def test_second_derivatives(name):
    _, ours = make(name, 2, 2)
    edge_index = SQUARE["loops"].edge_index
    x = _x(5, 2)
    assert gradgradcheck(lambda x: ours(x, edge_index), (x,))


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize("depth", [None, 4])
@pytest.mark.parametrize("name", KINDS)
def test_no_tensor_per_edge_and_column(monkeypatch, name, depth):
    """What a step keeps and makes grows by heads per edge, not by columns."""
    # torch's profiler does not see the pool.
    monkeypatch.setattr(memory, "THRESHOLD", 1 << 60)
    edges, nodes, heads, columns = 40_000, 50, 2, 64
    edge_index = torch.randint(nodes, (2, edges))
    layer = type(make(name)[1])(8, columns, heads=heads, edge_dim=depth)
    x = torch.randn(nodes, 8, requires_grad=True)
    attr = None if depth is None else torch.randn(edges, depth, requires_grad=True)
    layer(x, edge_index, attr).sum().backward()
    with torch.profiler.profile(profile_memory=True) as record:
        layer(x, edge_index, attr).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in record.events())
    assert largest < edges * heads * columns


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("cls", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_other_aggregations_are_pygs(calls, cls, aggr):
    stock, ours = _pair(cls, 5, 4, aggr=aggr)
    assert "aggr" in ours.why_not_fused()
    assert_alike(stock, ours, _x(13), SQUARE["unsorted"].edge_index)
    assert not calls


@pytest.mark.parametrize("cls", ATTENTION)
def test_hooks_on_edge_updates_are_seen(calls, cls):
    _, ours = _pair(cls, 5, 4)
    ours.register_edge_update_forward_hook(lambda *_: None)
    assert "edge_update" in ours.why_not_fused()


def test_heads_of_no_columns_and_features_of_no_rows():
    for cls in ATTENTION:
        stock, ours = _pair(cls, 5, 4, heads=2)
        assert_alike(stock, ours, _x(0), torch.empty(2, 0, dtype=torch.long))


@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("cls", ["GATv2Conv", "TransformerConv"])
def test_features_of_edges_that_do_not_fit(cls, columns):
    """The kernel reads as many columns as the map has rows: PyG's error, no memory."""
    case = SQUARE["unsorted"]
    _, ours = _pair(cls, 5, 4, heads=2, edge_dim=3)
    edge = torch.rand(case.num_edges, columns, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(_x(case.num_src), case.edge_index.long(), edge)


@pytest.mark.parametrize("cls", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_features_of_no_edges(cls):
    loops = {} if cls == "TransformerConv" else {"add_self_loops": False}
    stock, ours = _pair(cls, 5, 4, heads=2, edge_dim=3, **loops)
    x, edge_index = _x(6), torch.empty(2, 0, dtype=torch.long)
    edge = torch.empty(0, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x, edge_index, edge), stock(x, edge_index, edge))
