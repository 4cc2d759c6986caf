"""Say which layers of a model run fused, and why the others don't."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn.conv
from torch import nn
from torch_geometric.nn import Aggregation, MessagePassing

from gnnaccel.nn import MODULES, SWAPS
from gnnaccel.nn.constants import reuses
from gnnaccel.nn.generic import generic
from gnnaccel.nn.lifting import made_from
from gnnaccel.nn.stand_in import stock_of
from gnnaccel.optimize import EXCLUDED, MARK, check_module, inside, left_to_pyg

_FUSED_CLASSES = frozenset(SWAPS.values())
FUSED, GENERIC, PYG = "fused", "generic", "PyG"
_FIRST = "not optimised: call gnnaccel.optimize(model)"
_HEADER = ("layer", "class", "runs", "why")


@dataclass(frozen=True)
class Row:
    """What is known about one layer: of messages, a readout, or a map by type.

    Attributes:
        name: Its qualified name in the model, ``""`` if it is the model itself.
        also: Further names, if it sits in several places.
        cls: Name of its class.
        path: What a plain call takes: ``"fused"``, ``"generic"`` (its own messages, our
            gather and reductions) or ``"PyG"``.
        why: What serves it, or the reason why it is not fused.
    """

    name: str
    also: tuple[str, ...]
    cls: str
    path: str
    why: str

    @property
    def fused(self) -> bool:
        """Whether a plain call takes the fused path."""
        return self.path == FUSED


@dataclass(frozen=True, repr=False)
class Explanation:
    """The answer of :func:`explain`: a table to print, or rows for a program.

    Attributes:
        rows: One :class:`Row` per message passing layer, in the model's order.
        readouts: The same for aggregations and pooling layers outside of these.
        maps: The same for linear layers that have a weight per type (HeteroLinear).
    """

    rows: list[Row]
    readouts: list[Row] = field(default_factory=list)
    maps: list[Row] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """How many layers run fused."""
        return sum(row.fused for row in self.rows)

    @property
    def left(self) -> int:
        """How many layers are left to PyG."""
        return sum(row.path == PYG for row in self.rows)

    def __str__(self) -> str:
        """Return an aligned table with a count below it."""
        if not (self.rows or self.readouts or self.maps):
            return "no message passing layer in this model"
        table = [_HEADER] + [
            (
                " = ".join(name or "(the model)" for name in (row.name, *row.also)),
                row.cls,
                row.path,
                row.why,
            )
            for row in (*self.rows, *self.readouts, *self.maps)
        ]
        # The last column, whose cells are sentences, stays ragged.
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        widths[-1] = 0
        lines = ["  ".join(map(str.ljust, line, widths)) for line in table]
        plural = "" if len(self.rows) == 1 else "s"
        lines.append(
            f"{len(self.rows)} message passing layer{plural}: "
            f"{self.fused} fused, {len(self.rows) - self.fused - self.left} generic, "
            f"{self.left} left to PyG"
        )
        for count, what in (
            (len(self.readouts), "readout"),
            (len(self.maps), "linear map by type"),
        ):
            if count:
                lines[-1] += f"; {count} {what if count == 1 else _plural(what)}"
        return "\n".join(lines)

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """List every message passing layer of ``model``: fused, or left to PyG and why.

    Below them stand the aggregations and pooling layers that are not inside of one, and
    linear layers that have a weight per type, also those inside.

    The answer describes the model as it is now, for a plain call: ``edge_index`` an
    ordinary tensor. It works before and after :func:`gnnaccel.optimize`, and changes
    nothing. Layers that ``torch.jit`` compiled are listed where they can be told from
    their name or methods.

    Args:
        model: Any module.

    Returns:
        An :class:`Explanation`; ``print`` it, or read its ``rows``.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.

    Example:
        >>> print(gnnaccel.explain(model))
        layer  class    runs     why
        conv1  GCNConv  fused    spmm(sum) with the normalisation folded in
        conv2  MyConv   generic  its own messages, our gather and reductions
        2 message passing layers: 1 fused, 1 generic, 0 left to PyG
    """
    check_module("explain", model)
    places: dict[nn.Module, list[str]] = {}
    readouts: dict[nn.Module, list[str]] = {}
    maps: dict[nn.Module, list[str]] = {}
    inner: set[nn.Module] = set()
    by_type: Any = tuple(MODULES)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, by_type):
            maps.setdefault(module, []).append(name)
            continue
        if isinstance(module, MessagePassing) or _was_message_passing(module):
            places.setdefault(module, []).append(name)
        elif not _is_readout(module):
            continue
        elif module not in inner:
            readouts.setdefault(module, []).append(name)
        inner.update(child for child in module.modules() if child is not module)
    left = inside(model, left_to_pyg)
    return Explanation(
        [_row(layer, names[0], tuple(names[1:])) for layer, names in places.items()],
        [
            Row(names[0], tuple(names[1:]), _name(module), *_readout_path(module))
            for module, names in readouts.items()
        ],
        [
            Row(names[0], tuple(names[1:]), _name(module), *_map_path(module, left))
            for module, names in maps.items()
        ],
    )


def _map_path(module: Any, left: set[int]) -> tuple[str, str]:
    """What a linear layer that has a weight per type takes, and why.

    Args:
        module: The layer.
        left: Modules that are to be left to PyG, by their id.
    """
    cls: Any = type(module)
    ours = next((base for base in cls.__mro__ if base in MODULES.values()), None)
    if ours is None:
        if cls not in MODULES:
            parent = next(base for base in cls.__mro__ if base in MODULES)
            return (
                PYG,
                f"a subclass of {parent.__name__}: only exact PyG types are fused",
            )
        if id(module) in left:
            return PYG, "it is, or is inside of, what is to be left to PyG"
        return PYG, _FIRST
    if "forward" in vars(module) or cls.forward is not ours.forward:
        return PYG, "its forward was replaced"
    obstacle = _place(module) or module.why_not_fused()
    return (FUSED, cls.fused_by) if obstacle is None else (PYG, obstacle)


def _is_readout(module: nn.Module) -> bool:
    found: Any = type(module)
    cls = stock_of(found)
    return isinstance(module, Aggregation) or cls.__module__.startswith(
        "torch_geometric.nn.pool."
    )


def _plural(what: str) -> str:
    first, *rest = what.split(" by ")
    return " by ".join([first + "s", *rest])


def _readout_path(module: nn.Module) -> tuple[str, str]:
    cls: Any = type(module)
    if made_from(cls) is None:
        if generic(cls) is None:
            return PYG, f"{cls.__name__}.leave_to_pyg is set"
        return PYG, _FIRST
    place = _place(module)
    if place is not None:
        return PYG, place
    return GENERIC, "its own code, our scatter and softmax where they are faster"


def _name(module: nn.Module) -> str:
    return type(module).__qualname__.rpartition(".")[2]


def _row(layer: Any, name: str, also: tuple[str, ...]) -> Row:
    if isinstance(layer, torch.jit.ScriptModule):
        reason = "compiled by torch.jit: call gnnaccel.optimize(model) before that"
        return Row(name, also, layer.original_name, PYG, reason)
    path, why = _path(layer)
    if path != PYG and reuses(layer) and type(layer).keeps_sums:
        why += "; sums of constant inputs are reused"
    return Row(name, also, _name(layer), path, why)


def _path(layer: Any) -> tuple[str, str]:
    """Return what a plain call of ``layer`` takes, and why."""
    cls: Any = type(layer)
    if "forward" in vars(layer):
        return PYG, "its forward was replaced on the instance"
    ours = next((base for base in cls.__mro__ if base in _FUSED_CLASSES), None)
    if ours is not None:
        if cls.forward is not ours.forward:
            return PYG, (
                f"{cls.__name__} overrides forward: fused only where it calls "
                "super().forward()"
            )
        obstacle = _obstacle(layer)
        return (FUSED, cls.fused_by) if obstacle is None else (PYG, obstacle)
    if vars(layer).get(MARK) == EXCLUDED:
        return PYG, "excluded by the filter given to gnnaccel.optimize"
    if cls in SWAPS:
        would_be_left = _obstacle(_view(layer, SWAPS[cls]))
        if would_be_left is None:
            return PYG, _FIRST
        return PYG, f"not optimised, and would be left to PyG: {would_be_left}"
    if made_from(cls) is not None:
        place = _place(layer)
        if place is not None:
            return PYG, place
        return GENERIC, f"{_why_not_exact(cls)}{cls.done_by}"
    if generic(cls) is not None:
        return PYG, _FIRST
    if getattr(cls, "leave_to_pyg", False):
        return PYG, f"{cls.__name__}.leave_to_pyg is set"
    return PYG, f"{cls.__name__} lifts rows in a way of its own"


def _why_not_exact(cls: Any) -> str:
    parent = next((base for base in cls.__mro__ if base in SWAPS), None)
    if parent is None:
        return ""
    return f"a subclass of {parent.__name__}, and only exact PyG types are fused: "


def _obstacle(layer: Any) -> str | None:
    """Return what keeps a layer of ours from its fused path, or None."""
    place = _place(layer)
    if place is not None:
        return place
    reason: str | None = layer.why_not_fused()
    return reason


def _place(layer: Any) -> str | None:
    """Return where a layer is, unless the kernels are there, too."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        # Input and parameters of a layer are on one device: the kernels' or PyG's.
        if tensor.device.type != "cpu":
            return f"it is on {tensor.device}: the kernels are for the CPU"
    return None


def _view(layer: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return ``layer`` as an instance of ``cls``: same attributes, not a copy."""
    view = cls.__new__(cls)
    view.__dict__ = layer.__dict__
    return view


def _was_message_passing(module: nn.Module) -> bool:
    """Tell whether ``module`` is what ``torch.jit`` made of a message passing layer.

    The Python class is gone by then. A scripted layer still has its ``propagate``; a
    traced one has only the name of its class.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    known = getattr(torch_geometric.nn.conv, module.original_name, None)
    if isinstance(known, type) and issubclass(known, MessagePassing):
        return True
    return hasattr(module, "propagate")
