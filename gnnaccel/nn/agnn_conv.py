"""AGNNConv on attention: logits are cosines of both ends' features."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.kernels.attention import Inputs, Score
from gnnaccel.nn.attention import attention_graph, pair_ok
from gnnaccel.nn.fused import Fused
from gnnaccel.ops.attention import attend


class AGNNConv(Fused, torch_geometric.nn.AGNNConv):
    """:class:`torch_geometric.nn.AGNNConv`, fused: one attention kernel."""

    fused_by = "attention, logits inside the kernel"

    def why_not_fused(self) -> str | None:
        """See :meth:`Fused.why_not_fused`."""
        why = super().why_not_fused()
        if why is None and self._reduce != "sum":
            why = f"aggr={self._reduce!r}: only sum is fused with attention"
        return why

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """See :class:`torch_geometric.nn.AGNNConv`."""
        if self.why_not_fused() is None and pair_ok(x, None):
            loops = x.size(0) if self.add_self_loops else None
            adj = attention_graph(self, x, edge_index, None, loops)
            if adj is not None and self.beta.dtype == x.dtype:
                unit = F.normalize(x, p=2.0, dim=-1)
                parts = (self.beta * unit, unit, x)
                inputs = Inputs(*(part.unsqueeze(1) for part in parts))
                return attend(adj, Score("dot"), inputs).squeeze(1)
        # PyG reads the next line, by this class's name, to write its `propagate`.
        # propagate_type: (x: Tensor, x_norm: Tensor)
        stock: Tensor = super().forward(x, edge_index)
        return stock
