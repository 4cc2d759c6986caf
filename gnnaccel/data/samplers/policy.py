"""Budgets, and what becomes of graphs that break one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnaccel.data.samplers.checks import check_count
from gnnaccel.data.samplers.plan import Ints
from gnnaccel.data.samplers.sizes import graph_sizes


@dataclass(frozen=True)
class Limits:
    """What a batch may hold at most; ``None``: unlimited."""

    max_nodes: int | None
    max_edges: int | None
    max_graphs: int | None
    max_bytes: int | None

    def __post_init__(self) -> None:
        given = {name: v for name, v in vars(self).items() if v is not None}
        if not given:
            raise ValueError(
                "Expected at least one of 'max_nodes', 'max_edges', 'max_graphs' and "
                "'max_bytes' (got none)"
            )
        for name, value in given.items():
            check_count(name, value, 1)

    @property
    def kinds(self) -> list[str]:
        """The kinds of size that are limited."""
        kinds = ("nodes", "edges", "bytes")
        return [kind for kind in kinds if getattr(self, f"max_{kind}") is not None]

    @property
    def values(self) -> Ints:
        """``[k]``, int64: the limit of each of :attr:`kinds`."""
        limits = [min(getattr(self, f"max_{kind}"), 2**63 - 1) for kind in self.kinds]
        return np.array(limits, dtype=np.int64)


def admit(
    dataset: Any, limits: Limits, too_big: str, extra: Sequence[str] = ()
) -> tuple[Ints, Ints, Ints]:
    """The graphs that are dealt out, and their sizes.

    Args:
        dataset: See :func:`gnnaccel.data.samplers.sizes.graph_sizes`.
        limits: What a batch may hold.
        too_big: ``"error"``, ``"alone"`` or ``"skip"``.
        extra: Further kinds of size to measure.

    Returns:
        ``[n]`` positions in the data set; ``[k, n]``, their sizes of the limited kinds;
        ``[len(extra), n]``, their other sizes.

    Raises:
        ValueError: A graph is too big and ``too_big="error"``.
    """
    kinds = limits.kinds
    wanted = list(dict.fromkeys([*kinds, *extra]))
    measured = graph_sizes(dataset, wanted)
    sizes = measured[: len(kinds)]
    too_large = sizes > limits.values[:, None]
    broken = too_large.any(axis=0)
    graphs = np.arange(len(dataset))
    if too_big == "error" and broken.any():
        first = int(broken.argmax())
        row = int(too_large[:, first].argmax())
        kind, size = kinds[row], int(sizes[row, first])
        others = f"; {int(broken.sum())} graphs are too big" if broken.sum() > 1 else ""
        raise ValueError(
            f"Graph {first} has {size} {kind}, more than max_{kind}="
            f"{limits.values[row]} allows in a batch{others}: raise max_{kind}, give "
            f"such graphs a batch of their own (too_big='alone') or leave them out "
            f"(too_big='skip')"
        )
    if too_big == "skip":
        graphs = graphs[~broken]
    rows = [wanted.index(kind) for kind in extra]
    other_sizes = np.take(measured[rows], graphs, axis=1)
    return graphs, np.take(sizes, graphs, axis=1), other_sizes
