"""ops.gather against plain indexing."""

import pytest
import torch
from graphs import WIDTHS
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, assert_near, compare, compare_gradient_layouts
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel import ops

INDICES = {
    "empty": torch.empty(0, dtype=torch.long),
    "one": torch.tensor([2]),
    "repeated": torch.tensor([4, 0, 4, 4, 1, 0, 6]),
    "sorted": torch.tensor([0, 0, 1, 4, 4, 4, 6]),
    "int32": torch.tensor([4, 0, 4, 4, 1, 0, 6], dtype=torch.int32),
    "row_of_edge_index": torch.tensor([[4, 0, 1], [5, 5, 2]])[1],
    "column_of_edge_list": torch.tensor([[4, 0, 1], [5, 5, 2]]).t()[:, 0],
    "hub": torch.full((5000,), 3),
}


def _compare(index, x, dtype=torch.float64):
    return compare(
        lambda x: ops.gather(x, index), lambda x: x[index.long()], (x,), dtype
    )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (64,)])
@pytest.mark.parametrize("name", INDICES)
def test_every_index(backend, name, shape):
    x = torch.randn(7, *shape, dtype=torch.float64, requires_grad=True)
    _compare(INDICES[name], x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_dtype(backend, width, dtype):
    x = torch.randn(7, width, dtype=torch.float64, requires_grad=True)
    _compare(INDICES["repeated"], x, dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_other_dtypes(backend, dtype):
    x = torch.arange(14).view(7, 2).to(dtype)
    index = INDICES["repeated"]
    assert torch.equal(ops.gather(x, index), x[index])


@pytest.mark.parametrize("layout", ["transposed", "expanded", "columns"])
def test_layouts(backend, layout):
    x = {
        "transposed": torch.randn(5, 7, dtype=torch.float64).t(),
        "expanded": torch.randn(1, 5, dtype=torch.float64).expand(7, 5),
        "columns": torch.randn(7, 10, dtype=torch.float64)[:, ::2],
    }[layout]
    _compare(INDICES["repeated"], x.requires_grad_())


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_layouts_of_the_incoming_gradient(backend, shape):
    index = INDICES["repeated"]
    x = torch.randn(7, *shape, dtype=torch.float64, requires_grad=True)
    compare_gradient_layouts(lambda x: ops.gather(x, index), lambda x: x[index], (x,))


def test_derivatives(backend):
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    for name in ("empty", "repeated", "sorted"):
        assert gradcheck(lambda x, i=INDICES[name]: ops.gather(x, i), (x,))
        assert gradgradcheck(lambda x, i=INDICES[name]: ops.gather(x, i), (x,))


def test_half_gradients_do_not_saturate(backend):
    x = torch.zeros(4, 2, dtype=torch.float16, requires_grad=True)
    ops.gather(x, INDICES["hub"]).sum().backward()
    assert x.grad[3].tolist() == [5000.0, 5000.0]


def test_index_changed_in_place(backend):
    index = torch.tensor([4, 0, 4, 1])
    for _ in range(3):
        x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
        _compare(index, x)
        index.add_(1)


def test_backward_uses_the_index_of_its_forward(backend):
    index = torch.tensor([4, 0, 4, 1])
    x = torch.randn(7, 2, requires_grad=True)
    out = ops.gather(x, index)
    index.fill_(6)
    try:
        out.sum().backward()
    except RuntimeError as error:
        # Torch's own indexing refuses; that is as good as the right answer.
        assert "modified by an inplace operation" in str(error)
    else:
        assert x.grad[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0]


def test_number_of_rows_changes(backend):
    index = torch.tensor([4, 0, 4, 1])
    for rows in (5, 9, 6):
        x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
        _compare(index, x)


def test_fifty_indices_that_reuse_memory(backend):
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(7, (20,), generator=generator)
        x = torch.rand(7, 3, generator=generator, dtype=torch.float64)
        _compare(index, x.requires_grad_())
        del index, x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poisoned_memory(backend, poisoned, dtype):
    for index in INDICES.values():
        x = torch.ones(9, 5, dtype=dtype, requires_grad=True)
        out = ops.gather(x, index.clone())
        out.sum().backward()
        assert torch.equal(out, torch.ones_like(out))
        expected = torch.bincount(index.long(), minlength=9).double()
        assert_near(x.grad, expected[:, None].expand(9, 5))


def test_two_runs_are_bit_equal(backend):
    grads = []
    source = torch.randn(5000, 9)
    for _ in range(2):
        x = torch.zeros(7, 9, requires_grad=True)
        ops.gather(x, INDICES["hub"].clone()).backward(source)
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_rows_past_two_to_the_31(backend):
    """Element offsets beyond 32 bits; only the touched pages are ever real memory."""
    if backend != "native":
        pytest.skip("torch's own offsets; and the others widen half types whole")
    try:
        x = torch.empty(2**26, 33, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    x[-1] = 5.0
    x[0] = 2.0
    out = ops.gather(x, torch.tensor([2**26 - 1, 0]))
    assert out.float().mean(dim=1).tolist() == [5.0, 2.0]


@given(index=st.lists(st.integers(0, 5), max_size=20), width=st.integers(0, 4))
def test_any_index(backend, index, width):
    x = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    _compare(torch.tensor(index, dtype=torch.long), x)


@pytest.mark.parametrize(
    ("index", "error", "value"),
    [
        (torch.tensor([0, 7]), IndexError, "7"),
        (torch.tensor([0, -1]), IndexError, "-1"),
        (torch.tensor([0, 2**32]), IndexError, str(2**32)),
        (torch.tensor([0.0, 1.0]), (ValueError, TypeError, RuntimeError), "float32"),
        (torch.tensor([[0, 1]]), (ValueError, IndexError, RuntimeError), "2"),
    ],
)
def test_bad_index_names_the_value(backend, index, error, value):
    with pytest.raises(error, match=value):
        ops.gather(torch.randn(7, 2), index)
    with pytest.raises(error, match=value):
        ops.gather(torch.randn(7, 2, requires_grad=True), index)
