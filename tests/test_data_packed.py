"""PackedDataset: sources, indexing, what is raised, saving, and the three steps."""

import pickle

import pytest
import torch
from same import assert_same
from schemas import Maker
from torch_geometric.data import Batch, Data, Dataset, HeteroData, InMemoryDataset

from gnnaccel.data import PackedDataset


def _graphs(count=12):
    m = Maker(0)
    graphs = []
    for i in range(count):
        n = m.number(0, 6)
        graphs.append(
            Data(
                x=m.tensor(n, 3),
                edge_index=m.edges(n),
                y=m.tensor(1),
                name=f"graph {i}",
                nested={"a": m.tensor(n), "b": [m.tensor(n, 2)]},
            )
        )
    return graphs


class Stored(InMemoryDataset):
    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self._data, self.slices = self.collate(graphs)


class OneByOne(Dataset):
    """A data set that makes its graphs, as one on disk does."""

    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self.graphs = graphs

    def len(self):
        return len(self.graphs)

    def get(self, idx):
        return self.graphs[idx]


@pytest.mark.parametrize("source", [list, tuple, Stored, OneByOne, PackedDataset])
def test_every_source_gives_the_same_graphs_and_batches(source):
    graphs = _graphs()
    packed = PackedDataset(source(graphs))
    assert len(packed) == len(graphs)
    assert_same([packed[i] for i in range(12)], [source(graphs)[i] for i in range(12)])
    index = [3, 0, 0, -1]
    expected = Batch.from_data_list([graphs[i] for i in index])
    assert_same(expected, packed.batch(index))
    assert_same(expected, packed.batch(torch.tensor(index)))


def test_the_storage_of_a_data_set_is_not_copied():
    dataset = Stored(_graphs())
    packed = PackedDataset(dataset)
    address = dataset._data.x.data_ptr()
    end = address + dataset._data.x.nbytes
    assert address <= packed[11].x.data_ptr() <= end


def test_writes_to_the_storage_are_noticed():
    for change in (
        lambda d: d._data.x.add_(1),
        lambda d: setattr(d._data, "x", d._data.x.clone()),
        lambda d: d._data.__setattr__("new", torch.ones(3)),
        lambda d: d.slices.pop("y"),
        lambda d: d._data.x.requires_grad_(),
        lambda d: setattr(d._data.x, "data", d._data.x.clone()),
    ):
        dataset = Stored(_graphs())
        packed = PackedDataset(dataset)
        assert not packed.stale()
        change(dataset)
        assert packed.stale()
    assert not PackedDataset(_graphs()).stale()


def test_a_pack_is_sent_once():
    graphs = [Data(x=torch.full((100, 64), float(i))) for i in range(64)]
    dataset = Stored(graphs)
    sent = pickle.dumps(PackedDataset(dataset))
    assert len(sent) < 1.2 * dataset._data.x.nbytes
    dataset._data.x.zero_()
    again = pickle.loads(sent)
    assert not again.stale()
    assert_same(Batch.from_data_list(graphs), again.batch(range(64)))


def test_memory_that_moves():
    # What torch does to send a tensor to another process: the old memory is freed.
    graphs = [Data(x=torch.full((1000, 64), float(i))) for i in range(64)]
    dataset = Stored(graphs)
    packed = PackedDataset(dataset)
    index = torch.arange(0, 64, 3)
    stock = Batch.from_data_list([graphs[i] for i in index])
    assert_same(stock, packed.batch(index))
    layout = packed.layout(index)
    dataset._data.share_memory_()
    dataset.slices["x"].share_memory_()
    others = [torch.full_like(dataset._data.x, -1.0) for _ in range(2)]
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    small = torch.empty(layout.small_nbytes, dtype=torch.uint8)
    packed.fill(layout, slab, small)
    assert_same(stock, packed.assemble(layout, slab, small))
    assert_same(stock, packed.batch(index))
    assert not packed.stale()
    del others


@pytest.mark.parametrize(
    "pick",
    [
        slice(2, 7),
        slice(None, None, -2),
        slice(0.5),
        [4, -1],
        torch.tensor([1, 1, 5]),
        torch.arange(12) % 3 == 0,
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [True, False], ids=["subset packed", "pack subset"])
def test_subsets_are_those_of_pyg(pick, before):
    dataset = Stored(_graphs())
    if isinstance(pick, slice) and pick.step == -2:
        pick = list(range(12))[pick]
    subset = dataset[pick]
    packed = PackedDataset(subset) if before else PackedDataset(dataset)[pick]
    assert len(packed) == len(subset)
    graphs = [subset[i] for i in range(len(subset))]
    assert_same([packed[i] for i in range(len(packed))], graphs)
    expected = Batch.from_data_list([graphs[i] for i in (1, -1)])
    assert_same(expected, packed.batch([1, -1]))
    again = pickle.loads(pickle.dumps(packed))
    assert_same(expected, again.batch([1, -1]))
    assert_same(packed[1:][0], graphs[1])


def test_a_transform_runs_per_graph_or_once():
    calls = []

    def transform(graph):
        calls.append(graph)
        graph.extra = graph.x.sum(0, keepdim=True)
        return graph

    packed = PackedDataset(Stored(_graphs(), transform))
    assert not calls
    assert "extra" in packed[0] and "extra" in packed[0] and len(calls) == 2
    assert "extra" not in packed.batch([0])
    packed = PackedDataset(Stored(_graphs(), transform), pre=True)
    assert len(calls) == 14
    assert packed.transform is None
    assert packed.batch([0, 1]).extra.shape == (2, 3)
    assert len(calls) == 14


@pytest.mark.parametrize("subset", [False, True])
def test_saved_graphs_are_the_same(tmp_path, subset):
    graphs = _graphs()
    packed = PackedDataset(Stored(graphs))
    packed = packed[3:9] if subset else packed
    packed.save(tmp_path / "pack.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["pack.pt"]
    loaded = PackedDataset.load(tmp_path / "pack.pt")
    assert_same([packed[i] for i in range(6)], [loaded[i] for i in range(6)])
    assert_same(packed.batch([5, 1]), loaded.batch([5, 1]))
    (tmp_path / "no.pt").write_bytes(b"no")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt was not written by"):
        PackedDataset.load(tmp_path / "other.pt")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "pack.pt"
    PackedDataset(_graphs()).save(path)
    old = path.read_bytes()
    graphs = _graphs(2)
    for graph in graphs:
        graph.name = lambda: None  # which no pickle holds
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        PackedDataset(graphs).save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["pack.pt"]


@pytest.mark.parametrize("content", [b"", b"no pack", "half"])
def test_what_is_no_pack_is_named(content, tmp_path):
    path = tmp_path / "pack.pt"
    PackedDataset(_graphs()).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(ValueError, match="pack.pt was not written by"):
        PackedDataset.load(path)


@pytest.mark.parametrize("bad", [[1.5], [True, False], torch.ones(3), [1j]], ids=str)
def test_what_is_no_position(bad):
    with pytest.raises(TypeError, match="positions of graphs as integers"):
        PackedDataset(_graphs()).batch(bad)


def test_a_number_that_no_tensor_holds():
    graphs = [Data(x=torch.ones(2, 1), y=2**i) for i in (3, 62, 63, 70)]
    packed = PackedDataset(graphs)
    assert [graph.y for graph in packed] == [graph.y for graph in graphs]
    assert_same(Batch.from_data_list(graphs[:2]), packed.batch([0, 1]))


@pytest.mark.parametrize("bad", [12, -13, 2**40])
def test_a_position_out_of_range_is_named(bad):
    with pytest.raises(IndexError, match=rf"from -12 to 11 \(got {bad}\)"):
        PackedDataset(_graphs()).batch([0, bad])


def test_no_graph():
    with pytest.raises(IndexError, match="at least one graph"):
        PackedDataset(_graphs()).batch([])
    with pytest.raises(ValueError, match="at least one graph"):
        PackedDataset([])
    with pytest.raises(TypeError, match=r"Data or HeteroData \(got builtins\.int\)"):
        PackedDataset([3])
    for none in (_graphs()[0], iter(_graphs())):
        with pytest.raises(TypeError, match="a data set with a length"):
            PackedDataset(none)
    with pytest.raises(TypeError, match="both Data and HeteroData"):
        PackedDataset([*_graphs(), HeteroData()])


@pytest.mark.parametrize("lacking", [0, 3])
def test_a_key_that_some_graphs_lack_is_named(lacking):
    graphs = _graphs()
    del graphs[lacking].y
    packed = PackedDataset(graphs)
    for index in ([0, 3, 5], [5, 3, 0]):
        with pytest.raises(KeyError, match=f"Graph {lacking} .*'y'.*exclude_keys"):
            packed.batch(index)
    others = [5, 6, 7]
    assert_same(Batch.from_data_list([graphs[i] for i in others]), packed.batch(others))
    alone = [lacking]
    assert_same(Batch.from_data_list([graphs[lacking]]), packed.batch(alone))
    index = torch.tensor([0, 3, 5])
    expected = Batch.from_data_list([graphs[i] for i in index], exclude_keys=["y"])
    assert_same(expected, packed.batcher(exclude_keys=["y"])(index))
    with pytest.raises(KeyError, match="Graph 1 "):
        packed[[5, lacking]].batch([0, 1])


def test_types_that_the_first_graph_lacks_are_not_lost():
    first, second = HeteroData(), HeteroData()
    first["author"].x = torch.ones(2, 3)
    second["author"].x = torch.zeros(1, 3)
    second["venue"].x = torch.ones(4, 3)
    second["author", "at", "venue"].edge_index = torch.tensor([[0, 0], [1, 3]])
    for graphs, authors, places in (
        ([first, second], [[2, 2], [1, 3]], [0, 0, 4]),
        ([second, first], [[0, 0], [1, 3]], [0, 4, 4]),
    ):
        batch = PackedDataset(graphs).batch([0, 1])
        assert batch["venue"].x.shape == (4, 3)
        assert batch["venue"].ptr.tolist() == places
        assert batch["author", "at", "venue"].edge_index.tolist() == authors
        parts = batch.to_data_list()
        for part, graph in zip(parts, graphs, strict=True):
            for store in graph.stores:
                assert_same(
                    dict(store), dict(part[store._key]) if store._key else dict(store)
                )


def test_fill_writes_every_byte_that_counts_and_none_beyond(monkeypatch):
    packed = PackedDataset(_graphs())
    index = torch.arange(12)
    expected = Batch.from_data_list([packed[i] for i in range(12)])
    for split in (True, False):
        batcher = packed.batcher(split=split)
        layout = batcher.layout(index)
        assert (layout.small_nbytes > 0) is split
        for threads in (0, 1):
            slabs = [
                torch.full((size + 64,), 0xAB, dtype=torch.uint8)
                for size in (layout.nbytes, layout.small_nbytes)
            ]
            batcher.fill(layout, *slabs, threads=threads)
            assert_same(expected, batcher.assemble(layout, *slabs))
            for slab, size in zip(
                slabs, (layout.nbytes, layout.small_nbytes), strict=True
            ):
                assert (slab[size:] == 0xAB).all()


def test_a_large_batch_is_cut_for_threads():
    m = Maker(1)
    graphs = [
        Data(x=m.tensor(4000, 32), edge_index=m.tensor(2, 3000, dtype=torch.int64))
        for _ in range(21)
    ]
    packed = PackedDataset(graphs)
    assert_same(Batch.from_data_list(graphs), packed.batch(torch.arange(21)))
