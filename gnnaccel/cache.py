"""What is known about a tensor for as long as it lives and does not change.

The key is the tensor object itself, held weakly, together with its version counter and
its memory: an in-place change, a ``.data`` swap or another tensor at the same address
never finds an old entry. A view (``edge_index[1]``) is looked up through its base, so
that asking for the same view again finds what was found before.

Writes that torch itself cannot see (through ``.data`` or a NumPy alias of the same
memory) are not seen here either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Entry:
    __slots__ = ("ref", "storage", "values", "version")

    def __init__(self, base: Tensor, forget: Callable[[weakref.ref[Tensor]], None]):
        self.ref = weakref.ref(base, forget)
        self.version = base._version
        # Held, so that what takes its place is another one, at another address.
        self.storage = _storage(base)
        self.values: dict[Hashable, Any] = {}


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


class Memory:
    """What is known about tensors; goes with whoever owns it."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def remember(self, tensor: Tensor, key: Hashable, build: Callable[[], T]) -> T:
        """Returns ``build()``, from memory if it was built for this unchanged tensor.

        Args:
            tensor: Any tensor. Inference tensors carry no version counter; for them
                nothing is remembered.
            key: Tells apart the different things known about one tensor.
            build: Called without arguments on a miss. Its value must not hold
                ``tensor`` strongly, or the entry would never be dropped.
        """
        if tensor.is_inference():
            return build()
        base = tensor
        # A view whose .data was swapped shares nothing with its base.
        if (
            tensor._is_view()
            and tensor._base is not None
            and _storage(tensor) is _storage(tensor._base)
        ):
            base = tensor._base
        geometry: Hashable = None
        if tensor.layout == torch.strided:
            geometry = (
                tensor.data_ptr(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
        full_key = (key, geometry)
        entry = self._entries.get(id(base))
        if (
            entry is None
            or entry.ref() is not base
            or entry.version != base._version
            or entry.storage is not _storage(base)
        ):
            entry = self._new_entry(base)
        elif full_key in entry.values:
            found: T = entry.values[full_key]
            return found
        # Kept beyond this call, and so no inference tensors: they can't be saved for a
        # backward pass.
        with torch.inference_mode(False):
            value = build()
        entry.values[full_key] = value
        return value

    def _new_entry(self, base: Tensor) -> _Entry:
        # Locals, not `self`: the callback must not keep the memory alive, and while
        # the interpreter shuts down, globals are gone before tensors are.
        address, entries = id(base), self._entries

        def forget(ref: weakref.ref[Tensor]) -> None:
            entry = entries.get(address)
            if entry is not None and entry.ref is ref:
                del entries[address]

        entry = _Entry(base, forget)
        entries[address] = entry
        return entry


#: What is known about tensors by themselves, not in connection with a graph.
remember = Memory().remember


def uses(tensor: Tensor) -> int:
    """How often this was asked about a tensor since it came to be, or changed.

    Quicker than :func:`remember`, for what is asked about tensors that may not be worth
    remembering anything.

    Args:
        tensor: Any tensor; asking for the same view again counts as the same.

    Returns:
        At least 1, and no more than that for inference tensors and for those without
        memory of their own (sparse ones, and what ``torch.func`` wraps).
    """
    if tensor.is_inference():
        return 1
    base = tensor
    if tensor._is_view() and tensor._base is not None:
        base = tensor._base
    try:
        key = (id(base), tensor.data_ptr(), tensor.dim())
    except RuntimeError:
        return 1
    count = _counts.get(key)
    if count is None or count() is not base or count.version != base._version:
        count = _Count(base, _forget)
        count.key, count.version, count.uses = key, base._version, 0
        _counts[key] = count
    count.uses += 1
    return count.uses


_Key = tuple[int, int, int]


class _Count(weakref.ref[Tensor]):
    """A weak reference and what is counted, in one: most tensors are used once."""

    __slots__ = ("key", "uses", "version")

    key: _Key
    uses: int
    version: int


_counts: dict[_Key, _Count] = {}


# The dictionary by default: while the interpreter shuts down, globals are gone first.
def _forget(count: Any, counts: dict[_Key, _Count] = _counts) -> None:
    key = count.key
    if counts.get(key) is count:
        del counts[key]
