"""Sums of mapped neighbours against their formula, by the fused kernel and without."""

import pytest
import torch
from graphs import random_edges
from oracles import compare
from oracles import spmm as oracle_spmm
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel.nn as gnn
from gnnaccel import Graph, ops
from gnnaccel.kernels import linear, native
from gnnaccel.nn.mapped import mapped_sum
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.product import Scales

NODES, EDGES = 203, 2400


@pytest.fixture
def calls(monkeypatch):
    """What the fused kernel was called with."""
    found = []

    def spy(*args, **options):
        found.append(options)
        return kernel(*args, **options)

    kernel = linear.spmm_linear
    monkeypatch.setattr(linear, "spmm_linear", spy)
    return found


def _adj(seed=0):
    edge_index = random_edges(
        NODES - 3, NODES - 3, EDGES, seed
    )  # 3 nodes without edges
    return edge_index, Adj(
        Graph.of(edge_index, size=(NODES, NODES)), None, NODES, NODES
    )


def _scales(kind, dtype):
    generator = torch.Generator().manual_seed(5)

    def some(n):
        return torch.rand(n, generator=generator, dtype=torch.float64).float() + 0.5

    found = {
        "none": Scales(),
        "all": Scales(some(NODES), some(NODES), some(NODES)),
        "mean": Scales(dst=some(NODES)),
        "own": Scales(own=some(1)),
    }[kind]
    return Scales(*(None if s is None else s.to(dtype) for s in found))


def _leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _compare(
    dtype, width, columns, scales="none", root=True, bias=True, weighted=False
):
    edge_index, adj = _adj()
    constant = torch.rand(EDGES, dtype=torch.float64) + 0.5 if weighted else None
    narrow = None if constant is None else constant.to(dtype)

    def ours(x, rel, root, bias):
        factors = _scales(scales, dtype)
        return mapped_sum(adj, x, rel, root, bias, narrow, factors)

    def oracle(x, rel, root, bias):
        factors = _scales(scales, torch.float64)
        rows = x if factors.src is None else x * factors.src.unsqueeze(-1)
        wide = None if narrow is None else narrow.double()
        out = oracle_spmm(edge_index, rows, wide, "sum", NODES)
        out = out if factors.dst is None else out * factors.dst.unsqueeze(-1)
        out = out if factors.own is None else out + x * factors.own.unsqueeze(-1)
        out = out @ rel.t()
        out = out if root is None else out + x @ root.t()
        return out if bias is None else out + bias

    args = (
        _leaf(NODES, width),
        _leaf(columns, width),
        _leaf(columns, width) if root else None,
        _leaf(columns) if bias else None,
    )
    for _ in range(2):  # constant weights are put in order at their second use
        compare(ours, oracle, args, dtype, slack=3)


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("scales", ["none", "all", "mean", "own"])
@pytest.mark.parametrize("weighted", [False, True])
def test_terms(isa, calls, weighted, scales, root):
    _compare(torch.float32, 32, 32, scales, root, weighted=weighted)
    assert len(calls) == (0 if isa == "baseline" else 4)


@pytest.mark.parametrize(
    ("width", "columns"),
    [(16, 16), (48, 48), (64, 64), (80, 80), (128, 128), (256, 256), (144, 16)],
)
def test_widths(isa, calls, width, columns):
    _compare(torch.float32, width, columns, bias=False)
    fused = 2 if width == columns else 1  # what narrows is mapped first, fused backward
    assert len(calls) == (0 if isa == "baseline" else 2 * fused)


@pytest.mark.parametrize("width", [15, 17, 272])
def test_widths_that_are_not_fused(calls, width):
    _compare(torch.float32, width, width)
    assert not calls


@pytest.mark.parametrize("root", [True, False])
def test_every_backend(backend, root):
    for dtype in (torch.float32, torch.float64):
        _compare(dtype, 16, 16, "all", root)


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_the_gradients_that_are_needed(calls, wanted):
    _, adj = _adj()
    args = [t.detach().float() for t in (_leaf(NODES, 16), _leaf(16, 16))]
    args += [t.detach().float() for t in (_leaf(16, 16), _leaf(16))]
    for k, t in enumerate(args):
        t.requires_grad_(bool(wanted >> k & 1))
    with ops.backend("reference"):
        mapped_sum(adj, *args).sum().backward()
    expected = [t.grad for t in args]
    for t in args:
        t.grad = None
    mapped_sum(adj, *args).sum().backward()
    assert calls
    for t, grad in zip(args, expected, strict=True):
        assert (t.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(t.grad, grad, rtol=1e-4, atol=1e-3)


def test_a_long_row_is_left_to_the_other_kernels(calls):
    edge_index = torch.stack([torch.arange(9000) % NODES, torch.full((9000,), 3)])
    adj = Adj(Graph.of(edge_index, size=(NODES, NODES)), None, NODES, NODES)
    x, rel = _leaf(NODES, 16).float(), _leaf(16, 16).float()
    mapped_sum(adj, x, rel)
    assert not calls


def test_first_and_second_derivatives(backend):
    edge_index = random_edges(7, 7, 20)
    adj = Adj(Graph.of(edge_index, size=(7, 7)), None, 7, 7)

    def ours(*args):
        return mapped_sum(adj, *args)

    args = (_leaf(7, 3), _leaf(2, 3), _leaf(2, 3), _leaf(2))
    assert gradcheck(ours, args)
    assert gradgradcheck(ours, args)
    # That checks the derivative of the first derivative, whatever that one is.
    once, twice = (
        torch.autograd.grad(ours(*args).sin().sum(), args, create_graph=again)
        for again in (False, True)
    )
    torch.testing.assert_close(once, twice)


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
def test_layers_reach_the_kernel(calls):
    edge_index, _ = _adj()
    x = torch.randn(NODES, 32, requires_grad=True)
    layers = {
        "gcn": gnn.GCNConv(32, 32),
        "sage": gnn.SAGEConv(32, 32),
        "sage without root": gnn.SAGEConv(32, 32, root_weight=False),
        "graph": gnn.GraphConv(32, 32),
        "gin": gnn.GINConv(torch.nn.Linear(32, 32)),
    }
    if native.isa() == "baseline":
        pytest.skip("torch multiplies faster there")
    for name, layer in layers.items():
        calls.clear()
        layer(x, edge_index).sum().backward()
        assert len(calls) == 2, name
        with torch.no_grad():
            layer(x, edge_index)
        assert len(calls) == 3, name
