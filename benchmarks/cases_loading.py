"""Loaders over many small graphs: an epoch, with nothing done to the batches.

One call is a whole epoch, with what begins it (the order, the thread) and what ends it.
All loaders draw the same order, from a generator that is seeded before each call. The
bound is a plain copy of the same number of bytes, batch by batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as StockLoader
from torch_geometric.nn import GIN, global_add_pool

from benchmarks import molecules
from benchmarks.molecules import Stored
from benchmarks.registry import (
    FORWARD,
    OURS,
    STOCK,
    Implementation,
    Maker,
    Reading,
    Setting,
    Workload,
    case,
)

WORKERS = "pyg, 2 workers"
Loading = Callable[..., Iterable[Batch]]

COPY = "copy of the bytes"
TRAINING = "training alone"


def _ours(dataset: Stored, **arguments: Any) -> Iterable[Batch]:
    from gnnaccel.loader import DataLoader

    return DataLoader(dataset, **arguments)


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    """All tensors of a batch, stores and attributes in their order."""
    return tuple(
        value
        for store in batch.stores
        for value in store.values()
        if isinstance(value, Tensor)
    )


def epoch(make: Loading, dataset: Stored, **arguments: Any) -> Maker:
    """A maker of whole epochs; the result is the last batch."""

    def maker() -> Implementation:
        generator = torch.Generator()
        loader = make(dataset, shuffle=True, generator=generator, **arguments)

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            for batch in loader:
                last = batch
            return tensors(last)

        return Implementation(forward, prepare=lambda: generator.manual_seed(5))

    return maker


def copies(dataset: Stored, size: int) -> Reading:
    """Copies as many bytes as an epoch's batches hold, into memory that is reused."""
    batches = [tensors(batch) for batch in StockLoader(dataset, size)]
    lengths = [sum(t.numel() * t.element_size() for t in batch) for batch in batches]
    # NumPy's copy is a plain memcpy on one thread, as ours is in the background.
    parts = np.split(np.ones(sum(lengths), np.uint8), np.cumsum(lengths)[:-1])
    targets = np.ones((4, max(lengths)), np.uint8)

    def reading() -> None:
        for part, target in zip(parts, itertools.cycle(targets), strict=False):
            np.copyto(target[: part.size], part)

    return reading


def loading(setting: Setting, dataset: Stored, size: int) -> Workload:
    """Epochs of batches of ``size`` graphs."""
    makers: dict[str, Maker] = {STOCK: epoch(StockLoader, dataset, batch_size=size)}
    if not setting.quick:
        makers[WORKERS] = epoch(
            StockLoader,
            dataset,
            batch_size=size,
            num_workers=2,
            persistent_workers=True,
        )
    makers[OURS] = epoch(_ours, dataset, batch_size=size)
    stores = [s for s in dataset._data.stores if "edge_index" in s]
    return Workload(
        x=torch.zeros(1),
        makers=makers,
        edges=sum(store.edge_index.size(1) for store in stores),
        phases=(FORWARD,),
        readings={COPY: copies(dataset, size)},
        bounds={FORWARD: (COPY,)},
        bound_name=COPY,
        graph=f"{len(dataset):,} graphs",
    )


def _count(setting: Setting) -> int:
    return 60 if setting.quick else 8192


def _register(size: int) -> None:
    def build(setting: Setting, variant: str) -> Workload:
        return loading(setting, molecules.molecules(_count(setting)), size)

    build.__doc__ = f"An epoch of molecules in batches of {size}."
    case(f"batch_{size}", group="loading")(build)


for _size in (8, 64, 256, 1024):
    _register(_size)


@case("batch_hetero", group="loading")
def batch_hetero(setting: Setting, variant: str) -> Workload:
    """An epoch of graphs of two node and two edge types in batches of 256."""
    return loading(setting, molecules.bipartite(_count(setting)), 256)


@case("packing", group="loading")
def packing(setting: Setting, variant: str) -> Workload:
    """Packing 100,000 graphs against one epoch of PyG's loader over them."""
    dataset = molecules.molecules(100 if setting.quick else 100_000)

    def stock() -> Implementation:
        loader = StockLoader(dataset, 256)

        def forward(x: Tensor) -> Tensor:
            return torch.tensor([sum(batch.num_graphs for batch in loader)])

        return Implementation(forward)

    def ours() -> Implementation:
        from gnnaccel.data import PackedDataset

        def forward(x: Tensor) -> Tensor:
            packed = PackedDataset(dataset)
            packed.batcher()
            return torch.tensor([len(packed)])

        return Implementation(forward)

    return Workload(
        x=torch.zeros(1),
        makers={STOCK: stock, OURS: ours},
        edges=dataset._data.edge_index.size(1),
        phases=(FORWARD,),
        graph=f"{len(dataset):,} graphs",
    )


class Classifier(torch.nn.Module):
    """A GIN of five layers over embedded atoms, one logit for each graph."""

    def __init__(self, dataset: Stored, width: int) -> None:
        super().__init__()
        x = dataset._data.x
        self.embed = torch.nn.ModuleList(
            torch.nn.Embedding(int(column.max()) + 1, width) for column in x.unbind(1)
        )
        self.gin = GIN(width, width, num_layers=5, norm="batch_norm")
        self.head = torch.nn.Linear(width, 1)

    def forward(self, batch: Batch) -> Tensor:
        columns = batch.x.unbind(1)
        x = sum(embed(c) for embed, c in zip(self.embed, columns, strict=True))
        x = self.gin(x, batch.edge_index)
        out: Tensor = self.head(global_add_pool(x, batch.batch, batch.num_graphs))
        return out


def train(model: Classifier, batches: Iterable[Batch]) -> Tensor:
    """An epoch of Adam; returns the loss [1] of the last batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model(batch).view(-1), batch.y.view(-1).float())
        loss.backward()
        optimizer.step()
    return loss.detach().view(1)


def _molecules_of(setting: Setting) -> tuple[str, ...]:
    return ("hiv",) if setting.data is not None else ("random",)


@case("gin_epoch", group="loading", variants=_molecules_of)
def gin_epoch(setting: Setting, variant: str) -> Workload:
    """A training epoch in batches of 256; the bound is the same over ready batches."""
    if setting.data is not None and not setting.quick:
        dataset = molecules.from_folder(variant, setting.data)
    else:
        dataset = molecules.molecules(_count(setting))
    torch.manual_seed(4)
    start = Classifier(dataset, setting.features).state_dict()

    def trained(model: Classifier, batches: Iterable[Batch]) -> Tensor:
        model.load_state_dict(start)
        return train(model, batches)

    def maker(make: Loading) -> Maker:
        def made() -> Implementation:
            generator = torch.Generator()
            loader = make(dataset, batch_size=256, shuffle=True, generator=generator)
            model = Classifier(dataset, setting.features)
            return Implementation(
                lambda x: trained(model, loader),
                prepare=lambda: generator.manual_seed(5),
            )

        return made

    model = Classifier(dataset, setting.features)
    generator = torch.Generator().manual_seed(5)
    ready = list(StockLoader(dataset, 256, shuffle=True, generator=generator))
    return Workload(
        x=torch.zeros(1),
        makers={STOCK: maker(StockLoader), OURS: maker(_ours)},
        edges=dataset._data.edge_index.size(1),
        phases=(FORWARD,),
        readings={TRAINING: lambda: trained(model, ready)},
        bounds={FORWARD: (TRAINING,)},
        bound_name=TRAINING,
        graph=f"{len(dataset):,} graphs",
    )
