"""``Accelerator``: the little that the pipeline needs of a device with streams.

One implementation serves every device that torch lists (CUDA, XPU, ...), through
``torch.accelerator``, ``torch.Stream`` and ``torch.Event``. The tests have another one,
which is a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Accelerator(Protocol):
    """A device that copies and computes while Python goes on.

    Streams and events are its own; the pipeline only passes them around. Streams can be
    compared and hashed.
    """

    device: torch.device

    def new_stream(self) -> Any:
        """A stream that nobody else uses."""

    def current_stream(self) -> Any:
        """The stream that the calling thread uses on this device."""

    def use(self, stream: Any) -> Any:
        """A context in which that is ``stream``."""

    def event(self, stream: Any) -> Any:
        """Marks the point that ``stream`` reaches after all it was given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Lets ``stream`` wait for ``event``; the caller does not wait."""

    def finish(self, event: Any) -> None:
        """Waits for ``event``, without the GIL."""

    def done(self, event: Any) -> bool:
        """Whether ``event`` has been reached."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """Seconds between two events that are done."""

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory, uint8 [nbytes].

        Raises:
            RuntimeError: The system has none to give.
        """

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in page-locked memory."""

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, uint8 [nbytes], of the current stream.

        Freed, it serves what that stream does next.

        Raises:
            torch.OutOfMemoryError: There is none left.
        """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies pinned to device memory on the current stream; nobody waits."""

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` as ``dtype``, on the current stream."""

    def keep(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """Once freed, the memory is not used again before ``stream`` gets there."""

    def memory(self) -> dict[str, int]:
        """Bytes ``allocated`` by tensors, ``reserved`` by the allocator, ``free``."""


class TorchAccelerator:
    """Any accelerator that torch knows.

    Args:
        device: With an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> torch.Stream:
        """See :class:`Accelerator`."""
        return torch.Stream(device=self.device)

    def current_stream(self) -> torch.Stream:
        """See :class:`Accelerator`."""
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def use(self, stream: torch.Stream) -> Iterator[None]:
        """See :class:`Accelerator`; the current device is left as it was."""
        with stream:
            yield

    def event(self, stream: torch.Stream) -> torch.Event:
        """See :class:`Accelerator`."""
        event = torch.Event(self.device, enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """See :class:`Accelerator`."""
        stream.wait_event(event)

    def finish(self, event: torch.Event) -> None:
        """See :class:`Accelerator`."""
        event.synchronize()

    def done(self, event: torch.Event) -> bool:
        """See :class:`Accelerator`."""
        return event.query()

    def elapsed(self, begin: torch.Event, end: torch.Event) -> float:
        """See :class:`Accelerator`."""
        return begin.elapsed_time(end) / 1000

    def pinned(self, nbytes: int) -> Tensor:
        """See :class:`Accelerator`."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """See :class:`Accelerator`."""
        return tensor.is_pinned()

    def empty(self, nbytes: int) -> Tensor:
        """See :class:`Accelerator`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See :class:`Accelerator`."""
        target.copy_(source, non_blocking=True)

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Accelerator`."""
        return tensor.to(dtype)

    def keep(self, storage: torch.UntypedStorage, stream: torch.Stream) -> None:
        """See :class:`Accelerator`."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        whole.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
        whole.record_stream(stream)

    def memory(self) -> dict[str, int]:
        """See :class:`Accelerator`."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        return {
            "allocated": torch.accelerator.memory_allocated(self.device),
            "reserved": torch.accelerator.memory_reserved(self.device),
            "free": free,
        }


def resolve(device: Any) -> torch.device:
    """The device that is meant, with its index where it has one.

    Args:
        device: As torch takes it; None for the accelerator that there is, or the CPU.

    Raises:
        TypeError: It is nothing that torch takes for a device.
        RuntimeError: It is an accelerator that this machine does not have, or no name
            of a device.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    found = torch.device("cpu" if there is None else there.type)
    if device is not None:
        found = _device(device)
    if found.type in ("cpu", "meta"):
        return found
    if there is None or there.type != found.type:
        known = "none" if there is None else there.type
        raise RuntimeError(
            f"Expected device to be one that this machine has (got {found}; the "
            f"accelerator here: {known}). Leave it out to take what there is."
        )
    count = torch.accelerator.device_count()
    index = found.index
    if index is None:
        index = torch.accelerator.current_device_index()
    if not 0 <= index < count:
        raise RuntimeError(
            f"Expected the index of device to be below {count} (got {found})"
        )
    return torch.device(found.type, index)


def _device(device: Any) -> torch.device:
    example = 'as in device="cuda:0"; leave it out to take what there is'
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(
            f"Expected device to be a torch.device, its name or its index, {example} "
            f"(got {device!r}, of type {type(device).__name__})"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"Expected device to be one that torch knows, {example} (got {device!r}: "
            f"{error})"
        ) from error


def accelerator_for(device: torch.device) -> Accelerator | None:
    """What copies to ``device`` in the background; None if nothing can.

    Batches then cross with a plain copy when they are asked for (to the CPU: not at
    all, for they are there).
    """
    if device.type in ("cpu", "meta", "mps"):
        return None
    return TorchAccelerator(device)
