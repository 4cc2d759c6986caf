"""An ordinary PyG script for graph classification, and the two lines that change it.

Run with ``--prefetch`` to use them. Molecule-like graphs are made up, so that nothing
is downloaded: chains and rings, which the model has to tell apart.
"""

import argparse
import time

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_mean_pool


def graph(kind):
    """A chain (0) or a ring (1) of 8 to 30 nodes, with some noise for features."""
    n = int(torch.randint(8, 31, ()))
    source = torch.arange(n - 1 + kind)
    target = (source + 1) % n
    edges = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    degree = torch.bincount(edges[1], minlength=n).float().view(-1, 1)
    x = torch.cat([degree, torch.rand(n, 7)], dim=1)
    return Data(x=x, edge_index=edges, y=torch.tensor([kind]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gin = GIN(8, 64, num_layers=3)
        self.head = nn.Linear(64, 2)

    def forward(self, data):
        x = self.gin(data.x, data.edge_index)
        return self.head(global_mean_pool(x, data.batch, data.num_graphs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dataset = [graph(number % 2) for number in range(args.graphs)]
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, 128, shuffle=True, generator=generator)
    if args.prefetch:
        from gnnaccel.loader import PrefetchLoader  # 1

        loader = PrefetchLoader(loader, device)  # 2

    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(args.epochs):
        begin, total, right = time.perf_counter(), 0.0, 0
        for data in loader:
            data = data.to(device)  # nothing to do for a batch that is there
            optimizer.zero_grad()
            out = model(data)
            loss = nn.functional.cross_entropy(out, data.y)
            loss.backward()
            optimizer.step()
            total += loss.item() * data.num_graphs
            right += int((out.argmax(1) == data.y).sum())
        seconds = time.perf_counter() - begin
        print(
            f"epoch {epoch}: loss {total / len(dataset):.4f}, "
            f"accuracy {right / len(dataset):.3f}, {seconds:.2f} s"
        )
    if args.prefetch:
        print("bottleneck:", loader.stats()["bottleneck"])


if __name__ == "__main__":
    main()
