"""The layers under torch's own machinery: autocast, script, export, functional, ..."""

import copy
import threading

import pytest
import torch
from graphs import SQUARE, random_edges
from layers import assert_alike, inputs, make
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

KINDS = ("gcn", "gcn_weighted", "sage", "sage_max", "graph_weighted", "gin")


def _float(name):
    stock, ours = make(name)
    args = [
        a.detach().float()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in inputs(name, SQUARE["unsorted"])
    ]
    return stock.float(), ours.float(), args


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast_x", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "gcn_plain", "sage_project", "graph_max"])
def test_autocast(name, cast_x, dtype):
    """PyG's output dtype: float32 for GCN, low for the others; sane gradients."""
    stock, ours, args = _float(name)
    found = []
    for layer in (stock, ours):
        x = args[0].clone()
        x = (x.to(dtype) if cast_x else x).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            try:
                out = layer(x, *args[1:])
            except Exception as error:
                found.append(error)
                continue
        out.float().square().sum().backward()
        found.append((out, x.grad, *(p.grad for p in layer.parameters())))
    if isinstance(found[0], Exception):
        assert isinstance(found[1], type(found[0]))
        return
    assert not isinstance(found[1], Exception), found[1]
    for wanted, got in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        bound = 0.06 * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0.06, atol=bound)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", KINDS)
def test_without_gradients(name, mode):
    stock, ours, args = _float(name)
    with mode():
        out = ours(*args)
        torch.testing.assert_close(out, stock(*args))
    assert not out.requires_grad


@pytest.mark.parametrize("name", KINDS)
def test_grad_of_func(name):
    stock, ours, (x, *rest) = _float(name)
    found = [
        torch.func.grad(lambda x, m=m: m(x, *rest).square().sum())(x)
        for m in (stock, ours)
    ]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", KINDS)
def test_functional_call(name):
    """Parameters from outside, and their gradients, without touching the module."""
    stock, ours, args = _float(name)
    found = []
    for layer in (stock, ours):
        state = {k: 2 * p.detach() for k, p in layer.named_parameters()}

        def loss(state, layer=layer):
            return torch.func.functional_call(layer, state, tuple(args)).square().sum()

        found.append(torch.func.grad(loss)(state))
    for key, wanted in found[0].items():
        torch.testing.assert_close(found[1][key], wanted)


@pytest.mark.parametrize("name", KINDS)
def test_vmap(name):
    stock, ours, (x, *rest) = _float(name)
    batch = torch.stack([x, 2 * x, x.sin()])
    found = [torch.vmap(lambda x, m=m: m(x, *rest))(batch) for m in (stock, ours)]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", KINDS)
def test_jvp(name):
    stock, ours, (x, *rest) = _float(name)
    tangent = x.cos()
    found = [
        torch.func.jvp(lambda x, m=m: m(x, *rest), (x,), (tangent,))
        for m in (stock, ours)
    ]
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_jacobian_and_hessian(name):
    stock, ours, (x, *rest) = _float(name)

    def scalar(m):
        return lambda x: m(x, *rest).square().sum()

    jacobians = [
        torch.func.jacrev(lambda x, m=m: m(x, *rest))(x) for m in (stock, ours)
    ]
    torch.testing.assert_close(jacobians[1], jacobians[0])
    vectorised = [
        torch.autograd.functional.jacobian(
            lambda x, m=m: m(x, *rest), x, vectorize=True
        )
        for m in (stock, ours)
    ]
    torch.testing.assert_close(vectorised[1], vectorised[0])
    hessians = [torch.func.hessian(scalar(m))(x) for m in (stock, ours)]
    torch.testing.assert_close(hessians[1], hessians[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_checkpointing(name, reentrant):
    stock, ours, (x, *rest) = _float(name)
    grads = []
    for layer in (stock, ours):
        leaf = x.clone().requires_grad_()
        out = checkpoint(layer, leaf, *rest, use_reentrant=reentrant)
        out.square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", KINDS)
def test_saved_tensor_hooks_and_anomaly_mode(name):
    """Offloading wraps every saved tensor; anomaly mode looks for NaN on the way."""
    stock, ours, (x, *rest) = _float(name)
    grads = []
    for layer in (stock, ours):
        leaf = x.clone().requires_grad_()
        with (
            torch.autograd.detect_anomaly(check_nan=True),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.detach().clone(), lambda t: t
            ),
        ):
            layer(leaf, *rest).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("name", KINDS)
def test_script(name):
    stock, ours, args = _float(name)
    expected = torch.jit.script(copy.deepcopy(stock))(*args)
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(*args), expected)
    other = [args[0], random_edges(13, 13, 60, seed=6), *args[2:]]
    torch.testing.assert_close(scripted(*other), stock(*other))
    leaf = args[0].clone().requires_grad_()
    scripted(leaf, *args[1:]).square().sum().backward()
    reference = args[0].clone().requires_grad_()
    stock(reference, *args[1:]).square().sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("name", KINDS)
def test_trace_does_not_freeze_the_graph(name):
    """A trace taken on one edge_index must follow another, as PyG's does."""
    stock, ours, args = _float(name)
    args = [a for a in args if a is not None]
    with torch.no_grad():
        traced = torch.jit.trace(ours, tuple(args), check_trace=False)
        torch.testing.assert_close(traced(*args), stock(*args))
        other = [args[0], random_edges(13, 13, 60, seed=6), *args[2:]]
        torch.testing.assert_close(traced(*other), stock(*other))


@pytest.mark.parametrize("name", KINDS)
def test_export_does_not_freeze_the_graph(name):
    stock, ours, args = _float(name)
    program = torch.export.export(ours, tuple(args)).module()
    torch.testing.assert_close(program(*args), stock(*args))
    other = [args[0], random_edges(13, 13, 60, seed=6), *args[2:]]
    torch.testing.assert_close(program(*other), stock(*other))


@pytest.mark.parametrize("name", KINDS)
def test_python_threads_share_one_layer(name):
    """Two threads, one layer, one edge_index that neither has seen."""
    stock, ours, args = _float(name)
    expected = stock(*args)
    for seed in range(5):
        edge_index = args[1].clone()
        gate = threading.Barrier(2)
        found: list[torch.Tensor] = []

        def run(edge_index=edge_index, gate=gate, found=found):
            gate.wait()
            x = args[0].clone().requires_grad_()
            out = ours(x, edge_index, *args[2:])
            out.sum().backward()
            found.append(out.detach())

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2, f"a thread failed in round {seed}"
        for out in found:
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_accumulate(name):
    stock, ours = make(name)
    args = inputs(name, SQUARE["unsorted"])
    assert_alike(stock, ours, *args)
    for layer in (stock, ours):
        layer.zero_grad()
        for _ in range(3):
            layer(*args).square().sum().backward()
    for wanted, got in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("name", KINDS)
def test_default_dtype_is_left_alone(name):
    """float32 layers work while torch's default is float64."""
    stock, ours, args = _float(name)
    torch.set_default_dtype(torch.float64)
    try:
        out = ours(*args)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, stock(*args))


@pytest.mark.parametrize("name", KINDS)
def test_written_down_by_make_fx(name):
    stock, ours = make(name)
    args = inputs(name, SQUARE["unsorted"])
    ours(*args)  # what it keeps of a graph is not written down
    program = make_fx(lambda x: ours(x, *args[1:]))(args[0])
    x = torch.randn_like(args[0])
    torch.testing.assert_close(program(x), stock(x, *args[1:]))


def test_weights_made_in_inference_mode():
    stock, ours = make("graph_weighted")
    x, edge_index, *_ = inputs("graph_weighted", SQUARE["unsorted"])
    with torch.inference_mode():
        weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    x = x.detach()
    torch.testing.assert_close(
        ours(x, edge_index, weight), stock(x, edge_index, weight)
    )
