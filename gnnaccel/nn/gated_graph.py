"""GatedGraphConv: each layer's map inside its sum, and its GRU in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.nn import gru, mapped
from gnnaccel.nn.summing import found_graph
from gnnaccel.nn.whole import Whole


class GatedGraph(Whole):
    """Mixed into GatedGraphConv."""

    done_by = "spmm, with each layer's map inside, and its GRU in one step"
    num_layers: int
    out_channels: int
    rnn: Any
    weight: Tensor

    def _whole(self, x: Tensor, edge_index: Tensor, edge_weight: Any) -> Tensor | None:
        missing = self.out_channels - x.size(1)
        if self.num_layers < 1 or missing < 0 or not gru.is_plain(self.rnn):
            return None
        if missing:
            x = torch.cat([x, x.new_zeros(x.size(0), missing)], dim=1)
        adj = found_graph(self, x, edge_index, None, edge_weight)
        rel = self.weight[0].t()
        if adj is None or not mapped.serves(adj, x, rel, None, None, edge_weight):
            return None
        for k in range(self.num_layers):
            summed = mapped.mapped_sum(adj, x, self.weight[k].t(), weight=edge_weight)
            x = gru.apply(self.rnn, summed, x)
        return x
