"""The pipeline on the simulated accelerator: right under every schedule, on time."""

import gc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from simulated import POISON, Accelerator, Deadlock, Memory, World
from torch_geometric.data import Data

from gnnaccel.loader import PrefetchLoader
from gnnaccel.loader.prefetch import tree
from gnnaccel.loader.slabs import size_class


class Wrong(AssertionError):
    """A kernel found something else than its batch."""


def batch(number, nodes=16):
    """A graph every number in which says which batch it is of."""
    return Data(
        x=torch.full((nodes, 4), float(number)),
        edge_index=torch.full((2, 3 * nodes), number),
        y=torch.tensor([number]),
    )


def checked(memories, number):
    """A check that these memories hold nothing but ``number``."""

    def check():
        for memory in memories:
            found = memory.read()
            if not bool((found == number).all()):
                raise Wrong(f"batch {number} reads {found.flatten()[:4].tolist()}")

    return check


def tensors(graph):
    return [graph.x, graph.edge_index, graph.y]


def simulated(source, world, depth=2, accelerator=None, **arguments):
    loader = PrefetchLoader(source, "cpu", depth, **arguments)
    accelerator = accelerator or Accelerator(world)
    loader._begin(accelerator, world)
    return loader, accelerator


# --- time --------------------------------------------------------------------------


def timeline(load, copy, compute, batches=60, waits=True, depth=2):
    """When each step of an epoch begins, and the accelerator."""
    world = World()
    accelerator = Accelerator(world, lambda n: copy)

    def source():
        for number in range(batches):
            world.sleep(load)
            yield batch(number)

    loader, _ = simulated(source, world, depth, accelerator)
    begins = []
    for number, graph in enumerate(loader):
        accelerator.current_stream().give(0, lambda: begins.append(world.time))
        accelerator.kernel(
            compute, checked([Memory(t) for t in tensors(graph)], number)
        )
        if waits:
            accelerator.synchronize()
    accelerator.synchronize()
    assert not world.faults
    return begins, accelerator, loader


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("load", "copy", "compute"),
    [(4, 2, 5), (2, 4, 5), (1, 1, 5), (5, 2, 3), (2, 5, 3), (4, 4, 4)],
)
def test_a_step_takes_as_long_as_the_slowest_stage(load, copy, compute, waits):
    begins, _, loader = timeline(load, copy, compute, waits=waits)
    steps = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    steady = steps[-20:-5]
    assert steady == [max(load, copy, compute)] * len(steady), steps
    slowest = max((load, "source"), (copy, "copy"), (compute, "consumer"))
    if waits and len({load, copy, compute}) == 3:
        assert loader.stats()["bottleneck"] == slowest[1]


@pytest.mark.parametrize(("copy", "compute"), [(2, 5), (4.9, 5), (0.1, 5)])
def test_copies_are_hidden_behind_training(copy, compute):
    count = 200
    begins, accelerator, _ = timeline(1, copy, compute, count, waits=False)
    visible = sum(b - a - compute for a, b in zip(begins, begins[1:], strict=False))
    # What loading costs before there is anything to train on is no copy's fault: the
    # first steps, which are taken alone, count as they are.
    assert visible <= 0.05 * copy * count + 3 * (1 + copy)
    assert len(accelerator.copies) == count


def test_without_looking_ahead_nothing_is_hidden():
    begins, _, loader = timeline(4, 2, 5, depth=0)
    assert begins[-1] - begins[-2] == 11
    assert loader.stats()["why_not_ahead"] == "depth is 0"


def test_what_stages_did_in_numbers():
    _, _, loader = timeline(4, 2, 5)
    stats = loader.stats()
    assert stats["source"]["busy"] == 240 and stats["source"]["items"] == 60
    assert stats["copy"]["busy"] == 120 and stats["copy"]["items"] == 60
    assert stats["copy"]["bytes_per_s"] == stats["copy"]["bytes"] / 120 > 0
    assert stats["consumer"]["items"] == 60


# --- values ------------------------------------------------------------------------


def consume(world, accelerator, loader, plan, epochs=2):
    """Trains in a disorderly way: keeps batches, views, other streams, breaks."""
    random, kept = plan, []
    other = accelerator.new_stream()
    for _ in range(epochs):
        stop, graph = random.randint(0, 30), None
        for number, graph in enumerate(loader):
            aside = random.random() < 0.3
            stream = other if aside else accelerator.current_stream()
            if aside:
                accelerator.wait(other, accelerator.event(accelerator.current_stream()))
            at = [Memory(t) for t in tensors(graph)]
            accelerator.kernel(random.choice([0, 1, 5]), checked(at, number), stream)
            if aside:
                accelerator.wait(accelerator.current_stream(), accelerator.event(other))
            if random.random() < 0.3:
                kept.append((number, graph if random.random() < 0.5 else graph.y[:]))
            if kept and random.random() < 0.3:
                old, value = kept.pop(random.randrange(len(kept)))
                values = tensors(value) if isinstance(value, Data) else [value]
                at = [Memory(t) for t in values]
                accelerator.kernel(random.choice([0, 3]), checked(at, old))
                del value, values
            if random.random() < 0.3:
                accelerator.synchronize()
            if number == stop:
                break
        del graph
    for old, value in kept:
        values = tensors(value) if isinstance(value, Data) else [value]
        accelerator.kernel(1, checked([Memory(t) for t in values], old))
    accelerator.synchronize()


def disorder(seed, change=None, impatient=False):
    world = World(seed, impatient)
    random = world.random
    accelerator = Accelerator(
        world, lambda n: random.choice([0.5, 2.0, 7.0]), memory=1 << 20
    )
    count = random.randint(0, 25)

    def source():
        for number in range(count):
            world.sleep(random.choice([0, 0, 1, 4]))
            yield batch(number, random.choice([1, 16, 17, 200]))

    depth = random.choice([1, 2, 3, 5, "auto"])
    loader, _ = simulated(source, world, depth, accelerator)
    if change is not None:
        change(loader, accelerator)
    try:
        consume(world, accelerator, loader, random)
    finally:
        del loader
    if impatient:
        world.settle()
    world.drain()
    gc.collect()
    world.drain()
    assert not world.faults
    assert [task.name for task in world.tasks] == ["main"]
    return accelerator


@given(st.integers(0, 2**32))
def test_every_kernel_finds_its_batch(seed):
    accelerator = disorder(seed)
    assert accelerator.allocated == 0
    assert accelerator.pinned_bytes == 0
    assert accelerator.calls["stream"] == 2  # the loader's one and the consumer's


@pytest.mark.filterwarnings("ignore:.*did not return:UserWarning")
@given(st.integers(0, 2**32))
def test_threads_that_are_left_behind_do_no_harm(seed):
    accelerator = disorder(seed, impatient=True)
    assert accelerator.allocated == 0
    assert accelerator.pinned_bytes == 0
    assert accelerator.calls["stream"] == 2


class Consumers(RuleBasedStateMachine):
    """Several epochs of one loader at once, in any order of steps."""

    @initialize(seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2, 4, "auto"]))
    def begin(self, seed, depth):
        self.world = World(seed)
        self.device = Accelerator(
            self.world, lambda n: self.world.random.choice([1, 5])
        )
        source = [batch(n, 1 + n % 3 * 50) for n in range(14)]
        self.loader, _ = simulated(source, self.world, depth, self.device)
        self.epochs, self.kept = [], []

    @rule()
    def new_epoch(self):
        if len(self.epochs) < 3:
            self.epochs.append([iter(self.loader), 0])

    @rule(which=st.integers(0, 9), keep=st.booleans(), duration=st.sampled_from([0, 4]))
    def step(self, which, keep, duration):
        if not self.epochs:
            return
        epoch = self.epochs[which % len(self.epochs)]
        found = next(epoch[0], None)
        assert (found is None) == (epoch[1] == 14)
        if found is None:
            self.epochs.remove(epoch)
            return
        self.use(epoch[1], found, duration)
        if keep:
            self.kept.append((epoch[1], found))
        epoch[1] += 1

    def use(self, number, graph, duration):
        at = [Memory(t) for t in tensors(graph)]
        self.device.kernel(duration, checked(at, number))

    @rule(which=st.integers(0, 9))
    def leave(self, which):
        if self.epochs:
            self.epochs.pop(which % len(self.epochs))

    @rule(which=st.integers(0, 9), duration=st.sampled_from([0, 4]))
    def use_again_and_drop(self, which, duration):
        if self.kept:
            self.use(*self.kept.pop(which % len(self.kept)), duration)

    @rule()
    def synchronize(self):
        self.device.synchronize()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for number, graph in self.kept:
            self.use(number, graph, 1)
        graph = None
        self.kept.clear()
        self.epochs.clear()
        self.device.synchronize()
        del self.loader, graph
        gc.collect()
        self.world.drain()
        assert not self.world.faults
        assert [task.name for task in self.world.tasks] == ["main"]
        assert self.device.allocated == self.device.pinned_bytes == 0
        assert self.device.calls["stream"] == 1


TestConsumers = Consumers.TestCase
TestConsumers.settings = settings(max_examples=25, stateful_step_count=30)


def no_wait_of_the_consumer(loader, accelerator):
    wait = accelerator.wait
    own = loader._lane._stream
    accelerator.wait = lambda stream, event: stream is own and wait(stream, event)


def no_wait_of_the_loader(loader, accelerator):
    wait = accelerator.wait
    own = loader._lane._stream
    accelerator.wait = lambda stream, event: stream is own or wait(stream, event)


def a_slot_is_reused_too_early(loader, accelerator):
    ring = loader._lane._ring
    give = ring.give
    ring.give = lambda slot, event: give(slot, None)


def memory_is_not_held(loader, accelerator):
    lane = loader._lane
    hand_over = lane.hand_over

    def forgetful(sent):
        out = hand_over(sent)
        lane._held.clear()
        return out

    lane.hand_over = forgetful


FAULTS = (
    no_wait_of_the_consumer,
    no_wait_of_the_loader,
    a_slot_is_reused_too_early,
    memory_is_not_held,
)


# What is raised while an iterator dies is shown and goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    found = 0
    for seed in range(40):
        try:
            disorder(seed, fault)
        except (Wrong, AssertionError):
            found += 1
    assert found >= 3


def reserved_after(epochs, change=lambda loader: None):
    world = World(7)
    accelerator = Accelerator(world)
    sizes = [16, 100, 40, 230, 16, 90]

    def source():
        for number, nodes in enumerate(sizes):
            yield batch(number, nodes)

    loader, _ = simulated(source, world, 2, accelerator)
    seen = []
    for _ in range(epochs):
        change(loader)
        for number, graph in enumerate(loader):
            at = [Memory(t) for t in tensors(graph)]
            accelerator.kernel(3, checked(at, number))
            if world.random.random() < 0.05:
                break
        seen.append(accelerator.reserved + accelerator.pinned_bytes)
        assert not world.faults
    return seen


def test_memory_is_flat_over_epochs():
    seen = reserved_after(40)
    assert max(seen[20:]) <= 1.2 * max(seen[:20])


class Immovable:
    def to(self, device):
        raise OSError("a fault: it stays")


def sometimes(random, call, error):
    """``call``, which raises ``error`` now and then."""

    def made(*arguments):
        if random.random() < 0.05:
            raise error("a fault")
        return call(*arguments)

    return made


@pytest.mark.parametrize("impatient", [False, True])
@pytest.mark.parametrize("fault", ["source", "hand-over", "copy", "memory"])
@pytest.mark.filterwarnings("ignore:.*(did not return|out of memory):UserWarning")
def test_forty_epochs_of_breaks_and_faults_leave_nothing(fault, impatient):
    world = World(11, impatient)
    random, accelerator = world.random, Accelerator(world)

    def source():
        fail = random.choice([None, None, 3, 6])
        for number in range(10):
            if fault == "source" and number == fail:
                raise OSError("a fault")
            found = batch(number, random.choice([1, 16, 200]))
            if fault == "hand-over" and number == fail:
                found.more = Immovable()
            yield found

    loader, _ = simulated(source, world, 3, accelerator)
    if fault == "copy":
        accelerator.copy = sometimes(random, accelerator.copy, OSError)
    failed, most = 0, []
    for epoch in range(40):
        if fault == "memory" and epoch == 35:
            error = torch.OutOfMemoryError
            accelerator.empty = sometimes(random, accelerator.empty, error)
        stop, graph = random.randint(0, 12), None
        try:
            for number, graph in enumerate(loader):
                at = [Memory(t) for t in tensors(graph)]
                accelerator.kernel(3, checked(at, number))
                if fault == "memory":
                    # Batches that cross by a plain copy lie in memory of this process.
                    accelerator.synchronize()
                if number == stop:
                    break
        except OSError:
            failed += 1
        del graph
        world.settle()
        assert not world.faults
        most.append(accelerator.pinned_bytes + accelerator.allocated)
    assert failed >= 5 or fault == "memory"
    # Two slots more than the depth, and nothing on the device.
    assert max(most) <= 5 * size_class(tree.nbytes(batch(0, 200)))
    assert accelerator.calls["stream"] == 1
    del loader
    gc.collect()
    world.drain()
    assert accelerator.allocated == accelerator.pinned_bytes == 0


def test_memory_is_told_as_it_is():
    world = World()
    loader, accelerator = simulated([batch(n) for n in range(40)], world)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(6)]
    accelerator.synchronize()
    told = loader.memory_stats()
    assert told["allocated"] == accelerator.allocated > 0
    assert told["reserved"] == accelerator.reserved
    assert told["fragmentation"] == 1 - accelerator.allocated / accelerator.reserved
    assert told["pinned"] == told["pinned_peak"] == accelerator.pinned_bytes > 0
    # The first few batches are made while the loop waits; each crosses from a slot.
    assert told["slots_made"] == 4
    one = size_class(tree.nbytes(batch(0)))
    assert told["handed_over"] == 6 * one and told["pinned"] == 4 * one
    kept.clear()
    kept += iterator
    assert told["slots_made"] == 4
    assert loader.memory_stats()["slots_reused"] == 36
    assert loader.memory_stats()["handed_over"] == 0  # torch's from here on


def test_a_stream_per_epoch_would_be_found():
    def renew(loader):
        loader._lane._stream = loader._lane.accelerator.new_stream()

    seen = reserved_after(40, renew)
    assert max(seen[20:]) > 1.5 * max(seen[:20])


def test_what_is_kept_does_not_change_and_is_given_back():
    world = World()
    loader, accelerator = simulated([batch(n) for n in range(50)], world)
    kept = list(loader)
    accelerator.synchronize()
    for number, graph in enumerate(kept):
        assert bool((graph.x == number).all()) and graph.y.item() == number
    views = [graph.y[:1] for graph in kept]
    del kept, graph
    for _ in loader:
        pass
    assert [view.item() for view in views] == list(range(50))
    del views, _
    world.drain()
    assert accelerator.allocated == 0


def test_the_data_set_stays_as_it_is():
    world = World()
    graphs = [batch(n) for n in range(9)]
    addresses = [[t.data_ptr() for t in tensors(g)] for g in graphs]
    loader, accelerator = simulated(graphs, world)
    for graph, original in zip(loader, graphs, strict=True):
        assert graph is not original and graph.x.data_ptr() != original.x.data_ptr()
    assert [[t.data_ptr() for t in tensors(g)] for g in graphs] == addresses


def test_pinned_batches_cross_from_where_they_are():
    world = World()
    accelerator = Accelerator(world)

    def source():
        for number in range(12):
            slab = accelerator.pinned(1 << 20)
            slab.fill_(number)
            yield {"a": slab[: 1 << 19], "b": slab[1 << 19 :]}
            del slab

    loader, _ = simulated(source, world, 2, accelerator)
    for number, found in enumerate(loader):
        at = [Memory(found["a"]), Memory(found["b"])]
        accelerator.kernel(5, checked(at, number))
    accelerator.synchronize()
    assert loader.memory_stats()["slots_made"] == 0
    del found
    world.drain()
    loader._lane._land()
    assert accelerator.pinned_bytes == 0


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_casts_on_either_side(seed):
    world = World(seed)
    source = [batch(n) for n in range(12)]
    cast = {"x": torch.float16, "y": torch.int32, "edge_index": torch.float64}
    cast["x"] = torch.float64  # more bytes: on the device
    loader, accelerator = simulated(source, world, cast=cast)
    for number, graph in enumerate(loader):
        assert graph.x.dtype is torch.float64 and graph.y.dtype is torch.int32
        assert graph.edge_index.dtype is torch.float64
        at = [Memory(t) for t in tensors(graph)]
        accelerator.kernel(2, checked(at, number))
        if number % 3 == 0:
            accelerator.synchronize()
    accelerator.synchronize()


# --- trouble -----------------------------------------------------------------------


@pytest.mark.parametrize("short", ["memory", "pinnable"])
def test_low_memory(short):
    world = World(3)
    room = {short: 9000}
    accelerator = Accelerator(world, **room)
    loader, _ = simulated([batch(n, 100) for n in range(30)], world, 4, accelerator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for number, graph in enumerate(loader):
                at = [Memory(t) for t in tensors(graph)]
                accelerator.kernel(3, checked(at, number))
                accelerator.synchronize()
            assert number == 29
    told = [w for w in caught if "gnnaccel" in str(w.message)]
    assert len(told) == 1
    assert loader.stats()["depth"] == 1


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_an_exception_comes_in_its_place(taken):
    world = World(5)

    def source():
        for number in range(taken):
            yield batch(number)
        raise KeyError("here")

    loader, _ = simulated(source, world)
    for _ in range(2):
        seen = 0
        with pytest.raises(KeyError, match="here") as caught:
            for seen, _graph in enumerate(loader, 1):  # noqa: B007
                pass
        assert seen == taken
        names = [entry.name for entry in caught.traceback]
        assert "source" in names
    assert [task.name for task in world.tasks] == ["main"]


def test_a_hang_would_be_found():
    world = World()
    with pytest.raises(Deadlock):
        world.pause(lambda: False)


def test_poison_is_what_a_hasty_reader_finds():
    world = World()
    accelerator = Accelerator(world)
    source = accelerator.pinned(8).fill_(1)
    target = accelerator.empty(8)
    accelerator.copy(target, source)
    assert set(target.tolist()) == {POISON}
    accelerator.synchronize()
    assert set(target.tolist()) == {1}
