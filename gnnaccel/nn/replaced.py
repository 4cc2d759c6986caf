"""Functions that PyG's layers call, replaced inside the classes we make of them."""

from __future__ import annotations

import types
from typing import Any

import torch_geometric.utils

from gnnaccel.cache import remember
from gnnaccel.nn import normalisation
from gnnaccel.nn.normalisation import to_remember


def _remove_self_loops(edge_index: Any, edge_attr: Any = None) -> Any:
    """PyG's, remembered; the result is shared."""
    stock = torch_geometric.utils.remove_self_loops
    if edge_attr is not None or not to_remember(edge_index):
        return stock(edge_index, edge_attr)
    return remember(edge_index, "loopless", lambda: stock(edge_index)[0]), None


def _add_self_loops(edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    """PyG's, remembered; the result is shared."""
    stock = torch_geometric.utils.add_self_loops
    nodes = kwargs.get("num_nodes")
    if args or kwargs.keys() != {"num_nodes"} or not to_remember(edge_index):
        return stock(edge_index, *args, **kwargs)
    if type(nodes) is not int:
        return stock(edge_index, num_nodes=nodes)
    key = ("with loops", nodes)
    looped = remember(edge_index, key, lambda: stock(edge_index, num_nodes=nodes)[0])
    return looped, None


#: By name: what PyG's layers call, and what they are to call.
_REPLACED = {
    "add_self_loops": (torch_geometric.utils.add_self_loops, _add_self_loops),
    "remove_self_loops": (torch_geometric.utils.remove_self_loops, _remove_self_loops),
    "gcn_norm": (normalisation.STOCK, normalisation.gcn_norm),
}


def replacing(cls: Any) -> dict[str, Any]:
    """Copies of a class's methods that call PyG's functions, to call ours.

    Args:
        cls: Any class; only what it has from PyG's own is copied.
    """
    methods = {}
    seen: set[str] = set()
    for base in cls.__mro__:
        own = {name: value for name, value in vars(base).items() if name not in seen}
        seen |= own.keys()
        if not base.__module__.startswith("torch_geometric."):
            continue
        for name, method in own.items():
            if not isinstance(method, types.FunctionType):
                continue
            called = {
                function: ours
                for function, (theirs, ours) in _REPLACED.items()
                if function in method.__code__.co_names
                and method.__globals__.get(function) is theirs
            }
            if called:
                methods[name] = _copied(method, called)
    return methods


def _copied(method: types.FunctionType, called: dict[str, Any]) -> types.FunctionType:
    copied = types.FunctionType(
        method.__code__,
        {**method.__globals__, **called},
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    copied.__kwdefaults__ = method.__kwdefaults__
    copied.__doc__ = method.__doc__
    copied.__qualname__ = method.__qualname__
    copied.__annotations__ = method.__annotations__
    return copied
