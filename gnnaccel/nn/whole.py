"""PyG's layers of weighted rows whose ``forward`` is known, and done as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.nn.constants import reuses
from gnnaccel.nn.fused import REDUCE_OF, has_own_propagate, is_served, may_reorder
from gnnaccel.nn.lifting import made_from
from gnnaccel.nn.messages import weight_of
from gnnaccel.nn.summing import Multiplying
from gnnaccel.ops.adj import wants_grad


class Whole(Multiplying):
    """Mixed in where PyG's own ``forward`` is known."""

    _stock_forward: Any
    flow: str

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """See PyG's layer."""
        out = None
        if self._serves(x, edge_index, edge_weight):
            out = self._whole(x, edge_index, edge_weight)
        if out is None:
            out = self._stock_forward(x, edge_index, edge_weight)
        return out

    def _serves(self, x: Any, edge_index: Any, edge_weight: Any) -> bool:
        """Whether sums of this input are plain products, to be put in any order."""
        if not self._pays(edge_index, {"x": x}):
            return False
        kind = type(self.aggr_module)
        return (
            self._found(weight_of) is not None
            and not has_own_propagate(self)
            and not self._looked_into(edge_index)
            and REDUCE_OF.get(made_from(kind) or kind) == "sum"
            and is_served(x)
            and may_reorder(x)
            and not (reuses(self) and not x.requires_grad)
            and not (isinstance(edge_weight, Tensor) and wants_grad(edge_weight))
        )

    def _whole(self, x: Tensor, edge_index: Tensor, edge_weight: Any) -> Tensor | None:
        """What the layer returns; ``None`` where its own path is needed."""
        raise NotImplementedError
