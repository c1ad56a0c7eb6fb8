"""The ``netcl`` command. Each module holds a group of commands and registers them in the table of :mod:`netcl.cli.command`."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from netcl import __version__
from netcl.cli.command import COMMANDS, CommandError
from netcl.core.backend.lifecycle import INTERRUPTED
from netcl.core.errors import DeviceError, EnvironmentVariableError, message

BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended

# In the order of the help. A module imports what is heavy (models, plots, the op table) inside its commands: `netcl --help` is quick.
COMMAND_MODULES = ("doctor", "settings", "ops", "check", "train", "models", "onnx", "serve", "bench", "tune")


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of the command line. Only the selected command declares its options, because some need slow imports."""
    asked = next((word for word in argv if not word.startswith("-")), None)
    for module in COMMAND_MODULES:
        import_module(f"netcl.cli.{module}")
    top = argparse.ArgumentParser(prog="netcl", description="Deep learning on any OpenCL device.")
    top.add_argument("--version", action="version", version=f"netcl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, (run, options) in COMMANDS.items():
        text = run.__doc__ or ""
        line = commands.add_parser(name, help=text, description=text)
        for declare in options if name == asked else ():
            declare(line)
        line.set_defaults(function=run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``--help``, ``--version`` and invalid arguments raise ``SystemExit``."""
    try:
        _prepare_streams()
        words = sys.argv[1:] if argv is None else argv
        args = parser(words).parse_args(words, argparse.Namespace(words=list(words)))
        status = args.function(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # whoever has something to save has handled it
        return INTERRUPTED
    except (CommandError, DeviceError, EnvironmentVariableError) as error:
        failure = str(error)
    except OSError as error:  # a file that is not there, a folder that cannot be written to, a full disk
        if isinstance(error, BrokenPipeError) and _drop_unread():
            return BROKEN_PIPE
        failure = str(error) if error.filename is None else message(next(iter(words), "netcl"), str(error.strerror), file=error.filename)
    finally:
        _drop_unread()
    print(failure, file=sys.stderr)
    return 1


def _prepare_streams() -> None:
    """Replace closed standard streams by the null device, and write ``?`` for characters that the encoding of a stream lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, stays open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_unread() -> bool:
    """Point standard streams whose reader is gone (``head``, ``less``) to the null device; returns whether there were any."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper) and _is_unread(stream)]
    for stream in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(gone)


def _is_unread(stream: io.TextIOWrapper) -> bool:
    """Whether the reader of a pipe is gone. This is checked without a write, because an unbuffered stream would lose the text."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # no file, or one that is closed
        return False
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
