"""gather, scatter and segment: rows by index, and reductions back to it.

A gather's gradient is a segment sum over the cached grouping of its index, not a serial
``index_add``; a scatter's gradient is a gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.typing
import torch_geometric.utils
from torch import Tensor

from gnnaccel import kernels
from gnnaccel.cache import remember
from gnnaccel.errors import EdgeIndexError
from gnnaccel.graph import Graph, grouping_of
from gnnaccel.kernels import memory
from gnnaccel.kernels.grouping import Grouping, accumulator, index_dtype
from gnnaccel.ops.adj import check_tensors, tracing, wants_grad
from gnnaccel.ops.function import Function


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Picks rows: ``x[index]``.

    Args:
        x: ``[N, *]``.
        index: ``[E]``, int32 or int64.

    Returns:
        ``[E, *]``.

    Raises:
        ValueError: ``index`` is no integer vector.
        IndexError: An index is out of range.
    """
    check_index(index, x)
    out: Tensor
    if tracing(x, index):
        out = _gather(x, index)
    elif wants_grad(x) and x.is_floating_point():
        out = _Gather.apply(x, index)
    else:
        out = _pick_rows(x, index)
    return out


def scatter(
    x: Tensor, index: Tensor, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduces the rows of ``x`` that share an index.

    Like :func:`torch_geometric.utils.scatter` along dimension 0, which also serves
    what no kernel does (``"mul"``, ``"any"``, integers).

    Args:
        x: ``[E, *]``.
        index: ``[E]``, int32 or int64, in any order.
        dim_size: Number of groups; default: the largest index plus one.
        reduce: ``"sum"`` (or ``"add"``), ``"mean"``, ``"max"``, ``"min"``, ``"mul"`` or
            ``"any"``.

    Returns:
        ``[dim_size, *]``; 0 for an empty group (1 under ``"mul"``).

    Raises:
        ValueError: Shapes or ``reduce`` don't fit.
        EdgeIndexError: An index is outside ``[0, dim_size)``.
    """
    check_index(index, x)
    if x.dim() == 0 or index.size(0) != x.size(0):
        raise ValueError(
            f"Expected 'index' to have one entry per row of 'x' (got {index.size(0)} "
            f"for shape {list(x.shape)})"
        )
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() else 0
    if reduce not in ("sum", "add", "mean", "max", "min") or not x.is_floating_point():
        out: Tensor = torch_geometric.utils.scatter(
            x, index.long(), 0, dim_size, reduce
        )
        return out
    if tracing(x, index):
        return _scatter_traced(x, index, dim_size, reduce)
    return reduce_groups(x, Groups(index, grouping_of(index, dim_size)), reduce)


def segment(x: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
    """Reduces runs of rows, as :func:`torch_geometric.utils.segment` does.

    Args:
        x: ``[E, *]``, floating point.
        ptr: ``[S + 1]``, int32 or int64, rising from 0 to ``E``: where runs begin.
        reduce: ``"sum"`` (or ``"add"``), ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[S, *]``; 0 for an empty run.

    Raises:
        ValueError: ``ptr`` or ``reduce`` doesn't fit.
    """
    check_tensors(x=x, ptr=ptr)
    if reduce not in ("sum", "add", "mean", "max", "min"):
        raise ValueError(f"Encountered invalid `reduce` argument '{reduce}'")
    if ptr.dim() != 1 or ptr.numel() == 0 or ptr.dtype not in _INDEX_DTYPES:
        raise ValueError(
            "Expected 'ptr' to be a non-empty integer vector (got shape "
            f"{list(ptr.shape)}, {ptr.dtype})"
        )
    if tracing(x, ptr):
        counts = ptr[1:] - ptr[:-1]
        groups = torch.arange(counts.numel(), device=x.device)
        index = groups.repeat_interleave(counts, output_size=x.size(0))
        return _scatter_traced(x, index, counts.numel(), reduce)
    if not are_runs(ptr, x.size(0)):
        raise ValueError(
            f"Expected 'ptr' to rise from 0 to {x.size(0)}, the rows of 'x' (got "
            f"{int(ptr[0])} to {int(ptr[-1])})"
        )
    if (
        reduce in ("max", "min")
        and torch_geometric.typing.WITH_TORCH_SCATTER
        and wants_grad(x)
    ):
        # PyG takes torch-scatter's then, which gives the gradient to one of the ties.
        out: Tensor = torch_geometric.utils.segment(x, ptr.long(), reduce)
        return out
    # Unlike scatter's, the gradient of runs has no tie with a zero to start from.
    runs = groups_of_runs(ptr, x.size(0))
    return reduce_groups(x, runs, reduce, zero_ties=False)


def _pick_rows(x: Tensor, index: Tensor) -> Tensor:
    if (
        index.numel() * _width(x) * x.element_size() >= memory.THRESHOLD
        and x.dim() > 1
        and index.device == x.device
        and kernels.pick_for(x) is kernels.native
    ):
        picked = kernels.native.gather_rows(x, index)
        if picked is not None:
            return picked
    try:
        return x.index_select(0, index)
    except (IndexError, RuntimeError):
        for value in (int(index.min()), int(index.max())) if index.numel() else ():
            if not 0 <= value < x.size(0):
                raise EdgeIndexError.out_of_range(value, x.size(0), "indices") from None
        raise


class Groups:
    """An index and its grouping, handed through autograd as one."""

    __slots__ = ("grouping", "index")

    def __init__(self, index: Tensor, grouping: Grouping) -> None:
        self.index = index
        self.grouping = grouping


class Destinations(Groups):
    """The edges of a graph by destination; their index is made when it is needed."""

    __slots__ = ("graph",)

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.grouping = graph.rows

    @property
    def index(self) -> Tensor:  # type: ignore[override]
        """``[E]``, int64, in input order."""
        return self.graph.dst


def are_runs(ptr: Tensor, entries: int) -> bool:
    """Whether runs that begin at ``ptr``, integers and not empty, cover all rows."""
    return (
        int(ptr[0]) == 0
        and int(ptr[-1]) == entries
        and not bool((ptr[1:] < ptr[:-1]).any())
    )


def groups_of_runs(ptr: Tensor, entries: int) -> Groups:
    """The groups that runs of rows make.

    Args:
        ptr: ``[S + 1]``, int32 or int64: where runs begin. It is copied: what is
            remembered of a tensor must not keep it alive.
        entries: How many rows there are; ``are_runs`` of both.
    """
    counts = ptr[1:] - ptr[:-1]
    longest = int(counts.max()) if counts.numel() else 0
    ptr = ptr.clone(memory_format=torch.contiguous_format)
    grouping = Grouping(ptr, None, None, entries, entries, longest)
    return Groups(grouping.row, grouping)


_INDEX_DTYPES = (torch.int32, torch.int64)


def check_index(index: Tensor, x: Tensor) -> None:
    """Raises unless ``index`` is an integer vector and ``x`` a tensor."""
    check_tensors(index=index, x=x)
    if index.dim() != 1 or index.dtype not in _INDEX_DTYPES:
        raise ValueError(
            "Expected 'index' to be a one-dimensional int32 or int64 tensor (got "
            f"{index.dim()} dimensions, {index.dtype})"
        )


def reduce_groups(
    x: Tensor, groups: Groups, reduce: str, zero_ties: bool = True
) -> Tensor:
    """The reduction behind :func:`scatter` and :func:`segment`, unchecked.

    Args:
        x: ``[E, *]``, floating point.
        groups: Which of the groups each row belongs to.
        reduce: ``"sum"`` (or ``"add"``), ``"mean"``, ``"max"`` or ``"min"``.
        zero_ties: Whether an extreme of exactly 0 counts one more tie.

    Returns:
        ``[groups, *]``.
    """
    flat = x if x.dim() == 2 else x.reshape(x.size(0), _width(x))
    out: Tensor
    if reduce in ("max", "min"):
        if wants_grad(flat):
            out, _ = _Extreme.apply(flat, groups, reduce == "max", zero_ties)
        else:
            out, _ = _run_extreme(flat, groups, reduce == "max", False)
    else:
        scale = None
        if reduce == "mean":
            scale = groups.grouping.mean_scale(accumulator(x.dtype))
        if wants_grad(flat):
            out = _Sum.apply(flat, groups, scale)
        else:
            out = _run_sum(flat, groups, scale)
    return out if x.dim() == 2 else out.reshape(out.size(0), *x.shape[1:])


def _width(x: Tensor) -> int:
    return x[0].numel() if x.size(0) else int(torch.Size(x.shape[1:]).numel())


def _run_sum(x: Tensor, groups: Groups, scale: Tensor | None = None) -> Tensor:
    """Sums per group, times ``scale`` ``[groups]`` of the accumulator dtype."""
    backend = kernels.pick_for(x)
    grouping = groups.grouping.over_entries
    out: Tensor = backend.spmm_sum(grouping, x, dst_scale=scale)
    return out


def _run_extreme(
    x: Tensor, groups: Groups, is_max: bool, with_ties: bool
) -> tuple[Tensor, Tensor | None]:
    backend = kernels.pick_for(x)
    result: tuple[Tensor, Tensor | None] = backend.spmm_extreme(
        groups.grouping.over_entries, x, None, is_max, with_ties
    )
    return result


class _Gather(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return _pick_rows(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, index = inputs
        ctx.rows = x.size(0)
        # Saved, so that autograd complains if it changes before the backward pass.
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (index,) = ctx.saved_tensors
        return scatter(grad, index, ctx.rows), None


class _Sum(Function):
    @staticmethod
    def forward(x: Tensor, groups: Groups, scale: Tensor | None) -> Tensor:
        return _run_sum(x, groups, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.groups, ctx.scale = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.scale is not None:
            grad = (grad * ctx.scale.unsqueeze(-1)).to(grad.dtype)
        index = ctx.groups.index
        if wants_grad(grad) or tracing(grad, index):
            return gather(grad, index), None, None
        return _pick_rows(grad, index), None, None


class _Extreme(Function):
    @staticmethod
    def forward(x: Tensor, groups: Groups, is_max: bool, zero_ties: bool) -> Any:
        out, ties = _run_extreme(x, groups, is_max, True)
        assert ties is not None
        if not zero_ties:  # and an empty run, whose only tie that was, divides by 1
            ties = (ties - (out == 0).to(ties.dtype)).clamp_(min=1)
        return out, ties

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.groups, ctx.is_max, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, out, ties = ctx.saved_tensors
        return (
            _extreme_gradient(grad, x, out, ties, ctx.groups.index, ctx.is_max),
            None,
            None,
            None,
        )


def _extreme_gradient(
    grad: Tensor, x: Tensor, out: Tensor, ties: Tensor, index: Tensor, is_max: bool
) -> Tensor:
    if (
        not (wants_grad(grad) or tracing(grad, x, index) or kernels.transforming(grad))
        and kernels.pick_for(x) is kernels.native
    ):
        one_each = remember(index, "one each", lambda: _one_each(index))
        share = grad.to(ties.dtype).div(ties)
        return kernels.native.spmm_select(one_each, x, out, share, None, is_max, True)
    x, best = x.detach(), out.detach().index_select(0, index)
    # Negated, so that a NaN extreme selects all and passes NaN on.
    hit = ~(x < best) if is_max else ~(x > best)
    share = gather(grad.to(ties.dtype) / ties, index)
    return torch.where(hit, share, share.new_zeros(())).to(x.dtype)


def _one_each(index: Tensor) -> Grouping:
    """Entries as rows, each of which reads the group that it belongs to."""
    entries = index.numel()
    dtype = index_dtype(entries, entries)
    ptr = torch.arange(entries + 1, dtype=dtype, device=index.device)
    return Grouping(ptr, index.to(dtype, copy=True), None, entries, entries, 1)


# While torch traces ------------------------------------------------------------------


def _scatter_traced(x: Tensor, index: Tensor, dim_size: int, reduce: str) -> Tensor:
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(-1)
    if reduce == "mean":
        flat = flat.to(accumulator(x.dtype))  # the sum may overflow where the mean fits
    out: Tensor
    if reduce in ("max", "min"):
        out, _ = _scatter_extreme(flat, index, dim_size, reduce == "max")
    else:
        out = _scatter_sum(flat, index, dim_size)
    out = out.view(dim_size, *x.shape[1:])
    if reduce == "mean":
        wide = accumulator(x.dtype)
        ones = torch.ones(x.size(0), dtype=wide, device=x.device)
        counts = torch.zeros(dim_size, dtype=wide, device=x.device)
        counts = counts.index_add(0, index, ones).clamp(min=1)
        out = (out / counts.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)
    return out


@torch.library.custom_op(
    "gnnaccel::gather", mutates_args=(), schema="(Tensor x, Tensor index) -> Tensor"
)
def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


@_gather.register_fake
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((index.size(0), *x.shape[1:]))


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index = inputs
    ctx.rows = x.size(0)
    ctx.save_for_backward(index)


def _backward_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return _scatter_traced(grad, index, ctx.rows, "sum"), None


_gather.register_autograd(_backward_gather, setup_context=_setup_gather)


@torch.library.custom_op(
    "gnnaccel::scatter_sum",
    mutates_args=(),
    schema="(Tensor x, Tensor index, SymInt dim_size) -> Tensor",
)
def _scatter_sum(x: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return _run_sum(x, Groups(index, grouping_of(index, dim_size)))


@_scatter_sum.register_fake
def _(x: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return x.new_empty(dim_size, x.size(1))


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_sum(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return _gather(grad, index), None, None


_scatter_sum.register_autograd(_backward_sum, setup_context=_setup_sum)


@torch.library.custom_op(
    "gnnaccel::scatter_extreme",
    mutates_args=(),
    schema="(Tensor x, Tensor index, SymInt dim_size, bool is_max) -> (Tensor, Tensor)",
)
def _scatter_extreme(
    x: Tensor, index: Tensor, dim_size: int, is_max: bool
) -> tuple[Tensor, Tensor]:
    groups = Groups(index, grouping_of(index, dim_size))
    out, ties = _run_extreme(x, groups, is_max, True)
    assert ties is not None
    return out, ties


@_scatter_extreme.register_fake
def _(x: Tensor, index: Tensor, dim_size: int, is_max: bool) -> tuple[Tensor, Tensor]:
    out = x.new_empty(dim_size, x.size(1))
    return out, torch.empty_like(out, dtype=accumulator(x.dtype))


def _setup_extreme(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, index, _, ctx.is_max = inputs
    ctx.save_for_backward(x, index, *output)


def _backward_extreme(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, index, out, ties = ctx.saved_tensors
    return _extreme_gradient(grad, x, out, ties, index, ctx.is_max), None, None, None


_scatter_extreme.register_autograd(_backward_extreme, setup_context=_setup_extreme)
