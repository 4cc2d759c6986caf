"""Graphs of odd classes and odd storages batch as in PyG."""

import pytest
import torch
from same import assert_same
from torch_geometric.data import Batch, Data, InMemoryDataset

from gnnaccel.data import PackedDataset


class Defaults(Data):
    """Its constructor sets an attribute."""

    def __init__(self, a=None, **kwargs):
        super().__init__(**kwargs)
        self.a = torch.zeros(1) if a is None else a


class Demanding(Data):
    """Its constructor needs an argument."""

    def __init__(self, a, **kwargs):
        super().__init__(**kwargs)
        self.a = a


class Derived(Data):
    """Only another type."""


class Counted(Data):
    """Says itself how many nodes it has."""

    @property
    def num_nodes(self):
        return 10


def _edges(dtype=torch.int64):
    return torch.tensor([[0, 1], [1, 0]], dtype=dtype)


def _batch(n):
    return Batch.from_data_list([Data(x=torch.rand(2, 1), edge_index=_edges())] * n)


@pytest.mark.parametrize(
    "graphs",
    [
        [Defaults(torch.ones(i), x=torch.rand(i, 2)) for i in range(3)],
        [Demanding(torch.ones(i), x=torch.rand(i, 2)) for i in range(3)],
        [Counted(x=torch.rand(3, 1), edge_index=_edges()) for _ in range(3)],
        [
            Derived(x=torch.rand(2, 2)),
            Data(x=torch.rand(1, 2)),
            Data(x=torch.ones(1, 2)),
        ],
        [_batch(1), _batch(3), _batch(2)],
        [Data(num_nodes=torch.tensor(i + 2), edge_index=_edges()) for i in range(3)],
        [Data(x=torch.rand(2, 1), edge_index=_edges(torch.int32)) for _ in range(3)],
        [Data(x=torch.rand(2, 1), face=_edges()) for _ in range(3)],
    ],
    ids=[
        *("constructor sets", "constructor needs", "own num_nodes", "two classes"),
        *("batches", "tensor num_nodes", "int32", "face"),
    ],
)
def test_as_in_pyg(graphs):
    packed = PackedDataset(graphs)
    assert_same(graphs, [packed[i] for i in range(3)])
    for index in ([0, 1, 2], [2, 0], [1]):
        expected = Batch.from_data_list([graphs[i] for i in index])
        assert_same(expected, packed.batch(index))


class Stored(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__(None)
        self._data, self.slices = self.collate(graphs)


def test_a_storage_that_was_a_dictionary():
    dataset = Stored([Data(num_nodes=i + 2, edge_index=_edges()) for i in range(4)])
    dataset._data = Data.from_dict(dataset._data.to_dict())
    expected = Batch.from_data_list([dataset[i] for i in (3, 1)])
    assert_same(expected, PackedDataset(dataset).batch([3, 1]))


def test_a_storage_of_one_graph():
    dataset = Stored([Data(x=torch.rand(3, 2))])
    assert_same(Batch.from_data_list([dataset[0]]), PackedDataset(dataset).batch([0]))


def test_a_storage_written_by_an_old_pyg():
    dataset = Stored([Data(x=torch.rand(i, 2), n=i) for i in range(3)])
    dataset._data.num_nodes = [0, 1, 2]
    dataset.slices["num_nodes"] = torch.arange(4)
    expected = Batch.from_data_list([dataset[i] for i in (2, 1)])
    assert_same(expected, PackedDataset(dataset).batch([2, 1]))


def test_a_data_set_that_makes_its_graphs_otherwise():
    class Doubled(Stored):
        def get(self, idx):
            graph = super().get(idx)
            graph.x = graph.x * 2
            return graph

    dataset = Doubled([Data(x=torch.rand(i + 1, 2)) for i in range(3)])
    expected = Batch.from_data_list([dataset[i] for i in (2, 1)])
    assert_same(expected, PackedDataset(dataset).batch([2, 1]))
    assert_same(dataset[2], PackedDataset(dataset[1:])[1])
