"""HeteroLinear: one product per type, on rows that are sorted by type once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

from gnnaccel.cache import remember
from gnnaccel.kernels import memory, transforming
from gnnaccel.nn import dense
from gnnaccel.nn.fused import is_served
from gnnaccel.nn.stand_in import StandIn
from gnnaccel.ops.adj import tracing
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather

_DTYPES = (torch.float32, torch.float64)


class Sorted(NamedTuple):
    """Rows sorted by type.

    Attributes:
        bounds: Where the rows of each type begin, and where the last end.
        order: ``[N]``, the row that comes at each place; ``None``: they are sorted.
        place: ``[N]``, the place of each row.
    """

    bounds: list[int]
    order: Tensor | None
    place: Tensor | None

    def sort(self, x: Tensor) -> Tensor:
        """Rows in sorted order."""
        return x if self.order is None else gather(x, self.order)

    def undo(self, x: Tensor) -> Tensor:
        """Sorted rows in the order they had."""
        return x if self.place is None else gather(x, self.place)

    def parts(self) -> list[slice]:
        """The rows of each type, in sorted order."""
        return list(map(slice, self.bounds[:-1], self.bounds[1:]))


class HeteroLinear(StandIn, torch_geometric.nn.HeteroLinear):
    """:class:`torch_geometric.nn.HeteroLinear`, the order of types remembered."""

    #: What computes the layer, for people.
    fused_by = "a product per type, on rows that are sorted by type once"

    def why_not_fused(self) -> str | None:
        """Why ``forward`` goes to PyG's whatever its input; ``None``: it does not."""
        if self.weight.dtype not in _DTYPES:
            return (
                f"its weight is {self.weight.dtype}: only float32 and float64 are fused"
            )
        return None

    def forward(self, x: Any, type_vec: Any) -> Tensor:
        """See :class:`torch_geometric.nn.HeteroLinear`.

        Raises:
            IndexError: A type is out of range.
        """
        if (
            is_served(x)
            and x.dtype == self.weight.dtype
            and self.why_not_fused() is None
            and x.size(1) == self.weight.size(1)
            and type(type_vec) is Tensor
            and type_vec.dtype == torch.int64
            and type_vec.shape == x.shape[:1]
            and type_vec.device == x.device
            and not torch.is_autocast_enabled("cpu")
            and not tracing(x, type_vec)
            and not transforming(x)
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        ):
            types = self.num_types
            rows = remember(
                type_vec, ("types", types), lambda: sorted_by(type_vec, types)
            )
            # What it takes for sorted and is not, PyG mixes up.
            if not (self.is_sorted and rows.order is not None):
                return map_by_type(x, self.weight, self.bias, rows)
        stock: Tensor = super().forward(x, type_vec)
        return stock


class Stack(NamedTuple):
    """Linear layers for :func:`map_by_type`.

    Attributes:
        weight: ``[T, F, F']``.
        bias: ``[T, F']``; ``None``: they have none.
    """

    weight: Tensor
    bias: Tensor | None


def stacked(linears: Any) -> Stack | None:
    """Linear layers side by side.

    Args:
        linears: ``T`` of them, at least one.

    Returns:
        ``None`` where they differ in shape, dtype or in whether they have a bias.
    """
    kinds = {
        (linear.weight.shape, linear.weight.dtype, linear.bias is None)
        for linear in linears
    }
    if len(kinds) > 1:
        return None
    weight = torch.stack([linear.weight for linear in linears]).transpose(1, 2)
    if linears[0].bias is None:
        return Stack(weight, None)
    return Stack(weight, torch.stack([linear.bias for linear in linears]))


def map_by_type(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sorted) -> Tensor:
    """Maps each row by the weight of its type.

    Args:
        x: ``[N, F]``, float32 or float64.
        weight: ``[T, F, F']``.
        bias: ``[T, F']`` or ``None``.
        rows: The rows of each type.

    Returns:
        ``[N, F']``.
    """
    out: Tensor = _HeteroLinear.apply(x, weight, bias, rows)
    return out


def sorted_by(type_vec: Tensor, types: int) -> Sorted:
    """Sorts rows by type, stably.

    Args:
        type_vec: ``[N]``, int64.
        types: How many there are.

    Raises:
        IndexError: A type is out of range, where PyG writes to memory that isn't its
            own.
    """
    for value in (int(type_vec.min()), int(type_vec.max())) if len(type_vec) else ():
        if not 0 <= value < types:
            raise IndexError(
                f"Expected 'type_vec' to hold types from 0 to {types - 1} (got {value})"
            )
    counts = torch.bincount(type_vec, minlength=types)
    bounds = [0, *counts.cumsum(0).tolist()]
    if not bool((type_vec[1:] < type_vec[:-1]).any()):
        return Sorted(bounds, None, None)
    order = type_vec.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return Sorted(bounds, order, place)


def _compose(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sorted) -> Tensor:
    """The same out of other operators, which differentiate to any order."""
    x = rows.sort(x)
    outs = []
    for number, part in enumerate(rows.parts()):
        out = x[part] @ weight[number]
        outs.append(out if bias is None else out + bias[number])
    return rows.undo(torch.cat(outs))


class _HeteroLinear(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sorted) -> Tensor:
        x = rows.sort(x)
        out = memory.empty((x.size(0), weight.size(2)), x.dtype)
        none = x.new_zeros(())
        for number, part in enumerate(rows.parts()):
            add = none if bias is None else bias[number]
            torch.addmm(add, x[part], weight[number], out=out[part])
        return rows.undo(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.rows = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        rows, wanted = ctx.rows, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or transforming(grad):
            found = differentiable_gradients(
                lambda x, w, b: _compose(x, w, b, rows), (x, weight, bias), grad, wanted
            )
            return *found, None
        grad = rows.sort(grad.contiguous())
        of_x = of_weight = of_bias = None
        if wanted[0]:
            of_x = memory.empty(x.shape, x.dtype)
            for number, part in enumerate(rows.parts()):
                torch.mm(grad[part], weight[number].t(), out=of_x[part])
            of_x = rows.undo(of_x)
        if wanted[1]:
            x = rows.sort(x)
            of_weight = torch.stack(
                [dense.outer(x[part], grad[part]) for part in rows.parts()]
            )
        if wanted[2]:
            of_bias = torch.stack([grad[part].sum(0) for part in rows.parts()])
        return of_x, of_weight, of_bias, None
