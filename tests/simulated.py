"""A machine with an accelerator, simulated: virtual time, threads, streams, memory.

Threads run one at a time and change only where they wait or touch the machine; a seed
decides which goes on, so that one seed is one schedule. Host code takes no time. What a
stream was given runs in order, in virtual time, as early or as late as the schedule
says. Memory is as treacherous as it may be:

- a freed block is given to the next who asks on its stream, at once;
- device memory holds `POISON` until a copy into it has run, and again from when its
  stream gets to where it was freed;
- a copy reads its source only at its end.

So a consumer whose kernels always find their batch owes that to the order of streams
and events, not to luck.
"""

import ctypes
import heapq
import itertools
import random
import threading
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager

import numpy as np
import torch

POISON = 0xA5


class Deadlock(Exception):
    """Everybody waits for somebody else."""


class _Task:
    """A simulated thread."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.turn = threading.Semaphore(0)
        self.alive = True
        self.ready = lambda: True

    def join(self, timeout=None):
        world = self.world
        if timeout is not None and world.impatient and world.random.random() < 0.5:
            return world.pause()
        return world.pause(lambda: not self.alive)


class _Condition:
    """As ``threading.Condition``, not reentrant."""

    def __init__(self, world):
        self.world = world
        self.owner = None
        self.waiting = set()

    def __enter__(self):
        assert self.owner is not self.world.current, "taken twice"
        self.world.pause(lambda: self.owner is None)
        self.owner = self.world.current

    def __exit__(self, *error):
        assert self.owner is self.world.current
        self.owner = None
        self.world.pause()

    def wait(self):
        assert self.owner is self.world.current
        token = object()
        self.waiting.add(token)
        self.owner = None
        self.world.pause(lambda: self.owner is None and token not in self.waiting)
        self.owner = self.world.current

    def notify_all(self):
        assert self.owner is self.world.current
        self.waiting.clear()


class World:
    """Virtual time and its threads; a ``Host`` for the pipeline.

    Args:
        seed: Of the schedule; None for one in which nobody goes out of turn.
        impatient: Whether the end of a thread, half of the times, is not waited for
            long enough.
    """

    def __init__(self, seed=None, impatient=False):
        self.impatient = impatient
        self.random = None if seed is None else random.Random(seed)
        self.time = 0.0
        self.current = _Task(self, "main")
        self.tasks = [self.current]
        self.main = self.current
        self.failed = None  # raised in the main thread, the next time that it waits
        self.faults = []  # all that went wrong on the device, wherever it was raised
        self.deadlocked = False
        self.most_threads = 1
        self._timers = []
        self._number = itertools.count()

    # The host of the pipeline.

    def now(self):
        return self.time

    def condition(self):
        return _Condition(self)

    def start(self, target, name):
        task = _Task(self, name)

        def run():
            task.turn.acquire()
            try:
                target()
            except BaseException as error:
                self.failed = error
            finally:
                task.alive = False
                self.tasks.remove(task)
                self._pass_on()

        self.tasks.append(task)
        self.most_threads = max(self.most_threads, len(self.tasks))
        threading.Thread(target=run, name=name, daemon=True).start()
        self.pause()
        return task

    # What the simulation is made of.

    def sleep(self, seconds):
        """Lets virtual time pass."""
        end = self.time + seconds
        self.at(end, lambda: None)
        self.pause(lambda: self.time >= end)

    def at(self, time, action):
        """Does something at a point in time."""
        heapq.heappush(self._timers, (time, next(self._number), action))

    def pause(self, ready=None):
        """Lets others go on; returns once ``ready()`` holds."""
        me = self.current
        me.ready = ready or (lambda: True)
        chosen = self._choose(me)
        if chosen is None:
            chosen = self._stuck()
        if chosen is not me:
            self.current = chosen
            chosen.turn.release()
            me.turn.acquire()
        if me is self.main:
            if self.deadlocked:
                names = sorted(task.name for task in self.tasks)
                raise Deadlock(f"at {self.time}: {names}")
            if self.failed is not None:
                failed, self.failed = self.failed, None
                raise failed

    def guard(self, action):
        """Does something on the device; what it raises, the main thread gets."""
        try:
            if action is not None:
                action()
        except BaseException as error:
            self.faults.append(error)
            self.failed = self.failed or error

    def settle(self):
        """Lets all threads but this one end."""
        self.pause(lambda: self.tasks == [self.main])

    def drain(self):
        """Lets all that is under way come to its end."""
        while self._advance():
            pass

    def _pass_on(self):
        chosen = self._choose(None)
        if chosen is None:
            chosen = self._stuck()
        self.current = chosen
        chosen.turn.release()

    def _stuck(self):
        self.deadlocked = True
        return self.main

    def _choose(self, me):
        """Who goes on; the clock does where nobody can, and now and then before."""
        while True:
            able = [task for task in self.tasks if task.ready()]
            if self.random is None:
                if me in able:
                    return me
                if able:
                    return able[0]
            elif able and not (self._timers and self.random.random() < 0.2):
                return self.random.choice(able)
            if not self._advance():
                return self.random.choice(able) if able and self.random else None

    def _advance(self):
        if not self._timers:
            return False
        time, _, action = heapq.heappop(self._timers)
        self.time = max(self.time, time)
        action()
        return True


class Event:
    """A point in a stream."""

    def __init__(self):
        self.time = None
        self.then = []

    def reach(self, time):
        self.time = time
        for action in self.then:
            action()
        self.then.clear()


class Stream:
    """A queue of work, done in order."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self._queue = deque()
        self._busy = False

    def give(self, duration, begin=None, end=None, after=None):
        """Adds work that takes ``duration``, once the event ``after`` is reached."""
        self._queue.append((duration, begin, end, after))
        self._next()

    def _next(self):
        if self._busy or not self._queue:
            return
        duration, begin, end, after = self._queue.popleft()
        self._busy = True

        def start():
            self.world.guard(begin)
            if duration == 0:
                finish()
            else:
                self.world.at(self.world.time + duration, finish)

        def finish():
            self.world.guard(end)
            self._busy = False
            self._next()

        if after is not None and after.time is None:
            after.then.append(start)
        else:
            start()


class Accelerator:
    """A simulated device.

    Args:
        world: Its time.
        copy_time: Seconds of a copy, given its bytes.
        memory: Bytes that it has.
        pinnable: Bytes of host memory that can be pinned.
    """

    def __init__(
        self, world, copy_time=lambda n: 2.0, memory=1 << 30, pinnable=1 << 30
    ):
        self.world, self.copy_time = world, copy_time
        self.device = torch.device("cpu")
        self.total, self.pinnable = memory, pinnable
        self.pinned_bytes = self.allocated = self.reserved = self.peak = 0
        self.copies = []  # (begin, end) of each
        self.calls = Counter()
        self._pinned = set()
        self._free = defaultdict(list)  # by stream and size: addresses
        self._blocks = {}  # memory by address, for good
        self._kept = defaultdict(set)  # streams by address
        self._lost = 0
        self._default = Stream(world, "default")
        self._current = {}

    # The protocol.

    def new_stream(self):
        self.calls["stream"] += 1
        return Stream(self.world, f"stream {self.calls['stream']}")

    def current_stream(self):
        return self._current.get(self.world.current, self._default)

    @contextmanager
    def use(self, stream):
        me = self.world.current
        before = self._current.get(me)
        self._current[me] = stream
        try:
            yield
        finally:
            if before is None:
                del self._current[me]
            else:
                self._current[me] = before

    def event(self, stream):
        event = Event()
        stream.give(0, end=lambda: event.reach(self.world.time))
        return event

    def wait(self, stream, event):
        stream.give(0, after=event)
        self.world.pause()

    def finish(self, event):
        self.world.pause(lambda: event.time is not None)

    def done(self, event):
        return event.time is not None

    def elapsed(self, begin, end):
        return end.time - begin.time

    def pinned(self, nbytes):
        if self.pinned_bytes + nbytes > self.pinnable:
            raise RuntimeError("no more pinned memory")
        memory = np.full(nbytes, POISON, np.uint8)
        tensor = torch.from_numpy(memory)
        address = tensor.data_ptr()
        self._pinned.add(address)
        self.pinned_bytes += nbytes

        def freed():
            self.pinned_bytes -= nbytes
            self._pinned.discard(address)

        weakref.finalize(memory, freed).atexit = False
        return tensor

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._pinned

    def empty(self, nbytes):
        stream = self.current_stream()
        free = self._free[stream, nbytes]
        if free:
            address = free.pop()
        else:
            if self.reserved + nbytes > self.total:
                self._release_cached()
            if self.reserved + nbytes > self.total:
                raise torch.OutOfMemoryError("simulated")
            block = np.full(nbytes, POISON, np.uint8)
            address = block.ctypes.data
            self._blocks[address] = block
            self.reserved += nbytes
            self.peak = max(self.peak, self.reserved)
        self.allocated += nbytes
        # A view that lives as long as the tensors over it do.
        view = self._blocks[address].view()
        weakref.finalize(view, self._freed, address, nbytes, stream).atexit = False
        return torch.from_numpy(view)

    def copy(self, target, source):
        assert target.nbytes == source.nbytes
        size, to = target.nbytes, target.data_ptr()
        # Who frees pinned memory during a copy is told so: the copy is not held.
        begin, origin = [0.0], source.data_ptr()
        in_pinned = source.untyped_storage().data_ptr()
        assert in_pinned in self._pinned, "a copy from memory that is not pinned"

        def start():
            begin[0] = self.world.time
            ctypes.memset(to, POISON, size)

        def end():
            assert in_pinned in self._pinned, "pinned memory was freed under a copy"
            ctypes.memmove(to, origin, size)
            self.copies.append((begin[0], self.world.time))

        self.current_stream().give(self.copy_time(size), start, end)
        self.world.pause()

    def convert(self, tensor, dtype):
        out = self.empty(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
        at, to, nbytes = Memory(tensor), Memory(out), out.nbytes

        def end():
            result = at.read().to(dtype).contiguous()
            ctypes.memmove(to.address, result.data_ptr(), nbytes)

        self.current_stream().give(0, end=end)
        return out

    def keep(self, storage, stream):
        self._kept[storage.data_ptr()].add(stream)

    def memory(self):
        free = self.total - self.reserved
        return {"allocated": self.allocated, "reserved": self.reserved, "free": free}

    # What a consumer does.

    def kernel(self, duration, check=None, stream=None):
        """Gives a stream work that calls ``check`` when it begins and when it ends."""
        (stream or self.current_stream()).give(duration, check, check)

    def synchronize(self, stream=None):
        """Waits for all that a stream was given."""
        self.finish(self.event(stream or self.current_stream()))

    def _freed(self, address, nbytes, stream):
        """A block's last tensor is gone: on its stream, it is free from here on."""
        self.allocated -= nbytes
        kept = self._kept.pop(address, ())

        def poison():
            ctypes.memset(address, POISON, nbytes)

        if not kept:
            stream.give(0, end=poison)
            self._free[stream, nbytes].append(address)
            return
        # Watched by other streams: only when they have got here.
        left = [len(kept)]

        def reached():
            left[0] -= 1
            if not left[0]:
                poison()
                self._free[stream, nbytes].append(address)

        for other in kept:
            other.give(0, end=reached)

    def _release_cached(self):
        for (_, nbytes), free in self._free.items():
            self.reserved -= nbytes * len(free)
            free.clear()


class Memory:
    """Where a tensor lies, without holding on to it: what a running kernel has."""

    def __init__(self, tensor):
        self.address = tensor.data_ptr()
        self._empty = tensor.numel() == 0
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride = tensor.stride()

    def read(self):
        """The tensor that lies there now, copied."""
        if self._empty:
            return torch.empty(self._shape, dtype=self._dtype)
        pairs = zip(self._shape, self._stride, strict=True)
        count = 1 + sum((n - 1) * s for n, s in pairs)
        raw = (ctypes.c_char * (count * self._dtype.itemsize)).from_address(
            self.address
        )
        flat = torch.frombuffer(raw, dtype=self._dtype)
        return flat.as_strided(self._shape, self._stride).clone()
