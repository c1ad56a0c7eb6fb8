"""The table of commands, and the functions with which commands print.

A command is a function of the parsed arguments that returns the exit status; its docstring is its help. A new command is a decorated
function in a module of this package, and that module's name in ``COMMAND_MODULES`` of :mod:`netcl.cli`.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from netcl.core.device import DeviceHandle, require

_LONGEST = 20  # of a word in a table, before it is broken


class CommandError(RuntimeError):
    """Raised by a command; only its message is printed, without a traceback."""


Run = Callable[[argparse.Namespace], int]
Option = Callable[[argparse.ArgumentParser], object]


#: The table of commands: the function and the options of each name.
COMMANDS: dict[str, tuple[Run, Sequence[Option]]] = {}


def command(name: str, *options: Option) -> Callable[[Run], Run]:
    """Register the decorated function as ``netcl <name>``; each of ``options`` is called with the parser and adds arguments to it."""

    def enter(run: Run) -> Run:
        COMMANDS[name] = run, options
        return run

    return enter


def option(*names: str, **settings: Any) -> Option:
    """Return an option for :func:`command`, with the arguments of ``argparse``'s ``add_argument``."""
    return lambda parser: parser.add_argument(*names, **settings)


DEVICE = option("--device", help="a selector as in `netcl devices`; default: NETCL_DEVICE")


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return the type of an option: a function that parses a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        if len(text) > 20 or not text.removeprefix("-").isdecimal() or not least <= int(text) <= most:
            bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, got {text!r}")
        return int(text)

    return read


def number(least: float) -> Callable[[str], float]:
    """Return the type of an option: a function that parses a finite number of at least ``least``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a finite number of at least {least:g}, got {text!r}")
        return value

    return read


def terminal_columns() -> int | None:
    """Return the number of columns of the terminal; ``None`` if output goes elsewhere, where lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str, flush: bool = False) -> None:
    """Print lines; on a narrow terminal, they are wrapped between words and keep their indentation."""
    room = terminal_columns()
    print("\n".join(_broken(line, room) for line in text.splitlines()) if room else text, flush=flush)


def _broken(line: str, room: int) -> str:
    if len(line) <= room:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line.strip(), room, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 0) -> str:
    """Return rows as columns of text. On a narrow terminal, cells are wrapped; if that is not enough, each cell becomes a line."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    words = [[word for row in cells for word in row[i].split()] for i in range(len(header))]
    least = [min(max(map(len, column), default=0), _LONGEST) for column in words]  # a path may be broken
    room, gaps = terminal_columns(), 2 * (len(header) - 1)
    if room is not None and sum(least) + gaps + indent > room:
        lines = [part for line in _records(header, rows) for part in _broken(line, room - indent).split("\n")]
    else:
        widths = widths if room is None else _narrowed(widths, least, room - gaps - indent)
        lines = [line for row in cells for line in _lines(row, widths)]
    return "\n".join((" " * indent + line).rstrip() for line in lines)


def facts(values: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    return table(("", ""), [[name, str(value)] for name, value in values.items()]).strip("\n")


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return column widths that fit into ``room``: the widest column is narrowed first, and none below its ``least``."""
    made = list(widths)
    while sum(made) > room:
        _, i = max((width, i) for i, width in enumerate(made) if width > least[i])
        made[i] -= 1
    return made


def _records(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a block of lines per row, each with a column's name and value; empty values are left out."""
    width = max(map(len, header))
    blocks = [[f"{name.ljust(width)}  {cell}" for name, cell in zip(header, row, strict=True) if cell] for row in rows]
    return [line for i, block in enumerate(blocks) for line in ([""] if i else []) + block]


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    parts = [textwrap.wrap(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)]
    height = max(len(part) for part in parts)
    filled = [part + [""] * (height - len(part)) for part in parts]
    return ["  ".join(part[i].ljust(width) for part, width in zip(filled, widths, strict=True)) for i in range(height)]


def pick_device(selector: str | None) -> DeviceHandle:
    """Return the device of the option ``--device``; without the option, that of NETCL_DEVICE or the default."""
    return require(selector or "auto")


@contextmanager
def reported(faults: tuple[type[Exception], ...] = (ValueError, MemoryError)) -> Iterator[None]:
    """Convert ``faults`` and netcl's own ``ImportError`` to :class:`CommandError`, which prints no traceback."""
    try:
        yield
    except faults as fault:
        raise CommandError(str(fault)) from fault
    except ImportError as fault:
        if not str(fault).startswith("["):  # one of netcl's own modules
            raise
        raise CommandError(str(fault)) from fault
