"""The same for loaders that sample neighbours: one large graph, a batch a sample of it.

Run with ``--prefetch`` to use PrefetchLoader. The graph is made up: nodes of one class
are linked more often than others. Sampling runs in one worker process, which has random
numbers of its own, so that it can run ahead and the results stay the same.
"""

import argparse
import time

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE


def community(nodes, classes=4, degree=10):
    """A graph of classes: three of four edges stay within one."""
    y = torch.randint(classes, (nodes,))
    members = [(y == c).nonzero().flatten() for c in range(classes)]
    target = torch.arange(nodes).repeat_interleave(degree)
    source = torch.randint(nodes, target.shape)
    inside = torch.rand(target.shape) < 0.75
    for c, own in enumerate(members):
        chosen = inside & (y[target] == c)
        source[chosen] = own[torch.randint(len(own), (int(chosen.sum()),))]
    x = torch.nn.functional.one_hot(y, classes) + 2 * torch.randn(nodes, classes)
    return Data(x=x, edge_index=torch.stack([source, target]), y=y)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    data = community(args.nodes)
    loader = NeighborLoader(data, [10, 5], batch_size=512, shuffle=True, num_workers=1)
    if args.prefetch:
        from gnnaccel.loader import PrefetchLoader  # 1

        loader = PrefetchLoader(loader, device)  # 2

    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=4).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        begin, right = time.perf_counter(), 0
        for batch in loader:
            batch = batch.to(device)
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            target = batch.y[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, target)
            loss.backward()
            optimizer.step()
            right += int((out.argmax(1) == target).sum())
        seconds = time.perf_counter() - begin
        print(f"epoch {epoch}: accuracy {right / args.nodes:.3f}, {seconds:.2f} s")
    if args.prefetch:
        print("bottleneck:", loader.stats()["bottleneck"])


if __name__ == "__main__":
    main()
