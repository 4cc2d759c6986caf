"""attention: neighbours added up by learnt shares, without a message per edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnaccel import kernels
from gnnaccel.graph import Graph, Size
from gnnaccel.kernels import memory, transforming
from gnnaccel.kernels.attention import SCORES, Inputs, Score
from gnnaccel.kernels.grouping import accumulator
from gnnaccel.ops.adj import Adj, check_device, check_tensors, hold, wants_grad
from gnnaccel.ops.function import Function, differentiable_gradients
from gnnaccel.ops.gather import gather, scatter
from gnnaccel.ops.product import sddmm_held, spmm_sum
from gnnaccel.ops.softmax import edge_softmax, softmax


def attention(
    adj: Any,
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None = None,
    *,
    score: str = "dot",
    att: Tensor | None = None,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    map: Tensor | None = None,
    slope: float = 0.2,
    scale: float | None = None,
    size: Size = None,
) -> Tensor:
    """Attends from each node to its in-neighbours, in H heads of C columns.

    The logit of an edge ``e`` from ``j`` to ``i``, in each head:

    - ``"dot"``: ``scale <query[i], key[j] + edge[e]>``, as TransformerConv;
    - ``"mlp"``: ``<att, lrelu(query[i] + key[j] + edge[e])>``, as GATv2Conv;
    - ``"sum"``: ``lrelu(query[i] + key[j] + bias[e])``, as GATConv.

    A softmax over the edges into each node turns logits into shares.

    Args:
        adj: What :meth:`gnnaccel.Graph.of` takes.
        query: ``[num_dst, H, C]``; under ``"sum"`` ``[num_dst, H]``, or ``None`` for 0.
        key: ``[num_src, H, C]``; under ``"sum"`` ``[num_src, H]``.
        value: ``[num_src, H, C]``, what is added up; ``None``: the key, which is how
            GATv2Conv attends.
        score: ``"dot"``, ``"mlp"`` or ``"sum"``.
        att: ``[H, C]``, for ``"mlp"``.
        edge: ``[E, H, C]``, in input edge order, for ``"dot"`` and ``"mlp"``. Under
            ``"dot"`` it is added to the values as well. With a map ``[E, D]``.
        bias: ``[E, H]``, in input edge order, for ``"sum"``.
        keep: ``[E, H]``, in input edge order: factors of the shares, such as a dropout
            mask; no gradient.
        map: ``[D, H, C]``; ``edge @ map`` stands for ``edge`` then, and with a D of up
            to 32 ``[E, H, C]`` is never written down.
        slope: Negative slope of the leaky ReLU.
        scale: Default: ``C ** -0.5``.
        size: ``(num_src, num_dst)`` of a plain ``edge_index``; default: as many as
            ``key`` and ``query`` have rows.

    Returns:
        ``[num_dst, H, C]``; 0 for a node without incoming edges. Half types are
        computed in float32 and rounded once.

    Raises:
        TypeError: A tensor is none.
        ValueError: A shape, dtype, device or ``score`` is wrong.
        EdgeIndexError: An edge names a node that does not exist.
    """
    inputs = Inputs(query, key, value, att, edge, bias, keep, map)
    check_tensors(**inputs._asdict())
    if size is None and isinstance(adj, Tensor) and adj.layout == torch.strided:
        size = (key.size(0), key.size(0) if query is None else query.size(0))
    held = hold(adj, size, *inputs)
    if score not in SCORES:
        raise ValueError(f"Expected 'score' out of {list(SCORES)} (got {score!r})")
    _check(held, score, inputs)
    if scale is None:
        scale = max(inputs.values.size(-1), 1) ** -0.5
    return attend(held, Score(score, slope, scale), inputs)


def _check(held: Adj, score: str, inputs: Inputs) -> None:
    """Raises ``ValueError`` unless the tensors of ``inputs`` fit each other."""
    if inputs.values.dim() != 3:
        name = "key" if inputs.value is None else "value"
        raise ValueError(
            f"Expected '{name}' to have shape [num_src, H, C] (got "
            f"{list(inputs.values.shape)})"
        )
    heads, columns = inputs.values.shape[1:]
    edges = (
        held.graph.num_edges if held.graph is not None else held.edge_index.size(1)  # type: ignore[union-attr]
    )
    of_node = (heads,) if score == "sum" else (heads, columns)
    of_edge: tuple[int, ...] = (heads, columns)
    if inputs.map is not None and inputs.map.dim() > 0:
        of_edge = (inputs.map.size(0),)
    shapes: dict[str, tuple[int, ...] | None] = {
        "query": (held.num_dst, *of_node),
        "key": (held.num_src, *of_node),
        "value": (held.num_src, heads, columns),
        "att": (heads, columns) if score == "mlp" else None,
        "edge": None if score == "sum" else (edges, *of_edge),
        "bias": (edges, heads) if score == "sum" else None,
        "keep": (edges, heads),
        "map": None if inputs.edge is None else (*of_edge[:1], heads, columns),
    }
    needed = {"sum": ("key", "value"), "mlp": ("query", "att"), "dot": ("query",)}
    for name, tensor in inputs._asdict().items():
        shape = shapes[name]
        if tensor is None:
            if name in needed[score]:
                raise ValueError(f"score={score!r} needs '{name}' (got None)")
            continue
        if shape is None:
            raise ValueError(f"score={score!r} takes no '{name}'")
        if tuple(tensor.shape) != shape or tensor.dtype != inputs.key.dtype:
            raise ValueError(
                f"Expected '{name}' to have shape {list(shape)} and the dtype of "
                f"'key', {inputs.key.dtype} (got {list(tensor.shape)}, {tensor.dtype})"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"Expected '{name}' to be floating (got {tensor.dtype})")
        check_device(held, name, tensor)


#: Up to so many columns, edges' features are mapped inside the kernels.
SHALLOW = 32


def attend(adj: Adj, score: Score, inputs: Inputs) -> Tensor:
    """The computation behind :func:`attention`, unchecked."""
    dtype = inputs.key.dtype
    wide = accumulator(dtype)
    if wide != dtype:
        raised = [None if x is None else x.to(wide) for x in inputs]
        return attend(adj, score, Inputs(*raised)).to(dtype)  # type: ignore[arg-type]
    if adj.graph is None or transforming(inputs.key) or inputs.values.numel() == 0:
        return compose(adj, score, inputs)
    if inputs.map is not None and not 0 < len(inputs.map) <= SHALLOW:
        inputs = inputs.mapped()
    out: Tensor
    backend = kernels.pick_for(inputs.key)
    if wants_grad(*inputs):
        out, _ = _Attention.apply(*inputs, adj.graph, score, backend)
        return out
    out, _ = backend.attention(adj.graph.rows, score, inputs, False)
    return out


class _Attention(Function):
    @staticmethod
    def forward(*args: Any) -> Any:
        *tensors, graph, score, backend = args
        return backend.attention(graph.rows, score, Inputs(*tensors), True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # What is kept for the gradients is the backend's own.
        *tensors, ctx.graph, ctx.score, ctx.backend = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        *tensors, out, kept = ctx.saved_tensors
        if grad is None:
            return (None,) * (len(tensors) + 3)
        inputs, graph = Inputs(*tensors), ctx.graph
        wanted = Inputs(*ctx.needs_input_grad[: len(tensors)])
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            adj, score = Adj(graph, None, graph.num_src, graph.num_dst), ctx.score
            grads = differentiable_gradients(
                lambda *own: compose(adj, score, Inputs(*own)),
                inputs,
                grad,
                ctx.needs_input_grad[: len(inputs)],
            )
            return *grads, None, None, None
        grads = ctx.backend.attention_backward(
            graph.rows,
            graph.t.rows,
            None if ctx.score.kind == "sum" else _positions(graph),
            ctx.score,
            inputs,
            out,
            kept,
            grad,
            wanted.edge,
        )
        return (
            *(g if w else None for g, w in zip(grads, wanted, strict=True)),
            None,
            None,
            None,
        )


class Nodes(NamedTuple):
    """The tensors of an attention whose logits are sums of products with nodes.

    Attributes:
        x: ``[num_src, H, C]``, the values.
        att: ``[H, C]``; ``(x * att).sum(-1)`` is the key.
        x_dst: ``[num_dst, H, C]``; ``None``: those of the sources.
        att_dst: ``[H, C]``; ``(x_dst * att_dst).sum(-1)`` is the query. ``None``: there
            is none.
        bias: See :class:`~gnnaccel.kernels.attention.Inputs`.
        keep: The same.
    """

    x: Tensor
    att: Tensor
    x_dst: Tensor | None = None
    att_dst: Tensor | None = None
    bias: Tensor | None = None
    keep: Tensor | None = None


def attend_nodes(adj: Adj, score: Score, nodes: Nodes) -> Tensor:
    """Attention by ``"sum"`` whose gradients of nodes are added up in place."""
    x = nodes.x
    if (
        adj.graph is None
        or transforming(x)
        or x.numel() == 0
        or accumulator(x.dtype) != x.dtype
    ):
        return attend(adj, score, _inputs_of(nodes, head_dots))
    backend = kernels.pick_for(x)
    if not wants_grad(*nodes):
        inputs = _inputs_of(nodes, lambda x, *atts: backend.head_dots(x, atts))
        return attend(adj, score, inputs)
    out: Tensor = _NodeAttention.apply(*nodes, adj.graph, score, backend)[0]
    return out


def head_dots(x: Tensor, *atts: Tensor) -> list[Tensor]:
    """``(x * att).sum(-1)`` for each of ``atts``, differentiable."""
    return [(x * att).sum(-1) for att in atts]


def _inputs_of(nodes: Nodes, dots: Callable[..., list[Tensor]]) -> Inputs:
    query = None
    if nodes.att_dst is None:
        (key,) = dots(nodes.x, nodes.att)
    elif nodes.x_dst is None:
        key, query = dots(nodes.x, nodes.att, nodes.att_dst)
    else:
        (key,), (query,) = dots(nodes.x, nodes.att), dots(nodes.x_dst, nodes.att_dst)
    return Inputs(query, key, nodes.x, bias=nodes.bias, keep=nodes.keep)


class _NodeAttention(Function):
    @staticmethod
    def forward(*args: Any) -> Any:
        *tensors, graph, score, backend = args
        inputs = _inputs_of(Nodes(*tensors), lambda x, *a: backend.head_dots(x, a))
        kept = backend.attention(graph.rows, score, inputs, True)
        return *kept, inputs.key, inputs.query

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.graph, ctx.score, ctx.backend = inputs
        ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *tensors, out, kept, key, query = ctx.saved_tensors
        if grad is None:
            return (None,) * (len(tensors) + 3)
        nodes, graph = Nodes(*tensors), ctx.graph
        wanted = Nodes(*ctx.needs_input_grad[: len(tensors)])
        # Derivatives of derivatives are asked for, or a batch of gradients.
        if torch.is_grad_enabled() or transforming(grad):
            adj, score = Adj(graph, None, graph.num_src, graph.num_dst), ctx.score
            grads: Any = differentiable_gradients(
                lambda *own: compose(adj, score, _inputs_of(Nodes(*own), head_dots)),
                nodes,
                grad,
                ctx.needs_input_grad[: len(nodes)],
            )
            return *grads, None, None, None
        inputs = Inputs(query, key, nodes.x, bias=nodes.bias, keep=nodes.keep)
        found = ctx.backend.attention_backward(
            graph.rows, graph.t.rows, None, ctx.score, inputs, out, kept, grad
        )
        grads = _of_nodes(ctx.backend, nodes, found)
        return (
            *(g if w else None for g, w in zip(grads, wanted, strict=True)),
            None,
            None,
            None,
        )


def _of_nodes(backend: Any, nodes: Nodes, found: Inputs) -> Nodes:
    """The gradients of nodes, given those of what was made of them."""
    of_x, query = found.value, found.query
    assert of_x is not None
    atts, grads = [nodes.att], [found.key]
    of_dst = of_att_dst = None
    if nodes.att_dst is not None and query is not None:
        if nodes.x_dst is None:
            atts, grads = [*atts, nodes.att_dst], [*grads, query]
        else:
            of_dst = memory.empty(nodes.x_dst.shape, of_x.dtype).zero_()
            (of_att_dst,) = backend.head_dots_backward(
                nodes.x_dst, [nodes.att_dst], [query], of_dst
            )
    of_att, *more = backend.head_dots_backward(nodes.x, atts, grads, of_x)
    if more:
        (of_att_dst,) = more
    return Nodes(of_x, of_att, of_dst, of_att_dst, found.bias)


def _positions(graph: Graph) -> Tensor | None:
    """Where each edge in the order by source stands in the order by destination."""
    by_dst, by_src = graph.rows.perm, graph.t.rows.perm
    if by_dst is None:
        return by_src

    def build() -> Tensor:
        order = torch.arange(graph.num_edges, dtype=by_dst.dtype, device=by_dst.device)
        place = torch.empty_like(by_dst).index_copy_(0, by_dst.long(), order)
        return place if by_src is None else place.index_select(0, by_src)

    return graph.derived("positions", build)


def compose(adj: Adj, score: Score, inputs: Inputs) -> Tensor:
    """The same out of other operators, which differentiate to any order."""
    index = adj.edge_index if adj.graph is None else adj.graph.edge_index
    assert index is not None
    inputs = inputs.mapped()
    logits = _logits(adj, score, inputs, index)
    if adj.graph is None:
        shares = softmax(logits, index[1], adj.num_dst)
    else:
        shares = edge_softmax(adj.graph, logits)
    if inputs.keep is not None:
        shares = shares * inputs.keep
    out = spmm_sum(adj, inputs.values, shares)
    if inputs.edge is not None and score.kind == "dot":
        out = out + scatter(inputs.edge * shares.unsqueeze(-1), index[1], adj.num_dst)
    return out


def _logits(adj: Adj, score: Score, inputs: Inputs, index: Tensor) -> Tensor:
    """``[E, H]``, in input edge order."""
    query, key = inputs.query, inputs.key
    if score.kind == "dot":
        assert query is not None
        logits = sddmm_held(adj, query, key)
        if inputs.edge is not None:
            logits = logits + (gather(query, index[1]) * inputs.edge).sum(-1)
        return logits * score.scale
    inner = gather(key, index[0])
    if query is not None:
        inner = inner + gather(query, index[1])
    if score.kind == "sum":
        inner = inner if inputs.bias is None else inner + inputs.bias
        return leaky_relu(inner, score.slope)
    assert inputs.att is not None
    inner = inner if inputs.edge is None else inner + inputs.edge
    return (leaky_relu(inner, score.slope) * inputs.att).sum(-1)
