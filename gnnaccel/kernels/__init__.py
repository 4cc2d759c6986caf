"""Kernels: dumb and fast, one backend per module.

A backend is a module with the functions of :mod:`gnnaccel.kernels.reference`, which is
the specification: they take a :class:`Grouping` and tensors, neither validate nor know
autograd, and run on whatever device and dtype their :func:`serves` admits.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gnnaccel.kernels import memory, native, reference, scatter
from gnnaccel.kernels.grouping import Grouping

__all__ = [
    "Grouping",
    "backend",
    "backends",
    "memory",
    "native",
    "pick",
    "reference",
    "scatter",
]

#: In the order of preference. The reference serves everything.
_MODULES: dict[str, ModuleType] = {
    "native": native,
    "scatter": scatter,
    "reference": reference,
}


class Choice:
    """One call of :func:`backend`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entered = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(self, *_: object) -> None:
        if self in _choices:
            _choices.remove(self)


#: What `backend` was asked for and is not over yet; the last counts.
_choices: list[Choice] = []


def pick(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The backend that serves ``dtype`` on ``device`` under the current choice."""
    chosen = _choices[-1].name if _choices else "auto"
    if chosen == "auto":
        for module in _MODULES.values():
            if module.serves(device, dtype):
                return module
    elif _MODULES[chosen].serves(device, dtype):
        return _MODULES[chosen]
    return reference


def pick_for(x: Tensor) -> ModuleType:
    """The backend that serves ``x`` under the current choice."""
    return reference if transforming(x) else pick(x.device, x.dtype)


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def transforming(x: Tensor) -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode AD looks through the ops.

    Tensors have no memory of their own then; only plain torch operations go through.
    The same holds while ``make_fx`` writes down what it sees, also of true tensors.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(x)
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(_PROXY) is not None
    )


def backends() -> dict[str, str | None]:
    """Every backend by name; ``None`` if it can be used, else why not."""
    return {name: module.reason() for name, module in _MODULES.items()}


def backend(name: str) -> Choice:
    """Chooses the backend by name, for good or as a context manager.

    Args:
        name: ``"auto"`` (the first of the following that serves the tensors at hand),
            ``"native"`` (C++), ``"scatter"`` (torch-scatter and torch-sparse) or
            ``"reference"`` (plain torch). Tensors that a backend does not serve, such
            as CUDA tensors under ``"native"``, go to the reference.

    Returns:
        A context manager that takes the choice back when it exits, in whatever order
        several of them exit.

    Raises:
        ValueError: There is no backend of that name.
        ImportError: The backend is not installed; the message says how to.
    """
    if name != "auto" and name not in _MODULES:
        raise ValueError(
            f"Expected a backend out of {['auto', *_MODULES]} (got {name!r})"
        )
    if name != "auto" and (why := _MODULES[name].reason()) is not None:
        raise ImportError(f"The backend {name!r} is not available: {why}")
    # The last one, if never entered, was for good: it replaces those before it.
    if _choices and not _choices[-1].entered:
        _choices[:-1] = [c for c in _choices[:-1] if c.entered]
    choice = Choice(name)
    _choices.append(choice)
    return choice
