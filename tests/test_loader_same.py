"""The loader gives stock PyG's batches, in its order, with its draws."""

import copy
import pickle

import numpy as np
import pytest
import torch
from loading import Molecules, assert_same_epochs, graph, hetero_graph
from same import assert_same
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as StockLoader
from torch_geometric.loader import DynamicBatchSampler, ImbalancedSampler
from torch_geometric.loader.dataloader import Collater

from gnnaccel.data import PackedDataset
from gnnaccel.loader import BudgetBatchSampler, DataLoader
from gnnaccel.loader.iterator import PackedIterator

PREFETCH = [None, 0, 1, 5]


def pair(dataset, *args, prefetch=None, packed=True, **kwargs):
    """Both loaders; the second is seen to take the path it should."""
    stock = StockLoader(dataset, *args, **kwargs)
    ours = DataLoader(dataset, *args, prefetch=prefetch, **kwargs)
    assert ours._takes_packed_path() is packed
    return ours, stock


@pytest.fixture(scope="module")
def molecules():
    return Molecules()


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 8},
        {"batch_size": 8, "shuffle": True},
        {"batch_size": 7, "shuffle": True, "drop_last": True},
        {"batch_size": 50},
        {"batch_size": 64, "shuffle": True},
        {"batch_size": 64, "drop_last": True},
        {"batch_size": 6, "follow_batch": ["edge_attr", "y", "name"]},
        {"batch_size": 6, "exclude_keys": ["x", "name", "weight"]},
        {"batch_size": 6, "follow_batch": ["x"], "exclude_keys": ["edge_index"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("hetero", [False, True], ids=["homo", "hetero"])
def test_arguments(arguments, prefetch, hetero):
    assert_same_epochs(*pair(Molecules(hetero=hetero), prefetch=prefetch, **arguments))


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seeded", [False, True])
def test_generator_of_the_loader(molecules, prefetch, size, seeded):
    def batches(kind, **more):
        generator = torch.Generator().manual_seed(3) if seeded else None
        loader = kind(molecules, size, shuffle=True, generator=generator, **more)
        found = [list(loader), list(loader)]
        return found, generator.get_state() if seeded else torch.get_rng_state()

    torch.manual_seed(1)
    expected, state = batches(StockLoader)
    torch.manual_seed(1)
    actual, after = batches(DataLoader, prefetch=prefetch)
    assert_same(actual, expected)
    assert torch.equal(after, state)


SAMPLERS = {
    "sequential": SequentialSampler,
    "random": RandomSampler,
    "replacement": lambda d: RandomSampler(d, replacement=True, num_samples=70),
    "more than there are": lambda d: RandomSampler(d, num_samples=130),
    "subset": lambda d: SubsetRandomSampler([4, 8, 15, 16, 23, 42]),
    "weighted": lambda d: WeightedRandomSampler(range(len(d)), 40),
    "imbalanced": lambda d: ImbalancedSampler(torch.arange(len(d)) % 3),
    "distributed": lambda d: DistributedSampler(d, num_replicas=3, rank=1),
    "list": lambda d: [3, 1, 2, 49, -1, 0],
    "range": lambda d: range(49, 0, -3),
    "numpy": lambda d: np.arange(10),
    "tensor": lambda d: torch.arange(10),
    "bools": lambda d: [True, False, True],
}


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(molecules, name, prefetch):
    sampler = SAMPLERS[name](molecules)
    assert_same_epochs(*pair(molecules, 4, sampler=sampler, prefetch=prefetch))


BATCH_SAMPLERS = {
    "torch": lambda d: BatchSampler(RandomSampler(d), 5, drop_last=True),
    "lists": lambda d: [[1, 2], [3], [-1, 0, 0]],
    "tuples": lambda d: [(1, 2), (3,)],
    "tensors": lambda d: [torch.tensor([1, 2]), torch.tensor([3])],
    "int32": lambda d: [torch.tensor([1, 2], dtype=torch.int32)],
    "arrays": lambda d: [np.array([1, 2]), np.array([3], dtype=np.int16)],
    "ranges": lambda d: [range(3), range(9, 2, -2)],
    "scalars": lambda d: [[torch.tensor(4), np.int64(5), 6]],
    "generators": lambda d: [map(int, ["1", "2"])],
    "dynamic": lambda d: DynamicBatchSampler(d, 30, shuffle=True, num_steps=9),
}


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_batch_samplers(molecules, name, prefetch):
    ours, stock = pair(molecules, prefetch=prefetch, batch_sampler=[])
    make = BATCH_SAMPLERS[name]
    torch.manual_seed(2)
    expected = list(StockLoader(molecules, batch_sampler=make(molecules)))
    torch.manual_seed(2)
    ours = DataLoader(molecules, batch_sampler=make(molecules), prefetch=prefetch)
    assert_same(list(ours), expected)


@pytest.mark.parametrize(
    "subset",
    [
        lambda d: d[10:30],
        lambda d: d[torch.randperm(50)],
        lambda d: d.shuffle()[:20][5:],
        lambda d: Subset(d, [5, 3, 3, 49]),
        lambda d: Subset(d, torch.tensor([5, 3, -3])),
        lambda d: Subset(d[7:], np.arange(5)),
        lambda d: Subset(Subset(d, range(3, 40)), [9, 1, -1]),
        lambda d: random_split(d, [40, 10])[1],
        lambda d: PackedDataset(d),
        lambda d: PackedDataset(d)[5:20],
        lambda d: Subset(PackedDataset(d), [4, 2]),
    ],
    ids=range(11),
)
def test_subsets(molecules, subset):
    dataset = subset(molecules)
    assert_same_epochs(*pair(dataset, 6, shuffle=True))


def test_a_shorter_epoch_leaves_the_same_state(molecules):
    ours, stock = pair(molecules, 4, shuffle=True)
    states = []
    for loader in (stock, ours):
        torch.manual_seed(9)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        states.append(torch.rand(3))
    assert torch.equal(*states)


def test_draws_between_batches(molecules):
    ours, stock = pair(molecules, 4, shuffle=True)
    drawn = []
    for loader in (stock, ours):
        torch.manual_seed(9)
        iterator = iter(loader)
        before = torch.rand(1)
        drawn.append([(before, b.y, torch.rand(1)) for b in iterator])
    assert_same(drawn[1], drawn[0])


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_that_two_threads_share(prefetch):
    loader, stock = pair(Molecules(3000), 700, shuffle=True, prefetch=prefetch)
    assert_same_epochs(loader, stock, epochs=8)


def test_two_loaders_in_step(molecules):
    both = []
    for kind in (StockLoader, DataLoader):
        torch.manual_seed(9)
        loaders = [kind(molecules, size, shuffle=True) for size in (3, 4)]
        both.append([(a, b) for a, b in zip(*loaders, strict=False)])
    assert_same(both[1], both[0])


def test_workers_that_are_not_needed(molecules):
    ours = DataLoader(molecules, 4, shuffle=True, num_workers=2)
    with pytest.warns(UserWarning, match="num_workers=2 is not needed") as told:
        assert isinstance(iter(ours), PackedIterator)
    assert told[0].filename == __file__
    assert_same_epochs(ours, StockLoader(molecules, 4, shuffle=True))
    again = DataLoader(molecules, 4, shuffle=True, num_workers=2)
    again._told = True
    assert_same_epochs(again, StockLoader(molecules, 4, shuffle=True, num_workers=2))


def test_persistent_workers_that_are_not_needed(molecules):
    arguments = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    ours, stock = pair(molecules, 8, **arguments)
    ours._told = True
    assert_same_epochs(ours, stock, epochs=3)
    assert iter(ours) is iter(ours)


def test_workers_that_someone_sets_up(molecules):
    arguments = {"num_workers": 1, "worker_init_fn": set_up_worker}
    ours, stock = pair(molecules, 8, packed=False, **arguments)
    assert_same_epochs(ours, stock, epochs=1)


def set_up_worker(number):
    torch.set_num_threads(1)


def add_one(data):
    data.z = data.x + 1
    return data


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms(workers):
    dataset = Molecules(transform=add_one)
    ours, stock = pair(dataset, 8, packed=False, shuffle=True, num_workers=workers)
    assert_same_epochs(ours, stock)
    packed = DataLoader(PackedDataset(dataset), 8, shuffle=True, num_workers=workers)
    assert_same_epochs(packed, stock)


def test_a_transform_that_is_set_later():
    dataset = Molecules()
    loaders = pair(dataset, 8)
    assert_same_epochs(*loaders)
    dataset.transform = add_one
    assert_same_epochs(*loaders)
    dataset.transform = None
    assert_same_epochs(*loaders)


def test_a_transform_that_is_set_under_persistent_workers():
    dataset = Molecules(6)
    loader = DataLoader(dataset, 8, num_workers=1, persistent_workers=True)
    loader._told = True
    assert "z" not in next(iter(loader))
    dataset.transform = add_one
    assert "z" in next(iter(loader))
    dataset.transform = None
    assert "z" not in next(iter(loader))


def test_a_data_set_that_is_written_to():
    dataset = Molecules()
    loaders = pair(dataset, 8)
    assert_same_epochs(*loaders)
    dataset._data.x[:] += 1
    assert_same_epochs(*loaders)
    dataset._data.y = torch.rand(50, 2)
    dataset._data_list = None
    assert_same_epochs(*loaders)
    dataset._data, dataset.slices = dataset.collate([dataset[i] for i in range(30)])
    dataset._data_list = None
    assert_same([b for b in loaders[0]], [b for b in StockLoader(dataset, 8)])


class Reader(Molecules):
    """Has a `get` of its own, which the storage knows nothing of."""

    def get(self, idx):
        data = super().get(idx)
        data.idx = idx
        return data


def test_a_data_set_that_reads_graphs_its_own_way():
    assert_same_epochs(*pair(Reader(), 8, packed=False))


def graphs_of(count=30):
    generator = torch.Generator().manual_seed(1)
    return [graph(generator, number) for number in range(count)]


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_graphs(kind, subset, prefetch):
    graphs = kind(graphs_of())
    graphs = Subset(graphs, [4, 8, -1, 9, 9]) if subset else graphs
    ours, stock = pair(graphs, 8, packed=False, shuffle=True, prefetch=prefetch)
    assert_same_epochs(ours, stock, epochs=3)
    assert ours._takes_packed_path()


def write(graphs):
    graphs[20].x += 1


def replace(graphs):
    graphs[20].x = graphs[20].x + 1


def add(graphs):
    for data in graphs:
        data.new = data.y + 1


def remove(graphs):
    for data in graphs:
        del data.edge_attr


def count(graphs):
    graphs[20].weight = 9.0


def swap(graphs):
    graphs[20] = graphs[21]


def follow_gradients(graphs):
    graphs[20].edge_attr.requires_grad_()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "change", [write, replace, add, remove, count, swap, follow_gradients]
)
def test_a_list_that_changes_in_mid_epoch(change, prefetch):
    found = []
    for kind in (StockLoader, DataLoader):
        graphs = graphs_of()
        more = {"prefetch": prefetch} if kind is DataLoader else {}
        loader = kind(graphs, 8, **more)
        batches = list(loader)
        for number, batch in enumerate(loader):
            batches.append(batch)
            if number == 1:
                change(graphs)
        batches += list(loader)
        found.append(batches)
    assert_same(found[1], found[0])
    # Who changes graphs once does so again.
    assert not loader._takes_packed_path()


def test_a_list_that_gets_what_could_change_unseen_before_it_is_packed():
    graphs = graphs_of()
    ours, stock = DataLoader(graphs, 8), StockLoader(graphs, 8)
    assert_same_epochs(ours, stock)
    for data in graphs:
        data.parts = {"a": torch.zeros(1)}
    assert_same_epochs(ours, stock)
    for data in graphs:
        data.parts["a"] += 1
    assert_same_epochs(ours, stock)


def test_a_list_of_graphs_of_both_kinds():
    generator = torch.Generator().manual_seed(0)
    both = [hetero_graph(generator, i) for i in range(4)]
    both += [graph(generator, i) for i in range(4)]
    for mixed in (both, both[::-1]):
        for one in mixed:
            one.pop("name", None)
        assert_same_epochs(*pair(mixed, 2, packed=False), epochs=2)


def test_a_stored_data_set_of_no_graphs():
    dataset = Molecules()
    dataset.data, dataset.slices = dataset.collate([Data(), Data()])
    assert dataset.len() == 0
    assert_same_epochs(*pair(dataset, 2, packed=False))


def test_a_list_whose_length_changes():
    graphs = graphs_of()
    ours, stock = DataLoader(graphs, 8), StockLoader(graphs, 8)
    assert_same_epochs(ours, stock)
    graphs += graphs_of(5)
    assert_same_epochs(ours, stock)
    del graphs[3:9]
    assert_same_epochs(ours, stock)


@pytest.mark.parametrize(
    "value", [[1, 2], {"a": 1}, np.zeros(3), torch.eye(2).to_sparse()]
)
def test_a_list_that_could_change_unseen(value):
    graphs = graphs_of()
    for data in graphs:
        data.value = value
    ours, stock = DataLoader(graphs, 8), StockLoader(graphs, 8)
    assert_same(len(list(ours)), len(list(stock)))
    assert not ours._takes_packed_path()


def test_a_list_under_workers():
    graphs = graphs_of()
    arguments = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    assert_same_epochs(*pair(graphs, 8, packed=False, **arguments), epochs=3)


def write_stored(dataset):
    dataset._data.x += 1


def give_memory(dataset):
    dataset._data.x.data = dataset._data.x + 1


def give_other_shape(dataset):
    dataset._data.weight.data = dataset._data.weight[:, None]


def follow_stored_gradients(dataset):
    dataset._data.edge_attr.requires_grad_()


def set_transform(dataset):
    dataset.transform = Named("seen")


class Named:
    def __init__(self, name):
        self.name = name

    def __call__(self, data):
        data.name = self.name
        return data


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    "change",
    [
        write_stored,
        give_memory,
        give_other_shape,
        follow_stored_gradients,
        set_transform,
    ],
)
def test_a_data_set_that_is_written_to_in_mid_epoch(change, prefetch):
    found = []
    for kind in (StockLoader, DataLoader):
        dataset = Molecules()
        more = {"prefetch": prefetch} if kind is DataLoader else {}
        batches = []
        for batch in kind(dataset, 4, **more):
            batches.append(batch)
            change(dataset)
        found.append(batches)
    assert_same(found[1], found[0])


def test_a_transform_that_is_set_on_a_pack_in_mid_epoch():
    found = []
    for kind, dataset in (
        (StockLoader, Molecules()),
        (DataLoader, PackedDataset(Molecules())),
    ):
        batches = []
        for batch in kind(dataset, 4):
            batches.append(batch)
            set_transform(dataset)
        found.append(batches)
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        [1.5, 2.5],
        ["a", "b"],
        [{"a": 1}, {"a": 2}],
        torch.arange(6).view(3, 2),
    ],
    ids=str,
)
def test_what_is_no_graph(values):
    assert_same(list(DataLoader(values, 2)), list(StockLoader(values, 2)))


def test_without_automatic_batching(molecules):
    sampler = [[1, 2], [5]]
    arguments = {"batch_size": None, "sampler": sampler}
    ours, stock = pair(molecules, packed=False, **arguments)
    assert_same(list(ours), list(stock))


def test_a_collate_fn_is_honoured(molecules):
    loader = DataLoader(molecules, 4, collate_fn=len)
    assert list(loader) == [4] * 12 + [2]
    loader = DataLoader(molecules, 4, collate_fn=Collater(molecules))
    assert loader._takes_packed_path()
    assert_same_epochs(loader, StockLoader(molecules, 4))


def test_loaders_can_be_pickled_and_copied(molecules):
    loader = DataLoader(molecules, 8, shuffle=True, follow_batch=["y"])
    list(loader)
    stock = StockLoader(molecules, 8, shuffle=True, follow_batch=["y"])
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert_same_epochs(twin, stock)
    assert_same_epochs(copy.copy(loader), stock)


def test_batches_survive_a_pickle_and_give_their_graphs(molecules):
    for batch in DataLoader(molecules, 8):
        assert_same(pickle.loads(pickle.dumps(batch)), batch)
        stock = Batch.from_data_list(batch.to_data_list())
        assert_same(batch.to_dict(), stock.to_dict())
        assert isinstance(batch.get_example(0), Data)


def test_length_and_attributes(molecules):
    ours, stock = pair(molecules, 8, drop_last=True)
    assert len(ours) == len(stock) == len(iter(ours))
    assert isinstance(ours, StockLoader)
    assert ours.follow_batch is None and ours.prefetch is None
    with pytest.raises(ValueError, match="prefetch"):
        DataLoader(molecules, prefetch=-1)


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_our_samplers(molecules, prefetch):
    def make():
        generator = torch.Generator().manual_seed(4)
        return BudgetBatchSampler(
            molecules, max_nodes=40, shuffle=True, generator=generator
        )

    expected = list(StockLoader(molecules, batch_sampler=make()))
    assert_same(
        list(DataLoader(molecules, batch_sampler=make(), prefetch=prefetch)), expected
    )


def test_our_samplers_stand_where_the_training_loop_does(molecules):
    """By default nothing is asked of them ahead of time."""
    sampler = BudgetBatchSampler(molecules, max_nodes=40)
    loader = DataLoader(molecules, batch_sampler=sampler)
    names = [batch.name for batch in loader]
    for number, _ in enumerate(loader):
        if number == 2:
            state = sampler.state_dict()
            break
    sampler.load_state_dict(state)
    assert [batch.name for batch in loader] == names[3:]
