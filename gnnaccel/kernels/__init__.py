"""Kernels: dumb and fast, one backend per module.

A backend is a module with the functions of :mod:`gnnaccel.kernels.reference`, which is
the specification: they take a :class:`Grouping` and tensors, neither validate nor know
autograd, and run on whatever device and dtype their :func:`serves` admits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import torch

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
_chosen = "auto"


def pick(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The backend that serves ``dtype`` on ``device`` under the current choice."""
    if _chosen != "auto" and _MODULES[_chosen].serves(device, dtype):
        return _MODULES[_chosen]
    if _chosen == "auto":
        for module in _MODULES.values():
            if module.serves(device, dtype):
                return module
    return reference


def backends() -> dict[str, str | None]:
    """Every backend by name; ``None`` if it can be used, else why not."""
    return {name: module.reason() for name, module in _MODULES.items()}


def backend(name: str) -> AbstractContextManager[None]:
    """Chooses the backend by name, for good or as a context manager.

    Args:
        name: ``"auto"`` (the first of the following that serves the tensors at hand),
            ``"native"`` (C++), ``"scatter"`` (torch-scatter and torch-sparse) or
            ``"reference"`` (plain torch). Tensors that a backend does not serve, such
            as CUDA tensors under ``"native"``, go to the reference.

    Returns:
        A context manager that puts the former choice back when it exits.

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
    global _chosen
    former, _chosen = _chosen, name
    return _restoring(former)


@contextmanager
def _restoring(former: str) -> Iterator[None]:
    try:
        yield
    finally:
        global _chosen
        _chosen = former
