"""optimize(model, reuse_constant_inputs=True): what cannot change is summed once."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import random_edges
from torch import nn

import gnnaccel
from gnnaccel.nn import branches, constants, neighbours, polynomial
from gnnaccel.ops import product

N, F = 13, 5
LAYERS = {
    "gcn": lambda: pyg.GCNConv(F, 3),
    "gcn_wide": lambda: pyg.GCNConv(F, 8),
    "gcn_no_loops": lambda: pyg.GCNConv(F, 3, add_self_loops=False, bias=False),
    "sage": lambda: pyg.SAGEConv(F, 3),
    "sage_max": lambda: pyg.SAGEConv(F, 3, aggr="max"),
    "sage_no_root": lambda: pyg.SAGEConv(F, 8, root_weight=False),
    "graph": lambda: pyg.GraphConv(F, 3),
    "gin": lambda: pyg.GINConv(nn.Linear(F, 3), train_eps=True),
    "gin_inplace": lambda: pyg.GINConv(
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(F, 3))
    ),
    "rgcn": lambda: pyg.RGCNConv(F, 3, 2),
    "sg": lambda: pyg.SGConv(F, 3, 3),
    "tag": lambda: pyg.TAGConv(F, 3, 2),
    "appnp": lambda: pyg.APPNP(3, 0.1),
    "simple": lambda: pyg.SimpleConv("mean"),
    "lg": lambda: pyg.LGConv(),
}
#: Sums over neighbours that are left to do at every call.
#: Those that take weights in between: a second sum of RGCN is of what they made.
LEFT = {"appnp": 2, "rgcn": 2}
WEIGHTED = ("gcn", "gcn_no_loops", "graph", "sg")


def inputs(name="", weighted=False):
    torch.manual_seed(1)
    x = torch.randn(N, F, dtype=torch.float64)
    edge_index = random_edges(N, N, 60)
    more = ()
    if name == "rgcn":
        more = (torch.randint(0, 2, (60,)),)
    if weighted:
        more = (torch.rand(60, dtype=torch.float64),)
    return x, edge_index, *more


def make(name, **kwargs):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    ours = gnnaccel.optimize(copy.deepcopy(stock), reuse_constant_inputs=True, **kwargs)
    return stock, ours


@pytest.fixture
def sums(monkeypatch):
    """Counts sums over neighbours."""
    calls = []
    counts = (
        (product, "run_spmm_sum"),
        (polynomial, "run_spmm_sum"),
        (neighbours, "reduce_extreme"),
        (branches, "run_extreme"),
    )
    for owner, name in counts:
        inner = getattr(owner, name)

        def counted(*args, inner=inner, **options):
            calls.append(1)
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, counted)
    return calls


def alike(stock, ours, *args):
    """Outputs and gradients of parameters."""
    found = []
    for layer in (stock, ours):
        layer.zero_grad()
        out = layer(*args)
        if out.requires_grad:
            out.sin().sum().backward()
        grads = {k: p.grad for k, p in layer.named_parameters()}
        found.append((out.detach().clone(), grads))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_equal_results_and_nothing_is_summed_twice(name, weighted, sums):
    if weighted and name not in WEIGHTED:
        pytest.skip("takes no weights")
    stock, ours = make(name)
    args = inputs(name, weighted)
    for _ in range(3):
        alike(stock, ours, *args)
    sums.clear()
    alike(stock, ours, *args)
    assert len(sums) == LEFT.get(name, 0)


@pytest.mark.parametrize("name", LAYERS)
def test_off_by_default(name, sums):
    layer = gnnaccel.optimize(LAYERS[name]().double())
    args = inputs(name)
    counts = []
    for _ in range(4):
        sums.clear()
        layer(*args)
        counts.append(len(sums))
    assert counts[0] > 0 and len(set(counts)) == 1
    assert not constants.reuses(layer)


@pytest.mark.parametrize("name", LAYERS)
def test_changes_are_seen(name):
    stock, ours = make(name)
    x, edge_index, *more = inputs(name)
    for step in range(12):
        alike(stock, ours, x, edge_index, *more)
        if step % 4 == 3:
            x.mul_(1.5)
            x[step] = 1.0
        if step == 5:
            edge_index[0, :20] = edge_index[0, :20].flip(0)
        if step == 8:
            x.data = torch.randn_like(x)
        if step == 10 and more:
            more[0][:9] = 1 - more[0][:9]


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_that_change_are_seen(name):
    stock, ours = make(name)
    x, edge_index, weight = inputs(weighted=True)
    for step in range(9):
        alike(stock, ours, x, edge_index, weight)
        if step % 3 == 2:
            weight.mul_(1.3)
            weight[step] = 2.0
    alike(stock, ours, x, edge_index, weight.clone().requires_grad_())
    alike(stock, ours, x, edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_features_that_learn_are_not_kept(name, sums):
    stock, ours = make(name)
    x, *rest = inputs(name)
    for _ in range(3):
        alike(stock, ours, x, *rest)
    x.requires_grad_()
    for _ in range(3):
        grads = []
        for layer in (stock, ours):
            x.grad = None
            layer(x, *rest).sin().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])


def test_another_graph_and_other_features():
    stock, ours = make("sage")
    x, edge_index = inputs()
    other = random_edges(N, N, 40, seed=4)
    y = torch.randn_like(x)
    for _ in range(3):
        for features in (x, y, x[:, :], x.flip(0)):
            for edges in (edge_index, other):
                alike(stock, ours, features, edges)


def test_layers_of_every_kind_on_the_same_input():
    plain = pyg.GCNConv(F, 8, normalize=False).double()
    pairs = [make(name) for name in LAYERS if name != "rgcn"]
    ours = gnnaccel.optimize(copy.deepcopy(plain), reuse_constant_inputs=True)
    args = inputs()
    for _ in range(4):
        for pair in (*pairs, (plain, ours)):
            alike(*pair, *args)


def test_freed_features_leave_nothing():
    _, ours = make("sage")
    x, edge_index = inputs()
    for _ in range(3):
        ours(x, edge_index)
    gone = weakref.ref(x)
    graph = gnnaccel.Graph.of(edge_index, (N, N))
    assert graph.memory._entries
    del x
    gc.collect()
    assert gone() is None and not graph.memory._entries


@pytest.mark.parametrize("training", [True, False])
def test_dropout_before_a_layer(training, sums):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GCNConv(F, 3)

        def forward(self, x, edge_index):
            x = nn.functional.dropout(x, 0.5, training=self.training)
            return self.conv(x, edge_index)

    torch.manual_seed(0)
    stock = Model().double().train(training)
    ours = gnnaccel.optimize(copy.deepcopy(stock), reuse_constant_inputs=True)
    args = inputs()
    for _ in range(4):
        sums.clear()
        outs = []
        for layer in (stock, ours):
            torch.manual_seed(5)
            outs.append(layer(*args))
        torch.testing.assert_close(outs[1], outs[0])
    assert bool(sums) == training


@pytest.mark.parametrize("alias", ["itself", "view", "detached", "numpy", "saved"])
@pytest.mark.parametrize("name", ["simple", "lg", "sg"])
def test_what_was_handed_out_is_its_owners(name, alias):
    """Writes to a result reach neither other results nor what is kept."""
    stock, ours = make(name)
    if name == "sg":
        stock.lin = ours.lin = nn.Identity()
    args = inputs()
    expected = stock(*args)
    held = []
    for _ in range(5):
        out = ours(*args)
        torch.testing.assert_close(out, expected)
        if alias == "itself":
            held.append(out)
        elif alias == "view":
            held.append(out[:4].t())
        elif alias == "detached":
            held.append(out.detach())
        elif alias == "numpy":
            held.append(out.numpy())
        else:
            weight = torch.ones(F, 2, dtype=torch.float64, requires_grad=True)
            held.append((out @ weight).sum())
        del out
        if alias == "saved":
            continue
        held[-1] *= 2
        for i, value in enumerate(held):
            held[i] = value
            assert abs(float(value[0, 0]) - 2 * float(expected[0, 0])) < 1e-9
    for value in held if alias == "saved" else ():
        value.backward()


def test_what_learns_through_a_result_does_not_stick():
    _, ours = make("simple")
    args = inputs()
    for _ in range(4):
        out = ours(*args)
        assert not out.requires_grad
        out.requires_grad_()
        out.sum().backward()
        del out


def test_twice_in_one_step():
    """Both calls keep what they need for the backward pass."""
    stock, ours = make("sage")
    args = inputs()
    for _ in range(4):
        grads = []
        for layer in (stock, ours):
            layer.zero_grad()
            (layer(*args).sin() + layer(*args).cos()).sum().backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        torch.testing.assert_close(grads[1], grads[0])


def test_the_latest_call_decides_and_restore_forgets():
    model = nn.Sequential(pyg.SAGEConv(F, 3), pyg.SGConv(3, 2))
    before = [dict(vars(m)) for m in model.modules()]
    gnnaccel.optimize(model, reuse_constant_inputs=True)
    assert all(constants.reuses(m) for m in model)
    assert all(constants.reuses(m) for m in pickle.loads(pickle.dumps(model)))
    gnnaccel.optimize(model)
    assert not any(constants.reuses(m) for m in model)
    gnnaccel.optimize(model, reuse_constant_inputs=True)
    gnnaccel.restore(model)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_a_layer_left_out_keeps_nothing():
    model = nn.Sequential(pyg.SAGEConv(F, 3), pyg.SAGEConv(3, 2))
    gnnaccel.optimize(model, lambda name, _: name == "1", reuse_constant_inputs=True)
    assert [constants.reuses(m) for m in model] == [False, True]


def test_under_inference_mode_nothing_is_kept():
    stock, ours = make("sage")
    with torch.inference_mode():
        x, edge_index = inputs()
        for _ in range(4):
            torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))
            x.mul_(2)


def test_what_was_made_under_inference_mode_may_be_learnt_from():
    stock, ours = make("sage")
    args = inputs()
    with torch.inference_mode():
        for _ in range(3):
            ours(*args)
    alike(stock, ours, *args)


def test_mean_with_scales_of_its_own():
    """What is folded into a sum is not kept with it."""
    stock = pyg.GINConv(nn.Linear(F, 3), eps=0.5, aggr="mean").double()
    ours = gnnaccel.optimize(copy.deepcopy(stock), reuse_constant_inputs=True)
    for _ in range(4):
        alike(stock, ours, *inputs())
    args = inputs()
    for eps in (0.5, 2.0, 0.1):
        for layer in (stock, ours):
            layer.eps.fill_(eps)
        alike(stock, ours, *args)


def test_compiled():
    stock, ours = make("sage")
    args = inputs()
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(*args), stock(*args))
