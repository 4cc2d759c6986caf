"""GCNConv: normalisation, self-loops, weights and the cache, quirks included."""

import pytest
import torch
from graphs import SQUARE, random_edges
from layers import CONFIGS, assert_alike, compare_layers, inputs, make

import gnnaccel.nn

NORMALISED = [n for n, c in CONFIGS.items() if n.startswith("gcn") and "plain" not in n]


def _x(rows: int = 13) -> torch.Tensor:
    return torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)


def test_hand_computed():
    """Edge 0 -> 1 with loops: degrees 1 and 2, coefficients 1, 1/sqrt(2), 1/2."""
    conv = gnnaccel.nn.GCNConv(1, 1, bias=False)
    torch.nn.init.ones_(conv.lin.weight)
    out = conv(torch.tensor([[1.0], [10.0]]), torch.tensor([[0], [1]]))
    expected = torch.tensor([[1.0], [1 / 2**0.5 + 5.0]])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", NORMALISED)
def test_existing_loops_keep_their_weight_and_the_last_duplicate_wins(route, name):
    stock, ours = make(name)
    edge_index = torch.tensor(
        [[1, 0, 1, 2, 1, 2, 0, 3, 1], [1, 1, 1, 2, 2, 2, 3, 0, 1]]
    )
    args = [_x(5), edge_index]
    if CONFIGS[name].weighted:
        weight = torch.tensor([5.0, 0.3, 7.0, 0.2, 0.9, 4.0, 0.5, 0.6, 11.0])
        args.append(weight.double().requires_grad_())
    assert_alike(stock, ours, *args)
    # And in another order of the edges, another duplicate is the last.
    order = torch.arange(8, -1, -1)
    args[1] = edge_index[:, order]
    if len(args) == 3:
        args[2] = args[2].detach()[order].requires_grad_()
    assert_alike(stock, ours, *args)


@pytest.mark.parametrize("name", [n for n in NORMALISED if CONFIGS[n].weighted])
def test_negative_weights_give_the_same_nan_pattern(route, name):
    """A public report: seed 0, ten nodes, 22 edges, normal weights."""
    torch.manual_seed(0)
    stock, ours = make(name)
    x = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    edge_index = torch.randint(0, 10, (2, 22))
    weight = torch.randn(22, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        assert bool(stock(x, edge_index, weight).isnan().any())
    assert_alike(stock, ours, x, edge_index, weight)


@pytest.mark.parametrize("name", [n for n in NORMALISED if CONFIGS[n].weighted])
def test_weights_that_cancel_to_degree_zero(route, name):
    """An infinite inverse root becomes zero, in the forward and the backward pass."""
    stock, ours = make(name)
    edge_index = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 2, 3, 3]])
    weight = torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    assert_alike(stock, ours, _x(5), edge_index, weight)
    assert_alike(stock, ours, _x(5), edge_index, weight.requires_grad_())


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.startswith("gcn_")])
def test_zero_weights(name):
    stock, ours = make(name)
    args = list(inputs(name, SQUARE["loops"]))
    args[2] = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    assert_alike(stock, ours, *args)


def test_weights_through_the_normalisation():
    """The gradient of a weight has a part through both degrees."""
    stock, ours = make("gcn_weighted")
    args = inputs("gcn_weighted", SQUARE["double_loops"])
    found = compare_layers(stock, ours, args)
    _, plain = make("gcn_plain_weighted")
    direct = compare_layers(*make("gcn_plain_weighted"), args)
    assert not torch.allclose(found["grad of args[2]"], direct["grad of args[2]"])
    assert plain is not None


@pytest.mark.parametrize("bad", ["tuple", "list"])
def test_pairs_of_features_are_refused(bad):
    stock, ours = make("gcn")
    pair = (_x(), _x()) if bad == "tuple" else [_x(), _x()]
    error = assert_alike(stock, ours, pair, SQUARE["unsorted"].edge_index)
    assert isinstance(error, ValueError)
    assert "bipartite" in str(error)


def test_loops_without_normalisation_are_refused():
    with pytest.raises(ValueError, match="does not support adding self-loops"):
        gnnaccel.nn.GCNConv(3, 4, normalize=False, add_self_loops=True)


@pytest.mark.parametrize("name", ["gcn", "gcn_weighted", "gcn_improved"])
def test_cached_means_stale_as_in_pyg(route, name):
    """The first graph stays, whatever graph of as many nodes comes next."""
    stock, ours = make(name, cached=True)
    args = list(inputs(name, SQUARE["unsorted"], grad=False))
    args[0].requires_grad_()
    assert ours._cached_edge_index is None
    assert_alike(stock, ours, *args)
    assert ours._cached_edge_index is not None
    for cached, wanted in zip(
        ours._cached_edge_index, stock._cached_edge_index, strict=True
    ):
        torch.testing.assert_close(cached, wanted)
    args[1] = random_edges(13, 13, 60, seed=77)
    assert_alike(stock, ours, *args)
    # Setting the attribute to None is how people clear it.
    for layer in (stock, ours):
        layer._cached_edge_index = None
    assert_alike(stock, ours, *args)
    args[1] = SQUARE["unsorted"].edge_index
    assert_alike(stock, ours, *args)
    for layer in (stock, ours):
        torch.manual_seed(5)
        layer.reset_parameters()
    assert ours._cached_edge_index is None
    assert_alike(stock, ours, *args)


def test_cached_and_changed_in_place():
    """PyG cached its own copy with the loops; a later change of the input is unseen."""
    stock, ours = make("gcn", cached=True)
    edge_index = random_edges(13, 13, 60)
    assert_alike(stock, ours, _x(), edge_index)
    edge_index[1] = (edge_index[1] + 1) % 13
    assert_alike(stock, ours, _x(), edge_index)


def test_cached_on_a_smaller_graph_fails_as_in_pyg():
    """A public report: batches of two graphs, then one."""
    stock, ours = make("gcn", cached=True)
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 0, 4, 3, 3]])
    assert_alike(stock, ours, _x(6), edge_index)
    error = assert_alike(stock, ours, _x(3), edge_index[:, :3])
    assert isinstance(error, Exception)
    # A larger graph than the cached one works in PyG: the new nodes are alone.
    stock, ours = make("gcn", cached=True)
    assert_alike(stock, ours, _x(3), edge_index[:, :3])
    assert_alike(stock, ours, _x(6), edge_index)


def test_cache_is_filled_by_either_class():
    """A model swapped after its first epoch keeps PyG's cache, and back."""
    stock, ours = make("gcn", cached=True)
    first, second = SQUARE["unsorted"].edge_index, random_edges(13, 13, 60, seed=3)
    x = _x()
    expected = stock(x, first)
    ours._cached_edge_index = stock._cached_edge_index
    torch.testing.assert_close(ours(x, second), expected)
    other_stock, other_ours = make("gcn", cached=True)
    expected = other_ours(x, first)
    other_stock._cached_edge_index = other_ours._cached_edge_index
    torch.testing.assert_close(other_stock(x, second), expected)


def test_switched_off_between_calls():
    """Attributes count when forward runs, not when the layer was made."""
    stock, ours = make("gcn_weighted")
    args = inputs("gcn_weighted", SQUARE["loops"])
    for changes in (
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"normalize": True, "add_self_loops": True, "improved": False},
        {"flow": "target_to_source"},
        {"cached": True},
        {"improved": True},
    ):
        for layer in (stock, ours):
            for key, value in changes.items():
                setattr(layer, key, value)
        assert_alike(stock, ours, *args)


def test_precision_of_the_degrees_follows_x():
    """One edge_index, first in float32 and then in float64: no float32 leftovers."""
    edge_index = random_edges(13, 13, 60)
    stock, ours = make("gcn")
    ours.float()(torch.randn(13, 5), edge_index)
    compare_layers(stock, ours.double(), (_x(), edge_index))


def test_number_of_nodes_follows_x():
    edge_index = random_edges(5, 5, 12)
    stock, ours = make("gcn")
    for rows in (5, 9, 6, 5):
        assert_alike(stock, ours, _x(rows), edge_index)


def test_high_degree_in_float16():
    """A degree of 20,000 in float16: PyG's counts stop at 2048, ours must be right."""
    case = SQUARE["hub"]
    stock, ours = make("gcn")
    compare_layers(
        stock, ours, inputs("gcn", case, grad=False), torch.float16, slack=32
    )


def test_sparse_features_work_as_in_pyg():
    stock, ours = make("gcn")
    x = _x().detach()
    x[x < 0.5] = 0
    sparse = x.to_sparse()
    edge_index = SQUARE["unsorted"].edge_index
    torch.testing.assert_close(ours(sparse, edge_index), stock(sparse, edge_index))
    torch.testing.assert_close(ours(sparse, edge_index), stock(x, edge_index))


@pytest.mark.parametrize("width", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_bias_of_another_dtype_decides_that_of_the_result(dtype, width):
    stock, ours = make("gcn", width)
    for layer in (stock, ours):
        layer.to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
        layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(13, width, dtype=ours.lin.weight.dtype, requires_grad=True)
    edge_index = random_edges(13, 13, 60)
    expected, actual = stock(x, edge_index), ours(x, edge_index)
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
