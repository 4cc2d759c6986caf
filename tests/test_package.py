"""The rules of the house: what is packaged, what imports what, what import costs."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gnnaccel

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "gnnaccel"

# Top to bottom: a unit (a folder or a file of the package) may import those that
# stand below it, never one above or on its own line.
LAYERS = [
    ["__main__"],
    ["auto"],
    ["explain"],
    ["optimize", "info", "profile"],
    ["nn", "loader"],
    ["data"],
    ["sampling"],
    ["ops"],
    ["graph"],
    ["kernels"],
    ["cache", "errors"],
    ["_native"],
]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}

TOP_LEVEL = {
    *("gnnaccel", "tests", "benchmarks", "examples"),
    *("pyproject.toml", "README.md", "LICENSE"),
}


def _imported_modules(path: Path) -> set[str]:
    """Full names of what a file of the package imports, wherever it does so."""
    package = ["gnnaccel", *path.relative_to(SOURCE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _wrong_imports(path: Path) -> list[str]:
    """The imports of a file that do not point down."""
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    wrong = []
    for name in sorted(_imported_modules(path)):
        head, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if head != "gnnaccel" or target == unit:
            continue
        # A bare `import gnnaccel`, or a name that only __init__ has, is the top.
        if RANK.get(target, -1) <= RANK[unit]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "path",
    sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py"),
    ids=lambda path: path.relative_to(SOURCE).as_posix(),
)
def test_imports_point_down(path):
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    assert unit in RANK, f"give {unit} a place in LAYERS"
    assert not _wrong_imports(path)


def test_csrc_includes_no_torch_header():
    torch_header = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2)/')
    sources = [p for p in (SOURCE / "csrc").rglob("*") if p.is_file()]
    assert sources
    assert not [
        p.name for p in sources if torch_header.search(p.read_text(encoding="utf-8"))
    ]


def test_top_level_holds_only_what_belongs_there():
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in top if not entry.startswith(".")} <= TOP_LEVEL


def test_version_is_the_metadata_version():
    assert gnnaccel.__version__ == importlib.metadata.version("gnnaccel")


def test_types_are_published():
    assert (Path(gnnaccel.__file__).parent / "py.typed").is_file()


def _installed_files() -> list[Path]:
    files = importlib.metadata.files("gnnaccel") or []
    return [Path(str(file.locate())) for file in files]


def test_the_installed_package_is_the_tested_one():
    origin = importlib.metadata.distribution("gnnaccel").read_text("direct_url.json")
    if origin and json.loads(origin).get("dir_info", {}).get("editable"):
        assert Path(gnnaccel.__file__).parent == SOURCE
    else:
        installed = {file.resolve() for file in _installed_files()}
        assert Path(gnnaccel.__file__).resolve() in installed, (
            "gnnaccel was imported from a folder and not from where it is installed"
        )


def test_kernels_that_were_built_are_used():
    built = any(file.name.startswith("_native.") for file in _installed_files())
    assert gnnaccel.kernels.native.available() == built, (
        gnnaccel.kernels.native.reason()
    )


# Runs alone, since this process has imported everything. PyG imports the scatter
# libraries by itself where it finds them, so here it does not find them.
_IMPORT_PROBE = """
import json, os, sys

class Watch:
    hidden = {"torch_scatter", "torch_sparse"}
    asked = set()

    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])
        if name in self.hidden:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Watch())
import torch, torch_geometric
Watch.asked.clear()
environment, threads = dict(os.environ), torch.get_num_threads()
import gnnaccel
print(json.dumps({
    "asked": sorted(Watch.asked),
    "environment": dict(os.environ) == environment,
    "threads": torch.get_num_threads() == threads,
}))
"""


def test_import_is_quiet(tmp_path):
    # A bare environment: this process may have passed on what import put into it.
    kept = {"HOME", "LD_LIBRARY_PATH", "PATH"}.intersection(os.environ)
    probe = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:gnnaccel", "-c", _IMPORT_PROBE],
        cwd=tmp_path,
        env={name: os.environ[name] for name in kept},
        capture_output=True,
        text=True,
    )
    assert probe.returncode == 0, probe.stderr
    found = json.loads(probe.stdout)
    optional = {"matplotlib", "rich", "scipy", "sklearn", "triton"}
    optional |= {"torch_scatter", "torch_sparse"}
    assert not optional.intersection(found["asked"])
    assert found["environment"], "import changed os.environ"
    assert found["threads"], "import changed torch's thread count"
