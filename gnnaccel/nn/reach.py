"""Where PyG's functions run on our kernels: inside optimised modules, nowhere else.

A model's own ``forward`` calls ``global_mean_pool`` or ``softmax``, often imported by
name, and so do PyG's aggregations and pooling layers. No class stands behind these, so
the functions themselves ask, at each call, whether an optimised module is running in
this thread. To that end their code is replaced, which every name of a function sees;
the function objects, their signatures and what :mod:`inspect` finds stay PyG's.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.utils
from torch_geometric.nn.dense.linear import Linear

from gnnaccel.nn import functions


class _Inside(threading.local):
    """The optimised modules that are running in this thread, one in the other.

    Attributes:
        depth: How many.
        hooks: The hooks on saved tensors that were there when the innermost began.
    """

    depth = 0
    hooks: Any = None


_inside = _Inside()
_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def enter() -> Any:
    """Begins an optimised module; returns what :func:`leave` needs at its end."""
    if not _replaced:
        _replace()
    outer = _inside.hooks
    _inside.hooks = _hooks(True)
    _inside.depth += 1
    return outer


def leave(outer: Any) -> None:
    """Ends the module for which :func:`enter` returned ``outer``."""
    _inside.depth -= 1
    _inside.hooks = outer


class _Reached:
    """One of PyG's functions, with its own code and with ours."""

    def __init__(self, function: Any, template: Any, ours: Callable[..., Any]) -> None:
        self.function = function
        self.own: types.CodeType = function.__code__
        code: types.CodeType = template.__code__
        self.fits = (
            self.own.co_varnames[: self.own.co_argcount]
            == code.co_varnames[: code.co_argcount]
            and self.own.co_kwonlyargcount == 0
            and not self.own.co_freevars
        )
        # The code looks up who is asked in the globals of PyG's module.
        self.name = f"_gnnaccel_{function.__name__}"
        self.code = code.replace(
            co_names=(self.name,),
            co_name=self.own.co_name,
            co_filename=self.own.co_filename,  # TorchScript compiles what stands there
            co_firstlineno=self.own.co_firstlineno,
        )
        stock = types.FunctionType(
            self.own, function.__globals__, function.__name__, function.__defaults__
        )
        self.ask = _asking(stock, ours)


def _asking(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any) -> Any:
        # Checkpointing hooks saved tensors, and computes part of a module once more
        # when the module is over: both times have to do the same.
        if (
            not torch.compiler.is_compiling()
            and _inside.depth
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and _inside.hooks == _hooks(True)
        ):
            out = ours(*args)
            if out is not None:
                return out
        return stock(*args)

    return ask


def _ask(*args: Any) -> Any:
    """Stands in the templates for the name that :class:`_Reached` puts there."""


# The templates: PyG's arguments, handed on.


def _scatter(src: Any, index: Any, dim: Any, dim_size: Any, reduce: Any) -> Any:
    return _ask(src, index, dim, dim_size, reduce)


def _softmax(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
    return _ask(src, index, ptr, num_nodes, dim)


def _segment(src: Any, ptr: Any, reduce: Any) -> Any:
    return _ask(src, ptr, reduce)


def _degree(index: Any, num_nodes: Any, dtype: Any) -> Any:
    return _ask(index, num_nodes, dtype)


def _to_dense_batch(
    x: Any, batch: Any, fill_value: Any, max_num_nodes: Any, batch_size: Any
) -> Any:
    return _ask(x, batch, fill_value, max_num_nodes, batch_size)


def _linear(self: Any, x: Any) -> Any:
    return _ask(self, x)


_FUNCTIONS = (
    *(
        _Reached(
            inspect.unwrap(getattr(torch_geometric.utils, template.__name__[1:])),
            template,
            getattr(functions, template.__name__[1:]),
        )
        for template in (_scatter, _softmax, _segment, _degree, _to_dense_batch)
    ),
    _Reached(Linear.forward, _linear, functions.linear),
)
_lock = threading.Lock()
_replaced = False


def _replace() -> None:
    global _replaced
    with _lock:
        for each in _FUNCTIONS:
            if each.fits:
                each.function.__globals__[each.name] = each.ask
                each.function.__code__ = each.code
        _replaced = True


def withdraw() -> None:
    """Gives PyG's functions their own code back, until the next :func:`enter`."""
    global _replaced
    with _lock:
        for each in _FUNCTIONS:
            # The name stays: another thread may be about to look it up.
            each.function.__code__ = each.own
        _replaced = False
