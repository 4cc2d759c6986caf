"""Many threads, forked processes and interrupts leave the ops right."""

import multiprocessing
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graphs import random_edges

from gnnaccel import Graph, kernels, ops


def _step(graph: Graph, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A forward and a backward pass that need both directions of the graph."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = ops.spmm(graph, x, weight)
    best = ops.spmm(graph, x, reduce="max")
    (out.pow(2).sum() + best.sum()).backward()
    return [out.detach(), best.detach(), x.grad, weight.grad]


def _big():
    """Enough work that kernels do run in parallel."""
    edge_index = random_edges(600, 600, 30_000)
    return edge_index, torch.randn(600, 48), torch.rand(30_000)


def test_python_threads_share_one_graph(backend):
    edge_index, x, weight = _big()
    expected = _step(Graph.from_edge_index(edge_index, 600), x, weight)
    for _ in range(4):
        # Fresh, so that the threads race to build the transpose.
        graph = Graph.from_edge_index(edge_index, 600)
        gate = threading.Barrier(3)

        def run(graph=graph, gate=gate):
            gate.wait()
            return _step(graph, x, weight)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(run) for _ in range(3)]
        for future in futures:
            for actual, wanted in zip(future.result(), expected, strict=True):
                assert torch.equal(actual, wanted)


def test_python_threads_share_one_edge_index(backend):
    """They race for the cache entry of a plain tensor."""
    edge_index, x, weight = _big()
    expected = _step(Graph.from_edge_index(edge_index, 600), x, weight)
    for _ in range(4):
        fresh = edge_index.clone()
        gate = threading.Barrier(3)

        def run(fresh=fresh, gate=gate):
            gate.wait()
            return _step(Graph.of(fresh, 600), x, weight)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(run) for _ in range(3)]
        for future in futures:
            for actual, wanted in zip(future.result(), expected, strict=True):
                assert torch.equal(actual, wanted)


def test_threads_may_choose_different_backends():
    """One thread's choice of backend must not break another's results."""
    edge_index, x, weight = _big()
    graph = Graph.from_edge_index(edge_index, 600)
    expected = _step(graph, x, weight)
    gate = threading.Barrier(2)

    def run(name):
        gate.wait()
        with ops.backend(name):
            return _step(graph, x, weight)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, name) for name in ("reference", "auto")]
    for future in futures:
        for actual, wanted in zip(future.result(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_a_choice_of_backend_ends_with_its_context():
    """Two threads whose contexts overlap: afterwards the choice is what it was."""
    before = kernels.pick(torch.device("cpu"), torch.float32)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with ops.backend("reference"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        with ops.backend("auto"):
            leave.set()
            thread.join()
        assert kernels.pick(torch.device("cpu"), torch.float32) is before
    finally:
        ops.backend("auto")


def _child(pipe, edge_index, x, weight):
    # As PyTorch's own DataLoader workers do: torch's thread pool does not survive a
    # fork, and any parallel torch op of a child would wait for it for ever.
    torch.set_num_threads(1)
    found = _step(Graph.of(edge_index, 600), x, weight)
    # As lists: tensors would travel through shared memory.
    pipe.send([t.sum().item() for t in found] + [found[0].flatten()[:50].tolist()])
    pipe.close()


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork here"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_after_its_parent_did():
    edge_index, x, weight = _big()
    expected = _step(Graph.of(edge_index, 600), x, weight)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, edge_index, x, weight))
    child.start()
    sender.close()
    try:
        # A child that inherits a dead thread pool hangs: the guard is generous.
        assert receiver.poll(90), "the forked child neither answered nor ended"
        answer = receiver.recv()
    finally:
        if child.is_alive():
            child.join(10)
        if child.is_alive():
            child.kill()
        child.join()
    assert child.exitcode == 0
    wanted = [t.sum().item() for t in expected]
    assert answer[:-1] == pytest.approx(wanted, rel=1e-4)
    assert answer[-1] == pytest.approx(expected[0].flatten()[:50].tolist(), rel=1e-4)
    # And the parent still works.
    for actual, value in zip(
        _step(Graph.of(edge_index, 600), x, weight), expected, strict=True
    ):
        assert torch.equal(actual, value)


def test_an_interrupt_in_a_kernel_loop_leaves_the_process_usable(backend):
    edge_index, x, weight = _big()
    graph = Graph.from_edge_index(edge_index, 600)
    expected = _step(graph, x, weight)
    running = threading.Event()
    main = threading.main_thread().ident

    def interrupt():
        running.wait()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for step in range(100_000):
            ops.spmm(graph, x, weight)
            if step == 2:
                running.set()
    thread.join()
    for actual, wanted in zip(_step(graph, x, weight), expected, strict=True):
        assert torch.equal(actual, wanted)
