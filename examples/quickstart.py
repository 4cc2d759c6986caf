"""One model, trained by stock PyTorch Geometric and by gnnaccel, side by side.

    python examples/quickstart.py                                # no download
    python examples/quickstart.py --model sage-max --hidden 128
    python examples/quickstart.py --dataset Cora --root data     # any PyG data set

Both sides start from the same weights and see the same batches in the same order; the
accelerated one differs by the line `gnnaccel.optimize(model)`. Epochs alternate, so
that a machine that slows down slows both. The exit code is 1 if the two loss curves
part by more than 1e-4 of the largest loss.
"""

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import torch_geometric.datasets
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GCNConv, GINConv, SAGEConv, global_mean_pool
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import degree, to_undirected

import gnnaccel

try:
    from rich.progress import BarColumn, Progress
except ImportError:  # Plain lines instead; `pip install rich` brings the live display.
    Progress = None

LIMIT = 1e-4  # how far the loss curves may part, relative to the largest loss

# Short names, so that `--dataset Cora` works; every other is `Class` or `Class/name`.
SHORT_NAMES = {
    "Planetoid": ["Cora", "CiteSeer", "PubMed"],
    "Amazon": ["Computers", "Photo"],
    "Coauthor": ["CS", "Physics"],
    "TUDataset": ["MUTAG", "ENZYMES", "PROTEINS", "NCI1", "DD", "COLLAB"],
    "GNNBenchmarkDataset": ["PATTERN", "CLUSTER", "MNIST", "CIFAR10", "CSL"],
}

CONVS = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "sage-max": lambda a, b: SAGEConv(a, b, aggr="max"),
    "gin": lambda a, b: GINConv(MLP([a, b, b])),
}


class Net(torch.nn.Module):
    """An ordinary PyG model: convolutions, pooling if graphs are classified, a head."""

    def __init__(self, conv, in_channels, hidden, out_channels, layers, pool):
        super().__init__()
        widths = [in_channels] + [hidden] * (layers - 1)
        self.convs = torch.nn.ModuleList(CONVS[conv](w, hidden) for w in widths)
        self.head = torch.nn.Linear(hidden, out_channels)
        self.pool = pool

    def forward(self, data):
        x = data.x
        for conv in self.convs:
            x = conv(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch) if self.pool else x)


class Problem:
    """What to learn: classes of nodes in one graph (by masks), or of many graphs."""

    def __init__(self, train, test, outputs, pool=False):
        self.parts = {"train": train, "test": test}
        self.outputs, self.pool = outputs, pool

    def batches(self, part, seed=0):
        graphs, order = self.parts[part], torch.Generator().manual_seed(seed)
        if len(graphs) == 1:
            return graphs
        return DataLoader(graphs, 64, shuffle=part == "train", generator=order)

    def predict(self, model, data, part):
        """Returns outputs and targets of the batch's labelled nodes or graphs."""
        out, y, mask = model(data), data.y, getattr(data, f"{part}_mask", None)
        out, y = (out, y) if mask is None else (out[mask], y[mask])
        known = ~y.isnan() if y.is_floating_point() else slice(None)
        return out[known], y[known]

    def loss(self, model, data):
        out, y = self.predict(model, data, "train")
        binary = F.binary_cross_entropy_with_logits
        return (binary if y.is_floating_point() else F.cross_entropy)(out, y)

    @torch.no_grad()
    def accuracy(self, model):
        model.eval()
        pairs = [self.predict(model, data, "test") for data in self.batches("test")]
        out, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        guess = out > 0 if y.is_floating_point() else out.argmax(dim=-1)
        return float((guess == y).float().mean())


def digits(quick):
    """scikit-learn's digits as a nearest-neighbour graph, with no download.

    The 1,797 images are augmented: each is there as it is, shifted by one pixel (four
    ways) and turned (four small angles), 16,173 nodes in all. The nine copies of an
    image are on one side of the split: no copy of a test image is trained on.
    """
    try:
        import numpy as np
        from scipy import ndimage
        from sklearn.datasets import load_digits
        from sklearn.neighbors import NearestNeighbors
    except ImportError as error:
        sys.exit(f"{error}; the digits come with it: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    size = 200 if quick else len(images)
    images = images[:size].reshape(-1, 8, 8).astype("float32") / 16
    shifts = [(0, 1), (0, -1), (1, 0), (-1, 0)]
    copies = [images] + [ndimage.shift(images, (0, *s), order=0) for s in shifts]
    for angle in (-12, -6, 6, 12):
        copies += [ndimage.rotate(images, angle, (1, 2), reshape=False, order=1)]
    x = np.concatenate(copies).reshape(-1, 64)
    near = NearestNeighbors(n_neighbors=24).fit(x).kneighbors(return_distance=False)
    edges = np.stack([near.ravel(), np.repeat(np.arange(len(x)), near.shape[1])])
    edge_index = to_undirected(torch.from_numpy(edges), num_nodes=len(x))
    y = torch.from_numpy(labels[:size]).repeat(len(copies))
    test = torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.3
    test = test.repeat(len(copies))
    data = Data(torch.from_numpy(x), edge_index, y=y, train_mask=~test, test_mask=test)
    return Problem([data], [data], outputs=10)


def pyg_dataset(name, root):
    """Loads (the first time: downloads) a data set of torch_geometric.datasets."""
    known = torch_geometric.datasets.__all__
    short = {n.lower(): (c, n) for c, names in SHORT_NAMES.items() for n in names}
    cls, _, member = name.partition("/")
    cls, member = short.get(name.lower(), (cls, member))
    if cls not in known:
        raise ValueError(
            f"unknown data set {name!r}. Choices: digits; a short name "
            f"({', '.join(n for _, n in short.values())}); Class or Class/name, for "
            f"a class of torch_geometric.datasets ({', '.join(known)})"
        )
    build = getattr(torch_geometric.datasets, cls)
    kwargs = {"name": member} if member else {}
    if "root" in inspect.signature(build).parameters:
        kwargs["root"] = os.path.join(root, cls)
    try:
        return build(**kwargs)
    except Exception as error:  # a missing or unknown name, no network, ...
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"data set {name!r} does not load: {what}") from error


def load(name, root, quick):
    """Returns the Problem that a data set poses.

    Integers are classes; several yes/no labels are learnt side by side; of numbers,
    what is asked is whether they lie above their mean.
    """
    if name == "digits":
        return digits(quick)
    dataset = pyg_dataset(name, root)
    graphs = [dataset[i] for i in range(len(dataset))]
    if any(type(g) is not Data or g.edge_index is None or g.y is None for g in graphs):
        raise ValueError(f"{name!r} has several node types, no edges or no labels")
    pool = any(g.y.dim() == 0 or len(g.y) != g.num_nodes for g in graphs)
    rows = [1 if pool else g.num_nodes for g in graphs]
    y = torch.cat([g.y.reshape(n, -1) for g, n in zip(graphs, rows, strict=True)])
    if y.is_floating_point() or y.size(1) > 1:
        y, outputs = y.float(), y.size(1)
        if not ((y == 0) | (y == 1) | y.isnan()).all():  # numbers
            y = torch.where(y.isnan(), y, (y > y.nanmean(dim=0)).float())
    else:
        y, outputs = y.view(-1), int(y.max()) + 1
    for g, target in zip(graphs, y.split(rows), strict=True):
        if g.x is None:  # no features: what is known of a node is its degree
            g.x = degree(g.edge_index[1], g.num_nodes).log1p().view(-1, 1)
        g.x, g.y = g.x.float(), target
    if len(graphs) > 1:
        graphs = [graphs[i] for i in torch.randperm(len(graphs))]
        cut = len(graphs) * 4 // 5
        return Problem(graphs[:cut], graphs[cut:], outputs, pool)
    (data,) = graphs
    if "train_mask" not in data:
        data = RandomNodeSplit(num_val=0, num_test=0.2)(data)
    test = data.test_mask if "test_mask" in data else ~data.train_mask
    for key, mask in (("train_mask", data.train_mask), ("test_mask", test)):
        data[key] = mask if mask.dim() == 1 else mask[:, 0]  # the first split
    return Problem([data], [data], outputs)


class Side:
    """A model in training, with the loss and the seconds of each epoch."""

    def __init__(self, name, problem, args):
        self.name, self.problem, self.seed = name, problem, args.seed
        self.losses, self.seconds = [], []
        features = problem.parts["train"][0].num_features
        sizes = (features, args.hidden, problem.outputs, args.layers)
        self.model = Net(args.model, *sizes, problem.pool)
        if name == "gnnaccel":
            self.model = gnnaccel.optimize(self.model)  # the one line
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def epoch(self):
        start, losses = time.perf_counter(), []
        self.model.train()
        for data in self.problem.batches("train", self.seed + len(self.losses)):
            self.optimizer.zero_grad()
            loss = self.problem.loss(self.model, data)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        self.losses.append(float(torch.stack(losses).mean()))
        self.seconds.append(time.perf_counter() - start)


def train(sides, epochs):
    """Trains both, taking turns at going first, and shows how far they are."""
    live = Progress is not None and sys.stdout.isatty()
    with Progress(BarColumn(), "{task.description}") if live else nullcontext() as bars:
        for side in sides:
            side.bar = bars.add_task(side.name) if live else None
        for epoch in range(1, epochs + 1):
            for side in sides[:: 1 if epoch % 2 else -1]:
                side.epoch()
            # A bar shows the time that its side has taken, on the slower side's scale.
            total = max(sum(side.seconds) for side in sides) * epochs / epoch
            for side in sides:
                speed, spent = median(side.seconds), sum(side.seconds)
                note = f"{side.name:9} loss {side.losses[-1]:.4f}  {speed:.4f} s/epoch"
                if live:
                    shown = {"completed": spent, "total": total, "description": note}
                    bars.update(side.bar, **shown)
                elif epoch == 1 or epoch % max(epochs // 10, 1) == 0:
                    print(f"epoch {epoch:3}/{epochs}  {note}", flush=True)


def peak_memory(side, argv):
    """Bytes by which two epochs raise the peak of a process of their own, or None."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(side.problem, file.name)
        command = [sys.executable, __file__, *argv, "--measure", side.name, file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def measure(name, file, args):
    """What peak_memory runs. Linux: getrusage would count the parent's peak, too."""

    def peak():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024

    # A first step on two nodes, so that what libraries load once is not counted.
    edge_index, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
    tiny = Data(torch.rand(2, 3), edge_index, y=y)
    Side(name, Problem([tiny], [tiny], outputs=2), args).epoch()
    side = Side(name, torch.load(file, weights_only=False), args)
    before = peak()
    side.epoch()
    side.epoch()
    print(peak() - before)


def save_plot(sides, file):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for side, style in zip(sides, ("-", "--"), strict=True):
        axes.plot(list(accumulate(side.seconds)), side.losses, style, label=side.name)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="training loss")
    axes.legend()
    axes.figure.savefig(file, dpi=150)


def report(problem, stock, fast, peaks):
    """Prints the table and the verdict; returns whether the loss curves agree."""
    sides = (stock, fast)
    rows = [
        ("s/epoch, median", ".4f", [median(s.seconds) for s in sides]),
        ("s, first epoch", ".4f", [s.seconds[0] for s in sides]),
        ("training loss", ".6f", [s.losses[-1] for s in sides]),
        ("test accuracy", ".4f", [problem.accuracy(s.model) for s in sides]),
    ]
    if peaks:
        rows += [("peak extra memory, MiB *", ".1f", [p and p / 2**20 for p in peaks])]
    print(f"\n{'':24}{'stock PyG':>14}{'gnnaccel':>14}{'stock / ours':>14}")
    for name, form, (a, b) in rows:
        cells = ["?" if v is None else format(v, form) for v in (a, b)]
        ratio = f"{a / b:.1f}x" if a and b and name[0] in "sp" else ""
        print(f"{name:24}{cells[0]:>14}{cells[1]:>14}{ratio:>14}")
    if peaks:
        print(
            "* by how much two epochs raise the peak (VmHWM) of a process of their own"
        )
    curves = torch.tensor([stock.losses, fast.losses], dtype=torch.float64)
    apart = float((curves[0] - curves[1]).abs().max())  # NaN if there is one
    relative = apart / max(stock.losses)
    same = relative <= LIMIT  # False for NaN
    print(
        f"{'same' if same else 'DIFFERENT'} loss curve: max |difference| = {apart:.2e} "
        f"({relative:.1e} of the largest loss; limit {LIMIT:.0e})"
    )
    return same


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    option = parser.add_argument
    option("--dataset", default="digits", help="digits, Cora, TUDataset/MUTAG, ...")
    option("--root", default="data", help="where data sets are kept")
    option("--model", default="gcn", choices=CONVS)
    option("--hidden", type=int, default=64)
    option("--layers", type=int, default=2)
    option("--epochs", type=int, help="default: 80, with --quick 5")
    option("--lr", type=float, default=0.005)
    option("--seed", type=int, default=0)
    option("--threads", type=int, default=torch.get_num_threads())
    option("--quick", action="store_true", help="few digits, few epochs: seconds")
    option("--no-memory", action="store_true", help="don't measure memory")
    option("--plot", metavar="FILE.png", help="draw the loss curves over time")
    option("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.measure:
        return measure(*args.measure, args)
    try:
        problem = load(args.dataset, args.root, args.quick)
    except ValueError as error:
        parser.error(str(error))
    sides = [Side(name, problem, args) for name in ("stock", "gnnaccel")]
    sides[1].model.load_state_dict(sides[0].model.state_dict())
    graphs = {id(g): g for part in problem.parts.values() for g in part}.values()
    nodes, edges = sum(g.num_nodes for g in graphs), sum(g.num_edges for g in graphs)
    print(f"{args.dataset}: {len(graphs):,} graph(s), {nodes:,} nodes, {edges:,} edges")
    train(sides, args.epochs or (5 if args.quick else 80))
    peaks = [] if args.no_memory else [peak_memory(side, argv) for side in sides]
    if args.plot:
        save_plot(sides, args.plot)
    return 0 if report(problem, *sides, peaks) else 1


if __name__ == "__main__":
    sys.exit(main())
