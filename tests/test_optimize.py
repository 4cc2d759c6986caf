"""What optimize() and restore() promise about the objects they touch."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gnnaccel
from gnnaccel.nn.generic import generic

FUSED = set(gnnaccel.nn.SWAPS.values())


class MyConv(pyg.GCNConv):
    """A user's subclass: its message is not GCN's."""

    def message(self, x_j, edge_weight):
        return -super().message(x_j, edge_weight)


class Net(nn.Module):
    """One layer of each supported type, dropout and a norm in between."""

    def __init__(self):
        super().__init__()
        self.gcn = pyg.GCNConv(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.sage = pyg.SAGEConv(8, 8, aggr="max")
        self.graph = pyg.GraphConv(8, 8)
        self.gin = pyg.GINConv(nn.Linear(8, 3), train_eps=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, edge_index):
        x = self.norm(self.gcn(x, edge_index)).relu()
        x = self.drop(self.sage(x, edge_index)).relu()
        return self.gin(self.graph(x, edge_index).tanh(), edge_index)


def graph(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 5, dtype=torch.double, generator=generator)
    return x, torch.randint(40, (2, 300), generator=generator)


def make(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def call(model, inputs=None):
    torch.manual_seed(1)
    return model(*(inputs or graph()))


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


# What stays ------------------------------------------------------------------------


def test_the_same_objects_in_the_same_state(capfd, caplog):
    model = make()
    model.sage.eval()
    model.gcn.lin.weight.requires_grad_(False)

    def state():
        return [
            (name, id(module), module.training, vars(module).keys() - {"_gnnaccel"})
            for name, module in model.named_modules()
        ] + [
            (name, id(tensor), tensor.requires_grad, tensor._version)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        ]

    before, printed, kinds = state(), repr(model), classes(model)
    assert gnnaccel.optimize(model) is model
    swapped = {type(model.gcn), type(model.sage), type(model.graph), type(model.gin)}
    assert len(swapped) == 4 and swapped <= FUSED
    assert isinstance(model.gcn, pyg.GCNConv)
    assert state() == before
    assert repr(model) == printed
    assert gnnaccel.restore(model) is model
    assert state() == before
    assert classes(model) == kinds
    assert "_gnnaccel" not in vars(model.gcn)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_an_optimizer_made_before_goes_on_as_if_nothing_had_happened():
    def train(swap):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            if swap and step == 2:
                gnnaccel.optimize(model)
            if swap and step == 4:
                gnnaccel.restore(model)
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(*graph(step)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    close(train(swap=True), train(swap=False))


def test_module_hooks_fire():
    model, seen = make(), []
    model.gcn.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.gcn.register_forward_hook(lambda m, args, out: seen.append("post") or 2 * out)
    model.gcn.register_full_backward_hook(lambda *_: seen.append("backward"))
    expected = call(model)
    expected.sum().backward()
    grad = model.gcn.lin.weight.grad.clone()
    order = list(seen)
    assert set(order) == {"pre", "post", "backward"}

    model.zero_grad()
    seen.clear()
    gnnaccel.optimize(model)
    out = call(model)
    out.sum().backward()
    assert seen == order
    close(out, expected)
    close(model.gcn.lin.weight.grad, grad)


@pytest.mark.parametrize("register_first", [True, False])
@pytest.mark.parametrize(
    "where", ["propagate", "message", "aggregate", "message_and_aggregate"]
)
def test_message_passing_hooks_fire(where, register_first):
    """A hook inside propagate() sees what it saw, and may change it."""
    stock, fast = make(), make()
    seen = {"stock": [], "fast": []}
    inputs = graph()
    if where == "message_and_aggregate":
        x, edge_index = inputs
        values = torch.ones(300, dtype=torch.double)
        inputs = (x, torch.sparse_coo_tensor(edge_index, values, (40, 40)).coalesce())

    def register(model, who):
        for conv in (model.gcn, model.sage, model.graph, model.gin):

            def hook(module, args, out, conv=conv):
                assert module is conv
                seen[who].append(out.detach().clone())
                return out * 1.5

            getattr(conv, f"register_{where}_forward_hook")(hook)

    register(stock, "stock")
    if register_first:
        register(fast, "fast")
    gnnaccel.optimize(fast)
    if not register_first:
        register(fast, "fast")
    expected = call(stock, inputs)
    close(call(fast, inputs), expected)
    assert seen["stock"]
    close(seen["fast"], seen["stock"])


def test_checkpoints_go_both_ways(tmp_path):
    stock, fast = make(seed=0), gnnaccel.optimize(make(seed=1))
    assert list(fast.state_dict()) == list(stock.state_dict())
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    fast.load_state_dict(torch.load(tmp_path / "stock.pt", weights_only=True))
    close(call(fast), call(stock))

    fast = gnnaccel.optimize(make(seed=2))
    torch.save(fast.state_dict(), tmp_path / "fast.pt")
    stock.load_state_dict(torch.load(tmp_path / "fast.pt", weights_only=True))
    close(call(fast), call(stock))


# Copies ----------------------------------------------------------------------------


def torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": torch_save,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_is_optimised_and_can_be_restored(make_copy):
    model = make()
    kinds, expected = classes(model), call(model)
    gnnaccel.optimize(model, lambda name, _: name != "graph")
    swapped = classes(model)
    clone = make_copy(model)
    assert classes(clone) == swapped
    assert str(gnnaccel.explain(clone)) == str(gnnaccel.explain(model))
    close(call(clone), call(model))
    gnnaccel.restore(clone)
    assert classes(clone) == kinds
    assert not any("_gnnaccel" in vars(module) for module in clone.modules())
    torch.testing.assert_close(call(clone), expected, rtol=0, atol=0)
    assert classes(model) == swapped


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_explain_mode_still_masks_messages(make_copy):
    """PyG keeps an uncompiled propagate() per class for its explainers.

    It is found through the class, so copying a swapped layer must not lose it.
    """

    def masked(model):
        conv = model.gcn
        conv.explain = True
        conv._edge_mask = torch.linspace(-3, 3, 300, dtype=torch.double)
        conv._loop_mask = edge_index[0] != edge_index[1]
        return conv(x, edge_index)

    x, edge_index = graph()
    expected = masked(make())
    assert not torch.allclose(expected, make().gcn(x, edge_index))
    close(masked(gnnaccel.optimize(make())), expected)
    close(masked(make_copy(gnnaccel.optimize(make()))), expected)
    restored = gnnaccel.restore(make_copy(gnnaccel.optimize(make())))
    close(masked(make_copy(restored)), expected)


def test_a_file_opens_in_a_fresh_process(tmp_path):
    """There PyG's own class was never instantiated before the layer is unpickled."""
    model = gnnaccel.optimize(pyg.GCN(5, 8, 2, 3).double().eval())
    x, edge_index = graph()
    torch.save((model, x, edge_index, model(x, edge_index)), tmp_path / "model.pt")
    script = """
        import sys, torch, gnnaccel
        model, x, edge_index, expected = torch.load(sys.argv[1], weights_only=False)
        assert gnnaccel.explain(model).fused == 2
        torch.testing.assert_close(model(x, edge_index), expected)
        gnnaccel.restore(model)
        torch.testing.assert_close(model(x, edge_index), expected)
        scripted = torch.jit.script(model)  # takes PyG's generated propagate() only
        torch.testing.assert_close(scripted(x, edge_index), expected)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# What is swapped -------------------------------------------------------------------


def test_a_subclass_keeps_its_own_message():
    model = nn.Sequential(MyConv(5, 5), pyg.GCNConv(5, 5)).double()
    expected = model[0](*graph())
    gnnaccel.optimize(model)
    assert isinstance(model[0], MyConv) and type(model[0]) not in FUSED
    assert type(model[1]) in FUSED
    close(model[0](*graph()), expected)


def test_layers_built_from_gnnaccel_stay_when_restored():
    model = nn.Sequential(gnnaccel.nn.GCNConv(5, 5), pyg.GCNConv(5, 5))
    gnnaccel.restore(gnnaccel.optimize(model))
    assert type(model[0]) is gnnaccel.nn.GCNConv
    assert type(model[1]) is pyg.GCNConv
    clone = gnnaccel.restore(copy.deepcopy(gnnaccel.optimize(model)))
    assert classes(clone) == classes(gnnaccel.restore(model))


def test_filter_gets_names_and_layers():
    model = make()
    model.again = model.sage
    model.mine = MyConv(5, 5)
    asked = []

    def keep(name, layer):
        asked.append((name, layer))
        return name in ("sage", "gin")

    gnnaccel.optimize(model, keep)
    names = ("gcn", "sage", "graph", "gin", "mine")
    assert asked == [(n, getattr(model, n)) for n in names]
    assert {n for n, kind in classes(model).items() if kind in FUSED} == {"sage", "gin"}
    assert model.again is model.sage
    # A second call adds to the first; it never takes back.
    gnnaccel.optimize(model, filter=lambda name, _: name == "gcn")
    assert {n for n, kind in classes(model).items() if kind in FUSED} == (
        {"sage", "gin", "gcn"}
    )


def test_a_filter_that_fails_leaves_the_model_as_it_was():
    model = make()
    kinds = classes(model)

    def broken(name, layer):
        return {"gcn": True}[name]

    with pytest.raises(KeyError):
        gnnaccel.optimize(model, broken)
    assert classes(model) == kinds
    assert "_gnnaccel" not in vars(model.gcn)


def test_a_single_layer_is_a_model_with_an_empty_name():
    names = []
    conv = pyg.SAGEConv(5, 3)
    assert gnnaccel.optimize(conv, lambda name, _: names.append(name) or True) is conv
    assert names == [""]
    assert type(conv) is gnnaccel.nn.SAGEConv


LEAVES = {
    "gcn": lambda: pyg.GCNConv(2, 2),
    "gin": lambda: pyg.GINConv(nn.Linear(2, 2)),
    "gat": lambda: pyg.GATConv(2, 2),
    "mine": lambda: MyConv(2, 2),
    "ours": lambda: gnnaccel.nn.GraphConv(2, 2),
    "linear": lambda: nn.Linear(2, 2),
}
TREES = st.recursive(
    st.sampled_from([*LEAVES, "shared"]),
    lambda inner: st.tuples(st.booleans(), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(tree=TREES, keep=st.lists(st.booleans(), min_size=1), again=st.booleans())
def test_any_nesting_is_swapped_by_exact_type_and_restored(tree, keep, again):
    shared = pyg.SAGEConv(2, 2)

    def build(part):
        if part == "shared":
            return shared
        if isinstance(part, str):
            return LEAVES[part]()
        as_dict, parts = part
        modules = [build(inner) for inner in parts]
        if as_dict:
            return nn.ModuleDict({f"m{i}": module for i, module in enumerate(modules)})
        return nn.ModuleList(modules)

    model = build(tree)
    kinds, keys = classes(model), list(model.state_dict())
    modules = dict(model.named_modules())
    wanted = [
        name
        for name, kind in kinds.items()
        if issubclass(kind, pyg.MessagePassing) and kind not in FUSED
    ]
    chosen = {name: keep[i % len(keep)] for i, name in enumerate(wanted)}

    gnnaccel.optimize(model, lambda name, _: chosen[name])
    if again:
        gnnaccel.optimize(model, lambda name, _: chosen[name])
    expected = {
        name: gnnaccel.nn.SWAPS.get(kind) or generic(kind) if chosen.get(name) else kind
        for name, kind in kinds.items()
        if not issubclass(kind, pyg.Aggregation)
    }
    found = classes(model)
    assert {name: found[name] for name in expected} == expected
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == keys
    told = gnnaccel.explain(model)
    assert {row.name for row in told.rows if row.fused} == {
        name for name, kind in expected.items() if kind in FUSED
    }
    assert len(told.rows) == sum(
        isinstance(module, pyg.MessagePassing) for module in modules.values()
    )
    gnnaccel.restore(model)
    assert classes(model) == kinds
    gnnaccel.restore(model)
    assert classes(model) == kinds


# Wrapped and compiled models -------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    if not torch.distributed.is_available() or not (
        torch.distributed.is_gloo_available()
    ):
        pytest.skip("torch was built without gloo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap_first", [True, False])
def test_distributed_data_parallel(process_group, wrap_first):
    def step(model):
        model.zero_grad()
        call(model).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(make())
    model = make()
    if not wrap_first:
        gnnaccel.optimize(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if wrap_first:
        step(wrapped)
        assert gnnaccel.optimize(wrapped) is wrapped
    assert gnnaccel.explain(wrapped).fused == 4
    assert wrapped.module is model
    close(step(wrapped), expected)
    gnnaccel.restore(wrapped)
    torch.testing.assert_close(step(wrapped), expected, rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_recompiles(in_place):
    model = make().eval()
    expected = call(model)
    compiled = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    close(call(compiled), expected)
    calls = []
    forward = gnnaccel.nn.GCNConv.forward
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, *args, **kwargs):
            calls.append(1)
            return forward(self, *args, **kwargs)

        patch.setattr(gnnaccel.nn.GCNConv, "forward", counted)
        assert gnnaccel.optimize(compiled) is compiled
        assert gnnaccel.explain(compiled).fused == 4
        close(call(compiled), expected)
        assert calls
        calls.clear()
        gnnaccel.restore(compiled)
        close(call(compiled), expected)
        assert not calls
    torch.compiler.reset()


def test_script_modules_are_left():
    model = make().eval()
    expected = call(model)
    scripted = torch.jit.script(model)
    for fixed in (scripted, torch.jit.trace(model, graph())):
        kinds = classes(fixed)
        assert gnnaccel.optimize(fixed) is fixed
        assert gnnaccel.restore(fixed) is fixed
        assert classes(fixed) == kinds
        close(call(fixed), expected)
    # A scripted part doesn't keep its neighbours from being swapped.
    both = nn.ModuleList([scripted, pyg.GCNConv(2, 2)])
    gnnaccel.optimize(both)
    assert type(both[1]) is gnnaccel.nn.GCNConv


def test_an_optimised_model_can_be_scripted():
    model = gnnaccel.optimize(make().eval())
    expected = call(model)
    scripted = torch.jit.script(model)
    close(call(scripted), expected)
    close(call(model), expected)
    gnnaccel.restore(scripted)
    gnnaccel.restore(model)
    assert not FUSED & set(classes(model).values())
    assert "_gnnaccel" not in vars(model.gcn)
    close(call(model), expected)


def test_an_exported_program_needs_no_gnnaccel():
    """What torch.export and the ONNX exporter write must run where we are not."""
    model = gnnaccel.optimize(pyg.GraphSAGE(5, 8, 2, 3).double().eval())
    expected = call(model)
    program = torch.export.export(model, graph())
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets and not [target for target in targets if "gnnaccel" in target]
    close(program.module()(*graph()), expected)
    assert gnnaccel.explain(model).fused == 2


# Mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "NoneType"),
        ([pyg.GCNConv(2, 2)], "list"),
        (pyg.GCNConv, r"the class GCNConv \(construct it first\)"),
        ({}, "dict"),
    ],
)
@pytest.mark.parametrize("name", ["optimize", "restore", "explain"])
def test_what_is_no_module_is_refused(name, wrong, got):
    with pytest.raises(
        TypeError,
        match=f"gnnaccel.{name}: 'model' must be a torch.nn.Module, got {got}",
    ):
        getattr(gnnaccel, name)(wrong)


@pytest.mark.parametrize("wrong", ["gcn", ["gcn"], 3])
def test_a_filter_that_cannot_be_called_is_refused(wrong):
    model = make()
    with pytest.raises(TypeError, match="'filter' must be a function .*got"):
        gnnaccel.optimize(model, wrong)
    assert type(model.gcn) is pyg.GCNConv


def test_restore_refuses_a_class_it_did_not_set():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = gnnaccel.optimize(make())
    model.gcn.bias.data.fill_(1)
    parametrize.register_parametrization(model.gcn, "bias", Twice())
    kinds, expected = classes(model), call(model)
    with pytest.raises(TypeError, match="'gcn' became ParametrizedGCNConv"):
        gnnaccel.restore(model)
    assert classes(model) == kinds
    close(call(model), expected)
    parametrize.remove_parametrizations(model.gcn, "bias")
    gnnaccel.restore(model)
    assert not FUSED & set(classes(model).values())
    close(call(model), expected)
