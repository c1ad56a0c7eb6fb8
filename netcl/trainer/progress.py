"""Progress: a bar that moves on a terminal, plain ASCII lines everywhere else."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, TextIO

from netcl.core import env
from netcl.core.errors import message
from netcl.trainer.callbacks import Callback, Logs

WIDE = 100  # columns from which a bar has room beside the numbers
_PLAIN_SECONDS = 10.0  # between two plain lines of one epoch


def numbers_line(logs: Mapping[str, Any]) -> str:
    """The numbers of logs in one line: ``loss 0.4031  accuracy 0.8912``.

    >>> numbers_line({"epoch": 3, "loss": 0.403123, "lr": 0.0003})
    'loss 0.4031  lr 0.0003'
    """
    shown = {name: value for name, value in logs.items() if name not in ("epoch", "batch", "seconds", "samples_per_second")}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float))


class Progress(Callback):
    """Shows how far a run is, on ``stream`` (standard error).

    ``style`` is ``auto`` (rich on a terminal, if it is installed; plain lines elsewhere), ``rich``, ``plain`` or ``off``; by default what
    ``NETCL_PROGRESS`` says. Trainers have one unless they are given another.
    """

    def __init__(self, style: str | None = None, stream: TextIO | None = None):
        self.style = env.value("NETCL_PROGRESS") if style is None else style
        if self.style not in ("auto", "rich", "plain", "off"):
            raise ValueError(message("Progress", "style is auto, rich, plain or off", style=repr(self.style)))
        self.stream = stream
        self._bar: _Bar | None = None
        self._said = 0.0

    def on_train_begin(self, logs: Logs) -> None:
        stream = self._out = self.stream or sys.stderr
        if stream is None or getattr(stream, "closed", False):
            self.style = "off"
            return
        if self.style == "rich" and find_spec("rich") is None:
            raise ImportError(message("Progress", "rich is not installed", "pip install rich, or style='plain'"))
        rich = self.style == "rich" or (self.style == "auto" and stream.isatty() and find_spec("rich") is not None)
        self._bar = _Bar(stream) if rich else None
        self._said = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self._bar:
            self._bar.begin(self._title(epoch), self.trainer.batches)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if not self.trainer.log_due or self.style == "off":
            return
        if self._bar:
            self._bar.move(batch + 1, numbers_line(logs))
        elif time.monotonic() - self._said > _PLAIN_SECONDS:
            of = f"/{self.trainer.batches}" if self.trainer.batches else ""
            self._say(f"{self._title(self.trainer.epoch)}, batch {batch + 1}{of}: {numbers_line(logs)}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._bar:
            self._bar.end()
        self._say(f"{self._title(epoch)}  {numbers_line(logs)}  ({logs['seconds']:.1f} s)")

    def on_train_end(self, logs: Logs) -> None:
        if self._bar:
            self._bar.end()

    def on_interrupt(self, logs: Logs) -> None:
        self.on_train_end(logs)
        self._say(f"interrupted after step {self.trainer.step}")

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.trainer.epochs}"

    def _say(self, text: str) -> None:
        """A line, broken between numbers where a terminal is too narrow for it."""
        if self.style == "off":
            return
        if self._out.isatty():
            columns = shutil.get_terminal_size((80, 24)).columns
            text = textwrap.fill(text, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except OSError:  # its reader is gone (`| head`, a closed terminal): the run goes on without
            self.style = "off"
        self._said = time.monotonic()


class _Bar:
    """A bar of rich. It disappears when the epoch ends, where its line takes its place."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=stream)
        wide = console.width >= WIDE
        columns = [
            TextColumn("{task.description}"),
            *([BarColumn()] if wide else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        ]
        self._make = lambda: RichProgress(*columns, console=console, transient=True)
        self._live: Any = None
        self._task: Any = None

    def begin(self, title: str, total: int | None) -> None:
        self.end()
        self._live = self._make()
        self._live.start()
        self._task = self._live.add_task(title, total=total, numbers="")

    def move(self, done: int, numbers: str) -> None:
        self._live.update(self._task, completed=done, numbers=numbers)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
