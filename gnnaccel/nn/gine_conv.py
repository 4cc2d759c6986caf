"""GINEConv with its messages inside the sum."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.grouping import accumulator
from gnnaccel.nn import dense
from gnnaccel.nn.fused import Fused, graph_for, sizes
from gnnaccel.nn.joined import joined_sum
from gnnaccel.ops.adj import tracing, wants_grad


class GINEConv(Fused, torch_geometric.nn.GINEConv):
    """:class:`torch_geometric.nn.GINEConv`, fused for sum and mean.

    No message is written down. Where edges' features are few and want no gradient, they
    are mapped where they are read, too; ``(1 + eps) x`` is added inside the kernel.
    """

    fused_by = "its messages inside the sum"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce not in ("sum", "mean"):
            why = f"aggr={self._reduce!r}: only sum and mean are fused"
        return why

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        """See :class:`torch_geometric.nn.GINEConv`."""
        if self._tries(x, edge_index):
            out = self._fused(x, edge_index, edge_attr, size)
            if out is not None:
                return dense.apply(self.nn, out)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: OptPairTensor, edge_attr: OptTensor)
        stock: Tensor = super().forward(x, edge_index, edge_attr, size)
        return stock

    def _fused(self, x: Any, edge_index: Any, edge_attr: Any, size: Any) -> Any:
        x_src, x_dst, num_dst, ok = sizes(self, x, size)
        if not ok or not (
            type(edge_index) is Tensor
            and edge_index.layout == torch.strided
            and isinstance(edge_attr, Tensor)
            and edge_attr.layout == torch.strided
            and edge_attr.dim() == 2
            and edge_attr.size(0) == edge_index.size(-1)
            and edge_attr.dtype == x_src.dtype
            and edge_attr.device == x_src.device
            and (self.lin is not None or edge_attr.size(1) == x_src.size(-1))
        ):
            return None
        adj = graph_for(self, x_src, edge_index, num_dst)
        if adj is None:
            return None
        eps, reduce = self.eps, self._reduce
        own = 0.0
        if (
            x_dst is x_src
            and reduce == "sum"
            and adj.num_src == adj.num_dst
            and eps.dtype == accumulator(x_src.dtype)
            and not wants_grad(eps)
            and not tracing(x_src)
        ):
            own = float(1 + eps)
        out = joined_sum(adj, "add_relu", x_src, edge_attr, self.lin, None, reduce, own)
        return out if own or x_dst is None else out + (1 + eps) * x_dst
