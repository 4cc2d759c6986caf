"""The compiled module: loaded once, and joined to torch's thread pool."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import torch

_MEND = (
    "reinstall gnnaccel on a machine with a C++ compiler (Debian, Ubuntu: "
    "apt install g++), without GNNACCEL_NATIVE=OFF"
)


def _load() -> tuple[Any, str | None]:
    """The module and ``None``, or ``None`` and why it can't be used."""
    try:
        module = importlib.import_module("gnnaccel._native")
    except ImportError as error:
        return None, f"the compiled module does not load ({error}); {_MEND}"
    libraries = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (libraries / name).exists():
            pool = ctypes.CDLL(str(libraries / name))
            try:
                entries = (pool.torch_parallel_for, pool.torch_get_num_threads)
            except AttributeError:
                return None, (
                    f"torch {torch.__version__} has no torch_parallel_for: "
                    "pip install 'torch>=2.10'"
                )
            module.set_pool(
                *(ctypes.cast(entry, ctypes.c_void_p).value for entry in entries)
            )
            return module, None
    return None, f"torch's CPU library was not found in {libraries}"


#: The module, or ``None``; and why it is ``None``.
module, reason = _load()
