"""The graph that a benchmark runs on, and the formats that peers want it in.

Three sources, all named by one string:

* ``rmat:SCALE:FACTOR[:SEED]``: 2^SCALE nodes, FACTOR * 2^SCALE directed edges;
* ``FILE.npz`` with an array ``edge_index`` [2, E] and optionally ``x`` and
  ``num_nodes``;
* ``NAME`` together with a folder whose ``load.py`` has ``load(NAME)`` that returns a
  PyG ``Data``.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The Graph500 values: a skewed, power-law-like degree distribution.
RMAT_A, RMAT_B, RMAT_C = 0.57, 0.19, 0.19


@dataclass(frozen=True, eq=False)
class Compressed:
    """Edges grouped by one of their two ends.

    Attributes:
        rowptr: [num_nodes + 1] int64, where each group begins.
        col: [E] int64, the other end of each edge.
        perm: [E] int64, the input position of each edge; stable inside a group.
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor

    @staticmethod
    def of(row: Tensor, col: Tensor, num_nodes: int) -> Compressed:
        """Groups the edges by ``row`` with torch's stable sort."""
        perm = torch.sort(row, stable=True).indices
        rowptr = row.new_zeros(num_nodes + 1)
        rowptr[1:] = torch.bincount(row, minlength=num_nodes).cumsum(0)
        return Compressed(rowptr, col[perm], perm)


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph whose edges run from ``edge_index[0]`` to ``edge_index[1]``.

    Attributes:
        name: the string that names it on the command line.
        edge_index: [2, E] int64, in any order.
        num_nodes: number of nodes, isolated ones included.
        x: [num_nodes, F] float32 node features, if the source has any.
    """

    name: str
    edge_index: Tensor
    num_nodes: int
    x: Tensor | None = None

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def src(self) -> Tensor:
        return self.edge_index[0]

    @property
    def dst(self) -> Tensor:
        return self.edge_index[1]

    @functools.cached_property
    def by_dst(self) -> Compressed:
        """What the forward pass walks: for each node the edges that enter it."""
        return Compressed.of(self.dst, self.src, self.num_nodes)

    @functools.cached_property
    def by_src(self) -> Compressed:
        """What the backward pass walks: for each node the edges that leave it."""
        return Compressed.of(self.src, self.dst, self.num_nodes)

    def without_self_loops(self) -> Problem:
        """The same graph, edges i -> i left out."""
        keep = self.src != self.dst
        if bool(keep.all()):
            return self
        return Problem(self.name, self.edge_index[:, keep], self.num_nodes, self.x)


@functools.lru_cache(maxsize=2)
def rmat(scale: int, factor: int, seed: int = 0) -> Problem:
    """A seeded R-MAT graph with shuffled node numbers; duplicates and loops stay.

    Each edge picks one quadrant of the adjacency matrix per level, ``scale`` times.
    The shuffle takes away the order by degree that R-MAT numbers have by nature and
    real data don't.

    Args:
        scale: log2 of the number of nodes, 1 to 30.
        factor: edges per node.
        seed: of numpy's default generator.

    Raises:
        ValueError: ``scale`` or ``factor`` is out of range.
    """
    if not 1 <= scale <= 30 or factor < 0:
        raise ValueError(f"rmat:{scale}:{factor}: scale must be 1..30, factor >= 0")
    rng = np.random.default_rng(seed)
    num_nodes, num_edges = 1 << scale, factor << scale
    src = np.zeros(num_edges, np.int64)
    dst = np.zeros(num_edges, np.int64)
    for _ in range(scale):
        draw = rng.random(num_edges, np.float32)
        # Quadrants in the order a, b, c, d: the lower half begins with c, the right
        # half is b and d.
        lower = draw >= RMAT_A + RMAT_B
        right = (draw >= RMAT_A) ^ lower | (draw >= RMAT_A + RMAT_B + RMAT_C)
        src = 2 * src + lower
        dst = 2 * dst + right
    label = rng.permutation(num_nodes)
    edge_index = torch.from_numpy(np.stack([label[src], label[dst]]))
    name = f"rmat:{scale}:{factor}" + (f":{seed}" if seed else "")
    return Problem(name, edge_index, num_nodes)


def load_npz(path: Path) -> Problem:
    """Reads ``edge_index`` and optionally ``x`` and ``num_nodes`` from an npz file.

    Raises:
        ValueError: ``edge_index`` is missing or isn't [2, E].
    """
    with np.load(path, allow_pickle=False) as arrays:
        if "edge_index" not in arrays:
            raise ValueError(f"{path} has no array 'edge_index', only {arrays.files}")
        edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
        x = torch.from_numpy(arrays["x"]).float() if "x" in arrays else None
        num_nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else None
    return _problem(path.name, edge_index, x, num_nodes)


def from_folder(name: str, folder: Path) -> Any:
    """What the ``load.py`` in ``folder`` gives for data set ``name``.

    Raises:
        ValueError: the folder has no ``load.py``.
    """
    script = folder / "load.py"
    spec = importlib.util.spec_from_file_location("benchmarks_data_load", script)
    if not script.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{folder} has no load.py that could load {name!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(name)


def load_from_folder(name: str, folder: Path) -> Problem:
    """Loads data set ``name`` by the ``load.py`` in ``folder``.

    Raises:
        ValueError: the folder has no ``load.py``, or the data set isn't one graph.
    """
    data = from_folder(name, folder)
    if getattr(data, "edge_index", None) is None:
        raise ValueError(f"data set {name!r} isn't one graph with an edge_index")
    return _problem(name, data.edge_index, data.x, data.num_nodes)


def load(name: str, data: Path | None = None) -> Problem:
    """The graph that ``name`` stands for; see the module's docstring.

    Raises:
        ValueError: no such graph, and what would be one.
    """
    if name.startswith("rmat:"):
        try:
            numbers = [int(part) for part in name.split(":")[1:]]
            scale, factor, *seed = numbers
        except ValueError:
            raise ValueError(f"{name!r} isn't rmat:SCALE:FACTOR[:SEED]") from None
        return rmat(scale, factor, *seed[:1])
    if name.endswith(".npz"):
        return load_npz(Path(name))
    if data is not None:
        return load_from_folder(name, data)
    raise ValueError(
        f"unknown graph {name!r}: give rmat:SCALE:FACTOR, a .npz file, or the name "
        "of a data set and --data with the folder of its load.py"
    )


def _problem(
    name: str, edge_index: Tensor, x: Tensor | None, num_nodes: int | None
) -> Problem:
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], got {list(edge_index.shape)}")
    if num_nodes is None:
        if x is not None:
            num_nodes = x.size(0)
        else:
            num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    return Problem(name, edge_index.long().contiguous(), num_nodes, x)
