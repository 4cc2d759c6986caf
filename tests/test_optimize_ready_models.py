"""PyG's ready models, whole and in double precision: stock, optimised and restored."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import gnnaccel
from gnnaccel.nn import functions, worth

# At the end, so that an installed gnnaccel wins over the checkout's sources.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import graphs  # noqa: E402
from benchmarks.cases_models import MODELS, built  # noqa: E402
from benchmarks.registry import Setting, Unavailable  # noqa: E402


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    """Small graphs take the path of large ones."""
    monkeypatch.setattr(worth, "WORTH_NEW", 0)
    for name in ("SUM", "EXTREME", "SOFTMAX", "DENSE", "COUNT"):
        monkeypatch.setattr(functions, f"WORTH_{name}", 0)


def step(model, x, inputs):
    """The output and all gradients of one training step."""
    out = model(x, *inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = [x, *model.parameters()]
    return out.detach(), torch.autograd.grad((out * weight).sum(), leaves)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_pygs(name):
    setting = Setting(graphs.rmat(6, 4), 8, torch.double, quick=True)
    torch.set_default_dtype(torch.double)
    try:
        model, x, inputs, _ = built(name, setting)
    except Unavailable as missing:
        pytest.skip(str(missing))
    finally:
        torch.set_default_dtype(torch.float)
    before = {key: type(module) for key, module in model.named_modules()}
    expected = step(model, x, inputs)
    assert any(grad.any() for grad in expected[1])
    gnnaccel.optimize(model)
    assert type(model) is not before[""]
    for ours in (model, copy.deepcopy(model)):
        torch.testing.assert_close(step(ours, x, inputs), expected)
    gnnaccel.restore(model)
    assert {key: type(module) for key, module in model.named_modules()} == before
    torch.testing.assert_close(step(model, x, inputs), expected, rtol=0, atol=0)
