"""Say which message passing layers of a model run fused, and why the others don't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn.conv
from torch import nn
from torch_geometric.nn import MessagePassing

from gnnaccel.nn import SWAPS
from gnnaccel.optimize import EXCLUDED, MARK, check_module

_FUSED_CLASSES = frozenset(SWAPS.values())
_HEADER = ("layer", "class", "runs", "why")


@dataclass(frozen=True)
class Row:
    """What is known about one message passing layer.

    Attributes:
        name: Its qualified name in the model, ``""`` if it is the model itself.
        also: Further names, if it sits in several places.
        cls: Name of its class.
        fused: Whether a plain call takes the fused path.
        why: What serves it, or the reason why it is left to PyG.
    """

    name: str
    also: tuple[str, ...]
    cls: str
    fused: bool
    why: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """The answer of :func:`explain`: a table to print, or rows for a program.

    Attributes:
        rows: One :class:`Row` per message passing layer, in the model's order.
    """

    rows: list[Row]

    @property
    def fused(self) -> int:
        """How many layers run fused."""
        return sum(row.fused for row in self.rows)

    @property
    def left(self) -> int:
        """How many layers are left to PyG."""
        return len(self.rows) - self.fused

    def __str__(self) -> str:
        """Return an aligned table with a count below it."""
        if not self.rows:
            return "no message passing layer in this model"
        table = [_HEADER] + [
            (
                " = ".join(name or "(the model)" for name in (row.name, *row.also)),
                row.cls,
                "fused" if row.fused else "PyG",
                row.why,
            )
            for row in self.rows
        ]
        # The last column, whose cells are sentences, stays ragged.
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        widths[-1] = 0
        lines = ["  ".join(map(str.ljust, line, widths)) for line in table]
        plural = "" if len(self.rows) == 1 else "s"
        lines.append(
            f"{len(self.rows)} message passing layer{plural}: "
            f"{self.fused} fused, {self.left} left to PyG"
        )
        return "\n".join(lines)

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """List every message passing layer of ``model``: fused, or left to PyG and why.

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
        layer  class    runs   why
        conv1  GCNConv  fused  spmm(sum) with the normalisation folded in
        conv2  GATConv  PyG    no fused version of GATConv yet
        2 message passing layers: 1 fused, 1 left to PyG
    """
    check_module("explain", model)
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MessagePassing) or _was_message_passing(module):
            places.setdefault(module, []).append(name)
    return Explanation(
        [_row(layer, names[0], tuple(names[1:])) for layer, names in places.items()]
    )


def _row(layer: Any, name: str, also: tuple[str, ...]) -> Row:
    if isinstance(layer, torch.jit.ScriptModule):
        reason = "compiled by torch.jit: call gnnaccel.optimize(model) before that"
        return Row(name, also, layer.original_name, False, reason)
    cls: Any = type(layer)
    left = _why_left(layer)
    why = left if left is not None else cls.fused_by
    return Row(name, also, cls.__qualname__.rpartition(".")[2], left is None, why)


def _why_left(layer: Any) -> str | None:
    """Return why a plain call of ``layer`` runs in PyG, or None if it runs fused."""
    cls: Any = type(layer)
    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    ours = next((base for base in cls.__mro__ if base in _FUSED_CLASSES), None)
    if ours is not None:
        if cls.forward is not ours.forward:
            return (
                f"{cls.__name__} overrides forward: fused only where it calls "
                "super().forward()"
            )
        return _obstacle(layer)
    if vars(layer).get(MARK) == EXCLUDED:
        return "excluded by the filter given to gnnaccel.optimize"
    if cls in SWAPS:
        would_be_left = _obstacle(_view(layer, SWAPS[cls]))
        if would_be_left is None:
            return "not optimised: call gnnaccel.optimize(model)"
        return f"not optimised, and would be left to PyG: {would_be_left}"
    swappable = next((base for base in cls.__mro__ if base in SWAPS), None)
    if swappable is not None:
        return (
            f"a subclass of {swappable.__name__} ({cls.__name__}): "
            "only exact PyG types are swapped"
        )
    return f"no fused version of {cls.__name__} yet"


def _obstacle(layer: Any) -> str | None:
    """Return what keeps a layer of ours from its fused path, or None."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        # Input and parameters of a layer are on one device: the kernels' or PyG's.
        if tensor.device.type != "cpu":
            return f"it is on {tensor.device}: the kernels are for the CPU"
    reason: str | None = layer.why_not_fused()
    return reason


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
