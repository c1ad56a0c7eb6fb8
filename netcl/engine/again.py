"""Calls of a kind that was made before: the same launches over other memory, without the Python that planned them.

What an op enqueues depends on the dtypes and shapes of its tensors and on its other arguments, hardly ever on anything else. So the second
call of a kind is listened to, as a recorded step is, and later ones repeat what was heard: allocations, launches, results. A call that
does more than that (looks at values, draws random numbers, writes to memory that was there before) is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import copysign
from operator import itemgetter
from typing import Any

import numpy as np

from netcl.core import memory, recording
from netcl.core.device import CPUQueue
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.kernels import program
from netcl.core.kernels.program import Sized, launch_observers
from netcl.core.kernels.signature import POINTER
from netcl.core.tensor import DeferredTensor, Tensor
from netcl.core.writes import wrote
from netcl.engine.pointwise import cached_plan, fusing_modes

_PLAIN = frozenset({bool, int, float, str, type(None)})
_ONCE, _NEVER = "called once", "not to be repeated"
_ENOUGH = 64  # kinds of calls of an op that could not be repeated, until none is listened to any more
_ALONE = 8  # values of a kind that waited in vain, until such values are computed at once
_AGAIN = 64  # calls after which one waits again, to see whether something follows by now


class Repeat:
    """What a call enqueued: launches over slots, which hold places of arguments, inputs, and memory that the call leases."""

    def __init__(
        self, queue: Any, fixed: list[Any], rooms: list[tuple[Any, int]], launches: list[tuple[Sized, Any]], results: _Results,
        writes: Sequence[int], noted: Sequence[int], facts: dict[Callable[[], Any], Any],
    ):  # fmt: skip
        self.queue = queue
        self.writes = writes
        self.noted = noted
        said = list(facts.values())
        # One function for all of them, mostly the only one: every repetition asks it.
        self.fact = next(iter(facts)) if len(said) == 1 else (lambda: [fact() for fact in facts]) if said else None
        self.said = said[0] if len(said) == 1 else said
        self.context = queue.context
        self.fixed = fixed
        self.rooms = rooms
        self.launches = launches
        self.results = results

    def holds(self) -> bool:
        """Whether the call would still do the same."""
        return self.fact is None or self.fact() == self.said

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The call again, over other tensors of the same kind."""
        if self.writes and program.awaited:
            for i in self.writes:
                tensors[i]._compute_readers()
        if self.noted:
            wrote([tensors[i] for i in self.noted])
        leases = [shelf.lease(nbytes) for shelf, nbytes in self.rooms]
        slots = [*self.fixed, *[t.buffer for t in tensors], *[lease.buffer for lease in leases]]
        queue = self.queue
        for launch, chosen in self.launches:
            launch(queue, chosen(slots))
        context, (form, parts) = self.context, self.results
        if form is None and parts[0] is not None:
            at, shape, dtype = parts[0]
            return Tensor(leases[at].buffer, shape, dtype, context, queue, leases[at])
        assert form is not None
        return form([Tensor(leases[part[0]].buffer, *part[1:], context, queue, leases[part[0]]) if part else None for part in parts])


class Habit:
    """What became of values of one kind that wait for what follows: ``alone`` were asked for by themselves, ``followed`` were not.

    Waiting takes the host as long as a small product takes the device, so that a kind of which only the first is seen waits no more.
    """

    __slots__ = ("_calls", "alone", "at_once", "followed")

    def __init__(self) -> None:
        self.alone = self.followed = self._calls = 0
        self.at_once: Any = None  # the call as something to repeat, or that it cannot be

    def waits(self) -> bool:
        """Whether the next value of this kind does."""
        self._calls += 1
        return self.followed > 0 or self.alone < _ALONE or self._calls % _AGAIN == 0


#: How several results are put together (``None``: there is one), and per result its lease, shape and dtype.
_Results = tuple[Callable[[list[Any]], Any] | None, list[tuple[int, tuple[int, ...], str] | None]]


class _Listener:
    """Hears one call. ``problem`` is set by everything that a repetition would leave out."""

    def __init__(self, queue: Any, tensors: Sequence[Tensor]):
        self.queue = queue
        self.tensors = [(t, t.host_ref) for t in tensors]
        self.inputs = {id(t.buffer): i for i, t in enumerate(tensors)}
        self.problem = len(self.inputs) < len(tensors)  # one memory twice: which is meant in a launch?
        self.buffers: list[Any] = []
        self.rooms: dict[int, int] = {}  # by the number of a buffer, which of those the call leased
        self.sizes: list[int] = []
        self.launches: list[tuple[Sized, list[tuple[int, Any]]]] = []
        self.writes: set[int] = set()  # inputs that kernels may write to
        self.facts: dict[Callable[[], Any], Any] = {}
        self.noted: set[int] = set()  # and those of which the op says that it does

    def allocated(self, handle: Any) -> None:
        if isinstance(handle.buffer, np.ndarray) or handle.pool is not memory.get_persistent_pool(self.queue):
            self.problem = True
        elif id(handle.buffer) not in self.rooms:
            self.rooms[id(handle.buffer)] = len(self.buffers)
            self.buffers.append(handle.buffer)
            self.sizes.append(handle.nbytes)
        else:
            at = self.rooms[id(handle.buffer)]
            self.sizes[at] = max(self.sizes[at], handle.nbytes)

    def launch(self, kernel: Any, queue: Any, sizes: tuple[int, ...], local: Any, args: tuple[Any, ...], event: Any) -> None:
        if recording.active.recorder is not self:
            return  # another thread's
        del event
        places = [i for i, kind in enumerate(kernel.kinds) if kind is POINTER]
        made = kernel.sized(sizes, local, args[len(places) :])
        writes = {i for i, only_read in enumerate(kernel.reads_only()) if not only_read}
        chosen = [(i, self._source(args[i], i in writes)) for i in places]
        if made is None or queue is not self.queue:
            self.problem = True
        else:
            self.launches.append((made, chosen))

    def _source(self, arg: Any, written: bool) -> Any:
        """Where an argument comes from at the next call: an input, a lease, or itself (local memory)."""
        buffer = arg.buffer if isinstance(arg, Tensor) else arg
        if id(buffer) in self.rooms:
            return "lease", self.rooms[id(buffer)]
        if id(buffer) in self.inputs:
            self.writes |= {self.inputs[id(buffer)]} if written else set()
            return "input", self.inputs[id(buffer)]
        self.problem = self.problem or hasattr(buffer, "int_ptr")
        return "fixed", buffer

    def changed(self, tensors: Iterable[Tensor]) -> None:
        known = {id(t._written): i for i, (t, _) in enumerate(self.tensors) if t._written is not None}
        for t in tensors:
            if id(t._written) in known:
                self.noted.add(known[id(t._written)])
            elif id(t.buffer) not in self.rooms:
                self.problem = True

    def _more(self, *what: Any) -> None:
        """Something that is no launch."""
        self.problem = True

    upload = fill = copy = read = host_work = depends = leaf = _more

    def made(self, tensor: Any) -> bool:
        return id(tensor.buffer) in self.rooms

    def requires(self, fact: Callable[[], Any]) -> None:
        self.facts[fact] = fact()

    def again(self, function: Callable[[], Any], undo: Callable[[], None] | None = None) -> Any:
        self.problem = True
        return function()

    def check(self, tensor: Any, function: Callable[[Any], None]) -> None:
        self.problem = True
        function(tensor)

    # ---- afterwards

    def heard(self, result: Any) -> Repeat | None:
        """The call as something to repeat, if it can be."""
        # What an op sets at an input, a repetition would not.
        unlike = any(t.host_ref is not host for t, host in self.tensors) or not self.noted <= self.writes
        results = None if self.problem or unlike or not self.launches else self._results(result)
        if results is None:
            return None
        pool = memory.get_persistent_pool(self.queue)
        most = max(place for _, chosen in self.launches for place, _ in chosen) + 1
        fixed: list[Any] = list(range(most))
        start = {"input": most, "lease": most + len(self.inputs)}
        constants = [what for _, chosen in self.launches for _, (kind, what) in chosen if kind == "fixed"]
        start = {kind: at + len(constants) for kind, at in start.items()}
        fixed += constants
        passed, launches = iter(range(most, len(fixed))), []
        for launch, chosen in self.launches:
            slots = [(place, next(passed) if kind == "fixed" else start[kind] + what) for place, (kind, what) in chosen]
            launches.append((launch, itemgetter(*[x for pair in slots for x in pair])))
        rooms = [(pool.shelf(nbytes), nbytes) for nbytes in self.sizes]
        return Repeat(self.queue, fixed, rooms, launches, results, sorted(self.writes), sorted(self.noted), self.facts)

    def _results(self, result: Any) -> _Results | None:
        if type(result) is Tensor:
            part = self._result(result)
            return (None, [part]) if part else None
        if not isinstance(result, tuple):
            return None
        parts = [None if x is None else self._result(x) for x in result]
        if any(part is None and x is not None for part, x in zip(parts, result, strict=True)):
            return None
        kind = type(result)
        return (kind._make if hasattr(kind, "_make") else tuple), parts

    def _result(self, x: Any) -> tuple[int, tuple[int, ...], str] | None:
        if type(x) is not Tensor or x._source is not None or x.pool_handle is None or x.host_ref is not None or x._learns:
            return None
        at = self.rooms.get(id(x.buffer))
        return None if at is None else (at, x.shape, x.dtype)


def _listened(plain: Callable[..., Any], queue: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call an op and hear what it does."""
    listener = _Listener(queue, tensors)  # which asks for the memory of inputs that wait
    recording.start(listener)
    launch_observers.append(listener.launch)
    try:
        result = plain(*args, **kwargs)
    finally:
        launch_observers.remove(listener.launch)
        recording.stop()
    return result, listener.heard(result) or _NEVER


def _by_habit(habit: Habit, plain: Any, at_once: Any, queue: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """A call whose value waits if that was of use before, else is computed at once."""
    if habit.waits():
        result = plain(*args, **kwargs)
        if type(result) is DeferredTensor:
            result._source.habit = habit  # type: ignore[union-attr]
        return result
    if habit.at_once is None or (type(habit.at_once) is Repeat and not habit.at_once.holds()):
        result, habit.at_once = _listened(at_once, queue, tensors, args, kwargs)
        return result
    repeat = habit.at_once
    return repeat.run(tensors) if type(repeat) is Repeat and repeat.queue is queue else at_once(*args, **kwargs)


def _call_tensors(values: Sequence[Any], key: list[Any]) -> list[Tensor] | None:
    """The tensors among some arguments; what makes the kind of the call goes into ``key``. ``None`` where they do not tell it."""
    tensors: list[Tensor] = []
    for x in values:
        kind = type(x)
        if kind is Tensor:
            if x.host_ref is not None and memory.shares_host(x.pool_handle):
                return None  # such memory may be aligned otherwise than the pool's
            key.append(x.dtype)
            key.append(x.shape)
            tensors.append(x)
        elif kind in _PLAIN:
            key.append(kind)
            key.append(x if kind is not float or x else copysign(1.0, x))
        elif kind is tuple and all([type(part) is int for part in x]):
            key.append(x)
        elif kind is DeferredTensor:
            key.append(kind)
            key.append(x.dtype)
            key.append(x.shape)
            tensors.append(x)
        elif hasattr(kind, "_fields"):
            key.append(kind)
            inside = _call_tensors(x, key)
            if inside is None:
                return None
            tensors += inside
        else:
            return None
    return tensors


class _Tried:
    """How often calls of an op were listened to: in vain, and not."""

    heard = refused = 0


def repeated(row: Any, plain: Callable[..., Any], at_once: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An op whose calls are repeated where they can be; ``row`` names it.

    The value of ``plain`` may wait for what follows, with a ``habit`` to fill; ``at_once`` is the op without.
    """
    selector, modes, observers, tried = get_kernel_selector(), fusing_modes, launch_observers, _Tried()

    @wraps(plain)
    def _call(*args: Any, **kwargs: Any) -> Any:
        if observers or modes.mode is not None or (tried.refused > _ENOUGH and not tried.heard):
            return plain(*args, **kwargs)
        key = [row, selector.revision, *kwargs]
        tensors = _call_tensors((*args, *kwargs.values()) if kwargs else args, key)
        if not tensors:
            return plain(*args, **kwargs)
        queue, signature = tensors[0].queue, tuple(key)
        for x in tensors:
            if x.queue is not queue:
                return plain(*args, **kwargs)
        try:
            found = queue._netcl_state["plans"].get(signature)
        except (AttributeError, KeyError):  # a NumPy queue, a new context
            found = None
        if type(found) is Repeat and (found.fact is None or found.fact() == found.said):
            return found.run(tensors) if found.queue is queue else plain(*args, **kwargs)
        if found == _NEVER or isinstance(queue, CPUQueue):
            return plain(*args, **kwargs)
        if type(found) is Habit:
            return _by_habit(found, plain, at_once, queue, tensors, args, kwargs)
        learned: Any
        if found is None:
            result = plain(*args, **kwargs)
            if at_once is not None and type(result) is DeferredTensor:
                learned = result._source.habit = Habit()  # type: ignore[union-attr]
            else:
                learned = _ONCE if all([type(x) is Tensor for x in tensors]) else _NEVER  # who leaves inputs waiting may join them
        else:
            result, learned = _listened(plain, queue, tensors, args, kwargs)
            tried.refused += learned == _NEVER
            tried.heard += learned != _NEVER
        cached_plan(program.state(queue), signature, lambda: learned)
        return result

    return _call
