"""Reads off a layer's code whether its message is a network of rows side by side.

``mlp(torch.cat([x_i, x_j - x_i, edge_attr], dim=-1))`` is what most layers of users
look like; see :mod:`gnnaccel.nn.split` for what that is good for.
"""

from __future__ import annotations

import ast
import copy
from typing import Any, NamedTuple

import torch
from torch_geometric.nn import MessagePassing, PointNetConv

from gnnaccel.nn.reading import (
    globals_of,
    named,
    of_methods,
    parsed,
    stock_propagate,
)

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
        return {n for part in self.parts for n in part.names if is_end(n)}

    @property
    def edges(self) -> set[str]:
        """The arguments that are features of edges."""
        return {part.plus for part in self.parts if not is_end(part.plus)}


#: Messages of PyG's that are such networks where their arguments are given.
_KNOWN = {
    PointNetConv.message: Network("local_nn", (Part("x_j"), Part("pos_j", "pos_i"))),
}


@of_methods
def network_of(cls: Any) -> Network | None:
    """Reads the network in ``message`` of a message passing class.

    Args:
        cls: Any message passing class.

    Returns:
        The network; ``None`` if the message is anything else, or if its code isn't to
        be had.
    """
    if not stock_propagate(cls):
        return None
    if cls.message in _KNOWN:
        return _KNOWN[cls.message]
    function = parsed(cls.message)
    if function is None:
        return None
    value = _returned(function)
    names = {argument.arg for argument in function.args.args[1:]}
    known = globals_of(cls.message, names)
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
        ) if named(cat, known) in _CATS and _last_dim(rest, keywords):
            parts = tuple(_part(item, names) for item in items)
            if not any(part is None for part in parts):
                network = Network(name, parts)  # type: ignore[arg-type]
                return network if network.rows else None
    return None


def _returned(function: ast.FunctionDef) -> Any:
    """What a function returns, names that it gave on the way filled in."""
    given: dict[str, Any] = {}
    unused: set[str] = set()

    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            unused.discard(node.id)
            return copy.deepcopy(given.get(node.id, node))

    for number, statement in enumerate(function.body):
        match statement:
            case ast.Expr(value=ast.Constant()) if number == 0:
                pass  # the docstring
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                filled = Filled().visit(copy.deepcopy(value))
                if name in unused:
                    return None  # what it was may have done something
                given[name] = filled
                unused.add(name)
            case ast.Return(value=value) if value is not None:
                filled = Filled().visit(copy.deepcopy(value))
                return None if unused else filled
            case _:
                return None
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
            if {plus, minus} <= names and is_end(plus) and is_end(minus):
                special = {plus, minus} & MessagePassing.special_args
                return None if special else Part(plus, minus)
    return None


def is_end(name: str) -> bool:
    """Whether an argument is lifted from nodes to edges."""
    return name[-2:] in ("_i", "_j")
