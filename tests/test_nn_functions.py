"""PyG's functions inside optimised modules: PyG's results, and nobody else's affair."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    aggr,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import degree, scatter, segment, softmax, to_dense_batch

import gnnaccel
from gnnaccel.kernels import native
from gnnaccel.nn import functions

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))

BATCH = torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3, 5])
SHUFFLED = BATCH[torch.tensor([7, 2, 9, 0, 4, 1, 3, 8, 6, 5])]
SIZE = 7
FUNCTIONS = (scatter, segment, softmax, degree, to_dense_batch)


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    """Graphs of a few nodes take the path of large ones."""
    for name in ("SUM", "EXTREME", "SOFTMAX", "DENSE", "COUNT"):
        monkeypatch.setattr(functions, f"WORTH_{name}", 0)


@pytest.fixture
def served(monkeypatch):
    """The groups of every reduction and softmax that ran on our kernels."""
    seen = []
    for name in ("reduce_groups", "softmax_groups"):
        own = getattr(functions, name)

        def count(x, groups, *args, own=own):
            seen.append(groups)
            return own(x, groups, *args)

        monkeypatch.setattr(functions, name, count)
    return seen


class Calls(nn.Module):
    """A model that calls one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Net(nn.Module):
    """What people write: layers, and a readout by a function imported by name."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(4, 4)

    def forward(self, x, edge_index, batch, size=None):
        return global_max_pool(self.conv(x, edge_index), batch, size)


def features(*shape, dtype=torch.double):
    # Many ties, and zeros among them.
    return torch.randint(-2, 3, shape).to(dtype).requires_grad_()


def outcome(function, x, *args, second=True, **kwargs):
    """The result, its gradient and the gradient's, or the error."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    try:
        out = function(x, *args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    first = out[0] if isinstance(out, tuple) else out
    found = [*out] if isinstance(out, tuple) else [out]
    if first.requires_grad:
        weight = torch.linspace(-1, 1, first.numel()).to(first).view_as(first)
        (grad,) = torch.autograd.grad((first * weight).sum(), x, create_graph=True)
        found.append(grad)
        if grad.requires_grad and second:
            found.append(torch.autograd.grad(grad.square().sum(), x)[0])
    return found


def alike(function, x, *args, **kwargs):
    """``function`` does inside an optimised model what it does outside."""
    model = gnnaccel.optimize(Calls(function))
    expected = outcome(function, x, *args, **kwargs)
    got = outcome(model, x, *args, **kwargs)
    if isinstance(expected, tuple) or isinstance(got, tuple):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected, equal_nan=True)


# The same results ------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min", "mul", "any"])
@pytest.mark.parametrize("index", [BATCH, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((10,), 0), ((10,), -1), ((10, 3), 0), ((10, 3), -2), ((2, 10, 3), 1)]
    + [((3, 10), -1), ((10, 10), -1), ((10, 2, 3), 0), ((10, 0), 0)],
)
@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.long])
def test_scatter(served, reduce, index, shape, dim, dtype):
    x = torch.randint(-2, 3, shape).to(dtype)
    for size in (SIZE, None, 3, -1):
        if size == 3 and len(shape) > 1 and dim not in (0, -2):
            continue  # PyG's message depends on what lies in memory
        how = {"dim": dim, "dim_size": size, "reduce": reduce}
        alike(scatter, x, index, **how, second=reduce != "mul")
    kernel = reduce not in ("mul", "any") and dtype is not torch.long
    rows_first = dim in (0, -len(shape)) and 0 not in shape[1:]
    assert bool(served) >= (kernel and rows_first)
    assert kernel or not served


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool, global_max_pool])
def test_pooling(served, pool):
    alike(pool, features(10, 3), BATCH, SIZE)
    alike(pool, features(10, 3), SHUFFLED)
    alike(pool, features(10), BATCH)
    assert len(served) == 3
    alike(pool, features(10, 3), None)
    alike(pool, features(10, 3), BATCH[:4])
    alike(pool, features(10, 3), BATCH.int())
    alike(pool, features(10, 3), BATCH - 1)
    alike(pool, features(10, 3), BATCH, 2)
    alike(pool, features(0, 3), BATCH[:0], 2)
    alike(pool, features(0, 3), BATCH[:0])


@pytest.mark.parametrize("shape", [(10,), (10, 1), (10, 5), (10, 2, 9), (10, 40)])
def test_softmax(served, shape):
    x = torch.randn(shape, dtype=torch.double)
    ptr = torch.tensor([0, 3, 5, 5, 10])
    alike(softmax, x, BATCH)
    alike(softmax, x, SHUFFLED, num_nodes=SIZE)
    # torch-scatter has wrong second derivatives of runs: see below for ours.
    alike(softmax, x, None, ptr, second=False)
    alike(softmax, x, BATCH, ptr, second=False)
    assert len(served) == 4
    alike(softmax, x, None, ptr[:-1], second=False)
    alike(softmax, x)
    alike(softmax, x.movedim(0, -1), SHUFFLED, dim=-1)
    alike(softmax, x.float(), SHUFFLED)


def test_second_derivatives_of_runs():
    ptr = torch.tensor([0, 3, 5, 5, 10])
    x = torch.randn(10, 2, dtype=torch.double, requires_grad=True)
    for function in (
        lambda x: softmax(x, None, ptr),
        lambda x: segment(x * x, ptr, "mean"),
    ):
        model = gnnaccel.optimize(Calls(function))
        assert torch.autograd.gradgradcheck(model, x)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_segment(served, reduce):
    ptr = torch.tensor([0, 3, 5, 5, 10])
    # Not every PyG has second derivatives of runs.
    alike(segment, features(10, 3), ptr, reduce, second=False)
    alike(segment, features(10), ptr, reduce, second=False)
    assert len(served) == (2 if reduce in ("sum", "mean") else 0)


@pytest.mark.parametrize("dtype", [None, torch.long, torch.double])
def test_degree(dtype):
    model = gnnaccel.optimize(Calls(degree))
    for args in ((BATCH, None), (SHUFFLED, SIZE), (BATCH[:0], 2), (BATCH[:0], None)):
        torch.testing.assert_close(model(*args, dtype), degree(*args, dtype))
    model(SHUFFLED, SIZE, dtype).zero_()  # the caller's own
    torch.testing.assert_close(model(SHUFFLED, SIZE), degree(SHUFFLED, SIZE))
    assert outcome(model, SHUFFLED, 2) == outcome(degree, SHUFFLED, 2)


@pytest.mark.parametrize("batch", [BATCH, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("dtype", [torch.double, torch.long])
def test_to_dense_batch(batch, dtype):
    for shape in ((10, 3), (10,), (10, 2, 2)):
        x = torch.randint(-2, 3, shape).to(dtype)
        alike(to_dense_batch, x, batch)
        alike(
            to_dense_batch, x, batch, fill_value=-1.5 if dtype.is_floating_point else 7
        )
        alike(to_dense_batch, x, batch, batch_size=SIZE, max_num_nodes=6)
        alike(to_dense_batch, x, batch, batch_size=SIZE, max_num_nodes=2)
        alike(to_dense_batch, x, batch, fill_value=x.min() - 1)
        alike(to_dense_batch, x, batch, batch_size=2)
        alike(to_dense_batch, x)
    model = gnnaccel.optimize(Calls(to_dense_batch))
    x = torch.ones(10, 1)
    expected = to_dense_batch(x, batch)[1]
    model(x, batch)[1].zero_()  # the caller's own
    torch.testing.assert_close(model(x, batch)[1], expected)


AGGREGATIONS = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
    "mul": aggr.MulAggregation,
    "var": aggr.VarAggregation,
    "var, half": lambda: aggr.VarAggregation(semi_grad=True),
    "std": aggr.StdAggregation,
    "median": aggr.MedianAggregation,
    "quantile": lambda: aggr.QuantileAggregation([0.25, 0.7]),
    "softmax": lambda: aggr.SoftmaxAggregation(learn=True, channels=4),
    "softmax, half": lambda: aggr.SoftmaxAggregation(t=2.0, semi_grad=True),
    "power": lambda: aggr.PowerMeanAggregation(learn=True),
    "sort": lambda: aggr.SortAggregation(2),
    "lstm": lambda: aggr.LSTMAggregation(4, 3),
    "gru": lambda: aggr.GRUAggregation(4, 3),
    "set2set": lambda: aggr.Set2Set(4, 2),
    "multi": lambda: aggr.MultiAggregation(["mean", "max", "std", "median"]),
    "scaler": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification"], torch.tensor([0, 3, 5, 2])
    ),
    "attention": lambda: aggr.AttentionalAggregation(nn.Linear(4, 1)),
    "deep sets": lambda: aggr.DeepSetsAggregation(nn.Linear(4, 3), nn.Linear(3, 2)),
    "variance preserving": aggr.VariancePreservingAggregation,
    "transformer": lambda: aggr.SetTransformerAggregation(4, heads=2),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation(name):
    torch.manual_seed(0)
    stock = AGGREGATIONS[name]().double()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    assert type(ours) is not type(stock) and isinstance(ours, type(stock))
    assert repr(ours) == repr(stock)
    x = torch.rand(10, 4, dtype=torch.double) + 0.1
    for index in (BATCH, SHUFFLED):
        for size in (SIZE, None):
            found = [
                outcome(each, x, index, dim_size=size, second=False)
                for each in (stock, ours)
            ]
            if isinstance(found[0], tuple):  # it wants a sorted index
                assert found[0] == found[1]
            else:
                torch.testing.assert_close(*found)
    grads = []
    for each in (stock, ours):
        each(x.clone().requires_grad_(), BATCH).sum().backward()
        grads.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*grads)
    gnnaccel.restore(ours)
    assert type(ours) is type(stock)


@pytest.mark.parametrize("pool", [pyg.TopKPooling, pyg.SAGPooling, pyg.ASAPooling])
def test_pooling_layers(served, pool):
    torch.manual_seed(0)
    stock = pool(4)
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    x = torch.randn(10, 4)
    edge_index = torch.randint(0, 10, (2, 40))
    for each in (stock, ours):
        each.out = each(x, edge_index, batch=BATCH)
        each.out[0].sum().backward()
    for mine, theirs in zip(ours.out, stock.out, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_batch_that_changes_in_place():
    model = gnnaccel.optimize(Calls(global_add_pool))
    x, batch = features(10, 3), BATCH.clone()
    model(x, batch)
    batch[2] = 1
    torch.testing.assert_close(model(x, batch), global_add_pool(x, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_half_types_keep_theirs(dtype):
    model = gnnaccel.optimize(Calls(global_mean_pool))
    x = torch.full((1000, 1), 100.0, dtype=dtype)
    out = model(x, torch.zeros(1000, dtype=torch.long))
    assert out.dtype is dtype and out.item() == 100


# Only inside -----------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    x = torch.randn(10, 4, requires_grad=True)
    return Net(), (x, torch.randint(0, 10, (2, 40)), BATCH)


def test_only_optimised_models_are_served(served):
    model, inputs = net()
    other = copy.deepcopy(model)
    expected = model(*inputs)
    gnnaccel.optimize(model)
    torch.testing.assert_close(model(*inputs), expected)
    assert len(served) == 1
    other(*inputs)
    global_max_pool(inputs[0], BATCH)
    assert len(served) == 1
    gnnaccel.restore(model)
    assert type(model) is Net
    model(*inputs)
    assert len(served) == 1


def test_restore_gives_the_functions_back_and_others_take_them_again(served):
    own = [inspect.unwrap(function).__code__ for function in FUNCTIONS]

    def replaced():
        now = [inspect.unwrap(function).__code__ for function in FUNCTIONS]
        return [a is not b for a, b in zip(now, own, strict=True)]

    model, inputs = net()
    gnnaccel.restore(model)
    own = [inspect.unwrap(function).__code__ for function in FUNCTIONS]
    first, second = (gnnaccel.optimize(copy.deepcopy(model)) for _ in range(2))
    assert not any(replaced())
    first(*inputs)
    assert all(replaced())
    gnnaccel.restore(first)
    assert not any(replaced())
    second(*inputs)
    assert all(replaced()) and len(served) == 2


def test_the_functions_look_as_before():
    def looks():
        return [
            (inspect.signature(f), inspect.getsource(f), f.__doc__, pickle.dumps(f))
            for f in FUNCTIONS
        ]

    gnnaccel.restore(nn.Linear(1, 1))
    before = looks()
    model, inputs = net()
    gnnaccel.optimize(model)(*inputs)
    assert looks() == before


def test_after_an_error_and_in_other_threads(served):
    def broken(x, batch, thread=False):
        if not thread:
            raise KeyError
        worker = threading.Thread(target=global_max_pool, args=(x, batch))
        worker.start()
        worker.join()

    model, x = gnnaccel.optimize(Calls(broken)), features(10, 3)
    with pytest.raises(KeyError):
        model(x, BATCH)
    global_max_pool(x, BATCH)
    model(x, BATCH, thread=True)
    assert not served


def test_models_in_models(served):
    inner = gnnaccel.optimize(Calls(global_max_pool))
    outer = Calls(lambda x: (inner(x, BATCH), global_max_pool(x, BATCH)))
    x = features(10, 3)
    outer(x)
    assert len(served) == 1
    gnnaccel.optimize(outer)(x)
    assert len(served) == 3


def test_a_wrapper_keeps_its_class(served):
    model, inputs = net()
    wrapper = nn.Sequential(Calls(global_max_pool))
    assert type(gnnaccel.optimize(wrapper)) is nn.Sequential
    pair = nn.ModuleDict({"net": model, "head": nn.Linear(4, 4)})
    gnnaccel.optimize(pair)
    assert type(pair) is nn.ModuleDict and type(pair["head"]) is nn.Linear
    pair["net"](*inputs)
    assert len(served) == 1
    gnnaccel.restore(pair)
    assert type(model) is Net


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_are_served_and_restored(served, clone):
    model, inputs = net()
    expected = model(*inputs)
    other = clone(gnnaccel.optimize(model))
    assert type(other) is type(model) is not Net
    torch.testing.assert_close(other(*inputs), expected)
    assert len(served) == 1
    assert type(gnnaccel.restore(other)) is Net


def test_a_layer_that_is_excluded_stays_all_pygs(served):
    class Softmax(pyg.RGATConv):
        pass

    class Readout(nn.Module):
        def forward(self, x):
            return global_max_pool(x, BATCH)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Softmax(4, 4, 2)
            self.readout = Readout()

        def forward(self, x, edge_index, edge_type):
            return self.readout(self.conv(x, edge_index, edge_type))

    def run(*keep):
        model = gnnaccel.optimize(Two(), *keep)
        served.clear()
        edge_index = torch.randint(0, 10, (2, 40))
        model(torch.randn(10, 4), edge_index, torch.zeros(40, dtype=torch.long))
        return len(served)

    assert run(lambda *_: False) == 1  # the readout
    assert run() > 1
    Softmax.leave_to_pyg = True
    assert run() == 1


@pytest.mark.parametrize("whole", [True, False])
def test_checkpointing(whole):
    model, (x, edge_index, _) = net()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model
            self.readout = aggr.SoftmaxAggregation(learn=True)

        def forward(self, x):
            def part(x):
                out = softmax(self.net.conv(x, edge_index), BATCH)
                return self.readout(out * global_mean_pool(x, BATCH)[BATCH], BATCH)

            return part(x) if whole else checkpoint(part, x, use_reentrant=False)

    stock = Checkpointed()
    ours = gnnaccel.optimize(copy.deepcopy(stock))
    grads = []
    for each in (stock, ours):
        out = checkpoint(each, x, use_reentrant=False) if whole else each(x)
        grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


# Compilers -------------------------------------------------------------------------


@pytest.mark.parametrize("optimised", [True, False])
def test_torch_compile_takes_pygs(served, optimised):
    model, inputs = net()
    expected = model(*inputs, 6)
    other = gnnaccel.optimize(copy.deepcopy(model))
    other(*inputs)
    served.clear()
    chosen = other if optimised else model
    torch._dynamo.reset()
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, 6), expected)
    assert not served


def test_a_part_that_is_compiled_takes_pygs(served):
    torch._dynamo.reset()
    part = torch.compile(Calls(global_max_pool), backend="eager", fullgraph=True)
    model, x = gnnaccel.optimize(Calls(lambda x: part(x, BATCH, 6))), features(10, 3)
    torch.testing.assert_close(model(x), global_max_pool(x, BATCH, 6))
    assert not served


def test_torchscript_takes_pygs(served):
    class Readout(nn.Module):
        def forward(self, x: torch.Tensor, batch: torch.Tensor):
            alpha = softmax(x, batch)
            dense, _ = to_dense_batch(x, batch)
            return global_max_pool(x * alpha, batch), dense, degree(batch)

    stock, x = Readout(), torch.randn(10, 4)
    expected = stock(x, BATCH)
    ours = gnnaccel.optimize(Readout())
    ours(x, BATCH)
    for model in (stock, ours):
        for compiled in (torch.jit.script(model), torch.jit.trace(model, (x, BATCH))):
            served.clear()
            torch.testing.assert_close(compiled(x, BATCH), expected)
            assert not served


def test_vmap_and_grad_go_through():
    model, x = gnnaccel.optimize(Calls(global_max_pool)), torch.randn(3, 10, 4)

    def loss(model, x):
        return model(x, BATCH, 6).square().sum()

    got = torch.func.vmap(torch.func.grad(lambda x: loss(model, x)))(x)
    want = torch.func.vmap(torch.func.grad(lambda x: loss(global_max_pool, x)))(x)
    torch.testing.assert_close(got, want)


def test_classes_that_cannot_be_subclassed_are_left():
    class Only(type):
        def __new__(cls, name, bases, names):
            if name in seen:
                raise TypeError("final")
            seen.add(name)
            return super().__new__(cls, name, bases, names)

    seen = set()

    class Final(nn.Module, metaclass=Only):
        def forward(self, x):
            return global_max_pool(x, BATCH)

    model = gnnaccel.optimize(Final())
    assert type(model) is Final
    model(features(10, 3))


def test_an_unknown_signature_is_left(monkeypatch):
    from gnnaccel.nn.reach import _degree, _Reached

    def changed(index, nodes):
        return index

    assert not _Reached(changed, _degree, functions.degree).fits
    assert _Reached(torch_geometric.utils.degree, _degree, functions.degree).fits
