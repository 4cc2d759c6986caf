"""Nothing remembered from one call may leak into another."""

import gc
import weakref

import pytest
import torch
from graphs import random_edges
from layers import CONFIGS, assert_alike, make

from gnnaccel import ops

KINDS = (
    "gcn",
    "gcn_weighted",
    "gcn_no_loops_weighted",
    "sage",
    "sage_max",
    "graph_weighted",
    "gin",
)


def _x(rows: int = 13) -> torch.Tensor:
    return torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)


def _weight(name: str, edges: int = 60) -> list[torch.Tensor]:
    if not CONFIGS[name].weighted:
        return []
    return [torch.rand(edges, dtype=torch.float64) + 0.1]


@pytest.mark.parametrize("name", KINDS)
def test_edge_index_changed_in_place(route, name):
    stock, ours = make(name)
    edge_index, weight = random_edges(13, 13, 60), _weight(name)
    x = _x()
    assert_alike(stock, ours, x, edge_index, *weight)
    changes = (
        lambda: edge_index[0].add_(1).remainder_(13),
        lambda: edge_index[1, ::3].fill_(2),
        lambda: edge_index.t()[4].copy_(torch.tensor([7, 7])),
        lambda: edge_index.copy_(random_edges(13, 13, 60, seed=8)),
        lambda: setattr(edge_index, "data", random_edges(13, 13, 60, seed=9)),
    )
    for change in changes:
        change()
        assert_alike(stock, ours, x, edge_index, *weight)


@pytest.mark.parametrize("name", KINDS)
def test_edge_index_resized_by_data(name):
    stock, ours = make(name)
    edge_index = random_edges(13, 13, 60)
    assert_alike(stock, ours, _x(), edge_index, *_weight(name))
    edge_index.data = random_edges(13, 13, 25, seed=4)
    assert_alike(stock, ours, _x(), edge_index, *_weight(name, 25))


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.weighted])
def test_weight_changed_in_place(route, name):
    stock, ours = make(name)
    edge_index, (weight,) = random_edges(13, 13, 60), _weight(name)
    x = _x()
    for step in range(4):
        assert_alike(stock, ours, x, edge_index, weight)
        weight.mul_(1.7)
        weight[step] = 9.0
    # Without and with a weight, on the same edges.
    assert_alike(stock, ours, x, edge_index)
    assert_alike(stock, ours, x, edge_index, weight)
    assert_alike(stock, ours, x, edge_index, weight.clone().requires_grad_())
    # .data leaves the version as it was.
    weight.data.fill_(0.25)
    assert_alike(stock, ours, x, edge_index, weight)


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.weighted])
def test_weight_used_again_and_again(route, name):
    """What is worth remembering from the second call on is right in every call."""
    stock, ours = make(name)
    graphs = [random_edges(13, 13, 60, seed=seed) for seed in (1, 2)]
    (weight,) = _weight(name)
    for _ in range(2):
        for _ in range(4):
            for edge_index in graphs:
                assert_alike(stock, ours, _x(), edge_index, weight)
        weight.mul_(weight)
    graphs[0].copy_(random_edges(13, 13, 60, seed=3))
    for _ in range(3):
        for edge_index in graphs:
            assert_alike(stock, ours, _x(), edge_index, weight)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_changed_between_calls(name):
    stock, ours = make(name)
    edge_index, weight, x = random_edges(13, 13, 60), _weight(name), _x()
    for factor in (1.0, 2.0, -0.5):
        for layer in (stock, ours):
            for parameter in layer.parameters():
                parameter.data.mul_(factor)
        assert_alike(stock, ours, x, edge_index, *weight)


@pytest.mark.parametrize("name", KINDS)
def test_fifty_graphs_that_reuse_memory(name):
    """Freed tensors come back at the same address, often as the same Python id."""
    stock, ours = make(name)
    for seed in range(50):
        torch.manual_seed(seed)
        edge_index = random_edges(13, 13, 60, seed=seed)
        weight = _weight(name)
        x = _x()
        assert_alike(stock, ours, x, edge_index, *weight)
        del edge_index, weight, x


@pytest.mark.parametrize("name", KINDS)
def test_number_of_nodes_changes(route, name):
    stock, ours = make(name)
    edge_index, weight = random_edges(5, 5, 12), _weight(name, 12)
    for rows in (5, 9, 5, 7):
        assert_alike(stock, ours, _x(rows), edge_index, *weight)


@pytest.mark.parametrize("name", ["sage", "graph_weighted", "gin"])
def test_sides_change_between_calls(name):
    stock, ours = make(name)
    edge_index, weight = random_edges(5, 5, 12), _weight(name, 12)
    for num_src, num_dst in ((5, 5), (9, 6), (6, 9), (5, 12)):
        assert_alike(stock, ours, (_x(num_src), _x(num_dst)), edge_index, *weight)


@pytest.mark.parametrize("name", KINDS)
def test_inference_tensors(name):
    """They have no version counter: a change in place can't be noticed later."""
    stock, ours = make(name)
    with torch.inference_mode():
        edge_index, weight = random_edges(13, 13, 60), _weight(name)
        x = torch.randn(13, 5, dtype=torch.float64)
        for _ in range(3):
            torch.testing.assert_close(
                ours(x, edge_index, *weight), stock(x, edge_index, *weight)
            )
            edge_index[0] = (edge_index[0] + 1) % 13
            for w in weight:
                w.mul_(2)
    # And outside the mode, with a graph that was made inside.
    with torch.no_grad():
        torch.testing.assert_close(
            ours(x, edge_index, *weight), stock(x, edge_index, *weight)
        )


@pytest.mark.parametrize("name", KINDS)
def test_no_grad_then_grad(name):
    """What a run without gradients remembers must not cut off a later backward."""
    stock, ours = make(name)
    edge_index = random_edges(13, 13, 60)
    weight = [w.requires_grad_() for w in _weight(name)]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = ours(_x(), edge_index, *weight)
        assert not out.requires_grad
        assert_alike(stock, ours, _x(), edge_index, *weight)


@pytest.mark.parametrize("name", KINDS)
def test_backward_twice_and_later(name):
    """The graph is freed, changed or rebuilt between forward and backward."""
    stock, ours = make(name)
    weight = _weight(name)
    grads = []
    for layer in (stock, ours):
        torch.manual_seed(1)
        x = _x()
        edge_index = random_edges(13, 13, 60)
        out = layer(x, edge_index, *weight).square().sum()
        del edge_index
        for seed in range(5):
            layer(_x(), random_edges(13, 13, 60, seed=seed), *weight)
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        again = torch.autograd.grad(out, x)[0]
        assert torch.equal(first, again)
        grads.append(first)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", ["gcn_weighted", "sage_max", "gin"])
def test_memory_of_a_graph_goes_with_its_edge_index(name):
    """A new graph on every call must not pile up."""
    _, ours = make(name)
    x, weight = _x(), _weight(name)
    alive = []

    def epoch():
        for seed in range(50):
            edge_index = random_edges(13, 13, 60, seed=seed)
            alive.append(weakref.ref(edge_index))
            ours(x, edge_index, *weight).sum().backward()

    epoch()
    gc.collect()
    before = len(gc.get_objects())
    epoch()
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    # The list of references itself grows by fifty.
    assert len(gc.get_objects()) - before < 100


@pytest.mark.parametrize("name", KINDS)
def test_backends_do_not_share_leftovers(name):
    stock, ours = make(name)
    edge_index, weight, x = random_edges(13, 13, 60), _weight(name), _x()
    for backend in ("reference", "auto", "reference", "auto"):
        with ops.backend(backend):
            assert_alike(stock, ours, x, edge_index, *weight)


@pytest.mark.parametrize("view", [False, True])
def test_data_swapped_for_other_data_at_the_same_address(view):
    """What is freed in between leaves its address to whoever comes next."""
    block = bytearray(random_edges(13, 13, 60).numpy().tobytes())

    def at_one_address():
        return torch.frombuffer(block, dtype=torch.long).view(2, 60)

    stock, ours = make("sage")
    edge_index = at_one_address()[:] if view else torch.empty(2, 60, dtype=torch.long)
    edge_index.data = at_one_address()
    assert_alike(stock, ours, _x(), edge_index)
    edge_index.data = torch.zeros(2, 60, dtype=torch.long)
    block[:] = random_edges(13, 13, 60, seed=9).numpy().tobytes()
    edge_index.data = at_one_address()
    with torch.no_grad():
        x = _x()
        torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.weighted])
def test_weights_that_a_fused_optimizer_learns(name):
    """Its step writes to them and leaves their version as it was."""
    stock, ours = make(name)
    edge_index, x = random_edges(13, 13, 60), _x()
    weight = torch.nn.Parameter(_weight(name)[0])
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    for _ in range(4):
        with torch.no_grad():
            expected = stock(x, edge_index, weight)
            torch.testing.assert_close(ours(x, edge_index, weight), expected)
        weight.grad = torch.rand_like(weight)
        optimizer.step()
