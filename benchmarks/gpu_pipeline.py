"""How well the pipeline feeds a real accelerator; needs one, and says so without.

    python -m benchmarks.gpu_pipeline [--quick] [--json FILE]

- overlap: which part of the time of the copies is hidden behind training
- throughput: batches per second against plain ``.to(device)``, PyG's PrefetchLoader and
  torch's ``pin_memory=True``, in turns
- memory: what is reserved after each of 40 epochs
- stress: the sum of every batch, taken on the device on streams that change, against
  the sum taken before it left
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as StockLoader
from torch_geometric.loader import PrefetchLoader as StockPrefetchLoader

from benchmarks import molecules
from benchmarks.cases_loading import tensors


class Work:
    """Kernels that keep the device busy for about as long as they are told."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._a = torch.rand(2048, 2048, device=device)
        self.count = 1
        for _ in range(2):
            begin = time.perf_counter()
            for _ in range(20):
                self._a @ self._a
            torch.accelerator.synchronize(device)
            one = (time.perf_counter() - begin) / 20
        self.count = max(1, round(seconds / one))

    def __call__(self) -> None:
        for _ in range(self.count):
            self._a @ self._a


def epoch(batches: Iterable[Any], work: Work, device: torch.device) -> float:
    """Seconds of an epoch, everything included."""
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    total = torch.zeros((), device=device)
    for batch in batches:
        work()
        total += batch.x.flatten()[0]
    torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def overlap(device: torch.device, quick: bool) -> dict[str, float]:
    """The part of the copies that is hidden: ready batches, so that only they count."""
    from gnnaccel.loader import PrefetchLoader

    count, rows = (20, 1 << 14) if quick else (200, 1 << 18)
    ready = [Batch(x=torch.rand(rows, 32)) for _ in range(8)] * (count // 8)
    resident = [batch.clone().to(device) for batch in ready[:8]] * (count // 8)
    loader = PrefetchLoader(ready, device)
    work = Work(device, 0.02)
    for _ in range(2):
        epoch(loader, work, device)
        alone = epoch(resident, work, device)
    before = loader.stats()["copy"]["busy"]
    piped = epoch(loader, work, device)
    loader._lane.close()
    copies = loader.stats()["copy"]["busy"] - before
    visible = max(piped - alone, 0.0)
    return {
        "training_alone_s": alone,
        "pipeline_s": piped,
        "copies_s": copies,
        "hidden": 1 - visible / copies if copies else 1.0,
    }


def throughput(device: torch.device, quick: bool) -> dict[str, float]:
    """Batches per second of an epoch of molecules, the median of several, in turns."""
    from gnnaccel.loader import DataLoader, PrefetchLoader

    dataset = molecules.molecules(512 if quick else 16384)
    work = Work(device, 0.003)

    def plain() -> Iterable[Any]:
        for batch in StockLoader(dataset, 256):
            yield batch.to(device)

    def pinned() -> Iterable[Any]:
        for batch in StockLoader(dataset, 256, pin_memory=True):
            yield batch.to(device, non_blocking=True)

    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        "pyg, .to(device)": plain,
        "pyg, pin_memory": pinned,
        "pyg, PrefetchLoader": lambda: stock,
        "gnnaccel over pyg": lambda: ours,
        "gnnaccel over gnnaccel": lambda: both,
    }
    stock = StockPrefetchLoader(StockLoader(dataset, 256), device)
    ours = PrefetchLoader(StockLoader(dataset, 256), device)
    both = PrefetchLoader(DataLoader(dataset, 256), device)
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(2 if quick else 6):
        for name, make in loaders.items():
            taken = epoch(make(), work, device)
            if turn:
                seconds[name].append(taken)
    batches = -(-len(dataset) // 256)
    return {name: batches / median(taken) for name, taken in seconds.items()}


def reserved(device: torch.device, quick: bool) -> list[int]:
    """Bytes that torch has reserved after each of many epochs of uneven batches."""
    from gnnaccel.loader import PrefetchLoader

    dataset = molecules.molecules(256 if quick else 4096)
    loader = PrefetchLoader(StockLoader(dataset, 64, shuffle=True), device)
    work = Work(device, 0.001)
    seen = []
    for number in range(5 if quick else 40):
        for position, _batch in enumerate(loader):
            work()
            if position == 10 and number % 3 == 2:
                break
        torch.accelerator.synchronize(device)
        seen.append(torch.accelerator.memory_reserved(device))
    return seen


def checksum(batch: Any) -> Tensor:
    """The sum of all bytes of a batch's tensors, [1], where they are."""
    parts = [
        t.contiguous().view(torch.uint8).sum(dtype=torch.int64)
        for t in tensors(batch)
        if t.numel()
    ]
    return torch.stack(parts).sum().view(1)


def stress(device: torch.device, quick: bool) -> dict[str, int]:
    """Wrong sums, of how many; batches are kept, dropped and read on other streams."""
    from gnnaccel.loader import PrefetchLoader

    dataset = molecules.molecules(512 if quick else 8192)
    loader = StockLoader(dataset, 32)
    expected = torch.cat([checksum(batch) for batch in loader])
    wrong = total = 0
    work = Work(device, 0.0005)
    for depth in (1, 2, "auto"):
        other = torch.Stream(device=device)
        found, kept = [], []
        for position, batch in enumerate(PrefetchLoader(loader, device, depth)):
            if position % 3 == 0:
                work()
            if position % 4 == 1:
                other.wait_stream(torch.accelerator.current_stream(device))
                with other:
                    found.append(checksum(batch))
                torch.accelerator.current_stream(device).wait_stream(other)
            else:
                found.append(checksum(batch))
            if position % 5 == 0:
                kept.append((position, batch))
            if len(kept) > 7:
                old, value = kept.pop(0)
                found[old] = torch.maximum(found[old], checksum(value))
        sums = torch.cat(found).cpu()
        wrong += int((sums != expected).sum())
        total += len(expected)
    return {"wrong": wrong, "of": total}


def main(argv: list[str] | None = None) -> int:
    """Runs everything; returns 1 if a sum is wrong, 2 without an accelerator."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(argv)
    if not torch.accelerator.is_available():
        print("No accelerator that torch can use was found: nothing to measure.")
        return 2
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    for part in (stress, overlap, throughput, reserved):
        found[part.__name__] = part(device, args.quick)
        print(f"{part.__name__}: {json.dumps(found[part.__name__])}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 1 if found["stress"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
