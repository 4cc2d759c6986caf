"""The ops that are registered with torch pass torch's own checks."""

import pytest
import torch
from graphs import BIPARTITE, SQUARE

import gnnaccel  # noqa: F401 - registers them

WIDE = BIPARTITE["wide"]
LOOPS = SQUARE["double_loops"]
INDEX = torch.tensor([3, 0, 3, 5, 0, 3, 1])


def _random(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_(grad)


def _spmm_select(transposed: bool):
    x = _random(WIDE.num_src, 5, grad=False)
    best, ties = torch.ops.gnnaccel.spmm_extreme(x, WIDE.edge_index, None, 9, 4, True)
    v = _random(9 if not transposed else 4, 5)
    return v, x, best, WIDE.edge_index, None, 9, 4, True, transposed


def _sum(x, weight, scales=(None, None, None), case=WIDE, transposed=False, skip=False):
    edges = case.edge_index
    return x, edges, weight, *scales, case.num_src, case.num_dst, transposed, skip


def _scale(size: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=torch.float64)


SAMPLES = {
    "gather": [(_random(7, 3), INDEX), (_random(7, grad=False), INDEX)],
    "node_scale": [
        (WIDE.edge_index, 9, 4, "mean", torch.float64),
        (LOOPS.edge_index, 4, 4, "gcn", torch.float32),
        (LOOPS.edge_index, 4, 4, "gcn_loops", torch.float32),
    ],
    "scatter_sum": [(_random(7, 3), INDEX, 8)],
    "scatter_extreme": [
        (_random(7, 3), INDEX, 8, True),
        (_random(7, 3), INDEX, 8, False),
    ],
    "sddmm": [
        (_random(4, 5), _random(9, 5), WIDE.edge_index),
        (_random(4, 2, 5), _random(9, 2, 5), WIDE.edge_index),
    ],
    "softmax": [(_random(7, 3), INDEX, 8)],
    "softmax_backward": [(_random(7, 3), _random(7, 3), INDEX, 8)],
    "spmm_extreme": [
        (_random(9, 5), WIDE.edge_index, None, 9, 4, True),
        (_random(9, 5), WIDE.edge_index, _random(30, grad=False), 9, 4, False),
    ],
    "spmm_select": [_spmm_select(True), _spmm_select(False)],
    "spmm_sum": [
        _sum(_random(9, 5), None),
        _sum(_random(9, 5), _random(30)),
        _sum(_random(9, 2, 5), _random(30, 2)),
        _sum(_random(4, 5), _random(30), transposed=True),
        _sum(_random(4, 5), None, (_scale(4),) * 3, LOOPS, skip=True),
        _sum(_random(9, 5), _random(30), (_scale(9), _scale(4), None)),
    ],
}


def _registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.split("::")[1] for n in names if n.startswith("gnnaccel::"))


def test_every_registered_op_has_a_sample():
    assert _registered() == sorted(SAMPLES)


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n, s in SAMPLES.items() for i in range(len(s))]
)
def test_opcheck(backend, name, number):
    """Schema, no aliasing, fake tensors and autograd, static and dynamic."""
    args = SAMPLES[name][number]
    torch.library.opcheck(getattr(torch.ops.gnnaccel, name).default, args)


@pytest.mark.parametrize("name", SAMPLES)
def test_results_alias_nothing(backend, name):
    """Neither an input nor what the cache holds: a caller may write into a result."""
    op = getattr(torch.ops.gnnaccel, name)
    for args in SAMPLES[name]:
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        outs = op(*args)
        first = outs if isinstance(outs, tuple) else (outs,)
        kept = [out.clone() for out in first]
        for out in first:
            out.fill_(-7)
        again = op(*args)
        for out, want in zip(
            again if isinstance(again, tuple) else (again,), kept, strict=True
        ):
            assert torch.equal(out, want)
