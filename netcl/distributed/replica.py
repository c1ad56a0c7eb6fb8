"""``python -m netcl.distributed.replica train.py ...``: one process per device of this machine, as ranks of one MPI job.

``-n N`` starts N ranks instead. ``--devices 0:0,1:0`` names the devices; if there are more ranks than devices, ranks share devices. In
the program, ``netcl.distributed.world()`` returns the world of the job, and the active device is the device of the rank.

Each rank is the child of a guard process (:mod:`netcl.distributed.guard`).
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from netcl.core import env
from netcl.distributed import comm
from netcl.distributed.data_parallel import all_devices
from netcl.distributed.guard import leave, rank_by_launcher
from netcl.distributed.launch import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    about = "One process per device, as ranks of one MPI job."
    parser = argparse.ArgumentParser(prog="python -m netcl.distributed.replica", description=about)
    parser.add_argument("-n", type=int, default=None, metavar="RANKS", help="number of processes; default: one per device")
    parser.add_argument("--devices", default="", help="selectors separated by commas; default: all devices")
    for internal in ("--rank", "--notes"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.epilog = "The options are followed by a Python file (or -m module) and its arguments."
    words = list(sys.argv[1:] if argv is None else argv)
    own = 0  # the number of words before the program, whose own options may have the same names
    while own < len(words) and words[own].startswith("-") and words[own] != "-m":
        own += 1 if "=" in words[own] or words[own] in ("-h", "--help") else 2
    given, program = parser.parse_args(words[:own]), words[own:]
    if not program:
        parser.error("a Python file or -m module must follow the options")
    if given.rank:
        return _become(given.rank.split(","), given.notes, program)
    devices = [name for name in given.devices.split(",") if name] or [str(name) for name in all_devices()]
    return launch(program, given.n or len(devices), devices)


def _become(devices: Sequence[str], folder: str, program: Sequence[str]) -> int:
    """Join the job, select this rank's device and run the program; returns 0."""
    notes, number = Path(folder), rank_by_launcher()
    leave(notes, f"started.{number}")
    ours = comm.world()
    leave(notes, f"joined.{number}")
    mine = devices[ours.local_rank() % len(devices)]
    if mine != "auto":
        env.set_variable("NETCL_DEVICE", mine)
    if program[0] == "-m":
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
