"""Records a step and replays it without its Python code: ``netcl.compile`` and ``capture_graph``; see docs/internals/replay.md.

The first call runs eagerly. Later calls are recorded until two recordings in a row are equal, then replayed, as long as the guards hold.
Several recordings are kept, one for each key, state and contract.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.device import CPUQueue, chosen_device, get_active_device
from netcl.core.errors import message
from netcl.core.hooks import hooks
from netcl.core.nested import map_leaves, tensors_in
from netcl.core.tensor import Tensor, duplicate
from netcl.core.writes import writes_of
from netcl.engine.lazy_graph import fusing
from netcl.ops.views import base_of, is_copy, overlap
from netcl.replay.contract import Contract, Left, tensors_of
from netcl.replay.fold_constants import KeptValues
from netcl.replay.graph import Graph, Output, same_memory
from netcl.replay.kinds import EXACTLY_PLAIN, instance_dict, is_a, is_layer, items_of
from netcl.replay.recorder import CaptureError, Recorder, difference
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, Value

__all__ = ["CaptureError", "CompiledFunction", "capture_graph", "compile"]

log = logging.getLogger("netcl")

MOST_CASES = 16  # maximum number of recordings (keys, module states, contracts): more would use too much memory
MOST_TRIALS = 8  # recordings without a replay until a function is refused


class _Call:
    """The arguments of one call. A replay rebinds ``tensors``, one per buffer; ``key`` identifies the shapes and all other arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], of: CompiledFunction):
        tensors: list[Tensor] = []
        self.tensors = tensors
        self.objects: list[Any] = []
        self.of = of
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        key: list[Any] = []
        for i, arg in enumerate(args):
            # the usual case, without a call
            if type(arg) is Tensor and not arg.requires_grad and arg.context is not None and arg.grad is None:
                memory = arg.realize() if arg.memory is None else arg.memory
                for other in tensors:
                    if other.memory is memory:
                        break
                else:
                    tensors.append(arg)
                    key.append((arg.shape, arg.dtype, id(arg.queue)))
                    continue
            if type(arg) is not Tensor and (part := self._part(arg)) is not arg:
                arg, self.args = part, [*self.args[:i], part, *self.args[i + 1 :]]
            key.append(self._key(arg))
        if kwargs:
            self.kwargs = {name: self._part(arg) for name, arg in kwargs.items()}
            key.append(tuple([(name, self._key(arg)) for name, arg in self.kwargs.items()]))
        for mode in hooks.modes:
            key.append(mode())
        self.key = (id(chosen_device()), *key)

    def _part(self, arg: Any) -> Any:
        """Return ``arg`` with its arrays converted to tensors. Without arrays, return ``arg`` itself: the function may change it."""
        if is_a(arg, np.ndarray):
            return Tensor.from_host(self.of.queue_of_arrays((*self.args, *self.kwargs.values())), arg)
        if type(arg) in (list, tuple):
            parts: Any = type(arg)([self._part(part) for part in arg])
        elif type(arg) is dict:
            parts = {name: self._part(part) for name, part in arg.items()}
        else:
            return arg
        return parts if any([new is not old for new, old in zip(items_of(parts), items_of(arg), strict=True)]) else arg

    def _key(self, arg: Any) -> Any:
        if is_a(arg, Tensor):
            return self._tensor_key(arg)
        if type(arg) in (list, tuple):
            return (type(arg).__name__, *[self._key(part) for part in arg])
        if type(arg) is dict:
            return ("dict", *[(self._key(name), self._key(part)) for name, part in arg.items()])
        if type(arg) in EXACTLY_PLAIN or is_a(arg, np.generic):
            return (type(arg), repr(arg))
        self.objects.append(arg)  # kept alive, so that no other object gets its identity
        return ("object", id(arg))

    def _tensor_key(self, t: Tensor) -> tuple[Any, ...]:
        """Return the key of ``t``: shape, dtype and queue, or its place among the arguments if it shares the memory of one.

        A tensor that requires or has a gradient, or that is on NumPy, is identified by its ``id``.
        """
        if t.requires_grad or t.context is None or t.grad is not None:
            self.objects.append(t)
            return ("object", id(t), t.backend)
        for i, other in enumerate(self.tensors):
            if other.realize() is t.realize():
                return ("as", i, t is other, t.shape, t.dtype)
        self.tensors.append(t)
        return (t.shape, t.dtype, id(t.queue))

    def inside(self) -> list[Any]:
        """Return the current contents of the containers among the arguments."""
        return [part for arg in (*self.args, *self.kwargs.values()) for part in _inside(arg)]

    def not_recordable(self) -> str:
        """Return why these arguments prevent a recording; empty if they do not, ``"numpy"`` if a tensor is on the NumPy backend."""
        for t in self.objects:
            if is_a(t, Tensor) and t.context is None:
                return "numpy"
            if is_a(t, Tensor) and t.grad_fn is not None:
                return "an argument carries its history for backward: compile the whole step, or detach() it"
        return ""


def _inside(arg: Any) -> Iterator[Any]:
    if type(arg) in (list, tuple, dict):
        for part in items_of(arg):
            yield part
            yield from _inside(part)


class _Program:
    """The last recording of calls with the same key, state and contract. It has a graph once two recordings in a row are equal."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.signature: Any = None
        self.trials = 0
        self.graph: Graph | None = None
        self.replayed = False  # it had a graph
        self.guards: Guards | None = None
        self.trusted: list[bool] = []  # inputs that were recorded in two buffers, with equal recordings
        self.buffers: list[Any] = []
        self.owners: dict[int, list[Any]] = {}  # for the memory from outside that the last recording used
        self.refused = ""

    def excuses(self, old: Any, new: Any) -> bool:
        """Whether two recordings may use different buffers for the same argument of a command.

        They may if both buffers come from outside and no tensor uses the old one anymore. After a replay of the step, they may also if
        one buffer is an argument of the call and the other comes from outside.
        """
        if {old[0], new[0]} == {INPUT, OUTSIDE}:
            return self.replayed
        if old[0] != OUTSIDE or new[0] != OUTSIDE:
            return False
        return not any((t := ref()) is not None and t.memory is old[1] for ref in self.owners.get(id(old[1]), ()))


class Guards:
    """The conditions for replaying a graph, in addition to the contract, and the gradients that a replay sets."""

    def __init__(self, recorder: Recorder, gradients: Sequence[tuple[Tensor, Any]], left: Sequence[Left]):
        self.facts = recorder.facts
        self.left = [one for one in left if not (one.name == "grad" and id(getattr(one.holder, "owner", None)) in recorder.leaves)]
        used = {id(v.buffer) for v in recorder.values if v.kind == OUTSIDE and v.first >= 0}
        self.gradients = [(leaf, buffer) for leaf, buffer in gradients if id(buffer) in used]
        dependencies = recorder.dependencies.values()
        self.parts = [(d.owner.__dict__, name, part) for d in dependencies for name, part in d.parts()]
        self.owned = [(t, t.realize()) for d in dependencies for t in d.tensors()]
        outside = [(ref, v.buffer) for v in recorder.values if v.kind == OUTSIDE for ref in v.owners]
        known = {id(t) for t, _ in self.owned}
        self.outside = [(ref, buffer) for ref, buffer in outside if ref() is not None and id(ref()) not in known]
        self.leaves = [(leaf, leaf.grad) for leaf in recorder.leaves.values()]

    def hold(self) -> bool:
        """Whether all guards still hold, so that the recorded launches are valid."""
        for attributes, name, part in self.parts:
            if attributes.get(name) is not part:
                return False
        for t, buffer in self.owned:
            if t.memory is not buffer:
                return False
        for ref, buffer in self.outside:
            owner = ref()
            if owner is None or owner.memory is not buffer:
                return False
        for leaf, buffer in self.gradients:
            if leaf.grad is None or leaf.grad.memory is not buffer:
                return False
        for one in self.left:
            if not one.is_there():
                return False
        for fact, value in self.facts:  # noqa: SIM110, a generator is a call more
            if fact() != value:
                return False
        return True


class _Case:
    """Calls with one key: the objects that report their state, and the programs by state."""

    def __init__(self, objects: Sequence[Any]):
        self.objects = list(objects)
        self.modes: tuple[list[dict[str, Any]], list[str]] = [], []  # mappings, and names in them
        self.sizes: list[Sized] = []
        self.watched: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.programs: dict[Any, list[_Program]] = {}
        self.seen = False

    def watch(self, recorder: Recorder, graded: Iterable[Tensor]) -> None:
        """Add everything that this recording depends on to the state; ``graded`` are tensors whose gradient it may read."""
        known = {(id(of), name) for of, name in zip(*self.modes, strict=True)}
        tensors, leaves, sizes = ({id(t) for t in known_as} for known_as in (self.watched, self.leaves, self.sizes))
        for d in recorder.dependencies.values():
            self.sizes += [of for of in d.sizes if id(of) not in sizes]
            modes = [name for name in d.modes if (id(d.owner.__dict__), name) not in known]
            self.modes[0].extend([d.owner.__dict__] * len(modes))
            self.modes[1].extend(modes)
            self.watched += [t for t in d.tensors() if id(t) not in tensors]
            tensors |= {id(t) for t in d.tensors()}
        self.leaves += [t for i, t in {**recorder.leaves, **{id(t): t for t in graded}}.items() if i not in leaves]
        self.watched += [t for t in self.leaves if id(t) not in tensors]
        self.seen = True

    def state(self) -> tuple[Any, ...]:
        """Return the settings of modules, and which tensors require a gradient, have one, and have hooks."""
        leaves = self.leaves
        return (*self.settings(), *[leaf.grad is None for leaf in leaves], *[leaf._hooks is None for leaf in leaves])

    def settings(self) -> list[Any]:
        """Return the part of the state that a step must not change."""
        return [*map(dict.get, *self.modes), *map(len, self.sizes), *[t.requires_grad for t in self.watched]]

    def changed(self, settings: list[Any]) -> bool:
        """Whether the current settings differ from ``settings``; tensors are compared by identity."""
        pairs = zip(settings, self.settings(), strict=True)
        return any(old is not new and (isinstance(old, Tensor) or isinstance(new, Tensor) or old != new) for old, new in pairs)


class CompiledFunction:
    """A function that is recorded and replayed; made by :func:`compile` and :func:`capture_graph`.

    Call it like the function itself. ``graphs`` are the recordings, ``refused`` lists the reasons for calls that are not replayed. Computed
    results are fresh tensors; tensors that the function stores elsewhere (gradients, attributes) are overwritten by each replay.
    """

    def __init__(self, function: Callable[..., Any], strict: bool = False, fuse: bool = False):
        if is_a(function, (FunctionType, MethodType, BuiltinFunctionType, type)) or is_layer(function):
            update_wrapper(self, function, updated=())
        self.__wrapped__ = self.function = function
        self.strict = strict
        self.fuse = fuse
        self._cases: dict[Any, _Case] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._reached: weakref.WeakSet[Tensor] | None = None  # a tensor, if any, whose queue gets the arrays among the arguments
        self._unsettled = 0  # recordings of calls that changed what they read
        self._refused = ""  # why this function is never replayed
        self._kept = KeptValues()

    def __repr__(self) -> str:
        return f"compile({self.function!r})"

    def __get__(self, instance: object, owner: type | None = None) -> CompiledFunction | MethodType:
        """Bind to an object as a function does, so that methods can be compiled in the body of a class."""
        return MethodType(self, instance) if instance is not None and is_a(self.function, FunctionType) else self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the recordings, which refer to the memory of this function's tensors."""
        return type(self), (self.function, self.strict, self.fuse)

    @property
    def _programs(self) -> list[_Program]:
        return [program for case in self._cases.values() for programs in case.programs.values() for program in programs]

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that calls are replayed from."""
        return [program.graph for program in self._programs if program.graph is not None]

    @property
    def refused(self) -> list[str]:
        """The reasons for calls that are not replayed."""
        return list(dict.fromkeys(reason for reason in (self._refused, *[p.refused for p in self._programs]) if reason))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording.active.recorder is not None:
            return self._plain(args, kwargs)  # part of a step that is being recorded
        with self._lock:
            call = _Call(args, kwargs, self)
            if self._refused or (call.objects and (why := call.not_recordable())):
                if not self._refused and why != "numpy":
                    self._refuse(why)
                return self._plain(call.args, call.kwargs)
            case = self._cases.get(call.key)
            if case is None:
                if len(self._cases) >= MOST_CASES:
                    self._refuse(f"it was called with more than {MOST_CASES} kinds of arguments; pass a number that changes as a tensor")
                    return self._plain(call.args, call.kwargs)
                case = self._cases[call.key] = _Case(call.objects)
            state = case.state()
            for program in case.programs.get(state, ()):
                if not program.contract.changed():
                    break
            else:
                return self._recorded(case, state, None, call)
            graph, guards = program.graph, program.guards
            if graph is None or guards is None:
                return self._plain(call.args, call.kwargs) if program.refused else self._recorded(case, state, program, call)
            for i, t in enumerate(call.tensors):
                if not program.trusted[i] and (t.realize() if t.memory is None else t.memory) is not program.buffers[i]:
                    return self._recorded(case, state, program, call)  # the step may reach this buffer by another name too
            if graph.meets(call.tensors) is not None:
                return self._plain(call.args, call.kwargs)
            if not guards.hold():
                program.graph = program.guards = program.signature = None
                program.trials += 1
                return self._recorded(case, state, program, call)
            result = graph.run(call.tensors)  # unchecked: the key holds shapes, dtypes and queues
            for leaf, gradient in guards.leaves:
                leaf.grad = gradient
            program.trials = 0
            return result

    def queue_of_arrays(self, args: tuple[Any, ...]) -> Any:
        """Return the queue for arrays among ``args``: that of another argument or of a tensor the function reaches, else the active one."""
        active, given = get_active_device().queue, tensors_in(args)
        if not given and self._reached is None:
            found = Contract(self.function).tensors()
            self._reached = weakref.WeakSet(([t for t in found if t.queue is active] or found)[:1])
        return next((t.queue for t in given or self._reached or ()), active)

    def _plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.fuse:
            return self.function(*args, **kwargs)
        with fusing():
            return self.function(*args, **kwargs)

    def _program(self, case: _Case, state: Any, contract: Contract) -> _Program | None:
        """Return the program of this state and contract. If there are too many programs, refuse the function and return ``None``."""
        programs = case.programs.setdefault(state, [])
        for program in programs:
            if program.contract.equals(contract):
                program.contract = contract
                return program
        if len(self._programs) < MOST_CASES * MOST_CASES and len(programs) < MOST_CASES and len(case.programs) <= MOST_CASES:
            programs.append(_Program(contract))
            return programs[-1]
        reasons = [program.refused for program in programs if program.refused]
        other = programs[-1].contract.changed() if programs else "a setting of a module"
        self._refuse_for_good(reasons[0] if reasons else f"{other} is different at every call; pass it as an argument")
        return None

    def _recorded(self, case: _Case, state: Any, program: _Program | None, call: _Call) -> Any:
        """Run the function, record it and return its result. The first recording of a case only determines its state."""
        kept = False
        try:
            result = self._record(case, state, program, call)
            kept = True
            return result
        finally:
            if not kept:  # an error or an interrupt: what is half recorded must not be compared or replayed
                self._cases = {key: other for key, other in self._cases.items() if other is not case}

    def _record(self, case: _Case, state: Any, program: _Program | None, call: _Call) -> Any:
        contract = program.contract if program is not None and program.contract.whole else Contract(self.function, call.objects)
        if program is not None:
            program.contract = contract
        if program is None and case.seen:
            program = self._program(case, state, contract)
            if program is None or program.refused:
                return self._plain(call.args, call.kwargs)
        graded = contract.graded()
        recorder = Recorder(call.tensors, graded)
        gradients = [(leaf, leaf.grad.realize()) for leaf in case.leaves if leaf.grad is not None]
        settings, inside = case.settings(), call.inside()
        with recorder:
            run = _Run(self._plain(call.args, call.kwargs), recorder)
            contract.report_uncalled()
        recorder.finish()
        if [*map(id, call.inside())] != [*map(id, inside)]:
            recorder.host_work("a container among its arguments changes")
        if call.key[-len(hooks.modes) :] != tuple([mode() for mode in hooks.modes]):
            recorder.host_work("grad mode or anomaly mode changes")
        if case.changed(settings):
            recorder.host_work("a setting of a module changes, or which tensors require a gradient")
        case.watch(recorder, graded)
        if program is not None and (recorder.queue is not None or program.signature is not None):
            self._keep(case.programs[state], program, recorder, run, call, gradients)
        return run.result

    def _keep(
        self,
        programs: list[_Program],
        program: _Program,
        recorder: Recorder,
        run: _Run,
        call: _Call,
        gradients: Sequence[tuple[Tensor, Any]],
    ) -> None:
        """Compare a recording with the previous one; build a graph if the two are equal and every value they use is guarded."""
        contract = program.contract
        left = contract.left()
        for one in left:
            recorder.leaves_behind(one.label, one.tensors())
        if (changed := contract.changed(by_itself=True)) and not recorder.problem:
            recorder.problem = f"it changes {changed}, which it reads"
            self._unsettled += 1
            if program.signature is None and self._unsettled <= MOST_TRIALS:  # it may set something up once, such as a cache
                programs.remove(program)
                return
        if recorder.problem:
            self._give_up(program, recorder.problem)
            return
        held = [*contract.tensors(), *recorder.leaves.values(), *[t for d in recorder.dependencies.values() for t in d.tensors()]]
        of_held = [(t, t.grad) for t in held if t.grad is not None]
        held += [gradient for _, gradient in of_held]
        hidden = contract.problem
        if not hidden and recorder.unheld(held):  # tables and counters of netcl belong to the queue
            hidden = recorder.unheld([*held, *tensors_of(instance_dict(recorder.queue).values())])
            hidden = hidden and f"it reads {hidden}{contract.carried()}"
        if self._agrees(program, recorder, run, call.tensors, hidden):
            if hidden:
                self._refuse_for_good(f"{hidden}; pass it, or a value computed from it, as an argument")
                return
            of_call = (run.result, recorder.sources, *[one.value for one in left])
            if hidden := _left_behind(recorder, held, of_call):
                self._refuse_for_good(f"{hidden}; return it, or set an attribute that the function names")
                return
            del of_call  # the run is the only holder of its result: the memory may be shared
            run.result = map_leaves(run.result, partial(_own_copy, recorder=recorder, copies={}))
            read = [(t, g.buffer) for t, g in of_held if id(t) not in recorder.leaves and g.array is None]
            program.guards = Guards(recorder, [*gradients, *read], left)
            contract.leave_out(program.guards.parts)
            program.replayed = True
            program.graph = Graph().build(recorder, call.tensors, run.tree, self._kept)

    def _agrees(self, program: _Program, recorder: Recorder, run: _Run, tensors: Sequence[Tensor], hidden: str) -> bool:
        """Whether this recording equals the previous one. If only buffers differ, the function is recorded again, else it is refused."""
        signature = [*recorder.signature(), _comparable_result(run.tree), tuple(leaf.grad is None for leaf in recorder.leaves.values())]
        before, program.signature = program.signature, signature
        moved = [t.realize() is not old for t, old in zip(tensors, program.buffers, strict=False)]
        program.buffers = [t.realize() for t in tensors]
        unlike, excused = "", True
        if before is not None:
            unlike, excused = _first_difference(before, signature, recorder, program.excuses)
        program.owners = {id(v.buffer): v.owners for v in recorder.values if v.kind == OUTSIDE}
        if unlike and not excused:
            self._refuse_for_good(f"two runs differ: {unlike}{hidden and f' ({hidden})'}")
            return False
        if before is None or unlike:
            program.graph = program.guards = None
            program.trusted = [False] * len(tensors)
            program.trials += 1
            if program.trials > MOST_TRIALS:
                self._give_up(program, hidden or "it works on different memory at every call")
            return False
        program.trusted = [new or old for new, old in zip(moved, program.trusted, strict=True)]
        return True

    def _give_up(self, program: _Program, reason: str) -> None:
        program.refused = reason
        program.signature = program.graph = None
        self._refuse(reason)

    def _refuse_for_good(self, reason: str) -> None:
        """Run the function eagerly from now on, and warn, or raise if ``strict``."""
        self._refused = self._refused or reason
        self._cases.clear()
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        name = self.__dict__.get("__qualname__", type(self.function).__name__)
        remedy = "it runs eagerly, with the same results; docs/internals/replay.md lists what a compiled function may read"
        text = message("compile", f"{name} is not replayed: {reason}", remedy)
        if self.strict:
            raise CaptureError(text)
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%s", text)


def _left_behind(recorder: Recorder, held: Sequence[Tensor], values: Iterable[Any]) -> str:
    """Describe memory of the step that is in use, but not by tensors in ``held`` or ``values``; empty if there is none."""
    known = [*held, *tensors_of(values)]
    if recorder.left_behind(known):  # tables of the queue grow with every plan of the process: they are walked only if needed
        known += tensors_of(instance_dict(recorder.queue).values())
    if recorder.left_behind(known):
        gc.collect()  # what only a reference cycle holds is not left behind
    return recorder.left_behind(known)


def _output(leaf: Any, recorder: Recorder) -> Any:
    """Return a leaf of a result in the form that a graph stores: an :class:`Output` for a tensor, else the leaf itself."""
    if isinstance(leaf, Tensor):
        return recorder.output(leaf)
    if leaf is not None and not isinstance(leaf, (bool, int, str)):
        recorder.host_work(f"the result holds a {type(leaf).__name__}")
    return leaf


def _comparable_result(tree: Any) -> Any:
    """Return a result in a form that is equal for two runs of the same step."""
    if isinstance(tree, Output):
        return (tree.value.known_as(), tree.shape, tree.dtype)
    if isinstance(tree, (list, tuple)):
        return (type(tree), *[_comparable_result(part) for part in tree])
    return tuple((key, _comparable_result(part)) for key, part in tree.items()) if type(tree) is dict else repr(tree)


def _own_copy(leaf: Any, recorder: Recorder, copies: dict[Value, Tensor]) -> Any:
    """Return a leaf of a result; a tensor in recorded memory is copied, because the next replay overwrites that memory.

    ``copies`` holds the copy of each value, so that tensors that share memory share it again.
    """
    if not isinstance(leaf, Tensor) or (value := recorder.value_of(leaf.buffer)).kind not in (MADE, CONSTANT):
        return leaf
    if value not in copies:
        copies[value] = duplicate(leaf)
    return same_memory(copies[value], leaf.shape)


class _Run:
    """The result of a recorded call. No other object holds the result, so that the memory plan may reuse its memory."""

    def __init__(self, result: Any, recorder: Recorder):
        self.result = result
        self.tree = map_leaves(result, partial(_output, recorder=recorder))
        if _are_views(tensors_in(result)):
            recorder.problem = recorder.problem or "a result is a view that shares memory with another tensor: return its clone()"


def _are_views(results: Sequence[Tensor]) -> bool:
    """Whether a result is a view whose base exists, or that shares elements with another result."""
    families: dict[int, dict[int, Tensor]] = {}
    for t in results:
        if is_copy(t):
            families.setdefault(id(writes_of(t)), {})[id(t)] = t
    return any(base_of(t) is not None for t in results) or any(overlap([*views.values()]) for views in families.values())


def _first_difference(before: list[Any], now: list[Any], recorder: Recorder, excuses: Callable[[Any, Any], bool]) -> tuple[str, bool]:
    what, excused = difference(before[:-2], now[:-2], recorder.nodes, excuses)
    if what or before[-2:] == now[-2:]:
        return what, excused
    return f"the results or the set of gradients; the results were {before[-2]}, then {now[-2]}", False


class _Inference(CompiledFunction):
    """A compiled module. In evaluation mode it runs under ``no_grad``, fused as with ``fuse=True``; attributes are those of the module."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._own = frozenset(vars(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function.training:  # type: ignore[attr-defined]
            return super().__call__(*args, **kwargs)
        with hooks.call("no_grad"):
            return super().__call__(*args, **kwargs)

    def _plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.function.training:  # type: ignore[attr-defined]
            return super()._plain(args, kwargs)
        with fusing():
            return self.function(*args, **kwargs)

    def train(self, mode: bool = True) -> _Inference:
        """Set the module's mode, as its own ``train`` does; returns the compiled module."""
        self.function.train(mode)  # type: ignore[attr-defined]
        return self

    def eval(self) -> _Inference:
        """Set the module to evaluation mode; returns the compiled module."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it defines how it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["function"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_own", (name,)):
            object.__setattr__(self, name, value)
        else:
            setattr(self.function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.function, name)


def compile(function: Callable[..., Any] | None = None, *, fuse: bool = False) -> Any:  # named as torch names it
    """Record a model, a function or a whole training step, and replay it without running its Python code.

    >>> import netcl
    >>> double = netcl.compile(lambda x: x * 2 + 1)
    >>> [double(netcl.full((2,), float(i))).tolist() for i in range(5)]
    [[1.0, 1.0], [3.0, 3.0], [5.0, 5.0], [7.0, 7.0], [9.0, 9.0]]

    A training step is a function of its batch that does everything from forward to ``opt.step()``; learning rates, schedulers, counters
    and random numbers advance as in eager code. A function that reads something no guard covers, or whose two recordings differ, is
    refused with one warning that names the cause, and runs eagerly from then on. On the NumPy backend nothing is recorded. Arrays among the
    arguments become tensors. A module in evaluation mode runs without gradients, with ``fuse=True``, and with batch norms folded into the
    layers before them where possible. Values that depend only on weights are usually kept, and computed again after a weight was written.

    ``fuse=True`` also fuses small tensors, and row-wise reductions (softmax, norms) with the ops around them: fewer launches, a little more
    memory, and sums that may be rounded differently.
    """
    if function is None:
        return partial(compile, fuse=fuse)
    if isinstance(function, CompiledFunction):
        return function
    if not callable(function):
        raise TypeError(message("compile", "function must be a model or a callable", given=type(function).__name__))
    return (_Inference if is_layer(function) else CompiledFunction)(function, fuse=fuse)


def capture_graph(function: Callable[..., Any] | None = None, *, inputs: Sequence[Tensor] = (), kept: KeptValues | None = None) -> Any:
    """Record device work. As a decorator: like :func:`compile`, but a function that cannot be replayed raises :class:`CaptureError`.

    As a context manager it records one block over ``inputs``. Run the block once before, so that programs are built and state is created:

    >>> import netcl
    >>> x = netcl.full((2,), 3.0)
    >>> with capture_graph(inputs=[x]) as graph:  # doctest: +SKIP
    ...     y = graph.returns(x * x)
    >>> graph.replay([netcl.full((2,), 4.0)]).tolist()  # doctest: +SKIP
    [16.0, 16.0]

    Values that depend only on tensors other than the inputs, such as packed weights, are usually kept, and computed again after one of
    these tensors was written. Blocks that share ``kept`` share equal results.
    """
    return _captured_block(inputs, KeptValues() if kept is None else kept) if function is None else CompiledFunction(function, strict=True)


@contextmanager
def _captured_block(inputs: Sequence[Tensor], kept: KeptValues) -> Iterator[Graph]:
    if any(isinstance(t.queue, CPUQueue) for t in inputs):
        raise CaptureError(message("capture_graph", "inputs must be on an OpenCL device, got the NumPy backend", "use an OpenCL device"))
    if recording.active.recorder is not None:
        raise CaptureError(message("capture_graph", "blocks cannot be nested: another recording is active"))
    graph, recorder = Graph(), Recorder(inputs)
    with recorder:
        yield graph
        tree = map_leaves(graph.result, partial(_output, recorder=recorder))
    recorder.finish()
    if recorder.problem or recorder.queue is None:
        raise CaptureError(message("capture_graph", f"the block cannot be replayed: {recorder.problem or 'it launches nothing'}"))
    graph.build(recorder, inputs, tree, kept)
