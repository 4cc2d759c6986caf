"""The containers that a batch may be made of: their parts, and how to remake them.

Nothing is changed in place: a container with other parts is another object, for the
first may be the user's data set itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import SparseTensor

Parts = list[tuple[str | None, Any]]


class Kind(Protocol):
    """One kind of container."""

    def parts(self, value: Any) -> Parts:
        """Its parts, in order, each with its name if it has one."""

    def shell(self, value: Any) -> Any:
        """A copy to be filled; None if it can't be made before its parts are."""

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        """What ``value`` would be with these parts."""


class _Mapping:
    def parts(self, value: Any) -> Parts:
        return [(k if isinstance(k, str) else None, v) for k, v in value.items()]

    def shell(self, value: Any) -> Any:
        return copy.copy(value)

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        for key, part in zip(value, parts, strict=True):
            shell[key] = part
        return shell


class _List:
    def parts(self, value: Any) -> Parts:
        return [(None, part) for part in value]

    def shell(self, value: Any) -> Any:
        return copy.copy(value)

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        shell[:] = parts
        return shell


class _Tuple:
    def parts(self, value: Any) -> Parts:
        names = getattr(value, "_fields", None) or [None] * len(value)
        return list(zip(names, value, strict=True))

    def shell(self, value: Any) -> Any:
        return None

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        make = getattr(type(value), "_make", type(value))
        return make(parts)


class _Dataclass:
    def parts(self, value: Any) -> Parts:
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]

    def shell(self, value: Any) -> Any:
        return copy.copy(value)

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        for (name, _), part in zip(self.parts(value), parts, strict=True):
            object.__setattr__(shell, str(name), part)  # a frozen one, too
        return shell


class _Graph:
    """``Data``, ``HeteroData``, ``TemporalData`` and their batches."""

    def parts(self, value: Any) -> Parts:
        return [item for store in value.stores for item in store._mapping.items()]

    def shell(self, value: Any) -> Any:
        return copy.copy(value)

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        left = iter(parts)
        for store in shell.stores:
            # Where its tensors lay; they lie somewhere else now.
            store.__dict__.pop("_blocks", None)
            for key in store._mapping:
                store._mapping[key] = next(left)
        return shell


_SPARSE_PARTS = (
    *("row", "rowptr", "col", "value"),
    *("rowcount", "colptr", "colcount", "csr2csc", "csc2csr"),
)


class _TorchSparse:
    """torch-sparse's ``SparseTensor``, with all that it has cached."""

    def parts(self, value: Any) -> Parts:
        return [(None, getattr(value.storage, f"_{name}")) for name in _SPARSE_PARTS]

    def shell(self, value: Any) -> Any:
        return None

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        out = copy.copy(value)
        out.storage = type(value.storage)(
            **dict(zip(_SPARSE_PARTS, parts, strict=True)),
            sparse_sizes=value.storage._sparse_sizes,
            is_sorted=True,
            trust_data=True,
        )
        return out


class _Coo:
    def parts(self, value: Any) -> Parts:
        return [(None, value._indices()), (None, value._values())]

    def shell(self, value: Any) -> Any:
        return None

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        return torch.sparse_coo_tensor(
            parts[0],
            parts[1],
            value.shape,
            is_coalesced=value.is_coalesced(),
            check_invariants=False,
        )


class _Compressed:
    """CSR, CSC, BSR and BSC."""

    def parts(self, value: Any) -> Parts:
        by_row = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        starts = value.crow_indices() if by_row else value.ccol_indices()
        others = value.col_indices() if by_row else value.row_indices()
        return [(None, starts), (None, others), (None, value.values())]

    def shell(self, value: Any) -> Any:
        return None

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        return torch.sparse_compressed_tensor(
            parts[0],
            parts[1],
            parts[2],
            value.shape,
            layout=value.layout,
            check_invariants=False,
        )


class _Wrapper:
    """Tensors made of others, such as PyG's ``EdgeIndex`` and ``Index``."""

    def parts(self, value: Any) -> Parts:
        names, _ = value.__tensor_flatten__()
        return [(None, getattr(value, name)) for name in names]

    def shell(self, value: Any) -> Any:
        return None

    def filled(self, value: Any, shell: Any, parts: list[Any]) -> Any:
        names, context = value.__tensor_flatten__()
        inner = dict(zip(names, parts, strict=True))
        return type(value).__tensor_unflatten__(
            inner, context, value.shape, value.stride()
        )


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def kind_of(value: Any) -> Kind | None:
    """How to take ``value`` apart; None for what is no container that we know."""
    if isinstance(value, Tensor):
        return _kind_of_tensor(value)
    found = _BY_TYPE.get(type(value))
    if found is not None:
        return found
    # Who brings a `to` of their own is asked to use it.
    if callable(getattr(value, "to", None)) and not _moves_as_pyg(value):
        return None
    for base, kind in _BY_BASE:
        if isinstance(value, base):
            return kind
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Dataclass()
    return None


def _kind_of_tensor(value: Tensor) -> Kind | None:
    if value.requires_grad or value.is_nested:
        return None
    if type(value) is Tensor:
        if value.layout is torch.sparse_coo:
            return _Coo()
        return _Compressed() if value.layout in _COMPRESSED else None
    return _Wrapper() if hasattr(value, "__tensor_flatten__") else None


def _moves_as_pyg(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, BaseData):
        return kind.to is BaseData.to and kind.apply is BaseData.apply
    if isinstance(value, BaseStorage):
        return False
    return isinstance(value, SparseTensor)


_BY_TYPE: dict[type, Kind] = {dict: _Mapping(), list: _List(), tuple: _Tuple()}
_BY_BASE: tuple[tuple[type, Kind], ...] = (
    (BaseData, _Graph()),
    (SparseTensor, _TorchSparse()),
    (MutableMapping, _Mapping()),
    (dict, _Mapping()),
    (list, _List()),
    (tuple, _Tuple()),
)
