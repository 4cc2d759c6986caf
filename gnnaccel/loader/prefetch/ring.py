"""Pinned memory, reused in turn: a slot is free again when its copy has run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnnaccel.loader.prefetch.accelerator import Accelerator
from gnnaccel.loader.slabs import size_class


@dataclass(eq=False)
class Slot:
    """One pinned slab.

    Attributes:
        memory: uint8 [a size class].
        event: Reached when the last copy out of it has run; None before the first.
        taken: Whether someone fills it, or has yet to copy out of it.
    """

    memory: Tensor
    event: Any = None
    taken: bool = False


class Ring:
    """Hands out slots; one at a time to each thread that asks.

    Args:
        accelerator: Gives the memory and knows when an event is reached.
        slots: How many there may be.
    """

    def __init__(self, accelerator: Accelerator, slots: int) -> None:
        self.slots = slots
        self.made = self.reused = self.peak = 0
        self._accelerator = accelerator
        self._slots: list[Slot] = []
        self._retired: list[Slot] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Slot:
        """A slot that nothing reads any more, of at least ``nbytes``.

        Waits for the oldest copy if all are in use.

        Raises:
            RuntimeError: There is no pinned memory to be had.
        """
        with self._lock:
            slot = self._choose(nbytes)
            if slot is not None:
                slot.taken = True
            retired, self._retired = self._retired, []
        for old in retired:
            # Its memory must outlive its copy.
            if old.event is not None:
                self._accelerator.finish(old.event)
        if slot is None:
            memory = self._accelerator.pinned(size_class(nbytes))
            slot = Slot(memory, taken=True)
            with self._lock:
                self.made += 1
                self._slots.append(slot)
                self.peak = max(self.peak, self.reserved())
            return slot
        self.reused += 1
        if slot.event is not None:
            self._accelerator.finish(slot.event)
        return slot

    def give(self, slot: Slot, event: Any) -> None:
        """Returns a slot; ``event`` is reached once its copy has run (None: none)."""
        with self._lock:
            slot.event = event if event is not None else slot.event
            slot.taken = False
            if slot in self._slots:
                # Kept in the order in which their copies end.
                self._slots.remove(slot)
                self._slots.append(slot)

    def reserved(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def in_use(self) -> int:
        """Bytes of the slots that are being filled or copied out of."""
        done = self._accelerator.done
        with self._lock:
            return sum(
                slot.memory.nbytes
                for slot in self._slots
                if slot.taken or not (slot.event is None or done(slot.event))
            )

    def clear(self) -> None:
        """Forgets all slots, once their copies have run."""
        with self._lock:
            slots, self._slots = self._slots, []
        for slot in slots:
            if slot.event is not None:
                self._accelerator.finish(slot.event)

    def _choose(self, nbytes: int) -> Slot | None:
        """A slot to wait for; None if a new one is to be made. Needs the lock."""
        free = [slot for slot in self._slots if not slot.taken]
        fitting = [slot for slot in free if slot.memory.nbytes >= nbytes]
        done = self._accelerator.done
        idle = [s for s in fitting if s.event is None or done(s.event)]
        if idle:
            return min(idle, key=lambda slot: slot.memory.nbytes)
        if len(self._slots) < self.slots:
            return None
        if fitting:
            return fitting[0]
        # None is large enough: the new one takes the place of the oldest.
        if free:
            self._retired.append(free[0])
            self._slots.remove(free[0])
        return None
