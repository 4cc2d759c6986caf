"""``PrefetchLoader``: any loader, its batches on the device before they are needed."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from gnnaccel.loader.prefetch.accelerator import (
    Accelerator,
    accelerator_for,
    resolve,
)
from gnnaccel.loader.prefetch.ahead import ReadAhead
from gnnaccel.loader.prefetch.arguments import (
    begun,
    check_loader,
    checked_cast,
    checked_depth,
    named,
)
from gnnaccel.loader.prefetch.host import Host, Machine
from gnnaccel.loader.prefetch.iterator import PrefetchIterator, Progress
from gnnaccel.loader.prefetch.lane import Lane
from gnnaccel.loader.prefetch.pace import Pace
from gnnaccel.loader.prefetch.remake import remade
from gnnaccel.loader.prefetch.stats import Stages


class PrefetchLoader:
    """Wraps a loader and hands over its batches on the device, prepared ahead.

    While the model trains on one batch, the next ones are loaded on a thread, packed
    into pinned memory and copied over in one piece. The batches are those of the
    wrapped loader, in its order. On the CPU nothing is copied: batches are loaded
    ahead, as long as that saves time and leaves all random numbers as they are.

    Attributes that it does not have are the wrapped loader's, and where that is a torch
    ``DataLoader``, this is one too for ``isinstance``.

    A batch may be kept, and views of its tensors too: its memory is used again when
    nothing refers to it any more. The wrapped loader must leave alone what it handed
    out, as every loader with workers does.

    Args:
        loader: Any iterable, such as PyG's and gnnaccel's loaders or a list, or a
            function that begins an epoch when it is called, such as a generator.
        device: Where batches are wanted; by default the accelerator that there is, or
            else the CPU.
        depth: How many batches are prepared ahead; 0 for none, ``"auto"`` for as many
            as help and as fit.
        cast: Dtypes by the name of an attribute, key or field, as in
            ``{"x": torch.float16}``; converted on the side where fewer bytes cross.
        **replaced: Arguments of the wrapped loader's class, with which it is made anew:
            trainers pass a sampler of theirs this way.

    Raises:
        TypeError: ``loader`` can't be iterated over, ``depth`` is no whole number,
            ``cast`` no mapping from names to dtypes, or ``device`` no device.
        ValueError: ``depth`` is below 0, or a word other than "auto".
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        loader: Iterable[Any] | Callable[[], Iterable[Any]],
        device: torch.device | str | int | None = None,
        depth: int | str = 2,
        cast: Mapping[str, torch.dtype] | None = None,
        **replaced: Any,
    ) -> None:
        check_loader(loader)
        depth, cast = checked_depth(depth), checked_cast(cast)
        self.loader: Any = remade(loader, replaced) if replaced else loader
        if isinstance(self.loader, DataLoader):
            # Trainers that make a loader anew look for it among what it has itself.
            self.dataset = self.loader.dataset
        self.device = resolve(device)
        self.depth = depth
        self.cast = cast
        self._begin(accelerator_for(self.device), Machine())

    def _begin(self, accelerator: Accelerator | None, host: Host) -> None:
        """Sets up what is not part of the loader's state."""
        self._host = host
        self._stages = Stages()
        self._pace = Pace(self.depth, host_only=accelerator is None)
        self._lane: Lane | None = None
        if accelerator is not None:
            depth = self._pace.depth
            self._lane = Lane(accelerator, host, self._stages, self.cast, depth)
        self._running: weakref.ref[PrefetchIterator] | None = None
        # Threads of earlier loops that were left behind, and may still ask a source.
        self._left: list[ReadAhead] = []
        self._told = False
        self._progress = Progress()
        self._resume: Mapping[str, Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        wrapped = vars(self).get("loader")
        return type(wrapped) if isinstance(wrapped, DataLoader) else type(self)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        skip = handed = 0
        if resume is not None:
            handed = resume["batches"]
            if resume.get("loader") is not None:
                self.loader.load_state_dict(resume["loader"])
            elif resume.get("sampler") is not None:
                self.loader.batch_sampler.load_state_dict(resume["sampler"])
            else:
                skip = handed
        running = None if self._running is None else self._running()
        own = hasattr(self.loader, "__next__")
        # Either is about to begin again what an earlier loop may still ask: a torch
        # loader with workers that persist does so too.
        shared = own or getattr(self.loader, "_iterator", None) is not None
        if running is not None and not running.closed:
            restarts = inspect.isfunction(getattr(type(self.loader), "__iter__", None))
            if own and not restarts and resume is None:
                # A generator, or another iterator that can't begin again: no two
                # threads may ask it, so all loops share one.
                return running
            if shared:
                running.close()
        self._left = [ahead for ahead in self._left if ahead.left_in is not None]
        if self._left and shared:
            raise _still_asked(self.loader)
        # Here and not on the thread: workers are started, and numbers drawn, where the
        # wrapped loader alone would do so.
        batches = begun(self.loader)
        if running is not None and running.asks(batches):
            # What it wraps has one iterator for all its loops, too.
            return running
        if any(getattr(a.left_in, "batches", None) is batches for a in self._left):
            raise _still_asked(self.loader)
        self._progress = Progress(handed)
        iterator = PrefetchIterator(self, batches, self._progress, skip)
        self._running = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        # Not by its length, which the wrapped loader need not have.
        return bool(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Names with two underscores say what an object itself can do.
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r}, device={str(self.device)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.loader, self.device, self.depth, self.cast)

    def set_epoch(self, epoch: int) -> None:
        """Tells the wrapped loader, or else its samplers and data set, the epoch.

        Those that have no ``set_epoch`` are not told.
        """
        if _tell(self.loader, epoch):
            return
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        _tell(batch_sampler, epoch)
        _tell(getattr(batch_sampler, "sampler", None), epoch)
        if batch_sampler is None:
            _tell(getattr(self.loader, "sampler", None), epoch)
        _tell(getattr(self.loader, "dataset", None), epoch)

    def stats(self) -> dict[str, Any]:
        """What each stage did so far, over all epochs.

        Returns:
            For ``source``, ``pack``, ``copy`` and ``consumer``: ``busy`` and ``wait``
            in seconds, ``items``, ``bytes``, and ``bytes_per_s`` while busy (``copy``
            in the device's time); the ``bottleneck``, which is the stage that the
            others wait for; the ``depth``, and ``why_not_ahead`` if batches are
            prepared when they are asked for (else empty).
        """
        found = self._stages.report()
        found["depth"] = self._pace.depth
        if self._lane is not None:
            found["depth"] = min(self._pace.depth, self._lane.limit)
        found["why_not_ahead"] = self._pace.reason
        return found

    def memory_stats(self) -> dict[str, Any]:
        """What the batches hold, in bytes.

        Returns:
            ``allocated``, ``reserved`` and ``free`` of the device, its
            ``fragmentation`` (``1 - allocated / reserved``), what is ``handed_over``
            and not let go of; ``pinned``, ``pinned_in_use`` and ``pinned_peak`` of the
            ring; its ``slots_made`` and ``slots_reused``. Empty on the CPU, where
            batches stay where the wrapped loader put them.
        """
        return {} if self._lane is None else self._lane.memory_stats()

    def state_dict(self) -> dict[str, Any]:
        """Where the last epoch that was begun stands: what the training loop has seen.

        Batches that are prepared and were not handed over do not count. If the wrapped
        loader or its batch sampler has a ``state_dict``, that is included, as of the
        last batch handed over.
        """
        if self._resume is not None:
            return dict(self._resume)
        handed, inner = self._progress.handed, self._progress.inner
        state: dict[str, Any] = {"batches": handed}
        if inner is not None:
            state["loader"] = inner
        elif self._sampled():
            state["sampler"] = self.loader.batch_sampler.state_dict(handed)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next epoch go on where ``state_dict`` was taken.

        A wrapped loader without a state of its own is begun anew, and the batches that
        were seen are loaded and dropped: its order must be the same again, as it is
        under a seeded generator.

        Raises:
            ValueError: It is no such state.
        """
        batches = state.get("batches") if isinstance(state, Mapping) else None
        if type(batches) is not int or batches < 0:
            raise ValueError(
                "Expected what 'state_dict()' of a PrefetchLoader returned "
                f"(got {state!r})"
            )
        self._resume = dict(state)

    def _sampled(self) -> bool:
        """Whether the batch sampler can tell where any number of batches stands."""
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        if not hasattr(sampler, "load_state_dict"):
            return False
        return "batches" in inspect.signature(sampler.state_dict).parameters

    def _left_behind(self, ahead: ReadAhead) -> None:
        """Notes that a thread did not end when a loop was left."""
        self._left.append(ahead)
        if not self._told:
            self._told = True
            warnings.warn(
                f"gnnaccel: a loop was left while {named(self.loader)}, on a thread, "
                "was making a batch, and it did not return. That thread is left behind "
                "and ends when it does; what it makes till then is dropped.",
                stacklevel=2,
            )


def _still_asked(loader: Any) -> RuntimeError:
    return RuntimeError(
        f"{named(loader)} can be asked by one loop at a time, and the thread of an "
        "earlier one, which was left in mid-epoch, still waits for a batch from it. "
        "Let it return first, or wrap a function that begins a new one each time: "
        "PrefetchLoader(lambda: ...)."
    )


def _tell(target: Any, epoch: int) -> bool:
    if not hasattr(target, "set_epoch"):
        return False
    target.set_epoch(epoch)
    return True
