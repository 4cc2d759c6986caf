"""The memory pool: reuse, lifetime, limits; and the linear maps that draw on it."""

import gc
import multiprocessing
import threading

import pytest
import torch
import torch.nn.functional as F

from gnnaccel.kernels import memory, native
from gnnaccel.nn import dense

pytestmark = pytest.mark.skipif(
    not native.available(), reason="the pool is part of the native kernels"
)

ROWS = 1 << 14  # times 64 floats: 4 MiB, well above the pool's threshold


@pytest.fixture(autouse=True)
def fresh_pool():
    gc.collect()
    memory.empty_cache()
    yield
    memory.limit(1 << 30)


def big():
    return memory.empty((ROWS, 64), torch.float32)


def test_a_dead_tensors_block_is_reused():
    first = big()
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    before = memory.stats()
    again = big()
    after = memory.stats()
    assert again.data_ptr() == address
    assert after["reused"] == before["reused"] + 1
    assert after["fresh"] == before["fresh"]


def test_a_block_lives_as_long_as_any_view_of_it():
    tensor = big().fill_(7)
    row = tensor[5]
    del tensor
    others = [big().fill_(k) for k in range(4)]
    assert bool((row == 7).all())
    assert row.data_ptr() not in {o.data_ptr() for o in others}


def test_small_tensors_do_not_come_from_the_pool():
    before = memory.stats()
    memory.empty((8, 8), torch.float32)
    assert memory.stats() == before


def test_stats_tell_what_is_held():
    base = memory.stats()["in_use"]
    held = [big(), big()]
    in_use = memory.stats()["in_use"] - base
    assert in_use >= 2 * held[0].nbytes
    del held
    stats = memory.stats()
    assert stats["in_use"] == base
    assert stats["cached"] == in_use
    assert 0 < stats["fragmentation"] <= 1


def test_the_limit_bounds_what_is_kept():
    memory.limit(0)
    big()
    assert memory.stats()["cached"] == 0
    with pytest.raises(ValueError, match="-1"):
        memory.limit(-1)


def test_blocks_may_be_changed_in_place_and_differentiated():
    x = torch.randn(ROWS, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)
    out = dense.linear(x, weight).add_(1).relu_()
    out.sum().backward()
    want = F.linear(x.detach(), weight.detach()).add(1) > 0
    torch.testing.assert_close(x.grad, want.float() @ weight.detach())


def test_deterministic_mode_fills_results_with_nan():
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(big().isnan().all())
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_never_share_a_block():
    wrong = []

    def work(k):
        for _ in range(50):
            tensor = big().fill_(k)
            if not bool((tensor == k).all()):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _child(tensor, queue):
    fresh = big().fill_(3)
    queue.put((float(tensor[0, 0]), float(fresh.sum())))


def test_a_forked_child_has_its_own_pool():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    tensor = big().fill_(2)
    # One thread: torch's own pool does not survive a fork.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        child = context.Process(target=_child, args=(tensor, queue))
        child.start()
        seen = queue.get(timeout=60)
        child.join(60)
    finally:
        torch.set_num_threads(threads)
    assert seen == (2.0, 3.0 * ROWS * 64)
    assert bool((tensor == 2).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_is_torchs(bias, dtype):
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 32, bias=bias, dtype=dtype)
    x = torch.randn(ROWS, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(ROWS, 32, dtype=dtype)
    inputs = (x, *module.parameters())
    ours = torch.autograd.grad(dense.apply(module, x), inputs, grad)
    theirs = torch.autograd.grad(module(x), inputs, grad)
    # A sum of ROWS numbers, in another order.
    rounding = ROWS**0.5 * 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(dense.apply(module, x), module(x))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("rows", [8 * 1024 - 1, 8 * 1024, 8 * 1024 + 5])
def test_a_weights_gradient_in_parts_is_the_whole(rows):
    torch.manual_seed(0)
    grad, x = torch.randn(rows, 7), torch.randn(rows, 5)
    for long in (x, torch.randn(5, rows).t(), x[:, :1].expand(rows, 5)):
        want = grad.double().t() @ long.double()
        torch.testing.assert_close(
            dense.outer(grad, long).double(), want, rtol=1e-4, atol=1e-3
        )


def test_linear_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(memory, "THRESHOLD", 0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dense.linear, (x, weight, bias))
    assert torch.autograd.gradgradcheck(dense.linear, (x, weight, bias))


def test_a_hook_on_a_linear_layer_fires():
    module = torch.nn.Linear(64, 64)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    dense.apply(module, torch.randn(ROWS, 64))
    assert seen == [1]
