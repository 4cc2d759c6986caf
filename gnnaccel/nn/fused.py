"""What all fused layers share: when the fused path is taken, and on which graph.

A layer's ``forward`` asks :meth:`Fused.why_not_fused` about itself and
:func:`graph_for` about its input. Whatever the fused path can't do goes to
PyG's own ``forward``, which also raises PyG's own errors.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric import EdgeIndex
from torch_geometric.nn import aggr
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gnnaccel.graph import Graph
from gnnaccel.kernels import transforming
from gnnaccel.nn.constants import reuses
from gnnaccel.nn.stand_in import LayerStandIn, written_by_pyg
from gnnaccel.nn.worth import graph_pays
from gnnaccel.ops.adj import Adj, tracing

#: The aggregations that have a kernel.
REDUCE_OF: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
}

# Methods a fused forward does not call; whoever overrides one wants PyG's forward.
_SKIPPED = (
    "aggregate",
    "edge_update",
    "edge_updater",
    "message",
    "message_and_aggregate",
    "propagate",
    "update",
)
_HOOKS = tuple(
    (f"_{method}_forward{when}_hooks", method)
    for method in (
        "propagate",
        "message",
        "aggregate",
        "message_and_aggregate",
        "edge_update",
    )
    for when in ("", "_pre")
)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALVES)


class Fused(LayerStandIn):
    """Mixed into a PyG layer, before it in the list of bases."""

    aggr_module: torch.nn.Module
    #: What computes the layer on the fused path, for people.
    fused_by: ClassVar[str]
    #: The values of ``node_dim`` that the fused path takes: of two dimensions the same.
    _node_dims: ClassVar[tuple[int, ...]] = (-2, 0)

    #: What :func:`_overridden` says of the class.
    _overrides: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Look once per class, not at each call and not in a compiled graph."""
        super().__init_subclass__(**kwargs)
        cls._overrides = _overridden(cls)

    def why_not_fused(self) -> str | None:
        """Why ``forward`` goes to PyG's whatever its input; ``None``: it does not."""
        state = self.__dict__
        if torch.compiler.is_exporting():
            return "the model is being exported: our operators need not exist there"
        if state["_explain"]:
            return "explain mode is on"
        skipped = self._overrides
        if skipped is None:
            skipped = next((name for name in _SKIPPED if name in state), None)
            if skipped == "propagate" and not has_own_propagate(self):
                skipped = None
        if skipped is not None:
            return f"its method '{skipped}' is overridden"
        hooked = hooked_method(self)
        if hooked is not None:
            return f"{hooked} hooks are registered"
        if state["node_dim"] not in self._node_dims:
            return f"node_dim={state['node_dim']}: only {self._node_dims} is fused"
        return self._why_not_aggregated()

    def _tries(self, x: Any, edge_index: Any) -> bool:
        """Whether the fused path is to be tried on this input."""
        return (
            graph_pays(self, x, edge_index) is not False
            and self.why_not_fused() is None
        )

    def _why_not_aggregated(self) -> str | None:
        module = self.__dict__["_modules"].get("aggr_module")
        if type(module) not in REDUCE_OF:
            aggr = self.__dict__["aggr"]
            return f"aggr={aggr!r}: only sum, mean, max and min are fused"
        if watched(module):
            return "its aggregation has hooks, or a forward of its own"
        return None

    @property
    def _reduce(self) -> str:
        """How it reduces; empty for what has no kernel: `torch.jit` asks any layer."""
        return REDUCE_OF.get(type(self.aggr_module), "")


def has_own_propagate(layer: Any) -> bool:
    """Whether somebody replaced ``propagate`` on the instance.

    Args:
        layer: Any message passing layer.
    """
    # Explain mode and `decomposed_layers` leave PyG's own there.
    own = vars(layer).get("propagate")
    return own is not None and getattr(own, "__func__", None) not in (
        layer._orig_propagate.__func__,
        layer._jinja_propagate.__func__,
    )


def hooked_method(layer: Any) -> str | None:
    """A step of message passing that hooks are registered on; ``None``: there is none.

    Args:
        layer: Any message passing layer.
    """
    state = vars(layer)
    return next((method for name, method in _HOOKS if state[name]), None)


def _overridden(cls: Any) -> str | None:
    """A method the fused path would skip that a subclass of a fused layer defines."""
    for base in cls.__mro__:
        if Fused in base.__bases__:
            return None
        for name in _SKIPPED:
            method = base.__dict__.get(name)
            # PyG writes a compiled `propagate` into every class it instantiates, and a
            # layer of ours may have one of its own.
            if not (method is None or written_by_pyg(method) or _ours(method)):
                return name
    return None


def _ours(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("gnnaccel.nn.")


def graph_for(
    layer: Any,
    x_src: Any,
    edge_index: Any,
    num_dst: int | None,
    weight: Any = None,
) -> Adj | None:
    """The graph of a layer's input if the fused path takes it, else ``None``.

    Args:
        layer: The layer; its ``flow`` counts.
        x_src: Features of the sources.
        edge_index: What the user passed as ``edge_index``.
        num_dst: Number of destinations, or ``None``: as many as sources.
        weight: Edge weights, or ``None``.

    Raises:
        EdgeIndexError: An edge names a node that does not exist.
    """
    if not is_served(x_src):
        return None
    if transforming(x_src) or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None
    size = (x_src.size(0), x_src.size(0) if num_dst is None else num_dst)
    forward = layer.flow == "source_to_target"
    if isinstance(edge_index, SparseTensor) or is_torch_sparse_tensor(edge_index):
        if (
            not forward
            or tracing(x_src)
            or (isinstance(edge_index, Tensor) and edge_index.requires_grad)
            or (edge_index.size(1), edge_index.size(0)) != size
            or str(_device(edge_index)) != "cpu"
            # The tie rules of sparse products differ from those of scatter.
            or layer._reduce not in ("sum", "mean")
        ):
            return None
        graph = Graph.of(edge_index)
        return Adj(graph, None, *size, reuse=reuses(layer))
    if isinstance(edge_index, EdgeIndex):
        known = edge_index.sparse_size()
        if layer._reduce not in ("sum", "mean") or any(
            k not in (None, s) for k, s in zip(known, size, strict=True)
        ):
            return None
        edge_index = edge_index.as_tensor()
    if not is_index(edge_index, x_src):
        return None
    if weight is not None and not (
        isinstance(weight, Tensor)
        and weight.dim() == 1
        and weight.size(0) == edge_index.size(1)
        and weight.dtype == x_src.dtype
        and weight.device == x_src.device
    ):
        return None
    if tracing(x_src, edge_index, weight):
        return Adj(None, edge_index, *size) if forward else None
    # PyG may multiply by it without saving it for a backward pass.
    if weight is not None and weight.is_inference() and torch.is_grad_enabled():
        return None
    if forward:
        graph = Graph.of(edge_index, size)
    else:
        graph = Graph.of(edge_index, size[::-1]).t
    return Adj(graph, None, *size, reuse=reuses(layer))


def is_served(x: Any) -> bool:
    """Whether these are features that the kernels take: ``[N, F]``, on the CPU."""
    return _is_matrix(x) and x.dtype in DTYPES and x.device.type == "cpu"


def is_index(edge_index: Any, x: Tensor) -> bool:
    """Whether this is an index ``[2, E]`` where the features ``x`` are."""
    return (
        isinstance(edge_index, Tensor)
        and edge_index.dtype in (torch.int64, torch.int32)
        and edge_index.dim() == 2
        and edge_index.size(0) == 2
        and edge_index.device == x.device
    )


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and x.dim() == 2


def _device(matrix: Any) -> torch.device:
    device = matrix.device
    result: torch.device = device() if callable(device) else device
    return result


def sizes(layer: Any, x: Any, size: Any) -> tuple[Any, Any, int | None, bool]:
    """Splits a layer's features and checks them against its ``size`` argument.

    Returns:
        ``(x_src, x_dst, num_dst, ok)``: ``num_dst`` is ``None`` for as many as there
        are sources; ``ok`` tells that the shapes agree.
    """
    if isinstance(x, Tensor):
        x_src = x_dst = x
    elif isinstance(x, (tuple, list)) and len(x) == 2:
        x_src, x_dst = x
    else:
        return None, None, None, False
    if not isinstance(x_src, Tensor) or x_src.dim() == 0:
        return x_src, x_dst, None, False
    if x_dst is not x_src:
        if layer.flow != "source_to_target":
            return x_src, x_dst, None, False  # PyG's messages come from x_dst then
        if x_dst is not None and not _is_matrix(x_dst):
            return x_src, x_dst, None, False
    num_dst = x_dst.size(-2) if isinstance(x_dst, Tensor) and x_dst.dim() > 1 else None
    if size is None:
        return x_src, x_dst, num_dst, True
    if len(size) != 2 or size[0] not in (None, x_src.size(0)):
        return x_src, x_dst, num_dst, False
    if num_dst is None:
        return x_src, x_dst, size[1], True
    return x_src, x_dst, num_dst, size[1] in (None, num_dst)


def plain_linear(module: Any) -> bool:
    """Whether ``module(x)`` is ``x W^T + b`` and nobody looks on."""
    return type(module) in (torch.nn.Linear, Linear) and not watched(module)


def watched(module: Any) -> bool:
    """Whether a call of ``module`` does more than its class's ``forward``."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as wrappers of memory and precision set it
        or _has_any_global_hook()
    )


def may_reorder(x: Tensor) -> bool:
    """Whether a linear map may change places with a sum over neighbours.

    Not under autocast or in half types, where the order decides what is rounded.
    """
    return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(
        "cpu"
    )


def aggregation_columns(linear: Any, x: Tensor) -> tuple[int, int]:
    """Columns summed over a training step: (aggregating first, transforming first).

    Aggregating first sums the inputs' columns, and once more backward only if the
    input wants a gradient; transforming first sums the outputs' columns, and once more
    backward if anything does.
    """
    learns = torch.is_grad_enabled() and (
        x.requires_grad or linear.weight.requires_grad
    )
    backward = torch.is_grad_enabled() and x.requires_grad
    out_features, in_features = linear.weight.shape
    return in_features * (1 + backward), out_features * (1 + learns)
