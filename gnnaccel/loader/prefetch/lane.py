"""The way to the device: pack, copy, hand over, and when memory may be used again.

One stream serves a loader for life. What each side must wait for:

- a pinned slot is filled again only after the copy out of it has run (`Ring`);
- the consumer's stream waits for the copy of the batch that is handed over;
- device memory goes back to the loader's stream only when no tensor refers to it any
  more and that stream waits for all that the consumer had begun by then. Until both
  are so, the lane itself holds the memory.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel.loader.prefetch.accelerator import Accelerator
from gnnaccel.loader.prefetch.host import Host
from gnnaccel.loader.prefetch.plan import DIRECT, Piece, Plan, plan
from gnnaccel.loader.prefetch.ring import Ring, Slot
from gnnaccel.loader.prefetch.stats import Stages
from gnnaccel.loader.prefetch.tree import Cast, Flat, flatten, move, send
from gnnaccel.loader.slabs import size_class

#: Batches that the consumer may keep before their memory is left to torch to watch.
MOST_HELD = 16


@dataclass(eq=False)
class Sent:
    """A batch on its way.

    Attributes:
        batch: The batch to hand over, or the original if it has yet to cross.
        flat: Set if there are guests, which cross when the batch is handed over.
        leaves: The leaves on the device, for ``flat``.
        storages: The device memory.
        event: Reached when the copy has run; None if nothing crossed yet.
    """

    batch: Any
    flat: Flat | None = None
    leaves: list[Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    event: Any = None


@dataclass(eq=False)
class _Held:
    """Device memory that was handed over.

    Attributes:
        storage: Held as one use of it.
        nbytes: How much of it the batch needed.
        streams: Those on which the consumer may have used it.
    """

    storage: torch.UntypedStorage
    nbytes: int
    streams: set[Any]

    def idle(self) -> bool:
        """Whether nobody else refers to the memory: no tensor, no storage object."""
        return (
            torch._C._storage_Use_Count(self.storage._cdata) <= 1
            and sys.getrefcount(self.storage) <= 2
        )


@dataclass(eq=False)
class _Flying:
    """What a copy reads, until it has run; and what it took."""

    begin: Any
    end: Any
    nbytes: int
    reads: list[Any]


class Lane:
    """Copies the batches of one loader to one device.

    Args:
        accelerator: The device.
        host: Gives the time.
        stages: Is told what was done.
        cast: Dtypes by name.
        depth: How many batches may be on their way.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        host: Host,
        stages: Stages,
        cast: Cast | None,
        depth: int,
    ) -> None:
        self.accelerator = accelerator
        self.plain = False
        self.limit = sys.maxsize
        self._stream = accelerator.new_stream()
        self._ring = Ring(accelerator, depth + 2)
        self._host, self._stages, self._cast = host, stages, cast
        self._held: list[_Held] = []
        self._flying: deque[_Flying] = deque()
        self._lock = threading.Lock()
        self._told = False

    def set_depth(self, depth: int) -> None:
        """Makes room for ``depth`` batches on their way."""
        self._ring.slots = max(self._ring.slots, depth + 2)

    def send(self, batch: Any) -> Sent:
        """Begins the crossing of a batch; runs on a thread of the loader."""
        if self.plain:
            return Sent(batch)
        self._land()
        clock, stage = self._host.now, self._stages.pack
        begin = clock()
        flat = flatten(batch, self._cast)
        layout = plan(flat.leaves)
        if not layout.nbytes:
            stage.busy += clock() - begin
            return self._empty(batch, flat, layout)
        direct = self._direct(layout)
        slot = None
        if len(direct) < len(layout.pieces) or layout.written:
            waiting = clock()
            try:
                slot = self._ring.take(layout.nbytes)
            except RuntimeError as error:
                return self._trouble(batch, "memory could not be pinned", error)
            waited = clock() - waiting
            stage.wait += waited
            begin += waited
            layout.fill(slot.memory, direct)
        stage.busy += clock() - begin
        stage.items += 1
        stage.nbytes += layout.nbytes
        try:
            return self._copy(batch, flat, layout, slot, direct)
        except torch.OutOfMemoryError as error:
            return self._trouble(batch, "the device is out of memory", error)

    def hand_over(self, sent: Sent) -> Any:
        """The batch, for the calling thread's current stream."""
        if sent.event is None and sent.flat is None:
            return move(sent.batch, self.accelerator.device, self._cast)
        stream = self.accelerator.current_stream()
        self.settle(stream)
        if sent.event is not None:
            self.accelerator.wait(stream, sent.event)
        batch = sent.batch
        if sent.flat is not None:
            device = self.accelerator.device
            guests = [send(*guest, device) for guest in sent.flat.guests]
            batch = sent.flat.rebuild(sent.leaves, guests)
        with self._lock:
            for storage in sent.storages:
                self._held.append(_Held(storage, storage.nbytes(), {stream}))
        return batch

    def settle(self, stream: Any) -> None:
        """Takes back what the consumer let go of, in the order of the streams."""
        with self._lock:
            idle = [held for held in self._held if held.idle()]
            if not idle:
                return
            self._held = [
                held for held in self._held if not any(held is i for i in idle)
            ]
        # All that read the memory was given to these streams before.
        streams = {stream}.union(*(held.streams for held in idle))
        for other in streams:
            event = self.accelerator.event(other)
            self.accelerator.wait(self._stream, event)
        # Freed only now: what the stream does next with it comes after that wait.
        idle.clear()

    def let_go(self, keep: int = 0) -> None:
        """Leaves all but ``keep`` of what the consumer still has to torch's care."""
        stream = self.accelerator.current_stream()
        self.settle(stream)
        with self._lock:
            cut = max(len(self._held) - keep, 0)
            parting, self._held = self._held[:cut], self._held[cut:]
        for held in parting:
            for other in held.streams | {stream}:
                self.accelerator.keep(held.storage, other)
        self._land()

    def close(self) -> None:
        """Waits for the copies that are under way."""
        while self._flying:
            self.accelerator.finish(self._flying[0].end)
            self._land()
        self._ring.clear()

    def memory_stats(self) -> dict[str, Any]:
        """See ``PrefetchLoader.memory_stats``."""
        memory = self.accelerator.memory()
        reserved = memory["reserved"]
        unused = 1 - memory["allocated"] / reserved if reserved else 0.0
        ring = self._ring
        return {
            **memory,
            "fragmentation": unused,
            "handed_over": sum(held.nbytes for held in self._held),
            "pinned": ring.reserved(),
            "pinned_in_use": ring.in_use(),
            "pinned_peak": ring.peak,
            "slots_made": ring.made,
            "slots_reused": ring.reused,
        }

    def _direct(self, layout: Plan) -> list[Piece]:
        """The pieces that are pinned already and large, or all there is."""
        alone = len(layout.pieces) == 1 and not layout.written
        return [
            piece
            for piece in layout.pieces
            if (alone or piece.nbytes >= DIRECT)
            and self.accelerator.is_pinned(piece.owner)
        ]

    def _copy(
        self,
        batch: Any,
        flat: Flat,
        layout: Plan,
        slot: Slot | None,
        direct: Sequence[Piece],
    ) -> Sent:
        """Begins the copy; on the device its memory is of the loader's stream."""
        accelerator, nbytes = self.accelerator, layout.nbytes
        event = None
        try:
            with accelerator.use(self._stream):
                memory = accelerator.empty(size_class(nbytes))
                begin = accelerator.event(self._stream)
                if slot is not None:
                    accelerator.copy(memory[:nbytes], slot.memory[:nbytes])
                for piece in direct:
                    target = memory[piece.offset : piece.offset + piece.nbytes]
                    accelerator.copy(target, piece.source())
                leaves, storages = self._views(memory, layout)
                event = accelerator.event(self._stream)
        finally:
            if slot is not None:
                self._ring.give(slot, event)
        with self._lock:
            reads = [piece.owner for piece in direct]
            self._flying.append(_Flying(begin, event, nbytes, reads))
        if flat.guests:
            return Sent(None, flat, leaves, storages, event)
        return Sent(flat.rebuild(leaves, ()), None, [], storages, event)

    def _views(
        self, memory: Tensor, layout: Plan
    ) -> tuple[list[Tensor], list[torch.UntypedStorage]]:
        leaves, storages = [], [memory.untyped_storage()]
        for view in layout.views:
            tensor = view.of(memory)
            if view.cast is not None:
                # To more bytes: done here, so that fewer crossed.
                tensor = self.accelerator.convert(tensor, view.cast)
                storages.append(tensor.untyped_storage())
            leaves.append(tensor)
        return leaves, storages

    def _empty(self, batch: Any, flat: Flat, layout: Plan) -> Sent:
        """A batch without a byte in any tensor that could be packed."""
        device = self.accelerator.device
        leaves = [
            torch.empty(view.shape, dtype=view.cast or view.dtype, device=device)
            for view in layout.views
        ]
        return Sent(batch, flat, leaves)

    def _land(self) -> None:
        """Notes the copies that have run and forgets what they read."""
        with self._lock:
            while self._flying and self.accelerator.done(self._flying[0].end):
                flight = self._flying.popleft()
                stage = self._stages.copy
                stage.busy += self.accelerator.elapsed(flight.begin, flight.end)
                stage.items += 1
                stage.nbytes += flight.nbytes

    def _trouble(self, batch: Any, what: str, error: BaseException) -> Sent:
        """Less at once, then plain copies: training goes on, with one warning."""
        if self.limit > 1:
            self.limit = max(1, min(self.limit, self._ring.slots - 2) // 2)
        else:
            self.plain = True
        if not self._told:
            self._told = True
            warnings.warn(
                f"gnnaccel: {what} ({error}); fewer batches are prepared ahead from "
                "here on, and if that does not do, they are copied when they are "
                "asked for. Use smaller batches or a smaller depth.",
                stacklevel=2,
            )
        return Sent(batch)
