"""The table of functions in upper layers that lower layers call.

A layer imports only what is below it. If core or the engine needs something from above, the upper layer fills an entry of
:data:`hooks`. Examples: a method of ``Tensor`` calls an op with its gradient; a build looks up a stored binary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

AnyFunction = Callable[..., Any]


class BinaryStore(Protocol):
    """Storage for compiled programs that outlives the process."""

    def load(self, key: str) -> bytes | None: ...
    def save(self, key: str, binary: bytes) -> None: ...
    def reject(self, key: str, reason: str) -> None: ...
    def announce_first_run(self) -> None: ...


class Readers(dict[int, Any]):
    """Deferred values by the ``id`` of the lease or array that they still have to read."""

    def compute(self, memory: Any) -> None:
        """Compute the deferred values that read ``memory``, which is about to be written; ``engine.lazy_graph`` overrides this."""


class Hooks:
    """The functions of upper layers that core calls. Lists are never replaced, so a caller may keep one to check whether it is empty."""

    __slots__ = ("binary_store", "launch_observers", "launch_queue", "modes", "op", "readers", "settlers", "upper")
    found: ClassVar[dict[str, AnyFunction]] = {}  # results of ``op`` by name; frequent callers look here first

    def __init__(self) -> None:
        #: Finds a function of autograd by name: an op with its gradient, ``backward``, ``no_grad``. Filled by the root package with an
        #: import, called through :meth:`call` by the methods of Tensor, by views and by compiled functions.
        self.op: Callable[[str], AnyFunction | None] = lambda name: None
        #: Imports a module of an upper layer by its name relative to netcl. Filled by the root package; called once per shape for measured
        #: choices (of ``runtime.tuning``), and by profilers, which add a listener to the data loader.
        self.upper: Callable[[str], Any] = lambda module: None
        #: Compiled programs on disk. Filled by ``runtime.cache``, called by builds.
        self.binary_store: BinaryStore | None = None
        #: Called with kernel, queue, sizes, local sizes, arguments and event after every launch. Filled by recorders and profilers.
        self.launch_observers: list[Callable[..., None]] = []
        #: The queue with timestamps that replaces a queue while it is profiled. Filled by ``profiling.events``, called by launches.
        self.launch_queue: AnyFunction | None = None
        #: Values that must be computed before their inputs are written. Filled by ``engine.lazy_graph``, called by launches and writes.
        self.readers = Readers()
        #: What else a recorded program depends on, compared at every call. Filled by autograd, autocast and the selector, called by
        #: ``runtime.capture``.
        self.modes: list[AnyFunction] = []
        #: Enqueue deferred work, each with an object that is false while there is none. Filled by ``engine.lazy_graph``, ``ops.views`` and
        #: ``ops.random``; called by :meth:`settle` and before replays.
        self.settlers: list[tuple[object, Callable[[], None]]] = []

    def find(self, name: str) -> AnyFunction:
        """Return the function of autograd called ``name``; raises if there is none. Look in ``found`` first: an import takes a lock."""
        function = self.op(name)
        if function is None:
            raise NotImplementedError(f"[{name}] unknown op: no layer of netcl has a function of this name")
        self.found[name] = function
        return function

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the function of autograd called ``name`` and return its result."""
        return (self.found.get(name) or self.find(name))(*args, **kwargs)

    def settle(self) -> None:
        """Enqueue all deferred work of this thread."""
        for waiting, settler in self.settlers:
            if waiting:
                settler()


hooks = Hooks()
