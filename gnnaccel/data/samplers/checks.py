"""Arguments of the samplers, checked once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Generator


def check_count(name: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    mend = f"'{name}' must be a whole number of at least {least} (got {value!r})"
    if isinstance(value, bool):
        raise TypeError(mend)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(mend) from None
    if number < least:
        raise ValueError(mend)
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of ``choices``.

    Raises:
        ValueError: It is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"'{name}' must be one of {tuple(choices)} (got {value!r})")
    return value


def check_generator(value: Any) -> Generator | None:
    """A generator of torch's, or ``None``.

    Raises:
        TypeError: It is something else.
    """
    if value is not None and not isinstance(value, Generator):
        raise TypeError(
            f"'generator' must be a torch.Generator or None (got {value!r}): write "
            f"torch.Generator().manual_seed(...)"
        )
    return value
