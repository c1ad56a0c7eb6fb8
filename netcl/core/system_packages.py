"""Installs packages of the operating system: an OpenCL runtime, Python's ``venv``, and the tools of ``make test``.

The Makefile, CI and ``netcl doctor --fix`` share it. It imports only the standard library, because it is also a program that runs before
anything is installed: ``python -I netcl/core/system_packages.py venv``.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

# Package managers in order of preference: the arguments that install, and the packages of each purpose.
MANAGERS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "apt-get": (("install", "-y", "--no-install-recommends"), {"runtime": ("pocl-opencl-icd",), "venv": ("python3-venv",)}),
    "dnf": (("install", "-y"), {"runtime": ("pocl",)}),
    "zypper": (("--non-interactive", "install"), {"runtime": ("pocl",)}),
    "pacman": (("-S", "--noconfirm"), {"runtime": ("pocl",)}),
    "brew": (("install",), {"runtime": ("pocl",)}),
}
# Programs that tests use where they are installed; the names are those of Debian's packages. pip has Oclgrind for x86-64.
TOOLS = ("chromium",) if platform.machine() == "x86_64" else ("chromium", "oclgrind")
_INSTALL_SECONDS = 900


def package_manager() -> str:
    """Return the name of this machine's package manager; empty if it is not in :data:`MANAGERS`."""
    return next((name for name in MANAGERS if shutil.which(name)), "")


def package_command(purpose: str) -> str:
    """Return the command that installs the packages of a purpose (``runtime``, ``venv``); empty if none is known."""
    program = package_manager()
    packages = MANAGERS[program][1].get(purpose, ()) if program else ()
    verb = "-S" if program == "pacman" else "install"
    sudo = "" if program == "brew" or is_root() else "sudo "
    return f"{sudo}{program} {verb} {' '.join(packages)}" if packages else ""


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def prefix(program: str) -> list[str] | None:
    """Return the words (``sudo -n``, or none) to put before ``program`` to install without a password; ``None`` if a password is needed."""
    if program == "brew" or is_root():
        return []
    sudo = shutil.which("sudo")
    if sudo and _status([sudo, "-n", "true"]) == 0:
        return [sudo, "-n"]
    return None


def install_packages(purpose: str) -> bool:
    """Install the packages of a purpose if that needs no password; returns whether they were installed. Reports on standard error."""
    program = package_manager()
    packages, words = MANAGERS[program][1].get(purpose, ()) if program else (), prefix(program)
    return bool(packages) and words is not None and _install(program, words, packages)


def _install(program: str, words: Sequence[str], packages: Sequence[str]) -> bool:
    sys.stderr.write(f"netcl: {program} installs {' '.join(packages)}\n")
    start = [*words, "env", "DEBIAN_FRONTEND=noninteractive", program]
    if program == "apt-get":
        start += ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
        _status([*start, "update"])  # if it fails, the existing package lists may suffice
    if _status([*start, *MANAGERS[program][0], *packages]) == 0:
        return True
    sys.stderr.write(f"netcl: {program} could not install {' '.join(packages)}\n")
    return False


def install_tools() -> None:
    """Install the missing programs of :data:`TOOLS` by apt-get; does nothing unless root, so that ``make test`` adds no browser."""
    for name in TOOLS:
        if is_root() and package_manager() == "apt-get" and not shutil.which(name):
            _install("apt-get", [], [name])


def _status(words: Sequence[str]) -> int:
    null = subprocess.DEVNULL
    try:
        return subprocess.run(words, stdin=null, stdout=null, stderr=null, timeout=_INSTALL_SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def main(purpose: str) -> int:
    """Install the packages of a purpose, or print the command to type; returns the exit status."""
    if purpose == "tools":
        install_tools()
        return 0
    if install_packages(purpose):
        return 0
    sys.stderr.write(f"netcl: type: {package_command(purpose) or f'the command of this system that installs {purpose}'}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
