"""Whatever ends an epoch, nothing hangs, leaks or is lost."""

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import Molecules, resident, resources
from processes import run_in_child, script
from same import assert_same
from torch_geometric.loader import DataLoader as StockLoader

from gnnaccel.kernels import native
from gnnaccel.loader import DataLoader

TESTS = Path(__file__).parent
needs_thread = pytest.mark.skipif(not native.available(), reason="no native kernels")


def thread_names():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it may have ended since
            names.append((task / "comm").read_text().strip())
    return names


def background(expected):
    """Whether there are that many background threads, at the latest in a moment.

    The system lists a thread a little longer than it can be joined, and the thread
    takes its name a little later than it begins.
    """
    for _ in range(200):
        if (found := thread_names().count("gnnaccel-load")) == expected:
            return True
        time.sleep(0.005)
    raise AssertionError(f"{found} background threads, not {expected}")


@pytest.fixture
def loader():
    assert background(0)
    yield DataLoader(Molecules(), 4, prefetch=3)
    gc.collect()
    assert background(0)


@needs_thread
def test_there_is_one_thread_and_it_ends_with_the_epoch(loader):
    iterator = iter(loader)
    assert background(0)
    next(iterator)
    assert background(1)
    list(iterator)
    assert background(0)
    with pytest.raises(StopIteration):
        next(iterator)


@needs_thread
def test_the_thread_ends_with_its_iterator(loader):
    iterator = iter(loader)
    next(iterator)
    twin = iter(loader)
    next(twin)
    assert background(2)
    del iterator
    assert background(1)
    del twin
    assert background(0)


def test_break(loader):
    expected = [b.y for b in loader]
    for stop in (0, 1, 5):
        for number, batch in enumerate(loader):
            assert torch.equal(batch.y, expected[number])
            if number == stop:
                break
        assert background(0)
    assert len(list(loader)) == len(expected)


def test_deleting_everything_in_any_order():
    for first in ("loader", "iterator", "dataset"):
        dataset = Molecules()
        loader = DataLoader(dataset, 4, prefetch=3)
        iterator = iter(loader)
        next(iterator)
        held = {"loader": loader, "iterator": iterator, "dataset": dataset}
        del loader, iterator, dataset
        del held[first]
        held.clear()
        assert background(0)


def test_nothing_is_in_a_cycle():
    dataset = Molecules()
    loader = DataLoader(dataset, 4, prefetch=3)
    batch = None
    for batch in loader:  # noqa: B007
        pass
    gc.disable()
    try:
        watch = [weakref.ref(loader), weakref.ref(dataset)]
        del loader, dataset
        assert [ref() for ref in watch] == [None, None]
    finally:
        gc.enable()
    assert batch.num_graphs == 2


def test_two_iterators_at_once_and_one_in_another(loader):
    expected = list(loader)
    found = []
    for outer in loader:
        found.append(outer)
        assert_same(list(loader), expected)
    assert_same(found, expected)
    both = list(zip(loader, loader, strict=True))
    assert_same([a for a, _ in both], expected)
    assert_same([b for _, b in both], expected)


def test_two_threads_with_an_iterator_each():
    loader = DataLoader(Molecules(), 4, prefetch=2)
    expected = list(loader)
    found = {}

    def run(name):
        found[name] = [list(loader) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for epochs in found.values():
        for epoch in epochs:
            assert_same(epoch, expected)


class Failing:
    """A sampler of batches that raises where it is told to."""

    def __init__(self, batches):
        self.batches = batches
        self.asked = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked > len(self.batches):
            raise StopIteration
        batch = self.batches[self.asked - 1]
        if isinstance(batch, type):
            raise batch("told to")
        return batch


@pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
def test_an_error_comes_in_its_turn_and_the_epoch_goes_on(prefetch):
    """Stock's order: batches before it, the error, batches after it."""
    batches = [[0], [1], KeyError, [2], [999], [3, 4], ZeroDivisionError, [5]]

    def run(kind, **more):
        sampler = Failing(batches)
        iterator = iter(kind(Molecules(), batch_sampler=sampler, **more))
        events = []
        while True:
            try:
                events.append(next(iterator).name)
            except StopIteration:
                return events
            except Exception as error:
                events.append(type(error))
                # Nothing was asked for beyond what failed.
                assert sampler.asked <= len(events) + prefetch

    assert run(DataLoader, prefetch=prefetch) == run(StockLoader)


def test_an_index_out_of_range_is_named():
    loader = DataLoader(Molecules(), batch_sampler=[[1, 50]])
    with pytest.raises(IndexError, match="50"):
        list(loader)


def test_an_error_does_not_keep_the_thread():
    loader = DataLoader(Molecules(), batch_sampler=[[1], [2], [99], [3]], prefetch=3)
    with pytest.raises(IndexError):
        for _ in loader:
            pass
    gc.collect()
    assert background(0)


def test_kept_batches_and_views_never_change():
    loader = DataLoader(Molecules(), 4, shuffle=True, prefetch=3)
    kept = []
    for epoch in range(4):
        for number, batch in enumerate(loader):
            parts = {
                0: batch.x[1:3],
                1: batch.edge_index[1],
                2: batch.y.numpy(),
                3: batch.x.untyped_storage(),
                4: batch.x.view(-1)[5:].detach(),
                5: memoryview(batch.edge_attr.numpy()),
                6: torch.utils.dlpack.from_dlpack(batch.ptr),
            }
            part = parts[(number + epoch) % 7]
            del parts, batch
            kept.append((part, frozen(part)))
    for part, then in kept:
        assert torch.equal(frozen(part), then)


def frozen(part):
    if isinstance(part, torch.UntypedStorage):
        part = torch.empty(0, dtype=torch.uint8).set_(part)
    if isinstance(part, memoryview):
        part = np.asarray(part)
    return torch.as_tensor(part).clone()


def test_batches_that_moved_to_shared_memory_are_let_go():
    loader = DataLoader(Molecules(), 4, prefetch=2)
    expected = [batch.x.clone() for batch in loader]
    shared = []
    for batch in loader:
        batch.x.share_memory_()
        # As another process would: it maps the memory and knows no reference count.
        descriptor, nbytes = batch.x.untyped_storage()._share_fd_cpu_()
        shared.append((os.dup(descriptor), nbytes, batch.x.storage_offset()))
        del batch
    for right, (descriptor, nbytes, offset) in zip(expected, shared, strict=True):
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)
        found = torch.empty(0, dtype=right.dtype).set_(storage, offset, right.size())
        assert torch.equal(found, right)
        os.close(descriptor)


def test_fifty_epochs_leave_nothing_behind():
    dataset = Molecules(400)
    loaders = [
        DataLoader(dataset, 32, shuffle=True, prefetch=prefetch)
        for prefetch in (None, 0, 3)
    ]

    def epochs(count):
        for _ in range(count):
            for loader in loaders:
                for batch in loader:
                    batch.x.add_(1)
                next(iter(loader))

    epochs(10)
    gc.collect()
    before, memory = resources(), resident()
    epochs(50)
    gc.collect()
    assert resources() == before
    assert resident() - memory < 4 << 20


def test_statistics():
    loader = DataLoader(Molecules(), 8, prefetch=2)
    assert set(loader.memory_stats().values()) == {0}
    first = next(iter(loader))
    held = loader.memory_stats()
    assert 0 < held["in_use"] <= held["reserved"] == held["peak"]
    assert 0 <= held["fragmentation"] < 1
    del first
    for _ in range(5):
        for batch in loader:
            del batch
    after = loader.memory_stats()
    assert after["in_use"] == 0 and after["fragmentation"] == 1
    assert after["made"] <= 8 and after["reused"] >= 25
    assert after["reserved"] <= after["peak"]


# --- processes ---------------------------------------------------------------------


def finish(send, iterator, loader):
    """What is left of an epoch, and a whole one, in a child process."""
    rest = [batch.name for batch in iterator]
    whole = [batch.name for batch in loader]
    del iterator
    gc.collect()
    send.send((rest, whole))


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_fork_in_mid_epoch(taken):
    loader = DataLoader(Molecules(), 4, prefetch=4)
    expected = [batch.name for batch in loader]
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    rest, whole = run_in_child(finish, iterator, loader)
    assert rest == expected[taken:]
    assert whole == expected
    assert [batch.name for batch in iterator] == expected[taken:]


def epoch(send, loader):
    send.send([batch.name for batch in loader])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loader_that_is_sent_to_another_process(method):
    loader = DataLoader(Molecules(), 4, prefetch=2)
    expected = [batch.name for batch in loader]
    assert run_in_child(epoch, loader, method=method) == expected


class Inner(torch.utils.data.Dataset):
    """Iterates over a loader of ours inside of a worker."""

    def __init__(self):
        self.loader = DataLoader(Molecules(), 4, prefetch=2)
        self.running = iter(self.loader)
        next(self.running)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return sum(batch.num_graphs for batch in self.loader)


def test_loaders_inside_of_workers():
    inner = Inner()
    outer = torch.utils.data.DataLoader(inner, num_workers=2)
    assert [int(total) for total in outer] == [50] * 4
    assert len(list(inner.running)) == 12


INTERRUPTED = """
    import signal, threading, time
    import torch
    from loading import Molecules
    from gnnaccel.loader import DataLoader

    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = DataLoader(Molecules(400), 8, shuffle=True, prefetch=3)
    print("ready", flush=True)
    caught = 0
    begin = time.monotonic()
    while caught < 3 and time.monotonic() - begin < 60:
        try:
            while True:
                for batch in loader:
                    assert batch.num_graphs == 8
        except KeyboardInterrupt:
            caught += 1
            print("caught", flush=True)
    assert len(list(loader)) == 50
    print("done", threading.active_count(), flush=True)
    for batch in loader:
        print("waiting", flush=True)
        time.sleep(60)
"""


def test_ctrl_c():
    child = script(INTERRUPTED)
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        for _ in range(3):
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "caught\n", child.stderr.read()
        assert child.stdout.readline() == "done 1\n", child.stderr.read()
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
        assert errors.strip().endswith("KeyboardInterrupt")
        assert child.returncode in (1, 130, -signal.SIGINT)
    finally:
        child.kill()
        child.communicate()


AT_EXIT = """
    import atexit, sys
    from loading import Molecules
    from gnnaccel.loader import DataLoader

    how = sys.argv[1]
    loader = DataLoader(Molecules(400), 64, prefetch=4)
    iterator = iter(loader)
    next(iterator)
    if how == "cycle":
        cycle = [iterator]
        cycle.append(cycle)
        del iterator
    elif how == "module":
        sys.modules["keeps"] = iterator
        sys.keeps = [iterator]
    elif how == "atexit":
        atexit.register(lambda: list(iterator))
    elif how == "raises":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["plain", "cycle", "module", "atexit", "raises"])
def test_leaving_in_mid_epoch(how):
    child = script(AT_EXIT, how)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == (3 if how == "raises" else 0), errors
    assert errors == ""


def test_a_process_that_is_killed_leaves_no_files():
    before = {path.name for path in Path("/dev/shm").iterdir()}
    child = script(INTERRUPTED)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    shared = {path.name for path in Path("/dev/shm").iterdir()} - before
    mine = {name for name in shared if str(child.pid) in name}
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not mine
