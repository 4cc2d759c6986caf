"""What a packed attribute is made of: rows of one tensor, or Python objects.

An attribute is a tree. Its leaves are :class:`Rows` (one tensor holds every graph's
value) or :class:`Objects` (the values themselves, which PyG collates); dictionaries and
lists of tensors are its branches, as PyG's collate recurses into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Stands for the value of a graph that has none.
ABSENT: Any = None


class NotPackable(Exception):
    """A leaf's values fit no single tensor; they stay objects."""


@dataclass(slots=True)
class Rows:
    """One tensor per graph, all of them in one.

    Attributes:
        data: The graphs' tensors, joined along ``dim``; contiguous, on the CPU.
        dim: The dimension along which they are joined, not negative.
        starts: int64 ``[n + 1]``: graph ``i`` has rows ``starts[i]`` to
            ``starts[i + 1]``.
        stacked: Whether each graph's value is one row without ``dim`` (PyG stacks
            0-dim tensors, numbers, and tensors whose ``__cat_dim__`` is ``None``).
        numbers: The values themselves if they are Python numbers.
        inc: Prefix sums, int64 ``[n + 1]``, of what is added per graph: none, one, or
            one for each index of the first dimension (``[2, 1]`` increments).
        inc_column: Whether increments are columns ``[R, 1]`` and not plain integers.
    """

    data: Tensor
    dim: int
    starts: Tensor
    stacked: bool = False
    numbers: list[Any] | None = None
    inc: tuple[Tensor, ...] = ()
    inc_column: bool = False

    def value(self, i: int) -> Any:
        """The value of graph ``i``: a view."""
        if self.numbers is not None:
            return self.numbers[i]
        start, end = int(self.starts[i]), int(self.starts[i + 1])
        if self.stacked and end - start == 1:
            return self.data.select(self.dim, start)
        return self.data.narrow(self.dim, start, end - start)

    def joined(self, i: int) -> Any:
        """The value of graph ``i`` as PyG's collate hands it to ``__inc__``."""
        value = self.value(i)
        if self.stacked and isinstance(value, Tensor):
            return value.unsqueeze(0)
        return value


@dataclass(slots=True)
class Objects:
    """The values as they are, one per graph; PyG's own collate joins them."""

    values: list[Any]

    def value(self, i: int) -> Any:
        """The value of graph ``i``."""
        return self.values[i]


@dataclass(slots=True)
class Items:
    """A list or tuple with the same number of tensors in every graph."""

    type: type[Any]
    items: list[Tree]

    def value(self, i: int) -> Any:
        """The value of graph ``i``."""
        return self.type(item.value(i) for item in self.items)


@dataclass(slots=True)
class Fields:
    """A dictionary with the same keys in every graph."""

    items: dict[Any, Tree]

    def value(self, i: int) -> Any:
        """The value of graph ``i``."""
        return {key: item.value(i) for key, item in self.items.items()}


Tree = Rows | Objects | Items | Fields


@dataclass(slots=True)
class Store:
    """One storage of the graphs: of a node type, an edge type, or of the graph itself.

    Attributes:
        key: As PyG's ``_key``: ``None`` for the graph's own.
        attrs: Its attributes, without ``num_nodes``.
        num_nodes: What the graphs hold under ``num_nodes``, if they do.
        counts: How many nodes each graph has, where PyG numbers nodes by graph; prefix
            sums, int64 ``[n + 1]``.
        private: What each graph's storage knows besides, if any does; batches don't.
    """

    key: Any
    attrs: dict[str, Tree] = field(default_factory=dict)
    num_nodes: list[Any] | None = None
    counts: Tensor | None = None
    private: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph consists of: its class, its storages, their attributes, in order."""

    cls: type[Any]
    stores: tuple[tuple[Any, tuple[str, ...]], ...]


def prefix_sums(values: Sequence[int] | Tensor) -> Tensor:
    """int64 ``[n + 1]``: zero, then the running sums of ``values``."""
    sizes = torch.as_tensor(values, dtype=torch.int64)
    out = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=out[1:])
    return out


def plain(value: Any) -> bool:
    """Whether ``value`` is an ordinary tensor, whose bytes say all there is to say."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_nested
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )
