"""Data sets for the tests of loaders, epochs of them, and what a process holds."""

import os
import threading
from pathlib import Path

import torch
from same import assert_same
from torch_geometric.data import Data, HeteroData, InMemoryDataset


class Molecules(InMemoryDataset):
    """Random graphs of 1 to 12 nodes, one without edges, one without nodes."""

    def __init__(self, count=50, seed=0, transform=None, hetero=False):
        super().__init__(None, transform)
        generator = torch.Generator().manual_seed(seed)
        make = hetero_graph if hetero else graph
        graphs = [make(generator, number) for number in range(count)]
        self._data, self.slices = self.collate(graphs)


def graph(generator, number):
    """A molecule: x [n, 9], edge_attr [e, 3], and attributes of the graph."""

    def whole(high, *shape):
        return torch.randint(max(high, 1), shape, generator=generator)

    nodes = 0 if number == 7 else int(whole(12, 1)) + 1
    edges = 0 if number in (3, 7) else 2 * nodes
    return Data(
        x=whole(100, nodes, 9),
        edge_index=whole(nodes, 2, edges),
        edge_attr=torch.rand(edges, 3, generator=generator),
        y=torch.rand(1, 2, generator=generator),
        name=f"graph {number}",
        weight=0.5 * number,
        root_index=whole(nodes, 1),
    )


def hetero_graph(generator, number):
    """Two node types and two edge types, one of them between the types."""
    data = HeteroData()
    users, items = number % 5 + 1, number % 3 + 2
    data["user"].x = torch.rand(users, 4, generator=generator)
    data["item"].x = torch.rand(items, 3, generator=generator)
    data["item"].num_nodes = items
    data["user", "buys", "item"].edge_index = torch.stack(
        [
            torch.randint(users, (6,), generator=generator),
            torch.randint(items, (6,), generator=generator),
        ]
    )
    data["user", "knows", "user"].edge_index = torch.randint(
        users, (2, 4), generator=generator
    )
    data.y = number
    return data


def assert_same_epochs(ours, stock, epochs=2, seed=5):
    """The same batches in the same order, and the same draws, from the same seed."""
    torch.manual_seed(seed)
    expected = [list(stock) for _ in range(epochs)]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    actual = [list(ours) for _ in range(epochs)]
    assert torch.equal(torch.get_rng_state(), state), "the generator differs"
    for epoch, (batches, right) in enumerate(zip(actual, expected, strict=True)):
        assert len(batches) == len(right)
        for number, (batch, wanted) in enumerate(zip(batches, right, strict=True)):
            assert_same(batch, wanted, f"epoch {epoch}, batch {number}")


def resources():
    """What this process holds: threads, file descriptors, shared memory files.

    Returns:
        Numbers of each, by name.
    """
    own = f"_{os.getpid()}_"
    return {
        "native threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared memory": sum(own in path.name for path in Path("/dev/shm").iterdir()),
    }


def resident():
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
