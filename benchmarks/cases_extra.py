"""Layers under other conditions: first call, small, growing and lopsided; memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import cases_kernels, formats, graphs
from benchmarks.cases_layers import LAYERS, workload
from benchmarks.ours import accelerated, learnt
from benchmarks.registry import (
    FORWARD,
    OURS,
    STOCK,
    Implementation,
    Maker,
    Setting,
    Workload,
    case,
)

# Stock PyG makes tensors of E * F numbers, about eight at a time. Above this many
# (512 MiB each in float32) the torch.sparse layer stands in as the reference.
MOST_MESSAGES = 1 << 27


@case("first_call", group="extra", variants=tuple(LAYERS))
def first_call(setting: Setting, variant: str) -> Workload:
    """A new edge_index tensor in every call: sorting the edges is timed too."""
    problem, layer = setting.problem, LAYERS[variant]
    torch.manual_seed(4)
    module = layer.make(setting.features, setting.features)
    weight = setting.edge_weight() if layer.weighted else None

    def fresh(module: torch.nn.Module, sparse: bool) -> Implementation:
        current = [problem.edge_index]

        def prepare() -> None:
            current[0] = problem.edge_index.clone()

        def forward(x: Tensor) -> Tensor:
            out: Tensor
            if sparse:
                out = module(x, formats.sparse_tensor(problem, weight, current[0]))
            elif weight is not None:
                out = module(x, current[0], weight)
            else:
                out = module(x, current[0])
            return out

        return Implementation(forward, learnt(module), prepare)

    def sparse_tensor() -> Implementation:
        formats.sparse_tensor(problem)
        return fresh(copy.deepcopy(module), sparse=True)

    makers: dict[str, Maker] = {
        STOCK: lambda: fresh(copy.deepcopy(module), sparse=False),
        "SparseTensor": sparse_tensor,
        OURS: lambda: fresh(accelerated(module)[0], sparse=False),
    }
    return Workload(x=setting.x(), makers=makers, edges=problem.num_edges)


@case("small", group="extra", variants=tuple(LAYERS))
def small(setting: Setting, variant: str) -> Workload:
    """A 64-node graph, forward only: what a call costs before any work."""
    tiny = replace(setting, problem=graphs.rmat(6, 4))
    built = workload(variant, tiny)
    built = replace(built, phases=(FORWARD,), readings={}, bounds={})
    return replace(built, graph=tiny.problem.name)


def _shapes(setting: Setting) -> tuple[str, ...]:
    wide, narrow = 4 * setting.features, max(1, setting.features // 4)
    pairs = (f"{wide}->{narrow}", f"{narrow}->{wide}")
    return tuple(f"{name} {pair}" for name in LAYERS for pair in pairs)


@case("order", group="extra", variants=_shapes)
def order(setting: Setting, variant: str) -> Workload:
    """F_in and F_out far apart: which comes first, linear map or aggregation?"""
    name, pair = variant.split()
    fan_in, fan_out = (int(part) for part in pair.split("->"))
    return workload(name, setting, fan_in, fan_out)


def _sizes(setting: Setting) -> tuple[str, ...]:
    scales = (4, 6) if setting.quick else (13, 15, 17, 19, 21)
    graph = [f"rmat:{scale}:16" for scale in scales]
    return tuple(f"{name} {size}" for name in ("spmm", "gcn") for size in graph)


@case("scaling", group="extra", variants=_sizes)
def scaling(setting: Setting, variant: str) -> Workload:
    """Cost per edge on R-MAT graphs of 16 edges per node, 1.3e5 to 3.4e7 edges."""
    name, size = variant.split()
    grown = replace(setting, problem=graphs.load(size))
    if name == "spmm":
        built = cases_kernels.spmm_sum(grown, "")
    else:
        built = workload(name, grown)
    keep: tuple[str, ...] = (STOCK, "torch_csr", OURS)
    reference = STOCK
    if grown.problem.num_edges * grown.features > MOST_MESSAGES:
        keep, reference = keep[1:], "torch_csr"
    makers = {kept: built.makers[kept] for kept in keep}
    return replace(built, makers=makers, reference=reference, graph=size)


def _measured_layers(setting: Setting) -> tuple[str, ...]:
    return ("gcn",) if setting.quick else tuple(LAYERS)


@case("memory", group="extra", variants=_measured_layers, kind="memory")
def memory(setting: Setting, variant: str) -> Workload:
    """Peak memory of the first forward + backward, above x, graph and parameters."""
    return workload(variant, setting)
