"""``profile()``: measures the kernels of a block and shows them as a table, a trace and a page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from netcl.core.device import get_active_device, require, synchronize
from netcl.core.errors import message
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.profiling import report, trace
from netcl.profiling.events import Launch, Observer
from netcl.profiling.report import KernelRow
from netcl.profiling.roofline import limits
from netcl.runtime import perf


class profile:
    """Profiles a block, ``with profile() as p: step()``; ``print(p)`` then shows time, GB/s, GFLOP/s and share of every kernel.

    All launches during the block are recorded, on all devices and threads. The last column compares a kernel with the limits of
    ``device`` (default: the active one); ``roofline=False`` leaves out that column and the small kernels that measure
    the limits once per context. The trace shows the kernels and transfers of each device. For the host, it shows launches, compiled
    programs, batches of a ``DataLoader``, phases of a ``Trainer`` and regions of :func:`netcl.runtime.perf.timing_region`.

    Unless the queues were made with ``NETCL_PROFILE_EVENTS=1``, kernels run one at a time inside the block: their times are exact,
    but the times between them are not those of an ordinary run. Outside the block, nothing is observed.
    """

    def __init__(self, device: Any = None, *, roofline: bool = True):
        self.device = get_active_device() if device is None else require(device, op="profile")
        self.roofline = roofline
        self.seconds = 0.0
        self.events: list[Launch] = []
        self.transfers: list[Launch] = []
        self.spans: list[trace.Span] = []
        self._observer: Observer | None = None
        self._began = 0.0
        self._rows: list[KernelRow] | None = None
        self._listening: list[tuple[list[Any], Callable[..., None]]] = []

    def __enter__(self) -> profile:
        if self._observer is not None:
            raise RuntimeError(message("profile", "a running profile must not be started again", "create another profile()"))
        synchronize(self.device)
        self._observer, self._rows = Observer(), None
        loader = hooks.upper(".data.dataloader")
        lanes = {"regions": perf.listeners, "compile": program.build_listeners, "loader": loader.batch_listeners}
        self._listening = [(listeners, partial(self._note, lane)) for lane, listeners in lanes.items()]
        for listeners, note in self._listening:
            listeners.append(note)
        self._began = time.perf_counter()
        self._observer.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._observer is not None
        synchronize(self.device)
        self.seconds += time.perf_counter() - self._began
        self._observer.end()
        for listeners, note in self._listening:
            listeners.remove(note)
        self.events += self._observer.launches
        self.transfers += self._observer.transfers
        self.spans += [trace.Span(*span, "launches") for span in self._observer.host]
        self._observer = None

    @property
    def running(self) -> bool:
        """Whether the block is running."""
        return self._observer is not None

    def _note(self, lane: str, name: str, begin: float, end: float) -> None:
        self.spans.append(trace.Span(name, begin - self._began, end - self._began, lane))

    @property
    def rows(self) -> list[KernelRow]:
        """One row per kernel, the longest first."""
        if self._rows is None:
            known = limits(self.device.queue) if self.roofline and self.events else None
            self._rows = report.rows_of(self.events, known)
        return self._rows

    def table(self) -> str:
        """Return the rows as text, below a summary line."""
        return f"{self.summary()}\n{report.text_table(self.rows)}"

    __str__ = table

    def summary(self) -> str:
        """Return a line with the number of launches, their time and the device."""
        busy = sum(launch.seconds for launch in self.events)
        return f"{len(self.events)} launches, {1e3 * busy:.3f} ms in kernels of {1e3 * self.seconds:.3f} ms, on {self.device.profile.title}"

    def to_dict(self) -> dict[str, Any]:
        """Return the device, the seconds and the rows as plain values, for a file."""
        return {"device": self.device.device_name, "seconds": self.seconds, "rows": [asdict(row) for row in self.rows]}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing."""
        found = {"traceEvents": trace.events(self.events, self.spans, self.transfers), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(found), encoding="utf-8")

    def save_report(self, path: str | os.PathLike[str], title: str = "netcl profile") -> None:
        """Write the table as a self-contained HTML page."""
        report.save_report(path, self.rows, title, self.summary())
