"""Independent right answers (PyG and plain formulas in float64) and how to compare."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Allowed error, relative to the sum of the absolute terms. The low ones accumulate in
# float32 and round once, so their bound is one unit in the last place.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Runs torch on one thread: tiny oracles lose more than they gain by two.

    Torch's scatter opens a parallel region for any size, which on a busy machine takes
    longer than all else.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_near(
    actual: Tensor,
    expected: Tensor,
    magnitude: Tensor | None = None,
    *,
    slack: float = 1.0,
    name: str = "result",
) -> None:
    """Compares ``actual`` with a float64 ``expected`` of the same shape.

    Args:
        actual: Result under test, any floating dtype.
        expected: The right values in float64. NaN and infinity must match exactly.
        magnitude: Per element, the sum of the absolute values of the terms that were
            added up; the largest finite value of ``expected`` when None.
        slack: Multiple of the tolerance of ``actual``'s dtype, for chains of roundings.
        name: What is compared, for the message.
    """
    assert isinstance(actual, Tensor), f"{name}: {type(actual)} is not a tensor"
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    tolerance = TOLERANCE[actual.dtype] * slack
    actual = actual.detach().double()
    expected = expected.detach().double()
    finite = expected.isfinite()
    same = torch.isclose(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)
    if magnitude is None:
        top = (
            expected[finite].abs().max()
            if bool(finite.any())
            else expected.new_zeros(())
        )
        magnitude = top.expand_as(expected)
    error = (actual - expected).abs()
    bad = ~same & ~(finite & (error <= tolerance * magnitude.detach().abs()))
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} elements differ; at {where} "
            f"got {float(actual[where])!r}, expected {float(expected[where])!r}, "
            f"allowed error {float(tolerance * magnitude.abs()[where])!r}"
        )


def _messages(edge_index: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    rows = x.index_select(0, edge_index[0].long())
    if weight is None:
        return rows
    return weight.reshape(weight.shape + (1,) * (x.dim() - weight.dim())) * rows


def spmm(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    num_dst: int,
) -> Tensor:
    """Gather, weigh, scatter: PyG's own three steps with its own scatter."""
    messages = _messages(edge_index, x, weight)
    return scatter(messages, edge_index[1].long(), 0, num_dst, reduce)


def sddmm(edge_index: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The dot product of both ends of each edge."""
    src, dst = edge_index.long()
    return (a[dst] * b[src]).sum(dim=-1)


def dense(
    edge_index: Tensor, weight: Tensor | None, num_src: int, num_dst: int
) -> Tensor:
    """``[num_dst, num_src]`` float64 matrix; parallel edges add up."""
    matrix = torch.zeros(num_dst, num_src, dtype=torch.float64)
    values = torch.ones(edge_index.shape[1]) if weight is None else weight
    for (j, i), value in zip(edge_index.t().tolist(), values.tolist(), strict=True):
        matrix[i, j] += value
    return matrix


def fresh(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Leaves of ``dtype`` with the same values, strides and need of a gradient.

    Floating tensors inside tuples and lists are replaced; all else passes through.
    """
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(fresh(item, dtype) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.layout != torch.strided:
            return value.to(dtype) if dtype is not None else value
        leaf = value.detach()
        if dtype is not None and dtype != value.dtype:
            leaf = leaf.to(dtype)
        return leaf.requires_grad_(value.requires_grad)
    return value


def _leaves(value: Any, prefix: str) -> dict[str, Tensor]:
    if isinstance(value, (tuple, list)):
        found: dict[str, Tensor] = {}
        for i, item in enumerate(value):
            found |= _leaves(item, f"{prefix}[{i}]")
        return found
    if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
        return {prefix: value}
    return {}


def _random_like(out: Tensor, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64)


def widened(value: Any) -> Any:
    """``value`` with int64 in the place of int32 tensors, in tuples and lists too.

    For oracles: torch's own scatter reads past the end of an int32 index when it goes
    backward, so that PyG's gradients on an int32 ``edge_index`` are garbage.
    """
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(widened(item) for item in value)
    if type(value) is Tensor and value.dtype == torch.int32:
        return value.long()
    return value


def results(
    function: Callable[..., Tensor],
    args: tuple[Any, ...],
    parameters: dict[str, Tensor] | None = None,
    grad: Tensor | None = None,
) -> dict[str, Tensor]:
    """Output of ``function(*args)`` and the gradient of each input that needs one.

    Args:
        function: Returns one tensor.
        args: Leaves as made by :func:`fresh`.
        parameters: More leaves, by name.
        grad: Gradient of the output; random of a fixed seed when None.

    Returns:
        ``"out"`` and ``"grad of ..."`` entries; a leaf that got no gradient has none.
    """
    out = function(*args)
    found = {"out": out}
    leaves = _leaves(args, "args") | {
        k: p for k, p in (parameters or {}).items() if p.requires_grad
    }
    if out.requires_grad:
        out.backward(_random_like(out).to(out.dtype) if grad is None else grad)
        for key, leaf in leaves.items():
            if leaf.grad is not None:
                found[f"grad of {key}"] = leaf.grad
    return found


def compare(
    ours: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    args: tuple[Any, ...],
    dtype: torch.dtype = torch.float64,
    *,
    absolute: bool = True,
    floor: float = 0.0,
    slack: float = 1.0,
) -> dict[str, Tensor]:
    """Asserts that outputs and gradients of two functions of ``args`` agree.

    ``oracle`` runs in float64 on exactly the numbers that ``ours`` gets in ``dtype``.

    Args:
        ours: Function under test.
        oracle: The right one; differentiable.
        args: Tensors (float64) and whatever else both functions take.
        dtype: Precision of ``ours``.
        absolute: The terms' magnitude is the oracle on absolute values (true for sums
            and means); else the largest value of each result.
        floor: Then, at least this much of the largest value of any result: gradients
            through a softmax may cancel to nothing.
        slack: See :func:`assert_near`.

    Returns:
        What ``ours`` computed.
    """
    low = fresh(args, dtype)
    high = fresh(low, torch.float64)
    magnitudes: dict[str, Tensor] = {}
    with single_threaded():
        with torch.no_grad():
            shape = oracle(*high)
        grad = _random_like(shape).to(dtype)
        expected = results(oracle, high, grad=grad.double())
        if absolute:
            positive = fresh(_map(high, torch.abs), torch.float64)
            magnitudes = results(oracle, positive, grad=grad.double().abs())
    if floor:
        tops = {key: _top(x) for key, x in expected.items()}
        for key, x in expected.items():
            top = max(tops[key], floor * max(tops.values()))
            magnitudes[key] = x.new_full(x.shape, top)
    actual = results(ours, low, grad=grad)
    assert actual["out"].dtype == dtype
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        assert_near(value, expected[key], magnitudes.get(key), slack=slack, name=key)
    return actual


def _top(x: Tensor) -> float:
    finite = x.detach()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare_gradient_layouts(
    ours: Callable[..., Tensor], oracle: Callable[..., Tensor], args: tuple[Any, ...]
) -> None:
    """Asserts that gradients agree whatever the strides of the incoming gradient.

    ``out.sum()`` alone sends an expanded one, of stride zero.
    """
    with torch.no_grad():
        shape = oracle(*args).shape
    full = torch.randn(shape, dtype=torch.float64)
    layouts = {
        "expanded": torch.ones((), dtype=torch.float64).expand(shape),
        "transposed": full.mT.contiguous().mT if full.dim() > 1 else full,
        "strided": torch.stack([full, full], dim=-1)[..., 0],
    }
    for name, grad in layouts.items():
        expected = results(oracle, fresh(args), grad=grad.contiguous())
        actual = results(ours, fresh(args), grad=grad)
        assert actual.keys() == expected.keys()
        for key, value in actual.items():
            scale = expected[key].abs().clamp(min=1)
            assert_near(value, expected[key], scale, name=f"{key}, incoming {name}")


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return function(value.detach()).requires_grad_(value.requires_grad)
    return value
