"""Wall time of calls, measured comparably on one machine: warm, interleaved, best and median of several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from netcl.core.device import queue_of, synchronize
from netcl.core.errors import message
from netcl.engine.lazy_graph import flush

MARGIN = 0.97  # a way must take less than this much of the usual one's time to be chosen in its place, or noise would choose


@dataclass(frozen=True)
class Timing:
    """Times of a function: ``rounds`` has the mean seconds per call of each round."""

    rounds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The median relative to the best, minus 1: above 0.2, other work probably slowed the machine down."""
        return self.median / self.best - 1 if self.best else 0.0

    def __str__(self) -> str:
        return f"best {1e3 * self.best:.3f} ms, median {1e3 * self.median:.3f} ms of {len(self.rounds)}"


def measure(function: Callable[[], Any], *, repeat: int = 10, calls: int = 1, warmup: int = 2, queue: Any = None) -> Timing:
    """Return the :class:`Timing` of a call; the device is idle before and finished after each round of ``calls``.

    >>> measure(lambda: sum(range(100)), repeat=3).best > 0
    True
    """
    return compare(repeat=repeat, calls=calls, warmup=warmup, queue=queue, it=function)["it"]


def compare(
    *, repeat: int = 10, calls: int = 1, warmup: int = 2, queue: Any = None, **ways: Callable[[], Any]
) -> dict[str, Timing]:  # fmt: skip
    """Measure functions in turns, so that a slowdown of the machine affects all of them; returns a :class:`Timing` by name.

    >>> times = compare(list=lambda: list(range(1000)), range=lambda: range(1000), repeat=3)
    >>> times["range"].best < times["list"].best
    True
    """
    if repeat < 1 or calls < 1:
        raise ValueError(message("measure", "repeat and calls must be at least 1", repeat=repeat, calls=calls))
    target = queue_of(queue)
    for way in ways.values():
        for _ in range(warmup):
            way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            synchronize(target)
            begin = time.perf_counter()
            for _ in range(calls):
                result = way()
                flush()  # a value that nobody looks at might otherwise never be computed
                del result
            synchronize(target)
            found[name].append((time.perf_counter() - begin) / calls)
    return {name: Timing(tuple(rounds)) for name, rounds in found.items()}
