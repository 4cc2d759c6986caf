"""``PrefetchLoader``: any loader, its batches on the device before they are needed."""

from __future__ import annotations

import inspect
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
from gnnaccel.loader.prefetch.host import Host, Machine
from gnnaccel.loader.prefetch.iterator import PrefetchIterator
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
        TypeError: ``loader`` can't be iterated over.
        ValueError: ``depth`` is neither a number from 0 up nor "auto".
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
        known = depth == "auto" or (type(depth) is int and depth >= 0)
        if not known:
            raise ValueError(
                f'Expected depth to be a number from 0 up, or "auto" (got {depth!r})'
            )
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            if not callable(loader) or isinstance(loader, type):
                raise TypeError(
                    "Expected a loader: something to iterate over, or a function that "
                    f"returns that (got {type(loader).__name__})"
                )
        self.loader: Any = remade(loader, replaced) if replaced else loader
        if isinstance(self.loader, DataLoader):
            # Trainers that make a loader anew look for it among what it has itself.
            self.dataset = self.loader.dataset
        self.device = resolve(device)
        self.depth = depth
        self.cast = dict(cast or {})
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
        self._handed = 0
        self._inner: Any = None
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
        if running is not None and not running.closed:
            own = hasattr(self.loader, "__next__")
            restarts = inspect.isfunction(getattr(type(self.loader), "__iter__", None))
            if own and not restarts and resume is None:
                # A generator, or another iterator that can't begin again: no two
                # threads may ask it, so all loops share one.
                return running
            if own or getattr(self.loader, "_iterator", None) is not None:
                # It is about to begin again (a torch loader with workers that persist
                # does so too), while the thread of the other loop asks it.
                running.close()
        wrapped: Any = self.loader
        if not hasattr(wrapped, "__iter__") and not hasattr(wrapped, "__getitem__"):
            wrapped = wrapped()
        # Here and not on the thread: workers are started, and numbers drawn, where the
        # wrapped loader alone would do so.
        iterator = PrefetchIterator(self, iter(wrapped), skip)
        self._running, self._handed, self._inner = weakref.ref(iterator), handed, None
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
        state: dict[str, Any] = {"batches": self._handed}
        if self._inner is not None:
            state["loader"] = self._inner
        elif self._sampled():
            state["sampler"] = self.loader.batch_sampler.state_dict(self._handed)
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

    def _count(self, iterator: PrefetchIterator, state: Any) -> None:
        """Notes that ``iterator`` hands over a batch."""
        if self._running is not None and self._running() is iterator:
            self._handed += 1
            self._inner = state

    def _ended(self, iterator: PrefetchIterator) -> None:
        """Notes that ``iterator`` is through: the next epoch is whole."""
        if self._running is not None and self._running() is iterator:
            self._handed, self._inner = 0, None


def _tell(target: Any, epoch: int) -> bool:
    if not hasattr(target, "set_epoch"):
        return False
    target.set_epoch(epoch)
    return True
