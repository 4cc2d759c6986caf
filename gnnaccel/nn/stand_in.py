"""What all our classes need that stand in for one of PyG's, or of a user's."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar


class StandIn:
    """Mixed into a class of modules, before it in the list of bases."""

    def __prepare_scriptable__(self) -> Any:
        """TorchScript compiles the class we stand in for: ours is Python."""
        stock = copy.copy(self)
        cls: Any = type(self)
        stock.__class__ = stock_of(cls)
        return stock


class LayerStandIn(StandIn):
    """Mixed into a message passing class."""

    #: Whether it keeps sums of constant inputs, if asked to: see ``nn.constants``.
    keeps_sums: ClassVar[bool] = False
    #: What it makes for a new graph, against what it wins by it: see ``nn.worth``.
    graph_costs: ClassVar[float] = 1
    #: Whether it pays on any graph, however small, that is there.
    pays_small: ClassVar[bool] = True

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # PyG writes a compiled `propagate` into each class. Into ours it would write
        # the parent's compiled one as the original, which explain mode goes back to;
        # so it writes into the parent.
        cls: Any = type(self)
        stand_in: Any = self
        if _direct(cls):
            stand_in.__class__ = stock_of(cls)
        else:
            stand_in = super()
        try:
            stand_in._set_jittable_templates(raise_on_error)
        finally:
            self.__class__ = cls


def _direct(cls: Any) -> bool:
    """Whether ``cls`` is itself a stand-in, and not a user's subclass of one."""
    return cls.__bases__[-1] is stock_of(cls)


@cache
def stock_of(cls: Any) -> Any:
    """The class of PyG's, or of a user's, that a stand-in stands in for."""
    return next(base for base in cls.__mro__ if not issubclass(base, StandIn))


def written_by_pyg(method: Any) -> bool:
    """Whether PyG wrote this ``propagate``, as it does into every class it builds."""
    # At the top of a module; a user's, in a file of such a name, stands in a class.
    return getattr(method, "__qualname__", None) in _WRITTEN and str(
        getattr(method, "__module__", "")
    ).endswith(("_propagate", "_edge_updater"))


_WRITTEN = ("propagate", "edge_updater")
