"""Layout and copy in plain torch, for where the compiled module is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnaccel.data.recipe import BATCH, ROWS, STARTS, Recipe

if TYPE_CHECKING:
    from gnnaccel.data.batcher import Layout

_ALIGN = 64


def plan_batch(
    index: Tensor,
    subset: Tensor | None,
    n: int,
    recipe: Recipe,
    found: Tensor,
    values: Tensor,
) -> int | tuple[list[int], list[int], int, int]:
    """See ``look_up`` and ``place`` in csrc/pack.h."""
    bad = (index < -n) | (index >= n)
    if bool(bad.any()):
        return int(bad.nonzero()[0])
    torch.remainder(index, n, out=found)
    if subset is not None:
        found.copy_(subset[found])
    values.zero_()
    for prefix, row in zip(recipe.prefixes, values, strict=True):
        if prefix is not None:
            torch.cumsum(prefix[found + 1] - prefix[found], 0, out=row[1:])
    totals = values[:, -1].tolist()
    sizes, offsets = [0, 0], []
    for view, part in zip(recipe.views, recipe.parts.tolist(), strict=True):
        offsets.append(sizes[view.slab])
        rows = totals[part[4]] if part[0] != STARTS else len(index) + 1
        size = rows * part[5] * part[6]
        sizes[view.slab] += -(-size // _ALIGN) * _ALIGN
    return offsets, totals, sizes[0], sizes[1]


def fill_batch(layout: Layout, slab: Tensor, small: Tensor | None) -> None:
    """See ``fill_batch`` in csrc/pack.h."""
    recipe, index, values = layout.recipe, layout.index, layout.values
    parts = recipe.parts.tolist()
    for i, view in enumerate(recipe.views):
        kind, plan, inc, step = parts[i][0], parts[i][4], parts[i][8], parts[i][9]
        at = values[plan]
        rows = layout.totals[plan] if kind != STARTS else len(at)
        block = slab if view.slab == 0 or small is None else small
        out = torch.empty(0, dtype=view.dtype).set_(  # type: ignore[call-overload]
            block.untyped_storage(),
            layout.offsets[i] // view.item,
            (*view.before, rows, *view.after),
        )
        if kind == STARTS:
            out.copy_(at)
            continue
        # NumPy's, for torch's takes two threads for four graphs, and in a process that
        # was forked from one that had threads it then waits for them for ever.
        graph = torch.from_numpy(np.arange(len(index)).repeat(at.diff().numpy()))
        if kind == BATCH:
            out.copy_(graph)
            continue
        assert kind == ROWS
        source = recipe.sources[i]
        assert source is not None
        where = torch.arange(rows) + (source.starts[index] - at[:-1])[graph]
        picked = source.data.index_select(source.dim, where)
        if inc >= 0 and step:
            by = values[inc : inc + len(picked), :-1][:, graph]
            picked = picked + by
        elif inc >= 0 and int(values[inc, -2]) != 0:
            by = values[inc, :-1][graph].to(picked.dtype)
            shape = [1] * picked.dim()
            shape[source.dim] = rows
            picked = picked + by.view(shape)
        out.copy_(picked)
