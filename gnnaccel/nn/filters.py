"""PyG's layers that are a polynomial of the graph's matrix, as a whole.

Their messages are rows times a weight, and ``propagate`` sums them by a sparse product.
Where the whole layer is known, so are its products, additions and linear maps, which
:mod:`gnnaccel.nn.polynomial` does in one step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.nn import dense
from gnnaccel.nn.fused import aggregation_columns, plain_linear
from gnnaccel.nn.normalisation import gcn_norm
from gnnaccel.nn.polynomial import Matrix, Step, expanded, filtered, summed
from gnnaccel.nn.summing import found_graph
from gnnaccel.nn.whole import Whole
from gnnaccel.ops.adj import wants_grad


class Filter(Whole):
    """Mixed in where that is a polynomial."""

    done_by = "spmm: a polynomial of the graph's matrix in one step"
    cached: bool

    def _matrix(self, x: Tensor, edge_index: Any, edge_weight: Any) -> Matrix | None:
        adj = found_graph(self, x, edge_index, None, edge_weight)
        return None if adj is None else Matrix(adj, edge_weight)

    def _normalised(
        self, x: Tensor, edge_index: Tensor, edge_weight: Any, add_self_loops: bool
    ) -> Any:
        """What PyG's layers ask ``gcn_norm`` for."""
        return gcn_norm(
            edge_index,
            edge_weight,
            x.size(-2),
            False,
            add_self_loops,
            self.flow,
            dtype=x.dtype,
        )


class _Mapped(Filter):
    """Mixed in where a filter is followed by the linear map ``lin``."""

    K: int
    add_self_loops: bool
    lin: Any

    def _steps(self) -> list[Step]:
        raise NotImplementedError

    def _whole(self, x: Tensor, edge_index: Tensor, edge_weight: Any) -> Tensor | None:
        order = None if self.K < 1 or self.cached else _order([self.lin], x)
        if order is None:
            return None
        matrix = self._matrix(
            x,
            *self._normalised(x, edge_index, edge_weight, self.add_self_loops),
        )
        if matrix is None:
            return None
        weight, bias = self.lin.weight, self.lin.bias
        if order == "filter first":
            return filtered(matrix, x, self._steps(), weight, bias)
        out = filtered(matrix, dense.linear(x, weight), self._steps())
        return out if bias is None else out.add_(bias)


class Simple(_Mapped):
    """Mixed into SGConv: ``A^K x``."""

    def _steps(self) -> list[Step]:
        return [Step()] * self.K


class SimpleSpectral(_Mapped):
    """Mixed into SSGConv: ``a x + (1 - a) / K (A + ... + A^K) x``."""

    alpha: float

    def _steps(self) -> list[Step]:
        last = Step((1 - self.alpha) / self.K, self.alpha)
        return [Step(plus=1.0)] * (self.K - 1) + [last]


class Personalised(Filter):
    """Mixed into APPNP: ``x <- (1 - a) A x + a h``."""

    K: int
    alpha: float
    dropout: float
    training: bool
    add_self_loops: bool
    normalize: bool
    _cached_edge_index: Any

    def _whole(self, x: Tensor, edge_index: Tensor, edge_weight: Any) -> Tensor | None:
        if self.K < 1 or (self.dropout > 0 and self.training):
            return None
        if self.normalize and self._cached_edge_index is not None:
            edge_index, edge_weight = self._cached_edge_index
        elif self.normalize:
            edge_index, edge_weight = self._normalised(
                x, edge_index, edge_weight, self.add_self_loops
            )
            if self.cached:
                self._cached_edge_index = edge_index, edge_weight
        matrix = self._matrix(x, edge_index, edge_weight)
        if matrix is None:
            return None
        return filtered(matrix, x, [Step(1 - self.alpha, self.alpha)] * self.K)


class Adaptive(Filter):
    """Mixed into TAGConv: ``sum_k A^k x W_k``."""

    normalize: bool
    bias: Any
    lins: Any

    def _whole(self, x: Tensor, edge_index: Tensor, edge_weight: Any) -> Tensor | None:
        order = expansion_order(self.lins, x)
        if order is None:
            return None
        if self.normalize:
            edge_index, edge_weight = self._normalised(
                x, edge_index, edge_weight, add_self_loops=False
            )
        matrix = self._matrix(x, edge_index, edge_weight)
        if matrix is None:
            return None
        return expansion(matrix, x, self.lins, self.bias, order)


def expansion_order(linears: Any, x: Tensor) -> str | None:
    """Whether the terms of a sum are mapped after its powers are made, or before.

    Args:
        linears: Linear layers of one shape, without biases.
        x: What they are given.

    Returns:
        ``None`` where one step is not faster than PyG's many, or other than these.
    """
    linears = list(linears)
    return None if len(linears) < 2 else _order(linears, x)


def expansion(
    matrix: Matrix,
    x: Tensor,
    linears: Any,
    bias: Tensor | None,
    order: str,
    chebyshev: bool = False,
) -> Tensor:
    """``sum_k linears[k](t_k(A) x) + bias``: see :func:`expansion_order`."""
    weights = [linear.weight for linear in linears]
    if order == "filter first":
        return expanded(matrix, x, weights, bias, chebyshev)
    terms = dense.linear_all(x, [(weight, None) for weight in weights])
    out = summed(matrix, terms, chebyshev)
    return out if bias is None else out + bias


def _order(linears: list[Any], x: Tensor) -> str | None:
    if not all(
        plain_linear(linear) and dense.serves(x, linear.weight, linear.bias)
        for linear in linears
    ):
        return None
    first = linears[0]
    filter_first, map_first = aggregation_columns(first, x)
    if map_first < filter_first:
        return "map first"
    # A filter of features that want no gradient is none of autograd's: what the map is
    # given is better kept than made again, for its gradient, out of the result's.
    constant = not wants_grad(x) and any(wants_grad(each.weight) for each in linears)
    return None if constant else "filter first"
