"""Whether two parts of a program draw from the same random generators.

Batches that are loaded on a thread draw while the training loop does. Where both draw
from one generator, who comes first is a matter of luck, and results change from run to
run. Then nothing may be loaded ahead.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Draws:
    """Watches the generators that a process has one of: torch's, NumPy's, Python's."""

    def __init__(self) -> None:
        self._before: Any = None
        self._loading = False
        self._clashes = 0
        self._verdict: bool | None = None

    @property
    def verdict(self) -> bool | None:
        """Whether batches may be loaded ahead; None while that is not known."""
        return self._verdict

    def pause(self) -> None:
        """Nobody watches for some steps."""
        self._loading = False

    def before_loading(self) -> None:
        """A batch is about to be asked for, by the training loop's own thread."""
        if self._verdict is not None:
            return
        if self._loading:
            # Between the last batch and now, the loop drew or did not.
            if _states() == self._before:
                self._verdict = True
                return
            # Once may be the order of an epoch, which is drawn with its first batch.
            self._clashes += 1
            if self._clashes == 2:
                self._verdict = False
                return
        self._before = _states()

    def after_loading(self) -> None:
        """The batch is there."""
        if self._verdict is not None:
            return
        now = _states()
        self._loading = now != self._before
        self._before = now
        if not self._loading:
            self._verdict = True


def _states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    own = torch.default_generator.get_state().numpy().tobytes()
    return own, random.getstate(), name, np.asarray(keys).tobytes(), *rest
