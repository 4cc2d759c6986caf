"""``python -m gnnaccel info``: the machine, the versions, and what serves which op.

:func:`collect` gathers, :func:`render` makes text of it. Whatever can't be found out on
a machine becomes ``None`` and a line under "could not be read"; it is never an error.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gnnaccel import kernels
from gnnaccel.kernels import native, reference

#: The ops, each with the kernel that does its work.
OPS = {
    "spmm sum, mean": "spmm_sum",
    "spmm max, min": "spmm_extreme",
    "sddmm": "sddmm",
    "gather (its gradient)": "spmm_sum",
    "scatter, segment: sum, mean": "spmm_sum",
    "scatter, segment: max, min": "spmm_extreme",
    "edge_softmax, softmax": "softmax",
    "attention": "attention",
    "message_sum": "message_sum",
    "Graph (sorting edges)": "group",
}

#: Optional distributions: the module, what it gives, how to add it. These import
#: torch while they build, hence the flag.
OPTIONAL = {
    "torch-scatter": (
        "torch_scatter",
        "PyG's own max and min reductions in one kernel",
        "pip install --no-build-isolation torch-scatter",
    ),
    "torch-sparse": (
        "torch_sparse",
        "SparseTensor, PyG's NeighborLoader, the backend 'scatter'",
        "pip install --no-build-isolation torch-scatter torch-sparse",
    ),
}

CONTROL_GROUP = Path("/sys/fs/cgroup")
_REINSTALL = (
    "with a C++ compiler (Debian, Ubuntu: apt install g++) and GNNACCEL_NATIVE unset: "
    "pip install --force-reinstall --no-deps --no-cache-dir gnnaccel "
    "(in a checkout: . instead of gnnaccel)"
)


def collect() -> dict[str, Any]:
    """Gathers what there is to know about this machine and installation.

    Returns:
        A tree of plain values with the keys ``hardware``, ``versions``, ``threads``,
        ``native``, ``backends``, ``ops`` and ``problems``; sizes are in bytes.
    """
    problems: list[str] = []

    def probe(what: str, read: Callable[[], Any]) -> Any:
        # Odd machines fail in odd ways (no /proc, a driver that does not start, a
        # module built for another torch), and a report must not fail with them.
        try:
            return read()
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
            return None

    accelerators = probe("accelerators", _accelerators) or []
    available = bool(probe("native kernels", native.available))
    devices = ["cpu", *dict.fromkeys(a["type"] for a in accelerators)]
    return {
        "hardware": {
            "cpu": probe("CPU model", _cpu_model),
            "cores": os.cpu_count(),
            "cores_usable": probe("usable cores", _usable_cores),
            "isa": probe("instruction set", torch.backends.cpu.get_cpu_capability),
            "caches": probe("caches", _caches),
            "memory": probe("memory", _memory),
            "memory_available": probe("available memory", _memory_available),
            "memory_limit": probe("memory limit", _memory_limit),
            "accelerators": accelerators,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_geometric": probe("torch_geometric", _pyg_version),
            "gnnaccel": probe("gnnaccel", _own_version),
            **{module: _optional(dist) for dist, (module, _, _) in OPTIONAL.items()},
        },
        "threads": {
            "torch": torch.get_num_threads(),
            "torch_interop": torch.get_num_interop_threads(),
            "kernels": probe("kernel threads", native.threads) if available else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "native": {
            "available": available,
            "isa": probe("kernel instruction set", native.isa) if available else None,
            "reason": None if available else probe("reason", native.reason),
            "mend": None if available else _REINSTALL,
        },
        "backends": probe("backends", _backends) or {},
        "ops": [
            row
            for device in devices
            for row in probe(f"ops on {device}", partial(_ops, device)) or []
        ],
        "problems": problems,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "cpu model", "hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _caches() -> dict[str, int]:
    """The first core's caches by name: ``"L1d"`` (data), ``"L1i"``, ``"L2"``..."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (folder / name).read_text().strip() for name in ("level", "type", "size")
        )
        suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
        unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
        sizes[f"L{level}{suffix}"] = int(size.rstrip("KM")) * unit
    return sizes


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_available() -> int | None:
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _memory_limit() -> int | None:
    """What a container may use: control groups, version 2 or 1."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = CONTROL_GROUP / name
        text = file.read_text().strip() if file.exists() else "max"
        # Version 1 says "no limit" by a number near 2**63.
        if text != "max" and int(text) < 1 << 60:
            return int(text)
    return None


def _accelerators() -> list[dict[str, Any]]:
    if not torch.accelerator.is_available():
        return []
    current = torch.accelerator.current_accelerator()
    assert current is not None
    describe = getattr(
        torch.get_device_module(current), "get_device_properties", lambda i: None
    )
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = describe(index)
        found.append(
            {
                "type": current.type,
                "index": index,
                "name": getattr(properties, "name", current.type),
                "memory": getattr(properties, "total_memory", None),
            }
        )
    return found


def _pyg_version() -> str:
    return str(importlib.import_module("torch_geometric").__version__)


def _own_version() -> str:
    return str(sys.modules["gnnaccel"].__version__)


def _backends() -> dict[str, str | None]:
    """Each backend, with the reason why it can't be used, or None."""
    states: dict[str, Any] = dict(kernels.backends())
    return {n: None if why in (None, True) else str(why) for n, why in states.items()}


def _optional(dist: str) -> dict[str, str | None]:
    module, gives, mend = OPTIONAL[dist]
    try:
        version: str | None = importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        version = None
    error = None
    try:
        importlib.import_module(module)
    except Exception as caught:  # built for another torch: ImportError, OSError, ...
        error = f"{type(caught).__name__}: {caught}"
    if error is None:
        return {
            "version": version or "unknown",
            "error": None,
            "gives": gives,
            "mend": None,
        }
    return {"version": version, "error": error, "gives": gives, "mend": mend}


def _ops(device: str) -> list[dict[str, str]]:
    """What serves float32 tensors on ``device``, op by op, and why."""
    chosen = kernels.pick(torch.device(device), torch.float32)
    rows = []
    for op, name in OPS.items():
        # A backend without a kernel of its own has the reference's under that name.
        own = getattr(chosen, name) is not getattr(reference, name)
        module = chosen if own else reference
        if module is native:
            why = f"C++, {native.isa()}, on {native.threads()} of torch's threads"
        elif module is not chosen:
            why = "plain torch; torch-sparse has no kernel for it"
        else:
            why = "plain torch" if module is reference else "torch-sparse's kernel"
            cpu = device == "cpu"
            why += f"; the native kernels {'are absent' if cpu else 'are for CPUs'}"
        backend = module.__name__.rpartition(".")[2]
        rows.append({"op": op, "device": device, "backend": backend, "why": why})
    return rows


def render(report: dict[str, Any]) -> str:
    """Makes the text that ``python -m gnnaccel info`` prints.

    Args:
        report: What :func:`collect` returned.
    """
    hardware, threads, lacks = report["hardware"], report["threads"], report["native"]
    memory = f"{_size(hardware['memory'])}, {_size(hardware['memory_available'])} free"
    if hardware["memory_limit"] is not None:
        memory += f", limited to {_size(hardware['memory_limit'])}"
    caches = [
        f"{name} {_size(size)}" for name, size in (hardware["caches"] or {}).items()
    ]
    devices = [
        f"{a['type']}:{a['index']} {a['name']}, {_size(a['memory'])}"
        for a in hardware["accelerators"]
    ]
    sections: dict[str, list[tuple[str, Any]]] = {
        "hardware": [
            ("CPU", hardware["cpu"]),
            ("cores", f"{hardware['cores_usable']} usable of {hardware['cores']}"),
            ("vector ISA", hardware["isa"]),
            ("caches", ", ".join(caches) or None),
            ("memory", memory),
            ("accelerators", "; ".join(devices) or "none that torch can use"),
        ],
        "versions": [(name, _version(v)) for name, v in report["versions"].items()],
        "threads": [
            ("torch", f"{threads['torch']} ({threads['torch_interop']} inter-op)"),
            ("kernels", threads["kernels"] or "no native kernels"),
            ("OMP_NUM_THREADS", threads["OMP_NUM_THREADS"] or "not set"),
        ],
        "backends": [
            (name, "available" if why is None else f"not available: {why}")
            for name, why in report["backends"].items()
        ],
        "what serves which op": [
            (row["op"], f"{row['device']:6}{row['backend']:11}{row['why']}")
            for row in report["ops"]
        ],
    }
    if not lacks["available"]:
        sections["the native CPU kernels are absent: same results, but slower"] = [
            ("why", lacks["reason"]),
            ("mend", lacks["mend"]),
        ]
    if report["problems"]:
        sections["could not be read"] = [(line, "") for line in report["problems"]]
    lines = []
    for title, rows in sections.items():
        width = max((len(name) for name, _ in rows), default=0)
        lines += ["", title, *(f"  {n:{width}}  {_text(v)}".rstrip() for n, v in rows)]
    return "\n".join(lines[1:])


def _text(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    unit, shift = ("GiB", 30) if size >= 1 << 30 else ("MiB", 20)
    unit, shift = (unit, shift) if size >= 1 << 20 else ("KiB", 10)
    return f"{size / (1 << shift):.4g} {unit}"


def _version(version: Any) -> str:
    if not isinstance(version, dict):
        return _text(version)
    if version["mend"] is None:
        return str(version["version"])
    state = "absent"
    if version["version"] is not None:
        state = f"{version['version']} does not load ({version['error']})"
    return f"{state}; optional, for {version['gives']}: {version['mend']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``python -m gnnaccel info``.

    Args:
        argv: Arguments after the command; default: those of the process.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gnnaccel info",
        description="Hardware, versions, and which kernel serves which op, and why.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; bytes")
    as_json = parser.parse_args(argv).json
    report = collect()
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 0
