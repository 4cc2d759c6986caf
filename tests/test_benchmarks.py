"""The benchmark package: every case runs, is right, and can tell when it isn't."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

# At the end, so that an installed gnnaccel wins over the checkout's sources.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import chart, graphs, measure, registry, runner, targets  # noqa: E402
from benchmarks.cli import main  # noqa: E402
from benchmarks.registry import (  # noqa: E402
    BACKWARD,
    CASES,
    FORWARD,
    OURS,
    STEP,
    STOCK,
    Implementation,
    Setting,
    Workload,
)
from gnnaccel.kernels import native  # noqa: E402

TINY = ["--graph", "rmat:6:4", "--features", "4", "--quick", "--threads", "1"]


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(arguments, folder):
    """Runs the command line; returns its exit code and the content of its JSON."""
    code = main([*arguments, *TINY, "--out", str(folder)])
    return code, json.loads((folder / "results.json").read_text())


#: Without compiled kernels most cases would time what others have timed already.
COVERED = [
    name
    for name, case in CASES.items()
    if native.available() or case.group in ("kernels", "layers")
]


@pytest.mark.parametrize("name", COVERED)
def test_every_case_runs_and_is_right(name, tmp_path, monkeypatch):
    # What takes longest here has tests of its own, or changes timings alone.
    monkeypatch.setattr(chart, "draw", lambda *args: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    code, content = run([name], tmp_path)
    setting = Setting(graphs.rmat(6, 4), 4, quick=True)
    variants = [result["variant"] for result in content["results"]]
    assert variants == list(CASES[name].variants(setting))
    phases = {FORWARD, BACKWARD, STEP}
    if name in ("graph_build", "small") or CASES[name].group == "loading":
        phases = {FORWARD}
    if name == "memory":
        phases = {runner.MEMORY}
    for result in content["results"]:
        assert {STOCK, OURS} <= result["entries"].keys()
        for implementation, entry in result["entries"].items():
            peer = implementation not in (STOCK, OURS)
            if peer and entry["status"] == runner.ABSENT:
                continue
            assert entry["status"] == runner.OK, (implementation, entry["note"])
            assert entry["values"].keys() == phases
            assert all(v["median"] >= 0 for v in entry["values"].values())
    assert code == 0


def test_files_and_table(tmp_path, capsys):
    code, content = run(["spmm_sum", "gcn"], tmp_path)
    assert code == 0
    table = (tmp_path / "results.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert "| spmm_sum" in table and "| gcn" in table and OURS in table
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["threads"] == 1


def plant(monkeypatch, forward, peers=()):
    """Registers a case whose right answer is 2 * x and whose gnnaccel is `forward`."""

    def build(setting, variant):
        x = setting.x()
        makers = {STOCK: lambda: Implementation(lambda x: 2 * x), **dict(peers)}
        makers[OURS] = lambda: Implementation(forward)
        return Workload(x=x, makers=makers, edges=setting.problem.num_edges)

    case = registry.Case(
        "planted", "extra", build, lambda s: ("",), (torch.float32,), "time", ""
    )
    monkeypatch.setitem(CASES, case.name, case)


WRONG = {
    "output": lambda x: 2.01 * x,
    # Right output, wrong gradient.
    "gradient": lambda x: 2 * x + 0.01 * (x - x.detach()),
    # Only the output: a NaN compares as neither near nor far.
    "NaN": lambda x: 2 * x + torch.where(x == x.max(), torch.nan, 0.0).detach(),
    "shape": lambda x: 2 * x[:-1],
    "dtype": lambda x: 2 * x.double(),
}


@pytest.mark.parametrize("fault", list(WRONG))
def test_a_wrong_implementation_is_reported_and_not_timed(fault, monkeypatch, tmp_path):
    plant(monkeypatch, WRONG[fault])
    code, content = run(["planted"], tmp_path)
    assert code == 1
    entries = content["results"][0]["entries"]
    assert entries[OURS]["status"] == runner.WRONG
    assert entries[OURS]["values"] == {}
    assert entries[STOCK]["status"] == runner.OK
    assert "WRONG" in (tmp_path / "results.md").read_text()


def test_a_right_implementation_passes(monkeypatch, tmp_path):
    plant(monkeypatch, lambda x: x + x)
    code, content = run(["planted"], tmp_path)
    assert code == 0
    assert content["results"][0]["entries"][OURS]["values"].keys() == {
        FORWARD,
        BACKWARD,
        STEP,
    }


def test_a_failing_implementation_is_an_error(monkeypatch, tmp_path):
    def forward(x):
        raise ValueError("value 7 is bad")

    plant(monkeypatch, forward)
    code, content = run(["planted"], tmp_path)
    entry = content["results"][0]["entries"][OURS]
    assert code == 1
    assert entry["status"] == runner.ERROR
    assert "value 7 is bad" in entry["note"]


def test_an_absent_peer_fails_nothing(monkeypatch, tmp_path):
    def absent():
        return registry.optional("no_such_module_as_this")

    plant(monkeypatch, lambda x: x + x, peers=[("peer", absent)])
    code, content = run(["planted"], tmp_path)
    assert code == 0
    assert content["results"][0]["entries"]["peer"]["status"] == runner.ABSENT


def test_list_and_selection(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CASES)
    names = [case.name for case in registry.select(["spmm_m*", "gcn"])]
    assert names == ["spmm_mean", "spmm_max", "spmm_min", "gcn"]
    assert len(registry.select(["all"])) == len(CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_case"], "no_such_case"),
        (["gcn", "--graph", "rmat:six"], "rmat:six"),
        (["gcn", "--graph", "nowhere"], "nowhere"),
        (["gcn", "--graph", "nowhere.npz"], "nowhere.npz"),
        (["gcn", "--features", "0"], "--features"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_rmat_is_seeded_and_skewed():
    graph = graphs.rmat(10, 8)
    assert graph.edge_index.shape == (2, 8 * 1024)
    assert graph.num_nodes == 1024
    assert 0 <= graph.edge_index.min() and graph.edge_index.max() < 1024
    again = graphs.rmat.__wrapped__(10, 8)
    assert torch.equal(graph.edge_index, again.edge_index)
    other = graphs.rmat(10, 8, 1)
    assert not torch.equal(graph.edge_index, other.edge_index)
    for end in graph.edge_index:
        assert torch.bincount(end).max() > 10 * 8  # a uniform graph stays below 30


def test_rmat_draws_the_quadrants_it_says():
    # Two nodes, one level: the cells of the 2 x 2 adjacency are the quadrants, up to
    # the numbering of the nodes.
    src, dst = graphs.rmat(1, 50_000).edge_index
    share = torch.bincount(2 * src + dst, minlength=4) / src.numel()
    diagonal = sorted([share[0].item(), share[3].item()])
    assert diagonal == pytest.approx([0.05, 0.57], abs=0.01)
    assert share[1:3].tolist() == pytest.approx([0.19, 0.19], abs=0.01)


def test_compressed_is_stable_and_complete():
    graph = graphs.rmat(5, 6)
    for rows, row, col in (
        (graph.by_dst, graph.dst, graph.src),
        (graph.by_src, graph.src, graph.dst),
    ):
        for node in range(graph.num_nodes):
            span = slice(int(rows.rowptr[node]), int(rows.rowptr[node + 1]))
            edges = (row == node).nonzero().flatten()  # in input order
            assert torch.equal(rows.perm[span], edges)
            assert torch.equal(rows.col[span], col[edges])


def test_graph_from_npz(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, edge_index=np.array([[0, 1, 1], [1, 2, 0]]), num_nodes=5)
    graph = graphs.load(str(path))
    assert (graph.num_nodes, graph.num_edges) == (5, 3)
    assert main(["spmm_sum", *TINY, "--graph", str(path)]) == 0


def test_graph_from_a_folder_of_data_sets(tmp_path):
    (tmp_path / "load.py").write_text(
        "import torch\n"
        "from torch_geometric.data import Data\n"
        "def load(name):\n"
        "    assert name == 'pair'\n"
        "    return Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3)\n"
    )
    graph = graphs.load("pair", tmp_path)
    assert (graph.name, graph.num_nodes, graph.num_edges) == ("pair", 3, 1)


def test_turns_interleave_and_the_first_is_thrown_away():
    log = []

    def task(name):
        def call():
            log.append(name)
            # The clock of this test: each call takes as long as there were calls.
            return {FORWARD: 1.0 + len(log)}

        return measure.Task(call)

    plan = measure.Plan(rounds=3, turn=0.0)
    samples = measure.interleave({"a": task("a"), "b": task("b")}, plan)
    assert log == ["a", "b"] + ["a", "b"] * 3
    assert samples["a"] == {FORWARD: [4.0, 6.0, 8.0]}
    assert samples["b"] == {FORWARD: [5.0, 7.0, 9.0]}


def test_short_calls_fill_a_turn_and_its_first_call_is_not_counted():
    times = iter(range(1, 100))
    task = measure.Task(lambda: {FORWARD: next(times) / 1000})
    plan = measure.Plan(rounds=2, turn=0.01)
    samples = measure.interleave({"a": task}, plan)
    # Two calls to warm up, the second of 2 ms: five calls fill a turn of 10 ms.
    counted = [4, 5, 6, 7, 9, 10, 11, 12]
    assert samples["a"][FORWARD] == [value / 1000 for value in counted]


def test_slow_tasks_stop_early():
    task = measure.Task(lambda: {FORWARD: 10.0})
    samples = measure.interleave({"a": task}, measure.Plan(rounds=50, limit=20.0))
    assert len(samples["a"][FORWARD]) == 3


def test_summary():
    assert measure.summary([3.0]) == (3.0, 0.0)
    assert measure.summary([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_extra_sees_memory_that_is_already_freed():
    size = 64 << 20

    def call():
        torch.ones(size // 4)
        return None

    # The kernel's counter of resident pages lags by some pages per thread.
    assert 0.95 * size < measure.peak_extra(call) < 1.25 * size


def layer_result(case, ours, **others):
    def entry(seconds):
        return runner.Entry(values={STEP: runner.Value(seconds, 0.0, 5)})

    return runner.Result(
        case,
        "",
        "rmat:15:16",
        64,
        edges=1 << 19,
        entries={OURS: entry(ours)} | {n: entry(v) for n, v in others.items()},
        bounds={STEP: 0.01},
    )


def test_yardsticks_are_held_against_the_results():
    result = layer_result("gcn", 0.012, pyg=0.3, SparseTensor=0.02, torch_csr=0.05)
    verdicts = {v.label: v for v in targets.judge([result])}
    assert verdicts["x PyG"].value == pytest.approx(25)
    assert verdicts["x PyG"].limit == 22 and verdicts["x PyG"].passed
    assert verdicts["x best peer"].value == pytest.approx(20 / 12)
    assert not verdicts["x best peer"].passed
    assert verdicts["x bound"].value == pytest.approx(1.2)
    assert verdicts["x bound"].passed


def test_yardsticks_of_another_graph_or_a_toy_do_not_apply():
    result = layer_result("gcn", 0.012, pyg=0.3, SparseTensor=0.02)
    result.graph = "rmat:15:8"
    assert "x PyG" not in {v.label for v in targets.judge([result])}
    result.edges = 99
    assert targets.judge([result]) == []


def test_flatness_spans_all_sizes():
    sizes = {100_000: 1.0, 1_000_000: 12.0, 10_000_000: 140.0}
    results = []
    for edges, seconds in sizes.items():
        result = layer_result("scaling", seconds)
        result.variant, result.edges = f"spmm {edges}", edges
        result.bounds = {STEP: 0.4 * seconds}
        results.append(result)
    by_edge, over_bound = targets.judge(results)
    assert by_edge.value == pytest.approx(1.4) and by_edge.passed
    assert over_bound.value == pytest.approx(1)
