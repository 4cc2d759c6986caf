"""RGCNConv and FastRGCNConv beside PyG's own."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from layers import assert_alike, optimised_alike

import gnnaccel
from gnnaccel.nn import rgcn_conv

RELATIONS = 3
CONFIGS = {
    "mean": {},
    "add": {"aggr": "add"},
    "max": {"aggr": "max"},
    "bases": {"num_bases": 2},
    "blocks": {"num_blocks": 2},
    "bare": {"root_weight": False, "bias": False},
    "backwards": {"flow": "target_to_source"},
}
CASES = [("RGCNConv", name) for name in CONFIGS] + [
    ("FastRGCNConv", name) for name in CONFIGS if name != "max"
]


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Counts how often the fused path was taken."""
    calls = []
    inner = rgcn_conv._Relational._fused

    def counted(self, *args):
        out = inner(self, *args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(rgcn_conv._Relational, "_fused", counted)
    return calls


def make(cls, name, n=9, edges=60, fout=6):
    torch.manual_seed(0)
    layer = getattr(pyg, cls)(4, fout, RELATIONS, **CONFIGS[name]).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    edge_index = torch.randint(0, n - 1, (2, edges))  # the last node has no edge
    edge_type = torch.randint(0, RELATIONS, (edges,))
    return layer, torch.randn(n, 4).double(), edge_index, edge_type


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_is_pygs(cls, name, taken):
    layer, *inputs = make(cls, name)
    optimised_alike(layer, *inputs)
    assert taken == [True]


def test_two_kinds_of_nodes(taken):
    layer, x, edge_index, edge_type = make("RGCNConv", "mean")
    edge_index[1] %= 5
    optimised_alike(layer, (x, x[:5]), edge_index, edge_type)
    assert taken == [True]


@pytest.mark.parametrize("edges", [0, 2])
def test_few_edges(edges, taken):
    layer, *inputs = make("RGCNConv", "mean", edges=edges)
    optimised_alike(layer, *inputs)
    assert taken == [True]


def test_a_type_out_of_range_goes_to_pyg(taken):
    layer, x, edge_index, edge_type = make("RGCNConv", "blocks")
    edge_type[3] = RELATIONS
    optimised_alike(layer, x, edge_index, edge_type)
    assert taken == [False]


def test_pyg_words_what_is_wrong():
    layer, x, edge_index, edge_type = make("RGCNConv", "mean")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    for args in (
        (x, edge_index, edge_type.double()),
        ((x,), edge_index, edge_type),
        ((), edge_index, edge_type),
    ):
        assert isinstance(assert_alike(layer, ours, *args), Exception)


def test_types_that_change_in_place_are_seen():
    layer, x, edge_index, edge_type = make("RGCNConv", "mean")
    ours = optimised_alike(layer, x, edge_index, edge_type)
    edge_type[:20] = (edge_type[:20] + 1) % RELATIONS
    torch.testing.assert_close(
        ours(x, edge_index, edge_type), layer(x, edge_index, edge_type)
    )


def test_nodes_without_features_go_to_pyg(taken):
    torch.manual_seed(0)
    layer = pyg.RGCNConv(9, 6, RELATIONS).double()
    _, _, edge_index, edge_type = make("RGCNConv", "mean")
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    torch.testing.assert_close(
        ours(None, edge_index, edge_type), layer(None, edge_index, edge_type)
    )
    assert taken == [False]


def test_second_derivatives():
    layer, x, edge_index, edge_type = make("RGCNConv", "mean")
    ours = gnnaccel.optimize(layer)
    x = x.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ours(x, edge_index, edge_type), (x,))
