"""Storages whose tensors are views of few blocks: they cross to a device as blocks.

``Data.to``, ``cuda`` and ``pin_memory`` hand each storage a function that moves one
tensor. A batch's tensors lie in one block, so that moving the block and taking the same
views of the result is the same, in one copy.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import (
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
    recursive_apply,
)


def _movers() -> frozenset[CodeType]:
    """The code of the functions that ``to``, ``cuda`` and ``pin_memory`` apply."""
    found = []
    for owner in (BaseData, BaseStorage):
        for name in ("to", "cuda", "pin_memory"):
            constants = getattr(owner, name).__code__.co_consts
            found += [c for c in constants if isinstance(c, CodeType)]
    return frozenset(found)


_MOVERS = _movers()
Mover = Callable[[Tensor], Tensor]


class Blocks:
    """The blocks behind a batch's tensors, shared by the batch's storages.

    Args:
        used: How many bytes of each block are in use, by the block's address.
    """

    def __init__(self, used: dict[int, int]) -> None:
        self._used = used
        self._func: Callable[[], Any] | None = None
        self._moved: dict[int, Tensor | None] = {}

    def add(self, address: int, used: int) -> None:
        """Notes another block."""
        self._used[address] = used

    def move(self, tensor: Tensor, func: Mover, batch: Any) -> Tensor:
        """``func(tensor)``, by way of the block that the tensor is a view of."""
        strided = type(tensor) is Tensor and tensor.layout is torch.strided
        if not strided or tensor.requires_grad or not tensor.is_contiguous():
            return func(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        used = self._used.get(address, 0)
        item = tensor.element_size()
        if not 0 < used <= storage.nbytes():
            return func(tensor)
        # The storages of one batch are moved one after the other, by the same function.
        if self._func is None or self._func() is not func:
            self._func = weakref.ref(func, self._forget)
            self._moved = {}
        if address not in self._moved:
            self._moved[address] = self._whole(tensor, used, func, batch)
        moved = self._moved[address]
        end = tensor.storage_offset() + tensor.numel()
        if moved is None or end * item > used:
            return func(tensor)
        target = moved.untyped_storage()
        if target.data_ptr() == address and moved.device == tensor.device:
            return tensor
        out = torch.empty(0, dtype=tensor.dtype, device=moved.device)
        return out.set_(target, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _whole(
        self, tensor: Tensor, used: int, func: Mover, batch: Any
    ) -> Tensor | None:
        """The moved block; ``None`` if most of it is no longer part of the batch."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        stores = [] if batch is None else batch.stores
        seen = sum(_bytes_in(value, address) for s in stores for value in s.values())
        if seen < used // 2:
            return None
        block = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        moved = func(block.set_(storage, 0, (used,)))  # type: ignore[call-overload]
        where = moved.untyped_storage().data_ptr()
        if where:
            self._used[where] = used
        return moved

    def _forget(self, _: Any) -> None:
        self._func, self._moved = None, {}


def _bytes_in(value: Any, address: int) -> int:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided:
            return 0
        inside = value.untyped_storage().data_ptr() == address
        # Each begins at 64 bytes, and a small one ends long before the next.
        return value.numel() * value.element_size() + 64 if inside else 0
    if isinstance(value, Mapping):
        return sum(_bytes_in(v, address) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes_in(v, address) for v in value)
    return 0


def _unshared(value: Any) -> Any:
    """``value`` with tensors that hold no more memory than they show."""
    if type(value) is Tensor and value.layout is torch.strided:
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return (
            value
            if whole
            else value.detach().clone().requires_grad_(value.requires_grad)
        )
    if type(value) in (list, tuple):
        return type(value)(_unshared(v) for v in value)
    if type(value) is dict:
        return {k: _unshared(v) for k, v in value.items()}
    return value


class _InBlocks(BaseStorage):
    """Mixed into PyG's storages. Pickled, it is PyG's storage."""

    _pyg: type[BaseStorage]

    def apply(self, func: Callable[[Any], Any], *args: str) -> Any:
        """PyG's ``apply``; whole blocks at once where the function moves tensors."""
        blocks = self.__dict__.get("_blocks")
        code = getattr(func, "__code__", None)
        if blocks is None or code not in _MOVERS:
            return super().apply(func, *args)
        parent = self.__dict__.get("_parent")
        batch = None if parent is None or args else parent()

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return blocks.move(value, func, batch)
            return func(value)

        for key, value in self.items(*args):
            self[key] = recursive_apply(value, move)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {
            key: value if key == "_parent" else _unshared(value)
            for key, value in BaseStorage.__getstate__(self).items()
            if key != "_blocks"
        }
        # Python's own maker of objects: who reads the pickle needs no gnnaccel.
        return copyreg._reconstructor, (self._pyg, object, None), state  # type: ignore[attr-defined]


class _SlabStorage(_InBlocks):
    _pyg = BaseStorage


class _SlabNodeStorage(_InBlocks, NodeStorage):
    _pyg = NodeStorage


class _SlabEdgeStorage(_InBlocks, EdgeStorage):
    _pyg = EdgeStorage


class _SlabGlobalStorage(_InBlocks, GlobalStorage):
    _pyg = GlobalStorage


#: By PyG's class: the same over blocks.
SLAB_CLASSES: dict[type[BaseStorage], type[BaseStorage]] = {
    cls._pyg: cls
    for cls in (_SlabStorage, _SlabNodeStorage, _SlabEdgeStorage, _SlabGlobalStorage)
}
