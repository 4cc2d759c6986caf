"""python -m gnnaccel info: what it says, and that nothing on a machine can break it."""

import importlib.metadata
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gnnaccel
from gnnaccel import __main__ as cli
from gnnaccel import info
from gnnaccel.kernels import native


def said(capsys, *argv):
    """Runs a command that must succeed; returns what it printed."""
    assert cli.main(argv) == 0
    return capsys.readouterr().out


@pytest.fixture
def no_native(monkeypatch):
    """A build without the compiled module: asking it for more is an error there."""

    def absent():
        raise AssertionError("asked a module that is not there")

    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "serves", lambda device, dtype: False)
    monkeypatch.setattr(native, "reason", lambda: "the moon is in the wrong house")
    monkeypatch.setattr(native, "isa", absent)
    monkeypatch.setattr(native, "threads", absent)


def test_text_has_every_part(capsys):
    text = said(capsys, "info")
    for part in ("hardware", "versions", "threads", "backends", "what serves which op"):
        assert part in text.splitlines()
    assert torch.__version__ in text
    assert all(f"\n  {op} " in text for op in info.OPS)
    assert "could not be read" not in text


def test_json_says_the_same_as_the_library(capsys):
    report = json.loads(said(capsys, "info", "--json"))
    assert report["problems"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert report["threads"]["torch"] == torch.get_num_threads()
    assert report["hardware"]["memory"] > 0
    assert report["native"]["available"] == native.available()
    assert set(report["backends"]) == {"native", "scatter", "reference"}
    assert (report["backends"]["native"] is None) == native.available()
    assert report["backends"]["reference"] is None
    on_cpu = [row for row in report["ops"] if row["device"] == "cpu"]
    assert [row["op"] for row in on_cpu] == list(info.OPS)
    assert all(row["why"] for row in report["ops"])


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
def test_native_kernels_are_named_with_their_instruction_set(capsys):
    report = json.loads(said(capsys, "info", "--json"))
    assert report["native"]["isa"] == native.isa()
    assert report["threads"]["kernels"] == native.threads()
    for row in report["ops"]:
        if row["device"] == "cpu":
            assert row["backend"] == "native" and native.isa() in row["why"]


def test_absent_native_kernels_are_explained_with_the_mend(capsys, no_native):
    report = json.loads(said(capsys, "info", "--json"))
    assert report["native"]["available"] is False
    assert not [row for row in report["ops"] if row["backend"] == "native"]
    text = said(capsys, "info")
    assert "the native CPU kernels are absent" in text
    assert "the moon is in the wrong house" in text
    assert "g++" in text and "pip install --force-reinstall" in text
    assert "could not be read" not in text


def test_without_native_and_scatter_plain_torch_serves(capsys, monkeypatch, no_native):
    monkeypatch.setattr(info.kernels.scatter, "serves", lambda device, dtype: False)
    report = json.loads(said(capsys, "info", "--json"))
    assert {row["backend"] for row in report["ops"]} == {"reference"}


def test_torch_sparse_is_credited_with_its_own_kernels_only(
    capsys, monkeypatch, no_native
):
    monkeypatch.setattr(info.kernels.scatter, "serves", lambda device, dtype: True)
    rows = json.loads(said(capsys, "info", "--json"))["ops"]
    serving = {row["op"]: row["backend"] for row in rows}
    assert serving["spmm sum, mean"] == "scatter"
    assert serving["sddmm"] == "reference"


@pytest.fixture
def unloadable(monkeypatch):
    """torch_sparse can't be imported."""
    monkeypatch.setitem(sys.modules, "torch_sparse", None)


def test_absent_package_comes_with_its_pip_line(capsys, monkeypatch, unloadable):
    def version(dist):
        if dist == "torch-sparse":
            raise importlib.metadata.PackageNotFoundError(dist)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    text = said(capsys, "info")
    (line,) = (line for line in text.splitlines() if line.startswith("  torch_sparse"))
    assert "absent" in line and "SparseTensor" in line
    assert "pip install --no-build-isolation torch-scatter torch-sparse" in line


def test_package_that_does_not_load_is_not_called_absent(
    capsys, monkeypatch, unloadable
):
    monkeypatch.setattr(importlib.metadata, "version", lambda dist: "0.6.99")
    text = said(capsys, "info")
    (line,) = (line for line in text.splitlines() if line.startswith("  torch_sparse"))
    assert "0.6.99 does not load (ModuleNotFoundError" in line


@pytest.mark.parametrize(
    "name",
    [
        *("_cpu_model", "_usable_cores", "_caches", "_memory", "_memory_available"),
        *("_memory_limit", "_accelerators", "_pyg_version", "_own_version"),
        *("_backends", "_ops"),
    ],
)
def test_a_probe_that_fails_is_a_line_in_the_report(capsys, monkeypatch, name):
    def fails(*args):
        raise OSError("no such thing on this machine")

    monkeypatch.setattr(info, name, fails)
    text = said(capsys, "info")
    assert "could not be read" in text
    assert "OSError: no such thing on this machine" in text
    assert json.loads(said(capsys, "info", "--json"))["problems"]


def test_a_machine_without_proc_and_sys(capsys, monkeypatch):
    monkeypatch.setattr(info, "Path", lambda *parts: Path("/no/such/place"))
    hardware = json.loads(said(capsys, "info", "--json"))["hardware"]
    assert hardware["cpu"]
    assert hardware["memory_available"] is None and hardware["caches"] == {}
    assert "unknown free" in said(capsys, "info")


def test_memory_limit_of_a_control_group_is_shown(capsys, monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3221225472\n")
    monkeypatch.setattr(info, "CONTROL_GROUP", tmp_path)
    assert "limited to 3 GiB" in said(capsys, "info")
    (tmp_path / "memory.max").write_text("max\n")
    assert "limited to" not in said(capsys, "info")


def test_accelerators_are_listed_and_served(capsys, monkeypatch):
    properties = SimpleNamespace(name="Abacus 9", total_memory=1 << 36)
    module = SimpleNamespace(get_device_properties=lambda index: properties)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    text = said(capsys, "info")
    assert "cuda:0 Abacus 9, 64 GiB; cuda:1 Abacus 9, 64 GiB" in text
    rows = json.loads(said(capsys, "info", "--json"))["ops"]
    on_gpu = [row for row in rows if row["device"] == "cuda"]
    assert [row["op"] for row in on_gpu] == list(info.OPS)
    assert not [row for row in on_gpu if row["backend"] == "native"]


def test_every_command_has_a_main_and_a_line_of_help(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, (module, line) in cli.COMMANDS.items():
        assert callable(import_module(module).main)
        assert name in text and line in text


@pytest.mark.parametrize("argv", [[], ["juggle"], ["--juggle", "info"]])
def test_no_known_command_gives_the_help_and_exit_code_2(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "commands" in captured.err and "info" in captured.err


def test_unknown_option_of_a_command_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["info", "--juggle"])
    assert stop.value.code == 2
    assert "--juggle" in capsys.readouterr().err


def test_exit_code_of_a_command_is_passed_on(monkeypatch):
    monkeypatch.setattr(info, "main", lambda argv: len(argv))
    assert cli.main(["info", "a", "--json", "b"]) == 3


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Starts the command in a process that imports the gnnaccel these tests import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(gnnaccel.__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "-m", "gnnaccel", "info", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def test_runs_as_a_module(command):
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert json.loads(out)["versions"]["gnnaccel"] == gnnaccel.__version__


def test_a_reader_that_leaves_early_sees_no_traceback(command):
    command.stdout.close()
    assert "Traceback" not in command.stderr.read()
    assert command.wait() == 0
