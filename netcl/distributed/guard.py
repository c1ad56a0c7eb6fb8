"""The parent of a rank: reports the rank if it is killed, ends it with the job, and forwards the launcher's interrupts.

mpiexec also ends the job of a killed rank, but does not reliably say which rank died first. The launcher runs this file as a script. It
imports nothing of netcl, because every rank has a guard, which would take as long to start and as much memory as the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAUSE = 0.2  # seconds between two polls of a child process
#: Variables in which MPICH, Intel MPI, Open MPI or Slurm tell a process its rank.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_PR_SET_PDEATHSIG = 1


def rank_by_launcher() -> str:
    """Return the rank that mpiexec assigned to this process, read without initializing MPI; ``"?"`` if it is unknown."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "?")


def leave(notes: Path, name: str) -> None:
    """Create the empty file ``name`` in the folder ``notes``, as a message between the launcher of a job and the parents of its ranks."""
    with contextlib.suppress(FileNotFoundError):  # the launcher has ended and removed the folder
        notes.joinpath(name).touch()


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status of a child, or ``None`` if it still runs after ``seconds``."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install signal handlers for a block; does nothing outside the main thread, where Python does not allow it."""
    main = threading.current_thread() is threading.main_thread()
    before = {name: signal.signal(name, handler) for name, handler in handlers.items()} if main else {}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def die_with_parent() -> None:
    """Let the system kill this process when its parent ends; works only on Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


DIE_WITH_PARENT = die_with_parent if sys.platform == "linux" else None  # Popen's preexec_fn, which Windows refuses


def main(devices: str, folder: str, *program: str) -> int:
    """Run the rank as a child process and return its exit status. Kill the child when the job ends; forward the launcher's interrupts."""
    command = [sys.executable, "-m", "netcl.distributed.replica", "--rank", devices, "--notes", folder, *program]
    rank = subprocess.Popen(command, close_fds=False, preexec_fn=DIE_WITH_PARENT)  # mpiexec passes open files to the rank
    notes, number, interrupted = Path(folder), rank_by_launcher(), 0
    with handled({signal.SIGINT: signal.SIG_IGN}):
        while (status := wait(rank, PAUSE)) is None:
            if (notes / "end").exists() or not notes.exists():
                rank.kill()
            elif (notes / f"interrupt.{interrupted + 1}").exists():
                interrupted += 1
                rank.send_signal(signal.SIGINT)
    if status not in (0, 128 + signal.SIGINT) or not (notes / f"joined.{number}").exists():
        leave(notes, f"failed.{number}")
    if status < 0:
        sys.stderr.write(f"netcl: rank {number} (pid {rank.pid}) was ended by {signal.Signals(-status).name}; the job ends with it\n")
        return 128 - status
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
