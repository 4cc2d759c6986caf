"""What each stage of the pipeline did, and which of them holds up the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Share of the time that the consumer may wait before something else is to blame.
PATIENCE = 0.03

# Share of the time from which a stage does hardly anything but work.
_SATURATED = 0.9


@dataclass
class Stage:
    """One stage's account; only one thread at a time writes it.

    Attributes:
        busy: Seconds of work.
        wait: Seconds of waiting: for space ahead of it, or for the stage before it.
        items: Batches.
        nbytes: Bytes that it moved.
        slowest: Seconds of work on the item that took longest.
    """

    busy: float = 0.0
    wait: float = 0.0
    items: int = 0
    nbytes: int = 0
    slowest: float = 0.0

    def report(self) -> dict[str, Any]:
        """The account as plain numbers; ``bytes_per_s`` while it was busy."""
        return {
            "busy": self.busy,
            "wait": self.wait,
            "items": self.items,
            "bytes": self.nbytes,
            "bytes_per_s": self.nbytes / self.busy if self.busy else 0.0,
        }


class Stages:
    """The accounts of a loader, over all its epochs.

    Attributes:
        source: Loading; it waits while enough batches are ready.
        pack: Copying into pinned memory; it waits for a slot of the ring.
        copy: Crossing to the device, in device time.
        consumer: The training loop; it waits for batches.
    """

    def __init__(self) -> None:
        self.source, self.pack, self.copy = Stage(), Stage(), Stage()
        self.consumer = Stage()
        self.steady = Stage()  # the consumer in the steps that looked ahead

    def bottleneck(self) -> str | None:
        """The stage that the others wait for; None before there was anything to do."""
        consumer = self.steady if self.steady.items else self.consumer
        if not consumer.items:
            return None
        others = {"source": self.source, "pack": self.pack, "copy": self.copy}
        busiest = max(others, key=lambda name: others[name].busy)
        elapsed = self.consumer.busy + self.consumer.wait
        # A consumer that waits on the device for a copy does not know that it waits.
        if others[busiest].busy >= _SATURATED * elapsed:
            return busiest
        if consumer.wait <= PATIENCE * (consumer.busy + consumer.wait):
            return "consumer"
        return busiest

    def report(self) -> dict[str, Any]:
        """Every stage's :meth:`Stage.report` by name, and the ``bottleneck``."""
        found: dict[str, Any] = {
            name: getattr(self, name).report()
            for name in ("source", "pack", "copy", "consumer")
        }
        found["bottleneck"] = self.bottleneck()
        return found
