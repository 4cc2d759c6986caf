"""From packed graphs to one batch, in three steps of which the middle needs no Python.

1. ``layout`` looks up how large each part of the batch is and where it goes.
2. ``fill`` copies the parts into the memory that the caller took for them (the slab).
3. ``assemble`` makes PyG's ``Batch`` out of views of the slab.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch

from gnnaccel.data import assemble, fallback
from gnnaccel.data.pack import Pack
from gnnaccel.data.recipe import Recipe, why_not
from gnnaccel.kernels import library, memory


@dataclass(slots=True, eq=False)
class Layout:
    """Where the parts of one batch go.

    Attributes:
        index: The graphs, int64 ``[B]``, as positions in the pack.
        values: The plan, int64 ``[rows, B + 1]``: prefix sums over the batch.
        offsets: Where each part begins in its slab, in bytes.
        totals: The last column of ``values``, and ``B + 1``.
        nbytes: Size of the slab that holds what has a row per node, edge, ...
        small_nbytes: Size of the second slab, which holds what has a row per graph; 0
            where the batcher puts everything into one.
        recipe: How the batch is made.
    """

    index: Tensor
    values: Tensor
    offsets: list[int]
    totals: list[int]
    nbytes: int
    small_nbytes: int
    recipe: Recipe


class Batcher:
    """Makes batches of one data set with one choice of options.

    Args:
        pack: The graphs.
        subset: Which of them the data set has, int64 ``[n]``; ``None`` for all.
        follow_batch: Attributes that get a batch vector of their own.
        exclude_keys: Attributes that are left out.
        split: Whether what has one row per graph (``y`` and the like) gets a slab of
            its own, so that who keeps it does not keep the whole batch's memory.
    """

    def __init__(
        self,
        pack: Pack,
        subset: Tensor | None = None,
        follow_batch: Collection[str] | None = None,
        exclude_keys: Collection[str] | None = None,
        split: bool = True,
    ) -> None:
        self.pack = pack
        self._subset = subset
        self._n = pack.n if subset is None else len(subset)
        self._follow = frozenset(follow_batch or ())
        self._exclude = frozenset(exclude_keys or ())
        self._split = split
        self._recipes: dict[tuple[int, ...], Recipe] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Recipes hold addresses, which are another process's own business.
        return {**self.__dict__, "_recipes": {}}

    def layout(self, index: Tensor) -> Layout:
        """Plans the batch of some graphs.

        Args:
            index: Positions in the data set, int64 ``[B]`` on the CPU; negative ones
                count from the end.

        Raises:
            IndexError: A position is out of range, or there is none.
            KeyError: Some of the graphs lack an attribute that the others have.
        """
        if index.dtype is not torch.int64 or not index.is_contiguous():
            index = as_index(index)
        graphs = len(index)
        if graphs == 0:
            raise IndexError("Expected at least one graph to batch (got none)")
        recipe = self._recipes.get(()) if self.pack.which is None else None
        if recipe is None:
            recipe = self._recipe(index)
        rows = len(recipe.prefixes)
        # The positions that were looked up stand before the plan.
        memory_ = torch.empty(graphs + rows * (graphs + 1), dtype=torch.int64)
        found, values = memory_[:graphs], memory_[graphs:].view(rows, graphs + 1)
        module = library.module
        if module is None:
            planned = fallback.plan_batch(
                index, self._subset, self._n, recipe, found, values
            )
        else:
            recipe.locate()
            subset = self._subset
            planned = module.plan_batch(
                index.data_ptr(),
                graphs,
                0 if subset is None else subset.data_ptr(),
                self._n,
                recipe.addresses.data_ptr(),
                rows,
                recipe.parts.data_ptr(),
                len(recipe.views),
                found.data_ptr(),
                values.data_ptr(),
            )
        if isinstance(planned, int):
            raise IndexError(
                f"Expected positions of graphs from {-self._n} to {self._n - 1} "
                f"(got {int(index[planned])})"
            )
        offsets, totals, size, small_size = planned
        totals.append(graphs + 1)
        return Layout(found, values, offsets, totals, size, small_size, recipe)

    def _recipe(self, index: Tensor) -> Recipe:
        pack = self.pack
        numbers: tuple[int, ...] = ()
        if pack.which is not None:
            try:
                found = index if self._subset is None else self._subset[index]
                each = pack.which[found].tolist()
            except IndexError:
                each = [0]  # the layout names the position
                found = index
            numbers = tuple(dict.fromkeys(each))
        recipe = self._recipes.get(numbers)
        if recipe is None:
            lack = why_not(pack, numbers, self._exclude)
            if lack is not None:
                number, what = lack
                raise KeyError(
                    f"Graph {int(index[each.index(number)])} of the data set has no "
                    f"{what}, which other graphs of its batch have. Give it to all "
                    "graphs, or leave it out with exclude_keys."
                )
            recipe = Recipe(
                pack, numbers or (0,), self._follow, self._exclude, self._split
            )
            self._recipes[numbers] = recipe
        return recipe

    def native_args(
        self, layout: Layout, slab: Tensor, small: Tensor | None = None
    ) -> tuple[int, ...]:
        """What the native ``fill_batch`` takes, up to ``alone``.

        ``(parts, count, index, values, graphs, slab, small)``: addresses and sizes. Who
        calls it keeps ``layout`` and the slabs alive meanwhile.
        """
        recipe = layout.recipe
        recipe.locate()
        return (
            recipe.parts.data_ptr(),
            len(recipe.views),
            layout.index.data_ptr(),
            layout.values.data_ptr(),
            len(layout.index),
            slab.data_ptr(),
            0 if small is None else small.data_ptr(),
        )

    def fill(
        self,
        layout: Layout,
        slab: Tensor,
        small: Tensor | None = None,
        threads: int = 0,
    ) -> None:
        """Copies the graphs into the slabs; safe in any thread, without the GIL.

        Args:
            layout: Out of :meth:`layout`.
            slab: uint8 ``[>= layout.nbytes]``, contiguous, aligned to 64 bytes.
            small: uint8 ``[>= layout.small_nbytes]``; may be ``None`` where that is 0.
            threads: 1 to stay in the calling thread, 0 for torch's pool where it pays.
        """
        if library.module is None:
            fallback.fill_batch(layout, slab, small)
        else:
            args = self.native_args(layout, slab, small)
            library.module.fill_batch(*args, threads == 1)

    def assemble(
        self, layout: Layout, slab: Tensor, small: Tensor | None = None
    ) -> Batch:
        """The batch whose tensors are views of the filled slabs."""
        return assemble.assemble(self.pack, layout, slab, small)

    def __call__(self, index: Tensor) -> Batch:
        """All three steps, in memory that is taken for the batch."""
        layout = self.layout(index)
        slab = memory.empty((layout.nbytes,), torch.uint8)
        small = None
        if layout.small_nbytes:
            small = torch.empty(layout.small_nbytes, dtype=torch.uint8)
        self.fill(layout, slab, small)
        return self.assemble(layout, slab, small)


def as_index(index: Any) -> Tensor:
    """``index`` as an int64 tensor ``[B]``, contiguous and on the CPU.

    Raises:
        TypeError: It holds something else than integers: a mask is no position.
    """
    if type(index) is list and index and type(index[0]) is int:
        # What samplers give; torch takes seven times as long to read it.
        with contextlib.suppress(TypeError, OverflowError):
            return torch.frombuffer(array.array("q", index), dtype=torch.int64)
    found = torch.as_tensor(index, device="cpu").reshape(-1)
    kind = found.dtype
    other = kind is torch.bool or kind.is_floating_point or kind.is_complex
    if other and len(found):  # an empty list has no integers to tell it by
        raise TypeError(f"Expected positions of graphs as integers (got {kind})")
    return found.to(torch.int64).contiguous()
