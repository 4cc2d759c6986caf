"""gnnaccel: PyTorch Geometric training at the speed of the hardware, by one line."""

import importlib.metadata

from gnnaccel import nn, ops
from gnnaccel.explain import explain
from gnnaccel.graph import Graph
from gnnaccel.optimize import optimize, restore

try:
    __version__ = importlib.metadata.version("gnnaccel")
except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+source"

__all__ = ["Graph", "__version__", "explain", "nn", "ops", "optimize", "restore"]
