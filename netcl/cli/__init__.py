"""The ``netcl`` command: one module per group of commands, each entering its own in the table of :mod:`netcl.cli.command`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from netcl import __version__
from netcl.cli.command import COMMANDS, CommandError
from netcl.core.backend.lifecycle import INTERRUPTED
from netcl.core.errors import DeviceError, EnvironmentVariableError, message

# In the order of the help. A module imports what is heavy (models, plots, the op table) inside its commands: `netcl --help` is quick.
MODULES = ("doctor", "settings", "ops", "check", "train", "bench", "tune")


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line. Only the command that is asked for declares its options, which may need modules that take time to load."""
    asked = next((word for word in argv if not word.startswith("-")), None)
    for module in MODULES:
        import_module(f"netcl.cli.{module}")
    top = argparse.ArgumentParser(prog="netcl", description="Deep learning on any OpenCL device.")
    top.add_argument("--version", action="version", version=f"netcl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for row in COMMANDS.values():
        text = row.run.__doc__ or ""
        line = commands.add_parser(row.name, help=text, description=text)
        if row.name == asked:
            row.arguments(line)
        line.set_defaults(function=row.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sign that the terminal's encoding lacks is no reason to fail
    words = sys.argv[1:] if argv is None else argv
    args = parser(words).parse_args(words, argparse.Namespace(words=list(words)))
    try:
        return args.function(args)
    except KeyboardInterrupt:  # whoever has something to save has handled it
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CommandError, DeviceError, EnvironmentVariableError) as error:
        print(error, file=sys.stderr)
    except OSError as error:  # a file that is not there, a folder that cannot be written to, a full disk
        print(error if error.filename is None else message(args.command, str(error.strerror), file=error.filename), file=sys.stderr)
    return 1
