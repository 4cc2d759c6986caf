"""Batch samplers: every graph once, never over budget, the same after a resume."""

import copy
import io
import warnings
from collections import Counter
from time import process_time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader

from gnnaccel.data import PackedDataset
from gnnaccel.data.samplers import BucketBatchSampler, BudgetBatchSampler, budget, plan
from gnnaccel.data.samplers.sizes import graph_sizes

KINDS = ("nodes", "edges", "bytes")
BOTH = pytest.mark.parametrize("cls", [BudgetBatchSampler, BucketBatchSampler])


class Sized:
    """A data set that knows its sizes and has no graphs: planning needs none."""

    def __init__(self, nodes, edges=None, size=None):
        edges = nodes if edges is None else edges
        self.sizes = dict(zip(KINDS, (nodes, edges, size or edges), strict=True))

    def __len__(self):
        return len(self.sizes["nodes"])

    def graph_sizes(self, kind):
        return self.sizes[kind]


class InMemory(InMemoryDataset):
    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self._data, self.slices = self.collate(graphs)


def graph(nodes, edges=None, **more):
    edges = 2 * nodes if edges is None else edges
    index = torch.randint(max(nodes, 1), (2, edges))
    return Data(x=torch.rand(nodes, 3), edge_index=index, **more)


def epoch_of(make, world_size):
    """The batches of each rank."""
    return [list(make(rank=rank, world_size=world_size)) for rank in range(world_size)]


# Every graph once, within every budget ------------------------------------------------


@st.composite
def problems(draw):
    n = draw(st.integers(0, 30))
    sizes = [draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)) for _ in KINDS]
    names = ("max_nodes", "max_edges", "max_bytes", "max_graphs")
    chosen = draw(st.sets(st.sampled_from(names), min_size=1))
    budgets = {name: draw(st.integers(1, 20)) for name in sorted(chosen)}
    return sizes, budgets


@BOTH
@given(
    problem=problems(),
    too_big=st.sampled_from(["alone", "skip"]),
    shuffle=st.booleans(),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_every_graph_once_and_within_budget(
    cls, problem, too_big, shuffle, world_size, seed
):
    (nodes, edges, size), budgets = problem
    dataset = Sized(nodes, edges, size)
    limits = {name[4:]: value for name, value in budgets.items()}
    max_graphs = limits.pop("graphs", 10**9)

    def fits(batch):
        return len(batch) <= max_graphs and all(
            sum(dataset.sizes[kind][i] for i in batch) <= limit
            for kind, limit in limits.items()
        )

    small = [i for i in range(len(dataset)) if fits([i])]
    expected = small if too_big == "skip" else list(range(len(dataset)))
    samplers = [
        cls(
            dataset,
            **budgets,
            too_big=too_big,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(seed),
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    lengths = {len(sampler) for sampler in samplers}
    assert len(lengths) == 1
    (length,) = lengths
    for epoch in range(3):
        if world_size > 1:
            for sampler in samplers:
                sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        assert [len(share) for share in shares] == [length] * world_size
        batches = [batch for share in shares for batch in share]
        assert all(batches)
        for batch in batches:
            assert fits(batch) or (len(batch) == 1 and batch[0] not in small)
        seen = Counter(i for batch in batches for i in batch)
        assert sorted(seen) == expected
        repeats = seen.total() - len(expected)
        # Only if not even one graph per batch would fill the steps.
        assert repeats == max(length * world_size - len(expected), 0)
    assert samplers[0].num_skipped == len(dataset) - len(expected)


def first_fit_in_order(sizes, limits, max_graphs):
    batches, sums = [], None
    for i, size in enumerate(zip(*sizes, strict=True)):
        new = size if sums is None else [a + b for a, b in zip(sums, size, strict=True)]
        over = any(a > b for a, b in zip(new, limits, strict=True))
        if sums is None or over or len(batches[-1]) == max_graphs:
            batches.append([])
            new = size
        batches[-1].append(i)
        sums = new
    return batches


@pytest.mark.parametrize("many", [0, plan.MANY, 10**9])
@given(problem=problems(), limit=st.integers(1, 20), most=st.integers(1, 9))
def test_batches_are_as_long_as_the_order_allows(
    many, problem, limit, most, monkeypatch
):
    monkeypatch.setattr(plan, "MANY", many)
    (nodes, edges, _), _ = problem
    sampler = BudgetBatchSampler(
        Sized(nodes, edges),
        max_nodes=limit,
        max_edges=9,
        max_graphs=most,
        too_big="alone",
    )
    assert list(sampler) == first_fit_in_order((nodes, edges), (limit, 9), most)


def test_too_big():
    graphs = [graph(n) for n in (2, 100, 3, 4)]
    skip = BudgetBatchSampler(graphs, max_nodes=5, too_big="skip")
    assert list(skip) == [[0, 2], [3]] and len(skip) == 2 and skip.num_skipped == 1
    alone = BudgetBatchSampler(graphs, max_nodes=5, too_big="alone")
    assert list(alone) == [[0], [1], [2], [3]] and len(alone) == 4
    assert alone.num_skipped == 0
    with pytest.raises(ValueError, match=r"Graph 1 has 100 nodes.*max_nodes=5.*skip"):
        BudgetBatchSampler(graphs, max_nodes=5)
    with pytest.raises(ValueError, match=r"Graph 0 has 4 edges.*; 4 graphs are too"):
        BudgetBatchSampler(graphs, max_nodes=100, max_edges=3)


def test_nothing_to_deal():
    assert list(BudgetBatchSampler([], max_nodes=5, world_size=3)) == []
    skipped = BucketBatchSampler(Sized([9, 9]), max_nodes=5, too_big="skip")
    assert list(skipped) == [] and len(skipped) == 0 and skipped.num_skipped == 2


@pytest.mark.parametrize("many", [0, 10**9])
def test_no_overflow_near_the_largest_integer(many, monkeypatch):
    monkeypatch.setattr(plan, "MANY", many)
    sampler = BudgetBatchSampler(Sized([2**59] * 5), max_nodes=2**70, max_graphs=2)
    assert list(sampler) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_halving_leaves_no_batch_empty(count):
    bounds = plan.split(np.array([0, 5, 6, 7]), count)
    assert len(bounds) == count + 1
    assert {0, 5, 6, 7} <= set(bounds.tolist()) and (np.diff(bounds) > 0).all()


# Length -------------------------------------------------------------------------------


@BOTH
def test_length_is_the_same_in_all_epochs_though_orders_differ(cls):
    nodes = torch.randint(1, 60, (300,)).tolist()
    sampler = cls(Sized(nodes), max_nodes=100, shuffle=True)
    needed = [
        len(sampler._cut(sampler._order(torch.Generator().manual_seed(seed))))
        for seed in range(40)
    ]
    assert len(set(needed)) > 1, "this test needs orders that differ"
    assert {len(list(sampler)) for _ in range(40)} == {len(sampler)}
    assert len(sampler) <= max(needed)


def test_where_no_drawn_order_is_short_enough_a_reference_serves(monkeypatch):
    monkeypatch.setattr(budget, "_TRIES", 0)
    nodes = torch.randint(1, 60, (50,)).tolist()
    sampler = BudgetBatchSampler(Sized(nodes), max_nodes=100, shuffle=True)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(50))


# Random order -------------------------------------------------------------------------


@BOTH
def test_same_seed_same_batches_and_each_epoch_another_order(cls):
    sampler = cls(Sized([1] * 64), max_nodes=4, shuffle=True)
    torch.manual_seed(5)
    first, second = list(sampler), list(sampler)
    assert first != second
    torch.manual_seed(5)
    assert [list(sampler), list(sampler)] == [first, second]
    one = cls(
        *(Sized([1] * 64),),
        max_nodes=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    other = cls(
        *(Sized([1] * 64),),
        max_nodes=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    torch.manual_seed(6)
    expected = list(one)
    assert list(other) == expected


def test_what_is_drawn_from_the_global_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sampler = BudgetBatchSampler(Sized([1] * 9), max_nodes=4, shuffle=True)
    len(sampler)
    list(BudgetBatchSampler(Sized([1] * 9), max_nodes=4))
    own = torch.Generator().manual_seed(1)
    list(BudgetBatchSampler(Sized([1] * 9), max_nodes=4, shuffle=True, generator=own))
    assert torch.equal(torch.get_rng_state(), before)
    list(sampler)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after), "more than one number was drawn"


def test_set_epoch():
    sampler = BudgetBatchSampler(Sized([1] * 64), max_nodes=4, shuffle=True)
    epochs = []
    for epoch in (0, 1, 0, 1):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[:2] == epochs[2:] and epochs[0] != epochs[1]
    torch.rand(9)
    assert list(sampler) == epochs[1]
    torch.manual_seed(99)
    assert list(sampler) != epochs[1]


def test_unshuffled_is_in_order():
    sampler = BudgetBatchSampler(Sized([1] * 10), max_nodes=4)
    sampler.set_epoch(3)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# Several ranks ------------------------------------------------------------------------


@BOTH
def test_ranks_agree_though_seeded_differently(cls):
    nodes = torch.randint(1, 30, (200,)).tolist()
    shares = []
    for rank in range(4):
        torch.manual_seed(rank)
        make = cls(Sized(nodes), max_nodes=60, shuffle=True, rank=rank, world_size=4)
        make.set_epoch(2)
        shares.append(list(make))
    assert len({len(share) for share in shares}) == 1
    dealt = sorted(i for share in shares for batch in share for i in batch)
    assert dealt == list(range(200))


def test_the_remainder_is_made_up_by_halves_not_by_repeats():
    def make(**kwargs):
        return BudgetBatchSampler(Sized([1] * 9), max_nodes=3, **kwargs)

    assert epoch_of(make, 2) == [[[0], [3, 4, 5]], [[1, 2], [6, 7, 8]]]


def test_fewer_graphs_than_batches_needed():
    def make(**kwargs):
        return BudgetBatchSampler(Sized([1] * 3), max_nodes=1, **kwargs)

    assert epoch_of(make, 2) == [[[0], [2]], [[1], [0]]]


def test_a_generator_decides_for_all_ranks():
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(
            BudgetBatchSampler(
                Sized([1] * 64),
                max_nodes=4,
                shuffle=True,
                generator=generator,
                world_size=2,
            )
        )

    assert make(1) == make(1) != make(2)


def test_forgotten_set_epoch_is_said_once():
    sampler = BudgetBatchSampler(
        Sized([1] * 8), max_nodes=4, shuffle=True, world_size=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(sampler))  # a look at the first batch is no epoch
        list(sampler)
        sampler.set_epoch(1)
        list(sampler)
    with pytest.warns(UserWarning, match="set_epoch"):
        list(sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler)


# Resume -------------------------------------------------------------------------------


def saved(state):
    """As out of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@BOTH
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_in_mid_epoch(cls, own_generator, world_size):
    nodes = torch.randint(1, 9, (40,)).tolist()

    def make():
        return cls(
            Sized(nodes),
            max_nodes=12,
            shuffle=True,
            generator=torch.Generator() if own_generator else None,
            rank=world_size - 1,
            world_size=world_size,
        )

    whole = make()
    for position in range(len(whole)):
        if world_size > 1:
            whole.set_epoch(position)
        batches = iter(whole)
        seen = [next(batches) for _ in range(position + 1)]
        state, random = saved(whole.state_dict()), torch.get_rng_state()
        rest = list(batches)
        assert rest not in (seen, []) or position in (0, len(whole) - 1)
        then = [] if world_size > 1 else list(whole)

        torch.manual_seed(position)
        resumed = make()
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole)
        assert resumed.state_dict()["running"]["position"] == position + 1
        torch.set_rng_state(random)
        assert list(resumed) == rest
        if world_size == 1:
            assert list(resumed) == then


def test_after_its_end_comes_a_new_epoch():
    sampler = BudgetBatchSampler(Sized([1] * 8), max_nodes=4, shuffle=True)
    batches = iter(sampler)
    taken = [next(batches), next(batches)]
    last_seen, _ = sampler.state_dict(), next(batches, None)
    ended = sampler.state_dict()
    sampler.load_state_dict(last_seen)
    assert list(sampler) == []
    assert len(list(sampler)) == 2
    sampler.load_state_dict(ended)
    fresh = list(sampler)
    assert len(fresh) == 2 and fresh != taken


def test_look_ahead_that_has_found_the_end():
    sampler = BudgetBatchSampler(Sized([1] * 12), max_nodes=4, shuffle=True)
    batches = list(sampler)
    state = sampler.state_dict(1)
    sampler.load_state_dict(state)
    assert list(sampler) == batches[1:]


def test_resume_knows_its_epoch():
    sampler = BudgetBatchSampler(Sized([1] * 32), max_nodes=4, shuffle=True)
    sampler.set_epoch(4)
    batches = iter(sampler)
    next(batches)
    state, rest = sampler.state_dict(), list(batches)
    # The order is in the state, whatever the seed of the new process.
    torch.manual_seed(77)
    sampler.load_state_dict(state)
    sampler.set_epoch(4)
    assert list(sampler) == rest
    sampler.load_state_dict(state)
    sampler.set_epoch(5)
    assert len(list(sampler)) == len(sampler)


def test_a_state_stays_what_it_was():
    sampler = BudgetBatchSampler(Sized([1] * 32), max_nodes=4, shuffle=True)
    batches = iter(sampler)
    next(batches)
    state = sampler.state_dict()
    before, rest = copy.deepcopy(state), list(batches)
    assert state == before
    sampler.load_state_dict(state)
    assert list(sampler) == rest and state == before


def test_state_before_the_first_epoch():
    sampler = BudgetBatchSampler(Sized([1] * 9), max_nodes=4)
    state = sampler.state_dict()
    list(sampler)
    sampler.load_state_dict(state)
    assert len(list(sampler)) == 3


@pytest.mark.parametrize(
    "other",
    [
        BudgetBatchSampler(Sized([1] * 9), max_nodes=3),
        BudgetBatchSampler(Sized([1] * 9), max_edges=4, max_graphs=4),
        BudgetBatchSampler(Sized([1] * 9), max_nodes=4, world_size=2),
        BudgetBatchSampler(Sized([1] * 9), max_nodes=4, shuffle=True),
        BudgetBatchSampler(Sized([1] * 8 + [2]), max_nodes=4),
    ],
)
def test_the_state_of_another_sampler_is_refused(other):
    sampler = BudgetBatchSampler(Sized([1] * 9), max_nodes=4)
    next(iter(sampler))
    with pytest.raises(ValueError, match="other graphs, budgets or ranks"):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="state_dict"):
        sampler.load_state_dict({"position": 3})


def test_two_iterators_do_not_disturb_each_other():
    sampler = BudgetBatchSampler(Sized([1] * 16), max_nodes=4)
    one, other = iter(sampler), iter(sampler)
    next(iter(sampler))
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) == 4 and all(a == b for a, b in pairs)


# In loaders ---------------------------------------------------------------------------


def numbers(items):
    return list(items)


@BOTH
@pytest.mark.parametrize("workers", [0, 2])
def test_in_loaders_resumed_under_look_ahead(cls, workers):
    graphs = [graph(n, number=i) for i, n in enumerate([3, 5, 2, 8, 4, 4, 6, 1] * 3)]

    def make():
        return cls(graphs, max_nodes=12, shuffle=True)

    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # every loader draws one for workers
    expected = list(make())
    for kind, seen_in in (
        (DataLoader, lambda batch: batch.number.tolist()),
        (torch.utils.data.DataLoader, lambda batch: [g.number for g in batch]),
    ):
        extra = {} if kind is DataLoader else {"collate_fn": numbers}
        sampler = make()
        loader = kind(graphs, batch_sampler=sampler, num_workers=workers, **extra)
        assert len(loader) == len(expected)
        torch.manual_seed(1)
        got, state = [], None
        for step, batch in enumerate(loader, 1):
            got.append(seen_in(batch))
            if step == 3:
                state = saved(sampler.state_dict(step))
                given = sampler.state_dict()["running"]["position"]
                assert (given > step) == (workers > 0), "no look-ahead to test"
        assert got == expected

        sampler = make()
        sampler.load_state_dict(state)
        loader = kind(graphs, batch_sampler=sampler, num_workers=workers, **extra)
        assert [seen_in(batch) for batch in loader] == expected[3:]
        assert len(list(loader)) == len(expected)


def test_more_batches_seen_than_given():
    sampler = BudgetBatchSampler(Sized([1] * 9), max_nodes=4)
    next(iter(sampler))
    with pytest.raises(ValueError, match=r"at most the 1 .*got 2"):
        sampler.state_dict(2)


# Buckets ------------------------------------------------------------------------------


def spread(sampler, nodes):
    return np.mean([np.ptp([nodes[i] for i in batch]) for batch in sampler])


def test_buckets_hold_graphs_of_like_size_in_random_company():
    nodes = torch.randint(1, 1001, (2000,)).tolist()
    dataset = Sized(nodes)
    sampler = BucketBatchSampler(dataset, max_graphs=16)
    mixed = BudgetBatchSampler(dataset, max_graphs=16, shuffle=True)
    assert sampler.buckets == 31
    assert spread(sampler, nodes) < 0.06 * spread(mixed, nodes)
    assert spread(BucketBatchSampler(dataset, max_graphs=16, buckets=4), nodes) < 300
    first, second = list(sampler), list(sampler)
    assert not {tuple(sorted(b)) for b in first} & {tuple(sorted(b)) for b in second}
    # Batches come in no order of size.
    means = [np.mean([nodes[i] for i in batch]) for batch in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_buckets_by_edges():
    edges = torch.randint(1, 1001, (500,)).tolist()
    dataset = Sized([1] * 500, edges)
    sampler = BucketBatchSampler(dataset, max_graphs=8, by="edges")
    by_nodes = BucketBatchSampler(dataset, max_graphs=8)
    assert spread(sampler, edges) < 0.3 * spread(by_nodes, edges)


def test_ranks_get_batches_of_like_size_in_the_same_step():
    nodes = torch.randint(1, 1001, (2048,)).tolist()

    def make(**kwargs):
        return BucketBatchSampler(Sized(nodes), max_graphs=16, **kwargs)

    for batches in zip(*epoch_of(make, 4), strict=True):
        assert np.ptp([np.mean([nodes[i] for i in b]) for b in batches]) < 100


def test_unshuffled_buckets():
    sampler = BucketBatchSampler(
        Sized([5, 1, 4, 2, 3, 6]), max_graphs=2, buckets=3, shuffle=False
    )
    assert list(sampler) == list(sampler) == [[1, 3], [2, 4], [0, 5]]


# Sizes --------------------------------------------------------------------------------


def schemas(number):
    """Graphs whose sizes PyG infers in different ways."""
    n, e = 1 + number % 4, number % 5
    index = torch.zeros(2, e, dtype=torch.long)
    hetero = HeteroData()
    hetero["a"].x = torch.rand(n, 2)
    hetero["b"].num_nodes = 2 * n
    hetero["b"].z = torch.rand(1)
    hetero["a", "to", "b"].edge_index = index
    hetero["b", "to", "a"].edge_index = index.repeat(1, 2)
    hetero.y = torch.rand(1)
    return {
        "plain": Data(x=torch.rand(n, 3), edge_index=index, y=0.5),
        "given": Data(x=torch.rand(n), num_nodes=n + 7),
        "only given": Data(
            num_nodes=n + 7, edge_index=index, edge_attr=torch.rand(e, 2)
        ),
        "position": Data(y=torch.rand(3), pos=torch.rand(n, 3), edge_index=index),
        "named": Data(my_node=torch.rand(n), my_edge=torch.rand(e, 2)),
        "inferred": Data(edge_index=index),
        "no edges": Data(x=torch.rand(n, 3), mask=torch.rand(n) > 0.5),
        "nested": Data(x=torch.rand(n), more={"a": torch.rand(n, 2), "b": 3}, z=[1, 2]),
        "lists": Data(x=torch.rand(n, 0), parts=[torch.rand(n), torch.rand(2)], s="s"),
        "array": Data(x=np.zeros((n, 2)), edge_index=index),
        "dense": Data(x=torch.rand(n), adj=torch.rand(n, n).to_sparse()),
        "numbers": Data(x=torch.rand(n, 1), i=number, f=1.5, b=True),
        "hetero": hetero,
    }


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("name", list(schemas(0)))
def test_sizes_are_what_pyg_says(name):
    graphs = [schemas(number)[name] for number in range(9)]
    dataset = InMemory(graphs)
    again = [dataset[i] for i in range(9)]
    expected = np.array(
        [[g.num_nodes for g in again], [g.num_edges for g in again]], dtype=np.int64
    )
    kinds = ("nodes", "edges")
    assert (graph_sizes(graphs, kinds) == expected).all()
    assert (graph_sizes(dataset, kinds) == expected).all()
    order = [7, 0, 3]
    assert (graph_sizes(dataset[order], kinds) == expected[:, order]).all()
    assert (graph_sizes(Subset(dataset, order), kinds) == expected[:, order]).all()
    packed = PackedDataset(graphs)
    assert (graph_sizes(packed[order], kinds) == expected[:, order]).all()
    both = graph_sizes(ConcatDataset([dataset, graphs]), kinds)
    assert (both == np.concatenate([expected, expected], axis=1)).all()
    assert (graph_sizes(dataset, ["bytes"]) == graph_sizes(again, ["bytes"])).all()
    assert (graph_sizes(dataset, ["bytes"]) == graph_sizes(graphs, ["bytes"])).all()


def test_slices_are_read_and_no_graph_is_built(monkeypatch):
    dataset = InMemory([graph(n) for n in (2, 5, 3)])
    monkeypatch.setattr(InMemoryDataset, "get", None)
    monkeypatch.setattr(InMemory, "get", InMemoryDataset.get)
    assert graph_sizes(dataset, KINDS).tolist() == [
        [2, 5, 3],
        [4, 10, 6],
        [2 * 12 + 64, 5 * 12 + 160, 3 * 12 + 96],
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_bytes():
    sparse = torch.eye(4).to_sparse()
    item = Data(x=torch.rand(3, 2), s=sparse, c=sparse.to_sparse_csr(), y=1.5)
    item.text, item.ints = "text", [1, 2]  # no batch makes tensors of these
    coo, csr = 2 * 4 * 8 + 4 * 4, 5 * 8 + 4 * 8 + 4 * 4
    assert graph_sizes([item], ["bytes"]).tolist() == [[3 * 2 * 4 + coo + csr + 4]]
    sampler = BudgetBatchSampler(
        [graph(2, 1), graph(3, 2), graph(1, 1)], max_bytes=24 + 16 + 36 + 32
    )
    assert list(sampler) == [[0, 1], [2]]


def test_a_transform_is_measured_and_leaves_no_trace():
    def grow(data):
        data.x = torch.rand(2 * data.num_nodes + int(torch.rand(1) * 0), 3)
        np.random.rand(2)
        return data

    dataset = InMemory([graph(n) for n in (2, 5, 3)], transform=grow)
    before, arrays = torch.get_rng_state(), np.random.get_state()[1].tolist()
    position = np.random.get_state()[2]
    assert graph_sizes(dataset, ["nodes"]).tolist() == [[4, 10, 6]]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == arrays
    assert np.random.get_state()[2] == position


def test_a_class_with_its_own_count_is_asked():
    class Pair(Data):
        @property
        def num_nodes(self):
            return 2 * self.x.size(0)

    graphs = [Pair(x=torch.rand(n, 1)) for n in (1, 2, 3)]
    assert graph_sizes(InMemory(graphs), ["nodes"]).tolist() == [[2, 4, 6]]


def test_a_data_set_may_leave_the_answer_to_its_graphs():
    class Silent(InMemory):
        def graph_sizes(self, kind):
            return None if kind == "nodes" else [7] * len(self)

    dataset = Silent([graph(n) for n in (2, 5)])
    assert graph_sizes(dataset, ["edges", "nodes"]).tolist() == [[7, 7], [2, 5]]


def test_pairs_count_together():
    pairs = [(graph(2), graph(3)), {"a": graph(4), "label": 1}]
    assert graph_sizes(pairs, ["nodes"]).tolist() == [[5, 4]]


def test_hetero_budgets_are_joint_over_types():
    items = [schemas(0)["hetero"] for _ in range(4)]  # 3 nodes each, of two types
    assert list(BudgetBatchSampler(items, max_nodes=6)) == [[0, 1], [2, 3]]
    items = [schemas(1)["hetero"] for _ in range(4)]  # 3 edges each, of two types
    assert list(BudgetBatchSampler(items, max_edges=8)) == [[0, 1], [2, 3]]


# Errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, error, text",
    [
        ({}, ValueError, "at least one of 'max_nodes'"),
        ({"max_nodes": 0}, ValueError, r"'max_nodes'.* at least 1 \(got 0\)"),
        ({"max_edges": -3}, ValueError, r"'max_edges'.*got -3"),
        ({"max_bytes": 1e9}, TypeError, r"'max_bytes'.*whole number.*got 1000000000"),
        ({"max_graphs": True}, TypeError, r"'max_graphs'.*got True"),
        ({"max_nodes": "9"}, TypeError, r"'max_nodes'.*got '9'"),
        ({"max_nodes": 9, "too_big": "drop"}, ValueError, r"too_big.*alone.*'drop'"),
        ({"max_nodes": 9, "too_big": True}, ValueError, r"too_big.*got True"),
        ({"max_nodes": 9, "rank": 2, "world_size": 2}, ValueError, "rank=2"),
        ({"max_nodes": 9, "rank": -1}, ValueError, r"'rank'.*got -1"),
        ({"max_nodes": 9, "world_size": 0}, ValueError, r"'world_size'.*got 0"),
        ({"max_nodes": 9, "generator": 12}, TypeError, r"Generator.*got 12"),
    ],
)
@BOTH
def test_bad_arguments(cls, kwargs, error, text):
    with pytest.raises(error, match=text):
        cls(Sized([1, 2]), **kwargs)


def test_bad_arguments_of_buckets_and_epochs():
    with pytest.raises(ValueError, match=r"'by'.*'size'"):
        BucketBatchSampler(Sized([1]), max_nodes=2, by="size")
    with pytest.raises(ValueError, match=r"'buckets'.*got 0"):
        BucketBatchSampler(Sized([1]), max_nodes=2, buckets=0)
    with pytest.raises(TypeError, match=r"'epoch'.*got 1\.5"):
        BudgetBatchSampler(Sized([1]), max_nodes=2).set_epoch(1.5)


def test_bad_data_sets():
    with pytest.raises(TypeError, match=r"with a length \(got generator\)"):
        BudgetBatchSampler((graph(n) for n in (1, 2)), max_nodes=2)
    with pytest.raises(TypeError, match=r"item 1 .* to be a graph.*got int"):
        BudgetBatchSampler([graph(1), 3], max_nodes=2)
    with (
        pytest.warns(UserWarning, match="Unable to accurately infer"),
        pytest.raises(ValueError, match=r"Graph 1 does not say.*'num_nodes'"),
    ):
        BudgetBatchSampler([graph(1), Data(y=torch.rand(1))], max_nodes=2)
    with pytest.raises(ValueError, match=r"each of 2 graphs \(got 1\)"):
        unequal = Sized([1, 2])
        unequal.sizes["edges"] = [1]
        BudgetBatchSampler(unequal, max_edges=2)


# Time ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("max_nodes", [6_400, 40])
def test_planning_takes_no_time_per_graph(cls, max_nodes):
    nodes = np.random.default_rng(0).integers(10, 41, 100_000)
    sampler = cls(Sized(nodes), max_nodes=max_nodes, shuffle=True)
    len(sampler)
    begin = process_time()
    for _ in range(3):
        next(iter(sampler))
    # A tenth of this on a quiet machine; a loop over graphs takes far more.
    assert process_time() - begin < 3 * 0.4
