"""A problem's graph in the formats that PyG and the peers take, rows = destinations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.graphs import Problem
from benchmarks.registry import optional


def torch_csr(
    problem: Problem, weight: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """torch.sparse CSR; ``weight`` [E] in input order, ones if None."""
    rows = problem.by_dst
    if weight is None:
        value = torch.ones(problem.num_edges, dtype=dtype)
    else:
        value = weight.detach()[rows.perm]
    size = (problem.num_nodes, problem.num_nodes)
    return torch.sparse_csr_tensor(
        rows.rowptr, rows.col, value, size, check_invariants=False
    )


def sparse_tensor(
    problem: Problem,
    weight: Tensor | None = None,
    edge_index: Tensor | None = None,
) -> Any:
    """torch_sparse's SparseTensor, its caches not yet filled.

    Args:
        problem: the graph.
        weight: [E] in input order; the gradient flows to it.
        edge_index: to use in place of the problem's own.

    Raises:
        Unavailable: torch_sparse isn't installed.
    """
    library = optional("torch_sparse")
    edge_index = problem.edge_index if edge_index is None else edge_index
    return library.SparseTensor(
        row=edge_index[1],
        col=edge_index[0],
        value=weight,
        sparse_sizes=(problem.num_nodes, problem.num_nodes),
    )
