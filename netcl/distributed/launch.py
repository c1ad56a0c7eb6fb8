"""Starts the ranks of a job on this machine through mpiexec."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from netcl.core import env
from netcl.core.errors import DeviceError, message
from netcl.distributed.mpi import INSTALL


def mpiexec() -> str:
    """The launcher: on the path, or where pip put it beside this Python."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec") or (str(beside) if beside.exists() else None)
    if found is None:
        raise DeviceError(message("launch", "there is no mpiexec", INSTALL))
    return found


def launch(program: Sequence[str], ranks: int, devices: Sequence[str] = ()) -> int:
    """Run ``python`` with the arguments ``program`` on ``ranks`` processes; rank i gets device ``i`` of ``devices``, around again if there
    are fewer. Returns the exit status."""
    if ranks < 1:
        raise DeviceError(message("launch", "a job has at least one rank", ranks=ranks))
    wrapper = ["-m", "netcl.distributed.replica", "--guard", ",".join(devices) or "auto"]
    command = [mpiexec(), "-n", str(ranks), sys.executable, *wrapper, *program]
    return patiently(subprocess.Popen(command, env=env.for_child()))


def patiently(child: subprocess.Popen[bytes]) -> int:
    """The exit status of a child. A Ctrl-C, which reaches it too, is its own to handle: it may have something to save."""
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
