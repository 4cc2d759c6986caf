"""Graph: the structure of one graph, in the orders kernels want it.

Built from what a user has (an ``edge_index``, a sparse matrix), once, and found again
for as long as that object lives and does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gnnaccel import kernels
from gnnaccel.cache import Memory, remember
from gnnaccel.errors import EdgeIndexError
from gnnaccel.kernels.grouping import Grouping, index_dtype

T = TypeVar("T")

Size = tuple[int | None, int | None] | int | None


class Graph:
    """A graph whose edges run ``src[e] -> dst[e]``: immutable.

    It holds a CSR structure by destination and, once asked for, the transposed one by
    source. "Input order" is the order of the edges it was built from.

    Attributes:
        rows: The edges grouped by destination, as kernels take them.
    """

    rows: Grouping

    def __init__(self, rows: Grouping) -> None:
        """Use :meth:`of`, :meth:`from_edge_index` or :meth:`from_csr` instead.

        Args:
            rows: The edges grouped by destination.
        """
        self.rows = rows
        self._transposed: Graph | None = None
        # The way back from a transposed graph is weak: a cycle would keep both alive
        # until the garbage collector runs.
        self._origin: weakref.ref[Graph] | None = None
        self._derived: dict[Any, Any] = {}
        self._coo: Tensor | None = None
        #: What is known about other tensors (weights) in connection with this graph.
        self.memory = Memory()

    # Construction --------------------------------------------------------------------

    @classmethod
    def of(cls, adj: Any, size: Size = None) -> Graph:
        """The graph of whatever describes one; cached while ``adj`` is unchanged.

        Args:
            adj: ``[2, E]`` integer tensor of sources and destinations; ``EdgeIndex``;
                ``SparseTensor`` or ``torch.sparse`` matrix (COO, CSR, CSC) whose rows
                are destinations, as PyG passes it (``adj_t``); or a :class:`Graph`.
            size: ``(num_src, num_dst)``, or one number for both. What is ``None`` is
                taken from ``adj``: the matrix's shape, or the largest index plus one.

        Returns:
            The graph. Edge weights stored in a sparse matrix are not part of it.

        Raises:
            ValueError: ``adj`` has a wrong type, dtype or shape, or contradicts
                ``size``.
            EdgeIndexError: An edge lies outside ``size``.
        """
        if isinstance(adj, Graph):
            _check_size(size, adj.num_src, adj.num_dst)
            return adj
        if isinstance(adj, SparseTensor):
            _check_size(size, adj.size(1), adj.size(0))
            rowptr, col, _ = adj.csr()
            num_src = adj.size(1)
            return remember(
                col,
                ("csr", num_src, rowptr.numel()),
                lambda: cls.from_csr(rowptr, col, num_src),
            )
        if isinstance(adj, Tensor) and is_torch_sparse_tensor(adj):
            _check_size(size, adj.size(1), adj.size(0))
            return _from_torch_sparse(adj)
        check_edge_index(adj)
        if isinstance(adj, EdgeIndex):
            num_src, num_dst = adj.sparse_size()
            if size is None:
                size = (num_src, num_dst)
            adj = adj.as_tensor()
        num_src, num_dst = _resolve_size(adj, size)
        return remember(
            adj,
            ("coo", num_src, num_dst),
            lambda: cls.from_edge_index(adj, (num_src, num_dst)),
        )

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, size: Size = None) -> Graph:
        """Groups the edges of ``edge_index`` by destination; not cached.

        Args:
            edge_index: ``[2, E]``, sources and destinations; any integer dtype, any
                strides, any order.
            size: See :meth:`of`.

        Raises:
            ValueError: ``edge_index`` has a wrong type, dtype or shape.
            EdgeIndexError: An edge lies outside ``size``.
        """
        check_edge_index(edge_index)
        num_src, num_dst = _resolve_size(edge_index, size)
        src, dst = _narrow(edge_index).unbind(0)
        return cls(_group(dst, num_dst, "destinations", src, num_src, "sources"))

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, num_src: int) -> Graph:
        """A graph from a CSR structure whose rows are destinations; not cached.

        Args:
            rowptr: ``[num_dst + 1]``, int32 or int64.
            col: ``[E]``, the source of each edge.
            num_src: Number of sources.

        Raises:
            ValueError: ``rowptr`` is no CSR pointer for ``col``.
            EdgeIndexError: A source is out of range.
        """
        if rowptr.dim() != 1 or rowptr.numel() == 0 or col.dim() != 1:
            raise ValueError(
                f"Expected 'rowptr' and 'col' to be vectors, 'rowptr' not empty (got "
                f"shapes {list(rowptr.shape)} and {list(col.shape)})"
            )
        counts = rowptr[1:] - rowptr[:-1]
        if (
            int(rowptr[0]) != 0
            or int(rowptr[-1]) != col.numel()
            or bool((counts < 0).any())
        ):
            raise ValueError(
                f"Expected 'rowptr' to rise from 0 to {col.numel()} (got "
                f"{int(rowptr[0])} to {int(rowptr[-1])})"
            )
        for value in (int(col.min()), int(col.max())) if col.numel() else ():
            if not 0 <= value < num_src:
                raise EdgeIndexError.out_of_range(value, num_src, "sources")
        num_dst = counts.numel()
        dtype = index_dtype(col.numel(), num_src, num_dst)
        own_col = col.to(dtype, copy=True)
        rows = Grouping(
            rowptr.to(dtype, copy=True),
            own_col,
            None,
            num_src,
            col.numel(),
            int(counts.max()) if num_dst else 0,
        )
        rows.loops = int((rows.row == own_col).sum())
        return cls(rows)

    # Structure -----------------------------------------------------------------------

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self.rows.cols

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self.rows.rows

    @property
    def num_edges(self) -> int:
        """Number of edges, parallel ones and self-loops included."""
        return self.rows.entries

    @property
    def rowptr(self) -> Tensor:
        """``[num_dst + 1]``: where the edges into each destination begin."""
        return self.rows.ptr

    @property
    def col(self) -> Tensor:
        """``[E]``: the source of each edge, grouped by destination."""
        assert self.rows.col is not None
        return self.rows.col

    @property
    def perm(self) -> Tensor | None:
        """``[E]``: the input position of each grouped edge; ``None``: the same."""
        return self.rows.perm

    @property
    def max_degree(self) -> int:
        """Edges into the destination that has most."""
        return self.rows.max_degree

    @property
    def num_self_loops(self) -> int:
        """Edges from a node to the node of the same number."""
        return self.rows.loops

    @property
    def device(self) -> torch.device:
        """Where the structure lies."""
        return self.rows.ptr.device

    @property
    def index_dtype(self) -> torch.dtype:
        """int32 where nodes and edges fit, else int64."""
        return self.rows.ptr.dtype

    @property
    def in_degree(self) -> Tensor:
        """``[num_dst]``, int64: edges into each destination."""
        return self.rows.counts

    @property
    def out_degree(self) -> Tensor:
        """``[num_src]``, int64: edges out of each source."""
        return self.t.rows.counts

    @property
    def edge_index(self) -> Tensor:
        """``[2, E]``, int64: sources and destinations in input order."""
        if self._coo is None:
            with torch.inference_mode(False):  # it may be saved for a backward pass
                grouped = torch.stack([self.col.long(), self.rows.row])
                if self.perm is not None:
                    order = self.perm.long()
                    grouped = torch.empty_like(grouped).index_copy_(1, order, grouped)
            self._coo = grouped
        return self._coo

    @property
    def src(self) -> Tensor:
        """``[E]``, int64: sources in input order."""
        return self.edge_index[0]

    @property
    def dst(self) -> Tensor:
        """``[E]``, int64: destinations in input order."""
        return self.edge_index[1]

    @property
    def t(self) -> Graph:
        """The graph with all edges reversed, in the same input order; built once."""
        origin = self._origin() if self._origin is not None else None
        if origin is not None:
            return origin
        if self._transposed is None:
            # Within a source, edges stand by destination, in input order.
            backend = kernels.pick(self.device, torch.float32)
            self._transposed = Graph(backend.transpose(self.rows))
            self._transposed._origin = weakref.ref(self)
        return self._transposed

    @property
    def without_self_loops(self) -> Graph:
        """The graph less its self-loops; itself if it has none.

        Its edges keep their positions in the input order of this graph.
        """
        # Not cached where it is the graph itself: that would be a reference cycle.
        return self._loopless if self.num_self_loops else self

    @cached_property
    def _loopless(self) -> Graph:
        keep = self.rows.row != self.col
        counts = torch.bincount(self.rows.row[keep], minlength=self.num_dst)
        ptr = torch.zeros_like(self.rowptr)
        ptr[1:] = counts.cumsum(0)
        positions = (
            torch.arange(self.num_edges, device=self.device).to(self.index_dtype)
            if self.perm is None
            else self.perm
        )
        col = self.col[keep]
        return Graph(
            Grouping(
                ptr,
                col,
                positions[keep],
                self.num_src,
                col.numel(),
                int(counts.max()),
                0,
            )
        )

    def derived(self, key: Any, build: Callable[[], T]) -> T:
        """What follows from the structure, the degrees say; built once."""
        if key not in self._derived:
            with torch.inference_mode(False):
                self._derived[key] = build()
        found: T = self._derived[key]
        return found

    # Movement ------------------------------------------------------------------------

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """The graph on another device, without its transposed."""
        if torch.device(device) == self.device:
            return self
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Graph:
        """The graph in page-locked memory, without its transposed."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Any) -> Graph:
        r = self.rows
        moved = Grouping(
            move(r.ptr),
            None if r.col is None else move(r.col),
            None if r.perm is None else move(r.perm),
            r.cols,
            r.entries,
            r.max_degree,
            r.loops,
        )
        return Graph(moved)

    def __reduce__(self) -> tuple[Any, ...]:
        r = self.rows
        parts = (r.ptr, r.col, r.perm, r.cols, r.entries, r.max_degree, r.loops)
        return _rebuild, parts

    def __repr__(self) -> str:
        return (
            f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, "
            f"num_edges={self.num_edges}, {self.index_dtype}, device={self.device})"
        )


def _rebuild(*parts: Any) -> Graph:
    return Graph(Grouping(*parts))


def grouping_of(index: Tensor, rows: int, what: str = "indices") -> Grouping:
    """Positions ``0 .. E`` grouped by ``index``; cached while ``index`` is unchanged.

    Args:
        index: ``[E]``, integer.
        rows: Number of groups.
        what: What the indices are called in an error.

    Raises:
        ValueError: ``rows`` is negative.
        EdgeIndexError: An index is outside ``[0, rows)``.
    """
    if rows < 0:
        raise ValueError(f"Expected a number of groups of at least 0 (got {rows})")
    return remember(index, ("group", rows), lambda: _group(_narrow(index), rows, what))


def check_edge_index(edge_index: Any) -> None:
    """Raises ``ValueError``, worded as in PyG, unless this is a ``[2, E]`` index."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            "Expected 'edge_index' to be an integer tensor of shape [2, num_edges], "
            "a 'torch_sparse.SparseTensor', a 'torch.sparse.Tensor' or a "
            "'gnnaccel.Graph' "
            f"(got '{type(edge_index).__name__}')"
        )
    if edge_index.dtype not in _INTEGERS:
        raise ValueError(
            f"Expected 'edge_index' to be of integer type (got '{edge_index.dtype}')"
        )
    if edge_index.dim() != 2:
        raise ValueError(
            f"Expected 'edge_index' to be two-dimensional (got {edge_index.dim()} "
            "dimensions)"
        )
    if edge_index.size(0) != 2:
        raise ValueError(
            "Expected 'edge_index' to have size '2' in the first dimension (got "
            f"'{edge_index.size(0)}')"
        )


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _narrow(index: Tensor) -> Tensor:
    return index if index.dtype in (torch.int32, torch.int64) else index.long()


def _group(
    key: Tensor,
    rows: int,
    what: str,
    other: Tensor | None = None,
    others: int = 0,
    what_other: str = "",
) -> Grouping:
    backend = kernels.pick(key.device, torch.float32)
    grouping: Grouping | None
    grouping, end, value = backend.group(key, rows, other, others)
    if grouping is None:
        index, size = (key, rows) if end == 1 else (other, others)
        assert index is not None
        # Not just any wrong one: the lowest or the highest.
        value = int(index.min()) if value < 0 else int(index.max())
        raise EdgeIndexError.out_of_range(value, size, what if end == 1 else what_other)
    return grouping


def split_size(size: Size) -> tuple[int | None, int | None]:
    """``(num_src, num_dst)``, either ``None`` if unknown."""
    if size is None:
        return None, None
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise ValueError(
            f"Expected 'size' to be a number or a pair (num_src, num_dst) (got {size})"
        )
    return size[0], size[1]


def _resolve_size(edge_index: Tensor, size: Size) -> tuple[int, int]:
    num_src, num_dst = split_size(size)
    for given in (num_src, num_dst):
        if given is not None and (not hasattr(given, "__index__") or given < 0):
            raise ValueError(
                f"Expected 'size' to hold whole numbers of at least 0 (got {size})"
            )
    if size is None:
        both = int(edge_index.max()) + 1 if edge_index.numel() else 0
        return both, both
    if num_src is None:
        num_src = int(edge_index[0].max()) + 1 if edge_index.numel() else 0
    if num_dst is None:
        num_dst = int(edge_index[1].max()) + 1 if edge_index.numel() else 0
    return num_src, num_dst


def _check_size(size: Size, num_src: int, num_dst: int) -> None:
    want_src, want_dst = split_size(size)
    if want_src not in (None, num_src) or want_dst not in (None, num_dst):
        raise ValueError(
            f"Expected a graph of size {(want_src, want_dst)} (sources, destinations), "
            f"got one of size {(num_src, num_dst)}"
        )


def _from_torch_sparse(adj: Tensor) -> Graph:
    """From a matrix whose rows are destinations, cached by its index tensors."""
    num_dst, num_src = int(adj.size(0)), int(adj.size(1))
    if adj.layout == torch.sparse_csr:
        rowptr, col = adj.crow_indices(), adj.col_indices()
        return remember(
            adj, ("csr", num_src), lambda: Graph.from_csr(rowptr, col, num_src)
        )
    if adj.layout == torch.sparse_csc:
        colptr, row = adj.ccol_indices(), adj.row_indices()
        return remember(
            adj, ("csc", num_dst), lambda: Graph.from_csr(colptr, row, num_dst).t
        )
    if adj.layout == torch.sparse_coo:
        # Uncoalesced duplicates are parallel edges.
        indices = adj._indices()
        return remember(
            adj,
            ("coo", num_src, num_dst),
            lambda: Graph.from_edge_index(indices.flip(0), (num_src, num_dst)),
        )
    raise ValueError(f"Unsupported sparse tensor layout (got '{adj.layout}')")
