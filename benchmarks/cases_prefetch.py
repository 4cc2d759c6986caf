"""``PrefetchLoader`` on the CPU: what it hides, what it costs, and how fast it packs.

One call is a whole epoch. Sleeps stand for work that holds no GIL, on its own core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.loader import DataLoader as StockLoader

from benchmarks import molecules
from benchmarks.cases_loading import tensors
from benchmarks.registry import (
    FORWARD,
    OURS,
    STOCK,
    Implementation,
    Maker,
    Setting,
    Workload,
    case,
)

LOAD, TRAIN = 0.004, 0.005
ALONE = "training alone"
COPY = "copy of the bytes"


def _wrapped(loader: Any) -> Iterable[Any]:
    from gnnaccel.loader import PrefetchLoader

    return PrefetchLoader(loader, "cpu")


def _workload(
    makers: dict[str, Maker], bound: Any, bound_name: str, batches: int
) -> Workload:
    return Workload(
        x=torch.zeros(1),
        makers=makers,
        edges=batches,
        phases=(FORWARD,),
        readings={bound_name: bound},
        bounds={FORWARD: (bound_name,)},
        bound_name=bound_name,
        graph=f"{batches} batches",
    )


def _epochs(
    source: Callable[[], Iterator[Tensor]],
    train: Callable[[Iterable[Tensor]], Tensor],
    ready: list[Tensor],
) -> Workload:
    """Training over ``source``, bare and wrapped; the bound is over ready batches."""

    def stock() -> Implementation:
        return Implementation(lambda x: train(source()))

    def ours() -> Implementation:
        loader = _wrapped(source)
        return Implementation(lambda x: train(loader))

    makers = {STOCK: stock, OURS: ours}
    return _workload(makers, lambda: train(ready), ALONE, len(ready))


@case("prefetch_overlap", group="loading")
def prefetch_overlap(setting: Setting, variant: str) -> Workload:
    """Loading of 4 ms behind training of 5 ms."""
    count = 8 if setting.quick else 200
    ready = [torch.tensor([float(n)]) for n in range(count)]

    def source() -> Iterator[Tensor]:
        for batch in ready:
            time.sleep(LOAD)
            yield batch

    def train(batches: Iterable[Tensor]) -> Tensor:
        total = torch.zeros(1)
        for batch in batches:
            time.sleep(TRAIN)
            total = total + batch
        return total

    return _epochs(source, train, ready)


@case("prefetch_nothing", group="loading", variants=("ready", "python"))
def prefetch_nothing(setting: Setting, variant: str) -> Workload:
    """Where nothing can be hidden: batches that are ready, and work in Python alone."""
    count = 8 if setting.quick else 300
    ready = [torch.tensor([float(n)]) for n in range(count)]
    spins = 20_000

    def spin() -> None:
        for _ in range(spins):
            pass

    def source() -> Iterator[Tensor]:
        for batch in ready:
            if variant == "python":
                spin()
            yield batch

    def train(batches: Iterable[Tensor]) -> Tensor:
        total = torch.zeros(1)
        for batch in batches:
            spin()
            total = total + batch
        return total

    return _epochs(source, train, ready)


@case("prefetch_hand_over", group="loading")
def prefetch_hand_over(setting: Setting, variant: str) -> Workload:
    """Batches that a thread makes at once: all of it is the hand-over."""
    count = 20 if setting.quick else 5000

    def maker(threaded: bool) -> Maker:
        def made() -> Implementation:
            from gnnaccel.loader.prefetch.ahead import ReadAhead
            from gnnaccel.loader.prefetch.host import Machine

            def forward(x: Tensor) -> Tensor:
                batches: Iterator[int] = iter(range(count))
                if threaded:
                    ahead = ReadAhead(batches, Machine(), "benchmark")
                    ahead.depth = 2
                    batches = ahead
                return torch.tensor([sum(batches)])

            return Implementation(forward)

        return made

    makers = {STOCK: maker(False), OURS: maker(True)}
    return _workload(makers, lambda: sum(range(count)), "a loop", count)


@case("prefetch_pack", group="loading")
def prefetch_pack(setting: Setting, variant: str) -> Workload:
    """Packing batches of 256 molecules: taken apart, planned, copied, put together."""
    dataset = molecules.molecules(60 if setting.quick else 4096)
    batches = list(StockLoader(dataset, 256))
    sizes = [sum(t.numel() * t.element_size() for t in tensors(b)) for b in batches]
    room = 2 * max(sizes) + 4096

    def ours() -> Implementation:
        from gnnaccel.loader.prefetch.plan import plan
        from gnnaccel.loader.prefetch.tree import flatten

        slots = [torch.empty(room, dtype=torch.uint8).zero_() for _ in range(4)]

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            for i, batch in enumerate(batches):
                flat = flatten(batch)
                layout = plan(flat.leaves)
                memory = slots[i % len(slots)]
                layout.fill(memory)
                last = flat.rebuild([v.of(memory) for v in layout.views], ())
            return tensors(last)

        return Implementation(forward)

    def stock() -> Implementation:
        def forward(x: Tensor) -> tuple[Tensor, ...]:
            for batch in batches:
                last = batch.clone()
            return tensors(last)

        return Implementation(forward, note="a clone of each attribute")

    sources = [np.ones(size, np.uint8) for size in sizes]
    targets = np.ones((4, max(sizes)), np.uint8)

    def copies() -> None:
        for i, source in enumerate(sources):
            np.copyto(targets[i % len(targets)][: source.size], source)

    return _workload({STOCK: stock, OURS: ours}, copies, COPY, len(batches))
