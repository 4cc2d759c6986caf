"""A loader made anew with other arguments, as distributed trainers want it.

They give each process its own sampler by calling the constructor of the loader's class
again, with the attributes of the old one for its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

# Given with a batch sampler, these contradict it.
_WITHOUT_BATCH_SAMPLER = ("batch_size", "shuffle", "sampler", "drop_last")


def remade(loader: Any, changes: Mapping[str, Any]) -> Any:
    """A loader like ``loader`` but for ``changes``.

    Args:
        loader: A torch ``DataLoader`` of any class.
        changes: Arguments of its constructor, or of torch's.

    Raises:
        TypeError: It is no torch ``DataLoader``, or its constructor takes no such
            argument.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"PrefetchLoader got arguments {sorted(changes)}, which would be those of "
            f"a DataLoader; but it wraps {type(loader).__name__}, which can't be made "
            "anew with them"
        )
    names = dict(inspect.signature(type(loader).__init__).parameters)
    if any(p.kind is p.VAR_KEYWORD for p in names.values()):
        names |= inspect.signature(DataLoader.__init__).parameters
    unknown = sorted(set(changes) - set(names))
    if unknown:
        raise TypeError(f"{type(loader).__name__} takes no arguments {unknown}")
    found = {
        name: value
        for name, value in vars(loader).items()
        if name in names and not name.startswith("_")
    }
    if "multiprocessing_context" in names:
        found["multiprocessing_context"] = loader.multiprocessing_context
    if "batch_sampler" in changes or "sampler" in changes:
        for name in (*_WITHOUT_BATCH_SAMPLER, "batch_sampler"):
            found.pop(name, None)
        if changes.get("batch_sampler") is None:
            found["batch_size"], found["drop_last"] = (
                loader.batch_size,
                loader.drop_last,
            )
    elif type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None:
        found.pop("batch_sampler", None)
    else:
        for name in _WITHOUT_BATCH_SAMPLER:
            found.pop(name, None)
    arguments = {**found, **changes}
    if arguments.get("batch_sampler") is not None:
        for name in _WITHOUT_BATCH_SAMPLER:
            arguments.pop(name, None)
    return type(loader)(**arguments)
