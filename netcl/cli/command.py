"""The table of commands, and how they write.

A command is a function of the parsed arguments that returns the exit status; its docstring is its help. A new one is a decorated
function in a module of this package, and that module's name in ``MODULES`` of :mod:`netcl.cli`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netcl.core import env
from netcl.core.device import DeviceHandle, manager
from netcl.core.errors import DeviceError, message


class CommandError(RuntimeError):
    """What a user asked for cannot be done; the text is all there is to tell."""


Run = Callable[[argparse.Namespace], int]


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    return None


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    name: str
    run: Run
    arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS: dict[str, Command] = {}


def command(name: str, arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments) -> Callable[[Run], Run]:
    """Enter the decorated function as ``netcl <name>``; ``arguments`` declares its options on the parser it is given."""

    def enter(run: Run) -> Run:
        COMMANDS[name] = Command(name, run, arguments)
        return run

    return enter


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def pick_device(selector: str | None) -> DeviceHandle:
    """The device of an option ``--device``, or what NETCL_DEVICE says without one."""
    chosen = selector or env.value("NETCL_DEVICE")
    handle = manager.default(chosen)
    if handle is None:
        raise DeviceError(message("device", "no such device", f"there are: {manager.describe()}", device=chosen))
    return handle
