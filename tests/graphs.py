"""Graphs that break graph code, by name, and hypothesis strategies for random ones."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Case(NamedTuple):
    """A graph as a user passes it.

    Attributes:
        edge_index: ``[2, E]``, source row 0, destination row 1.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        return self.num_src, self.num_dst


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    """``[2, E]`` int64: unsorted, directed, with loops and repeats as they fall."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.randint(num_src, (num_edges,), generator=generator),
            torch.randint(num_dst, (num_edges,), generator=generator),
        ]
    )


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()


def _sorted(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[1].argsort(stable=True)]


def _hub(num_nodes: int, num_edges: int) -> Tensor:
    """A star whose hub has more edges than any tile, plus a few ordinary edges."""
    spokes = torch.arange(num_edges) % num_nodes
    star = torch.stack([spokes, torch.full_like(spokes, 3)])
    return torch.cat([random_edges(num_nodes, num_nodes, 50), star], dim=1)


def _square() -> dict[str, Case]:
    nothing = torch.empty(2, 0, dtype=torch.long)
    mixed = random_edges(13, 13, 60)
    return {
        "empty": Case(nothing, 0, 0),
        "no_edges": Case(nothing, 5, 5),
        "one_node": Case(nothing, 1, 1),
        "one_loop": Case(_edges((0, 0)), 1, 1),
        "one_edge": Case(_edges((1, 0)), 2, 2),
        # Nodes 1 and 4 stand alone in the middle, 7..9 at the end.
        "isolated": Case(_edges((0, 2), (2, 3), (3, 5), (6, 0), (5, 2)), 10, 10),
        "parallel": Case(_edges((0, 1), (0, 1), (2, 1), (0, 1), (1, 0), (1, 0)), 3, 3),
        "loops": Case(_edges((0, 0), (0, 1), (1, 1), (2, 0), (3, 2)), 5, 5),
        "double_loops": Case(
            _edges((1, 1), (0, 1), (1, 1), (2, 2), (1, 2), (2, 2), (2, 2)), 4, 4
        ),
        "unsorted": Case(mixed, 13, 13),
        "sorted": Case(_sorted(mixed), 13, 13),
        "reversed": Case(_sorted(mixed).flip(1), 13, 13),
        "int32": Case(mixed.int(), 13, 13),
        # The usual torch.tensor(list of pairs).t(), without contiguous().
        "transposed_view": Case(mixed.t().contiguous().t(), 13, 13),
        "strided": Case(mixed.repeat_interleave(2, dim=1)[:, ::2], 13, 13),
        "flipped_rows_int32": Case(mixed.int().t().contiguous().t().flip(0), 13, 13),
        "hub": Case(_hub(40, 20_000), 40, 40),
        "hub_source": Case(_hub(40, 20_000).flip(0), 40, 40),
    }


def _bipartite() -> dict[str, Case]:
    nothing = torch.empty(2, 0, dtype=torch.long)
    return {
        "wide": Case(random_edges(9, 4, 30, seed=1), 9, 4),
        "tall": Case(random_edges(3, 11, 25, seed=2), 3, 11),
        # The last sources and destinations have no edge.
        "padded": Case(random_edges(4, 3, 20, seed=3), 8, 9),
        "wide_int32": Case(random_edges(9, 4, 30, seed=4).int(), 9, 4),
        "no_destination": Case(nothing, 4, 0),
        "no_source": Case(nothing, 0, 4),
    }


SQUARE = _square()
BIPARTITE = _bipartite()
ALL = SQUARE | BIPARTITE

# Feature widths: below, at and above the SIMD widths, one prime tail, one long row.
WIDTHS = (1, 3, 5, 16, 64, 65, 300)


@st.composite
def cases(draw: st.DrawFn, square: bool = False, max_nodes: int = 9) -> Case:
    """Small graphs of any shape: loops, repeats and isolated nodes included."""
    num_src = draw(st.integers(0, max_nodes))
    num_dst = num_src if square else draw(st.integers(0, max_nodes))
    pairs: list[tuple[int, int]] = []
    if num_src and num_dst:
        pair = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
        pairs = draw(st.lists(pair, max_size=30))
    edge_index = _edges(*pairs)
    if draw(st.booleans()):
        edge_index = edge_index.int()
    if draw(st.booleans()):
        edge_index = edge_index.t().contiguous().t()
    return Case(edge_index, num_src, num_dst)
