"""One epoch of a ``PrefetchLoader``: the stages put together, the batches counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch_geometric.data.data import BaseData

from gnnaccel.loader.prefetch import tree
from gnnaccel.loader.prefetch.ahead import ReadAhead
from gnnaccel.loader.prefetch.draws import Draws
from gnnaccel.loader.prefetch.lane import MOST_HELD, Lane, Sent
from gnnaccel.loader.prefetch.stats import Stages

# Batches of an epoch that are compared with those before them.
_WATCHED = 3

if TYPE_CHECKING:
    from gnnaccel.loader.prefetch.loader import PrefetchLoader


@dataclass
class Progress:
    """What the training loop has seen of the epoch that was begun last.

    Attributes:
        handed: How many batches, those before it was resumed included.
        inner: The state that the wrapped loader had then, if it has any.
    """

    handed: int = 0
    inner: Any = None


class _Source(Iterator[tuple[Any, Any]]):
    """The wrapped loader's batches, each with the state that loader then has, if any.

    Runs where the batches are loaded.
    """

    def __init__(self, loader: PrefetchLoader, batches: Iterator[Any]) -> None:
        self.batches = batches
        self._stage, self._now = loader._stages.source, loader._host.now
        self._state = None
        if not loader._sampled() and hasattr(loader.loader, "load_state_dict"):
            self._state = getattr(loader.loader, "state_dict", None)
        lone = loader._lane is None
        self._cast = loader.cast if lone and loader.device.type == "cpu" else None
        self._device = loader.device
        self._pace = loader._pace
        self._watched = _WATCHED
        self._last: Any = None

    def __next__(self) -> tuple[Any, Any]:
        begin = self._now()
        try:
            batch = next(self.batches)
        finally:
            spent = self._now() - begin
            self._stage.busy += spent
            if spent > self._stage.slowest:
                self._stage.slowest = spent
        self._stage.items += 1
        if self._watched:
            self._watched -= 1
            if batch is self._last:
                self._pace.one_object = True
            known = isinstance(batch, (Tensor, BaseData, dict, list))
            self._last = batch if known and self._watched else None
        if self._cast:
            batch = tree.move(batch, self._device, self._cast)
        return batch, None if self._state is None else self._state()


class _Crossing(Iterator[tuple[Sent, Any]]):
    """The same batches on their way to the device."""

    def __init__(self, source: ReadAhead, lane: Lane) -> None:
        self._source, self._lane = source, lane

    def __next__(self) -> tuple[Sent, Any]:
        batch, state = next(self._source)
        return self._lane.send(batch), state


class PrefetchIterator(Iterator[Any]):
    """Iterates over the batches of one epoch.

    Args:
        loader: The loader.
        batches: What it wraps, begun.
        progress: Is told what was handed over.
        skip: How many of the batches were handed over before.
    """

    def __init__(
        self,
        loader: PrefetchLoader,
        batches: Iterator[Any],
        progress: Progress,
        skip: int = 0,
    ) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = batches
        self._progress = progress
        self._skip = skip
        self._lane = loader._lane
        self._pace = loader._pace
        self._draws = Draws()
        self._last: float | None = None
        self._closed = False
        self._nbytes = 0
        self._process = os.getpid()
        host, stages = loader._host, loader._stages
        self._now, self._stages = host.now, stages
        self._straight: _Source | None = _Source(loader, batches)
        self._short = 0  # how many of the next steps are known to be in line
        self._source = ReadAhead(self._straight, host, "gnnaccel-source", stages.source)
        self._top = self._source
        if self._lane is not None:
            crossing = _Crossing(self._source, self._lane)
            self._top = ReadAhead(crossing, host, "gnnaccel-copy")
        self._lone = self._lane is None and loader.device.type == "cpu"
        self._pace.begin_epoch()

    def __next__(self) -> Any:
        if self._short:
            return self._in_line()
        if self._closed:
            raise StopIteration
        now = self._now
        asked = now()
        busy = 0.0 if self._last is None else asked - self._last
        if self._skip:
            self._pass_over()
        if self._pace.in_question():
            self._draws.before_loading()
        else:
            self._draws.pause()
        self._look_ahead()
        ready, alone = self._top.ready, self._top.depth == 0
        alone = alone and not ready
        try:
            crossed, state = next(self._top)
        except StopIteration:
            self._finish()
            raise
        if self._top.depth == 0 and self._pace.in_question():
            self._draws.after_loading()
        lane = self._lane
        batch = crossed
        if lane is not None:
            batch = lane.hand_over(crossed)
            if len(lane._held) > MOST_HELD + self._pace.depth:
                lane.let_go(MOST_HELD // 2)
        elif self._loader.device.type != "cpu":
            batch = tree.move(batch, self._loader.device, self._loader.cast)
        del crossed
        self._progress.handed += 1
        self._progress.inner = state
        end = now()
        wait = end - asked
        self._account(self._stages, alone, busy, wait, ready, batch)
        if alone:
            # The next one may be begun at once, if the last step settled that.
            self._look_ahead()
            self._top.begin()
            if self._lone and self._top.depth == 0:
                self._short = self._pace.settled()
        self._last = now()
        return batch

    def _in_line(self) -> Any:
        """A step that is known to be in line: nothing but the batch and the accounts.

        Where nothing can be hidden, all else would be what a loop loses.
        """
        straight, progress = self._straight, self._progress
        consumer = self._stages.consumer
        if straight is None or self._process != os.getpid():
            self._short = 0
            return next(self)
        asked = self._now()
        self._short -= 1
        assert self._last is not None
        try:
            batch, progress.inner = next(straight)
        except StopIteration:
            self._finish()
            raise
        progress.handed += 1
        end = self._now()
        busy, wait = asked - self._last, end - asked
        consumer.busy += busy
        consumer.wait += wait
        consumer.items += 1
        self._pace.in_line(busy, wait)
        self._last = end
        return batch

    @property
    def closed(self) -> bool:
        """Whether nothing comes any more."""
        return self._closed

    def close(self) -> None:
        """Ends the threads; nothing comes any more."""
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid() or sys.is_finalizing():
            return
        self._straight = None
        # Whoever waits for another is woken before any is waited for.
        self._source.stop()
        self._top.stop()
        self._top.close()
        self._source.close()
        self._batches = None
        if self._lane is not None:
            self._lane.let_go()
        if self._source.left_in is not None:
            self._loader._left_behind(self._source)

    def __del__(self) -> None:
        if hasattr(self, "_top"):
            self.close()

    def asks(self, batches: Iterator[Any]) -> bool:
        """Whether it is these batches that it hands over, with more to come."""
        return not self._closed and self._batches is batches

    def _finish(self) -> None:
        # The next epoch is whole.
        self._progress.handed, self._progress.inner = 0, None
        self.close()

    def _pass_over(self) -> None:
        """Skips what was handed over before this epoch was resumed."""
        assert self._batches is not None
        while self._skip:
            self._skip -= 1
            if next(self._batches, self) is self:
                break
        self._skip = 0

    def _look_ahead(self) -> None:
        depth = self._pace.ahead(self._draws.verdict)
        if self._lane is not None:
            depth = min(depth, self._lane.limit)
            self._lane.set_depth(depth)
            self._source.depth = min(depth, 1)
        self._top.depth = depth

    def _account(
        self,
        stages: Stages,
        alone: bool,
        busy: float,
        wait: float,
        ready: int,
        batch: Any,
    ) -> None:
        pace = self._pace
        for stage in (stages.consumer,) if alone else (stages.consumer, stages.steady):
            stage.busy += busy
            stage.wait += wait
            stage.items += 1
        if self._last is None:
            # The training loop has done nothing yet.
            return
        pace.step(alone, busy, wait)
        if pace.auto:
            self._nbytes = self._nbytes or tree.nbytes(batch)
            pace.adapt(busy, wait, ready, self._top.full, self._room)

    def _room(self) -> bool:
        """Whether memory allows another batch ahead: it would be a small part."""
        need = 16 * self._nbytes
        if self._lane is not None and self._lane.accelerator.memory()["free"] < need:
            return False
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return True
        return free > need
