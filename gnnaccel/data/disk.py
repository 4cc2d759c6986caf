"""Packs on disk: one file, read through a memory map."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from gnnaccel.data.leaves import Fields, Items, Objects, Rows, Signature, Store
from gnnaccel.data.pack import Pack

_FORMAT = "gnnaccel-pack"
_VERSION = 1
_LEAVES = {cls.__name__: cls for cls in (Rows, Objects, Items, Fields)}


def save(pack: Pack, path: str | os.PathLike[str]) -> None:
    """Writes a pack; a file of that name is replaced once the new one is whole."""
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        "n": pack.n,
        "stores": [
            {
                "key": store.key,
                "attrs": {name: _to_plain(t) for name, t in store.attrs.items()},
                "num_nodes": store.num_nodes,
                "counts": store.counts,
                "private": store.private,
            }
            for store in pack.stores.values()
        ],
        "signatures": [(s.cls, s.stores) for s in pack.signatures],
        "which": None if pack.which is None else pack.which.tolist(),
        "prototypes": pack.prototypes,
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        torch.save(state, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Pack:
    """Opens a pack; its tensors are read when, and where, they are asked for.

    Raises:
        ValueError: It is no file that :func:`save` wrote, or of another version.
    """
    alien = f"{os.fspath(path)} was not written by PackedDataset.save"
    try:
        # The classes of the graphs are Python's to find, as in PyG's own files.
        state = torch.load(path, mmap=True, weights_only=False)
    except RuntimeError as error:
        raise ValueError(f"{alien}, or is damaged: {error}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(alien)
    if state["version"] != _VERSION:
        raise ValueError(
            f"{os.fspath(path)} is of version {state['version']}, and this gnnaccel "
            f"reads version {_VERSION}: pack the data set anew"
        )
    stores = [
        Store(
            s["key"],
            {name: _from_plain(t) for name, t in s["attrs"].items()},
            s["num_nodes"],
            s["counts"],
            s["private"],
        )
        for s in state["stores"]
    ]
    signatures = [Signature(*s) for s in state["signatures"]]
    return Pack(state["n"], stores, signatures, state["which"], state["prototypes"])


def _to_plain(tree: Any) -> Any:
    """The tree in Python's own types, so that files outlive our classes."""
    if type(tree) is dict:
        return {key: _to_plain(item) for key, item in tree.items()}
    if type(tree) is list:
        return [_to_plain(item) for item in tree]
    found = {f.name: getattr(tree, f.name) for f in fields(tree)}
    if isinstance(tree, (Items, Fields)):
        found["items"] = _to_plain(tree.items)
    return (type(tree).__name__, found)


def _from_plain(value: Any) -> Any:
    if type(value) is dict:
        return {key: _from_plain(item) for key, item in value.items()}
    if type(value) is list:
        return [_from_plain(item) for item in value]
    kind, found = value
    if kind in ("Items", "Fields"):
        found = {**found, "items": _from_plain(found["items"])}
    return _LEAVES[kind](**found)
