"""Shared fixtures: one hypothesis profile, seeded tests, one parameter per backend."""

import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import hypothesis
import pytest
import torch

# Sibling helper modules (graphs, oracles) import the same way under every pytest
# import mode, and whether the package is installed or used from the checkout.
sys.path.insert(0, str(Path(__file__).parent))

from oracles import single_threaded  # noqa: E402

import gnnaccel  # noqa: E402
from gnnaccel.kernels import memory, native  # noqa: E402
from gnnaccel.nn import dense, worth  # noqa: E402

hypothesis.settings.register_profile(
    "gnnaccel",
    deadline=None,
    # Without compiled kernels, most of what is drawn runs the same code once more.
    max_examples=40 if native.available() else 15,
    # The same examples everywhere: a red run here is a red run on any machine.
    derandomize=True,
    # The backend fixture lasts for the whole test on purpose.
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gnnaccel"))

BACKENDS = ("native", "reference", "scatter")


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch):
    """Fused layers take small graphs, too, which tests have."""
    monkeypatch.setattr(worth, "WORTH_GRAPH", 0)
    monkeypatch.setattr(worth, "WORTH", 0)
    monkeypatch.setattr(worth, "WORTH_NEW_ROWS", 0)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request):
    """One test run per instruction set that the compiled kernels have here."""
    if not native.available():
        pytest.skip(str(native.reason()))
    before = native.isa()
    try:
        native.use_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    with gnnaccel.ops.backend("native"):
        assert native.isa() == request.param
        yield request.param
    native.use_isa(before)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs the test once on every backend that this machine has."""
    reason = gnnaccel.ops.backends()[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param!r}: {reason}")
    with _chosen(request.param):
        yield request.param


@pytest.fixture(params=("auto", "large", "reference"))
def route(request, monkeypatch):
    """The default choice of kernels; as for large tensors; without compiled code.

    ``"large"``: every result comes from the memory pool, whose blocks hold NaN from the
    start, and layers take the paths that only pay on large tensors.
    """
    if request.param == "large":
        if not native.available():
            pytest.skip(native.reason())
        monkeypatch.setattr(memory, "THRESHOLD", 0)
        monkeypatch.setattr(dense, "_LONG", 1)
        stale = [memory.empty((64,), torch.float64).fill_(torch.nan) for _ in range(30)]
        del stale
    with _chosen("auto" if request.param == "large" else request.param):
        yield request.param


@contextmanager
def _chosen(name):
    """Backend ``name``; those made of torch's ops on one thread, see oracles."""
    alone = name in ("reference", "scatter")
    with gnnaccel.ops.backend(name), single_threaded() if alone else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(12)


@pytest.fixture
def poisoned():
    """Fresh allocations hold NaN (or the largest integer) instead of luck.

    Deterministic mode makes torch fill every uninitialised allocation, so a kernel that
    leaves one element unwritten shows it. It also proves that nothing on the path
    raises for being nondeterministic.
    """
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before)
