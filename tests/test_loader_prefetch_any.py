"""Any batch comes back equal, on its own memory, and what it came from stays."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from same import assert_same
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.typing import SparseTensor

from gnnaccel.data import PackedDataset
from gnnaccel.kernels import library
from gnnaccel.loader import DataLoader, PrefetchLoader
from gnnaccel.loader.prefetch import tree
from gnnaccel.loader.prefetch.plan import plan

Pair = namedtuple("Pair", ["x", "rest"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str
    more: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


class Mover:
    """Moves itself in place, as PyG's objects do."""

    def __init__(self, x):
        self.x = x

    def to(self, device, **arguments):
        self.x = self.x.to(device) + 1
        return self


class Own(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return 7 if key == "seven_index" else super().__inc__(key, value)


def graph(n=5):
    return Data(
        x=torch.rand(n, 3),
        edge_index=torch.randint(n, (2, 9)),
        y=torch.tensor(n),
        empty=torch.empty(0, 4),
        name="abc",
        more={"a": [torch.arange(n), 3], "b": (torch.rand(2, 2).t(), None)},
        array=np.arange(4),
    )


def hetero():
    data = HeteroData()
    data["a"].x = torch.rand(3, 2)
    data["b"].num_nodes = 4
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [2, 3]])
    data.y = torch.tensor([1.5])
    return data


def temporal():
    return TemporalData(
        src=torch.arange(4),
        dst=torch.arange(4) + 1,
        t=torch.arange(4),
        msg=torch.rand(4),
    )


def edge_index():
    out = EdgeIndex([[0, 1, 1, 2], [1, 0, 2, 1]], sparse_size=(3, 3), sort_order="row")
    out.validate().fill_cache_()
    return out


CASES = {
    "tensor": lambda: torch.rand(3),
    "data": graph,
    "own data": lambda: Own(x=torch.rand(2), seven_index=torch.arange(3)),
    "batch": lambda: Batch.from_data_list([graph(), graph(3)]),
    "hetero": hetero,
    "hetero batch": lambda: Batch.from_data_list([hetero(), hetero()]),
    "temporal": temporal,
    "packed": lambda: next(iter(DataLoader(PackedDataset([graph(), graph(4)] * 4), 4))),
    "sparse": lambda: SparseTensor.from_dense(torch.eye(4)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.rand(2), (2, 2)
    ),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "edge index": edge_index,
    "index": lambda: Index([0, 1, 1], dim_size=3, is_sorted=True),
    "tuple": lambda: (torch.rand(2), "a", 1, None),
    "named tuple": lambda: Pair(torch.rand(2), {"k": torch.rand(1)}),
    "list": lambda: [torch.rand(2), [torch.rand(1)]],
    "dict": lambda: {"a": torch.rand(2), 3: torch.rand(1), "t": ("x", 2)},
    "ordered": lambda: OrderedDict(a=torch.rand(2)),
    "python": lambda: {"a": 1, "b": ["c", (1.5, None)]},
    "transposed": lambda: torch.rand(3, 4).t(),
    "expanded": lambda: torch.rand(1, 4).expand(5, 4),
    "column": lambda: torch.rand(100, 50)[:, 3],
    "unaligned": lambda: torch.frombuffer(bytearray(33), dtype=torch.uint8)[1:],
    "bools": lambda: [torch.tensor([True, False]), torch.rand(3).half()],
    "none": lambda: None,
    "number": lambda: 3,
}


def crossed(batch, cast=None):
    """The batch as the pipeline would make it, out of a block of bytes."""
    flat = tree.flatten(batch, cast)
    layout = plan(flat.leaves)
    memory = torch.full((layout.nbytes + 64,), 0xA5, dtype=torch.uint8)
    layout.fill(memory)
    leaves = [view.of(memory) for view in layout.views]
    leaves = [
        leaf if view.cast is None else leaf.to(view.cast)
        for leaf, view in zip(leaves, layout.views, strict=True)
    ]
    guests = [tree.send(*guest, torch.device("cpu")) for guest in flat.guests]
    return flat.rebuild(leaves, guests)


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(library, "module", None)
    elif library.module is None:
        pytest.skip(library.reason)


@pytest.mark.parametrize("case", CASES)
def test_any_batch(case, way):
    if case == "sparse":
        pytest.importorskip("torch_sparse")
    batch = CASES[case]()
    sparse = isinstance(batch, torch.Tensor) and batch.layout is not torch.strided
    before = batch.clone() if sparse else copy.deepcopy(batch)
    out = crossed(batch)
    assert_same(out, batch)
    assert_same(batch, before)
    tensors = [leaf.tensor for leaf in tree.flatten(batch).leaves]
    moved = [leaf.tensor for leaf in tree.flatten(out).leaves]
    assert len(tensors) == len(moved)
    for old, new in zip(tensors, moved, strict=True):
        assert old.numel() == 0 or old.data_ptr() != new.data_ptr()
    if case in ("python", "none", "number"):
        assert out is batch


def test_other_containers(way):
    record = Record(torch.rand(3), "a", {"deep": torch.rand(1)})
    out = crossed(record)
    assert type(out) is Record and out.name == "a" and torch.equal(out.x, record.x)
    assert torch.equal(out.more["deep"], record.more["deep"])
    slotted = Slotted(torch.rand(3))
    assert torch.equal(crossed(slotted).x, slotted.x)
    tables = defaultdict(list, a=[torch.rand(1)])
    out = crossed(tables)
    assert out.default_factory is list and torch.equal(out["a"][0], tables["a"][0])
    user = UserDict(a=torch.rand(1))
    assert torch.equal(crossed(user)["a"], user["a"])


def test_objects_with_a_way_of_their_own(way):
    mover = Mover(torch.zeros(2))
    packed = torch.nn.utils.rnn.pack_sequence([torch.rand(3), torch.rand(2)])
    module = torch.nn.Linear(2, 2)
    leaf = torch.rand(2, requires_grad=True)
    out = crossed([mover, packed, module, leaf, torch.float32])
    assert out[0] is not mover and out[0].x.tolist() == [1, 1]
    assert mover.x.tolist() == [0, 0]
    assert torch.equal(out[1].data, packed.data)
    assert out[2] is module and out[4] is torch.float32
    assert out[3].requires_grad


def test_tensors_that_share_memory_share_it_still(way):
    base = torch.arange(40.0)
    rows = base.view(10, 4)
    batch = {"base": base, "rows": rows, "tail": base[30:], "again": base, "l": [base]}
    out = crossed(batch)
    assert out["again"] is out["base"] is out["l"][0]
    out["base"][31] = -1
    assert out["rows"][7, 3] == -1 and out["tail"][1] == -1
    assert base[31] == 31


def test_containers_that_come_twice_or_in_themselves(way):
    part = [torch.rand(2)]
    batch = {"a": part, "b": part}
    batch["self"] = batch
    out = crossed(batch)
    assert out["a"] is out["b"] and out["self"] is out and out is not batch
    assert torch.equal(out["a"][0], part[0])


def test_a_slab_is_one_piece(way):
    batch = CASES["packed"]()
    tensors = [leaf for leaf in tree.flatten(batch).leaves if leaf.tensor.numel()]
    layout = plan(tensors)
    assert len(layout.pieces) < len(tensors) / 2


def test_slices_of_a_large_tensor_do_not_take_it_along(way):
    whole = torch.arange(100_000.0)
    layout = plan(tree.flatten([whole[:10], whole[50_000:50_010]]).leaves)
    assert layout.nbytes < 1000
    wide = torch.rand(1000, 300)
    assert plan(tree.flatten([wide[:, 2], wide[:, 7]]).leaves).nbytes < 10_000


def test_casts(way):
    batch = {"x": torch.rand(5), "nest": {"x": torch.rand(2)}, "y": torch.arange(3)}
    out = crossed(batch, {"x": torch.float16, "y": torch.float64})
    assert out["x"].dtype is out["nest"]["x"].dtype is torch.float16
    assert torch.equal(out["x"], batch["x"].half())
    assert out["y"].dtype is torch.float64 and out["y"].tolist() == [0, 1, 2]
    flat = tree.flatten(batch, {"x": torch.float16, "y": torch.float64})
    # Fewer bytes cross: what shrinks has shrunk before, what grows has not grown.
    assert [v.dtype.itemsize for v in plan(flat.leaves).views] == [2, 2, 8]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", ["data", "hetero", "temporal", "tuple", "dict"])
def test_devices_without_streams(case, device):
    batch = CASES[case]()
    (out,) = PrefetchLoader([batch], device)
    assert (out is batch) == (device == "cpu")
    for leaf in (torch.rand(0), *_tensors(out)):
        assert leaf.device.type == device or leaf.numel() == 0
    for leaf in _tensors(batch):
        assert leaf.device.type == "cpu"


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "stores"):
        return [t for s in value.stores for v in s.values() for t in _tensors(v)]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple, type({}.values()))):
        return [t for v in value for t in _tensors(v)]
    return []


def test_casts_on_the_cpu():
    graphs = [graph() for _ in range(6)]
    for out, old in zip(
        PrefetchLoader(graphs, "cpu", cast={"x": torch.float64}), graphs, strict=True
    ):
        assert out.x.dtype is torch.float64 and old.x.dtype is torch.float32
        assert torch.equal(out.x, old.x.double())
