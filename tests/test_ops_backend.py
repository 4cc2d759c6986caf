"""ops.backend: choosing who computes."""

import importlib.util
import threading

import pytest
import torch
from graphs import random_edges

from gnnaccel import ops
from gnnaccel.kernels import native


def test_backends_lists_them_all():
    known = ops.backends()
    assert {"native", "reference", "scatter"} <= set(known)
    assert known["reference"] is None
    for name, reason in known.items():
        assert reason is None or (isinstance(reason, str) and reason), name


def test_a_built_extension_is_available():
    """Guards every native test: a build that fails to load must not skip silently."""
    built = importlib.util.find_spec("gnnaccel._native") is not None
    assert native.available() == built
    assert (ops.backends()["native"] is None) == built
    if built:
        assert native.isa() in ("avx512", "avx2", "baseline")
        assert native.threads() == torch.get_num_threads()
    else:
        assert native.reason()


def test_scatter_is_available_when_installed():
    installed = importlib.util.find_spec("torch_scatter") is not None
    assert (ops.backends()["scatter"] is None) == installed


def test_context_manager_restores_and_nests():
    x = torch.randn(4, 3)
    edge_index = random_edges(4, 4, 9)
    expected = ops.spmm(edge_index, x, size=4)
    with ops.backend("reference"):
        torch.testing.assert_close(ops.spmm(edge_index, x, size=4), expected)
        with ops.backend("auto"):
            torch.testing.assert_close(ops.spmm(edge_index, x, size=4), expected)
        with pytest.raises(ZeroDivisionError), ops.backend("auto"):
            raise ZeroDivisionError
    torch.testing.assert_close(ops.spmm(edge_index, x, size=4), expected)


def test_setter_form():
    x = torch.randn(4, 3)
    edge_index = random_edges(4, 4, 9)
    expected = ops.spmm(edge_index, x, size=4)
    ops.backend("reference")
    try:
        torch.testing.assert_close(ops.spmm(edge_index, x, size=4), expected)
    finally:
        ops.backend("auto")


def test_unknown_backend():
    with pytest.raises(ValueError, match="abacus"):
        ops.backend("abacus")


def test_an_absent_backend_says_how_to_get_it():
    for name, reason in ops.backends().items():
        if reason is not None:
            with (
                pytest.raises((RuntimeError, ImportError), match=name),
                ops.backend(name),
            ):
                pass


def test_threads_are_torchs_own():
    if not native.available():
        pytest.skip(native.reason())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert native.threads() == 1
    finally:
        torch.set_num_threads(before)
    started = threading.active_count()
    ops.spmm(random_edges(500, 500, 20_000), torch.randn(500, 64), size=500)
    assert threading.active_count() == started


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads):
    edge_index = random_edges(500, 500, 20_000)
    x = torch.randn(500, 33)
    before = torch.get_num_threads()
    expected = ops.spmm(edge_index, x, size=500)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(ops.spmm(edge_index.clone(), x, size=500), expected)
    finally:
        torch.set_num_threads(before)
