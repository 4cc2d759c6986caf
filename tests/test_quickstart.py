"""examples/quickstart.py: trains the same on both sides, and notices if it does not."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import contains_self_loops, is_undirected

import gnnaccel

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "quickstart.py"
FAST = ["--quick", "--no-memory", "--threads", "1", "--hidden", "16", "--epochs"]


def load_script():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quickstart():
    threads = torch.get_num_threads()
    yield load_script()
    torch.set_num_threads(threads)


@pytest.fixture
def needs_digits():
    pytest.importorskip("sklearn")


def refusal(quickstart, capsys, *argv):
    """The message with which the script refuses its arguments."""
    with pytest.raises(SystemExit) as stop:
        quickstart.main(list(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------ the default run


def test_the_readme_command(needs_digits, monkeypatch, tmp_path):
    """As a stranger runs it, with memory measured and the curves drawn."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(gnnaccel.__file__).parents[1]))
    options = ["--quick", "--threads", "1", "--epochs", "2", "--plot", "curve.png"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same loss curve: max |difference| =" in done.stdout
    for row in (r"s/epoch, median", r"peak extra memory, MiB \*"):
        assert re.search(rf"^{row}(\s+\d+\.\d+){{2}}\s+\d+\.\dx$", done.stdout, re.M)
    assert re.search(r"^test accuracy(\s+0\.\d{4}){2}", done.stdout, re.M)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layers", ["1", "3"])
@pytest.mark.parametrize("model", ["gcn", "sage", "sage-max", "gin"])
def test_every_model_trains_the_same(needs_digits, quickstart, capsys, model, layers):
    assert quickstart.main([*FAST, "8", "--model", model, "--layers", layers]) == 0
    out = capsys.readouterr().out
    assert "same loss curve" in out
    losses = [float(loss) for loss in re.findall(r"stock +loss (\d+\.\d+)", out)]
    assert losses[-1] < losses[0]


def test_sides_differ_by_optimize_alone(needs_digits, quickstart, monkeypatch):
    seen = []
    monkeypatch.setattr(quickstart, "train", lambda sides, epochs: seen.extend(sides))
    monkeypatch.setattr(quickstart, "report", lambda *args: True)
    assert quickstart.main([*FAST, "1"]) == 0
    stock, fast = (side.model for side in seen)
    swapped = {type(m) for m in fast.modules() if isinstance(m, MessagePassing)}
    assert swapped == {gnnaccel.nn.GCNConv}
    assert gnnaccel.nn.GCNConv not in {type(m) for m in stock.modules()}
    assert list(stock.state_dict()) == list(fast.state_dict())
    for a, b in zip(stock.parameters(), fast.parameters(), strict=True):
        assert torch.equal(a, b) and a is not b


def test_epochs_alternate(needs_digits, quickstart, monkeypatch):
    order = []
    run = quickstart.Side.epoch
    monkeypatch.setattr(
        quickstart.Side, "epoch", lambda side: (order.append(side.name), run(side))
    )
    quickstart.main([*FAST, "4"])
    assert order == ["stock", "gnnaccel", "gnnaccel", "stock"] * 2


# ------------------------------------------------------------- what must be noticed


def wrong_layer(change):
    """An optimize() that breaks the first layer."""

    def optimize(model):
        model.convs[0].register_forward_hook(lambda module, args, out: change(out))
        return model

    return optimize


def test_a_wrong_layer_is_noticed(needs_digits, quickstart, capsys, monkeypatch):
    monkeypatch.setattr(gnnaccel, "optimize", wrong_layer(lambda out: out * 1.01))
    assert quickstart.main([*FAST, "3"]) == 1
    assert "DIFFERENT loss curve" in capsys.readouterr().out


def test_a_slip_in_one_epoch_is_noticed(needs_digits, quickstart, monkeypatch):
    calls = []

    def once(out):
        calls.append(None)
        return out * 1.01 if len(calls) == 2 else out

    monkeypatch.setattr(gnnaccel, "optimize", wrong_layer(once))
    assert quickstart.main([*FAST, "4"]) == 1


def test_nan_after_a_good_start_is_noticed(needs_digits, quickstart, monkeypatch):
    calls = []

    def later(out):
        calls.append(None)
        return out * float("nan") if len(calls) > 1 else out

    monkeypatch.setattr(gnnaccel, "optimize", wrong_layer(later))
    assert quickstart.main([*FAST, "3"]) == 1


def test_rounding_is_not_a_difference(needs_digits, quickstart, capsys, monkeypatch):
    monkeypatch.setattr(gnnaccel, "optimize", wrong_layer(lambda out: out * (1 + 2e-7)))
    assert quickstart.main([*FAST, "3"]) == 0
    assert "max |difference| = 0.00e+00" not in capsys.readouterr().out


# ----------------------------------------------------------------------- the digits


def test_digits_are_split_by_image(needs_digits, quickstart):
    problem = quickstart.load("digits", root="", quick=True)
    (data,) = problem.parts["train"]
    images = 200
    assert data.num_nodes == 9 * images
    test = data.test_mask.view(9, images)
    assert (test == test[0]).all() and 0 < int(test[0].sum()) < images
    assert not (data.train_mask & data.test_mask).any()
    assert (data.y.view(9, images) == data.y[:images]).all()
    # The second copy is the first moved by one pixel: the order of images is kept.
    first, moved = data.x.view(9, images, 8, 8)[:2]
    assert torch.equal(moved[:, :, 1:], first[:, :, :-1])


def test_digits_are_joined_to_their_neighbours_both_ways(needs_digits, quickstart):
    (data,) = quickstart.load("digits", root="", quick=True).parts["train"]
    assert is_undirected(data.edge_index) and not contains_self_loops(data.edge_index)
    assert int(torch.bincount(data.edge_index[0], minlength=data.num_nodes).min()) >= 24


def test_without_scikit_learn_says_how_to_get_it(quickstart, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        quickstart.main([*FAST, "1"])


# ------------------------------------------------------------------------- displays


def test_live_display_on_a_terminal(needs_digits, quickstart, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert quickstart.main([*FAST, "2"]) == 0
    out = capsys.readouterr().out
    assert "epoch   1/2" not in out and "s/epoch" in out and "same loss curve" in out


def test_plain_lines_without_rich(needs_digits, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    threads = torch.get_num_threads()
    assert load_script().main([*FAST, "2"]) == 0
    torch.set_num_threads(threads)
    assert "epoch   1/2  stock" in capsys.readouterr().out


def test_unmeasurable_memory_is_a_question_mark(quickstart, capsys):
    problem = quickstart.Problem([], [], outputs=2)
    problem.accuracy = lambda model: 0.5
    side = type("Side", (), {"losses": [1.0], "seconds": [0.5], "model": None})
    assert quickstart.report(problem, side, side, [None, 1 << 20])
    assert re.search(r"MiB \*\s+\?\s+1\.0\s*$", capsys.readouterr().out, re.M)


# ------------------------------------------------------------------- PyG's data sets


def test_unknown_data_set_lists_the_choices(quickstart, capsys):
    message = refusal(quickstart, capsys, "--dataset", "Corra")
    for choice in ("'Corra'", "digits", "Cora", "TUDataset", "Reddit"):
        assert choice in message


def test_data_set_without_its_name_says_what_is_missing(quickstart, capsys):
    assert "'name'" in refusal(quickstart, capsys, "--dataset", "Planetoid")


@pytest.fixture
def stored(monkeypatch):
    """Puts graphs in the place of a PyG class; returns how it was then called."""

    def store(cls, graphs):
        calls = []

        def build(root, name):
            calls.append((root, name))
            return graphs

        monkeypatch.setattr(torch_geometric.datasets, cls, build)
        return calls

    return store


def random_graph(y, nodes=12, **more):
    return Data(torch.rand(nodes, 3), torch.randint(nodes, (2, 40)), y=y, **more)


@pytest.mark.parametrize(
    ("given", "cls", "name"),
    [
        ("Cora", "Planetoid", "Cora"),
        ("pubmed", "Planetoid", "PubMed"),
        ("Computers", "Amazon", "Computers"),
        ("CS", "Coauthor", "CS"),
        ("ENZYMES", "TUDataset", "ENZYMES"),
        ("CitationFull/Cora_ML", "CitationFull", "Cora_ML"),
    ],
)
def test_names_resolve(quickstart, stored, given, cls, name):
    calls = stored(cls, [random_graph(torch.arange(12) % 3)])
    assert quickstart.main([*FAST, "1", "--dataset", given, "--root", "some"]) == 0
    assert calls == [(str(Path("some") / cls), name)]


def test_no_network_is_a_message(quickstart, capsys, monkeypatch):
    def build(root, name):
        raise OSError("no route to host")

    monkeypatch.setattr(torch_geometric.datasets, "Planetoid", build)
    assert "no route to host" in refusal(quickstart, capsys, "--dataset", "Cora")


def test_class_with_neither_root_nor_name(quickstart, capsys):
    assert quickstart.main([*FAST, "2", "--dataset", "KarateClub"]) == 0
    assert "1 graph(s), 34 nodes, 156 edges" in capsys.readouterr().out


def graphs_of(targets):
    return [random_graph(y, nodes=5 + i % 4) for i, y in enumerate(targets)]


@pytest.mark.parametrize("model", ["gcn", "gin"])
@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param(
            lambda: graphs_of(torch.arange(90).view(-1, 1) % 3), id="classes of graphs"
        ),
        pytest.param(
            lambda: graphs_of(torch.tensor(i % 2) for i in range(90)), id="0-d targets"
        ),
        pytest.param(
            lambda: graphs_of(torch.rand(90, 1, 4).round()), id="labels of graphs"
        ),
        pytest.param(
            lambda: graphs_of(
                torch.tensor([[0.0, 1.0, float("nan")]]) for _ in range(90)
            ),
            id="labels with gaps",
        ),
        pytest.param(lambda: graphs_of(torch.randn(90, 1, 2)), id="numbers of graphs"),
        pytest.param(
            lambda: [random_graph(torch.rand(12, 4).round()) for _ in range(3)],
            id="labels of nodes, several graphs",
        ),
        pytest.param(
            lambda: [
                random_graph(
                    torch.arange(12) % 3,
                    train_mask=torch.rand(12, 10) < 0.7,
                    test_mask=torch.rand(12) < 0.5,
                )
            ],
            id="several splits",
        ),
        pytest.param(
            lambda: [
                Data(
                    edge_index=torch.randint(9, (2, 30)), y=torch.arange(9), num_nodes=9
                )
            ],
            id="no features",
        ),
    ],
)
def test_kinds_of_data_sets(quickstart, stored, capsys, graphs, model):
    stored("TUDataset", graphs())
    assert quickstart.main([*FAST, "2", "--dataset", "MUTAG", "--model", model]) == 0
    assert "same loss curve" in capsys.readouterr().out


def test_of_numbers_it_asks_whether_they_lie_above_the_mean(quickstart, stored):
    numbers = torch.tensor([[[1.0, 30.0]], [[2.0, 10.0]], [[6.0, float("nan")]]])
    stored("TUDataset", graphs_of(numbers))
    parts = quickstart.load("MUTAG", root="", quick=True).parts
    asked = {graph.num_nodes - 5: graph.y for graph in parts["train"] + parts["test"]}
    y = torch.cat([asked[i] for i in range(3)])
    expected = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, float("nan")]])
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_graphs_are_shuffled_alike_on_both_sides_and_anew_each_epoch(
    quickstart, stored
):
    stored("TUDataset", graphs_of(torch.arange(200).view(-1, 1) % 2))
    problem = quickstart.load("MUTAG", root="", quick=True)
    assert problem.pool and problem.outputs == 2
    assert len(problem.parts["train"]) == 160 and len(problem.parts["test"]) == 40

    def order(seed):
        return torch.cat([batch.x for batch in problem.batches("train", seed)])

    assert torch.equal(order(1), order(1)) and not torch.equal(order(1), order(2))


@pytest.mark.parametrize(
    "graph",
    [
        HeteroData(),
        Data(torch.rand(4, 2), y=torch.arange(4)),
        Data(torch.rand(4, 2), torch.randint(4, (2, 6))),
    ],
    ids=["typed nodes", "no edges", "no targets"],
)
def test_what_it_cannot_train_on_is_refused(quickstart, stored, capsys, graph):
    stored("TUDataset", [graph])
    message = refusal(quickstart, capsys, "--dataset", "MUTAG")
    assert "several node types, no edges or no labels" in message
