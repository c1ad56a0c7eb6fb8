"""A command list takes the place of a queue and collects commands instead of enqueuing them.

An op allocates memory and enqueues kernels, fills and copies. On tensors of a command list, the same code appends these commands to the
list, over memory that has no address yet. :mod:`netcl.engine.plan` turns the list into a plan for operands of the same shapes and dtypes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from netcl.core import recording

_constants: dict[int, weakref.ref[Any]] = {}  # by id: tensors compare element by element


def constant(tensor: Any) -> Any:
    """Mark a tensor of netcl whose memory never changes, such as a table, so that plans may contain its buffer. Returns the tensor."""
    _constants[id(tensor)] = weakref.ref(tensor)
    return tensor


class NotPlannable(Exception):
    """Raised when an op does something that a plan cannot repeat, such as reading or uploading values, or drawing random numbers."""


class PlannedMemory:
    """Memory of a plan, without an address. The operands of the call have the first indices; each run leases memory for higher indices."""

    __slots__ = ("commands", "index", "nbytes", "persistent")
    pool = None

    def __init__(self, commands: CommandList, index: int, nbytes: int):
        self.commands, self.index, self.nbytes, self.persistent = commands, index, nbytes, False

    @property
    def buffer(self) -> PlannedMemory:
        """This object: it takes the place of the lease and of its buffer."""
        return self

    @property
    def size(self) -> int:
        """The size in bytes, under the name that buffers use."""
        return self.nbytes


class Launch(NamedTuple):
    """A planned launch. ``args`` holds numbers, local memory, constants, memory of the plan (``At``) and numbers of a run (``Given``)."""

    kernel: Any
    sizes: tuple[int, ...]
    local: tuple[int, ...] | None
    args: tuple[Any, ...]


class At(NamedTuple):
    """An argument of a planned launch: memory of the plan, by its place."""

    place: int


class Given(NamedTuple):
    """An argument of a planned launch: the index of a number that each run passes. A kernel takes such numbers before all others."""

    place: int


class HostStep(NamedTuple):
    """A command other than a launch: ``run(backend, *buffers)`` on the memory at the indices ``at``."""

    run: Callable[..., None]
    at: tuple[Any, ...]
    written: tuple[int, ...] = ()


class PlanningState:
    """The state of a command list: the queue's state, except that the list is the backend, plans are separate, and random numbers raise."""

    def __init__(self, state: Any, commands: CommandList):
        self._state, self.context, self.backend = state, state.context, commands
        self.plans: dict[Any, Any] = {}

    @property
    def random(self) -> Any:
        raise NotPlannable("the op draws random numbers")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class CommandList:
    """The commands of an op, in order. While an op is planned, the list replaces the queue of the operands and the backend of that queue.

    ``noted`` holds the indices of the operands that the op reports as changed in place.
    """

    def __init__(self, queue: Any, pool: Any, operands: int):
        self.queue, self.context, self.device = queue, queue.context, queue.device
        self.netcl = PlanningState(queue.netcl, self)
        self.pool, self.operands = pool, operands
        self.commands: list[Launch | HostStep] = []
        self.leased: list[tuple[Any, int]] = []  # the free list and the bytes of each piece of memory that is not an operand
        self.given: list[Any] = []  # the operands' tensors
        self.noted: set[int] = set()

    @property
    def int_ptr(self) -> int:
        """The queue's own pointer: device handles are looked up by it."""
        return self.queue.int_ptr

    def finish(self) -> None:
        raise NotPlannable("the op waits for the device")

    # ---- as a backend

    def empty(self, shape: tuple[int, ...], dtype: Any) -> PlannedMemory:
        """Return reserved memory, which every run leases."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.lease(self.pool.shelf(nbytes), nbytes)

    def lease(self, shelf: Any, nbytes: int) -> PlannedMemory:
        """Return reserved memory of a free list."""
        self.leased.append((shelf, nbytes))
        return PlannedMemory(self, self.operands + len(self.leased) - 1, nbytes)

    def fill(self, buffer: Any, nbytes: int, dtype: Any, value: float = 0) -> None:
        """Append a fill of the first ``nbytes`` with ``value``."""
        at = self._at(buffer)
        self.commands.append(HostStep(lambda backend, target: backend.fill(target, nbytes, dtype, value), (at,), (at.place,)))

    def clone(self, storage: Any, shape: tuple[int, ...], dtype: Any) -> PlannedMemory:
        """Reserve memory, append a copy of the values to it, and return the memory."""
        made = self.empty(shape, dtype)
        if made.nbytes:
            self.copy_bytes(made, getattr(storage, "buffer", storage), made.nbytes)
        return made

    def copy_bytes(self, target: Any, source: Any, nbytes: int) -> None:
        """Append a copy of the first ``nbytes`` of ``source`` to ``target``."""
        to, of = self._at(target), self._at(source)
        self.commands.append(HostStep(lambda backend, a, b: backend.copy_bytes(a, b, nbytes), (to, of), (to.place,)))

    def _no(self, *args: Any, **options: Any) -> Any:
        raise NotPlannable("the op reads or uploads values")

    send = write = fill_bytes = upload_bytes = to_host = to_host_async = wait = _no

    # ---- as a queue

    def launch(self, kernel: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: tuple[Any, ...]) -> None:
        """Append a launch; called by the kernel, which has checked its arguments."""
        found = list(args)
        for i, arg in enumerate(args):
            if type(arg) is int or type(arg) is float:
                continue
            memory = getattr(arg, "memory", arg)
            if memory is None and arg is not None:
                memory = arg.realize()
            if type(memory) is PlannedMemory and memory.commands is self:
                found[i] = At(memory.index)
            elif hasattr(memory, "int_ptr") or type(memory) is PlannedMemory:
                constant = _constants.get(id(arg))
                if constant is None or constant() is not arg:
                    raise NotPlannable("the op uses a tensor that is not an operand, whose memory may change")
        self.commands.append(Launch(kernel, sizes, local, tuple(found)))

    def _at(self, memory: Any) -> At:
        if type(memory) is not PlannedMemory or memory.commands is not self:
            raise NotPlannable("the op writes memory that is not an operand")
        return At(memory.index)


class Notes:
    """The recorder that is active while an op is planned. It adds the reports of ops (:mod:`netcl.core.recording`) to the command list."""

    trains = replays = False

    def __init__(self, commands: CommandList):
        self.commands = commands
        self.ends: dict[Callable[[], None], None] = {}

    def allocated(self, handle: Any) -> None:
        """Ignore the lease: it belongs to a constant of the op, which is on the device's own queue."""

    def changed(self, tensors: Iterable[Any]) -> None:
        places = [t.memory for t in tensors if type(t.memory) is PlannedMemory]
        self.commands.noted |= {place.index for place in places if place.index < self.commands.operands}

    def again(self, function: Callable[[], Any], undo: Callable[[], None] | None = None) -> None:
        """Append a function that every run calls; its result is discarded."""
        self.commands.commands.append(HostStep(lambda backend: recording.again(function, undo), ()))

    def made(self, tensor: Any, or_given: bool = False) -> bool:
        return type(tensor.memory) is PlannedMemory and (or_given or tensor.memory.index >= self.commands.operands)

    def _no(self, *args: Any, **options: Any) -> Any:
        raise NotPlannable("the host reads or changes values")

    def leaf(self, tensor: Any) -> None:
        """Ignore a stand-in for a leaf: the caller of a planned backward pass sets the gradient of the leaf itself."""
        if tensor.queue is not self.commands:
            self._no()

    upload = fill = copy = read = host_work = depends = check = requires = _no


def check_planning(*queues: Any) -> None:
    """Raise ``NotPlannable`` for inputs on different queues while an op is planned: one of them is not an operand."""
    if any(type(queue) is CommandList for queue in queues):
        raise NotPlannable("the op uses a tensor that is not an operand, whose memory may change")


def device_queue(queue: Any) -> Any:
    """Return the queue itself, or the device queue behind a command list; probes of kernels run there."""
    return queue.queue if type(queue) is CommandList else queue
