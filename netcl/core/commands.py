"""A command list: it stands where a queue does, and commands are written down instead of enqueued.

An op allocates memory and enqueues kernels, fills and copies. Over tensors of a command list the same code enqueues nothing: the list
holds what would have been done, over memory that has no address yet. :mod:`netcl.engine.plan` makes a plan of it, which runs over the
memory of any tensors of the same shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from netcl.core import recording


class NotPlannable(Exception):
    """An op does what a plan cannot repeat: it reads values, uploads them, or asks for a queue's own state."""


class Place:
    """Memory that a plan will have: operand ``index`` of a call or, from the number of operands on, memory that the call leases."""

    __slots__ = ("commands", "index", "nbytes", "persistent")
    pool = None

    def __init__(self, commands: CommandList, index: int, nbytes: int):
        self.commands, self.index, self.nbytes, self.persistent = commands, index, nbytes, False

    @property
    def buffer(self) -> Place:
        """A lease has a buffer; a place is both."""
        return self

    @property
    def size(self) -> int:
        """Bytes, as a buffer has them."""
        return self.nbytes


class Launch(NamedTuple):
    """A kernel with its sizes. ``args`` holds numbers, local memory, tensors that were there before, places as ``At`` and
    numbers that runs are given as ``Given``."""

    kernel: Any
    sizes: tuple[int, ...]
    local: tuple[int, ...] | None
    args: tuple[Any, ...]


class At:
    """The memory of a plan at ``index``."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Given:
    """A number that each run is given, at ``index``; the given numbers of a kernel come before its others."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class HostStep(NamedTuple):
    """Everything else: ``run(backend, *buffers)`` over the memory ``at``."""

    run: Callable[..., None]
    at: tuple[Any, ...]
    written: tuple[int, ...] = ()


class PlanningState:
    """``queue.netcl`` of a command list: its own backend, no plans, no random numbers. Every other part is the queue's."""

    def __init__(self, state: Any, commands: CommandList):
        self._state, self.context, self.backend = state, state.context, commands
        self.plans: dict[Any, Any] = {}

    @property
    def random(self) -> Any:
        raise NotPlannable("random numbers")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class CommandList:
    """What an op does over operands of certain types, in order. It is the queue of the operands' tensors, and that queue's backend.

    ``noted`` holds the operands that the op says it changes.
    """

    def __init__(self, queue: Any, pool: Any, operands: int):
        self.queue, self.context, self.device = queue, queue.context, queue.device
        self.netcl = PlanningState(queue.netcl, self)
        self.pool, self.operands = pool, operands
        self.commands: list[Launch | HostStep] = []
        self.leased: list[tuple[Any, int]] = []  # the shelf of each piece of memory that is no operand, and its bytes
        self.given: list[Any] = []  # the operands' tensors
        self.noted: set[int] = set()

    @property
    def int_ptr(self) -> int:
        """That of the queue: device handles are found by it."""
        return self.queue.int_ptr

    def finish(self) -> None:
        raise NotPlannable("waits for the device")

    # ---- as a backend

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Place:
        """Memory that every run leases."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.leased.append((self.pool.shelf(nbytes), nbytes))
        return Place(self, self.operands + len(self.leased) - 1, nbytes)

    def fill(self, buffer: Any, nbytes: int, dtype: Any, value: float = 0) -> None:
        """Every element of the first ``nbytes`` gets ``value``."""
        at = self._at(buffer)
        self.commands.append(HostStep(lambda backend, target: backend.fill(target, nbytes, dtype, value), (at,), (at.index,)))

    def clone(self, storage: Any, shape: tuple[int, ...], dtype: Any) -> Place:
        """Memory with the same values."""
        made = self.empty(shape, dtype)
        if made.nbytes:
            self.copy_bytes(made, getattr(storage, "buffer", storage), made.nbytes)
        return made

    def copy_bytes(self, target: Any, source: Any, nbytes: int) -> None:
        """Copy the first bytes of a buffer to another."""
        to, of = self._at(target), self._at(source)
        self.commands.append(HostStep(lambda backend, a, b: backend.copy_bytes(a, b, nbytes), (to, of), (to.index,)))

    def _no(self, *args: Any, **options: Any) -> Any:
        raise NotPlannable("values are read or uploaded")

    send = write = fill_bytes = upload_bytes = to_host = to_host_async = wait = _no

    # ---- as a queue

    def launch(self, kernel: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: tuple[Any, ...]) -> None:
        """Write down a kernel; called by the kernel, which has checked its arguments."""
        self.commands.append(Launch(kernel, sizes, local, tuple(self._argument(arg) for arg in args)))

    def _argument(self, arg: Any) -> Any:
        memory = getattr(arg, "buffer", arg)
        return self._at(memory) if type(memory) is Place else arg

    def _at(self, memory: Any) -> At:
        if type(memory) is not Place or memory.commands is not self:
            raise NotPlannable("memory from outside is written")
        return At(memory.index)


class Notes:
    """The recorder of the thread while a list is written: what ops tell a recorder (:mod:`netcl.core.recording`) goes into the list."""

    def __init__(self, commands: CommandList):
        self.commands = commands

    def allocated(self, handle: Any) -> None:
        """A constant of the op, made on the queue itself."""

    def changed(self, tensors: Iterable[Any]) -> None:
        self.commands.noted |= {t.buffer.index for t in tensors if type(t.buffer) is Place and t.buffer.index < self.commands.operands}

    def again(self, function: Callable[[], Any], undo: Callable[[], None] | None = None) -> None:
        """A step of the host that every run repeats; what it returns cannot be used."""
        self.commands.commands.append(HostStep(lambda backend: recording.again(function, undo), ()))

    def made(self, tensor: Any) -> bool:
        return type(tensor.buffer) is Place and tensor.buffer.index >= self.commands.operands

    def _no(self, *args: Any, **options: Any) -> Any:
        raise NotPlannable("the host looks at values or changes them")

    upload = fill = copy = read = host_work = depends = leaf = check = requires = _no


def device_queue(queue: Any) -> Any:
    """The queue itself, or the one that the commands of a list are for: probes of kernels run there."""
    return queue.queue if type(queue) is CommandList else queue
