"""One training run, whichever loader it has: the same loss at every step."""

import pytest
import torch
import torch.nn.functional as F
from loading import Molecules
from torch import nn
from torch_geometric.loader import DataLoader as StockLoader
from torch_geometric.nn import GINConv, global_add_pool

from gnnaccel.loader import DataLoader, PrefetchLoader


class Network(nn.Module):
    """GIN with dropout: it draws from torch's generator, as shuffling does."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)]
        self.conv = GINConv(nn.Sequential(*layers))
        self.out = nn.Linear(16, 2)

    def forward(self, batch):
        x = self.conv(batch.x.float() / 100, batch.edge_index).relu()
        x = F.dropout(x, training=self.training)
        return self.out(global_add_pool(x, batch.batch, batch.num_graphs))


def losses(make_loader):
    torch.manual_seed(3)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters())
    loader = make_loader(Molecules(60), batch_size=8, shuffle=True)
    found = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(network(batch), batch.y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "make_loader",
    [
        DataLoader,
        lambda *args, **kwargs: DataLoader(*args, prefetch=3, **kwargs),
        lambda *args, **kwargs: PrefetchLoader(StockLoader(*args, **kwargs)),
        lambda *args, **kwargs: PrefetchLoader(DataLoader(*args, **kwargs)),
    ],
)
def test_a_loss_is_the_same_at_every_step(make_loader):
    expected = losses(StockLoader)
    assert len(expected) == 24
    assert losses(make_loader) == expected
