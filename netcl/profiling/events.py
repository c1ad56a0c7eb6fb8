"""Device time of kernels: observes launches and reads the driver's timestamps.

A queue that was made with ``NETCL_PROFILE_EVENTS=1`` has timestamps and is observed directly. Launches on any other queue are
redirected, one at a time, to a second queue with timestamps: device times are exact, but the host waits.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from netcl.core import platforms
from netcl.core.backend.opencl import transfer_listeners
from netcl.core.device import CPUQueue, handle_of, queue_of, synchronize
from netcl.core.hooks import hooks
from netcl.core.kernels import signature
from netcl.core.queue_state import queue_state
from netcl.engine.lazy_graph import flush
from netcl.runtime.scheduler import sibling_queue


@dataclass(frozen=True)
class Launch:
    """A kernel or transfer. Times are seconds since observation began, ``bytes`` counts each buffer once, ``flops`` is 0 if unknown."""

    name: str
    queue: str
    start: float
    end: float
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    bytes: int
    flops: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def has_timestamps(queue: Any) -> bool:
    """Whether events of a queue have timestamps of their start and end."""
    return bool(queue.properties & platforms.opencl().command_queue_properties.PROFILING_ENABLE)


def timed_queue(queue: Any) -> Any:
    """Return ``queue`` if it has timestamps; else wait for its work and return a second queue that has them."""
    twin = queue_state(queue).part("timed", lambda real: real if has_timestamps(real) else sibling_queue(real, profiling=True))
    if twin is not queue:
        queue.finish()
    return twin


class Observer:
    """Collects launches of all threads between :meth:`begin` and :meth:`end`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.transfers: list[Launch] = []
        self.host: list[tuple[str, float, float]] = []  # for each command: what the host did since the one before until it was enqueued
        self._running: list[tuple[list[Launch], Launch, Any, float]] = []
        self._offsets: dict[int, float] = {}
        self._origin, self._idle = 0.0, threading.local()
        self._redirected = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Enqueue deferred work and start observing; all times are relative to this moment."""
        flush()
        self._origin = time.perf_counter()
        hooks.launch_observers.append(self._launched)
        transfer_listeners.append(self._transferred)
        if hooks.launch_queue is None:
            hooks.launch_queue, self._redirected = timed_queue, True

    def end(self) -> None:
        """Enqueue deferred work, stop observing and read the remaining times."""
        flush()
        hooks.launch_observers.remove(self._launched)
        transfer_listeners.remove(self._transferred)
        if self._redirected:
            hooks.launch_queue, self._redirected = None, False
        for found, launch, event, offset in self._running:
            found.append(_with_times(launch, event, offset))
        self._running.clear()
        self.launches.sort(key=lambda launch: launch.start)

    def _launched(self, kernel: Any, queue: Any, sizes: tuple[int, ...], local: Any, args: tuple[Any, ...], event: Any) -> None:
        self._note_host(kernel.name)
        launch = Launch(kernel.name, handle_of(queue).device_name, 0.0, 0.0, tuple(sizes), local, *work_of(kernel, args))
        self._add(self.launches, launch, queue, event, timed_queue(queue) is not queue)

    def _transferred(self, queue: Any, name: str, nbytes: int, began: float, event: Any) -> None:
        self._note_host(name)
        copy = Launch(name, handle_of(queue).device_name, began - self._origin, 0.0, (), None, nbytes, 0.0)
        if event is not None and has_timestamps(queue):
            self._add(self.transfers, copy, queue, event, False)
            return
        if event is not None:
            event.wait()
        self.transfers.append(replace(copy, end=time.perf_counter() - self._origin))
        self._idle.since = time.perf_counter()

    def _add(self, found: list[Launch], launch: Launch, queue: Any, event: Any, at_once: bool) -> None:
        """Record a command; if ``at_once``, wait for it and read its times, else :meth:`end` reads them."""
        if at_once or id(queue) not in self._offsets:
            event.wait()
        with self._lock:
            offset = self._offsets.get(id(queue))
            if offset is None:  # the device's clock against the host's: this command has just ended
                offset = self._offsets[id(queue)] = time.perf_counter() - self._origin - 1e-9 * event.profile.end
            if at_once:
                found.append(_with_times(launch, event, offset))
            else:
                self._running.append((found, launch, event, offset))
        self._idle.since = time.perf_counter()

    def _note_host(self, name: str) -> None:
        now = time.perf_counter()
        since = max(getattr(self._idle, "since", now), self._origin)
        self.host.append((name, since - self._origin, now - self._origin))


def _with_times(launch: Launch, event: Any, offset: float) -> Launch:
    event.wait()
    start, end = (1e-9 * t + offset for t in (event.profile.start, event.profile.end))
    return replace(launch, start=start, end=end)


_LAST_WORD = re.compile(r"\w+(?=\W*\Z)")
_POINTED = re.compile(r"(\w+)\s*\*")
_ITEM = {"char": 1, "uchar": 1, "half": 2, "short": 2, "ushort": 2, "long": 8, "ulong": 8, "double": 8}
#: How many products over the depth of queries, and over that of values, a kernel of attention makes.
_ATTENTION = {"attention": (1, 1), "attention_query_grad": (2, 1), "attention_key_grad": (2, 2)}


def work_of(kernel: Any, args: Sequence[Any]) -> tuple[int, float]:
    """Return the bytes of a launch's buffers, each counted once, and its floating-point operations, 0 if they are unknown.

    Arguments in device memory are tensors, other objects with ``buffer`` and ``nbytes`` (values of a replayed graph), or buffers.
    """
    memory = {id(getattr(arg, "buffer", None) or arg): _bytes(arg) for arg in args if _bytes(arg)}
    source = kernel.program.source
    declared = signature.parameters(source, kernel.name) or ()
    given = {_LAST_WORD.search(part)[0]: (part, arg) for part, arg in zip(declared, args, strict=False)}  # type: ignore[index]
    return sum(memory.values()), _flops(kernel.name, source, given)


def _bytes(arg: Any) -> int:
    if hasattr(arg, "buffer"):
        return int(arg.nbytes)
    return int(arg.size) if hasattr(arg, "hostbuf") else 0


def _flops(name: str, source: str, given: Mapping[str, tuple[str, Any]]) -> float:
    """Return the floating-point operations of a product, a convolution or attention; 0 for other kernels."""
    if name.startswith("gemm") or name == "matmul":
        k = _number(given, "k") or _number(given, "K")
        return 2.0 * k * max(_elements(source, given, "c"), _elements(source, given, "C"))
    if name.startswith("conv"):
        sizes = [_number(given, key) for key in ("N", "C", "M", "OH", "OW", "KH", "groups")]
        return 2.0 * math.prod(sizes) * (_number(given, "KW") or _number(given, "apart"))
    if name in _ATTENTION:
        depth, depth_v = (_number(given, key) or _number(given, other) for key, other in (("depth", "size"), ("depth_v", "size_v")))
        n, m, causal = (_number(given, key) for key in ("n", "m", "causal"))
        cut = min(n, m)  # queries that do not see all keys, the first of them one
        keys = (cut * (cut + 1) / 2 + (n - cut) * m) / n if causal and n else m
        pairs = _elements(source, given, "q") / max(depth, 1) * keys
        return 2.0 * pairs * (_ATTENTION[name][0] * depth + _ATTENTION[name][1] * depth_v)
    return 0.0


def _number(given: Mapping[str, tuple[str, Any]], name: str) -> int:
    _, arg = given.get(name, ("", 0))
    return int(arg) if isinstance(arg, (int, float)) else 0


def _elements(source: str, given: Mapping[str, tuple[str, Any]], name: str) -> int:
    """Return the number of elements of the argument ``name``, from its bytes and declared type; 0 if it is not a pointer."""
    declared, arg = given.get(name, ("", 0))
    pointed = _POINTED.search(declared)
    if pointed is None:
        return 0
    macro = re.search(rf"^#define {pointed[1]} (\w+)$", source, re.M)
    return _bytes(arg) // _ITEM.get(macro[1] if macro else pointed[1], 4)


class EventTimer:
    """A context manager that measures the device time of a block.

    After ``with EventTimer(queue) as timer: ...``, ``timer.seconds`` is the sum of all kernel times by the driver's timestamps.
    ``timer.wall`` is the time on the host until the kernels were done. On the NumPy backend both are the time on the host.

    >>> with EventTimer() as timer:
    ...     pass
    >>> timer.seconds <= timer.wall
    True
    """

    def __init__(self, queue: Any = None):
        self.queue = queue_of(queue)
        self.seconds = self.wall = 0.0
        self.launches: list[Launch] = []
        self._observer: Observer | None = None
        self._began = 0.0

    def __enter__(self) -> EventTimer:
        synchronize(self.queue)
        if not isinstance(self.queue, CPUQueue):
            self._observer = Observer()
            self._observer.begin()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        synchronize(self.queue)
        self.wall = self.seconds = time.perf_counter() - self._began
        if self._observer is not None:
            self._observer.end()
            self.launches = self._observer.launches
            self.seconds = sum(launch.seconds for launch in self.launches)
