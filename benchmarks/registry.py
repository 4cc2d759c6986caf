"""What a benchmark case is, and the table of all cases.

A case is a function that builds a `Workload` for a `Setting`::

    @case("spmm_sum", group="kernels", check=(torch.float32, torch.float64))
    def spmm_sum(setting: Setting, variant: str) -> Workload: ...

A workload holds *makers*, one per implementation, so that a peer that isn't installed
is found out when it is made, and a memory probe makes only the one it measures.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.graphs import Problem

Output = Tensor | tuple[Tensor, ...]

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
STOCK, OURS = "pyg", "gnnaccel"


class Unavailable(Exception):
    """This implementation can't run here; the message says why."""


def optional(name: str) -> ModuleType:
    """Imports an optional peer.

    Raises:
        Unavailable: it isn't installed, or its import fails.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{name} isn't installed ({error})") from error


@dataclass(frozen=True)
class Setting:
    """What a case is built for.

    Attributes:
        problem: the graph.
        features: width of ``x``.
        dtype: of ``x``, weights and parameters.
        quick: as small and short as possible (smoke test).
        data: folder of data sets with a ``load.py``, if one was given.
    """

    problem: Problem
    features: int
    dtype: torch.dtype = torch.float32
    quick: bool = False
    data: Path | None = None

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal numbers, the same in every dtype up to rounding."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.dtype)

    def x(self, features: int | None = None) -> Tensor:
        """A leaf [num_nodes, features] that requires its gradient."""
        width = self.features if features is None else features
        return self.random(self.problem.num_nodes, width, seed=1).requires_grad_()

    def edge_weight(self) -> Tensor:
        """Weights [E] in (0.1, 1.1): positive, so that sums don't cancel."""
        generator = torch.Generator().manual_seed(2)
        weight = torch.rand(self.problem.num_edges, generator=generator) + 0.1
        return weight.to(self.dtype)


@dataclass(frozen=True)
class Implementation:
    """One competitor.

    Attributes:
        forward: maps x to the output (or a tuple of outputs for a case without
            backward).
        parameters: further tensors that get a gradient, by a name that all
            implementations of the workload share.
        prepare: called before each forward, untimed.
        note: anything the table should say about it.
    """

    forward: Callable[[Tensor], Output]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    note: str = ""


Maker = Callable[[], Implementation]
Reading = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """A case, built for one setting.

    Attributes:
        x: leaf input shared by all implementations.
        makers: by name; `STOCK` is the yardstick, `OURS` the contestant.
        edges: number of edges, for times per edge.
        reference: name of the maker whose results are taken as right.
        exact: gives the results in float64 and rounds them, where the reference itself
            is no closer to them than the tolerance: it is what counts then.
        phases: subset of (FORWARD, BACKWARD, STEP); STEP is both together.
        readings: loops that only do the unavoidable, timed in turn with the rest.
        bounds: by phase, the readings whose times add up to its bound.
        bytes_moved: by phase, the bytes that must move at least once; where
            ``bounds`` has no entry, these at the speed of a plain copy are the bound.
        bound_name: what the bound counts, for the table.
        graph: name of the graph if it isn't the setting's.
    """

    x: Tensor
    makers: Mapping[str, Maker]
    edges: int
    reference: str = STOCK
    exact: Callable[[], dict[str, Tensor]] | None = None
    phases: tuple[str, ...] = (FORWARD, BACKWARD, STEP)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    bounds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    bound_name: str = ""
    graph: str = ""


Builder = Callable[[Setting, str], Workload]


@dataclass(frozen=True)
class Case:
    """A registered case.

    Attributes:
        name: unique, as typed on the command line.
        group: "kernels", "layers", or one that is not run by default: "extra",
            "loading".
        build: makes the workload of one variant.
        variants: given the setting, the variants to run one after the other.
        check: dtypes in which the results are compared before anything is timed.
        kind: "time" or "memory".
        summary: first line of the builder's docstring.
    """

    name: str
    group: str
    build: Builder
    variants: Callable[[Setting], tuple[str, ...]]
    check: tuple[torch.dtype, ...]
    kind: str
    summary: str


CASES: dict[str, Case] = {}


def case(
    name: str,
    *,
    group: str,
    variants: tuple[str, ...] | Callable[[Setting], tuple[str, ...]] = ("",),
    check: tuple[torch.dtype, ...] = (torch.float32,),
    kind: str = "time",
) -> Callable[[Builder], Builder]:
    """Registers the decorated builder; see `Case` for the arguments.

    Raises:
        ValueError: a case of that name exists.
    """

    def register(build: Builder) -> Builder:
        if name in CASES:
            raise ValueError(f"case {name!r} is registered twice")
        choose = variants if callable(variants) else lambda setting: variants
        summary = (build.__doc__ or "").strip().split("\n")[0]
        CASES[name] = Case(name, group, build, choose, check, kind, summary)
        return build

    return register


def select(patterns: list[str]) -> list[Case]:
    """The cases that match any of ``patterns``, in the order of registration.

    A pattern is a case, a group, ``all``, or has wildcards (``spmm_*``). No pattern
    stands for the groups "kernels" and "layers".

    Raises:
        ValueError: a pattern matches nothing.
    """
    patterns = patterns or ["kernels", "layers"]
    chosen = set()
    for pattern in patterns:
        found = [
            c.name
            for c in CASES.values()
            if pattern in ("all", c.group) or fnmatchcase(c.name, pattern)
        ]
        if not found:
            raise ValueError(f"no case matches {pattern!r}; --list shows them all")
        chosen.update(found)
    return [c for c in CASES.values() if c.name in chosen]
