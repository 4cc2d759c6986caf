"""``PackedDataset``: many graphs as a few large tensors, ready to be batched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch_geometric.data import Batch, Dataset
from torch_geometric.data.data import BaseData

from gnnaccel.data.batcher import Batcher, Layout, as_index


class PackedDataset(Dataset):
    """Graphs packed once, so that a batch costs one copy of each attribute.

    It is a :class:`torch_geometric.data.Dataset`: indexing, slices, masks, ``shuffle``
    and splits work as there.

    Args:
        graphs: An ``InMemoryDataset`` (its storage is taken as it is, without a copy), a
            list of ``Data`` or ``HeteroData``, or any other data set.
        transform: Runs on each graph whenever it is asked for; by default the data
            set's own.
        pre: Runs the transform once, now, instead.
    """

    def __init__(
        self,
        graphs: Dataset | Sequence[BaseData],
        transform: Callable[[Any], Any] | None = None,
        pre: bool = False,
    ) -> None:
        super().__init__(transform=transform or getattr(graphs, "transform", None))
        self._source = graphs
        self._default: Batcher | None = None

    def len(self) -> int:
        """How many graphs are packed; ``len(self)`` is of the subset."""
        return len(self._source)

    def get(self, idx: int) -> BaseData:
        """The graph at a position in the pack, untransformed; views of the pack."""
        if isinstance(self._source, Dataset):
            return self._source.get(self._source.indices()[idx])
        return self._source[idx]

    def stale(self) -> bool:
        """Whether the data set's tensors were replaced or written to since packing.

        Only an ``InMemoryDataset``, whose storage is shared, can go stale; pack anew.
        """
        return False

    def batcher(
        self,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        split: bool = True,
    ) -> Batcher:
        """What makes batches of this data set; see :class:`Batcher`."""
        return Batcher(self, follow_batch, exclude_keys, split)

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

    def _batcher(self) -> Batcher:
        if self._default is None:
            self._default = self.batcher()
        return self._default
