"""Starts the ranks of a job on this machine through mpiexec, and watches them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netcl.core import env
from netcl.core.backend.lifecycle import INTERRUPTED as INTERRUPTED
from netcl.core.errors import DeviceError, message
from netcl.distributed import guard
from netcl.distributed.guard import DIE_WITH_PARENT, PAUSE, handled, leave, wait
from netcl.distributed.mpi import INSTALL

GRACE = 4.0  # seconds that a child process has to end by itself
TERMINATED = 128 + signal.SIGTERM  # exit statuses of a rank that saved after SIGTERM; INTERRUPTED after Ctrl-C


def mpiexec() -> str:
    """Return the path of mpiexec, beside this Python, where pip installs it with its library, or from PATH.

    The order matters: MPICH 5.0 started by the mpiexec of MPICH 4.0 fails in one start of 200 on a busy machine.
    """
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise DeviceError(message("launch", "mpiexec was not found beside this Python or in PATH", INSTALL))
    return found


def launch(program: Sequence[str], ranks: int, devices: Sequence[str] = ()) -> int:
    """Run ``python`` with the arguments ``program`` in ``ranks`` processes and return the exit status.

    Rank i gets device ``i % len(devices)``. The job ends when a rank fails, also before MPI has started. Every Ctrl-C or SIGTERM
    interrupts each rank once.
    """
    if ranks < 1:
        raise DeviceError(message("launch", "ranks must be at least 1", ranks=ranks))
    with tempfile.TemporaryDirectory(prefix="netcl-job-") as folder:
        notes = Path(folder)
        wrapper = [guard.__file__, ",".join(devices) or "auto", folder]
        command = [mpiexec(), "-n", str(ranks), sys.executable, *wrapper, *program]
        # In a session of its own: Ctrl-C would also reach mpiexec, and some implementations end the ranks before these have saved.
        job = subprocess.Popen(command, env=env.for_child(), start_new_session=True, preexec_fn=DIE_WITH_PARENT)
        signals: list[int] = []

        def interrupt(number: int, _: Any) -> None:
            signals.append(number)
            leave(notes, f"interrupt.{len(signals)}")

        with handled({signal.SIGINT: interrupt, signal.SIGTERM: interrupt}):
            status = _watch_job(job, notes, ranks)
        return TERMINATED if signals[:1] == [signal.SIGTERM] and status else status


def _watch_job(job: subprocess.Popen[bytes], notes: Path, ranks: int) -> int:
    """Wait for a job and return its exit status. mpiexec alone would wait forever for a rank that ends or hangs before MPI starts."""
    limit = float(env.value("NETCL_COMM_TIMEOUT"))
    late_at = time.monotonic() + limit
    while (status := wait(job, PAUSE)) is None:
        if any((notes / f"failed.{rank}").exists() for rank in range(ranks)):
            if (status := wait(job, GRACE)) is not None:
                return status
            break
        absent = [str(rank) for rank in range(ranks) if not (notes / f"joined.{rank}").exists()]
        if absent and time.monotonic() > late_at:
            first = [rank for rank in absent if not (notes / f"started.{rank}").exists()] or absent
            sys.stderr.write(f"netcl: rank {', '.join(first)} did not start within {limit:g} s (NETCL_COMM_TIMEOUT); the job ends\n")
            break
    else:
        return status
    leave(notes, "end")  # the guards end their ranks, mpiexec ends the guards
    job.terminate()
    if wait(job, GRACE) is None:
        job.kill()
    return job.wait() or 1
