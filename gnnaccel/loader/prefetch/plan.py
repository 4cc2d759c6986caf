"""How the tensors of a batch lie in one block of bytes, and the copy into it.

Tensors that share memory go over as one piece, so that they share it there too; a batch
whose tensors lie in one slab already is a single piece.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel.kernels import library
from gnnaccel.loader.prefetch.tree import Leaf

# As torch's own allocators align.
_ALIGN = 64

# Gaps that are copied along: those between tensors that were aligned.
_GAP = 64

#: Bytes from which a pinned piece crosses from where it is, without being packed.
DIRECT = 1 << 18


# Not frozen, which would make each several times as dear: a batch has many.
@dataclass(slots=True, eq=False)
class View:
    """A tensor in the block.

    Attributes:
        offset: Bytes from the block's beginning.
        dtype: What lies there.
        shape: Its shape.
        stride: Its strides, in elements.
        cast: What it becomes on the device, if anything else.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    cast: torch.dtype | None = None

    def of(self, memory: Tensor) -> Tensor:
        """The tensor [shape], a view of ``memory``, the block as uint8."""
        out = torch.empty(0, dtype=self.dtype, device=memory.device)
        return out.set_(
            memory.untyped_storage(),
            (memory.storage_offset() + self.offset) // self.dtype.itemsize,
            self.shape,
            self.stride,
        )


@dataclass(slots=True, eq=False)
class Piece:
    """Bytes that are copied as they are.

    Attributes:
        address: Where they lie.
        nbytes: How many.
        offset: Where they go in the block.
        owner: A tensor over their storage.
    """

    address: int
    nbytes: int
    offset: int
    owner: Tensor

    def source(self) -> Tensor:
        """The bytes, uint8 [nbytes]."""
        storage = self.owner.untyped_storage()
        out = torch.empty(0, dtype=torch.uint8)
        begin = self.address - storage.data_ptr()
        return out.set_(storage, begin, (self.nbytes,))  # type: ignore[call-overload]


@dataclass
class Plan:
    """The block of one batch.

    Attributes:
        nbytes: Its size.
        views: Where each leaf lies in it.
        pieces: What is copied as it is.
        written: What is written element by element, and where: tensors that change
            their dtype on the way, and those that show little of the memory they span.
    """

    nbytes: int = 0
    views: list[View] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    written: list[tuple[Tensor, View]] = field(default_factory=list)

    def fill(self, memory: Tensor, direct: Sequence[Piece] = ()) -> None:
        """Copies everything but ``direct`` into ``memory``, uint8 [>= nbytes].

        One call for all pieces, which holds no GIL.
        """
        pieces = self.pieces
        if direct:
            skipped = set(map(id, direct))
            pieces = [piece for piece in pieces if id(piece) not in skipped]
        if library.module is not None:
            rows = array("q")
            for piece in pieces:
                rows.extend((piece.address, piece.nbytes, piece.offset))
            library.module.copy_blocks(
                rows.buffer_info()[0], len(pieces), memory.data_ptr()
            )
        else:
            for piece in pieces:
                end = piece.offset + piece.nbytes
                memory[piece.offset : end].copy_(piece.source())
        for tensor, view in self.written:
            view.of(memory).copy_(tensor)


def plan(leaves: Sequence[Leaf]) -> Plan:
    """Finds a place for every leaf."""
    made = Plan()
    views: list[View | None] = [None] * len(leaves)
    spans = []
    for i, leaf in enumerate(leaves):
        tensor, begin = leaf.tensor, leaf.tensor.data_ptr()
        nbytes = tensor.nbytes
        if not nbytes:
            dtype = leaf.cast or tensor.dtype
            views[i] = View(0, dtype, tensor.shape, tensor.stride())
            continue
        if begin % tensor.itemsize or (leaf.cast is not None and _narrows(leaf)):
            views[i] = _write(made, tensor, leaf.cast)
            continue
        span = nbytes if tensor.is_contiguous() else _span(tensor)
        spans.append((begin, begin + span, nbytes, i))
    spans.sort()
    first = 0
    while first < len(spans):
        begin, end, shown, at = spans[first]
        storage = leaves[at].tensor.untyped_storage()
        stop = storage.data_ptr() + storage.nbytes()
        last, shown = first + 1, min(shown, end - begin)
        while last < len(spans):
            low, high, nbytes, _ = spans[last]
            if low >= end + _GAP or high > stop:
                break
            shown += min(nbytes, high - low)
            end = max(end, high)
            last += 1
        group = spans[first:last]
        first = last
        if 2 * shown < end - begin:
            same: dict[Any, View] = {}
            for low, _, _, i in group:
                tensor, cast = leaves[i].tensor, leaves[i].cast
                key = (low, tensor.shape, tensor.stride(), tensor.dtype, cast)
                if key not in same:
                    same[key] = _write(made, tensor, None, cast)
                views[i] = same[key]
            continue
        _copy(made, leaves, views, group, end)
    made.views = [view for view in views if view is not None]
    return made


def _copy(
    made: Plan,
    leaves: Sequence[Leaf],
    views: list[View | None],
    group: Sequence[tuple[int, int, int, int]],
    end: int,
) -> None:
    """Adds a piece, and the views of the leaves in it."""
    begin, _, _, at = group[0]
    # What was aligned there is aligned here.
    offset = -(-made.nbytes // _ALIGN) * _ALIGN + begin % _ALIGN
    owner = leaves[at].tensor
    made.pieces.append(Piece(begin, end - begin, offset, owner))
    made.nbytes = offset + end - begin
    for low, _, _, i in group:
        tensor = leaves[i].tensor
        views[i] = View(
            offset + low - begin,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            leaves[i].cast,
        )


def _write(
    made: Plan,
    tensor: Tensor,
    dtype: torch.dtype | None,
    cast: torch.dtype | None = None,
) -> View:
    """Adds a tensor that is written element by element."""
    offset = -(-made.nbytes // _ALIGN) * _ALIGN
    dtype = dtype or tensor.dtype
    stride = torch.empty(tensor.shape, device="meta").stride()
    view = View(offset, dtype, tuple(tensor.shape), stride, cast)
    made.written.append((tensor, view))
    made.nbytes = offset + tensor.numel() * dtype.itemsize
    return view


def _narrows(leaf: Leaf) -> bool:
    """Whether the conversion is done here: fewer bytes then cross."""
    return leaf.cast is not None and leaf.cast.itemsize <= leaf.tensor.element_size()


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
