"""Features of a whole graph that nobody learns: summed at every step, or once."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg

from benchmarks.ours import learnt
from benchmarks.registry import (
    OURS,
    STOCK,
    Implementation,
    Setting,
    Workload,
    case,
)

LAYERS: dict[str, Callable[[int], Any]] = {
    "gcn": lambda f: pyg.GCNConv(f, f),
    "sage_mean": lambda f: pyg.SAGEConv(f, f),
    "sg": lambda f: pyg.SGConv(f, f, 2),
}


def workload(name: str, setting: Setting) -> Workload:
    """Builds one of `LAYERS`, F_in = F_out; the features want no gradient.

    ``gnnaccel`` reuses constant inputs, "as usual" does not.
    """
    problem = setting.problem
    x = setting.x().detach()
    torch.manual_seed(4)
    layer = LAYERS[name](x.size(1))
    optimize = importlib.import_module("gnnaccel").optimize

    def bind(change: Callable[[Any], Any]) -> Callable[[], Implementation]:
        def make() -> Implementation:
            module = change(copy.deepcopy(layer))
            return Implementation(
                lambda x: module(x, problem.edge_index), learnt(module)
            )

        return make

    return Workload(
        x=x,
        makers={
            STOCK: bind(lambda module: module),
            "as usual": bind(optimize),
            OURS: bind(lambda module: optimize(module, reuse_constant_inputs=True)),
        },
        edges=problem.num_edges,
    )


def _register(name: str) -> None:
    def build(setting: Setting, variant: str) -> Workload:
        return workload(name, setting)

    build.__doc__ = f"The layer {name} on features that want no gradient."
    case(f"constant_{name}", group="constant")(build)


for _name in LAYERS:
    _register(_name)
