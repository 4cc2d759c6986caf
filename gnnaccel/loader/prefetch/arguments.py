"""What a ``PrefetchLoader`` is given, checked before anything is begun."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def check_loader(loader: Any) -> None:
    """Whether it can be iterated over, or called to get what can be.

    Raises:
        TypeError: Neither.
    """
    if isinstance(loader, (str, bytes)):
        raise TypeError(
            f"Expected a loader: something that yields batches (got {loader!r}, which "
            "would yield its letters)"
        )
    if isinstance(loader, type) and not _iterable(loader):
        raise TypeError(
            f"Expected a loader (got the class {loader.__name__} itself): make one of "
            f"it, as in PrefetchLoader({loader.__name__}(...))"
        )
    if _iterable(loader):
        return
    if not callable(loader):
        raise TypeError(
            "Expected a loader: something to iterate over, or a function that returns "
            f"that (got {loader!r}, of type {type(loader).__name__})"
        )
    try:
        signature = inspect.signature(loader)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            "Expected a function that begins an epoch and needs no arguments (got "
            f"{named(loader)}{signature}: {error}): give them with functools.partial "
            "or a lambda"
        ) from None


def begun(loader: Any) -> Iterator[Any]:
    """The batches of a new epoch.

    Raises:
        TypeError: It was a function, and what it returned can't be iterated over.
    """
    if _iterable(loader):
        return iter(loader)
    made = loader()
    if not _iterable(made):
        raise TypeError(
            f"Expected {named(loader)}() to return something to iterate over (got "
            f"{made!r}, of type {type(made).__name__})"
        )
    return iter(made)


def checked_depth(depth: Any) -> int | str:
    """``depth``, as a plain int if it is a number.

    Raises:
        TypeError: It is neither a whole number nor a word.
        ValueError: It is below 0, or a word other than "auto".
    """
    message = (
        f'Expected depth to be a whole number from 0 up, or "auto" (got {depth!r})'
    )
    if isinstance(depth, str):
        if depth != "auto":
            raise ValueError(message)
        return depth
    try:
        number = operator.index(depth)
    except TypeError:
        raise TypeError(message) from None
    if isinstance(depth, bool):
        raise TypeError(message)
    if number < 0:
        raise ValueError(message)
    return number


def checked_cast(cast: Any) -> dict[str, torch.dtype]:
    """``cast`` as a dict of the caller's own; empty for None.

    Raises:
        TypeError: It is no mapping from names to dtypes.
    """
    if cast is None:
        return {}
    example = 'as in cast={"x": torch.float16}'
    if not isinstance(cast, Mapping):
        raise TypeError(
            f"Expected cast to be dtypes by the name of an attribute, {example} (got "
            f"{cast!r}, of type {type(cast).__name__})"
        )
    for name, dtype in cast.items():
        if not isinstance(name, str):
            raise TypeError(
                f"Expected cast to have names of attributes for its keys, {example} "
                f"(got {name!r})"
            )
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"Expected cast[{name!r}] to be a torch.dtype, {example} (got "
                f"{dtype!r}, of type {type(dtype).__name__})"
            )
    return dict(cast)


def named(loader: Any) -> str:
    """What messages call it."""
    return getattr(loader, "__qualname__", type(loader).__name__)


def _iterable(value: Any) -> bool:
    """Whether ``iter`` takes it: a class is not what its instances are."""
    kind = type(value)
    return (
        getattr(kind, "__iter__", None) is not None
        or getattr(kind, "__getitem__", None) is not None
    )
