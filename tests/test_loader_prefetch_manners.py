"""PrefetchLoader on real threads: it behaves as what it wraps, whatever happens."""

import copy
import gc
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import Molecules, resident, resources
from processes import run_in_child, script
from same import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, IterableDataset
from torch_geometric.data import Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    DataListLoader,
    DynamicBatchSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    ImbalancedSampler,
    LinkNeighborLoader,
    NeighborLoader,
)
from torch_geometric.loader import DataLoader as StockLoader

from gnnaccel.loader import BudgetBatchSampler, DataLoader, PrefetchLoader
from gnnaccel.loader.prefetch import ahead
from gnnaccel.loader.prefetch import pace as paces
from gnnaccel.loader.prefetch.ahead import ReadAhead
from gnnaccel.loader.prefetch.host import Machine
from gnnaccel.loader.prefetch.pace import Pace
from gnnaccel.loader.prefetch.stats import Stage

TESTS = Path(__file__).parent


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("gnnaccel-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert not threads()


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Threads run from the first batch on, however fast a test's loader is."""
    monkeypatch.setattr(paces, "_TINY", -1.0)
    monkeypatch.setattr(paces, "_BASELINE", 1)
    monkeypatch.setattr(paces, "_WINDOW", 10**9)


def numbers(count=20, fail=None):
    for number in range(count):
        if number == fail:
            raise ValueError(f"number {number}")
        yield torch.tensor([number])


def values(loader):
    return [int(batch) for batch in loader]


# --- what it wraps -----------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


def molecules(kind, **arguments):
    return kind(Molecules(), batch_size=8, **arguments)


def web():
    torch.manual_seed(3)
    return Data(
        x=torch.rand(60, 4),
        edge_index=torch.randint(60, (2, 300)),
        y=torch.randint(3, (60,)),
    )


def hetero():
    from loading import hetero_graph

    data = hetero_graph(torch.Generator().manual_seed(0), 4)
    data["user"].train_mask = torch.ones(data["user"].num_nodes, dtype=torch.bool)
    return data


LOADERS = {
    "stock": lambda: molecules(StockLoader),
    "stock, shuffled": lambda: molecules(StockLoader, shuffle=True),
    "stock, workers": lambda: molecules(StockLoader, num_workers=2),
    "persistent workers": lambda: molecules(
        StockLoader, num_workers=1, persistent_workers=True
    ),
    "ours": lambda: molecules(DataLoader, shuffle=True),
    "neighbours": lambda: NeighborLoader(web(), [3, 2], batch_size=16),
    "links": lambda: LinkNeighborLoader(web(), [3, 2], batch_size=64),
    "imbalanced": lambda: NeighborLoader(
        web(), [3], batch_size=16, sampler=ImbalancedSampler(web())
    ),
    "hgt": lambda: HGTLoader(hetero(), [4, 4], ("user", None), batch_size=2),
    "saint": lambda: GraphSAINTRandomWalkSampler(web(), 6, 2, num_steps=5),
    "lists of graphs": lambda: molecules(DataListLoader),
    "torch": lambda: TorchLoader(torch.arange(20), batch_size=3),
    "iterable": lambda: TorchLoader(Stream(), batch_size=3),
    "list": lambda: [torch.tensor([n]) for n in range(20)],
    "function": lambda: numbers,
    "budget": lambda: DataLoader(
        Molecules(), batch_sampler=BudgetBatchSampler(Molecules(), max_nodes=60)
    ),
}


def seeded(call):
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    return call()


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_the_same_batches_in_the_same_order(name, depth):
    if name in ("neighbours", "links", "hgt", "imbalanced", "saint"):
        pytest.importorskip("torch_sparse")  # they sample by it
    bare, wrapped = LOADERS[name](), LOADERS[name]()
    loader = PrefetchLoader(wrapped, "cpu", depth)
    for _ in range(2):
        expected = seeded(lambda: list(bare() if bare is numbers else bare))
        after = torch.get_rng_state()
        found = seeded(lambda: list(loader))
        assert torch.equal(torch.get_rng_state(), after)
        assert len(found) == len(expected) > 0
        for ours, stock in zip(found, expected, strict=True):
            assert_same(ours, stock)


def test_clusters():
    pytest.importorskip("torch_sparse")
    try:
        parts = ClusterData(web(), 4, log=False)
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    found = list(PrefetchLoader(ClusterLoader(parts, batch_size=2), "cpu"))
    assert sum(batch.num_nodes for batch in found) == 60


def test_an_empty_loader_has_no_batches():
    assert list(PrefetchLoader([], "cpu")) == []
    assert list(PrefetchLoader(lambda: iter(()), "cpu")) == []


def test_none_is_a_batch():
    assert list(PrefetchLoader([None, 1, None], "cpu")) == [None, 1, None]


def test_an_iterator_serves_once():
    loader = PrefetchLoader(numbers(5), "cpu")
    assert values(loader) == [0, 1, 2, 3, 4]
    assert values(loader) == []


def test_an_iterator_is_one_for_all_its_loops():
    def slowly():
        for number in numbers(20):
            time.sleep(0.002)
            yield number

    loader = PrefetchLoader(slowly(), "cpu")
    assert [int(a) for a, _ in zip(loader, loader, strict=True)] == [*range(0, 20, 2)]
    assert values(loader) == []


@pytest.mark.parametrize(
    "wrap", [lambda gen: PrefetchLoader(gen, "cpu"), lambda gen: lambda: gen]
)
def test_what_has_one_iterator_has_one_for_all_loops(wrap):
    def slowly():
        for number in numbers(20):
            time.sleep(0.001)
            yield number

    loader = PrefetchLoader(wrap(slowly()), "cpu")
    assert [int(a) for a, _ in zip(loader, loader, strict=True)] == [*range(0, 20, 2)]
    assert values(loader) == []
    again = PrefetchLoader(wrap(slowly()), "cpu")
    assert [int(batch) for batch, _ in zip(again, range(3), strict=False)] == [0, 1, 2]
    rest = values(again)
    assert rest == [*range(rest[0], 20)]


class Restarting:
    """Its own iterator, begun again by ``iter``."""

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        number = self.number = self.number + 1
        time.sleep(0.003)
        if number == 20:
            raise StopIteration
        return torch.tensor([number])


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.003)
        return index


@pytest.mark.parametrize(
    "wrapped",
    [
        Restarting,
        lambda: TorchLoader(Slow(), None, num_workers=2, persistent_workers=True),
    ],
)
def test_what_begins_again_does_so_while_an_older_loop_is_there(wrapped):
    loader = PrefetchLoader(wrapped(), "cpu")
    for taken in (1, 3, 5, 7, 4, 2, 6):
        older = iter(loader)
        for expected in range(taken):
            assert int(next(older)) == expected
    assert values(loader) == [*range(20)]
    assert values(loader) == [*range(20)]


def test_it_is_true_or_false_as_what_it_wraps():
    assert PrefetchLoader(numbers, "cpu")
    assert PrefetchLoader(numbers(), "cpu")
    assert not PrefetchLoader([], "cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "got 3, of type int"),
        ((None,), TypeError, "got None"),
        (("path",), TypeError, "got 'path'"),
        ((StockLoader,), TypeError, r"PrefetchLoader\(DataLoader\(...\)\)"),
        ((lambda data: data,), TypeError, "missing a required argument: 'data'"),
        (([], "cpu", -1), ValueError, "got -1"),
        (([], "cpu", "deep"), ValueError, "got 'deep'"),
        (([], "cpu", 1.5), TypeError, "got 1.5"),
        (([], "cpu", None), TypeError, "got None"),
        (([], "cpu", True), TypeError, "got True"),
        (([], "nonsense"), RuntimeError, "got 'nonsense'"),
        (([], ""), RuntimeError, "got ''"),
        (([], 1.5), TypeError, "got 1.5, of type float"),
        (([], ["cpu"]), TypeError, r"got \['cpu'\], of type list"),
        (([], "cpu", 2, "x"), TypeError, "got 'x', of type str"),
        (([], "cpu", 2, torch.float16), TypeError, "got torch.float16"),
        (([], "cpu", 2, {"x": "float16"}), TypeError, r"cast\['x'\].*got 'float16'"),
        (([], "cpu", 2, {"x": np.float16}), TypeError, "torch.float16"),
        (([], "cpu", 2, {0: torch.half}), TypeError, "got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        PrefetchLoader(*arguments)


def test_arguments_of_odd_types_that_mean_something():
    assert PrefetchLoader([], "cpu", np.int64(3)).depth == 3
    assert type(PrefetchLoader([], torch.device("cpu"), np.int64(3)).depth) is int
    assert PrefetchLoader([], "cpu", cast=None).cast == {}


@pytest.mark.parametrize("made", [None, 3])
def test_a_function_that_returns_no_batches(made):
    with pytest.raises(TypeError, match=f"return something to iterate over.*{made}"):
        iter(PrefetchLoader(lambda: made, "cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="cuda:1"):
        PrefetchLoader([], "cuda:1")


# --- manners -----------------------------------------------------------------------


def test_it_passes_for_what_it_wraps():
    stock = molecules(StockLoader)
    loader = PrefetchLoader(stock, "cpu")
    assert len(loader) == len(stock) == 7
    assert isinstance(loader, PrefetchLoader)
    assert isinstance(loader, TorchLoader) and isinstance(loader, StockLoader)
    assert type(loader) is PrefetchLoader
    assert not isinstance(PrefetchLoader([1], "cpu"), TorchLoader)
    for name in ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn"):
        assert getattr(loader, name) is getattr(stock, name)
    assert not hasattr(loader, "no_such_thing")
    with pytest.raises(TypeError):
        len(PrefetchLoader(numbers, "cpu"))
    assert "cpu" in repr(loader)


def test_copies_and_pickles():
    loader = PrefetchLoader(molecules(StockLoader), "cpu", 3, {"x": torch.float64})
    list(loader)
    for twin in (
        copy.copy(loader),
        copy.deepcopy(loader),
        pickle.loads(pickle.dumps(loader)),
    ):
        assert type(twin) is PrefetchLoader
        assert (twin.depth, twin.cast) == (3, {"x": torch.float64})
        assert len(list(twin)) == 7


def test_set_epoch_reaches_the_sampler():
    data = Molecules()
    sampler = DistributedSampler(data, 2, 0)
    loader = PrefetchLoader(StockLoader(data, 8, sampler=sampler), "cpu")
    loader.set_epoch(5)
    assert sampler.epoch == 5


def test_a_trainer_makes_it_anew_with_its_sampler():
    data = Molecules()
    sampler = DistributedSampler(data, 2, 1, shuffle=False)
    loader = PrefetchLoader(StockLoader(data, 8, follow_batch=["x"]), "cpu", 3)
    # As Lightning does it: public attributes for the arguments that there are.
    kept = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    again = type(loader)(**kept, sampler=sampler)
    assert again.depth == 3 and again.sampler is sampler
    assert again.batch_size == 8 and again.follow_batch == ["x"]
    expected = StockLoader(data, 8, sampler=sampler, follow_batch=["x"])
    for ours, stock in zip(again, expected, strict=True):
        assert_same(ours, stock)
    with pytest.raises(TypeError, match="list"):
        PrefetchLoader([], "cpu", sampler=sampler)
    with pytest.raises(TypeError, match="colour"):
        PrefetchLoader(StockLoader(data), "cpu", colour=1)


def test_lightning():
    data = pytest.importorskip("pytorch_lightning.utilities.data")
    sampler = DistributedSampler(Molecules(), 2, 1)
    loader = PrefetchLoader(molecules(StockLoader), "cpu", 3)
    again = data._update_dataloader(loader, sampler)
    assert type(again) is PrefetchLoader and again.sampler is sampler


def test_accelerate():
    accelerate = pytest.importorskip("accelerate.data_loader")
    loader = PrefetchLoader(molecules(StockLoader), "cpu")
    shard = accelerate.prepare_data_loader(
        loader, num_processes=2, process_index=1, put_on_device=False
    )
    assert 0 < len(list(shard)) < len(loader)


def test_in_every_kind_of_loop():
    from tqdm import tqdm

    loader = PrefetchLoader(numbers, "cpu")
    assert [i for i, _ in enumerate(loader)] == list(range(20))
    assert [int(a) - b for a, b in zip(loader, range(20), strict=True)] == [0] * 20
    assert values(tqdm(loader, disable=True)) == list(range(20))
    assert values(loader) == list(range(20))


def test_nested_and_twice_at_once():
    loader = PrefetchLoader(numbers, "cpu")
    pairs = [(int(a), int(b)) for a in loader for b in loader]
    assert pairs == [(a, b) for a in range(20) for b in range(20)]


@pytest.mark.parametrize("shared", [False, True])
def test_four_threads_at_once(shared, monkeypatch):
    """Each with a loop of its own, or all with one, whatever the pace makes of it."""
    monkeypatch.setattr(paces, "_WINDOW", 4)
    monkeypatch.setattr(paces, "_TRUST", 5)
    loader, found, errors = PrefetchLoader(range(300), "cpu", 3), [], []
    iterator = iter(loader)

    def loop():
        try:
            for number in iterator if shared else loader:
                found.append(number)
        except BaseException as error:
            errors.append(error)

    loops = [threading.Thread(target=loop) for _ in range(4)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    assert not errors
    assert sorted(found) == sorted([*range(300)] * (1 if shared else 4))


@pytest.mark.parametrize("taken", [0, 1, 2, 7, 20])
def test_break_and_early_del(taken):
    loader = PrefetchLoader(numbers, "cpu", 4)
    for _ in range(3):
        iterator = iter(loader)
        for number in range(taken):
            assert int(next(iterator)) == number
        del iterator
        assert not threads()
    del loader


class Gate:
    """Generators, the first of which waits at 3 until it is let on."""

    def __init__(self):
        self.waits, self.open = threading.Event(), threading.Event()
        self.alive = weakref.WeakSet()
        self.closed_by = []

    def __call__(self):
        first = not self.waits.is_set()
        try:
            for batch in numbers(6):
                if first and int(batch) == 3:
                    self.waits.set()
                    self.open.wait()
                self.alive.add(batch)
                yield batch
                del batch
        finally:
            self.closed_by.append(threading.current_thread().name)

    def let_on(self):
        """Opens, and waits for the threads that were left behind."""
        self.open.set()
        for thread in threading.enumerate():
            if thread.name.startswith("gnnaccel-"):
                thread.join()


def leave_by_break(loader, gate):
    for number, _batch in enumerate(loader):
        if number == 2:
            gate.waits.wait()
            break


def leave_by_del(loader, gate):
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    gate.waits.wait()
    del iterator


def leave_by_error(loader, gate):
    def consume():
        for number, _batch in enumerate(loader):
            if number == 2:
                gate.waits.wait()
                raise LookupError("of the loop")

    with pytest.raises(LookupError):
        consume()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ahead, "_PATIENCE", 0.05)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_del, leave_by_error])
def test_a_loop_can_be_left_while_its_source_waits(leave, impatient):
    gate = Gate()
    loader = PrefetchLoader(gate, "cpu", 2)
    with pytest.warns(UserWarning, match="Gate.*did not return"):
        leave(loader, gate)
    assert threads() == ["gnnaccel-source"]
    assert values(loader) == [*range(6)]
    assert gate.closed_by == ["MainThread"] or gate.closed_by == ["gnnaccel-source"]
    gate.let_on()
    assert not threads() and not gate.alive
    # Its generator went with the thread.
    assert gate.closed_by[1:] == ["gnnaccel-source"]
    assert values(loader) == [*range(6)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda gen: gen,
        lambda gen: lambda: gen,
        lambda gen: PrefetchLoader(gen, "cpu"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*did not return:UserWarning")
def test_no_two_threads_ask_one_source(wrap, impatient):
    gate = Gate()
    loader = PrefetchLoader(wrap(gate()), "cpu")
    leave_by_break(loader, gate)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="one loop at a time"):
            iter(loader)
    gate.let_on()
    # What was made for the loop that was left is gone: with two threads, all may be.
    rest = values(loader)
    assert rest == [*range(6 - len(rest), 6)]


def test_a_source_that_is_only_slow_is_waited_for():
    stage = Stage()
    line = ReadAhead(iter(()), Machine(), "test", stage)._line

    def patience(slowest):
        stage.slowest = slowest
        return line.patience()

    # Ten batches of 0.2 s, two of 3 s, and not for ever.
    assert [patience(s) for s in (0.0, 0.2, 3.0, 60.0)] == [2.0, 2.0, 6.0, 10.0]
    line.hurry = True
    assert patience(3.0) == 0.5


def test_the_end_stays_the_end():
    iterator = iter(PrefetchLoader(numbers, "cpu"))
    assert len(list(iterator)) == 20
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


# --- errors ------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [0, 1, 2, 3, 9])
def test_an_exception_comes_in_its_place_with_its_traceback(fail):
    loader = PrefetchLoader(lambda: numbers(20, fail), "cpu", 3)
    for _ in range(2):
        seen = []
        with pytest.raises(ValueError, match=f"number {fail}") as caught:
            for batch in loader:
                seen.append(int(batch))
        assert seen == list(range(fail))
        lines = traceback.extract_tb(caught.value.__traceback__)
        assert lines[-1].name == "numbers"


class Shaky:
    """An iterator that fails at 3 and goes on when it is asked again."""

    def __init__(self):
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == 3:
            raise OSError("once")
        if self.number == 8:
            raise StopIteration
        return torch.tensor([self.number])


def test_a_loop_may_go_on_after_an_exception():
    iterator = iter(PrefetchLoader(Shaky(), "cpu"))
    seen, errors = [], 0
    while True:
        try:
            seen.append(int(next(iterator)))
        except OSError:
            errors += 1
        except StopIteration:
            break
    assert seen == [0, 1, 2, 4, 5, 6, 7] and errors == 1


class Bad(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise ArithmeticError("item 13")
        return torch.tensor([index])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_worker(workers):
    loader = PrefetchLoader(TorchLoader(Bad(), 2, num_workers=workers), "cpu")
    with pytest.raises(ArithmeticError, match="item 13"):
        list(loader)


DEADLY = """
    import os, signal, torch
    from torch.utils.data import DataLoader, Dataset
    from gnnaccel.loader import PrefetchLoader

    class Deadly(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor([index])

    seen = 0
    for batch in PrefetchLoader(DataLoader(Deadly(), 2, num_workers=1), "cpu"):
        assert batch.flatten().tolist() == [seen, seen + 1]
        seen += 2
"""


def test_a_worker_that_is_killed_is_named():
    child = script(DEADLY)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 1
    # torch says so from a signal handler, or finds out; reading may fail before.
    words = ("killed by signal", "exited unexpectedly", "ConnectionResetError")
    assert any(word in error for word in words), error


def test_system_exit_is_not_swallowed():
    def source():
        yield 1
        sys.exit(3)

    with pytest.raises(SystemExit):
        list(PrefetchLoader(source, "cpu"))


def test_no_threads_to_be_had(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert values(PrefetchLoader(numbers, "cpu")) == list(range(20))


# --- results stay as they are ------------------------------------------------------


def noisy():
    for _ in range(12):
        yield torch.rand(2)


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.rand, lambda n: random.random()]
)
def test_numbers_that_loop_and_loader_share_are_drawn_in_turn(draw):
    def source():
        for _ in range(12):
            yield float(np.asarray(draw(1)).reshape(-1)[0])

    def epoch(loader):
        out = []
        for batch in loader:
            time.sleep(0.001)
            out.append((batch, float(np.asarray(draw(1)).reshape(-1)[0])))
        return out

    expected = seeded(lambda: epoch(source()))
    loader = PrefetchLoader(source, "cpu", 4)
    assert seeded(lambda: epoch(loader)) == expected
    assert "random" in loader.stats()["why_not_ahead"]


def test_numbers_that_only_the_loader_draws_are_drawn_ahead():
    loader = PrefetchLoader(noisy, "cpu", 4)
    expected = seeded(lambda: [batch.tolist() for batch in noisy()])
    assert seeded(lambda: [batch.tolist() for batch in loader]) == expected
    assert loader.stats()["why_not_ahead"] == ""


def test_one_object_again_and_again_is_not_read_ahead():
    def source():
        batch = torch.zeros(1)
        for _ in range(10):
            batch += 1
            yield batch

    loader = PrefetchLoader(source, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paces, "_BASELINE", 3)
        assert values(loader) == list(range(1, 11))
    assert "same object" in loader.stats()["why_not_ahead"]


def test_the_thread_sees_what_the_loop_has_set():
    from contextvars import ContextVar

    variable = ContextVar("variable", default=0)

    def source():
        for _ in range(6):
            yield torch.is_grad_enabled(), variable.get(), torch.empty(1).device.type

    variable.set(7)
    with torch.no_grad(), torch.device("meta"):
        assert set(PrefetchLoader(source, "cpu")) == {(False, 7, "meta")}


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)]
)
def test_a_mode_of_the_loop_holds_for_all_its_batches(mode):
    def source():
        for _ in range(6):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            yield product.dtype, product.is_inference(), torch.is_grad_enabled()

    with mode():
        assert set(PrefetchLoader(source, "cpu")) == set(source())


def test_no_batch_is_held_on_to():
    refs = []

    class Batch:
        pass

    def source():
        for _ in range(10):
            batch = Batch()
            refs.append(weakref.ref(batch))
            yield batch
            del batch

    gc.disable()
    try:
        iterator = iter(PrefetchLoader(source, "cpu", 2))
        for number in range(9):
            next(iterator)
            alive = [ref() is not None for ref in refs]
            assert not any(alive[: max(number - 1, 0)])
        list(iterator)
        assert not any(ref() for ref in refs)
    finally:
        gc.enable()


# --- state -------------------------------------------------------------------------


def test_state_counts_what_was_handed_over():
    loader = PrefetchLoader(numbers, "cpu", 6)
    assert loader.state_dict() == {"batches": 0}
    iterator = iter(loader)
    for taken in range(1, 6):
        next(iterator)
        time.sleep(0.002)
        assert loader.state_dict() == {"batches": taken}
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = values(iterator)
    assert loader.state_dict() == {"batches": 0}
    again = PrefetchLoader(numbers, "cpu", 1)
    again.load_state_dict(state)
    assert again.state_dict() == state
    iterator = iter(again)
    assert int(next(iterator)) == 5
    assert again.state_dict() == {"batches": 6}
    assert values(iterator) == rest[1:]
    assert values(again) == list(range(20))
    with pytest.raises(ValueError, match="nonsense"):
        loader.load_state_dict({"nonsense": 1})


def test_state_of_a_sampler_that_has_one():
    def make():
        generator = torch.Generator().manual_seed(4)
        sampler = BudgetBatchSampler(
            Molecules(), max_nodes=60, shuffle=True, generator=generator
        )
        return PrefetchLoader(DataLoader(Molecules(), batch_sampler=sampler), "cpu", 4)

    whole = [batch.name for batch in make()]
    loader = make()
    iterator = iter(loader)
    seen = [next(iterator).name for _ in range(3)]
    state = loader.state_dict()
    del iterator
    loader = make()
    loader.load_state_dict(state)
    assert seen + [batch.name for batch in loader] == whole
    assert state["batches"] == 3 and "sampler" in state


class Stateful:
    """A loader with a state of its own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_state_of_a_loader_that_has_one():
    loader = PrefetchLoader(Stateful(), "cpu", 4)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    time.sleep(0.01)
    state = loader.state_dict()
    assert state == {"batches": 3, "loader": {"at": 3}}
    again = PrefetchLoader(Stateful(), "cpu", 4)
    again.load_state_dict(state)
    assert values(again) == list(range(4, 11))


# --- processes ---------------------------------------------------------------------


def whole_epoch(send, iterator, loader):
    try:
        next(iterator)
        message = ""
    except RuntimeError as error:
        message = str(error)
    del iterator
    send.send((message, values(loader)))


def test_a_fork_in_mid_epoch():
    loader = PrefetchLoader(numbers, "cpu")
    iterator = iter(loader)
    next(iterator)
    message, found = run_in_child(whole_epoch, iterator, loader)
    assert "begin a new one" in message
    assert found == list(range(20))
    assert values(iterator) == list(range(1, 20))


INTERRUPTED = """
    import signal, threading, time
    from gnnaccel.loader import PrefetchLoader

    signal.signal(signal.SIGINT, signal.default_int_handler)

    def slow():
        for number in range(10_000):
            time.sleep(0.002)
            yield number

    loader = PrefetchLoader(slow, "cpu")
    print("ready", flush=True)
    for _ in range(3):
        try:
            for batch in loader:
                pass
        except KeyboardInterrupt:
            print("caught", flush=True)
    del loader
    print("done", threading.active_count(), flush=True)
"""


def test_ctrl_c():
    child = script(INTERRUPTED)
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        for _ in range(3):
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "caught\n", child.stderr.read()
        assert child.stdout.readline() == "done 1\n", child.stderr.read()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()


WAITS_FOR_EVER = """
    import queue, signal, sys, threading
    from gnnaccel.loader import PrefetchLoader
    from gnnaccel.loader.prefetch import pace

    pace._BASELINE, pace._TINY = 1, -1.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waits = threading.Event()

    def source():
        for number in range(5):
            yield number
        waits.set()
        yield queue.Queue().get()

    iterator = iter(PrefetchLoader(source, "cpu", 2))
    how = sys.argv[1]
    for _ in range(4):
        next(iterator)
    waits.wait()
    try:
        print("ready", flush=True)
        if how == "interrupt":
            for batch in iterator:
                pass
    except KeyboardInterrupt:
        print("caught", flush=True)
    if how == "break":
        del iterator
    print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["interrupt", "break", "leave"])
def test_a_source_that_waits_for_ever_holds_up_nobody(how):
    child = script(WAITS_FOR_EVER, how)
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        if how == "interrupt":
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "caught\n", child.stderr.read()
        assert child.stdout.readline() == "done\n", child.stderr.read()
        assert child.wait(60) == 0
        assert "Traceback" not in child.stderr.read()
    finally:
        child.kill()
        child.communicate()


AT_EXIT = """
    import sys, time, atexit
    from gnnaccel.loader import PrefetchLoader

    def source():
        number = 0
        while True:
            time.sleep(0.002)
            yield number

    loader = PrefetchLoader(source, "cpu", 3)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    how = sys.argv[1]
    if how == "cycle":
        cycle = [iterator]
        cycle.append(cycle)
        del iterator
    elif how == "module":
        sys.keeps = [iterator]
    elif how == "atexit":
        atexit.register(lambda: next(iterator))
    elif how == "raises":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["plain", "cycle", "module", "atexit", "raises"])
def test_leaving_in_mid_epoch(how):
    child = script(AT_EXIT, how)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == (3 if how == "raises" else 0), errors
    assert errors == ""


class Sometimes(torch.utils.data.Dataset):
    """Large items, one of which can't be loaded now and then."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 9 and float(torch.rand(())) < 0.3:
            raise ValueError("item 9")
        return torch.full((250_000,), float(index))


def shaky():
    yield from TorchLoader(Sometimes(), 2)


@pytest.mark.parametrize(
    ("make", "epochs"),
    [
        (lambda: shaky, 40),
        (lambda: TorchLoader(Sometimes(), 2), 40),
        (lambda: PrefetchLoader(TorchLoader(Sometimes(), 2), "cpu", 1), 40),
        (lambda: TorchLoader(Sometimes(), 2, num_workers=2), 10),
    ],
)
def test_nothing_is_left_after_many_epochs(make, epochs):
    chance = random.Random(3)
    loader = PrefetchLoader(make(), "cpu", 3)

    def run(count):
        for _ in range(count):
            stop = chance.randint(0, 14)
            try:
                for number, _batch in enumerate(loader):
                    if number == stop:
                        break
            except ValueError:
                pass
            finally:
                _batch = None

    run(5)
    gc.collect()
    before, grown = resources(), []
    for _ in range(2):
        size = resident()
        run(epochs // 2)
        gc.collect()
        grown.append(resident() - size)
    # Fewer: what torch starts with its workers may end a little after them.
    after = resources()
    assert all(after[name] <= before[name] for name in before), (before, after)
    assert not threads()
    # A batch has 2 MB: one of each epoch, kept, would be 2 MB an epoch. What malloc
    # keeps for new threads grows once, that would grow in both halves.
    assert min(grown) < 1_500_000 * (epochs // 2) + 5_000_000


def test_the_length_is_what_the_wrapped_loader_says():
    def make(**arguments):
        sampler = DynamicBatchSampler(Molecules(), max_num=60, **arguments)
        return PrefetchLoader(StockLoader(Molecules(), batch_sampler=sampler), "cpu")

    assert len(make(num_steps=4)) == len(list(make(num_steps=4))) == 4
    with pytest.raises(ValueError, match="length"):
        len(make())


# --- the pace ----------------------------------------------------------------------


@pytest.fixture
def steady(monkeypatch):
    monkeypatch.setattr(paces, "_TINY", 1e-4)
    monkeypatch.setattr(paces, "_BASELINE", 3)
    monkeypatch.setattr(paces, "_WINDOW", 16)


def run(pace, steps, together, alone=9e-3):
    """Steps that take so long, and the depths in them."""
    depths = []
    for _ in range(steps):
        depths.append(pace.ahead(True))
        ahead = depths[-1] > 0
        pace.step(not ahead, 5e-3, (together if ahead else alone) - 5e-3)
    return depths


def test_looking_ahead_stays_where_it_pays(steady):
    depths = run(Pace(2, True), 2000, 5e-3)
    assert depths[:67] == [0] * 3 + [2] * 64
    # Now and then it is compared anew.
    assert 0.98 < sum(d > 0 for d in depths) / 2000 < 1
    assert run(Pace(2, False), 200, 5e-3) == [0] * 3 + [2] * 197


def test_looking_ahead_is_given_up_where_it_does_not(steady):
    depths = run(Pace(2, True), 2000, 8.9e-3)
    assert 0.01 < sum(d > 0 for d in depths) / 2000 < 0.06


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_batches_that_come_in_bursts_are_no_gain(steady, depth):
    """As they do where both sides need Python: one step pays for all others."""
    pace, ahead_steps = Pace(depth, True), 0
    burst = [9e-3 * (depth + 1) - 5e-3 * depth, *[5e-3] * depth]
    for number in range(2000):
        ahead = pace.ahead(True) > 0
        ahead_steps += ahead
        step = burst[number % len(burst)] if ahead else 9e-3
        pace.step(not ahead, min(step, 5e-3), step - min(step, 5e-3))
    assert ahead_steps < 0.15 * 2000


def test_a_slow_beginning_is_not_believed_for_ever(steady):
    """While the first steps were timed, everything was slow; nothing is gained."""
    pace = Pace(2, True)
    slow = run(pace, 3, 0.0, alone=20e-3)
    depths = slow + run(pace, 1000, 9e-3)
    assert sum(d > 0 for d in depths) < 150


def test_steps_that_are_known_to_be_in_line_are_so_and_counted(monkeypatch):
    """The short way: the same batches, accounts, states and end as the long one."""
    monkeypatch.setattr(paces, "_WINDOW", 4)
    loader = PrefetchLoader(Stateful(), "cpu", 0)
    short = 0
    for _ in range(2):
        iterator = iter(loader)
        for number in range(1, 11):
            short += iterator._short > 0
            assert int(next(iterator)) == number
            assert loader.state_dict() == {"batches": number, "loader": {"at": number}}
        with pytest.raises(StopIteration):
            next(iterator)
        assert loader.state_dict() == {"batches": 0}
    assert short == 14
    stats = loader.stats()
    assert stats["consumer"]["items"] == stats["source"]["items"] == 20
    assert stats["why_not_ahead"] == "depth is 0"


@pytest.mark.parametrize("fail", range(1, 8))
def test_errors_in_line_come_in_their_place(fail, monkeypatch):
    monkeypatch.setattr(paces, "_WINDOW", 4)
    loader = PrefetchLoader(lambda: numbers(20, fail), "cpu", 0)
    seen = []
    with pytest.raises(ValueError, match=f"number {fail}"):
        for batch in loader:
            seen.append(int(batch))
    assert seen == [*range(fail)]


def test_what_loads_at_once_is_not_read_ahead(steady):
    assert set(run(Pace(2, True), 100, 5e-3, alone=5.05e-3)) == {0}


def test_depth_grows_only_while_that_helps(steady):
    def settle(wait, ready, full, room=True, steps=400, pace=None):
        pace = pace or Pace("auto", True)
        count = 0
        for _ in range(steps):
            ahead = pace.ahead(True) > 0
            pace.step(not ahead, 5e-3, 1e-5 if ahead else 4e-3)
            if ahead:
                count += full
                pace.adapt(5e-3, wait, ready, count, lambda: room)
        return pace

    assert settle(1e-3, 0, full=1).depth == paces.DEEPEST
    assert settle(1e-3, 0, full=0).depth == 1
    assert settle(1e-3, 0, full=1, room=False).depth == 1
    deep = settle(1e-3, 0, full=1)
    assert settle(0.0, 16, full=1, steps=3000, pace=deep).depth < paces.DEEPEST
