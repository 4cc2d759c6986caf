"""``Recipe``: how a batch of certain graphs is made, worked out once.

A batch's tensors are parts of a slab. What depends on the graphs that are drawn are
only prefix sums: where each graph's rows begin in each part. They form the plan, one
row for each distinct prefix sum of the pack.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, HeteroData
from torch_geometric.data.storage import NodeStorage

from gnnaccel.data.leaves import Fields, Items, Objects, Rows, Store, Tree
from gnnaccel.data.pack import Pack
from gnnaccel.data.shell import BatchShell

# Kinds of parts, as csrc/pack.h has them.
ROWS, BATCH, STARTS = range(3)


@dataclass(slots=True)
class Step:
    """One attribute of the batch.

    Attributes:
        name: The attribute.
        tree: What it is packed as; ``None`` at ``num_nodes``: ``made`` has all values.
        made: Where it is: a :class:`Leaf`, or a tree of them; ``None`` at objects.
        follow: The number of its batch vector among the parts (``ptr`` is the next);
            -1 if it has one that PyG must make; ``None`` if it has none.
    """

    name: str
    tree: Tree | None
    made: Any
    follow: int | None


@dataclass(slots=True)
class Leaf:
    """One packed tensor of a batch: its part, and the plan's rows that speak of it."""

    part: int
    starts: int
    inc: int
    column: int


@dataclass(slots=True)
class StoreSteps:
    """One storage of the batch; ``counts`` is the number of its batch vector's part."""

    key: Any
    steps: list[Step]
    counts: int | None


@dataclass(slots=True)
class View:
    """How a part becomes a tensor: its shape is ``before + (rows,) + after``.

    ``row`` is the plan's, whose last number says how many rows; -1 for a row itself.
    """

    dtype: torch.dtype
    item: int
    slab: int
    row: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class Recipe:
    """How to batch graphs of one or several signatures.

    Args:
        pack: The graphs.
        numbers: The signatures of the batch's graphs, by first appearance.
        follow_batch: Attributes that get a batch vector of their own.
        exclude_keys: Attributes that are left out.
        split: Whether what has one row per graph goes to a second slab.
    """

    def __init__(
        self,
        pack: Pack,
        numbers: tuple[int, ...],
        follow_batch: Collection[str],
        exclude_keys: Collection[str],
        split: bool,
    ) -> None:
        signatures = [pack.signatures[number] for number in numbers]
        self.cls = signatures[0].cls
        self.shell = BatchShell(self.cls)
        self._split = split
        self.sources: list[Rows | None] = []
        self.views: list[View] = []
        self.prefixes: list[Tensor | None] = [None]
        self._known: dict[tuple[int, ...], int] = {}
        self._fields: list[list[int]] = []
        self.has_objects = False
        self.stores: list[StoreSteps] = []
        number_nodes = not issubclass(self.cls, Batch)
        for key, names in _merged(signatures):
            store = pack.stores[key]
            steps = [
                self._step(name, store, name in follow_batch)
                for name in names
                if name not in exclude_keys and name != "ptr"
            ]
            counts = None
            if number_nodes and store.counts is not None and _infers(names):
                counts = self._numbering(self._row(store.counts))
            self.stores.append(StoreSteps(key, steps, counts))
        self.keys = [steps.key for steps in self.stores]
        self.parts = torch.tensor(self._fields, dtype=torch.int64).reshape(-1, 11)
        self.addresses = torch.zeros(len(self.prefixes), dtype=torch.int64)
        rows = [source for source in self.sources if source is not None]
        held = [t for s in rows for t in (s.data, s.starts)]
        held += [prefix for prefix in self.prefixes if prefix is not None]
        self._held = list({id(tensor): tensor for tensor in held}.values())
        self._where: list[int] = []
        self.locate()

    def locate(self) -> None:
        """Notes where the packed tensors lie.

        To be called before every use of ``parts`` and ``addresses``: torch moves a
        tensor's memory when it is sent to another process, and frees what it leaves.
        """
        where = [tensor.data_ptr() for tensor in self._held]
        if where == self._where:
            return
        self._where = where
        for i, source in enumerate(self.sources):
            if source is not None:
                self.parts[i, 2] = source.data.data_ptr()
                self.parts[i, 3] = source.starts.data_ptr()
        for i, prefix in enumerate(self.prefixes):
            self.addresses[i] = 0 if prefix is None else prefix.data_ptr()

    def _step(self, name: str, store: Store, followed: bool) -> Step:
        if name == "num_nodes":
            return Step(name, None, store.num_nodes, None)
        tree = store.attrs[name]
        made = self._make(tree)
        follow = None
        if followed:
            simple = isinstance(made, Leaf)
            follow = self._numbering(made.starts) if simple else -1
        return Step(name, tree, made, follow)

    def _make(self, tree: Tree) -> Any:
        if isinstance(tree, Rows):
            return self._leaf(tree)
        if isinstance(tree, Fields):
            return {key: self._make(item) for key, item in tree.items.items()}
        if isinstance(tree, Items):
            return [self._make(item) for item in tree.items]
        self.has_objects = True
        return None

    def _leaf(self, rows: Rows) -> Leaf:
        data, dim = rows.data, rows.dim
        starts = self._row(rows.starts)
        inc = self._row(*rows.inc) if rows.inc else 0
        outer = math.prod(data.shape[:dim])
        row_bytes = math.prod(data.shape[dim + 1 :]) * data.element_size()
        column = len(rows.inc) if rows.inc_column else 0
        self._fields.append(
            [
                *(ROWS, self._slab(rows), 0, 0),  # what `locate` finds
                *(starts, row_bytes, outer, data.shape[dim], inc if rows.inc else -1),
                *(int(bool(column)), data.element_size()),
            ]
        )
        self.sources.append(rows)
        shape = tuple(data.shape[:dim]), tuple(data.shape[dim + 1 :])
        self.views.append(
            View(data.dtype, data.element_size(), self._slab(rows), starts, *shape)
        )
        return Leaf(len(self.views) - 1, starts, inc, column)

    def _slab(self, rows: Rows) -> int:
        # By far fewer rows than nodes and edges: one for each graph.
        one_each = rows.starts.numel() - 1 == rows.data.shape[rows.dim]
        return int(self._split and one_each)

    def _numbering(self, row: int) -> int:
        """A batch vector and a ``ptr`` after a row of the plan; the first's number."""
        for kind, slab, size in ((BATCH, 0, row), (STARTS, int(self._split), -1)):
            self._fields.append([kind, slab, 0, 0, row, 8, 1, 0, -1, 0, 8])
            self.sources.append(None)
            self.views.append(View(torch.int64, 8, slab, size, (), ()))
        return len(self.views) - 2

    def _row(self, *prefixes: Tensor) -> int:
        """The first of the plan's rows for these prefix sums, one after the other."""
        for key, row in self._known.items():
            known = self.prefixes[row : row + len(key)]
            if len(key) == len(prefixes) and all(
                p is q or (p is not None and torch.equal(p, q))
                for p, q in zip(known, prefixes, strict=True)
            ):
                return row
        row = len(self.prefixes)
        self.prefixes += prefixes
        self._known[tuple(range(row, row + len(prefixes)))] = row
        return row


def _merged(signatures: list[Any]) -> list[tuple[Any, tuple[str, ...]]]:
    """The storages of a batch: those of its first graph, then what others add."""
    found: dict[Any, tuple[str, ...]] = {}
    for signature in signatures:
        for key, names in signature.stores:
            found.setdefault(key, names)
    # As PyG orders them: the graph's own, nodes, edges.
    return sorted(found.items(), key=lambda item: _rank(item[0]))


def _rank(key: Any) -> int:
    return 0 if key is None else 2 if isinstance(key, tuple) else 1


def _infers(names: tuple[str, ...]) -> bool:
    probe = NodeStorage()
    probe._mapping = dict.fromkeys(names)
    return bool(probe.can_infer_num_nodes)


def why_not(
    pack: Pack, numbers: tuple[int, ...], exclude_keys: Collection[str]
) -> tuple[int, str] | None:
    """Why graphs of these signatures can't share a batch: one that lacks something.

    Returns:
        The number of its signature and what it lacks; ``None`` if they can.
    """
    holders: dict[Any, list[int]] = {}
    for number in numbers:
        for key, _ in pack.signatures[number].stores:
            holders.setdefault(key, []).append(number)
    for key, having in holders.items():
        names = {n: set(dict(pack.signatures[n].stores)[key]) for n in having}
        wanted = set().union(*names.values()) - set(exclude_keys) - {"ptr"}
        of = "" if key is None else f" of {key!r}"
        for number in having:
            for name in sorted(wanted - names[number]):
                return number, f"attribute {name!r}{of}"
        for number in numbers:
            if number in having:
                continue
            own_inc = pack.signatures[having[0]].cls.__inc__ is not HeteroData.__inc__
            for name in sorted(wanted - {"num_nodes"}):
                if not _has_empty(pack.stores[key].attrs[name], own_inc):
                    return number, f"type {key!r}, whose {name!r} has no empty value"
    return None


def _has_empty(tree: Tree, own_inc: bool) -> bool:
    """Whether a graph without the storage can take part with no rows."""
    if isinstance(tree, Rows):
        return not (own_inc and tree.inc)
    if isinstance(tree, Objects):
        return False
    items = tree.items.values() if isinstance(tree, Fields) else tree.items
    return all(_has_empty(item, own_inc) for item in items)
