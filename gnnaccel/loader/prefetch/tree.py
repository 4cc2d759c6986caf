"""Any batch as a flat list of tensors, and back.

A batch is taken apart into *leaves* (tensors in ordinary memory, which cross packed
together), *guests* (what has a ``to`` of its own and crosses by that) and everything
else, which stays the very object it is. Whatever comes twice in a batch comes twice in
the remade one, and as one object.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel.loader.prefetch.kinds import Kind, kind_of

Cast = Mapping[str, torch.dtype]


# Not frozen, which would make each several times as dear: a batch has many.
@dataclass(slots=True, eq=False)
class Leaf:
    """A tensor that can be packed.

    Attributes:
        tensor: Strided, in host memory, without gradient.
        cast: The dtype that is asked for; None to leave it.
    """

    tensor: Tensor
    cast: torch.dtype | None = None


@dataclass(slots=True, eq=False)
class _Node:
    """A container with at least one leaf or guest in it."""

    kind: Kind
    value: Any
    parts: list[Any] = field(default_factory=list)
    plain: bool = True  # nothing in it crosses


@dataclass(slots=True, eq=False)
class _At:
    """A place in the list of leaves, or of guests."""

    index: int
    guest: bool


@dataclass(eq=False)
class Flat:
    """A batch, taken apart.

    Attributes:
        leaves: Its tensors, each once.
        guests: What crosses on its own, with the dtype that is asked for.
    """

    leaves: list[Leaf]
    guests: list[tuple[Any, torch.dtype | None]]
    _root: Any

    def rebuild(self, leaves: Sequence[Any], guests: Sequence[Any]) -> Any:
        """The batch with others in the place of its leaves and guests."""
        return _build(self._root, leaves, guests, {})


def flatten(batch: Any, cast: Cast | None = None) -> Flat:
    """Takes a batch apart; see the module's description.

    Args:
        batch: Anything.
        cast: Dtypes by the name of the attribute, key or field.
    """
    visitor = _Visitor(cast or {})
    root, _ = visitor.visit(batch, None)
    return Flat(visitor.leaves, visitor.guests, root)


# Not a nested function that calls itself: that is a cycle, and what it has seen, a
# whole batch, would stay until Python looks for cycles.
class _Visitor:
    """Walks through a batch and notes what crosses."""

    def __init__(self, cast: Cast) -> None:
        self.leaves: list[Leaf] = []
        self.guests: list[tuple[Any, torch.dtype | None]] = []
        self._cast = cast
        self._seen: dict[Any, Any] = {}

    def visit(self, value: Any, name: str | None) -> tuple[Any, bool]:
        """The node of a value, and whether anything in it crosses."""
        if value is None or type(value) in _ATOMS:
            return (value,), False
        dtype = self._cast.get(name) if name is not None else None
        key = (id(value), dtype) if isinstance(value, Tensor) else id(value)
        node = self._seen.get(key)
        if node is not None:
            return node, isinstance(node, _At) or not node.plain
        if _packs(value):
            node = self._seen[key] = _At(len(self.leaves), guest=False)
            self.leaves.append(Leaf(value, None if dtype is value.dtype else dtype))
            return node, True
        kind = kind_of(value)
        if kind is not None:
            node = self._seen[key] = _Node(kind, value)
            for part_name, part in kind.parts(value):
                found, crosses = self.visit(part, part_name or name)
                node.parts.append(found)
                if crosses:
                    node.plain = False
            return node, not node.plain
        if callable(getattr(value, "to", None)) and not _stays(value):
            node = self._seen[key] = _At(len(self.guests), guest=True)
            self.guests.append((value, dtype))
            return node, True
        return (value,), False


def _build(
    node: Any, leaves: Sequence[Any], guests: Sequence[Any], made: dict[int, Any]
) -> Any:
    """What a node stands for; ``made`` is what was made already, by the node's id."""
    if isinstance(node, _At):
        return (guests if node.guest else leaves)[node.index]
    if not isinstance(node, _Node):
        return node[0]
    if node.plain:
        return node.value
    if id(node) not in made:
        # Noted before it is filled: it may lead back to itself.
        shell = made[id(node)] = node.kind.shell(node.value)
        parts = [_build(part, leaves, guests, made) for part in node.parts]
        made[id(node)] = node.kind.filled(node.value, shell, parts)
    return made[id(node)]


def move(batch: Any, device: torch.device, cast: Cast | None = None) -> Any:
    """The batch on ``device``, tensor by tensor and at once; the original stays."""
    flat = flatten(batch, cast)
    leaves = [leaf.tensor.to(device, leaf.cast) for leaf in flat.leaves]
    return flat.rebuild(leaves, [send(*guest, device) for guest in flat.guests])


def send(guest: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """One guest on ``device``."""
    if isinstance(guest, Tensor):
        return guest.to(device, dtype)
    # Objects like PyG's change themselves: the user's own must not.
    return copy.copy(guest).to(device)


def nbytes(batch: Any) -> int:
    """How many bytes the tensors of a batch show."""
    return sum(leaf.tensor.nbytes for leaf in flatten(batch).leaves)


_ATOMS = frozenset(
    (str, int, float, bool, bytes, torch.device, torch.dtype, torch.Size)
)


def _packs(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_nested
    )


def _stays(value: Any) -> bool:
    """Whether its ``to`` would change what the user has, or is no such thing."""
    return isinstance(value, (torch.nn.Module, type))
