"""``DataLoader``: PyG's, with batches that cost one copy of each attribute."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader as StockLoader
from torch_geometric.loader.dataloader import Collater

from gnnaccel.loader import indices, lookahead
from gnnaccel.loader.iterator import PackedIterator, Source
from gnnaccel.loader.packer import Packer
from gnnaccel.loader.slabs import Slabs


class DataLoader(StockLoader):
    """Merges graphs to batches like PyG's loader, each of them with a single copy.

    Same arguments, same batches in the same order, same draws from torch's generators.
    A :class:`~gnnaccel.data.PackedDataset`, an ``InMemoryDataset``, a list of graphs
    (from its second epoch on) and a ``torch.utils.data.Subset`` of these take the
    packed path as long as they have no transform. Whatever else there is, and what was
    written to in mid-epoch, goes PyG's own way.

    On the packed path there is nothing for workers to do: none are started, and one
    warning says so.

    Args:
        dataset: The graphs.
        batch_size: Graphs in a batch.
        shuffle: Whether their order is drawn anew in every epoch.
        follow_batch: Attributes that get a batch vector of their own.
        exclude_keys: Attributes that are left out.
        prefetch: How many batches a background thread makes ahead. By default 2 where
            the sampler is one of torch's or gnnaccel's, and 0 where it is another one,
            for that may depend on what the training loop does meanwhile.
        **kwargs: What else torch's ``DataLoader`` takes. A ``collate_fn`` is honoured.

    Raises:
        ValueError: ``prefetch`` is negative.
    """

    _iterator: _BaseDataLoaderIter | None
    # What is made when first needed, and stays behind when the loader is pickled.
    _packer: Packer | None = None
    _slabs: Slabs | None = None
    _told = False

    def __init__(
        self,
        dataset: Dataset | Sequence[BaseData],
        batch_size: int | None = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        *,
        prefetch: int | None = None,
        **kwargs: Any,
    ) -> None:
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"Expected prefetch to be at least 0 (got {prefetch})")
        collate = kwargs.pop("collate_fn", None)
        super().__init__(
            dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs
        )
        self.prefetch = prefetch
        # PyG's own comes back from who makes a loader anew out of its attributes.
        if collate is not None and type(collate) is not Collater:
            self.collate_fn = collate

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_packer", "_slabs"):
            state.pop(name, None)
        return state

    def __iter__(self) -> _BaseDataLoaderIter:
        # A persistent iterator serves as long as its path is the one to take.
        if self._iterator is not None:
            packed = isinstance(self._iterator, PackedIterator)
            if packed != self._takes_packed_path():
                self._iterator = None
        return super().__iter__()

    def memory_stats(self) -> dict[str, int | float]:
        """What the slabs of this loader's batches hold and did.

        Returns:
            Bytes ``in_use`` (what the batches alive need), ``reserved`` (their slabs
            and idle ones) and ``peak`` (most ever reserved); slabs ``made`` and
            ``reused``; ``fragmentation``, which is ``1 - in_use / reserved``.
        """
        return (self._slabs or Slabs(0)).stats()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not self._takes_packed_path():
            self._packs().went_stock()
            return super()._get_iterator()
        if self.num_workers > 0 and not self._told:
            self._told = True
            warnings.warn(
                f"num_workers={self.num_workers} is not needed: batches of this data "
                "set are copied out of packed storage, without Python work that "
                "workers could share. None are started.",
                stacklevel=4,
            )
        return PackedIterator(self, self._source())

    def _takes_packed_path(self) -> bool:
        dataset, _ = indices.unwrap(self.dataset)
        # Persistent workers serve all epochs of a list, or none.
        return (
            self._auto_collation
            and type(self.collate_fn) is Collater
            # Who sets up workers expects them.
            and not (self.num_workers > 0 and self.worker_init_fn is not None)
            and self._packs().serves(dataset, lists=not self.persistent_workers)
        )

    def _packs(self) -> Packer:
        if self._packer is None:
            self._packer = Packer()
        return self._packer

    def _source(self) -> Source:
        """What the next epoch's batches come from, packed anew if it has changed."""
        dataset, subsets = indices.unwrap(self.dataset)
        packed, current = self._packs().pack(dataset)
        pinned = self.pin_memory and _can_pin()
        depth = lookahead.depth(self.batch_sampler)
        if self.prefetch is not None:
            depth = self.prefetch
        # As many as are made ahead, the user's two and one to spare.
        slots = depth + 4
        if self._slabs is None or self._slabs.slots < slots:
            self._slabs = Slabs(slots, pinned)
        collate = self.collate_fn
        return Source(
            batcher=packed.batcher(
                collate.follow_batch, collate.exclude_keys, split=not pinned
            ),
            locate=indices.locator(subsets),
            current=current,
            fallback=_MapDatasetFetcher(
                self.dataset, True, collate, self.drop_last
            ).fetch,
            slabs=self._slabs,
            depth=depth,
            eager=self.prefetch is not None,
        )


def _can_pin() -> bool:
    """As torch's own loader decides it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"
