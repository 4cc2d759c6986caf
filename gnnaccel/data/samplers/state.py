"""What a sampler remembers to go on in mid-epoch."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Generator

from gnnaccel.data.samplers.plan import Ints


@dataclass
class EpochState:
    """A place in an epoch.

    Attributes:
        seed: Fixes the order.
        epoch: Number by which the order was chosen, if by one.
        position: How many batches are behind.
        finished: Whether the iteration was run to its end, not just to its last batch.
    """

    seed: int
    epoch: int | None
    position: int = 0
    finished: bool = False

    def at(self, position: int) -> EpochState:
        """The same epoch, seen to another place.

        Look-ahead finds the end early, so only the full count can be the end.
        """
        finished = self.finished and position == self.position
        return replace(self, position=position, finished=finished)


def write_state(
    state: EpochState | None,
    epoch: int | None,
    fingerprint: int,
    generator: Generator | None,
) -> dict[str, Any]:
    """A state as a dict of plain numbers and one tensor (that of the generator)."""
    return {
        "running": None if state is None else vars(state).copy(),
        "epoch": epoch,
        "fingerprint": fingerprint,
        "generator": None if generator is None else generator.get_state(),
    }


def read_state(
    state_dict: Mapping[str, Any], fingerprint: int, generator: Generator | None
) -> tuple[EpochState | None, int | None]:
    """Undoes :func:`write_state`.

    Returns:
        The place to go on at, ``None`` for the start of a new epoch; and the epoch's
        number.

    Raises:
        ValueError: The state is another sampler's.
    """
    expected = {"running", "epoch", "fingerprint", "generator"}
    if not isinstance(state_dict, Mapping) or not expected <= set(state_dict):
        raise ValueError(
            f"Expected what 'state_dict()' of a batch sampler returned (got "
            f"{state_dict!r})"
        )
    if state_dict["fingerprint"] != fingerprint:
        raise ValueError(
            f"The state was taken with other graphs, budgets or ranks (got fingerprint "
            f"{state_dict['fingerprint']}, this sampler has {fingerprint}): build the "
            f"sampler as it was, or start the epoch anew"
        )
    if generator is not None and state_dict["generator"] is not None:
        generator.set_state(state_dict["generator"])
    running = state_dict["running"]
    place = None if running is None else EpochState(**running)
    # A pass that was run to its end is followed by a new one.
    if place is not None and place.finished:
        place = None
    return place, state_dict["epoch"]


def fingerprint(graphs: Ints, sizes: Ints, limits: Ints, numbers: Iterable[int]) -> int:
    """A checksum of all that batches depend on, but for the seed."""
    found = 0
    for part in (graphs, sizes, limits, np.array(list(numbers), dtype=np.int64)):
        found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    return found


def warn_same_order(sampler: object) -> None:
    """Says that ``set_epoch`` was forgotten."""
    warnings.warn(
        f"{type(sampler).__name__} gives the same order as in the last epoch: call "
        f"'set_epoch(epoch)' before each epoch, as on a DistributedSampler",
        stacklevel=4,
    )
