"""Packages of the operating system, with package managers and sudo that only write down how they were called."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from netcl.cli import doctor
from netcl.core import platforms, system_packages
from netcl.core.platforms import Runtime

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins are shell scripts")
ROOT = Path(__file__).parent.parent.parent


class Machine:
    """A ``PATH`` of stand-ins: each writes its name and arguments to a log and ends with a status."""

    def __init__(self, folder: Path):
        self.folder = folder
        for program in ("env", "sh", "true"):
            (folder / program).symlink_to(shutil.which(program) or "")

    def add(self, name: str, status: int = 0) -> None:
        runs = 'shift; exec "$@"' if name == "sudo" and status == 0 else f"exit {status}"
        (self.folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.folder}/log"\n{runs}\n')
        (self.folder / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(system_packages, "is_root", lambda: False)
    return made


@pytest.mark.parametrize(
    "program, typed",
    [
        ("apt-get", "sudo apt-get install pocl-opencl-icd"),
        ("dnf", "sudo dnf install pocl"),
        ("pacman", "sudo pacman -S pocl"),
        ("brew", "brew install pocl"),
    ],
)
def test_what_to_type_on_each_system(machine, program, typed):
    machine.add(program)
    assert system_packages.package_command("runtime") == typed


def test_an_unknown_package_manager_is_told_in_words(machine, monkeypatch):
    monkeypatch.setattr(platforms, "has_wheel", lambda: False)
    assert system_packages.package_command("runtime") == "" and not system_packages.install_packages("runtime")
    assert platforms.install_command() == platforms.OWN_PACKAGE


def test_root_installs_with_the_lists_brought_up_to_date(machine, monkeypatch, capsys):
    monkeypatch.setattr(system_packages, "is_root", lambda: True)
    machine.add("apt-get")
    assert system_packages.install_packages("runtime")
    update, install = machine.calls
    assert update.endswith(" update") and install.endswith(" install -y --no-install-recommends pocl-opencl-icd")
    assert "apt-get installs pocl-opencl-icd" in capsys.readouterr().err


def test_sudo_without_a_password_is_used(machine):
    machine.add("apt-get")
    machine.add("sudo")
    assert system_packages.install_packages("runtime")
    assert any(call.startswith("sudo -n env DEBIAN_FRONTEND") and call.endswith("pocl-opencl-icd") for call in machine.calls)


def test_sudo_that_asks_for_a_password_installs_nothing(machine, capsys):
    machine.add("apt-get")
    machine.add("sudo", status=1)
    assert system_packages.main("runtime") == 1
    assert machine.calls == ["sudo -n true"]
    assert capsys.readouterr().err == "netcl: type: sudo apt-get install pocl-opencl-icd\n"


def test_a_package_manager_that_fails_is_reported(machine, monkeypatch, capsys):
    monkeypatch.setattr(system_packages, "is_root", lambda: True)
    machine.add("apt-get", status=100)
    assert not system_packages.install_packages("runtime")
    assert "could not install pocl-opencl-icd" in capsys.readouterr().err


def test_tools_are_installed_by_root_alone_and_only_if_missing(machine, monkeypatch):
    machine.add("apt-get")
    monkeypatch.setattr(system_packages, "TOOLS", ("chromium", "oclgrind"))
    assert system_packages.main("tools") == 0 and machine.calls == []
    monkeypatch.setattr(system_packages, "is_root", lambda: True)
    machine.add("chromium")
    assert system_packages.main("tools") == 0
    assert [call.split()[-1] for call in machine.calls] == ["update", "oclgrind"]


def test_it_runs_without_the_package():
    """As the Makefile calls it, before anything is installed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "netcl/core/system_packages.py"), "nothing"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == "netcl: type: the command of this system that installs nothing\n"


NO_DEVICE = {"pyopencl": "2026.1", "install": "x"}


@pytest.mark.parametrize(
    "facts, wheel, pip, system",
    [
        (doctor.Facts(**NO_DEVICE), True, ["pocl-binary-distribution"], 0),
        (doctor.Facts(**NO_DEVICE), False, [], 1),
        (doctor.Facts(import_error="pyopencl required"), True, ["pyopencl", "pocl-binary-distribution"], 0),
        (doctor.Facts(import_error="pyopencl required"), False, ["pyopencl"], 1),
        (doctor.Facts(import_error="x", runtimes=(Runtime("pocl", "libpocl.so", None, "system", "", True),)), False, ["pyopencl"], 0),
        (doctor.Facts(**NO_DEVICE, setting=("OCL_ICD_VENDORS", "/x")), False, [], 0),
        (doctor.Facts(**NO_DEVICE, hidden="NETCL_VISIBLE_DEVICES=9"), True, [], 0),
    ],
)
def test_fix_installs_what_is_missing_and_nothing_else(facts, wheel, pip, system, monkeypatch):
    runs, asked = [], []
    monkeypatch.setattr(platforms, "has_wheel", lambda: wheel)
    monkeypatch.setattr(doctor.subprocess, "run", lambda words: runs.append(words) or subprocess.CompletedProcess(words, 0))
    monkeypatch.setattr(system_packages, "install_packages", lambda purpose: asked.append(purpose) or True)
    assert doctor.fix(facts) is bool(pip or system)
    assert [words[5:] for words in runs] == ([pip] if pip else []) and asked == ["runtime"] * system


def test_ci_runs_nothing_but_make_test():
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]


def test_lower_bounds_are_the_versions_that_are_tested():
    tested = {name: version for line in (ROOT / "tests/oldest.txt").read_text().splitlines() if line[:1] not in ("", "#")
              for name, version in [line.split("==")]}  # fmt: skip
    bounds = set(re.findall(r'"([A-Za-z_0-9]+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    assert {name for name, _ in bounds} == tested.keys()
    for name, version in bounds:
        assert (tested[name] + ".0").startswith(version + "."), (name, version, tested[name])
