"""Reads off a layer's code what its message is made of.

Where that is a neighbour's row times a weight, ``propagate`` is a sparse product; where
it is a neighbour's row and the features of the edge, a sum of messages. Whatever the
layer is called, no message has to be written down.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch_geometric.nn import MessagePassing

from gnnaccel.nn.reading import (
    else_stock,
    globals_of,
    named,
    of_methods,
    parsed,
)

ROW = "x_j"


class Weight(NamedTuple):
    """What a message multiplies a row by.

    Attributes:
        name: The argument, one number per edge; ``None``: nothing, it is ``x_j``.
        flattens: Whether it may have any shape, else it is ``[E]``.
        optional: Whether the message is the row where it is ``None``.
    """

    name: str | None
    flattens: bool = False
    optional: bool = False


class Joined(NamedTuple):
    """How a message joins a row with the edge's features.

    Attributes:
        kind: One of :data:`gnnaccel.ops.message.MESSAGES`.
        edge: The argument that holds the features.
        through: The module of the layer that they pass first, or ``None``.
        weight: What multiplies the message, or ``None``.
    """

    kind: str
    edge: str
    through: str | None = None
    weight: Weight | None = None


@of_methods
def weight_of(cls: Any) -> Weight | None:
    """Finds the weight in ``message`` of a message passing class.

    Args:
        cls: Any message passing class.

    Returns:
        The weight of ``x_j``; ``None`` if the message is anything but a weighted row,
        or if its code isn't to be had.
    """
    if cls.message is MessagePassing.message and else_stock(cls):
        return Weight(None)
    value, names = _returned(cls)
    return _weight(value, names)


@of_methods
def joined_of(cls: Any) -> Joined | None:
    """Finds what ``message`` of a message passing class joins a row with.

    Args:
        cls: Any message passing class.

    Returns:
        How they are joined; ``None`` if the message is anything else, or if its code
        isn't to be had.
    """
    value, names = _returned(cls)
    if value is None:
        return None
    functions = globals_of(cls.message, names)
    match value:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            for column, message in ((left, right), (right, left)):
                weight = _column(column, names)
                joined = _joined(message, names, functions)
                if weight is not None and joined is not None:
                    return joined._replace(weight=weight)
    return _joined(value, names, functions)


def _returned(cls: Any) -> tuple[Any, set[str]]:
    """The one expression that ``message`` returns, and its arguments but for ``x_j``.

    ``(None, set())`` if it does more, or if its code isn't to be had.
    """
    nothing: tuple[Any, set[str]] = (None, set())
    if not else_stock(cls):
        return nothing
    function = parsed(cls.message)
    if function is None:
        return nothing
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # its docstring
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return nothing
    names = {argument.arg for argument in function.args.args[1:]}
    return body[0].value, names - {ROW}


def _joined(value: Any, names: set[str], functions: dict[str, Any]) -> Joined | None:
    """``x_j + e``, its ReLU or ``x_j * e``, without a weight."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=total, attr="relu"), args=[], keywords=[]
        ):
            kind = "add_relu"
        case ast.Call(func=function, args=[total], keywords=[]) if _is_relu(
            function, functions
        ):
            kind = "add_relu"
        case _:
            kind, total = "add", value
    match total:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pass
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if kind == "add":
            kind = "mul"
        case _:
            return None
    edge = right if _is_row(left) else left if _is_row(right) else None
    match edge:
        case ast.Name(id=name) if _per_edge(name, names):
            return Joined(kind, name)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=through),
            args=[ast.Name(id=name)],
            keywords=[],
        ) if _per_edge(name, names):
            return Joined(kind, name, through)
    return None


def _is_relu(function: Any, functions: dict[str, Any]) -> bool:
    """Whether an expression names torch's ReLU, as ``F.relu`` and ``torch.relu`` do."""
    found = named(function, functions)
    return found is torch.relu or found is torch.nn.functional.relu


def _per_edge(name: str, names: set[str]) -> bool:
    return (
        name in names
        and name[-2:] not in ("_i", "_j")
        and name not in MessagePassing.special_args
    )


def _weight(value: Any, names: set[str]) -> Weight | None:
    """The weight in ``x_j``, a product, or ``x_j if w is None else`` a product."""
    if _is_row(value):
        return Weight(None)
    match value:
        case ast.BinOp(left=weight, op=ast.Mult(), right=row) if _is_row(row):
            return _column(weight, names)
        case ast.BinOp(left=row, op=ast.Mult(), right=weight) if _is_row(row):
            return _column(weight, names)
        case ast.IfExp(
            test=ast.Compare(
                left=ast.Name(id=name),
                ops=[ast.Is()],
                comparators=[ast.Constant(value=None)],
            ),
            body=row,
            orelse=product,
        ) if _is_row(row):
            found = _weight(product, names)
            if found is None or found.name != name:
                return None
            return found._replace(optional=True)
    return None


def _is_row(value: Any) -> bool:
    return isinstance(value, ast.Name) and value.id == ROW


def _column(value: Any, names: set[str]) -> Weight | None:
    """``name.view(-1, 1)`` or ``name.unsqueeze(-1)``, of an argument per edge."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr=attr),
            args=args,
            keywords=[],
        ) if _per_edge(name, names):
            try:
                call = (attr, *(ast.literal_eval(arg) for arg in args))
            except ValueError:
                return None
            if call in (("unsqueeze", -1), ("unsqueeze", 1)):
                return Weight(name)
            if call in (("view", -1, 1), ("reshape", -1, 1)):
                return Weight(name, flattens=True)
    return None
