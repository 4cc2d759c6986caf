"""Message passing where the layer's code tells what a message is made of.

Each class here is mixed into a user's, reads what was found in ``message``, and does in
``propagate`` what comes to the same; or leaves it to PyG.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gnnaccel.errors import EdgeIndexError
from gnnaccel.nn import split
from gnnaccel.nn.fused import (
    REDUCE_OF,
    graph_for,
    hooked_method,
    is_served,
    sizes,
    watched,
)
from gnnaccel.nn.joined import joined_sum
from gnnaccel.nn.lifting import Lifting, made_from
from gnnaccel.nn.messages import Weight, joined_of, weight_of
from gnnaccel.nn.neighbours import aggregate
from gnnaccel.nn.networks import network_of
from gnnaccel.nn.stand_in import stock_of
from gnnaccel.nn.worth import graph_pays, served
from gnnaccel.ops.adj import Adj, wants_grad


class Summing(Lifting):
    """Mixed in where it is known what a message is made of."""

    flow: str
    aggr_module: torch.nn.Module

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        out = None
        if self._pays(edge_index, kwargs):
            out = self._sum(edge_index, size, kwargs)
        if out is None:
            out = super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        return out

    def _pays(self, edge_index: Any, kwargs: dict[str, Any]) -> bool:
        """Whether messages are so many that it pays to ask how they are made.

        Args:
            edge_index: What the user passed.
            kwargs: What else.
        """
        return bool(graph_pays(self, kwargs.get(self._lifted()), edge_index))

    def _lifted(self) -> str:
        """The name of an argument whose rows are lifted to edges."""
        return "x"

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        """What is asked for; ``None`` where the layer's own path is needed."""
        raise NotImplementedError

    def _found(self, read: Any) -> Any:
        """What ``read`` finds in the code of the class that we stand in for.

        ``None`` where a class was made of ours, or its methods were replaced, and the
        code is another now.
        """
        cls: Any = type(self)
        stock = stock_of(cls)
        if any(
            getattr(cls, name) is not getattr(stock, name)
            for name in ("message", "aggregate", "update")
        ):
            return None
        return read(stock)

    def _looked_into(self, edge_index: Any) -> bool:
        """Whether somebody wants to see each message, or it is another path's graph."""
        return (
            type(edge_index) is not Tensor
            or edge_index.layout != torch.strided
            or edge_index.dim() != 2
            or self.node_dim not in (-2, 0)
            or _observed(self)
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()  # type: ignore[attr-defined]
        )

    def _reduction(
        self, edge_index: Any, kwargs: dict[str, Any], names: set[str | None]
    ) -> str | None:
        """How messages are reduced, if that can be done without writing them down.

        Args:
            edge_index: What the user passed.
            kwargs: What else; only ``names`` are known.
            names: Of arguments.
        """
        if kwargs.keys() - names or self._looked_into(edge_index):
            return None
        kind = type(self.aggr_module)
        return REDUCE_OF.get(made_from(kind) or kind)

    def _end(self, name: str, size: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Features of the nodes at one end, as PyG's ``_collect`` finds them."""
        layer: Any = self
        x: Any = kwargs.get(name[:-2])
        dim = int((name[-2:] == "_i") == (self.flow == "source_to_target"))
        if isinstance(x, (tuple, list)):
            # Against the flow PyG has two ways to tell which of both is which: that of
            # its own code, and that of the code it writes.
            if len(x) != 2 or (self.flow != "source_to_target" and x[0] is not x[1]):
                return None
            if isinstance(x[1 - dim], Tensor):
                layer._set_size(size, 1 - dim, x[1 - dim])
            x = x[dim]
        if not is_served(x):
            return None
        layer._set_size(size, dim, x)
        return x


class Multiplying(Summing):
    """Mixed in where a message is a row times a weight: sums by a sparse product."""

    done_by = "spmm: its message is a row times a weight"
    keeps_sums = True

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        found = self._found(weight_of)
        if found is None:
            return None
        reduce = self._reduction(edge_index, kwargs, {"x", found.name})
        if reduce is None:
            return None
        x = kwargs.get("x")
        shape = None
        if isinstance(x, Tensor) and x.dim() == 3 and self.node_dim == -2:
            shape = x.shape  # [K, N, F]: one graph, all its columns side by side
            x = x.transpose(0, 1).flatten(1)
        x_src, _, num_dst, ok = sizes(self, x, size)
        weight = None if found.name is None else kwargs.get(found.name)
        if found.name is not None and weight is None:
            if not found.optional or found.name not in kwargs:
                return None
        elif isinstance(weight, Tensor):
            weight = _per_edge(found, weight, edge_index)
            if weight is None:
                return None
        adj = found_graph(self, x_src, edge_index, num_dst, weight) if ok else None
        if adj is None:
            return None
        out = aggregate(adj, x_src, weight, reduce)
        return out if shape is None else out.unflatten(1, shape[::2]).transpose(0, 1)


class Joining(Summing):
    """Mixed in where a message joins a row with the edge's features."""

    done_by = "message_sum: its message joins a row with the edge's features"

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        found = self._found(joined_of)
        if found is None:
            return None
        name = None if found.weight is None else found.weight.name
        reduce = self._reduction(edge_index, kwargs, {"x", found.edge, name})
        edge = kwargs.get(found.edge)
        if (
            reduce not in ("sum", "mean")
            or type(edge) is not Tensor
            or edge.layout != torch.strided
            or edge.dim() != 2
            or edge.size(0) != edge_index.size(1)
        ):
            return None
        x_src, _, num_dst, ok = sizes(self, kwargs.get("x"), size)
        weight = None
        if found.weight is not None:
            weight = _per_edge(
                found.weight, kwargs.get(found.weight.name or ""), edge_index
            )
            if weight is None or wants_grad(weight):
                return None
        adj = found_graph(self, x_src, edge_index, num_dst, weight) if ok else None
        if adj is None:
            return None
        through = None if found.through is None else getattr(self, found.through)
        return joined_sum(adj, found.kind, x_src, edge, through, weight, reduce)


def _per_edge(found: Weight, weight: Any, edge_index: Tensor) -> Tensor | None:
    """A weight ``[E]``; ``None`` if it has another shape than the message takes."""
    if not isinstance(weight, Tensor) or weight.numel() != edge_index.size(-1):
        return None
    return weight.reshape(-1) if weight.dim() == 1 or found.flattens else None


def found_graph(
    layer: Any, x_src: Any, edge_index: Tensor, num_dst: int | None, weight: Any
) -> Adj | None:
    """:func:`gnnaccel.nn.fused.graph_for`; ``None`` where PyG is to word the error."""
    try:
        adj = graph_for(layer, x_src, edge_index, num_dst, weight)
    except EdgeIndexError:
        return None
    return None if adj is None or adj.graph is None else adj


class Splitting(Summing):
    """Mixed in where a message is a network of rows side by side: see ``networks``."""

    done_by = (
        "the linear layers of its network per node, not per edge, where they may be"
    )

    def _lifted(self) -> str:
        found = self._found(network_of)
        return "" if found is None else min(found.rows)[:-2]

    def _sum(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        found = self._found(network_of)
        if found is None or self._looked_into(edge_index):
            return None
        layer: Any = self
        known = layer._check_input(edge_index, size)
        target = int(self.flow == "source_to_target")
        index = {"_i": edge_index[target], "_j": edge_index[1 - target]}
        rows = {}
        for name in found.rows:
            x = self._end(name, known, kwargs)
            if x is None or not served(x, index["_i"], index["_i"].numel()):
                return None
            rows[name] = x
        edges: dict[str, Any] = {n: kwargs.get(n) for n in found.edges}
        if any(
            type(e) is not Tensor or e.dim() != 2 or e.size(0) != index["_i"].size(0)
            for e in edges.values()
        ):
            return None
        ready = split.split(getattr(self, found.name), found.parts, rows, edges)
        if ready is None:
            return None
        reduce = None
        cls: Any = type(self)
        if cls.aggregate is MessagePassing.aggregate:
            kind: Any = type(self.aggr_module)
            reduce = REDUCE_OF.get(made_from(kind) or kind)
        num_dst = known[1 - target] if known[target] is None else known[target]
        aggregate, update = self._steps(edge_index, known, num_dst, kwargs)
        try:
            out = split.reduced(
                ready,
                index,
                reduce,
                lambda: found_graph(self, ready.nodes["_j"], edge_index, num_dst, None),
                aggregate,
            )
        except EdgeIndexError:
            return None  # PyG words its own
        return update(out)

    def _steps(
        self, edge_index: Tensor, size: Any, num_dst: int, kwargs: dict[str, Any]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """``aggregate`` and ``update``, given what they ask for besides messages."""
        layer: Any = self
        cls: Any = type(self)
        if (
            cls.aggregate is MessagePassing.aggregate
            and cls.update is MessagePassing.update
        ):  # what they ask for is known
            target = edge_index[int(self.flow == "source_to_target")]
            return partial(layer.aggregate, index=target, dim_size=num_dst), _as_it_is
        wanted = layer.inspector.get_flat_param_names(
            ["aggregate", "update"], exclude=layer.special_args
        )
        collected = layer._collect(wanted, edge_index, size, kwargs)
        of_aggregate, of_update = (
            layer.inspector.collect_param_data(step, collected)
            for step in ("aggregate", "update")
        )
        return partial(layer.aggregate, **of_aggregate), partial(
            layer.update, **of_update
        )


def _as_it_is(out: Tensor) -> Tensor:
    return out


def _observed(layer: Any) -> bool:
    """Whether somebody wants to see messages, or replaced a method on the instance."""
    state = vars(layer)
    return (
        state["_explain"]
        or layer.decomposed_layers > 1
        or hooked_method(layer) is not None
        or any(name in state for name in ("message", "aggregate", "update"))
        or (layer.aggr_module is not None and watched(layer.aggr_module))
    )
