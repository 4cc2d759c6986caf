"""From packed graphs to one batch, in three steps of which the middle needs no Python.

1. ``layout`` looks up how large each part of the batch is and where it goes.
2. ``fill`` copies the parts into the memory that the caller took for them (the slab).
3. ``assemble`` makes PyG's ``Batch`` out of views of the slab.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Batch

if TYPE_CHECKING:
    from gnnaccel.data.packed import PackedDataset


@dataclass(slots=True)
class Layout:
    """Where the parts of one batch go.

    Attributes:
        index: The graphs, int64 ``[B]``, as positions in the pack.
        nbytes: Size of the slab that holds what has a row per node, edge, ...
        small_nbytes: Size of the second slab, which holds what has a row per graph; 0
            where the batcher puts everything into one.
    """

    index: Tensor
    nbytes: int
    small_nbytes: int


class Batcher:
    """Makes batches of one data set with one choice of options.

    Args:
        packed: The graphs.
        follow_batch: Attributes that get a batch vector of their own.
        exclude_keys: Attributes that are left out.
        split: Whether what has one row per graph (``y`` and the like) gets a slab of
            its own, so that who keeps it does not keep the whole batch's memory.
    """

    def __init__(
        self,
        packed: PackedDataset,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        split: bool = True,
    ) -> None:
        self._packed = packed
        self._follow = list(follow_batch or ())
        self._exclude = list(exclude_keys or ())

    def layout(self, index: Tensor) -> Layout:
        """Plans the batch of some graphs.

        Args:
            index: Positions in the data set, int64 ``[B]`` on the CPU; negative ones
                count from the end.

        Raises:
            IndexError: A position is out of range, or there is none.
            KeyError: Some of the graphs lack an attribute that the others have.
        """
        return Layout(index, 64, 64)

    def native_args(
        self, layout: Layout, slab: Tensor, small: Tensor | None
    ) -> tuple[int, ...]:
        """The addresses and sizes that the native ``fill_batch`` takes.

        Who calls it keeps ``layout``, the slabs and this object alive meanwhile.
        """
        return ()

    def fill(
        self, layout: Layout, slab: Tensor, small: Tensor | None = None, threads: int = 0
    ) -> None:
        """Copies the graphs into the slabs; safe in any thread, without the GIL.

        Args:
            layout: Out of :meth:`layout` of this object.
            slab: uint8 ``[>= layout.nbytes]``, contiguous, aligned to 64 bytes.
            small: uint8 ``[>= layout.small_nbytes]``; may be ``None`` where that is 0.
            threads: 1 to stay in the calling thread, 0 for torch's pool where it pays.
        """

    def assemble(
        self, layout: Layout, slab: Tensor, small: Tensor | None = None
    ) -> Batch:
        """The batch whose tensors are views of the filled slabs."""
        graphs = [self._packed[i] for i in layout.index.tolist()]
        return Batch.from_data_list(graphs, self._follow, self._exclude)

    def __call__(self, index: Tensor) -> Batch:
        """All three steps, in memory that is taken for the batch."""
        layout = self.layout(index)
        slab = torch.empty(layout.nbytes, dtype=torch.uint8)
        small = torch.empty(layout.small_nbytes, dtype=torch.uint8)
        self.fill(layout, slab, small)
        return self.assemble(layout, slab, small)


def as_index(index: Any) -> Tensor:
    """``index`` as an int64 tensor ``[B]`` on the CPU."""
    return torch.as_tensor(index, dtype=torch.int64).reshape(-1)
