"""Plans, the launches of a call over numbered memory, and calls of ops that are Python functions: operands -> key -> plan -> run.

A plan is made from a :class:`~netcl.core.commands.CommandList`. It depends on shapes and dtypes of the operands and on other arguments:
the key of a call, which :func:`planned` makes. :meth:`Plan.run` leases memory for results and temporaries and enqueues the commands.

A call with a new key runs the op's function on a command list; later calls run the plan. The function runs without a plan on the NumPy
backend, for arguments that give no key (such as arrays), and if it does something that a plan cannot repeat.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.backend.opencl import backend_of
from netcl.core.commands import At, CommandList, Given, HostStep, Launch, Notes, NotPlannable, PlannedMemory, check_planning
from netcl.core.device import CPUQueue
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.memory import BufferHandle, get_persistent_pool, shares_host
from netcl.core.nested import map_leaves
from netcl.core.queue_state import queue_state
from netcl.core.tensor import Tensor, over_memory
from netcl.core.waiting_runs import WaitingRun, call_at_once, flush_waiting, run_later, waiting
from netcl.core.writes import rewrote, wrote
from netcl.engine.modes import deferral, in_mode
from netcl.engine.operands import Like
from netcl.engine.registry import Reduction

log = logging.getLogger("netcl")
MOST_PLANS = 4096  # per queue: bounds the memory of programs whose shapes keep changing
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None), dtypes.dtype, Reduction, Like})
_AT_ONCE = "run at once: the op does what a plan cannot repeat"
_UNFUSED_CALLS = 8  # calls of one key whose deferral fused nothing, after which calls of this key run eagerly
_AGAIN = 64  # calls after which an eager key retries deferral

PlannedResult = tuple[int, tuple[int, ...], str]  # index of its memory (-1: the result is None), shape, dtype


def command_list(queue: Any, tensors: Sequence[Any]) -> CommandList:
    """Create an empty command list. Its ``given`` has one tensor for each of ``tensors``: the same shape, but the list as its queue."""
    commands = CommandList(queue, get_persistent_pool(queue), len(tensors))
    for i, t in enumerate(tensors):
        place: Any = PlannedMemory(commands, i, math.prod(t.shape) * dtypes.DTYPES[t.dtype].itemsize)
        commands.given.append(Tensor(place, t.shape, t.dtype, t.context, commands, place))
    return commands


def plan_cache(queue: Any) -> dict[Any, Any]:
    """Return the plans of a queue; when there are too many, all are dropped (kernels stay)."""
    plans = (getattr(queue, "netcl", None) or queue_state(queue)).plans
    if len(plans) >= MOST_PLANS:
        plans.clear()
    return plans


class Plan:
    """The commands of an op call, to be run again: ``run(tensors)`` runs them on the memory of these operands."""

    __slots__ = ("cast", "commands", "context", "fixed", "form", "name", "noted", "leased",
                 "operands", "pending", "queue", "results", "room_of", "rooms", "steps", "whole",
                 "writes")  # fmt: skip

    def __init__(self, name: str, commands: CommandList, result: Any):
        self.name, self.queue, self.context = name, commands.queue, commands.context
        self.cast: Callable[[Any], Any] = float  # converts the numbers of a run
        self.operands, self.leased, self.commands = commands.operands, commands.leased, commands.commands
        self.form, self.results = _planned_results(commands, result)
        self.noted, self.writes = sorted(commands.noted), set(commands.noted)
        self.room_of, self.rooms = self._share()
        self.fixed: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]]]] = []
        self.whole: tuple[Any, ...] | None = None
        self.pending = True
        for command in self.commands:
            if isinstance(command, Launch) and command.kernel.program.driver is None:
                break
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the programs, determine the final sizes and prepare the launches; raises if a program does not build."""
        with self.queue.netcl.lock:
            if self.pending:
                self.commands = [c.kernel.resolved(c) if isinstance(c, Launch) else c for c in self.commands]
                self._prepare()

    def _share(self) -> tuple[list[int], list[tuple[Any, int]]]:
        """Assign the planned memory to leases. After the last command that uses a temporary, later memory may share its lease.

        Returns the index of the lease (the *room*) of each planned memory, and the free list (shelf) and size of each lease. Adds the
        operands that the commands write to ``writes``.
        """
        n, used, last = self.operands, [], {}
        for i, command in enumerate(self.commands):
            if isinstance(command, Launch):
                args, constant = command.args, command.kernel.reads_only
            else:
                args, constant = command.at, [at.place not in command.written for at in command.at]
            indices = set()
            for arg, only_read in zip(args, constant, strict=True):
                if type(arg) is At and arg.place >= n:
                    indices.add(arg.place)
                    last[arg.place] = i
                elif type(arg) is At and not only_read:
                    self.writes.add(arg.place)
            used.append(sorted(indices))
        made = []
        for at, _, _ in self.results:
            if at >= n:
                made.append(at)
                last[at] = len(self.commands) + 1
        used.append(made)
        rooms: list[tuple[Any, int]] = []
        free: dict[Any, list[int]] = {}
        room_of = [-1] * len(self.leased)
        for i, places in enumerate(used):
            for at in places:
                if room_of[at - n] < 0:
                    shelf, nbytes = self.leased[at - n]
                    if free.get(shelf):
                        room = room_of[at - n] = free[shelf].pop()
                        rooms[room] = shelf, max(nbytes, rooms[room][1])
                    else:
                        room_of[at - n] = len(rooms)
                        rooms.append((shelf, nbytes))
            for at in places:
                if last[at] == i:
                    free.setdefault(self.leased[at - n][0], []).append(room_of[at - n])
        return room_of, rooms

    def _prepare(self) -> None:
        """Prepare the commands, when all programs are built. A run makes one list of slots: memory of operands and rooms, then ``fixed``.

        Each command selects its argument indices and memory from that list. ``fixed`` begins with the indices 0, 1, ..
        """
        first, most, numbered = self.operands + len(self.rooms), 0, False
        for command in self.commands:
            if isinstance(command, Launch):
                most = max(most, len(command.args))
                for arg in command.args:
                    numbered = numbered or type(arg) is Given
        self.fixed, self.steps = list(range(most)), []
        slot_of = [*range(self.operands), *map(self.operands.__add__, self.room_of)]  # by place of memory
        for command in self.commands:
            if isinstance(command, HostStep):
                self.steps.append((_host_step(self.queue, command.run), _chosen([slot_of[at.place] for at in command.at])))
                continue
            pointers, args, given = command.kernel.pointers, command.args, len(command.kernel.pointers)
            while given < len(args) and type(args[given]) is Given:
                given += 1
            sized = command.kernel.sized(command.sizes, command.local, args[given:])
            slots: list[int] = []
            for i in range(len(args)) if sized is None else pointers:
                arg = args[i]
                if type(arg) is not At:
                    self.fixed.append(arg.realize() if isinstance(arg, Tensor) else arg)
                slots += (first + i, slot_of[arg.place] if type(arg) is At else first + len(self.fixed) - 1)
            launch: Callable[..., Any] = sized or _any_launch(command)
            plain = sized is not None and numbered and given == len(pointers)
            self.steps.append((_without_numbers(launch) if plain else launch, _chosen(slots)))
        self.whole, self.pending = self._one_launch(), False

    def _one_launch(self) -> tuple[Any, ...] | None:
        """Prepare the common case: one launch and one new result. Other plans give ``None``.

        Returns the launch, the function that selects its memory (``None`` if it takes one or two operands, then the result), and the
        result's free list (shelf), size, shape and dtype.
        """
        if len(self.steps) != 1 or len(self.rooms) != 1 or self.form is not None or self.writes or self.results[0][0] < self.operands:
            return None
        launch, chosen = self.steps[0]
        count = self.operands + 1
        in_order = 2 <= count <= 3 and chosen([*range(count), *self.fixed]) == tuple([i for i in range(count) for _ in range(2)])
        return launch, None if in_order else chosen, *self.rooms[0], *self.results[0][1:]

    def run(self, tensors: Sequence[Tensor], numbers: tuple[Any, ...] = ()) -> Any:
        """Run the commands on these operands and numbers; results are new tensors, or operands that were changed in place."""
        if self.whole is not None and not hooks.launch_observers:
            for t in tensors:
                if t.memory is None:
                    t.realize()
            launch, chosen, shelf, nbytes, shape, dtype = self.whole
            queue, lease = self.queue, shelf.lease(nbytes)
            if not waiting:  # checked after the lease: a run of another thread may wait that used this memory before
                buffer = lease.buffer
                if chosen is not None:
                    launch(queue, chosen([*[t.memory for t in tensors], buffer, *self.fixed]), numbers)
                elif self.operands == 2:
                    launch(queue, (0, tensors[0].memory, 1, tensors[1].memory, 2, buffer), numbers)
                else:
                    launch(queue, (0, tensors[0].memory, 1, buffer), numbers)
                return over_memory(buffer, shape, dtype, self.context, queue, lease)
            del lease
        if self.writes and hooks.readers:
            for i in self.writes:
                hooks.readers.compute(tensors[i].pool_handle)
        if self.noted:
            wrote([tensors[i] for i in self.noted])
        if hooks.launch_observers:
            made = self._run_observed(tensors, numbers)
        else:
            queue = self.queue
            memory: list[Any] = [t.realize() if t.memory is None else t.memory for t in tensors]
            leases = [shelf.lease(nbytes) for shelf, nbytes in self.rooms]
            memory += [lease.buffer for lease in leases]
            if self.pending or waiting:
                self._run_later(tensors, memory, numbers)
            else:
                slots = memory + self.fixed
                for step, chosen in self.steps:
                    step(queue, chosen(slots), numbers)
            made = []
            for at, shape, dtype in self.results:
                if at < self.operands:
                    made.append(None if at < 0 else tensors[at])
                else:
                    lease = leases[self.room_of[at - self.operands]]
                    made.append(over_memory(lease.buffer, shape, dtype, self.context, queue, lease))
        for i in self.noted:
            rewrote(tensors[i])
        return made[0] if self.form is None else self.form(made)

    def _run_later(self, tensors: Sequence[Tensor], memory: list[Any], numbers: tuple[Any, ...]) -> None:
        """Append a run to the waiting ones. A run that calls functions of the host, or uses the caller's arrays, is not kept waiting."""

        def enqueue() -> None:
            slots = memory + self.fixed
            for step, chosen in self.steps:
                step(self.queue, chosen(slots), numbers)

        calls_host = any([isinstance(command, HostStep) and not command.at for command in self.commands])
        if calls_host or any([shares_host(t.lease) for t in tensors]):
            flush_waiting(self.queue)
            self.finish()
            enqueue()
        else:
            written = memory[self.operands :] + [memory[i] for i in self.writes]
            leases = [t.lease for t in tensors if type(t.lease) is not BufferHandle]
            run_later(WaitingRun(self.queue, enqueue, memory, written, self.finish if self.pending else None, leases))

    def append_to(self, commands: CommandList, tensors: Sequence[Tensor], numbers: Sequence[Any] = ()) -> Any:
        """Append the commands to those of another op that is being planned; operands and results are tensors of that list."""
        if self.noted:
            wrote([tensors[i] for i in self.noted])
        leases = [commands.lease(shelf, nbytes) for shelf, nbytes in self.leased]
        made = self._run_one_by_one(commands, leases, tensors, numbers)
        return made[0] if self.form is None else self.form(made)

    def run_on(self, queue: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        """Run commands without temporaries and results on a queue that is not that of all operands; the launches wait for the others."""
        self._run_one_by_one(queue, [], tensors, numbers)

    def _run_observed(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any]:
        """Run the commands one by one for recorders and profilers, with separate memory per temporary; returns the results."""
        for t in tensors:
            t.realize()  # which may run other plans
        leases = [shelf.lease(nbytes) for shelf, nbytes in self.leased]
        recording.active.op = self.name
        made = self._run_one_by_one(self.queue, leases, tensors, numbers)
        recording.active.op = ""
        return made

    def _run_one_by_one(self, queue: Any, leases: Sequence[Any], tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any]:
        memory: list[Any] = [*tensors, *[lease.buffer for lease in leases]]
        for at, shape, dtype in self.results:
            if at >= self.operands:
                of = leases[at - self.operands]
                memory[at] = Tensor(of.buffer, shape, dtype, self.context, queue, of)
        for command in self.commands:
            if isinstance(command, Launch):
                args = [memory[arg.place] if type(arg) is At else arg for arg in command.args]
                command.kernel(queue, command.sizes, command.local, *_with_numbers(args, numbers))
            else:
                buffers = [memory[at.place] for at in command.at]
                command.run(backend_of(queue), *[m.realize() if isinstance(m, Tensor) else m for m in buffers])
        return [memory[at] if at >= 0 else None for at, _, _ in self.results]


def _chosen(slots: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda memory: tuple([memory[slot] for slot in slots])


def _host_step(queue: Any, run: Callable[..., None]) -> Callable[..., None]:
    return lambda _, memory, numbers: call_at_once(queue, partial(run, backend_of(queue), *memory))


def _without_numbers(launch: Callable[..., None]) -> Callable[..., None]:
    """Wrap a launch that takes no numbers, so that it can be called with the numbers of a run."""
    return lambda queue, memory, numbers: launch(queue, memory, ())


def _any_launch(command: Launch) -> Callable[..., None]:
    """Return the function of a launch that cannot be a :class:`Sized`."""
    return lambda queue, memory, numbers: command.kernel(queue, command.sizes, command.local, *_with_numbers(memory[1::2], numbers))


def _with_numbers(args: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    return [numbers[arg.place] if type(arg) is Given else arg for arg in args]


def _planned_results(commands: CommandList, result: Any) -> tuple[Callable[[list[Any]], Any] | None, list[PlannedResult]]:
    """Return a function that makes a result of several tensors, else ``None``; and per tensor its memory index, shape and dtype."""
    one, kind = isinstance(result, Tensor), type(result)
    if not one and not isinstance(result, tuple | list):
        raise NotPlannable(f"a result must be a tensor, or a tuple or list of tensors, got {kind.__name__}")
    found: list[PlannedResult] = []
    for x in (result,) if one else result:
        if x is None:
            found.append((-1, (), ""))
            continue
        if type(x) is not Tensor or x.source is not None or type(x.memory) is not PlannedMemory or x.memory.commands is not commands:
            raise NotPlannable(f"a result must be a tensor in memory of an operand or of the op itself, got {type(x).__name__}")
        if x.memory.index < commands.operands and x is not commands.given[x.memory.index]:
            raise NotPlannable("a result cannot be a view of an operand")
        found.append((x.memory.index, x.shape, x.dtype))
    return None if one else getattr(kind, "_make", kind), found


# ---- calls


def planned_before(commands: CommandList, signature: tuple[Any, ...]) -> Plan | None:
    """Return the plan of a call inside an op that is being planned, if the same call was made outside of it."""
    found = commands.queue.netcl.plans.get(signature)
    found = found.plan if type(found) is Deferral else found
    return found if type(found) is Plan else None


class Deferral:
    """Counts, for the calls of one key, the deferred values that were fused (``fused``) and the unfused ones (``alone``).

    Deferring costs as much host time as a small product takes on the device, so a key whose values are never fused runs eagerly.
    """

    __slots__ = ("_calls", "alone", "fused", "plan")

    def __init__(self) -> None:
        self.alone = self.fused = self._calls = 0
        self.plan: Any = None  # of the eager calls

    def defers(self) -> bool:
        """Count a call of this key and return whether to defer it."""
        self._calls += 1
        return self.fused > 0 or self.alone < _UNFUSED_CALLS or self._calls % _AGAIN == 0

    def follow(self, made: Any) -> Any:
        """Return the result ``made``; if it is a pending product, this object will count whether it gets fused."""
        if type(made) is Tensor and made.memory is None and hasattr(made.source, "deferral"):
            made.source.deferral = self  # type: ignore[union-attr]
        return made


def key_operands(values: Sequence[Any], key: list[Any]) -> list[Tensor] | None:
    """Append dtypes, shapes and plain values of the arguments to ``key``; returns their tensors, or ``None`` if they give no key."""
    tensors: list[Tensor] = []
    for x in values:
        kind = type(x)
        if kind is Tensor:
            if x.host_ref is not None and shares_host(x.lease):
                return None  # the caller's memory may not be aligned as the pool's is
            key += (x.dtype, x.shape)
            tensors.append(x)
        elif kind in _PLAIN_TYPES:
            key += (kind, x if kind is not float or x else str(x))  # 0.0 == -0.0
        elif kind is tuple and all([type(part) is int for part in x]):
            key.append(x)
        elif kind is tuple or kind is list or hasattr(kind, "_fields"):
            key.append((kind, len(x)))
            inside = key_operands(x, key)
            if inside is None:
                return None
            tensors += inside
        else:
            return None
    return tensors


def make_plan(name: str, queue: Any, tensors: Sequence[Tensor], function: Callable[..., Any], args: Any, kwargs: Any) -> Plan | str:
    """Return the plan of a call, or ``_AT_ONCE`` if the op cannot be planned."""
    commands = command_list(queue, tensors)
    operands = iter(commands.given)  # in the order of key_operands
    args, kwargs = map_leaves(([*args], kwargs), lambda leaf: next(operands) if type(leaf) is Tensor else leaf)
    try:
        with in_mode(None), recording.replaced_by(Notes(commands)):
            result = function(*args, **kwargs)
        return Plan(name, commands, result)
    except NotPlannable as reason:
        log.info("[%s] is not planned: %s", name, reason)
        return _AT_ONCE
    finally:
        commands.given = []


def planned(
    name: Any, function: Callable[..., Any], deferred: Callable[..., Any] | None = None, defer_if: Callable[..., bool] | None = None
) -> Any:
    """Wrap the function of an op so that calls with the same key share a cached plan. ``name`` is the op's row or its name.

    ``deferred`` takes the same arguments and returns the result as deferred values, or ``None``. It is called inside ``ag.jit_compile``, in
    recordings, if ``defer_if(*args)`` is true, and for the first calls of a key. For later calls, a :class:`Deferral` decides.
    """
    selector = get_kernel_selector()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        key = [name, selector.revision, *kwargs]
        tensors = key_operands((*args, *kwargs.values()) if kwargs else args, key)
        if deferred is not None and (
            deferral.mode is not None
            or not tensors
            or (recording.listening and recording.replays())
            or (defer_if is not None and defer_if(*args))
        ):
            made = deferred(*args, **kwargs)
            if made is not None:
                return made
        if not tensors:
            return function(*args, **kwargs)
        queue, signature = tensors[0].queue, tuple(key)
        for x in tensors:
            if x.queue is not queue:
                check_planning(queue, x.queue)
                return function(*args, **kwargs)
        try:
            found = queue.netcl.plans[signature]
        except (AttributeError, KeyError):  # a new queue or a new signature
            found = None
        if type(found) is Plan:
            return found.run(tensors)
        if type(queue) is CommandList:
            found = planned_before(queue, signature)
            return function(*args, **kwargs) if found is None else found.append_to(queue, tensors)
        if isinstance(queue, CPUQueue):
            return function(*args, **kwargs)
        return _run_unplanned(name, function, deferred, args, kwargs, tensors, signature, found)

    return call


def _run_unplanned(
    name: Any, function: Callable[..., Any], deferred: Any, args: Any, kwargs: Any, tensors: list[Tensor], signature: Any, found: Any
) -> Any:
    """Run a call without a plan in the cache, where ``found`` is; cache its plan or a :class:`Deferral`. Arguments as in `planned`."""
    plans = plan_cache(tensors[0].queue)
    if found is None and deferred is not None and deferral.mode is None and (made := deferred(*args, **kwargs)) is not None:
        plans[signature] = begun = Deferral()
        return begun.follow(made)
    if type(found) is Deferral and found.defers() and (made := deferred(*args, **kwargs)) is not None:
        return found.follow(made)
    plan = found.plan if type(found) is Deferral else found
    if plan is None:
        plan = make_plan(getattr(name, "name", name), tensors[0].queue, tensors, function, args, kwargs)
        if type(found) is Deferral:
            found.plan = plan
        else:
            plans[signature] = plan
    return plan.run(tensors) if type(plan) is Plan else function(*args, **kwargs)
