"""Reads the code of a layer's methods, and no other than that which runs."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch_geometric.nn import MessagePassing

from gnnaccel.nn.stand_in import written_by_pyg

#: What a future import does to the code of a function.
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


@cache
def parsed(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function; ``None`` if its code isn't to be had.

    Only of what runs: not of what a decorator wraps, nor of a file that was changed
    since; nor of functions that see the variables of another one.
    """
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return None
    code = function.__code__
    if code.co_freevars:
        return None
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
        same = any(_is_code_of(found, code, names) for names in _imported(function))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    return found if same else None


def _imported(function: FunctionType) -> Iterator[list[str]]:
    """Which global names of a function its module may import.

    Calls of what an imported name holds are compiled to other code.
    """
    names = [n for n in function.__code__.co_names if n in function.__globals__]
    yield [n for n in names if isinstance(function.__globals__[n], ModuleType)]
    yield names
    yield []


def _is_code_of(found: ast.stmt, code: CodeType, imported: list[str]) -> bool:
    """Whether a function, in a module with these imports, is compiled to this code."""
    imports = [ast.Import(names=[ast.alias(name=name)]) for name in imported]
    tree = ast.Module(body=[*imports, found], type_ignores=[])
    flags = code.co_flags & _FUTURE
    made = compile(
        ast.fix_missing_locations(tree), "", "exec", flags=flags, dont_inherit=True
    )
    return any(
        isinstance(const, CodeType)
        and all(getattr(const, name) == getattr(code, name) for name in _SAME)
        for const in made.co_consts
    )


_SAME = (
    "co_code",
    "co_consts",
    "co_names",
    "co_varnames",
    "co_cellvars",
    "co_argcount",
    "co_kwonlyargcount",
    "co_name",
)


def of_methods(read: Any) -> Any:
    """Remembers what was read in a class, until its methods are replaced."""
    known: dict[Any, Any] = {}

    @functools.wraps(read)
    def remembering(cls: Any) -> Any:
        key = (cls, cls.message, cls.aggregate, cls.update, cls.propagate)
        if known.get(cls, (None,))[0] != key:
            known[cls] = (key, read(cls))
        return known[cls][1]

    return remembering


def stock_propagate(cls: Any) -> bool:
    """Whether the ``propagate`` of a message passing class is PyG's."""
    return cls.propagate is MessagePassing.propagate or written_by_pyg(cls.propagate)


def else_stock(cls: Any) -> bool:
    """Whether all that ``propagate`` calls besides ``message`` is PyG's."""
    return (
        cls.update is MessagePassing.update
        and cls.aggregate is MessagePassing.aggregate
        and stock_propagate(cls)
    )


def globals_of(function: Any, arguments: set[str]) -> dict[str, Any]:
    """The global names that a function sees: not those that its arguments hide."""
    known: dict[str, Any] = function.__globals__
    return {name: value for name, value in known.items() if name not in arguments}


def named(value: Any, known: dict[str, Any]) -> Any:
    """What ``name`` or ``module.name`` stands for; ``None`` if nothing.

    Args:
        value: An expression.
        known: The names that it may use.
    """
    match value:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(value=module, attr=name):
            return getattr(named(module, known), name, None)
    return None
