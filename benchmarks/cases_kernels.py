"""The ops against the ways in which PyG, torch and the peers compute the same."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import index_sort
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import segment as pyg_segment
from torch_geometric.utils import softmax as pyg_softmax
from torch_geometric.utils.sparse import index2ptr

from benchmarks import bounds, formats
from benchmarks.registry import (
    BACKWARD,
    FORWARD,
    OURS,
    STEP,
    STOCK,
    Implementation,
    Maker,
    Reading,
    Setting,
    Workload,
    case,
    optional,
)

BOTH = (torch.float32, torch.float64)
HEADS = 4


def _gnnaccel() -> Any:
    return importlib.import_module("gnnaccel")


def _row_bounds(
    setting: Setting, x: Tensor
) -> tuple[dict[str, Reading], dict[str, tuple[str, ...]]]:
    """Reading x's rows by the edges (forward) and by the reversed edges (backward)."""
    read = bounds.row_reader(setting.problem.by_dst, x)
    read_back = bounds.row_reader(setting.problem.by_src, x)
    if read is None or read_back is None:
        return {}, {}
    readings: dict[str, Reading] = {"rows": read, "rows backward": read_back}
    return readings, {
        FORWARD: ("rows",),
        BACKWARD: ("rows backward",),
        STEP: ("rows", "rows backward"),
    }


def _spmm(
    setting: Setting, reduce: str, weighted: bool = False, weight_grad: bool = False
) -> Workload:
    """Workload of ``out[i] = reduce over edges e: j -> i of weight[e] * x[j]``."""
    problem, x = setting.problem, setting.x()
    weight = setting.edge_weight() if weighted else None
    if weight is not None and weight_grad:
        weight.requires_grad_()
    parameters = {"weight": weight} if weight is not None and weight_grad else {}

    def stock() -> Implementation:
        src, dst, size = problem.src, problem.dst, problem.num_nodes

        def forward(x: Tensor) -> Tensor:
            message = x.index_select(0, src)
            if weight is not None:
                message = weight.view(-1, 1) * message
            out: Tensor = pyg_scatter(message, dst, 0, size, reduce)
            return out

        return Implementation(forward, parameters)

    def csr() -> Implementation:
        adjacency = formats.torch_csr(problem, weight, setting.dtype)
        if reduce == "sum":
            return Implementation(lambda x: adjacency @ x)
        name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
        return Implementation(lambda x: torch.sparse.mm(adjacency, x, name))

    def sparse_tensor() -> Implementation:
        # Both groupings, as PyG's ToSparseTensor leaves it.
        if weight is None or not weight_grad:
            adjacency = formats.sparse_tensor(problem, weight).fill_cache_()
            return Implementation(lambda x: adjacency.matmul(x, reduce))
        # A value with a history is good for one backward only: set it in each call,
        # in the order to which SparseTensor has sorted the edges.
        positions = torch.arange(problem.num_edges)
        adjacency = formats.sparse_tensor(problem, positions).fill_cache_()
        order = adjacency.storage.value()

        def forward(x: Tensor) -> Tensor:
            value = weight.index_select(0, order)
            out: Tensor = adjacency.set_value(value, layout="coo").matmul(x, reduce)
            return out

        return Implementation(forward, parameters)

    def ours() -> Implementation:
        gnnaccel = _gnnaccel()
        graph = gnnaccel.Graph.of(problem.edge_index, size=problem.num_nodes)
        spmm = gnnaccel.ops.spmm
        return Implementation(lambda x: spmm(graph, x, weight, reduce), parameters)

    makers: dict[str, Maker] = {STOCK: stock, "SparseTensor": sparse_tensor}
    if not weight_grad:
        makers["torch_csr"] = csr
    readings, limits = _row_bounds(setting, x)
    return Workload(
        x=x,
        makers=makers | {OURS: ours},
        edges=problem.num_edges,
        readings=readings,
        bounds=limits,
        bound_name="reading the rows",
    )


@case("spmm_sum", group="kernels", check=BOTH)
def spmm_sum(setting: Setting, variant: str) -> Workload:
    """spmm, sum, no weights."""
    return _spmm(setting, "sum")


@case("spmm_weighted", group="kernels", check=BOTH)
def spmm_weighted(setting: Setting, variant: str) -> Workload:
    """spmm, sum, edge weights that need no gradient."""
    return _spmm(setting, "sum", weighted=True)


@case("spmm_weight_grad", group="kernels", check=BOTH)
def spmm_weight_grad(setting: Setting, variant: str) -> Workload:
    """spmm, sum, edge weights that need their gradient."""
    return _spmm(setting, "sum", weighted=True, weight_grad=True)


@case("spmm_mean", group="kernels", check=BOTH)
def spmm_mean(setting: Setting, variant: str) -> Workload:
    """spmm, mean."""
    return _spmm(setting, "mean")


@case("spmm_max", group="kernels", check=BOTH)
def spmm_max(setting: Setting, variant: str) -> Workload:
    """spmm, max."""
    return _spmm(setting, "max")


@case("spmm_min", group="kernels", check=BOTH)
def spmm_min(setting: Setting, variant: str) -> Workload:
    """spmm, min."""
    return _spmm(setting, "min")


@case("sddmm", group="kernels", check=BOTH)
def sddmm(setting: Setting, variant: str) -> Workload:
    """A dot product per edge, <a[dst], b[src]>, gradients to both."""
    problem, x = setting.problem, setting.x()
    b = setting.random(*x.shape, seed=5).requires_grad_()

    def stock() -> Implementation:
        src, dst = problem.src, problem.dst
        return Implementation(lambda a: (a[dst] * b[src]).sum(-1), {"b": b})

    def ours() -> Implementation:
        gnnaccel = _gnnaccel()
        graph = gnnaccel.Graph.of(problem.edge_index, size=problem.num_nodes)
        op = gnnaccel.ops.sddmm
        return Implementation(lambda a: op(graph, a, b), {"b": b})

    readings, limits = _row_bounds(setting, x)
    # Backward is two sparse products, one by each end of the edges.
    if limits:
        limits = {
            FORWARD: ("rows",),
            BACKWARD: ("rows", "rows backward"),
            STEP: ("rows", "rows", "rows backward"),
        }
    return Workload(
        x=x,
        makers={STOCK: stock, OURS: ours},
        edges=problem.num_edges,
        readings=readings,
        bounds=limits,
        bound_name="reading the rows",
    )


@case("edge_softmax", group="kernels", check=BOTH)
def edge_softmax(setting: Setting, variant: str) -> Workload:
    """Softmax over the edges that enter a node, 4 heads."""
    problem = setting.problem
    x = setting.random(problem.num_edges, HEADS, seed=1).requires_grad_()
    dst, size = problem.dst, problem.num_nodes

    def stock() -> Implementation:
        return Implementation(lambda x: pyg_softmax(x, dst, num_nodes=size))

    def torch_scatter() -> Implementation:
        softmax = optional("torch_scatter").scatter_softmax
        return Implementation(lambda x: softmax(x, dst, dim=0, dim_size=size))

    def ours() -> Implementation:
        gnnaccel = _gnnaccel()
        graph = gnnaccel.Graph.of(problem.edge_index, size=size)
        softmax = gnnaccel.ops.edge_softmax
        return Implementation(lambda x: softmax(graph, x))

    one = x.numel() * x.element_size()
    return Workload(
        x=x,
        makers={STOCK: stock, "torch_scatter": torch_scatter, OURS: ours},
        edges=problem.num_edges,
        # Forward reads logits and writes alphas; backward reads alphas and their
        # gradients and writes those of the logits.
        bytes_moved={FORWARD: 2 * one, BACKWARD: 3 * one, STEP: 5 * one},
        bound_name="bytes at copy speed",
    )


def _per_edge(setting: Setting) -> tuple[Tensor, dict[str, int]]:
    """Messages [E, F] and the bytes that reducing them to [N, F] must move."""
    problem = setting.problem
    shape = problem.num_edges, setting.features
    messages = setting.random(*shape, seed=1).requires_grad_()
    moved = (problem.num_edges + problem.num_nodes) * setting.features
    moved *= messages.element_size()
    return messages, {FORWARD: moved, BACKWARD: moved, STEP: 2 * moved}


@case("segment", group="kernels", variants=("sum", "mean", "max"), check=BOTH)
def segment(setting: Setting, variant: str) -> Workload:
    """Reduces E rows that lie grouped by destination."""
    messages, moved = _per_edge(setting)
    ptr = setting.problem.by_dst.rowptr

    def stock() -> Implementation:
        return Implementation(lambda x: pyg_segment(x, ptr, variant))

    def torch_reduce() -> Implementation:
        return Implementation(lambda x: _torch_segment(x, ptr, variant))

    def ours() -> Implementation:
        op = _gnnaccel().ops.segment
        return Implementation(lambda x: op(x, ptr, variant))

    return Workload(
        x=messages,
        makers={STOCK: stock, "torch": torch_reduce, OURS: ours},
        edges=setting.problem.num_edges,
        bytes_moved=moved,
        bound_name="bytes at copy speed",
    )


def _torch_segment(x: Tensor, ptr: Tensor, reduce: str) -> Tensor:
    if reduce == "max":
        out = torch.segment_reduce(x, "max", offsets=ptr)
        return torch.where(out.isinf(), 0, out)  # empty segments
    return torch.segment_reduce(x, reduce, offsets=ptr, initial=0)


@case("scatter", group="kernels", variants=("sum", "mean", "max"), check=BOTH)
def scatter(setting: Setting, variant: str) -> Workload:
    """Reduces E rows by an index in any order."""
    messages, moved = _per_edge(setting)
    index, size = setting.problem.dst, setting.problem.num_nodes

    def stock() -> Implementation:
        return Implementation(lambda x: pyg_scatter(x, index, 0, size, variant))

    def torch_scatter() -> Implementation:
        op = optional("torch_scatter").scatter
        return Implementation(
            lambda x: op(x, index, dim=0, dim_size=size, reduce=variant)
        )

    def ours() -> Implementation:
        op = _gnnaccel().ops.scatter
        return Implementation(lambda x: op(x, index, size, variant))

    return Workload(
        x=messages,
        makers={STOCK: stock, "torch_scatter": torch_scatter, OURS: ours},
        edges=setting.problem.num_edges,
        bytes_moved=moved,
        bound_name="bytes at copy speed",
    )


@case("gather", group="kernels", check=BOTH)
def gather(setting: Setting, variant: str) -> Workload:
    """x[src]; its backward sums E rows."""
    problem, x = setting.problem, setting.x()
    index = problem.src

    def stock() -> Implementation:
        return Implementation(lambda x: x.index_select(0, index))

    def torch_index() -> Implementation:
        return Implementation(lambda x: x[index])

    def ours() -> Implementation:
        op = _gnnaccel().ops.gather
        return Implementation(lambda x: op(x, index))

    moved = (problem.num_edges + problem.num_nodes) * x.size(1) * x.element_size()
    return Workload(
        x=x,
        makers={STOCK: stock, "torch x[index]": torch_index, OURS: ours},
        edges=problem.num_edges,
        bytes_moved={FORWARD: moved, BACKWARD: moved, STEP: 2 * moved},
        bound_name="bytes at copy speed",
    )


@case("graph_build", group="kernels")
def graph_build(setting: Setting, variant: str) -> Workload:
    """Groups the edges by destination: rowptr, col and the permutation."""
    problem = setting.problem
    edge_index, size = problem.edge_index, problem.num_nodes
    src, dst = problem.src, problem.dst

    def stock() -> Implementation:
        def forward(x: Tensor) -> tuple[Tensor, ...]:
            row, perm = index_sort(dst, max_value=size, stable=True)
            return index2ptr(row, size), src[perm]

        return Implementation(forward)

    def torch_sort() -> Implementation:
        def forward(x: Tensor) -> tuple[Tensor, ...]:
            row, perm = torch.sort(dst, stable=True)
            return torch._convert_indices_from_coo_to_csr(row, size), src[perm]

        return Implementation(forward)

    def ours() -> Implementation:
        build = _gnnaccel().Graph.from_edge_index

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            graph = build(edge_index, size)
            return graph.rowptr, graph.col

        return Implementation(forward)

    # Reads both ends; writes pointers, columns and permutation as int32.
    moved = problem.num_edges * (2 * 8 + 2 * 4) + size * 4
    return Workload(
        x=setting.x(1),
        makers={
            STOCK: stock,
            "torch.sort": torch_sort,
            OURS: ours,
        },
        edges=problem.num_edges,
        phases=(FORWARD,),
        bytes_moved={FORWARD: moved},
        bound_name="bytes at copy speed",
    )
