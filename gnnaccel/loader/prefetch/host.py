"""What the pipeline asks of the machine it runs on: threads, conditions and a clock.

All waiting goes through here, so that a test can put threads of its own making and a
virtual clock in their place.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, at most ``timeout`` seconds."""


class Host(Protocol):
    """Where the pipeline's own Python runs."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def condition(self) -> Any:
        """A new condition with a lock, as ``threading.Condition``."""

    def start(self, target: Callable[[], None], name: str) -> Thread:
        """Runs ``target`` on a new thread.

        Raises:
            RuntimeError: The system has no thread to give.
        """


class Machine:
    """The host that there is."""

    def now(self) -> float:
        """See :class:`Host`."""
        return time.perf_counter()

    def condition(self) -> threading.Condition:
        """See :class:`Host`."""
        return threading.Condition()

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """See :class:`Host`; the thread sees the caller's ambient state."""
        # A daemon: Python waits for the others before anyone could tell them to end.
        thread = threading.Thread(target=_ambient(target), name=name, daemon=True)
        thread.start()
        return thread


def _ambient(target: Callable[[], None]) -> Callable[[], None]:
    """``target`` with what a loop of the calling thread would find set.

    Context variables and torch's modes (grad, inference, autocast, default device)
    belong to a thread.
    """
    context = contextvars.copy_context()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    there = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if there is None else {"cpu", there.type}
    casts = [
        torch.autocast(kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]

    def run() -> None:
        with ExitStack() as modes:
            # Sets grad mode as well, so it comes first.
            modes.enter_context(torch.inference_mode(inference))
            modes.enter_context(torch.set_grad_enabled(grad))
            for cast in casts:
                modes.enter_context(cast)
            if device.type != "cpu":
                modes.enter_context(device)
            target()

    return lambda: context.run(run)
