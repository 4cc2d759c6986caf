"""Batches over blocks of memory: what moves, what is kept alive, what is pickled."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from same import assert_same
from schemas import Maker
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, Data, HeteroData

from gnnaccel.data import PackedDataset


def _data(count=20):
    m = Maker(0)
    sizes = [m.number(1, 9) for _ in range(count)]
    return [
        Data(
            x=m.tensor(n, 30),
            edge_index=m.edges(n),
            y=m.tensor(1),
            d={"a": m.tensor(n)},
        )
        for n in sizes
    ]


def _hetero(count=20):
    m = Maker(0)
    graphs = []
    for _ in range(count):
        graph = HeteroData()
        graph["a"].x, graph["b"].x = m.tensor(5, 30), m.tensor(3, 40)
        graph["a", "to", "b"].edge_index = m.edges(5, 3)
        graphs.append(graph)
    return graphs


class Copies(TorchDispatchMode):
    """Counts the copies to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [_data, _hetero])
@pytest.mark.parametrize("split", [False, True])
def test_a_batch_crosses_as_one_block_for_each_slab(make, split):
    graphs = make()
    batch = PackedDataset(graphs).batcher(split=split)(torch.arange(20))
    expected = Batch.from_data_list(graphs).to("meta", non_blocking=True)
    with Copies() as copies:
        moved = batch.to("meta", non_blocking=True)
    assert copies.count == 1 + split
    assert moved is batch
    for a, b in zip(expected.stores, batch.stores, strict=True):
        assert list(a) == list(b)
        for name in a:
            if isinstance(a[name], torch.Tensor):
                assert b[name].device.type == "meta"
                assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype)


def test_moving_is_by_value_and_only_what_is_asked_for():
    graphs = _data()
    batch = PackedDataset(graphs).batch(torch.arange(20))
    before = batch.x
    assert batch.to("cpu").x is before
    batch.extra = torch.ones(3)
    batch.edge_index = batch.edge_index[:, 2:]
    batch.to("meta", "x")
    assert batch.x.device.type == "meta" and batch.edge_index.device.type == "cpu"
    batch.to("meta")
    assert batch.extra.device.type == batch.edge_index.device.type == "meta"
    assert batch.edge_index.is_contiguous()  # as torch copies what has gaps


def test_what_is_left_of_a_batch_crosses_alone():
    batch = PackedDataset(_data()).batcher(split=False)(torch.arange(20))
    del batch.x
    used = sum(v.nbytes for v in (batch.edge_index, batch.y, batch.batch, batch.ptr))
    with Copies() as copies:
        batch.to("meta")
    assert copies.count > 1 and used < 10_000


def test_gradients_flow_through_a_move():
    batch = PackedDataset(_data()).batch(torch.arange(20))
    x = batch.x.requires_grad_()
    batch.apply(lambda t: t.clone())
    assert batch.x.grad_fn is not None
    batch.x = x
    batch.to("cpu", non_blocking=True).x.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_y_does_not_keep_the_slab():
    packed = PackedDataset(_data())
    batch = packed.batch(torch.arange(20))
    slab = weakref.ref(batch.x.untyped_storage())
    y = batch.y
    assert y.untyped_storage().nbytes() < 1000
    del batch
    gc.collect()
    assert slab() is None


def test_values_are_independent_of_the_pack_and_of_each_other():
    graphs = _data()
    packed = PackedDataset(graphs)
    batch = packed.batch([0, 1])
    x, version = batch.x.clone(), batch.edge_index._version
    batch.x.add_(1)
    assert batch.edge_index._version == version
    assert batch.x._base is None and batch.x.is_contiguous()
    assert torch.equal(packed.batch([0, 1]).x, x)


@pytest.mark.parametrize("make", [_data, _hetero])
def test_pickles_are_those_of_pyg(make):
    graphs = make()
    packed = PackedDataset(graphs)
    batch, expected = packed.batch(range(20)), Batch.from_data_list(graphs)
    text, usual = pickle.dumps(batch), pickle.dumps(expected)
    assert b"gnnaccel" not in text
    assert len(text) < 1.2 * len(usual) + 500
    loaded = pickle.loads(text)
    assert_same(pickle.loads(usual), loaded)
    stores = zip(loaded.stores, expected.stores, strict=True)
    assert all(type(a) is type(b) for a, b in stores)
    for twin in (copy.copy(batch), copy.deepcopy(batch), batch.clone()):
        assert_same(expected, twin)
        twin.to("meta")
        assert_same(expected, batch)
