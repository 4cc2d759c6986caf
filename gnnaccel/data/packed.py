"""``PackedDataset``: many graphs as a few large tensors, ready to be batched."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Dataset, InMemoryDataset
from torch_geometric.data.data import BaseData

from gnnaccel.data import disk
from gnnaccel.data.batcher import Batcher, Layout, as_index
from gnnaccel.data.flat import is_flat
from gnnaccel.data.pack import Marks, Pack


class PackedDataset(Dataset):
    """Graphs packed once, so that a batch costs one copy of each attribute.

    It is a :class:`torch_geometric.data.Dataset`: indexing, slices, masks, ``shuffle``
    and splits work as there.

    Args:
        graphs: An ``InMemoryDataset`` (its storage is taken as it is, without a copy),
            a list of ``Data`` or ``HeteroData``, or any other data set.
        transform: Runs on each graph whenever it is asked for; by default the data
            set's own.
        pre: Runs the transform once on each graph, now, instead.

    Raises:
        ValueError: There is no graph.
        TypeError: A graph is neither ``Data`` nor ``HeteroData``, or there are both.
    """

    def __init__(
        self,
        graphs: Dataset | Sequence[BaseData],
        transform: Callable[[Any], Any] | None = None,
        pre: bool = False,
    ) -> None:
        if isinstance(graphs, BaseData) or not hasattr(graphs, "__len__"):
            raise TypeError(
                "Expected a data set with a length, or a list of graphs "
                f"(got {type(graphs).__name__})"
            )
        own = getattr(graphs, "transform", None)
        transform = own if transform is None else transform
        super().__init__(transform=None if pre else transform)
        self._indices: Sequence[int] | None = None
        self._marks: Marks | None = None
        self._default: Batcher | None = None
        if isinstance(graphs, _Loaded):
            self._pack = graphs.pack
            return
        if isinstance(graphs, PackedDataset) and not pre:
            self._pack, self._indices = graphs._pack, graphs._indices
            self._marks = graphs._marks
            return
        if isinstance(graphs, InMemoryDataset) and is_flat(graphs) and not pre:
            self._pack = Pack.of_storage(graphs)
            self._indices = graphs._indices
            self._marks = Marks(graphs)
            return
        found = list(_shown(_untransformed(graphs), len(graphs)))
        if pre and transform is not None:
            found = [transform(graph) for graph in _shown(found, len(found))]
        self._pack = Pack.of_graphs(found)

    def len(self) -> int:
        """How many graphs are packed; ``len(self)`` is of the subset."""
        return self._pack.n

    def get(self, idx: int) -> BaseData:
        """The graph at a position in the pack, untransformed; views of the pack."""
        return self._pack.graph(range(self._pack.n)[idx])

    def stale(self) -> bool:
        """Whether the data set's tensors were replaced or written to since packing.

        Only an ``InMemoryDataset``, whose storage is shared, can go stale; pack anew.
        """
        return self._marks is not None and self._marks.changed()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the graphs of this data set (of a subset, only those) to one file.

        The transform is not written.
        """
        pack = self._pack
        if self._indices is not None:
            pack = Pack.of_graphs([pack.graph(i) for i in self.indices()])
        disk.save(pack, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
    ) -> PackedDataset:
        """Opens what :meth:`save` wrote, without reading it: it may exceed memory.

        Only open files that you trust: like PyG's own, they can name any Python class.

        Args:
            path: The file, which must stay as it is while the data set is in use.
            transform: As in the constructor.

        Raises:
            ValueError: It is no such file, or of another version.
        """
        return cls(_Loaded(disk.load(path)), transform)

    def batcher(
        self,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        split: bool = True,
    ) -> Batcher:
        """What makes batches of this data set; see :class:`Batcher`."""
        subset = None
        if self._indices is not None:
            subset = as_index(list(self._indices))
            subset = torch.where(subset < 0, subset + self._pack.n, subset)
        return Batcher(self._pack, subset, follow_batch, exclude_keys, split)

    def batch(self, index: Tensor | Sequence[int]) -> Batch:
        """The batch of some graphs (positions in this data set), untransformed."""
        return self._batcher()(as_index(index))

    def layout(self, index: Tensor) -> Layout:
        """:meth:`Batcher.layout` with no options."""
        return self._batcher().layout(index)

    def fill(self, layout: Layout, slab: Tensor, small: Tensor | None = None) -> None:
        """:meth:`Batcher.fill` with no options."""
        self._batcher().fill(layout, slab, small)

    def assemble(
        self, layout: Layout, slab: Tensor, small: Tensor | None = None
    ) -> Batch:
        """:meth:`Batcher.assemble` with no options."""
        return self._batcher().assemble(layout, slab, small)

    def index_select(self, idx: Any) -> PackedDataset:
        """As in any PyG data set; the subset shares the pack."""
        subset: PackedDataset = super().index_select(idx)
        subset._default = None
        return subset

    def _batcher(self) -> Batcher:
        if self._default is None:
            self._default = self.batcher()
        return self._default


class _Loaded(tuple[()]):
    """A pack that is there already, on its way into a data set."""

    pack: Pack

    def __new__(cls, pack: Pack) -> _Loaded:
        loaded = super().__new__(cls)
        loaded.pack = pack
        return loaded


def _untransformed(graphs: Any) -> Iterable[BaseData]:
    if isinstance(graphs, Dataset) and type(graphs).__getitem__ is Dataset.__getitem__:
        return (graphs.get(i) for i in graphs.indices())
    return (graphs[i] for i in range(len(graphs)))


def _shown(graphs: Iterable[BaseData], n: int) -> Iterable[BaseData]:
    """The same, with a progress bar where it takes long and a person watches."""
    if n < 1000:
        return graphs
    # PyG needs it, too, so it is there.
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    return tqdm(graphs, "Packing", n, leave=False, delay=2.0, disable=None)
