"""Layers whose message is a network of rows that stand side by side.

``mlp(torch.cat([x_i, x_j - x_i, edge_attr], dim=-1))`` is what most layers of users
look like. The first linear map of such a network is a sum of maps of its parts, and
those of node features are made once per node instead of once per edge; where messages
are added up, the last linear map is made per node, too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gnnaccel.graph import grouping_of
from gnnaccel.nn import dense
from gnnaccel.nn.fused import REDUCE_OF, may_reorder, plain_linear, watched
from gnnaccel.nn.stand_in import written_by_pyg
from gnnaccel.ops.gather import gather

_CATS = (torch.cat, torch.concat, torch.concatenate)


class Part(NamedTuple):
    """What stands in one place: ``plus``, or ``plus - minus``: names of arguments."""

    plus: str
    minus: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Both, or the one."""
        return (self.plus,) if self.minus is None else (self.plus, self.minus)


class Network(NamedTuple):
    """What a message is.

    Attributes:
        name: The layer's attribute that holds the network.
        parts: Its input, from left to right.
    """

    name: str
    parts: tuple[Part, ...]

    @property
    def rows(self) -> set[str]:
        """The arguments that are rows of nodes, lifted to edges."""
        return {n for part in self.parts for n in part.names if _is_end(n)}

    @property
    def edges(self) -> set[str]:
        """The arguments that are features of edges."""
        return {part.plus for part in self.parts if not _is_end(part.plus)}


@cache
def network_of(cls: Any) -> Network | None:
    """Reads the network in ``message`` of a message passing class.

    Args:
        cls: Any message passing class.

    Returns:
        The network; ``None`` if the message is anything else, or if its code isn't to
        be had.
    """
    if not (cls.propagate is MessagePassing.propagate or written_by_pyg(cls.propagate)):
        return None
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(cls.message))).body
        known = dict(cls.message.__globals__)
        for name in cls.message.__code__.co_freevars:
            known.pop(name, None)  # something else of that name
    except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    value = _returned(function)
    names = {argument.arg for argument in function.args.args[1:]}
    match value:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=name),
            args=[
                ast.Call(
                    func=cat,
                    args=[ast.List(elts=items) | ast.Tuple(elts=items), *rest],
                    keywords=keywords,
                )
            ],
            keywords=[],
        ) if _named(cat, known) in _CATS and _last_dim(rest, keywords):
            parts = tuple(_part(item, names) for item in items)
            if not any(part is None for part in parts):
                network = Network(name, parts)  # type: ignore[arg-type]
                return network if network.rows else None
    return None


def _returned(function: ast.FunctionDef) -> Any:
    """What a function returns, names that it gave on the way filled in."""
    given: dict[str, Any] = {}

    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return given.get(node.id, node)

    for number, statement in enumerate(function.body):
        match statement:
            case ast.Expr(value=ast.Constant()) if number == 0:
                pass  # the docstring
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                given[name] = Filled().visit(value)
            case ast.Return(value=value) if value is not None:
                return Filled().visit(value)
            case _:
                return None
    return None


def _named(function: Any, known: dict[str, Any]) -> Any:
    """What ``name`` or ``module.name`` stands for among the names of a module."""
    match function:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return getattr(known.get(module), name, None)
    return None


def _last_dim(rest: list[Any], keywords: list[Any]) -> bool:
    """Whether these arguments of ``cat`` say: along the last of two dimensions."""
    found = [*rest, *(k.value for k in keywords if k.arg in ("dim", "axis"))]
    if len(found) != 1 or len(rest) + len(keywords) != 1:
        return False
    try:
        return ast.literal_eval(found[0]) in (1, -1)
    except ValueError:
        return False


def _part(item: Any, names: set[str]) -> Part | None:
    match item:
        case ast.Name(id=name) if name in names:
            return None if name in MessagePassing.special_args else Part(name)
        case ast.BinOp(left=ast.Name(id=plus), op=ast.Sub(), right=ast.Name(id=minus)):
            if {plus, minus} <= names and _is_end(plus) and _is_end(minus):
                special = {plus, minus} & MessagePassing.special_args
                return None if special else Part(plus, minus)
    return None


def _is_end(name: str) -> bool:
    return name[-2:] in ("_i", "_j")


class Ends(NamedTuple):
    """Both ends of every edge.

    Attributes:
        of_edges: ``[E]`` each, by what a name ends in: ``"_i"``, ``"_j"``.
        rows: Features of nodes ``[N, F]`` by the argument that is lifted.
    """

    of_edges: dict[str, Tensor]
    rows: dict[str, Tensor]


def first_and_rest(
    network: Any, parts: tuple[Part, ...], ends: Ends, edges: dict[str, Tensor]
) -> tuple[Tensor, list[torch.nn.Module]] | None:
    """The first linear map of a network for every edge, and what follows it.

    Args:
        network: A linear layer, or a ``Sequential`` that begins with one.
        parts: What stands side by side in its input.
        ends: The nodes' features.
        edges: The edges' features ``[E, *]`` by name.

    Returns:
        ``[E, F']``, and the modules that remain; ``None`` where the network begins
        with something else, or its input is not what it takes.
    """
    first, rest = dense.first_linear(network)
    if first is None:
        return None
    weight = first.weight
    tensors = [*ends.rows.values(), *edges.values()]
    if any(
        t.dim() != 2
        or t.dtype != weight.dtype
        or t.device != weight.device
        or not may_reorder(t)
        for t in tensors
    ):
        return None
    known = {**ends.rows, **edges}
    widths = [known[part.plus].size(1) for part in parts]
    if sum(widths) != weight.size(1) or any(
        known[part.minus].size(1) != width
        for part, width in zip(parts, widths, strict=True)
        if part.minus is not None
    ):
        return None
    of_ends: dict[str, Tensor] = {}
    out: Tensor | None = None
    bias = first.bias
    for part, block in zip(parts, weight.split(widths, 1), strict=True):
        if not _is_end(part.plus):
            mapped = dense.linear(edges[part.plus], block, bias)
            bias = None
            out = mapped if out is None else out.add_(mapped)
            continue
        for name, x in _centred(part, ends.rows):
            term = dense.linear(x, block if name == part.plus else -block)
            end = name[-2:]
            of_ends[end] = of_ends[end] + term if end in of_ends else term
    for number, (end, term) in enumerate(of_ends.items()):
        if number == 0 and bias is not None:
            term = term + bias
        lifted = gather(term, ends.of_edges[end])
        out = lifted if out is None else out.add_(lifted)
    assert out is not None
    return out, rest


def _centred(part: Part, rows: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The rows of a part; those of a difference about a mean, which cancels.

    Far from the origin, a difference would drown in the rounding of what it is the
    difference of.
    """
    if part.minus is None:
        return [(part.plus, rows[part.plus])]
    x = rows[part.minus].detach()
    middle = x.mean(0) if x.size(0) else x.new_zeros(x.size(1))
    return [(name, rows[name] - middle) for name in part.names]


def through(modules: list[torch.nn.Module], messages: Tensor) -> Tensor:
    """Passes messages that nobody else holds through modules."""
    for number, module in enumerate(modules):
        if number == 0 and type(module) is torch.nn.ReLU and not watched(module):
            messages = messages.relu_()
        else:
            messages = module(messages)
    return messages


def ends_in_linear(modules: list[torch.nn.Module], aggregation: Any) -> bool:
    """Whether the last of the modules may be left until messages are reduced."""
    reduction = REDUCE_OF.get(aggregation)
    return reduction in ("sum", "mean") and bool(modules) and plain_linear(modules[-1])


def takes(linear: Any, messages: Tensor, index: Tensor) -> bool:
    """Whether a linear map may be left until these messages are reduced."""
    return (
        messages.dim() == 2
        and messages.size(0) == index.size(0)
        and messages.size(1) == linear.weight.size(1)
        and messages.dtype == linear.weight.dtype
        and may_reorder(messages)
    )


def after_reduction(linear: Any, out: Tensor, index: Tensor, mean: bool) -> Tensor:
    """A linear map of reduced messages, as if each had passed it.

    Args:
        linear: The map, from ``F`` to ``F'``.
        out: ``[N, F]``, a sum or a mean.
        index: ``[E]``, each message's destination.
        mean: Which of both.

    Returns:
        ``[N, F']``.
    """
    mapped = dense.linear(out, linear.weight)
    if linear.bias is None:
        return mapped
    counts = grouping_of(index, out.size(0)).counts
    if mean:
        counts = counts.clamp(max=1)
    return torch.addcmul(mapped, counts.unsqueeze(-1).to(out.dtype), linear.bias)
