"""Random schemas: packed batches are PyG's own to everyone who looks."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from same import assert_same, outcome
from schemas import data_lists, hetero_lists
from torch_geometric.data import Batch, InMemoryDataset

from gnnaccel.data import PackedDataset
from gnnaccel.kernels import library

_FUZZ = settings(suppress_health_check=list(HealthCheck))


class Stored(InMemoryDataset):
    """The graphs as PyG stores a data set."""

    def __init__(self, graphs):
        super().__init__(None)
        self._data, self.slices = self.collate(graphs)


@pytest.fixture(params=["native", "torch"], autouse=True)
def _both_copies(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(library, "module", None)
    elif library.module is None:
        pytest.skip(library.reason)


@pytest.fixture(autouse=True)
def _quiet():
    # PyG warns of graphs that don't say how many nodes they have, once per place.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _index(draw, n):
    return draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))


def _names(graph):
    return sorted({name for store in graph.stores for name in store.keys()})


def check(draw, graphs):
    """Batches through the pack and through PyG, and all that they offer."""
    n = len(graphs)
    index = _index(draw, n)
    follow = draw(st.lists(st.sampled_from(_names(graphs[0])), max_size=2))
    exclude = draw(st.lists(st.sampled_from(_names(graphs[0])), max_size=1))
    packed = PackedDataset(graphs)
    batcher = packed.batcher(follow, exclude, split=draw(st.booleans()))
    drawn = [graphs[i] for i in index]
    expected, error = outcome(lambda: Batch.from_data_list(drawn, follow, exclude))
    if error is not None:
        event("PyG raises")
        with pytest.raises(type(error)):
            batcher(torch.tensor(index))
        return
    batch = batcher(torch.tensor(index))
    assert_same(expected, batch)
    assert_same(_graphs_of(graphs), [packed[i] for i in range(n)])
    _check_uses(expected, batch)


def _graphs_of(graphs):
    return [graphs[i] for i in range(len(graphs))]


def _check_uses(expected, batch):
    assert expected.num_graphs == batch.num_graphs
    assert_same(
        outcome(lambda: expected.num_nodes)[0], outcome(lambda: batch.num_nodes)[0]
    )
    parts, error = outcome(expected.to_data_list)
    if error is None:
        assert_same(parts, batch.to_data_list())
        assert_same(expected.get_example(0), batch.get_example(0))
        assert_same(expected[-1:], batch[-1:])
    else:
        with pytest.raises(type(error)):
            batch.to_data_list()
    assert_same(copy.copy(expected), copy.copy(batch))
    deep, error = outcome(lambda: copy.deepcopy(expected))
    if error is None:
        assert_same(deep, copy.deepcopy(batch))
    data, error = outcome(lambda: pickle.dumps(expected))
    if error is None:
        assert_same(pickle.loads(data), pickle.loads(pickle.dumps(batch)))
        saved = io.BytesIO()
        torch.save(batch, saved)
        saved.seek(0)
        assert_same(pickle.loads(data), torch.load(saved, weights_only=False))


@_FUZZ
@given(st.data())
def test_a_list_of_data(data):
    check(data.draw, data.draw(data_lists()))


@_FUZZ
@given(st.data())
def test_a_list_of_hetero_data(data):
    check(data.draw, data.draw(hetero_lists()))


@_FUZZ
@given(st.data())
def test_a_stored_data_set(data):
    graphs = data.draw(st.one_of(data_lists(), hetero_lists()))
    dataset, error = outcome(lambda: Stored(graphs))
    if error is None:
        # Some schemas PyG stores, and can't give back.
        _, error = outcome(lambda: _graphs_of(dataset))
    if error is not None:
        event("PyG can't store it")
        return
    check(data.draw, dataset)


@_FUZZ
@given(st.data())
def test_graphs_without_some_types_take_part_with_no_rows(data):
    graphs = data.draw(hetero_lists(absent=True))
    index = _index(data.draw, len(graphs))
    batch = PackedDataset(graphs).batch(index)
    drawn = [graphs[i] for i in index]
    # The same graphs, with what they lack in it, and empty.
    types = {s._key: s for graph in drawn for s in graph.stores if s._key is not None}
    filled = []
    for graph in drawn:
        whole = type(graph)()
        whole._global_store._mapping.update(graph._global_store._mapping)
        for node in [s._key for s in batch.node_stores] + [
            s._key for s in batch.edge_stores
        ]:
            present = {s._key: s for s in graph.stores}.get(node)
            for name, value in types[node].items():
                if present is not None:
                    whole[node][name] = present[name]
                elif name == "num_nodes":
                    whole[node][name] = 0
                else:
                    dim = whole.__cat_dim__(name, value, whole[node])
                    whole[node][name] = value.narrow(dim, 0, 0)
        filled.append(whole)
    assert set(types) == {s._key for s in batch.stores} - {None}
    expected, error = outcome(lambda: Batch.from_data_list(filled))
    if error is None:
        assert_same(expected, batch)
