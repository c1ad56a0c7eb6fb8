"""Wall time of named parts of a program, in counters. A timed region can wait until a device has finished its work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from netcl.core.device import synchronize
from netcl.core.errors import DeviceError, message

#: Told (name, begin, end) of every region that ends, in seconds of ``time.perf_counter``; a trace listens here.
listeners: list[Callable[[str, float, float], None]] = []


@dataclass
class Total:
    """The statistics of all regions with one name: number of calls, total, shortest and longest time in seconds."""

    calls: int = 0
    seconds: float = 0.0
    shortest: float = float("inf")
    longest: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.calls if self.calls else 0.0


class PerfCounter:
    """Adds up the time spent in regions, by name; safe to share between threads.

    >>> counter = PerfCounter()
    >>> for _ in range(3):
    ...     with counter.region("load"):
    ...         pass
    >>> counter["load"].calls
    3
    """

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Count one call that took ``seconds``."""
        with self._lock:
            total = self.totals.setdefault(name, Total())
            total.calls += 1
            total.seconds += seconds
            total.shortest, total.longest = min(total.shortest, seconds), max(total.longest, seconds)

    def region(self, name: str, queue: Any = None) -> Any:
        """Return a context manager that counts the time of a block in this counter; see :func:`timing_region`."""
        return timing_region(name, self, queue)

    def reset(self) -> None:
        """Remove the totals of all regions."""
        with self._lock:
            self.totals.clear()

    def __getitem__(self, name: str) -> Total:
        return self.totals[name]

    def __str__(self) -> str:
        rows = [f"{'region':24} {'calls':>7} {'total ms':>10} {'mean ms':>10} {'shortest':>10} {'longest':>10}"]
        for name, t in sorted(self.totals.items(), key=lambda item: -item[1].seconds):
            times = (t.seconds, t.mean, t.shortest, t.longest)
            rows.append(f"{name:24} {t.calls:7d} " + " ".join(f"{1e3 * seconds:10.3f}" for seconds in times))
        return "\n".join(rows)


#: Where :func:`timing_region` counts unless it is given a counter.
counter = PerfCounter()


@contextmanager
def timing_region(name: str, into: PerfCounter | None = None, queue: Any = None) -> Iterator[None]:
    """Count the wall time of a block under ``name``, in ``into`` or in this module's ``counter``.

    With ``queue`` (a device handle, or anything that has ``finish()``) the region begins when the device is idle and ends when the
    device has finished the work of the block. Without ``queue``, only host time counts: a launch takes as long as its enqueueing.

    >>> mine = PerfCounter()
    >>> with timing_region("forward", mine):
    ...     pass
    >>> mine["forward"].calls
    1
    """
    _finish_queue(queue)
    begin = time.perf_counter()
    try:
        yield
    finally:
        _finish_queue(queue)
        end = time.perf_counter()
        (counter if into is None else into).add(name, end - begin)
        for listener in listeners:
            listener(name, begin, end)


def _finish_queue(queue: Any) -> None:
    if queue is None:
        return
    target = getattr(queue, "queue", queue)
    if not hasattr(target, "finish"):
        raise DeviceError(message("timing_region", "queue must be a queue or a device handle", "pass handle.queue", queue=repr(queue)))
    synchronize(target)
