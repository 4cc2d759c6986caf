"""What all our classes need that stand in for one of PyG's, or of a user's."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any


class StandIn:
    """Mixed into a class of modules, before it in the list of bases."""

    def __prepare_scriptable__(self) -> Any:
        """TorchScript compiles the class we stand in for: ours is Python."""
        stock = copy.copy(self)
        cls: Any = type(self)
        stock.__class__ = stock_of(cls)
        return stock


class LayerStandIn(StandIn):
    """Mixed into a message passing class."""

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # PyG writes a compiled `propagate` into each class. Into ours it would write
        # the parent's compiled one as the original, which explain mode goes back to;
        # so it writes into the parent.
        cls: Any = type(self)
        stand_in: Any = self
        if _direct(cls):
            stand_in.__class__ = stock_of(cls)
        else:
            stand_in = super()
        try:
            stand_in._set_jittable_templates(raise_on_error)
        finally:
            self.__class__ = cls


def _direct(cls: Any) -> bool:
    """Whether ``cls`` is itself a stand-in, and not a user's subclass of one."""
    return cls.__bases__[-1] is stock_of(cls)


@cache
def stock_of(cls: Any) -> Any:
    """The class of PyG's, or of a user's, that a stand-in stands in for."""
    return next(base for base in cls.__mro__ if not issubclass(base, StandIn))


def written_by_pyg(method: Any) -> bool:
    """Whether PyG wrote this ``propagate``, as it does into every class it builds."""
    # At the top of a module; a user's, in a file of such a name, stands in a class.
    return getattr(method, "__qualname__", None) in _WRITTEN and str(
        getattr(method, "__module__", "")
    ).endswith(("_propagate", "_edge_updater"))


_WRITTEN = ("propagate", "edge_updater")

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
