"""Whether and when a loader's data set is packed, and the pack that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.data import Dataset, InMemoryDataset

from gnnaccel.data import PackedDataset
from gnnaccel.loader.lists import PackedList, survey

#: Whether the graphs at some positions [B] are still what was packed.
Current = Callable[[Tensor], bool]

# What decides which graph an index stands for: a class that has its own of these is
# asked graph by graph.
_READERS = ("__getitem__", "__len__", "get", "indices", "len")


class Packer:
    """Packs the data set of one loader, when it pays.

    An ``InMemoryDataset`` is packed at once, for nothing is copied. A list is copied:
    only for its second epoch, and not again once it was found changed. Graphs of
    several kinds, of which PyG's own path would drop a part, are packed at once.
    """

    def __init__(self) -> None:
        self._state: tuple[Any, ...] = ()
        self._packed: PackedDataset | None = None
        self._list: PackedList | None = None
        self._epochs = 0
        self._changed = False
        self._survey = (False, False)

    def serves(self, dataset: Any, lists: bool = True) -> bool:
        """Whether the next epoch's graphs come out of a pack.

        Args:
            dataset: Under any ``Subset``.
            lists: Whether a list may do so.
        """
        for base in (PackedDataset, InMemoryDataset):
            if isinstance(dataset, base):
                empty = dataset.len() == 0
                return (
                    not empty
                    and dataset.transform is None
                    and _reads_like(dataset, base)
                )
        if not lists or type(dataset) not in (list, tuple) or not dataset:
            return False
        if self._list is not None and not self._list.complete():
            self._list = None
        if self._list is None and not self._changed:
            # In each epoch until it is packed: it may have got what can't be.
            self._survey = survey(dataset)
        packable, uniform = self._survey
        return packable and not self._changed and (self._epochs > 0 or not uniform)

    def went_stock(self) -> None:
        """Notes that an epoch went PyG's own way."""
        self._epochs += 1

    def pack(self, dataset: Any) -> tuple[PackedDataset, Current]:
        """The pack of a data set that is served, made anew where that has changed."""
        if isinstance(dataset, PackedDataset):
            return dataset, lambda positions: dataset.transform is None
        if not isinstance(dataset, InMemoryDataset):
            return self._pack_list(dataset)
        # A subset is told by its indices, which the storage knows nothing of.
        state = (dataset, dataset._data, dataset.slices, dataset._indices)
        known = len(self._state) == len(state) and all(
            map(lambda a, b: a is b, self._state, state)
        )
        if self._packed is None or not known or self._packed.stale():
            self._packed, self._state = PackedDataset(dataset), state
        packed = self._packed

        def unwritten(positions: Tensor) -> bool:
            return dataset.transform is None and not packed.stale()

        return packed, unwritten

    def _pack_list(self, graphs: Any) -> tuple[PackedDataset, Current]:
        if self._list is None:
            self._list = PackedList(graphs)
        watched = self._list

        def current(positions: Tensor) -> bool:
            if watched.unchanged(positions):
                return True
            # Who changes graphs once does it again: another pack would not last.
            self._changed, self._list = True, None
            return False

        return watched.packed, current


def _reads_like(dataset: Dataset, base: type) -> bool:
    own, kind = vars(dataset), type(dataset)
    return not any(
        name in own or getattr(kind, name) is not getattr(base, name)
        for name in _READERS
    )
