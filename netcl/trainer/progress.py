"""Progress display: one line that is redrawn on a terminal and in a notebook, plain ASCII lines everywhere else."""

from __future__ import annotations

import hashlib
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from netcl.core import env
from netcl.core.errors import message
from netcl.core.kernels import program
from netcl.runtime.cache import program_cache
from netcl.trainer.callbacks import Callback, Logs

STYLES = ("auto", "bar", "plain", "off")
_PLAIN_SECONDS = 5.0  # between two plain lines of one epoch
_FIRST_SECONDS = 1.5  # until the first of them: compilers take longer
_TICK_SECONDS = 0.25  # between two states of a moving line
_BAR = 20  # columns of the bar, where there is room for it


def numbers_line(logs: Mapping[str, Any]) -> str:
    """Return the numbers of logs in one line: ``loss 0.4031  accuracy 0.8912``.

    >>> numbers_line({"epoch": 3, "loss": 0.403123, "lr": 0.0003})
    'loss 0.4031  lr 0.0003'
    """
    shown = {name: value for name, value in logs.items() if name not in ("epoch", "batch", "seconds", "samples_per_second")}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float))


def clock_text(seconds: float) -> str:
    """Return seconds as ``1:05`` or ``2:01:05``.

    >>> clock_text(65.4), clock_text(7265)
    ('1:05', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress(Callback):
    """Shows the progress of a run on ``stream`` (standard error): phase, speed, remaining time, and the kernel being compiled.

    ``style`` is ``auto`` (one redrawn line on a terminal and in a notebook, plain lines elsewhere), ``bar``, ``plain`` or ``off``; by
    default the value of ``NETCL_PROGRESS``. A trainer adds this callback unless it is given one. A thread redraws the line, also while
    a compiler runs, and reads nothing from the device.
    """

    def __init__(self, style: str | None = None, stream: TextIO | None = None):
        self.style = env.value("NETCL_PROGRESS") if style is None else style
        if self.style not in STYLES:
            raise ValueError(message("Progress", "style must be auto, bar, plain or off", style=repr(self.style)))
        self.stream = stream
        self._moves = False
        self._numbers = self._shown = ""
        self._began = self._said = time.monotonic()
        self._kind, self._programs, self._needed, self._number = "", 0, 0, 0  # of runs like this; made before; needed, or 0; being compiled
        self._pace = _Pace()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._ticker: threading.Thread | None = None

    def on_train_begin(self, logs: Logs) -> None:
        stream = self._out = self.stream or sys.stderr
        if stream is None or getattr(stream, "closed", False):
            self.style = "off"
        if self.style == "off":
            return
        model = self.trainer.model
        parameters = [(p.shape, p.dtype, p.device.device_name) for p in model.parameters()]  # other ones have other kernels
        self._kind = f"{type(model).__name__} {hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]}"
        self._programs = program.program_count()
        self._needed = program_cache.needed(self._kind)
        notebook = type(stream).__module__.startswith("ipykernel")
        self._moves = self.style == "bar" or (self.style == "auto" and (stream.isatty() or notebook))
        self._began = time.monotonic()
        self._said = self._began - _PLAIN_SECONDS + _FIRST_SECONDS
        self._pace, self._numbers, self._number = _Pace(), "", 0
        self._ended.clear()
        self._ticker = threading.Thread(target=self._tick, name="netcl-progress", daemon=True)
        self._ticker.start()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.trainer.log_due and self.style != "off":
            self._numbers = numbers_line(logs)
            self._pace.note(self.trainer)
            self.show()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._numbers = ""
        self._say(f"{self._title(epoch)}  {numbers_line(logs)}  ({logs['seconds']:.1f} s)")

    def close(self) -> None:
        self._ended.set()
        if self._ticker is not None and self._ticker is not threading.current_thread():
            self._ticker.join()
            program_cache.remember(self._kind, program.program_count() - self._programs)
        self._ticker = None
        self._clear()

    def on_interrupt(self, logs: Logs) -> None:
        self._say(f"interrupted after step {self.trainer.step}")

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self.show()

    def show(self) -> None:
        """Redraw the moving line, or write a plain line if the last one is more than 5 seconds old."""
        if self.style == "off":
            return
        if self._moves:
            columns = shutil.get_terminal_size((80, 24)).columns - 1
            self._write(f"\r{self.state(columns)[:columns].ljust(len(self._shown))}", moving=True)
        elif time.monotonic() - self._said > _PLAIN_SECONDS:
            self._say(self.state())

    def state(self, columns: int | None = None) -> str:
        """Return the current state in one line; parts that exceed ``columns`` are left out, except the first two."""
        trainer = self.trainer
        done, of = trainer.batch, trainer.batches
        count = f"{done}/{of}" if of else f"batch {done}"
        clock = self._pace.left(trainer) or f"{clock_text(time.monotonic() - self._began)} so far"
        parts = [f"{self._title(trainer.epoch)} {count}", self.phase(), clock, self._pace.speed, self._numbers]
        parts = [part for part in parts if part]
        if of and columns is not None and columns >= 100:
            full = _BAR * done // of
            parts.insert(1, f"[{'#' * full}{'.' * (_BAR - full)}]")
        while columns is not None and len(parts) > 2 and len("  ".join(parts)) > columns:
            parts.pop()
        return "  ".join(parts)

    def phase(self) -> str:
        """Return the current phase: ``training``, ``validating``, ``saving``, or the kernel being compiled."""
        now = program.compiling()
        if now is None:
            return self.trainer.phase
        self._number = max(self._number, now[0] - self._programs)  # a driver that compiles at launch is behind the builds
        about = f" of about {self._needed}" if self._number <= self._needed else ""
        return f"compiling {self._number}{about}: {now[1].partition(',')[0].replace('_', ' ')}"

    def _title(self, epoch: int) -> str:
        return f"epoch {min(epoch + 1, self.trainer.epochs)}/{self.trainer.epochs}"

    def _say(self, text: str) -> None:
        """Write a line, wrapped if the terminal is too narrow for it."""
        if self.style == "off":
            return
        self._clear()
        if self._out.isatty():
            columns = shutil.get_terminal_size((80, 24)).columns
            text = textwrap.fill(text, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        self._write(text + "\n")
        self._said = time.monotonic()

    def _clear(self) -> None:
        """Remove the progress line from the terminal."""
        if self._shown:
            self._write(f"\r{' ' * len(self._shown)}\r")

    def _write(self, text: str, moving: bool = False) -> None:
        with self._lock:
            if moving and self._ended.is_set():
                return
            self._shown = text[1:].rstrip() if moving else ""
            try:
                self._out.write(text)
                self._out.flush()
            except (OSError, ValueError):  # its reader is gone (`| head`, a closed terminal), or it was closed: the run goes on without
                self.style = "off"


class _Pace:
    """Measures the speed of the epoch and the remaining time, from the first logged batch on: by then most kernels are compiled."""

    def __init__(self) -> None:
        self._notes: list[tuple[float, int, int, int]] = []  # the first of the run, the first of the epoch, the last

    def note(self, trainer: Any) -> None:
        """Store the time, the epoch, the batches of the run and the samples of the epoch so far; call this when the device is idle."""
        now = (time.monotonic(), trainer.epoch * (trainer.batches or 0) + trainer.batch, trainer.samples, trainer.epoch)
        first, epoch, _ = self._notes or (now, now, now)
        self._notes = [first, epoch if epoch[3] == trainer.epoch else now, now]

    @property
    def speed(self) -> str:
        if not self._notes or self._notes[2][0] <= self._notes[1][0]:
            return ""
        _, epoch, last = self._notes
        return f"{(last[2] - epoch[2]) / (last[0] - epoch[0]):.3g} samples/s"

    def left(self, trainer: Any) -> str:
        """Return the remaining time of the run at this speed, from now; empty until it is known."""
        if not self._notes or not trainer.batches or self._notes[2][1] <= self._notes[0][1]:
            return ""
        first, _, last = self._notes
        end = last[0] + (last[0] - first[0]) / (last[1] - first[1]) * (trainer.epochs * trainer.batches - last[1])
        return f"ETA {clock_text(max(0.0, end - time.monotonic()))}"
