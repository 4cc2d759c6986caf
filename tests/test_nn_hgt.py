"""HGTConv beside PyG's own."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from oracles import assert_near

import gnnaccel
from gnnaccel.nn import hgt_conv

WIDTHS = {"a": 5, "b": 3, "c": 4}
NODES = {"a": 7, "b": 9, "c": 4}
TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "and", "a"), ("b", "on", "b")]
TYPES += [("c", "in", "a")]  # nothing goes to c


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Counts how often the fused path was taken."""
    calls = []
    inner = hgt_conv.HGTConv._attend

    def counted(self, *args):
        calls.append(True)
        return inner(self, *args)

    monkeypatch.setattr(hgt_conv.HGTConv, "_attend", counted)
    return calls


def make(heads=2, fout=6, widths=WIDTHS, types=TYPES, dtype=torch.float64):
    torch.manual_seed(0)
    layer = pyg.HGTConv(widths, fout, (list(WIDTHS), types), heads=heads).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return layer


def inputs(edges=20, dtype=torch.float64):
    torch.manual_seed(1)
    x = {k: torch.randn(n, WIDTHS[k], dtype=dtype) for k, n in NODES.items()}
    # The last node of every type stands alone.
    index = {
        (s, r, d): torch.stack(
            [torch.randint(0, NODES[end] - 1, (edges,)) for end in (s, d)]
        )
        for s, r, d in TYPES
    }
    return x, index


def outcome(layer, x, index):
    """All outputs and gradients, by name."""
    layer.zero_grad()
    leaves = {k: v.detach().clone().requires_grad_() for k, v in x.items()}
    outs = layer(leaves, index)
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum()
        for out in outs.values()
    )
    total.backward()
    found = {f"out {k}": v.detach() for k, v in outs.items()}
    found |= {f"grad {k}": v.grad for k, v in leaves.items()}
    named = layer.named_parameters()
    found |= {f"grad {k}": p.grad.clone() for k, p in named if p.grad is not None}
    return found


def alike(layer, x, index, dtype=torch.float64):
    """Asserts that an optimised copy, in ``dtype``, computes what PyG does."""
    expected = outcome(layer, x, index)
    ours = gnnaccel.optimize(copy.deepcopy(layer)).to(dtype)
    low = {k: v.to(dtype) for k, v in x.items()}
    for _ in range(2):  # and with the graph remembered
        found = outcome(ours, low, index)
        assert list(found) == list(expected)
        top = max(float(v.abs().max()) for v in expected.values())
        for name, value in found.items():
            # A softmax ignores what shifts all logits: such gradients cancel.
            magnitude = expected[name].abs().clamp(min=top / 64)
            assert_near(value, expected[name], magnitude, slack=30, name=name)
    return ours


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_is_pygs(heads, dtype, taken):
    x, index = inputs()
    x = {k: v.to(dtype).double() for k, v in x.items()}
    layer = make(heads).to(dtype).double()
    alike(layer, x, index, dtype)
    assert len(taken) == 2


@pytest.mark.parametrize("edges", [0, 1])
def test_hardly_an_edge(edges, taken):
    alike(make(), *inputs(edges))
    assert len(taken) == 2


def test_some_types_of_edges_and_nodes_only(taken):
    x, index = inputs()
    for edge_type in TYPES[1:3]:
        del index[edge_type]
    alike(make(), x, index)
    del x["c"], index[TYPES[-1]]
    alike(make(), x, index)
    assert len(taken) == 4


def test_as_wide_as_the_input():
    """Then PyG adds the input to the output, by a learnt share."""
    layer = make(fout=5, heads=1)
    assert "skip.a" in dict(layer.named_parameters())
    alike(layer, *inputs())


def test_types_in_another_order_are_left_to_pyg(taken):
    x, index = inputs()
    index = dict(reversed(index.items()))
    layer = make()
    ours = gnnaccel.optimize(copy.deepcopy(layer))
    expected, found = layer(x, index), ours(x, index)
    for name, out in expected.items():
        torch.testing.assert_close(found[name], out)
    assert taken == []


@pytest.mark.parametrize("change", ["index", "missing", "width"])
def test_errors_are_pygs(change):
    errors = []
    for layer in (make(), gnnaccel.optimize(make())):
        x, index = inputs()
        if change == "index":
            index[TYPES[-1]][0, 2] = 99
        elif change == "missing":
            del x["b"]
        else:
            x["a"] = x["a"][:, :2]
        with pytest.raises((IndexError, KeyError, RuntimeError)) as error:
            layer(x, index)
        errors.append(error.type)
    assert issubclass(errors[1], errors[0])


def test_edges_that_change_in_place_are_seen():
    x, index = inputs()
    layer = make()
    ours = alike(layer, x, index)
    for edge_type in (TYPES[0], TYPES[-1]):
        index[edge_type][0, :10] = (index[edge_type][0, :10] + 1) % 3
        expected, found = layer(x, index), ours(x, index)
        for name, out in expected.items():
            torch.testing.assert_close(found[name], out)


def test_lazy_widths_and_checkpoints():
    x, index = inputs()
    layer = make()
    ours = gnnaccel.optimize(
        pyg.HGTConv(-1, 6, (list(WIDTHS), TYPES), heads=2).double()
    )
    ours({k: v for k, v in x.items()}, index)
    ours.load_state_dict(layer.state_dict())
    again = make()
    again.load_state_dict(ours.state_dict())
    for name, out in layer(x, index).items():
        torch.testing.assert_close(ours(x, index)[name], out)
        torch.testing.assert_close(again(x, index)[name], out)


def test_second_derivatives():
    x, index = inputs(edges=6)
    ours = gnnaccel.optimize(make())
    leaves = tuple(v.requires_grad_() for v in x.values())

    def function(*values):
        return tuple(ours(dict(zip(x, values, strict=True)), index).values())

    assert torch.autograd.gradgradcheck(function, leaves)


def test_the_rest_may_be_hooked(taken):
    x, index = inputs()
    layer = make()
    layer.k_rel.register_forward_hook(lambda m, i, out: out * 2)
    alike(layer, x, index)
    assert taken == []
