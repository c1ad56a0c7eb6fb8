"""``python -m netcl.torch [--device cuda] script.py arguments``: runs a PyTorch script with netcl."""

from __future__ import annotations

import argparse
import sys

from netcl.core.errors import message
from netcl.torch import MissingNameError, missing, run


def main(words: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if the script needs a name that is missing, 2 if the script is unreadable, else 0."""
    parser = argparse.ArgumentParser(prog="python -m netcl.torch", description="Run a PyTorch script on an OpenCL device, unchanged.")
    parser.add_argument("--device", default="cpu", help="where tensors are created that name no device (default: cpu, as in torch)")
    parser.add_argument("--check", action="store_true", help="list the names that netcl lacks instead of running the script")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    try:
        absent = missing(given.script)
    except (OSError, SyntaxError) as error:
        sys.stderr.write(f"{message('netcl.torch', 'the script cannot be read or parsed', str(error), file=given.script)}\n")
        return 2
    if absent:
        names = ", ".join(f"{name} ({place})" for name, place in absent.items())
        remedy = "" if given.check else "the script ends where it uses one of them"
        sys.stderr.write(f"{message('netcl.torch', f'netcl has no {names}', remedy)}\n")
    if given.check:
        return 1 if absent else 0
    sys.path.pop(0)  # of ``python -m``: the current folder; scripts have their own there
    try:
        run(given.script, given.arguments, given.device)
    except MissingNameError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
