"""ops.scatter and ops.segment against torch_geometric.utils in float64."""

import pytest
import torch
from graphs import WIDTHS
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, assert_near, compare, compare_gradient_layouts
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import segment as pyg_segment

from gnnaccel import ops

SCATTERS = ("sum", "add", "mean", "max", "min", "mul")
SEGMENTS = ("sum", "mean", "max", "min")
ABSOLUTE = ("sum", "add", "mean", "mul")

INDICES = {
    "empty": (torch.empty(0, dtype=torch.long), 4),
    "nothing": (torch.empty(0, dtype=torch.long), 0),
    "one": (torch.tensor([2]), 4),
    "unsorted": (torch.tensor([3, 0, 3, 5, 0, 3, 1]), 8),
    "sorted": (torch.tensor([0, 0, 1, 3, 3, 3, 5]), 8),
    "reversed": (torch.tensor([5, 3, 3, 3, 1, 0, 0]), 6),
    "strided": (torch.tensor([[3, 1], [0, 1], [3, 1], [5, 1]]).t()[0], 6),
    "hub": (torch.cat([torch.full((5000,), 2), torch.tensor([0, 4])]), 5),
}

PTRS = {
    "no_segment": torch.tensor([0]),
    "empty_segments": torch.tensor([0, 0, 0, 0]),
    "one": torch.tensor([0, 4]),
    "holes": torch.tensor([0, 0, 3, 3, 4, 7, 7]),
    "int32": torch.tensor([0, 0, 3, 3, 4, 7, 7], dtype=torch.int32),
    "strided": torch.tensor([[0, 9], [2, 9], [5, 9]])[:, 0],
    "hub": torch.tensor([0, 5000, 5002]),
}


def _values(rows: int, *shape: int) -> torch.Tensor:
    """Distinct and not zero, so that extremes have one winner and no quirk."""
    count = torch.Size((rows, *shape)).numel()
    values = torch.randperm(count).double().view(rows, *shape)
    return ((values + 0.25 - count / 2) / 64).requires_grad_()


def _exact(rows: int, width: int) -> torch.Tensor:
    """As :func:`_values`, of few digits: exact in every floating dtype."""
    columns = [torch.randperm(rows) for _ in range(width)]
    return (torch.stack(columns, dim=1).double() + 0.5 - rows // 2).requires_grad_()


def _scatter(index, size, x, reduce, dtype=torch.float64):
    return compare(
        lambda x: ops.scatter(x, index, size, reduce),
        lambda x: pyg_scatter(x, index.long(), 0, size, reduce),
        (x,),
        dtype,
        absolute=reduce in ABSOLUTE,
    )


def _segment(ptr, x, reduce, dtype=torch.float64):
    return compare(
        lambda x: ops.segment(x, ptr, reduce),
        lambda x: pyg_segment(x, ptr.long().contiguous(), reduce),
        (x,),
        dtype,
        absolute=reduce in ABSOLUTE,
    )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("reduce", SCATTERS)
@pytest.mark.parametrize("name", INDICES)
def test_scatter_every_index(backend, name, reduce, shape):
    index, size = INDICES[name]
    if reduce == "mul" and name == "hub":
        pytest.skip("a product of 5000 factors overflows")
    _scatter(index, size, _values(index.numel(), *shape), reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", SCATTERS)
@pytest.mark.parametrize("width", WIDTHS)
def test_scatter_every_width_and_dtype(backend, width, reduce, dtype):
    index, size = INDICES["unsorted"]
    _scatter(index, size, _exact(index.numel(), width), reduce, dtype)


@pytest.mark.parametrize("reduce", SCATTERS)
def test_scatter_int32_index(backend, reduce):
    index, size = INDICES["unsorted"]
    _scatter(index.int(), size, _values(7, 3), reduce)


@pytest.mark.parametrize("reduce", SCATTERS)
def test_scatter_infers_the_size(backend, reduce):
    index, _ = INDICES["unsorted"]
    x = _values(7, 3).detach()
    out = ops.scatter(x, index, reduce=reduce)
    assert_near(out, pyg_scatter(x, index, 0, None, reduce))
    assert out.shape == (6, 3)
    none = ops.scatter(x[:0], index[:0], reduce=reduce)
    assert none.shape == (0, 3)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("reduce", SEGMENTS)
@pytest.mark.parametrize("name", PTRS)
def test_segment_every_ptr(backend, name, reduce, shape):
    ptr = PTRS[name]
    _segment(ptr, _values(int(ptr[-1]), *shape), reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", SEGMENTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_segment_every_width_and_dtype(backend, width, reduce, dtype):
    _segment(PTRS["holes"], _exact(7, width), reduce, dtype)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "columns"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "mul"])
def test_layouts(backend, reduce, layout):
    index, size = INDICES["unsorted"]
    x = {
        "transposed": torch.randn(5, 7, dtype=torch.float64).t(),
        "expanded": torch.randn(1, 5, dtype=torch.float64).expand(7, 5),
        "columns": torch.randn(7, 10, dtype=torch.float64)[:, ::2],
    }[layout]
    x.requires_grad_()
    _scatter(index, size, x, reduce)
    if reduce != "mul" and layout != "expanded":
        _segment(PTRS["holes"], x, reduce)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("reduce", SEGMENTS)
def test_layouts_of_the_incoming_gradient(backend, reduce, shape):
    index, size = INDICES["unsorted"]
    compare_gradient_layouts(
        lambda x: ops.scatter(x, index, size, reduce),
        lambda x: pyg_scatter(x, index, 0, size, reduce),
        (_values(7, *shape),),
    )
    # PyG's own, with torch-scatter, takes contiguous gradients only.
    ptr = PTRS["holes"]
    groups = torch.arange(6).repeat_interleave(ptr.diff())
    compare_gradient_layouts(
        lambda x: ops.segment(x, ptr, reduce),
        lambda x: pyg_scatter(x, groups, 0, 6, reduce),
        (_values(7, *shape),),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_scatter_ties_share_the_gradient_as_in_torch(backend, reduce, dtype):
    """Zeros among the ties: a zero extreme counts one tie more."""
    index = torch.randint(6, (60,))
    x = torch.randint(-1, 2, (60, 5)).double().requires_grad_()
    _scatter(index, 7, x, reduce, dtype)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_segment_ties_share_or_elect(backend, reduce):
    """PyG elects one winner with torch-scatter and splits evenly without it."""
    x = torch.tensor([[2.0], [2.0], [2.0], [-1.0]], requires_grad=True)
    out = ops.segment(x, torch.tensor([0, 3, 3, 4]), reduce)
    assert out.flatten().tolist() == [2.0, 0.0, -1.0]
    out.sum().backward()
    assert x.grad[:3].sum().item() == pytest.approx(1.0)
    assert x.grad[3].item() == 1.0
    assert bool((x.grad >= 0).all())


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_segment_extremes_of_zero(backend, reduce):
    """PyG's segment, unlike its scatter, has no quirk here: the gradient is whole."""
    x = torch.tensor([[0.0], [-1.0], [0.0], [2.0], [0.0]], requires_grad=True)
    if reduce == "min":
        x = (-x.detach()).requires_grad_()
    ptr = torch.tensor([0, 2, 4, 5])
    grads = []
    for function in (pyg_segment, ops.segment):
        x.grad = None
        out = function(x, ptr, reduce)
        out.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_scatter_mul_with_zeros(backend):
    """One zero in a group, two in another: the quotient formula divides by zero."""
    index = torch.tensor([0, 0, 0, 1, 1, 2])
    x = torch.tensor([2.0, 0.0, 3.0, 0.0, 0.0, 5.0]).double().requires_grad_()
    _scatter(index, 4, x, "mul")


@pytest.mark.parametrize("reduce", SCATTERS)
def test_scatter_of_nan_and_infinity(backend, reduce):
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, 1.0, inf, 2.0, -inf, inf, 3.0, 4.0]).double()
    out = ops.scatter(x, index, 5, reduce)
    assert_near(out, pyg_scatter(x, index, 0, 5, reduce))


@pytest.mark.parametrize("reduce", SCATTERS)
@pytest.mark.parametrize("name", ["unsorted", "sorted", "empty"])
def test_scatter_derivatives(backend, name, reduce):
    index, size = INDICES[name]
    x = _values(index.numel(), 2)
    assert gradcheck(lambda x: ops.scatter(x, index, size, reduce), (x,))
    assert gradgradcheck(lambda x: ops.scatter(x, index, size, reduce), (x,))


@pytest.mark.parametrize("reduce", SEGMENTS)
@pytest.mark.parametrize("name", ["holes", "empty_segments"])
def test_segment_derivatives(backend, name, reduce):
    x = _values(int(PTRS[name][-1]), 2)
    assert gradcheck(lambda x: ops.segment(x, PTRS[name], reduce), (x,))
    assert gradgradcheck(lambda x: ops.segment(x, PTRS[name], reduce), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_sums_do_not_saturate(backend, dtype):
    x = torch.ones(5002, 2, dtype=dtype)
    index, size = INDICES["hub"]
    for out in (ops.scatter(x, index, size), ops.segment(x, PTRS["hub"])):
        assert_near(out.max(), torch.tensor(5000.0).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_means_do_not_overflow(backend, dtype):
    """Five thousand times 100 passes through 500,000, beyond float16."""
    x = torch.full((5002, 2), 100.0, dtype=dtype)
    index, size = INDICES["hub"]
    assert ops.scatter(x, index, size, "mean")[2].tolist() == [100.0, 100.0]
    assert ops.segment(x, PTRS["hub"], "mean")[0].tolist() == [100.0, 100.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", SCATTERS)
def test_poisoned_memory(backend, poisoned, reduce, dtype):
    for index, size in INDICES.values():
        x = torch.ones(index.numel(), 9, dtype=dtype, requires_grad=True)
        out = ops.scatter(x, index.clone(), size, reduce)
        out.sum().backward()
        assert bool(out.isfinite().all())
        assert bool(x.grad.isfinite().all())
    if reduce in SEGMENTS:
        for ptr in PTRS.values():
            x = torch.ones(int(ptr[-1]), 9, dtype=dtype, requires_grad=True)
            out = ops.segment(x, ptr, reduce)
            out.sum().backward()
            assert bool(out.isfinite().all())
            assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("reduce", SCATTERS)
def test_two_runs_are_bit_equal(backend, reduce):
    index, size = INDICES["hub"]
    source = torch.randn(index.numel(), 9)
    runs = []
    for _ in range(2):
        x = source.clone().requires_grad_()
        out = ops.scatter(x, index.clone(), size, reduce)
        out.backward(torch.ones_like(out))
        runs.append((out, x.grad))
    for first, second in zip(*runs, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduce", SCATTERS)
def test_scatter_index_changed_in_place(backend, reduce):
    index = torch.tensor([3, 0, 3, 5, 0, 3, 1])
    for _ in range(3):
        _scatter(index, 9, _values(7, 3), reduce)
        index.add_(1)


def test_fifty_indices_that_reuse_memory(backend):
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(7, (20,), generator=generator)
        x = torch.rand(20, 3, generator=generator, dtype=torch.float64)
        _scatter(index, 7, x.requires_grad_(), "mean")
        del index, x


def test_scatter_size_changes_between_calls(backend):
    index = torch.tensor([3, 0, 3, 1])
    for size in (4, 9, 5):
        _scatter(index, size, _values(4, 2), "mean")


@given(
    index=st.lists(st.integers(0, 5), max_size=20),
    reduce=st.sampled_from(SCATTERS),
    shape=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
)
def test_scatter_any_index(backend, index, reduce, shape):
    tensor = torch.tensor(index, dtype=torch.long)
    _scatter(tensor, 6, _values(len(index), *shape), reduce)


@given(
    counts=st.lists(st.integers(0, 5), max_size=8),
    reduce=st.sampled_from(SEGMENTS),
    shape=st.sampled_from([(), (1,), (3,), (2, 2)]),
)
def test_segment_any_ptr(backend, counts, reduce, shape):
    ptr = torch.tensor([0, *counts], dtype=torch.long).cumsum(0)
    _segment(ptr, _values(sum(counts), *shape), reduce)


@given(counts=st.lists(st.integers(0, 5), max_size=8), reduce=st.sampled_from(SEGMENTS))
def test_segment_is_scatter_over_sorted_indices(backend, counts, reduce):
    ptr = torch.tensor([0, *counts], dtype=torch.long).cumsum(0)
    index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts).long())
    x = _values(sum(counts), 3).detach()
    first = ops.segment(x, ptr, reduce)
    assert_near(first, ops.scatter(x, index, len(counts), reduce))


@pytest.mark.parametrize(
    ("index", "size", "error", "value"),
    [
        (torch.tensor([0, 1, 4]), 4, (IndexError, RuntimeError, ValueError), "4"),
        (torch.tensor([0, 1, -1]), 4, (IndexError, RuntimeError), "-1"),
        (torch.tensor([0, 1, -1]), None, (IndexError, RuntimeError), "-1"),
        (
            torch.tensor([0, 1, 2**32]),
            4,
            (IndexError, RuntimeError, ValueError),
            str(2**32),
        ),
        (torch.tensor([0, 1]), 4, (ValueError, RuntimeError, IndexError), "2"),
        (torch.tensor([0, 1, 1, 1, 1]), 4, (ValueError, RuntimeError, IndexError), "5"),
        (torch.tensor([[0, 1, 2]]), 4, ValueError, "2"),
        (
            torch.tensor([0.0, 1.0, 2.0]),
            4,
            (ValueError, RuntimeError, TypeError),
            "float32",
        ),
        (torch.tensor([0, 1, 2]), -1, (ValueError, RuntimeError), "-1"),
    ],
)
def test_bad_scatter_names_the_value(backend, index, size, error, value):
    for grad in (False, True):
        with pytest.raises(error, match=value):
            ops.scatter(torch.randn(3, 2, requires_grad=grad), index, size)


@pytest.mark.parametrize(
    ("ptr", "value"),
    [
        (torch.tensor([0, 5, 3, 7]), ""),  # falls
        (torch.tensor([0, 3, 9]), "9"),  # past the last row
        (torch.tensor([-2, 3, 7]), "-2"),
        (torch.tensor([0.0, 3.0, 7.0]), "float32"),
        (torch.tensor([[0, 7]]), "2"),
        (torch.empty(0, dtype=torch.long), ""),
    ],
)
def test_bad_segment_names_the_value(backend, ptr, value):
    for grad in (False, True):
        x = torch.randn(7, 2, requires_grad=grad)
        with pytest.raises(
            (ValueError, IndexError, RuntimeError, TypeError), match=value
        ):
            ops.segment(x, ptr)


@pytest.mark.parametrize("function", [ops.scatter, ops.segment])
def test_unknown_reduction(backend, function):
    with pytest.raises(ValueError, match="median"):
        function(torch.randn(3, 2), torch.tensor([0, 3, 3]), reduce="median")
