"""The drop-in layers beside PyG's own: the configurations, and how to compare them."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from oracles import assert_near, fresh, results, single_threaded, widened
from torch import Tensor, nn

import gnnaccel.nn

CLASSES = (
    *("GCNConv", "SAGEConv", "GraphConv", "GINConv", "GINEConv"),
    *("GATConv", "GATv2Conv", "TransformerConv"),
)
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")


class Config(NamedTuple):
    """How to construct one layer.

    Attributes:
        cls: Name of the class in both packages.
        kwargs: Keyword arguments of the constructor.
        weighted: Whether forward takes ``edge_weight``.
        absolute: Whether the layer on absolute values bounds the sum of the absolute
            terms (no extremes, no final normalisation).
        edged: Whether forward takes ``edge_attr``: ``"learnt"`` or ``"constant"``.
    """

    cls: str
    kwargs: dict[str, Any]
    weighted: bool = False
    absolute: bool = True
    edged: str | None = None

    @property
    def bipartite(self) -> bool:
        return self.cls != "GCNConv"


CONFIGS = {
    "gcn": Config("GCNConv", {}),
    "gcn_weighted": Config("GCNConv", {}, weighted=True),
    "gcn_improved": Config("GCNConv", {"improved": True}),
    "gcn_improved_weighted": Config("GCNConv", {"improved": True}, weighted=True),
    "gcn_no_loops": Config("GCNConv", {"add_self_loops": False}),
    "gcn_no_loops_weighted": Config(
        "GCNConv", {"add_self_loops": False}, weighted=True
    ),
    "gcn_plain": Config("GCNConv", {"normalize": False}),
    "gcn_plain_weighted": Config("GCNConv", {"normalize": False}, weighted=True),
    "gcn_no_bias": Config("GCNConv", {"bias": False}),
    "gcn_mean": Config("GCNConv", {"aggr": "mean"}, weighted=True),
    "gcn_max": Config("GCNConv", {"aggr": "max"}, weighted=True, absolute=False),
    "gcn_backwards": Config("GCNConv", {"flow": "target_to_source"}, weighted=True),
    "sage": Config("SAGEConv", {}),
    "sage_sum": Config("SAGEConv", {"aggr": "sum"}),
    "sage_add": Config("SAGEConv", {"aggr": "add"}),
    "sage_max": Config("SAGEConv", {"aggr": "max"}, absolute=False),
    "sage_min": Config("SAGEConv", {"aggr": "min"}, absolute=False),
    "sage_project": Config("SAGEConv", {"project": True}, absolute=False),
    "sage_project_max": Config(
        "SAGEConv", {"project": True, "aggr": "max"}, absolute=False
    ),
    "sage_normalize": Config("SAGEConv", {"normalize": True}, absolute=False),
    "sage_no_root": Config("SAGEConv", {"root_weight": False}),
    "sage_no_bias": Config("SAGEConv", {"bias": False}),
    "sage_backwards": Config("SAGEConv", {"flow": "target_to_source"}),
    "graph": Config("GraphConv", {}),
    "graph_weighted": Config("GraphConv", {}, weighted=True),
    "graph_mean": Config("GraphConv", {"aggr": "mean"}, weighted=True),
    "graph_max": Config("GraphConv", {"aggr": "max"}, weighted=True, absolute=False),
    "graph_min": Config("GraphConv", {"aggr": "min"}, absolute=False),
    "graph_no_bias": Config("GraphConv", {"bias": False}, weighted=True),
    "graph_backwards": Config("GraphConv", {"flow": "target_to_source"}, weighted=True),
    "gin": Config("GINConv", {}, absolute=False),
    "gin_train_eps": Config("GINConv", {"train_eps": True, "eps": 0.3}, absolute=False),
    "gin_eps": Config("GINConv", {"eps": -0.5}, absolute=False),
    "gin_max": Config("GINConv", {"aggr": "max"}, absolute=False),
    "gin_mean": Config("GINConv", {"aggr": "mean"}, absolute=False),
    "gin_backwards": Config("GINConv", {"flow": "target_to_source"}, absolute=False),
    **{
        name: Config("GINEConv", kwargs, absolute=False, edged=edged)
        for name, (kwargs, edged) in {
            "gine": ({}, "learnt"),
            "gine_constant": ({"eps": -0.5}, "constant"),
            "gine_dim": ({"edge_dim": 3}, "learnt"),
            "gine_dim_constant": ({"edge_dim": 3, "eps": 0.2}, "constant"),
            "gine_deep": ({"edge_dim": 20}, "constant"),
            "gine_train_eps": ({"train_eps": True, "eps": 0.3}, "learnt"),
            "gine_mean": ({"aggr": "mean", "edge_dim": 3}, "constant"),
            "gine_backwards": (
                {"flow": "target_to_source", "edge_dim": 3},
                "constant",
            ),
        }.items()
    },
    **{
        name: Config(cls, kwargs, absolute=False)
        for name, (cls, kwargs) in {
            "gat": ("GATConv", {}),
            "gat_heads": ("GATConv", {"heads": 3}),
            "gat_mean": ("GATConv", {"heads": 2, "concat": False, "bias": False}),
            "gat_no_loops": ("GATConv", {"heads": 2, "add_self_loops": False}),
            "gat_residual": ("GATConv", {"heads": 2, "residual": True}),
            "gat_slope": ("GATConv", {"negative_slope": -0.5, "heads": 2}),
            "gat_backwards": ("GATConv", {"flow": "target_to_source"}),
            "gatv2": ("GATv2Conv", {}),
            "gatv2_heads": ("GATv2Conv", {"heads": 3}),
            "gatv2_mean": ("GATv2Conv", {"heads": 2, "concat": False, "bias": False}),
            "gatv2_no_loops": ("GATv2Conv", {"heads": 2, "add_self_loops": False}),
            "gatv2_shared": ("GATv2Conv", {"heads": 2, "share_weights": True}),
            "gatv2_residual": ("GATv2Conv", {"heads": 2, "residual": True}),
            "gatv2_backwards": ("GATv2Conv", {"flow": "target_to_source"}),
            "transformer": ("TransformerConv", {}),
            "transformer_heads": ("TransformerConv", {"heads": 3}),
            "transformer_mean": ("TransformerConv", {"heads": 2, "concat": False}),
            "transformer_beta": ("TransformerConv", {"heads": 2, "beta": True}),
            "transformer_bare": (
                "TransformerConv",
                {"heads": 2, "root_weight": False, "bias": False},
            ),
            "transformer_backwards": ("TransformerConv", {"flow": "target_to_source"}),
        }.items()
    },
}

# What PyG computes outside its own fused path too; these must reach PyG's forward.
UNFUSED = {
    "sage_list": Config("SAGEConv", {"aggr": ["mean", "max"]}, absolute=False),
    "sage_softmax": Config("SAGEConv", {"aggr": "softmax"}, absolute=False),
    "sage_std": Config("SAGEConv", {"aggr": "std"}, absolute=False),
    "sage_mul": Config("SAGEConv", {"aggr": "mul"}, absolute=False),
    "graph_median": Config("GraphConv", {"aggr": "median"}, absolute=False),
    "gine_max": Config("GINEConv", {"aggr": "max"}, absolute=False, edged="learnt"),
    "gin_powermean": Config("GINConv", {"aggr": "powermean"}, absolute=False),
}


def _arguments(
    config: Config, fin: int | tuple[int, int], fout: int
) -> tuple[Any, ...]:
    if config.cls in ("GINConv", "GINEConv"):
        width = fin if isinstance(fin, int) else fin[0]
        mlp = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, fout))
        return (mlp,)
    return fin, fout


def make(
    config: Config | str, fin: int | tuple[int, int] = 5, fout: int = 4, **more: Any
) -> tuple[nn.Module, nn.Module]:
    """PyG's layer and ours, constructed alike, with the same random float64 state."""
    if isinstance(config, str):
        config = CONFIGS[config]
    layers = []
    for package in (pyg, gnnaccel.nn):
        layer = getattr(package, config.cls)(
            *_arguments(config, fin, fout), **copy.deepcopy(config.kwargs | more)
        )
        layers.append(layer.double())
    stock, ours = layers
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for parameter in stock.parameters():
            # Biases too: a constructor's zero bias can't show a bias that is missed.
            if not isinstance(parameter, nn.UninitializedParameter):
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
                parameter.add_(0.3 * noise)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def inputs(
    config: Config | str,
    case,
    width: int = 5,
    *,
    grad: bool = True,
    size: bool = False,
) -> tuple[Any, ...]:
    """Positional float64 arguments of forward on graph ``case``.

    A pair of features when the graph has two sides. ``size=True`` adds the size.
    """
    if isinstance(config, str):
        config = CONFIGS[config]
    x: Any = torch.randn(case.num_src, width, dtype=torch.float64, requires_grad=grad)
    if case.num_src != case.num_dst:
        other = torch.randn(case.num_dst, width, dtype=torch.float64)
        x = (x, other.requires_grad_(grad))
    args = [x, case.edge_index]
    if config.weighted:
        weight = torch.rand(case.num_edges, dtype=torch.float64) + 0.1
        args.append(weight.requires_grad_(grad))
    elif config.edged:
        columns = config.kwargs.get("edge_dim", width)
        edge = torch.randn(case.num_edges, columns, dtype=torch.float64)
        args.append(edge.requires_grad_(grad and config.edged == "learnt"))
    elif config.cls in ("GCNConv", "GraphConv"):
        args.append(None)
    if size and config.bipartite:
        args.append(case.size)
    return tuple(args)


def compare_layers(
    stock: nn.Module,
    ours: nn.Module,
    args: tuple[Any, ...],
    dtype: torch.dtype = torch.float64,
    *,
    absolute: bool = True,
    slack: float = 10.0,
) -> dict[str, Tensor]:
    """Outputs and all gradients of ``ours`` in ``dtype`` against ``stock`` in float64.

    Returns:
        What ``ours`` computed: the output, and the gradients by name.
    """
    ours = ours.to(dtype)
    stock = stock.double()
    stock.load_state_dict(ours.state_dict())
    low = fresh(args, dtype)
    high = widened(fresh(low, torch.float64))
    bounds = {}
    with single_threaded():
        with torch.no_grad():
            shape = stock(*high).shape
        generator = torch.Generator().manual_seed(7)
        grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        stock.zero_grad(set_to_none=True)
        expected = results(stock, high, dict(stock.named_parameters()), grad.double())
        if absolute:
            positive = copy.deepcopy(stock)
            with torch.no_grad():
                for parameter in positive.parameters():
                    parameter.abs_()
            positive.zero_grad(set_to_none=True)
            bounds = results(
                positive,
                _absolute(high),
                dict(positive.named_parameters()),
                grad.double().abs(),
            )
    ours.zero_grad(set_to_none=True)
    actual = results(ours, low, dict(ours.named_parameters()), grad)
    assert actual["out"].dtype == dtype
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        magnitude = bounds.get(key)
        if magnitude is None:
            magnitude = _where_shares_cancel(stock, expected, key)
        elif value.numel():
            # GCN's weights act through the degrees as well, with either sign, and may
            # cancel to nothing.
            floor = _top(expected[key]) / 8 + _top(expected["out"]) / 64
            magnitude = magnitude.abs().clamp(min=floor)
        assert_near(value, expected[key], magnitude, slack=slack, name=key)
        assert value.dtype == dtype, key
    return actual


def _where_shares_cancel(
    stock: Any, expected: dict[str, Tensor], key: str
) -> Tensor | None:
    """What bounds an attention layer's gradients: softmax ignores a common shift.

    Gradients of what shifts all logits of a node alike cancel to nothing.
    """
    attending = {*ATTENTION, "AGNNConv", "HEATConv", "RGATConv", "SuperGATConv"}
    if not {base.__name__ for base in type(stock).__mro__} & attending:
        return None
    tops = {name: _top(x[x.isfinite()]) for name, x in expected.items()}
    top = max(tops[key], max(tops.values()) / 64)
    return expected[key].new_full(expected[key].shape, top)


def _top(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _absolute(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_absolute(item) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().abs().requires_grad_(value.requires_grad)
    return value


def _outcome(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer.zero_grad(set_to_none=True)
    try:
        return results(
            lambda *a: layer(*a, **kwargs), fresh(args), dict(layer.named_parameters())
        )
    except Exception as error:
        return error


def assert_alike(
    stock: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    *args: Any,
    slack: float = 10.0,
    **kwargs: Any,
) -> Any:
    """The same call on both layers: the same values and gradients, or the same error.

    Returns:
        The exception of ``ours``, or its results by name.
    """
    with single_threaded():
        expected = _outcome(stock, widened(args), kwargs)
    actual = _outcome(ours, args, kwargs)
    if isinstance(expected, Exception):
        assert isinstance(actual, Exception), (
            f"no error, but PyG raises {type(expected).__name__}: {expected}"
        )
        assert isinstance(actual, type(expected)), (
            f"{type(actual).__name__}: {actual}\nwhere PyG raises "
            f"{type(expected).__name__}: {expected}"
        )
        return actual
    if isinstance(actual, Exception):
        raise actual
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        assert value.dtype == expected[key].dtype, key
        magnitude = _where_shares_cancel(stock, expected, key)
        assert_near(value, expected[key].double(), magnitude, slack=slack, name=key)
    return actual


def optimised_alike(layer: nn.Module, x: Any, *args: Any) -> nn.Module:
    """Asserts that an optimised copy of ``layer`` computes what PyG does.

    Args:
        layer: In float64.
        x: Features, or a pair of them; their gradients are compared, too.
        args: What follows them.

    Returns:
        The copy.
    """
    ours: nn.Module = gnnaccel.optimize(copy.deepcopy(layer))
    parts = x if isinstance(x, tuple) else (x,)
    leaves = tuple(part.detach().requires_grad_() for part in parts)
    x = leaves if isinstance(x, tuple) else leaves[0]
    outcome = assert_alike(layer, ours, x, *args)
    assert not isinstance(outcome, Exception), outcome
    return ours
