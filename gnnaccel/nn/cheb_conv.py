"""ChebConv with its scaled Laplacian remembered for each graph."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.cache import Memory, remember
from gnnaccel.nn import dense
from gnnaccel.nn.filters import expansion, expansion_order
from gnnaccel.nn.fused import Fused, graph_for, may_reorder, plain_linear
from gnnaccel.nn.neighbours import add_to
from gnnaccel.nn.normalisation import rememberable
from gnnaccel.nn.polynomial import Matrix
from gnnaccel.ops.adj import Adj, wants_grad
from gnnaccel.ops.product import spmm_sum


class ChebConv(Fused, torch_geometric.nn.ChebConv):
    """:class:`torch_geometric.nn.ChebConv`, fused for ``aggr="add"``."""

    fused_by = "spmm, its Laplacian remembered"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum":
            why = f"aggr={self.aggr!r}: only sum is fused"
        return why

    def __norm__(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`torch_geometric.nn.ChebConv`; the result is shared."""
        norm = super().__norm__
        if not rememberable(edge_index) or type(self).__norm__ is not ChebConv.__norm__:
            return norm(edge_index, *args, **kwargs)
        nodes, weight, normalization, highest = args
        if (
            kwargs["batch"] is not None
            or isinstance(highest, Tensor)
            or not (
                weight is None or (type(weight) is Tensor and not weight.requires_grad)
            )
        ):
            return norm(edge_index, *args, **kwargs)

        def build() -> Any:
            with torch.no_grad():
                return norm(edge_index, *args, **kwargs)

        key = ("laplacian", nodes, normalization, highest, kwargs["dtype"])
        if weight is None:
            return remember(edge_index, key, build)
        memory = remember(edge_index, "laplacian of weights", Memory)
        return memory.remember(weight, key, build)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_weight: Any = None,
        batch: Any = None,
        lambda_max: Any = None,
    ) -> Tensor:
        """See :class:`torch_geometric.nn.ChebConv`."""
        if (
            rememberable(edge_index)
            and self._tries(x, edge_index)
            and isinstance(x, Tensor)
            and may_reorder(x)
        ):
            index, norm = self.__norm__(
                edge_index,
                x.size(self.node_dim),
                edge_weight,
                self.normalization,
                lambda_max,
                dtype=x.dtype,
                batch=batch,
            )
            adj = graph_for(self, x, index, None, norm)
            if adj is not None and adj.graph is not None:
                return self._fused(adj, x, norm)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, norm: Tensor)
        stock: Tensor = super().forward(x, edge_index, edge_weight, batch, lambda_max)
        return stock

    def _fused(self, adj: Adj, x: Tensor, norm: Tensor) -> Tensor:
        order = None
        if not (wants_grad(norm) or (adj.reuse and not x.requires_grad)):
            order = expansion_order(self.lins, x)
        if order is not None:
            return expansion(
                Matrix(adj, norm), x, self.lins, self.bias, order, chebyshev=True
            )
        # T_0 = x, T_1 = L x, T_k = 2 L T_(k-1) - T_(k-2).
        terms = [x]
        first, *linears = self.lins
        out = dense.apply(first, x)
        for linear in linears:
            term = spmm_sum(adj, terms[-1], norm)
            call = linear
            if len(terms) > 1:
                term = 2 * term - terms[-2]
                call = linear.forward  # as in PyG, past hooks
            terms.append(term)
            mapped = dense.apply(linear, term) if plain_linear(linear) else call(term)
            out = add_to(out, mapped, first)
        return out if self.bias is None else out + self.bias
