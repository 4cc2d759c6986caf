"""Whether two graphs, batches or values are the same to everyone who looks."""

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import (
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
)
from torch_geometric.typing import SparseTensor

_STORAGES = (GlobalStorage, NodeStorage, EdgeStorage, BaseStorage)


def assert_same(a, b, where="value"):
    """``a`` and ``b`` agree in type, order, dtype, shape and every number."""
    assert type(a) is type(b), f"{where}: {type(a)} != {type(b)}"
    if isinstance(a, BaseData):
        _assert_same_graphs(a, b, where)
    elif isinstance(a, Tensor):
        _assert_same_tensors(a, b, where)
    elif isinstance(a, SparseTensor):
        assert a.sizes() == b.sizes(), where
        for x, y in zip(a.coo(), b.coo(), strict=True):
            assert_same(x, y, where)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        np.testing.assert_array_equal(a, b, err_msg=where)
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {list(a)} != {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} != {len(b)} items"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a!r} != {b!r}"


def _assert_same_tensors(a, b, where):
    assert a.dtype is b.dtype, f"{where}: {a.dtype} != {b.dtype}"
    assert a.shape == b.shape, f"{where}: {tuple(a.shape)} != {tuple(b.shape)}"
    assert a.layout is b.layout and a.device == b.device, where
    assert a.requires_grad == b.requires_grad, where
    if isinstance(a, EdgeIndex):
        assert a.sparse_size() == b.sparse_size(), where
        assert a.sort_order == b.sort_order, where
        assert a.is_undirected == b.is_undirected, where
        a, b = a.as_tensor(), b.as_tensor()
    elif isinstance(a, Index):
        assert (a.dim_size, a.is_sorted) == (b.dim_size, b.is_sorted), where
        a, b = a.as_tensor(), b.as_tensor()
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    same = torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    assert same, f"{where}: {a} != {b}"


def _assert_same_graphs(a, b, where):
    assert [s._key for s in a.stores] == [s._key for s in b.stores], where
    for x, y in zip(a.stores, b.stores, strict=True):
        name = where if x._key is None else f"{where}[{x._key!r}]"
        kinds = [next(k for k in _STORAGES if isinstance(s, k)) for s in (x, y)]
        assert kinds[0] is kinds[1], name
        assert x._parent() is a and y._parent() is b, name
        assert_same(dict(x._mapping), dict(y._mapping), name)
        assert_same(_hidden(x), _hidden(y), f"{name}.__dict__")
    if isinstance(b, Batch):
        assert a.num_graphs == b.num_graphs, where
        assert_same(a._slice_dict, b._slice_dict, f"{where} slices")
        assert_same(a._inc_dict, b._inc_dict, f"{where} increments")


def _hidden(store):
    """What a storage knows besides its attributes."""
    skipped = ("_mapping", "_parent", "_cached_attr", "_blocks")
    return {k: v for k, v in sorted(store.__dict__.items()) if k not in skipped}


def outcome(make):
    """What ``make()`` returns, or what it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error
