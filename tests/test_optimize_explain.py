"""explain(): every message passing layer, what serves it, or why it is left."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import gnnaccel
from gnnaccel.nn import constants


class MyConv(pyg.GCNConv):
    pass


class MyFused(gnnaccel.nn.GCNConv):
    pass


class MyForward(gnnaccel.nn.GCNConv):
    def forward(self, x, edge_index):
        return x


class Own(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


def only(model):
    (row,) = gnnaccel.explain(model).rows
    return row


def model_of_all_kinds():
    model = nn.ModuleDict(
        {
            "gcn": pyg.GCNConv(2, 2),
            "tag": pyg.TAGConv(2, 2, 2),
            "mine": MyConv(2, 2),
            "own": Own(),
            "sage": pyg.SAGEConv(2, 2, aggr="median"),
            "linear": nn.Linear(2, 2),
        }
    )
    model["again"] = model["gcn"]
    model["deep"] = nn.Sequential(nn.ReLU(), gnnaccel.nn.GraphConv(2, 2))
    return model


def test_every_layer_is_listed_before_and_after():
    model = model_of_all_kinds()
    names = ["gcn", "tag", "mine", "own", "sage", "deep.1"]

    def table():
        return {row.name: (row.cls, row.path, row.why) for row in told.rows}

    told = gnnaccel.explain(model)
    ours = {"deep.1": ("GraphConv", "fused", gnnaccel.nn.GraphConv.fused_by)}
    reason = gnnaccel.optimize(pyg.SAGEConv(2, 2, aggr="median")).why_not_fused()
    assert "median" in reason
    first = "not optimised: call gnnaccel.optimize(model)"
    would_be = f"not optimised, and would be left to PyG: {reason}"
    assert list(table()) == names
    assert table() == {
        "gcn": ("GCNConv", "PyG", first),
        "tag": ("TAGConv", "PyG", first),
        "mine": ("MyConv", "PyG", first),
        "own": ("Own", "PyG", first),
        "sage": ("SAGEConv", "PyG", would_be),
        **ours,
    }
    assert (told.fused, told.left) == (1, 5)

    gnnaccel.optimize(model)
    told = gnnaccel.explain(model)
    generic = "spmm: its message is a row times a weight"
    exact = "a subclass of GCNConv, and only exact PyG types are fused: "
    assert list(table()) == names
    assert table() == {
        "gcn": ("GCNConv", "fused", gnnaccel.nn.GCNConv.fused_by),
        "tag": (
            "TAGConv",
            "generic",
            "spmm: a polynomial of the graph's matrix in one step",
        ),
        "mine": ("MyConv", "generic", exact + generic),
        "own": ("Own", "generic", generic),
        "sage": ("SAGEConv", "PyG", reason),
        **ours,
    }
    assert (told.fused, told.left) == (2, 1)


def test_a_layer_in_two_places_is_one_row_with_both_names():
    (row,) = [r for r in gnnaccel.explain(model_of_all_kinds()).rows if r.also]
    assert (row.name, row.also) == ("gcn", ("again",))


def test_the_filter_is_named_until_it_is_overruled():
    conv = gnnaccel.optimize(pyg.GCNConv(2, 2), lambda *_: False)
    assert only(conv).why == "excluded by the filter given to gnnaccel.optimize"
    assert only(gnnaccel.restore(conv)).why.startswith("not optimised")
    assert only(gnnaccel.optimize(conv, lambda *_: False)).why.startswith("excluded")
    assert only(gnnaccel.optimize(conv)).fused


def test_what_the_layer_itself_says_is_passed_on():
    conv = gnnaccel.optimize(pyg.GCNConv(2, 2))
    assert only(conv).fused
    handle = conv.register_message_forward_hook(lambda *_: None)
    assert not only(conv).fused
    assert only(conv).why == conv.why_not_fused() is not None
    handle.remove()
    assert only(conv).fused


@pytest.mark.parametrize("swap", [False, True])
def test_a_layer_off_the_cpu_is_left(swap):
    conv = pyg.GraphConv(2, 2).to("meta")
    row = only(gnnaccel.optimize(conv) if swap else conv)
    assert not row.fused
    assert row.why.endswith("it is on meta: the kernels are for the CPU")


def test_a_forward_set_on_the_instance_is_seen():
    conv = gnnaccel.optimize(pyg.GCNConv(2, 2))
    conv.forward = lambda x, edge_index: x
    assert not only(conv).fused
    assert only(conv).why == "its forward was replaced on the instance"


def test_subclasses_of_gnnaccel_layers():
    assert only(MyFused(2, 2)).fused
    row = only(MyForward(2, 2))
    assert not row.fused
    assert row.why == (
        "MyForward overrides forward: fused only where it calls super().forward()"
    )


def test_script_modules_are_named():
    model = pyg.GCN(2, 2, 2)
    own = Own()
    example = torch.randn(3, 2), torch.tensor([[0, 1, 2], [1, 2, 0]])
    for fixed in (
        torch.jit.script(model),
        torch.jit.trace(model, example),
        nn.ModuleDict({"convs": nn.ModuleList([torch.jit.script(model.convs[0])] * 2)}),
    ):
        rows = gnnaccel.explain(fixed).rows
        assert rows[0].name == "convs.0"
        assert {(row.cls, row.fused) for row in rows} == {("GCNConv", False)}
        assert "torch.jit" in rows[0].why
    assert only(torch.jit.script(own)).cls == "Own"
    assert gnnaccel.explain(torch.jit.script(nn.Linear(2, 2))).rows == []


def test_explain_changes_nothing():
    model = model_of_all_kinds()
    before = [(name, type(m), dict(vars(m))) for name, m in model.named_modules()]
    gnnaccel.explain(model)
    after = [(name, type(m), dict(vars(m))) for name, m in model.named_modules()]
    assert after == before


def test_the_table_is_aligned():
    told = gnnaccel.explain(gnnaccel.optimize(model_of_all_kinds()))
    header, *rows, count = str(told).splitlines()
    assert repr(told) == str(told)
    assert header.split() == ["layer", "class", "runs", "why"]
    assert count == "6 message passing layers: 2 fused, 3 generic, 1 left to PyG"
    assert len(rows) == len(told.rows)
    for line, row in zip(rows, told.rows, strict=True):
        assert line.startswith(row.name)
        for column, cell in (
            ("class", row.cls),
            ("runs", row.path),
            ("why", row.why),
        ):
            start = header.index(column)
            assert line[start - 2 : start] == "  "
            assert line[start:].startswith(cell)
    assert "gcn = again" in rows[0]
    assert not any(line != line.rstrip() for line in str(told).splitlines())


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 2), "no message passing layer in this model"),
        (
            pyg.TAGConv(2, 2, 2),
            "1 message passing layer: 0 fused, 0 generic, 1 left to PyG",
        ),
    ],
)
def test_the_smallest_tables(model, text):
    printed = str(gnnaccel.explain(model))
    assert printed.splitlines()[-1] == text
    assert ("(the model)" in printed) == isinstance(model, pyg.TAGConv)


def test_readouts_stand_below():
    model = nn.ModuleDict(
        {
            "pool": pyg.TopKPooling(2),
            "readout": pyg.MultiAggregation(["mean", "median"]),
            "conv": pyg.TAGConv(2, 2, 2),
        }
    )
    told = gnnaccel.explain(model)
    assert [row.name for row in told.rows] == ["conv"]
    names = [(row.name, row.cls) for row in told.readouts]
    assert names == [("pool", "TopKPooling"), ("readout", "MultiAggregation")]
    assert {row.path for row in told.readouts} == {"PyG"}
    told = gnnaccel.explain(gnnaccel.optimize(model))
    assert [(row.name, row.cls) for row in told.readouts] == names
    assert {row.path for row in told.readouts} == {"generic"}
    lines = str(told).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["conv", "pool", "readout"]
    assert lines[-1].endswith("1 generic, 0 left to PyG; 2 readouts")

    class Mine(pyg.SumAggregation):
        leave_to_pyg = True

    (row,) = gnnaccel.explain(gnnaccel.optimize(Mine())).readouts
    assert (row.path, row.why) == ("PyG", "Mine.leave_to_pyg is set")
    (row,) = gnnaccel.explain(gnnaccel.optimize(pyg.TopKPooling(2).to("meta"))).readouts
    assert row.path == "PyG" and "meta" in row.why


class MyLinear(pyg.HeteroLinear):
    pass


def heat(**kwargs):
    return pyg.HEATConv(2, 2, 3, 2, 2, 2, 2, **kwargs)


def test_linear_maps_by_type_stand_last():
    model = nn.ModuleDict({"lin": pyg.HeteroLinear(2, 2, 3), "heat": heat()})
    model["again"] = model["lin"]
    model["mine"] = MyLinear(2, 2, 3)
    names = ["lin", "heat.hetero_lin", "mine"]
    told = gnnaccel.explain(model)
    assert [row.name for row in told.maps] == names
    assert {row.path for row in told.maps} == {"PyG"}
    assert told.maps[0].why.startswith("not optimised")
    assert told.maps[0].also == ("again",)

    told = gnnaccel.explain(gnnaccel.optimize(model))
    assert [row.path for row in told.maps] == ["fused", "fused", "PyG"]
    assert told.maps[0].why == gnnaccel.nn.HeteroLinear.fused_by
    assert "subclass of HeteroLinear" in told.maps[2].why
    assert [row.name for row in told.rows] == ["heat"]
    *_, last, count = str(told).splitlines()
    assert last.startswith("mine")
    assert count.endswith("0 left to PyG; 3 linear maps by type")
    assert str(gnnaccel.explain(model["lin"])).endswith("; 1 linear map by type")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda linear: linear.half(), "torch.float16"),
        (lambda linear: linear.to("meta"), "it is on meta"),
        (lambda linear: setattr(linear, "forward", lambda *_: None), "was replaced"),
    ],
)
def test_linear_maps_by_type_that_are_left(change, why):
    linear = gnnaccel.optimize(pyg.HeteroLinear(2, 2, 3))
    change(linear)
    (row,) = gnnaccel.explain(linear).maps
    assert row.path == "PyG" and why in row.why


def test_linear_maps_inside_of_a_layer_that_is_left():
    (row,) = gnnaccel.explain(gnnaccel.optimize(heat(), lambda *_: False)).maps
    assert row.path == "PyG" and "to be left to PyG" in row.why


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [
        (lambda: pyg.GCNConv(2, 2), True),
        (lambda: pyg.SAGEConv(2, 2), True),
        (lambda: pyg.GraphConv(2, 2), True),
        (lambda: pyg.GINConv(nn.Linear(2, 2)), True),
        (lambda: pyg.RGCNConv(2, 2, 2), True),
        (Own, True),
        (lambda: pyg.GATConv(2, 2), False),
        (lambda: pyg.SAGEConv(2, 2, aggr="median"), False),
    ],
)
def test_reuse_of_constant_inputs_is_named(layer, keeps):
    model = nn.Sequential(layer())
    told = "; sums of constant inputs are reused"
    assert told not in only(gnnaccel.optimize(model)).why
    gnnaccel.optimize(model, reuse_constant_inputs=True)
    assert only(model).why.endswith(told) == keeps
    assert told not in only(gnnaccel.optimize(model)).why


@pytest.mark.parametrize("name", ["gcn", "gat", "sage", "gin", "graph", "rgcn", "own"])
def test_what_keeps_sums_is_what_is_said(name, monkeypatch):
    layers = {
        "gcn": (pyg.GCNConv(2, 2), ()),
        "gat": (pyg.GATConv(2, 2), ()),
        "sage": (pyg.SAGEConv(2, 2), ()),
        "gin": (pyg.GINConv(nn.Linear(2, 2)), ()),
        "graph": (pyg.GraphConv(2, 2), ()),
        "rgcn": (pyg.RGCNConv(2, 2, 1), (torch.zeros(3, dtype=torch.long),)),
        "own": (Own(), ()),
    }
    layer, more = layers[name]
    gnnaccel.optimize(layer, reuse_constant_inputs=True)
    kept = []
    inner = constants.Kept.get
    monkeypatch.setattr(
        constants.Kept, "get", lambda *args: kept.append(1) or inner(*args)
    )
    x, edge_index = torch.randn(3, 2), torch.tensor([[0, 1, 2], [1, 2, 0]])
    for _ in range(3):
        layer(x, edge_index, *more)
    assert bool(kept) == type(layer).keeps_sums
