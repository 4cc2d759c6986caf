"""The layers as modules: state, copies, hooks, explain mode, subclasses, surgery."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import SQUARE
from layers import CLASSES, CONFIGS, assert_alike, inputs, make
from torch import nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.inspector import Inspector

import gnnaccel.nn

KINDS = (
    "gcn",
    "gcn_weighted",
    "sage",
    "sage_max",
    "sage_project",
    "graph_weighted",
    "gin",
)
LINEAR = {"gcn": "lin", "sage": "lin_l", "graph": "lin_rel"}


def _args(name, **options):
    return inputs(name, SQUARE["loops"], **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_are_subclasses_with_pygs_constructor(cls):
    theirs, ours = getattr(pyg, cls), getattr(gnnaccel.nn, cls)
    assert issubclass(ours, theirs)
    assert ours.__init__ is theirs.__init__
    assert gnnaccel.nn.SWAPS[theirs] is ours
    assert ours.__name__ == cls


@pytest.mark.parametrize("name", CONFIGS)
def test_repr_and_state_are_pygs(name):
    stock, ours = make(name)
    assert repr(ours) == repr(stock)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in stock.named_modules()]


@pytest.mark.parametrize("name", CONFIGS)
def test_state_round_trips_both_ways(name, tmp_path):
    """A checkpoint of either loads in the other, through a file, strictly."""
    for source, target in (make(name), make(name)[::-1]):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        torch.save(source.state_dict(), tmp_path / "state.pt")
        target.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for key, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[key], value)
        assert_alike(source, target, *_args(name))


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("cls", CLASSES)
def test_initial_parameters_are_pygs(cls, seeded):
    layers = []
    for package in (pyg, gnnaccel.nn):
        torch.manual_seed(4)
        args = (nn.Linear(5, 4),) if cls.startswith("GIN") else (5, 4)
        layer = getattr(package, cls)(*args)
        if not seeded:
            layer.reset_parameters()
        layers.append(layer.state_dict())
    for key, value in layers[0].items():
        assert torch.equal(layers[1][key], value)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
@pytest.mark.parametrize("after_use", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_copies_compute_the_same(name, after_use, how, tmp_path):
    _, ours = make(name)
    args = _args(name)
    if after_use:
        ours(*args).sum().backward()
    if how == "deepcopy":
        again = copy.deepcopy(ours)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(ours))
    else:
        torch.save(ours, tmp_path / "layer.pt")
        again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert type(again) is type(ours)
    assert torch.equal(again(*args), ours(*args))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1)
    assert not torch.allclose(again(*args), ours(*args))


@pytest.mark.parametrize(
    ("cls", "width"),
    [
        ("GCNConv", -1),
        ("SAGEConv", -1),
        ("SAGEConv", (-1, -1)),
        ("GraphConv", -1),
        ("GraphConv", (-1, -1)),
    ],
)
def test_lazy_widths(cls, width):
    layers, outs = [], []
    x, edge_index = torch.randn(5, 6), SQUARE["loops"].edge_index
    for package in (pyg, gnnaccel.nn):
        torch.manual_seed(4)
        layer = getattr(package, cls)(width, 4)
        assert "-1" in repr(layer)
        torch.manual_seed(5)
        outs.append(layer(x, edge_index))
        layers.append(layer)
    torch.testing.assert_close(outs[1], outs[0])
    stock, ours = layers
    for key, value in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    # A lazy layer also takes its shape from a checkpoint, and copies before use.
    fresh = getattr(gnnaccel.nn, cls)(width, 4)
    copied = copy.deepcopy(fresh)
    for layer in (fresh, copied):
        layer.load_state_dict(stock.state_dict())
        torch.testing.assert_close(layer(x, edge_index), outs[0])


def test_lazy_project_is_refused_as_in_pyg():
    with pytest.raises(ValueError, match="lazy"):
        gnnaccel.nn.SAGEConv(-1, 4, project=True)


@pytest.mark.parametrize("name", KINDS)
def test_train_and_eval(name):
    _, ours = make(name)
    ours.eval()
    assert_alike(*(m.eval() for m in make(name)), *_args(name))


HOOKS = (
    "propagate_forward_pre",
    "propagate_forward",
    "message_forward_pre",
    "message_forward",
    "aggregate_forward_pre",
    "aggregate_forward",
    "message_and_aggregate_forward_pre",
    "message_and_aggregate_forward",
    "edge_update_forward_pre",
    "edge_update_forward",
)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", KINDS)
def test_message_passing_hooks_run(name, hook):
    """As often and with the same values as in PyG; removed, they stop."""
    calls: list[list[torch.Tensor]] = []
    stock, ours = make(name)
    handles = []
    for layer in (stock, ours):
        seen: list[torch.Tensor] = []

        def record(module, *stuff, seen=seen):
            for item in _flat(stuff):
                seen.append(item.detach().clone())

        handles.append(getattr(layer, f"register_{hook}_hook")(record))
        calls.append(seen)
    args = _args(name)
    assert_alike(stock, ours, *args)
    expected, actual = calls
    assert len(actual) == len(expected)
    for wanted, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, wanted)
    if expected:
        reason = ours.why_not_fused()
        assert isinstance(reason, str)
        assert "hook" in reason
    for handle in handles:
        handle.remove()
    count = len(actual)
    assert ours.why_not_fused() is None
    assert_alike(stock, ours, *args)
    assert len(actual) == count


def _flat(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _flat(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)


@pytest.mark.parametrize("name", KINDS)
def test_hooks_may_change_the_values(name):
    stock, ours = make(name)
    for layer in (stock, ours):
        layer.register_message_forward_hook(lambda m, i, out: 2 * out)
        layer.register_aggregate_forward_hook(lambda m, i, out: out + 1)
        layer.register_propagate_forward_hook(lambda m, i, out: out.sin())
    assert_alike(stock, ours, *_args(name))


@pytest.mark.parametrize("name", KINDS)
def test_module_hooks_run(name):
    """Forward, pre-forward and backward hooks of torch: nothing to do with ours."""
    stock, ours = make(name)
    seen = []
    for layer in (stock, ours):
        layer.register_forward_pre_hook(lambda m, a: (a[0] * 2, *a[1:]))
        layer.register_forward_hook(lambda m, a, out: out + 3)
        layer.register_full_backward_hook(
            lambda m, gi, go: seen.append(go[0].detach().clone())
        )
    assert_alike(stock, ours, *_args(name))
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
    assert ours.why_not_fused() is None


@pytest.mark.parametrize("fin", [2, 9])
@pytest.mark.parametrize("name", ["gcn", "sage", "graph_weighted"])
def test_hooks_on_the_inner_linear_see_what_pyg_shows(name, fin):
    """Whichever product comes first, a hook must see the values of PyG's order."""
    stock, ours = make(name, fin, 5)
    calls: list[list[torch.Tensor]] = []
    for layer in (stock, ours):
        seen: list[torch.Tensor] = []
        inner = getattr(layer, LINEAR[name.split("_")[0]])
        inner.register_forward_hook(
            lambda m, a, out, seen=seen: seen.extend([a[0].detach(), out.detach()])
        )
        calls.append(seen)
    assert_alike(stock, ours, *inputs(name, SQUARE["loops"], fin))
    assert len(calls[0]) == len(calls[1]) == 2
    for wanted, got in zip(*calls, strict=True):
        torch.testing.assert_close(got, wanted)


def _inner(layer):
    return [module for module in layer.modules() if module is not layer]


@pytest.mark.parametrize("fin", [2, 9])
@pytest.mark.parametrize("name", [*KINDS, "gin_mean", "graph_max"])
def test_backward_hooks_on_all_inner_modules_run(name, fin):
    calls: list[list[str]] = []
    stock, ours = make(name, fin, 5)
    for layer in (stock, ours):
        seen: list[str] = []
        for module in _inner(layer):
            module.register_full_backward_hook(
                lambda m, *_, seen=seen: seen.append(type(m).__name__)
            )
        calls.append(seen)
    assert_alike(stock, ours, *inputs(name, SQUARE["loops"], fin))
    assert sorted(calls[0]) == sorted(calls[1])
    assert len(calls[0]) == len(_inner(stock))


@pytest.mark.parametrize("name", KINDS)
def test_hooks_on_all_modules_there_are_run(name):
    calls: list[list[str]] = []
    args = _args(name)
    for layer in make(name):
        seen: list[str] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, *_, seen=seen: seen.append(type(m).__name__)
        )
        layer(*args)
        handle.remove()
        calls.append(seen)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("fin", [2, 9])
@pytest.mark.parametrize("name", KINDS)
def test_a_forward_replaced_on_inner_modules(name, fin):
    """As libraries do that move, cast or quantise a module around its call."""
    stock, ours = make(name, fin, 5)
    for layer in (stock, ours):
        for module in _inner(layer):
            module.forward = lambda *args, f=module.forward, **kw: f(*args, **kw).tanh()
    assert_alike(stock, ours, *inputs(name, SQUARE["loops"], fin))


class Squashed(nn.Linear):
    """Has a weight and a bias, and is not linear."""

    def forward(self, x):
        return super().forward(x).tanh()


SURGERY = {
    "subclass": Squashed,
    "with_bias": lambda fin, fout: nn.Linear(fin, fout),
    "without_bias": lambda fin, fout: nn.Linear(fin, fout, bias=False),
    "pyg_with_bias": lambda fin, fout: pyg.Linear(fin, fout),
    "mlp": lambda fin, fout: nn.Sequential(
        nn.Linear(fin, 6), nn.ReLU(), nn.Linear(6, fout)
    ),
    "weight_norm": lambda fin, fout: nn.utils.parametrizations.weight_norm(
        nn.Linear(fin, fout)
    ),
    "shifted": lambda fin, fout: nn.Sequential(nn.Linear(fin, fout), nn.Tanh()),
}


@pytest.mark.parametrize("fin", [2, 9])
@pytest.mark.parametrize("surgery", SURGERY)
@pytest.mark.parametrize("name", ["gcn", "sage", "sage_max", "graph_weighted"])
def test_a_replaced_inner_linear(name, surgery, fin):
    """Aggregation commutes with a plain matrix only, not with what replaced it."""
    stock, ours = make(name, fin, 5)
    replacement = SURGERY[surgery](fin, 5).double()
    for layer in (stock, ours):
        setattr(layer, LINEAR[name.split("_")[0]], copy.deepcopy(replacement))
    assert_alike(stock, ours, *inputs(name, SQUARE["loops"], fin))


def test_a_removed_inner_linear():
    stock, ours = make("gcn")
    for layer in (stock, ours):
        layer.lin = nn.Identity()
        layer.bias = None
    assert_alike(stock, ours, *_args("gcn"))


@pytest.mark.parametrize("name", KINDS)
def test_attributes_set_after_construction(name):
    """PyG aggregates with aggr_module and reads flow and node_dim at each call."""
    stock, ours = make(name)
    args = _args(name)
    for key, value in (
        ("aggr", "max"),
        ("aggr_module", pyg.MaxAggregation()),
        ("aggr_module", pyg.MeanAggregation()),
        ("aggr_module", pyg.SumAggregation()),
        ("flow", "target_to_source"),
        ("node_dim", 0),
    ):
        for layer in (stock, ours):
            setattr(layer, key, value)
        assert_alike(stock, ours, *args)


@pytest.mark.parametrize("name", ["sage", "graph_weighted", "gin", "gcn"])
def test_aggregation_modules(name):
    for aggr in (pyg.MeanAggregation, pyg.MaxAggregation, pyg.SoftmaxAggregation):
        stock, ours = make(name, aggr=aggr())
        assert_alike(stock, ours, *_args(name))
    stock, ours = make(name, aggr=pyg.SoftmaxAggregation(learn=True))
    assert_alike(stock, ours, *_args(name))


def test_lstm_aggregation():
    stock, ours = make("sage", aggr="lstm")
    assert "lstm" in ours.why_not_fused()
    assert_alike(stock, ours, *inputs("sage", SQUARE["sorted"]))
    # PyG wants sorted targets here, and says so.
    assert_alike(stock, ours, *inputs("sage", SQUARE["reversed"]))


@pytest.mark.parametrize("name", ["gcn", "gcn_weighted", "gcn_plain_weighted"])
def test_decomposed_layers(name):
    """The same values; each chunk of the features passes the hooks by itself."""
    stock, ours = make(name, 5, 4)
    for layer in (stock, ours):
        layer.decomposed_layers = 2
    assert_alike(stock, ours, *_args(name))
    widths = []
    ours.register_message_forward_pre_hook(
        lambda m, a: widths.append(a[0]["x_j"].shape[-1])
    )
    assert_alike(stock, ours, *_args(name))
    assert widths == [2, 2]
    for layer in (stock, ours):
        layer.decomposed_layers = 1
    assert_alike(stock, ours, *_args(name))
    assert widths == [2, 2, 4]


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_explain_mode(name, sigmoid):
    """The edge mask acts, gets a gradient, and goes when explain mode ends."""
    stock, ours = make(name)
    args = _args(name)
    masks = []
    for layer in (stock, ours):
        mask = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        layer.explain = True
        layer._edge_mask = mask
        layer._loop_mask = args[1][0] != args[1][1]
        layer._apply_sigmoid = sigmoid
        masks.append(mask)
    assert "explain" in ours.why_not_fused()
    assert_alike(stock, ours, *args)
    assert masks[1].grad is not None
    torch.testing.assert_close(masks[1].grad, masks[0].grad)
    for layer in (stock, ours):
        layer.explain = False
        layer._edge_mask = None
    assert ours.why_not_fused() is None
    assert_alike(stock, ours, *args)
    for layer in (stock, ours):
        layer.explain = None
    assert_alike(stock, ours, *args)


@pytest.mark.parametrize("cls", ["GCNConv", "GraphConv", "SAGEConv"])
def test_explainer(cls):
    """PyG's GNNExplainer on a two-layer model: the same masks as on PyG's layers."""

    class Net(nn.Module):
        def __init__(self, package):
            super().__init__()
            self.conv1 = getattr(package, cls)(5, 6)
            self.conv2 = getattr(package, cls)(6, 3)

        def forward(self, x, edge_index):
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    case = SQUARE["unsorted"]
    x = torch.randn(13, 5)
    masks = []
    state = None
    for package in (pyg, gnnaccel.nn):
        net = Net(package)
        state = state or net.state_dict()
        net.load_state_dict(state)
        explainer = Explainer(
            net,
            algorithm=GNNExplainer(epochs=5),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        net(x, case.edge_index)
        torch.manual_seed(9)
        found = explainer(x, case.edge_index, index=3)
        masks.append((found.node_mask, found.edge_mask))
    for wanted, got in zip(*masks, strict=True):
        torch.testing.assert_close(got, wanted)
    assert bool((masks[0][1] != 0).any())


def _subclasses(base):
    class Message(base):
        def message(self, x_j):
            return 3 * x_j

    class Aggregate(base):
        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return super().aggregate(inputs.sin(), index, ptr, dim_size)

    class Update(base):
        def update(self, inputs):
            return inputs + 1

    class Propagate(base):
        def propagate(self, edge_index, size=None, **kwargs):
            return 2 * super().propagate(edge_index, size=size, **kwargs)

    class Forward(base):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index).exp()

    class Plain(base):
        """Overrides nothing that computes."""

        def extra_repr(self):
            return "plain"

    class Arguments(base):
        """Passes propagate something that the base does not."""

        def forward(self, x, edge_index):
            # propagate_type: (x: Tensor, factor: Tensor)
            return self.propagate(edge_index, x=x, factor=x.sin())

        def message(self, x_j, factor_i):
            return x_j * factor_i

    found = {}
    for kind in (Message, Aggregate, Update, Propagate, Forward, Plain, Arguments):
        method = kind.__name__.lower()
        # PyG files the code it writes for a class under the class's name.
        kind.__name__ = f"{base.__module__.split('.')[0]}_{base.__name__}_{method}"
        found[method] = kind
    return found


METHODS = (
    "message",
    "aggregate",
    "update",
    "propagate",
    "forward",
    "plain",
    "arguments",
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", CLASSES)
def test_subclasses_are_honoured(cls, method):
    """A user's class on top of ours overrides what it overrides on top of PyG's."""
    layers = []
    for package in (pyg, gnnaccel.nn):
        kind = _subclasses(getattr(package, cls))[method]
        torch.manual_seed(4)
        args = (nn.Linear(5, 4),) if cls.startswith("GIN") else (5, 4)
        layers.append(kind(*args).double())
    stock, ours = layers
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    for graph in ("loops", "no_edges"):
        case = SQUARE[graph]
        edge = (torch.ones(case.num_edges, 5).double(),) if cls == "GINEConv" else ()
        assert_alike(stock, ours, x, case.edge_index, *edge)
    if method in ("message", "aggregate", "update", "propagate"):
        assert method in ours.why_not_fused()
    if method == "plain":
        assert ours.why_not_fused() is None


@pytest.mark.parametrize("method", ["message", "aggregate", "update"])
@pytest.mark.parametrize("name", ["gcn", "sage", "graph", "gin"])
def test_a_method_replaced_on_the_instance(name, method):
    stock, ours = make(name)
    for layer in (stock, ours):
        before = getattr(layer, method)

        def changed(*args, before=before, **kwargs):
            return 2 * before(*args, **kwargs)

        setattr(layer, method, changed)
    assert ours.why_not_fused() is not None
    assert_alike(stock, ours, *_args(name))


def test_message_and_aggregate_overridden():
    """PyG calls it for sparse inputs only."""
    layers = []
    for package in (pyg, gnnaccel.nn):

        class Doubled(package.SAGEConv):
            def message_and_aggregate(self, adj_t, x):
                return 2 * super().message_and_aggregate(adj_t, x)

        torch.manual_seed(4)
        layers.append(Doubled(5, 4).double())
    x = torch.randn(5, 5, dtype=torch.float64)
    edge_index = SQUARE["loops"].edge_index
    value = torch.ones(5, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), value, (5, 5)).to_sparse_csr()
    assert_alike(*layers, x, edge_index)
    assert_alike(*layers, x, matrix)


@pytest.mark.parametrize("name", KINDS)
def test_swapping_the_class_of_a_live_layer(name):
    """What ``optimize`` does: the very same object, before and after."""
    stock, _ = make(name)
    args = _args(name)
    expected = stock(*args)
    theirs = type(stock)
    stock.__class__ = gnnaccel.nn.SWAPS[theirs]
    torch.testing.assert_close(stock(*args), expected)
    assert stock.why_not_fused() is None
    stock.__class__ = theirs
    assert torch.equal(stock(*args), expected)


def test_inside_pygs_models():
    """basic_gnn models and Sequential build our layers as they would PyG's."""
    case = SQUARE["unsorted"]
    x = torch.randn(13, 5, dtype=torch.float64)
    outs = []
    for package in (pyg, gnnaccel.nn):
        torch.manual_seed(4)
        model = pyg.Sequential(
            "x, edge_index",
            [
                (package.GCNConv(5, 6), "x, edge_index -> x"),
                nn.ReLU(),
                (package.SAGEConv(6, 6, aggr="max"), "x, edge_index -> x"),
                nn.ReLU(),
                (package.GINConv(nn.Linear(6, 3)), "x, edge_index -> x"),
            ],
        ).double()
        outs.append(model(x, case.edge_index))
    torch.testing.assert_close(outs[1], outs[0])


def test_inside_hetero_conv():
    case = SQUARE["unsorted"]
    x = {"a": torch.randn(13, 5), "b": torch.randn(13, 5)}
    edges = {
        ("a", "to", "b"): case.edge_index,
        ("b", "of", "a"): case.edge_index.flip(0),
    }
    outs = []
    for package in (pyg, gnnaccel.nn):
        torch.manual_seed(4)
        model = pyg.HeteroConv(
            {
                ("a", "to", "b"): package.SAGEConv((5, 5), 4),
                ("b", "of", "a"): package.GraphConv((5, 5), 4),
            }
        )
        outs.append(model(x, edges))
    for key in ("a", "b"):
        torch.testing.assert_close(outs[1][key], outs[0][key])


@pytest.mark.parametrize("theirs", gnnaccel.nn.SWAPS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("method", ["propagate", "edge_updater"])
def test_pyg_reads_what_a_layer_propagates(theirs, method):
    """Its own way to write a method looks up sources by the name of a class."""

    def read(cls):
        inspector = Inspector(cls)
        found = inspector.get_params_from_method_call(
            method, exclude=[0, "edge_index", "size"]
        )
        return {name: parameter.type for name, parameter in found.items()}

    assert read(gnnaccel.nn.SWAPS[theirs]) == read(theirs)


def test_a_layer_after_another_takes_other_arguments():
    x, edge_index = torch.randn(6, 4), torch.randint(6, (2, 10))
    kinds = torch.randint(3, (10,))
    for cls in (gnnaccel.nn.RGCNConv, gnnaccel.nn.FastRGCNConv):
        layer = cls(4, 5, 3)
        expected = layer(x, edge_index, kinds)
        layer.register_propagate_forward_hook(lambda *_: None)  # by PyG's code
        torch.testing.assert_close(layer(x, edge_index, kinds), expected)
