"""``ReadAhead``: any iterator, run on a thread, a bounded number of items ahead."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from gnnaccel.loader.prefetch.host import Host, Thread
from gnnaccel.loader.prefetch.stats import Stage

# Seconds that `ReadAhead.close` waits for an item in the making: at least, and at most.
# In between, twice what the slowest item took. A source that is merely slow is waited
# for, so that nothing of an epoch runs on after it and no two threads share a data set;
# but a source may wait for what never comes, and whoever leaves a loop must get out.
_PATIENCE, _MOST_PATIENCE = 2.0, 10.0

#: The same once Ctrl-C has come while the next item was waited for.
_IMPATIENCE = 0.5

#: Seconds that the end of the process waits for all items in the making together.
_LAST_WAIT = 2.0

# In place of a source that is let go.
_NOTHING: Iterator[Any] = iter(())


class _Line:
    """What the thread and the iterator share. The thread knows of nothing else.

    So the iterator can die while the thread runs, and takes it along.
    """

    def __init__(self, source: Iterator[Any], host: Host, stage: Stage | None) -> None:
        self.source = source
        self.host = host
        self.stage = stage
        self.condition = host.condition()
        self.process = os.getpid()
        self.depth = 0
        # Pairs of an item and None, or of None and what was raised in its place.
        self.items: deque[tuple[Any, BaseException | None]] = deque()
        self.thread: Thread | None = None
        self.running = False
        self.parked = False  # on an exception that is still to be raised
        self.ended = False
        self.stopped = False
        self.full = 0  # how often the thread had to wait for space
        self.hurry = False  # Ctrl-C has come
        self.left = False  # whether nobody waits for the thread any more

    def here(self) -> bool:
        """Whether this is the process with the thread; if not, no lock is safe."""
        return self.process == os.getpid()

    def patience(self) -> float:
        """Seconds to wait for the thread's end."""
        if self.hurry:
            return _IMPATIENCE
        slowest = 0.0 if self.stage is None else self.stage.slowest
        return max(_PATIENCE, min(2 * slowest, _MOST_PATIENCE))

    def stop(self) -> None:
        """Lets the thread end after the item in the making, and forgets the others."""
        with self.condition:
            self.stopped = True
            forgotten, self.items = self.items, deque()
            self.condition.notify_all()
        forgotten.clear()


class ReadAhead(Iterator[Any]):
    """Iterates over ``source``, whose next items are made on a thread meanwhile.

    What ``source`` raises is raised in its place, with its traceback, and not before
    the items that came first; asked again, the source goes on as it would alone. It is
    never asked beyond its end or beyond an exception that nobody has seen.

    Args:
        source: Asked by one thread at a time: at `depth` 0 by the caller's own.
        host: Gives the thread.
        name: The thread's.
        stage: Is told how long the thread waits for space.
    """

    def __init__(
        self, source: Iterator[Any], host: Host, name: str, stage: Stage | None = None
    ) -> None:
        self._line = _Line(source, host, stage)
        self._name = name
        self._closed = False
        _lines.add(self._line)

    @property
    def depth(self) -> int:
        """Most items ahead, the one in the making included; 0 for no thread."""
        return self._line.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        line = self._line
        if depth != line.depth and line.here():
            with line.condition:
                line.depth = depth
                line.condition.notify_all()

    @property
    def ready(self) -> int:
        """How many items lie ready."""
        return len(self._line.items)

    @property
    def full(self) -> int:
        """How often the thread had to wait because enough items lay ready."""
        return self._line.full

    def __next__(self) -> Any:
        line = self._line
        if not line.here():
            raise RuntimeError(
                "This iterator belongs to the process that began it, and the thread "
                "that reads ahead did not come along: begin a new one here, with "
                "iter() of the loader."
            )
        alone, item, error = False, None, None
        with line.condition:
            try:
                while not line.items and line.running and not line.stopped:
                    line.condition.wait()
            except BaseException:
                # Ctrl-C: who pressed it wants to get out now.
                line.hurry = True
                raise
            if line.items:
                item, error = line.items.popleft()
                line.parked, line.ended = False, isinstance(error, StopIteration)
                line.condition.notify_all()
            elif line.ended or line.stopped:
                raise StopIteration
            else:
                alone = True
        if alone:
            try:
                item = next(line.source)
            except StopIteration:
                line.ended = True
                raise
        elif error is not None:
            # Not kept: its traceback leads to whoever catches it.
            try:
                raise error
            finally:
                del error
        self.begin()
        return item

    def begin(self) -> None:
        """Starts the thread, if there is one to start."""
        line = self._line
        if line.depth == 0 or line.running:
            return
        with line.condition:
            # Whoever else asks this iterator may have begun it by now, or closed it.
            if line.running or line.parked or line.ended or line.stopped:
                return
            line.running = True
            try:
                line.thread = line.host.start(partial(_run, line), self._name)
            except RuntimeError:
                # No threads left, or the process is about to end: it works without.
                line.running, line.depth = False, 0

    def stop(self) -> None:
        """Asks the thread to end; nothing comes any more."""
        # At the end of the interpreter no other thread goes on, and it may hold a lock.
        if self._line.here() and not sys.is_finalizing():
            self._line.stop()

    @property
    def left_in(self) -> Iterator[Any] | None:
        """The source, if `close` had to leave the thread behind and it is still in it.

        Such a thread ends as soon as the source returns: it drops what it got, and the
        source.
        """
        line = self._line
        return line.source if line.left and line.running and line.here() else None

    def close(self) -> None:
        """Stops the thread and lets the source go.

        Waits for the thread's end, but no longer than is sensible: see `left_in`.
        """
        line = self._line
        if self._closed or not line.here() or sys.is_finalizing():
            return
        self._closed = True
        line.stop()
        thread = line.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(line.patience())
            with line.condition:
                line.left = line.running
        if not line.left:
            line.source = _NOTHING

    def __del__(self) -> None:
        if hasattr(self, "_line"):
            self.close()


def _run(line: _Line) -> None:
    """The thread: makes items until it is told to end or one fails."""
    condition, stage, now = line.condition, line.stage, line.host.now
    while True:
        with condition:
            if 0 < line.depth <= len(line.items) and not line.stopped:
                line.full += 1
                begin = now()
                while 0 < line.depth <= len(line.items) and not line.stopped:
                    condition.wait()
                if stage is not None:
                    stage.wait += now() - begin
            if line.stopped or line.depth == 0:
                line.running = False
                condition.notify_all()
                if not line.left:
                    return
                parting, line.source = line.source, _NOTHING
                break
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = next(line.source), None
        except StopIteration:
            outcome = None, StopIteration()
        except BaseException as error:
            outcome = None, error
        with condition:
            if not line.stopped:
                line.items.append(outcome)
            failed = outcome[1] is not None
            # Neither an item while it waits for space, nor an exception whose
            # traceback leads back to here, is held on to.
            del outcome
            if failed and not line.stopped:
                line.parked, line.running = True, False
                condition.notify_all()
                return
            condition.notify_all()
    # Nobody waits for this thread any more. A generator that only it refers to is
    # closed here, outside of the lock: that runs the user's code.
    del parting


_lines: weakref.WeakSet[_Line] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Ends all threads while there still is an interpreter for them to end in."""
    end = time.monotonic() + _LAST_WAIT
    running = [
        (line, line.thread)
        for line in list(_lines)
        if line.here() and line.running and not line.left
    ]
    threads = []
    for line, thread in running:
        if isinstance(thread, threading.Thread):
            line.stop()
            threads.append(thread)
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
