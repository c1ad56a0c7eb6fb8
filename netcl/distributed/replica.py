"""``python -m netcl.distributed.replica train.py ...``: one process per device of this machine, as ranks of one MPI job.

``-n N`` starts N ranks instead, ``--devices 0:0,1:0`` names the devices; with more ranks than devices they are handed out again from
the first. Inside, ``netcl.distributed.world()`` is the job, and the active device the rank's own.

Each rank runs below a guard that does nothing but wait: should the rank be killed, the guard says which one it was before the job ends.
mpiexec alone ends the job as quickly, but does not say reliably who was first.
"""

from __future__ import annotations

import argparse
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence

from netcl.core import env
from netcl.distributed import comm, mpi
from netcl.distributed.data_parallel import all_devices
from netcl.distributed.launch import Notes, die_with_parent, guard, launch


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    about = "One process per device, as ranks of one MPI job."
    parser = argparse.ArgumentParser(prog="python -m netcl.distributed.replica", description=about)
    parser.add_argument("-n", type=int, default=None, metavar="RANKS", help="number of processes; one per device if not given")
    parser.add_argument("--devices", default="", help="selectors separated by commas; all devices if not given")
    parser.add_argument("--guard", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--notes", default="", help=argparse.SUPPRESS)
    parser.epilog = "What follows the options is a Python file (or -m module) and its arguments."
    words = list(sys.argv[1:] if argv is None else argv)
    own = _own_words(words)
    given, program = parser.parse_args(words[:own]), words[own:]
    if not program:
        parser.error("name a program to run")
    if given.guard:
        return _guard(given.guard, given.notes, program)
    if given.rank:
        return _become(given.rank.split(","), given.notes, program)
    devices = [name for name in given.devices.split(",") if name] or [str(name) for name in all_devices()]
    return launch(program, given.n or len(devices), devices)


def _own_words(words: Sequence[str]) -> int:
    """How many words are ours; all behind them, ``-m`` included, are the program's."""
    count = 0
    while count < len(words) and words[count].startswith("-") and words[count] != "-m":
        count += 1 if "=" in words[count] or words[count] in ("-h", "--help") else 2
    return count


def _guard(devices: str, folder: str, program: Sequence[str]) -> int:
    """Run the rank, and name it if it is killed. What mpiexec left open for the rank must stay open."""
    command = [sys.executable, "-m", "netcl.distributed.replica", "--rank", devices, "--notes", folder, *program]
    rank = subprocess.Popen(command, close_fds=False, preexec_fn=die_with_parent)
    number = mpi.rank_by_launcher()
    status = guard(rank, number, folder)
    if status < 0:
        sys.stderr.write(f"netcl: rank {number} (pid {rank.pid}) was ended by {signal.Signals(-status).name}; the job ends with it\n")
        return 128 - status
    return status


def _become(devices: Sequence[str], folder: str, program: Sequence[str]) -> int:
    """Take this rank's device and become the program."""
    notes, number = Notes(folder), mpi.rank_by_launcher()
    notes.leave(f"started.{number}")
    ours = comm.world()
    notes.leave(f"joined.{number}")
    mine = devices[ours.local_rank() % len(devices)]
    if mine != "auto":
        env.choose_device(mine)
    as_module = program[0] == "-m"
    sys.argv = list(program[1:] if as_module else program)
    if as_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
