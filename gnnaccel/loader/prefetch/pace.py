"""How many batches to prepare ahead, and whether to do so at all.

Looking ahead costs a hand-over between threads, and where both sides need Python all
the time it hides nothing. So the first steps run without it, and it is kept only while
steps take less time than those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from statistics import median

#: The deepest that ``depth="auto"`` goes.
DEEPEST = 16

# Why nothing is read ahead as long as nothing is known.
_MEASURING = "measuring"

# Steps without looking ahead at the beginning. The first is not counted.
_BASELINE = 3

# Steps over which the time of a step is judged (deeper look-ahead: more of them), and
# those at first that are not.
_WINDOW, _SETTLING = 12, 2

# Steps after which it is clear that they have become longer.
_EARLY = 4

# What looking ahead must save, as a share of a step.
_GAIN = 0.03

# Seconds to load a batch below which a thread can't save anything on the host.
_TINY = 1e-4

# Steps without looking ahead until it is tried again.
_REST, _LONGEST_REST = 128, 8192

# Steps that look ahead until the time without is taken again, at first and at most: the
# first time may have been a moment in which everything was slow.
_TRUST, _LONGEST_TRUST = 64, 8192

# Share of a step that a wait must be to count.
_WAIT = 0.02

# Steps without any wait until the look-ahead shrinks.
_PATIENCE = 32


class Pace:
    """Decides for one loader, from step to step and over its epochs.

    Args:
        depth: How many batches to prepare ahead, or "auto".
        host_only: Whether batches stay in host memory, so that only loading is hidden.
    """

    def __init__(self, depth: int | str, host_only: bool) -> None:
        self.auto = depth == "auto"
        self.depth = 1 if isinstance(depth, str) else depth
        self.reason = ""
        self.one_object = False  # whether all batches are, so that none may be early
        self._host_only = host_only
        self._ahead = False
        self._alone: deque[float] = deque(maxlen=_WINDOW)
        self._loads: deque[float] = deque(maxlen=_WINDOW)
        self._load = 1.0  # the median of these, as of lately
        self._together: list[float] = []
        self._steps = 0  # since the last change of mind
        self._warm = False
        self._rest, self._next_rest = 0, _REST
        self._trust = self._next_trust = _TRUST
        self._quiet = 0
        self._patience = _PATIENCE
        self._full = 0
        self._shrunk = False

    def begin_epoch(self) -> None:
        """The first step of an epoch also starts workers and draws an order."""
        self._steps = 0
        self._warm = False

    def in_question(self) -> bool:
        """Whether it matters now if looking ahead leaves results as they are."""
        return not self._no_use()

    def _measured(self) -> bool:
        return len(self._alone) >= _BASELINE - 1

    def _no_use(self) -> str:
        """Why looking ahead would not help, whether it may be or not."""
        if self.depth == 0:
            return "depth is 0"
        if self.one_object:
            return "the wrapped loader hands out the same object every time"
        if self._rest:
            return "it saved no time"
        if self._host_only and self._measured() and self._load < _TINY:
            return "loading takes no time"
        return ""

    def ahead(self, may: bool | None) -> int:
        """The depth to work at now.

        Args:
            may: Whether looking ahead leaves results as they are; None: not known yet.
        """
        self.reason = self._no_use()
        if self.reason:
            pass
        elif may is False:
            self.reason = (
                "loading and the training loop draw from the same random generator, so "
                "that results would depend on luck; with num_workers=1 they would not"
            )
        elif may is None or not self._measured():
            self.reason = _MEASURING
        ahead = not self.reason
        if ahead != self._ahead:
            self._ahead, self._steps = ahead, 0
            self._together.clear()
        return self.depth if ahead else 0

    def step(self, alone: bool, busy: float, wait: float) -> None:
        """Notes a step: ``busy`` seconds of training, ``wait`` for the next batch.

        Args:
            alone: Whether that batch was made while the training loop waited.
            busy: See above.
            wait: See above.
        """
        self._steps += 1
        if alone:
            self.in_line(busy, wait)
            self._load = _middle(self._loads, self._load)
            return
        self._trust -= 1
        if self._trust <= 0 and self._host_only:
            self._next_trust = min(2 * self._next_trust, _LONGEST_TRUST)
            self._trust = self._next_trust
            # The next may have been begun while the loop was busy: it does not count.
            self._warm = False
            self._alone.clear()
            self._loads.clear()
            return
        if self._steps <= _SETTLING:
            return
        self._together.append(busy + wait)
        judged = len(self._together)
        whole = judged >= _window(self.depth)
        if not whole and judged != _EARLY:
            return
        # None, if another loop over the same loader has begun to time it anew.
        limit = _middle(self._alone, inf) * (1 - _GAIN if whole else 1)
        slower = self._typical() > limit
        if slower:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        if slower or whole:
            self._together.clear()

    def settled(self) -> int:
        """How many of the next steps are in line, whatever they take."""
        return 0 if self.reason in ("", _MEASURING) else _WINDOW - 1

    def in_line(self, busy: float, wait: float) -> None:
        """Notes a step as :meth:`step` does, whose batch was made in line."""
        if self._warm:
            self._alone.append(busy + wait)
            self._loads.append(wait)
        self._warm = True
        if self._rest:
            self._rest -= 1

    def adapt(
        self, busy: float, wait: float, ready: int, full: int, room: Callable[[], bool]
    ) -> None:
        """Lets ``depth="auto"`` grow or shrink after a step that looked ahead.

        Args:
            busy: Seconds of training.
            wait: Seconds that it waited.
            ready: How many batches lay ready then.
            full: How often, so far, batches were not begun for the depth's sake.
            room: Whether memory allows another batch.
        """
        if not self.auto or not self._ahead or self._steps <= _SETTLING:
            return
        if wait > _WAIT * (busy + wait):
            self._quiet = 0
            # Without ever having been full, more room would stay empty.
            if full > self._full and self.depth < DEEPEST and room():
                self.depth += 1
                self._full = full
                if self._shrunk:
                    self._patience, self._shrunk = 2 * self._patience, False
            return
        self._quiet = self._quiet + 1 if ready >= min(self.depth, 2) else 0
        if self._quiet >= self._patience and self.depth > 1:
            self.depth -= 1
            self._quiet, self._full, self._shrunk = 0, full, True

    def _typical(self) -> float:
        """What a step takes that looks ahead.

        Where both sides need Python, the loop gets a whole look-ahead of batches at
        once and then waits for the next: only all of them together tell what a step is.
        """
        size, steps = self.depth + 1, [*self._together]
        first = len(steps) % size
        groups = [steps[i : i + size] for i in range(first, len(steps), size)]
        if not groups:
            return _middle(steps, 0.0)
        return median(sum(group) / size for group in groups)


def _middle(values: Iterable[float], otherwise: float) -> float:
    """The median; ``otherwise`` of none."""
    found = [*values]
    return median(found) if found else otherwise


def _window(depth: int) -> int:
    """Steps over which looking ahead is judged."""
    return max(_WINDOW, 4 * (depth + 1))
