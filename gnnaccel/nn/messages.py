"""Reads off a layer's code whether its message is a neighbour's row times a weight.

Such a layer's ``propagate`` is a sparse product, whatever the layer is called: no
message has to be written down.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, NamedTuple

from torch_geometric.nn import MessagePassing

from gnnaccel.nn.stand_in import written_by_pyg

ROW = "x_j"


class Weight(NamedTuple):
    """What a message multiplies a row by.

    Attributes:
        name: The argument, one number per edge; ``None``: nothing, it is ``x_j``.
        flattens: Whether it may have any shape, else it is ``[E]``.
    """

    name: str | None
    flattens: bool = False


@cache
def weight_of(cls: Any) -> Weight | None:
    """Finds the weight in ``message`` of a message passing class.

    Args:
        cls: Any message passing class.

    Returns:
        The weight of ``x_j``; ``None`` if the message is anything but a weighted row,
        or if its code isn't to be had.
    """
    if not (
        cls.update is MessagePassing.update
        and cls.aggregate is MessagePassing.aggregate
        and (cls.propagate is MessagePassing.propagate or written_by_pyg(cls.propagate))
    ):
        return None
    if cls.message is MessagePassing.message:
        return Weight(None)
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(cls.message))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # its docstring
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return None
    names = {argument.arg for argument in function.args.args[1:]}
    return _weight(body[0].value, names - {ROW})


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
            return found if found is not None and found.name == name else None
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
        ) if name in names and name[-2:] not in ("_i", "_j"):
            try:
                call = (attr, *(ast.literal_eval(arg) for arg in args))
            except ValueError:
                return None
            if call in (("unsqueeze", -1), ("unsqueeze", 1)):
                return Weight(name)
            if call in (("view", -1, 1), ("reshape", -1, 1)):
                return Weight(name, flattens=True)
    return None
