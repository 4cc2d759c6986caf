"""Classes made of others, whose rows are lifted to edges by our gather.

PyG's ``propagate`` stays as it is, with its hooks, and so do ``message`` and
``update``: messages are made for every edge, in the order in which the edges stand.
Only how rows are lifted to edges and how messages are reduced (by way of
:mod:`gnnaccel.nn.reach`) changes. Both go over the grouping of the ``edge_index``,
which is made once, and their gradients are each other.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gnnaccel.errors import EdgeIndexError
from gnnaccel.nn import reach
from gnnaccel.nn.replaced import replacing
from gnnaccel.nn.stand_in import LayerStandIn, StandIn
from gnnaccel.nn.worth import served
from gnnaccel.ops.gather import gather

#: Attributes of the classes that :func:`make` made.
STOCK_FORWARD = "_stock_forward"
_MADE_FROM = "_gnnaccel_made_from"


class Copied(StandIn):
    """Copies and pickles of an instance name the class it was made from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Our classes are none of a user's: nothing for a register of these."""
        if _MADE_FROM not in vars(cls):
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See :meth:`object.__reduce_ex__`."""
        made: Any = super().__reduce_ex__(max(protocol, 2))
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made  # a way of its own
        cls: Any = type(self)
        return (_new, (cls.__bases__[0], made_from(cls)), *made[2:])


class Reaching(Copied):
    """Mixed into any class of modules: while one runs, PyG's functions are ours."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`torch.nn.Module.__call__`."""
        if not isinstance(self, Reaching):
            # Restored since: torch.compile holds on to the bound method.
            return type(self).__call__(self, *args, **kwargs)
        call: Any = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        outer = reach.enter()
        try:
            return call(*args, **kwargs)
        finally:
            reach.leave(outer)


class Lifting(Reaching, LayerStandIn):
    """Mixed into a message passing class: lifts rows by :func:`gnnaccel.ops.gather`."""

    #: What computes the layer, for people.
    done_by: ClassVar[str] = "its own messages, our gather and reductions"
    node_dim: int

    def _index_select(self, src: Tensor, index: Tensor) -> Tensor:
        if (
            type(index) is Tensor
            and src.dim() > 1
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and served(src, index, index.numel() * (src.numel() // (src.size(0) or 1)))
            and self.node_dim in (0, -src.dim())
        ):
            try:
                return gather(src, index)
            except EdgeIndexError:
                pass  # PyG words its own
        selected: Tensor = super()._index_select(src, index)  # type: ignore[misc]
        return selected


@cache
def make(mixin: Any, cls: Any) -> type:
    """A class of the same name that stands in for ``cls``.

    Args:
        mixin: What it does otherwise: :class:`Reaching`, or what is made of that.
        cls: Any class of modules.
    """
    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        _MADE_FROM: cls,
    }
    if issubclass(cls, MessagePassing):
        copied = replacing(cls)
        if hasattr(mixin, "forward"):  # which may come back to this one
            names[STOCK_FORWARD] = copied.pop("forward", cls.forward)
        names |= copied
    made = type(cls.__name__, (mixin, cls), names)
    made.__qualname__ = cls.__qualname__
    return made


def made_from(cls: type) -> type | None:
    """What :func:`make` was given to make ``cls``; ``None`` if it did not."""
    found: type | None = vars(cls).get(_MADE_FROM)
    return found


def _new(mixin: Any, cls: type) -> Any:
    made: Any = make(mixin, cls)
    return made.__new__(made)
