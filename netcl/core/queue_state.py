"""The state that netcl keeps per OpenCL context and per queue.

A context owns its programs and the caches of ops (:class:`ContextState`). A queue carries one object, ``queue.netcl``
(:class:`QueueState`), whose parts are made at first use by the modules that own them.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

from netcl.core import host_memory, platforms
from netcl.core.capabilities import device_profile


class ContextState(dict):
    """The programs and limits of one context; as a dict, it holds the values that ops cache for the context."""

    def __init__(self, context: Any):
        super().__init__()
        self.cl = platforms.opencl()
        self.device = context.devices[0]
        self.quirks = {quirk.name for quirk in device_profile(self.device).quirks}
        self.profile: Any = None  # set by core.device, which also probes half arithmetic
        self.programs: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.queues: weakref.WeakSet[QueueState] = weakref.WeakSet()
        self.lock = threading.RLock()
        self.max_work_group = int(self.device.max_work_group_size)
        self.max_items = tuple(int(n) for n in self.device.max_work_item_sizes)
        platform = self.device.platform.name
        self.fragile = "rusticl" in platform.lower()  # its compiler may abort the process, see kernels.probe
        # PoCL aborts the process instead of rejecting a launch. Other drivers reject it; NVIDIA's allows more than local_mem_size.
        self.local_limit = int(self.device.local_mem_size) if platform == "Portable Computing Language" else math.inf
        # GPU drivers take up to a third of a launch for its event; those of CPUs are no slower with one.
        gpu = self.device.type & self.cl.device_type.GPU
        self.eventless = platforms.loader_function("clEnqueueNDRangeKernel") if gpu else None


class QueueState:
    """The state of one queue, OpenCL's or NumPy's. A part that has not been created is an empty slot.

    - ``context``: the :class:`ContextState`; ``None`` on the NumPy backend.
    - ``plans``: the plans of op calls, by their keys (:mod:`netcl.engine.plan`).
    - ``backend``, ``pool``, ``pinned``, ``integrated``: transfers, device memory, staging memory, whether host and device share memory.
    - ``faults``, ``random``: indices out of range (:mod:`netcl.ops.index`), the stream of random numbers (:mod:`netcl.ops.random`).
    - ``timed``, ``blocks``: the queue with timestamps (:mod:`netcl.profiling.events`), memory that graphs share.
    - ``turns``: numbers by which the work-items of a launch divide its work (:mod:`netcl.engine.waiting`).
    """

    __slots__ = ("__weakref__", "backend", "blocks", "context", "faults", "integrated", "lock", "pinned", "plans", "pool", "queue",
                 "random", "timed", "turns")  # fmt: skip

    def __init__(self, queue: Any, context: ContextState | None = None):
        self.queue, self.context = queue, context
        self.plans: dict[Any, Any] = {}
        self.lock = threading.RLock() if context is None else context.lock
        if context is not None:
            with _states_lock:
                context.queues.add(self)

    def part(self, name: str, make: Callable[[Any], Any]) -> Any:
        """Return the part ``name``; ``make(queue)`` creates it at first use."""
        try:
            return getattr(self, name)
        except AttributeError:
            with self.lock:
                if not hasattr(self, name):
                    setattr(self, name, make(self.queue))
                return getattr(self, name)


_contexts: weakref.WeakKeyDictionary[Any, ContextState] = weakref.WeakKeyDictionary()
pools: weakref.WeakSet[Any] = weakref.WeakSet()  # of device memory and of staging memory
_states_lock = threading.Lock()


def context_state(context: Any) -> ContextState:
    """Return the state of a context, created at first use."""
    with _states_lock:
        if context not in _contexts:
            _contexts[context] = ContextState(context)
        return _contexts[context]


def queue_state(queue: Any) -> QueueState:
    """Return the state of a queue. It is created at first use and stored on the queue: a look-up by context costs a microsecond."""
    try:
        return queue.netcl
    except AttributeError:
        shared = context_state(queue.context)
        with shared.lock:
            if not hasattr(queue, "netcl"):
                queue.netcl = QueueState(queue, shared)
            return queue.netcl


def queues() -> list[Any]:
    """List every OpenCL queue in use."""
    with _states_lock:
        return [state.queue for context in _contexts.values() for state in context.queues]


def free_memory() -> None:
    """Return free buffers of all pools to their drivers, page-locked ones included, and free memory of the C library to the system."""
    for pool in list(pools):
        pool.clear()
    host_memory.release_unused()


def forget(key: Any) -> None:
    """Delete the entry ``key`` from the cache of every context; ``"plans"`` also deletes the plans of all queues."""
    with _states_lock:
        for context in _contexts.values():
            context.pop(key, None)
            for state in list(context.queues) if key == "plans" else ():
                state.plans.clear()
