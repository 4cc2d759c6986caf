"""Slabs: the memory of batches, handed out again once no tensor of a batch is alive.

A batch is one block of bytes and tensors that are views of it. A slab that is reused
costs no page faults; reusing it too early would change a batch that the user still
holds. So the ring takes a slab again only when nothing but the ring refers to its
storage. Pinned slabs go back to torch's own allocator instead, which also waits for the
asynchronous copies that still read them.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

#: Bytes of idle slabs that a loader keeps between two epochs.
IDLE_LIMIT = 64 << 20

# A slab up to this size serves any smaller batch: its waste is not worth an allocation.
_SMALL = 1 << 20


def size_class(nbytes: int) -> int:
    """Rounds up to one of eight sizes between two powers of two.

    The batches of a loader differ a little in size; rounded, most of them fit the slabs
    of those before. At most an eighth is wasted.

    Args:
        nbytes: What is needed.
    """
    if nbytes <= 4096:
        return 4096
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


@dataclass(eq=False)
class _Slot:
    """One slab that may be handed out again.

    Attributes:
        storage: Its memory. That this object is held is one use of the memory; torch
            has one such object per memory, so a user's own is this one too.
        address: Where the memory was when it was made.
        size: Bytes.
        used: Bytes of it that its last batch needed.
    """

    storage: torch.UntypedStorage
    address: int
    size: int
    used: int

    def idle(self) -> bool:
        """Whether nobody else refers to the memory: no tensor, no storage object."""
        return (
            torch._C._storage_Use_Count(self.storage._cdata) <= 1
            and sys.getrefcount(self.storage) <= 2
        )

    def intact(self) -> bool:
        """Whether it is still the memory it was.

        ``share_memory_`` on any tensor of a batch moves the storage to memory that
        other processes may go on reading; ``resize_`` may move it too.
        """
        return (
            self.storage.data_ptr() == self.address
            and self.storage.nbytes() == self.size
        )


@dataclass(eq=False)
class _Pinned:
    """A pinned slab: only watched, since torch's allocator must get it back."""

    watch: StorageWeakRef
    size: int
    used: int

    def idle(self) -> bool:
        """Whether it is back with torch's allocator."""
        return bool(self.watch.expired())


class Slabs:
    """Gives out slabs and remembers the last few of them.

    Args:
        slots: How many slabs it keeps an eye on. One beyond them, of a batch that the
            user keeps, is the user's alone.
        pinned: Whether they are page-locked, for asynchronous copies to a GPU.
    """

    def __init__(self, slots: int, pinned: bool = False) -> None:
        self.slots = slots
        self.pinned = pinned
        self._ring: list[_Slot] = []
        self._watched: list[_Pinned] = []
        self._made = self._reused = self._peak = 0

    def take(self, nbytes: int) -> Tensor:
        """Memory for a batch.

        Args:
            nbytes: What is needed.

        Returns:
            uint8, at least [nbytes], uninitialised, aligned to 64 bytes. It is a tensor
            of its own: as long as it or any view of it lives, it is not given again.
        """
        if self.pinned and (slab := self._pin(nbytes)) is not None:
            return slab
        slot = self._claim(nbytes)
        if slot is None:
            storage = torch.empty(size_class(nbytes), dtype=torch.uint8)
            slot = self._make(storage.untyped_storage(), nbytes)
        slab = torch.empty(0, dtype=torch.uint8)
        slab.set_(slot.storage, 0, (slot.size,), (1,))
        self._ring.append(slot)
        self._reserve()
        return slab

    def trim(self) -> None:
        """Lets go of idle slabs, the largest first, until `IDLE_LIMIT` holds."""
        kept = 0
        for slot in sorted(self._ring, key=lambda slot: slot.size):
            if slot.idle():
                kept += slot.size
                if kept > IDLE_LIMIT:
                    self._remove(slot)

    def stats(self) -> dict[str, int | float]:
        """What the slabs hold and did.

        Returns:
            Bytes ``in_use`` (what the batches alive need), ``reserved`` (the slabs) and
            ``peak`` (most ever reserved); slabs ``made`` and ``reused``;
            ``fragmentation``, the share of the reserved bytes that is not in use.
        """
        self._watched = [slab for slab in self._watched if not slab.idle()]
        held: list[_Slot | _Pinned] = [*self._ring, *self._watched]
        reserved = sum(slab.size for slab in held)
        in_use = sum(slab.used for slab in held if not slab.idle())
        return {
            "in_use": in_use,
            "reserved": reserved,
            "peak": self._peak,
            "made": self._made,
            "reused": self._reused,
            "fragmentation": 1 - in_use / reserved if reserved else 0.0,
        }

    def _claim(self, nbytes: int) -> _Slot | None:
        """Takes out of the ring an idle slab that fits and wastes at most half."""
        most = max(2 * nbytes, _SMALL)
        fitting = [slot for slot in self._ring if nbytes <= slot.size <= most]
        for slot in sorted(fitting, key=lambda slot: slot.size):
            # Another thread may have claimed it since: only one can remove it, and
            # may have handed it out already.
            if slot.idle() and self._remove(slot):
                if not slot.idle():
                    self._ring.append(slot)
                elif slot.intact():
                    slot.used = nbytes
                    self._reused += 1
                    return slot
        return None

    def _remove(self, slot: _Slot) -> bool:
        try:
            self._ring.remove(slot)
        except ValueError:
            return False
        return True

    def _make(self, storage: torch.UntypedStorage, nbytes: int) -> _Slot:
        """A new slot; where there are too many, the one that serves least goes."""
        ring = list(self._ring)
        if len(ring) >= self.slots:
            # An idle one did not fit; else the oldest, which its batch then owns.
            self._remove(next((slot for slot in ring if slot.idle()), ring[0]))
        self._made += 1
        return _Slot(storage, storage.data_ptr(), storage.nbytes(), nbytes)

    def _pin(self, nbytes: int) -> Tensor | None:
        """A pinned slab; None, after one warning, where the system has none to give."""
        try:
            slab = torch.empty(size_class(nbytes), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.pinned = False
            warnings.warn(
                f"gnnaccel: memory could not be pinned ({error}); batches lie in "
                "ordinary memory from here on. Raise the limit of locked memory "
                "(ulimit -l), or leave pin_memory out.",
                stacklevel=2,
            )
            return None
        storage = slab.untyped_storage()
        self._watched = [seen for seen in self._watched if not seen.idle()]
        self._watched = self._watched[-self.slots :]
        watch = StorageWeakRef(storage)
        self._watched.append(_Pinned(watch, storage.nbytes(), nbytes))
        self._made += 1
        self._reserve()
        return slab

    def _reserve(self) -> None:
        ring = sum(slot.size for slot in self._ring)
        watched = sum(slab.size for slab in self._watched)
        self._peak = max(self._peak, ring + watched)
