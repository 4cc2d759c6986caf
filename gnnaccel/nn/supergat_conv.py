"""SuperGATConv's attention by products over edges; its self-supervision is PyG's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from gnnaccel.nn.attention import Attends, attention_graph
from gnnaccel.nn.fused import is_served
from gnnaccel.nn.replaced import replacing
from gnnaccel.ops.gather import gather
from gnnaccel.ops.product import sddmm_held, spmm_sum
from gnnaccel.ops.softmax import edge_softmax


class SuperGATConv(Attends, torch_geometric.nn.SuperGATConv):
    """:class:`torch_geometric.nn.SuperGATConv`, its propagation fused.

    Logits are products of both ends of an edge, in ``[E, H]``; no row is lifted to an
    edge but for the pairs that self-supervision samples.
    """

    fused_by = "sddmm, edge_softmax and spmm"
    attention_type: str
    att_l: Tensor
    att_r: Tensor
    negative_slope: float

    # PyG's, self-loops remembered. PyG reads the next line, by this class's name, to
    # write its `propagate`.
    # propagate_type: (x: Tensor)
    forward = replacing(torch_geometric.nn.SuperGATConv)["forward"]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        x = kwargs.get("x")
        if (
            self.why_not_fused() is None
            and size is None
            and isinstance(x, Tensor)
            and x.dim() == 3
            and is_served(x.flatten(1))
        ):
            adj = attention_graph(self, x.flatten(1), edge_index, None)
            if adj is not None:
                return self._propagated(adj, x)
        return super().propagate(edge_index, size=size, **kwargs)

    def _propagated(self, adj: Any, x: Tensor) -> Tensor:
        """``[N, H, C]`` of ``x`` as wide."""
        logits = sddmm_held(adj, x, x)
        if self.attention_type == "MX":
            source, target = adj.graph.edge_index
            of_source = gather((x * self.att_l).sum(-1), source)
            of_target = gather((x * self.att_r).sum(-1), target)
            logits = (of_source + of_target) * logits.sigmoid()
        else:
            logits = logits / self.out_channels**0.5
        shares = edge_softmax(adj.graph, F.leaky_relu(logits, self.negative_slope))
        # Drawn as PyG draws it: in the order of the edges.
        shares = F.dropout(shares, p=self.dropout, training=self.training)
        return spmm_sum(adj, x, shares)
