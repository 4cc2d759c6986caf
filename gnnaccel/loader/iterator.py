"""One epoch over a packed data set: batches made ahead, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gnnaccel.data import Batcher, Layout
from gnnaccel.kernels import library
from gnnaccel.loader.slabs import Slabs

#: Bytes of a batch below which handing it to the thread costs about what copying does.
TINY = 1 << 18

#: Bytes of a batch from which torch's threads share in a copy that is made here.
SHARED = 1 << 21


@dataclass(frozen=True)
class Source:
    """Where the batches of a loader come from, its data set being packed.

    Attributes:
        batcher: Makes them.
        locate: Positions [B] in the packed data set for what a sampler gives for a
            batch; None for what only PyG's own path takes.
        current: Whether graphs at positions [B] are still what was packed.
        fallback: PyG's own path: from what a sampler gives to the batch.
        slabs: Memory for them.
        depth: How many are made ahead.
        eager: Whether even tiny ones are handed to the thread.
    """

    batcher: Batcher
    locate: Callable[[Any], Tensor | None]
    current: Callable[[Tensor], bool]
    fallback: Callable[[Any], Any]
    slabs: Slabs
    depth: int
    eager: bool


@dataclass(eq=False)
class _Begun:
    """A batch in the making; or, in its place, what went wrong with it.

    Attributes:
        index: What the sampler gave.
        layout: The plan of the batch; None if PyG's own path makes it.
        memory: Its slabs.
        ticket: The copy on the thread; None if it is still to be made.
        error: Raised when it is this batch's turn.
    """

    index: Any = None
    layout: Layout | None = None
    memory: tuple[Any, ...] = ()
    ticket: Any = None
    error: Exception | None = None


class PackedIterator(_BaseDataLoaderIter):
    """Iterates over the batches of a packed data set.

    Which batches come, and what is drawn from torch's generators and when, is up to the
    base class, as it is for torch's own iterators. The thread only copies: nothing of
    Python runs on it, so that it can neither raise nor hang, and it ends with the epoch
    or with this object.

    Args:
        loader: The data loader.
        source: Its packed data set.
    """

    def __init__(self, loader: Any, source: Source) -> None:
        self._source = source
        self._begun: deque[_Begun] = deque()
        self._ended = False
        self._depth = source.depth
        self._worker: Any = None
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begins the next epoch of ``persistent_workers``."""
        self._close()
        self._source = loader._source()
        self._ended = False
        self._depth = self._source.depth
        super()._reset(loader, first_iter)

    def _next_data(self) -> Any:
        self._look_ahead()
        if not self._begun:
            self._close()
            raise StopIteration
        begun = self._begun[0]
        # Ctrl-C may end the wait: the batch stays in its place for the next call.
        filled = begun.ticket is not None and begun.ticket.wait()
        self._begun.popleft()
        if begun.error is not None:
            # Not kept: its traceback leads to this object, and so to the thread.
            error, begun.error = begun.error, None
            try:
                raise error
            finally:
                del error
        if begun.layout is None or not self._source.current(begun.layout.index):
            batch = self._source.fallback(begun.index)
            if self._pin_memory:
                batch = pin_memory.pin_memory(batch, self._pin_memory_device)
            return batch
        if not filled:
            # Waking torch's threads costs more than they save on a small batch.
            alone = begun.layout.nbytes < SHARED
            slab, small = begun.memory
            self._source.batcher.fill(begun.layout, slab, small, threads=int(alone))
        return self._source.batcher.assemble(begun.layout, *begun.memory)

    def _look_ahead(self) -> None:
        """Begins the batch that is due and those to be made ahead.

        The sampler is not asked beyond its end, nor beyond a failure before that was
        raised: a loop that catches it goes on where it would without looking ahead.
        """
        if not self._begun:
            self._ended = False
        while not self._ended and len(self._begun) <= self._depth:
            if self._begun and self._begun[-1].error is not None:
                return
            self._begin()

    def _begin(self) -> None:
        """Asks the sampler for a batch and begins it; a failure takes its place."""
        begun = _Begun()
        try:
            begun.index = self._next_index()
            self._plan(begun)
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            begun.error = error
        self._begun.append(begun)

    def _plan(self, begun: _Begun) -> None:
        source = self._source
        positions = source.locate(begun.index)
        if positions is None:
            return
        layout = source.batcher.layout(positions)
        slab = source.slabs.take(layout.nbytes)
        small = None
        if layout.small_nbytes:
            small = torch.empty(layout.small_nbytes, dtype=torch.uint8)
        begun.layout, begun.memory = layout, (slab, small)
        if not source.eager:
            self._depth = source.depth if layout.nbytes >= TINY else 0
        if self._depth:
            begun.ticket = self._submit(layout, slab, small)

    def _submit(self, layout: Layout, slab: Tensor, small: Tensor | None) -> Any:
        """Hands the copy to the thread.

        Returns:
            Its ticket; None without compiled kernels, and in a process that was forked
            in mid-epoch, where there is no thread.
        """
        if library.module is None:
            return None
        if self._worker is None:
            self._worker = library.module.Worker()
        batcher = self._source.batcher
        # The ticket keeps alive what the thread reads and writes.
        return self._worker.submit(
            (batcher, layout, slab, small), *batcher.native_args(layout, slab, small)
        )

    def _close(self) -> None:
        """Drops what is begun and joins the thread."""
        self._begun.clear()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._source.slabs.trim()
