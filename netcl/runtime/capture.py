"""Record a step once, replay it without its Python: ``netcl.compile`` and ``capture_graph``.

A compiled function runs as it is the first time (programs are built, state is made), is recorded the second and third time, and
replayed from then on if both recordings are equal. If they differ, or if the function reads or calls something that no guard covers
(:mod:`netcl.runtime.contract`), it is refused: it runs as plain Python for good, with one warning that names the cause. Guards are checked
at every call: shapes, training or evaluation, which gradients exist, the memory of parameters, what is read around the function. Other
answers select another recording, and several are kept.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.device import CPUQueue, get_active_device
from netcl.core.errors import message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor, duplicate
from netcl.engine.lazy_graph import fusing
from netcl.runtime.contract import EXACTLY_PLAIN, instance_dict, is_a, is_layer, items_of, tensors_of
from netcl.runtime.followed import Seen
from netcl.runtime.graph import CONSTANT, INPUT, MADE, OUTSIDE, Graph, Output
from netcl.runtime.recorder import CaptureError, Recorder, difference
from netcl.runtime.surroundings import Left, Surroundings

__all__ = ["CaptureError", "CompiledFunction", "capture_graph", "compile"]

log = logging.getLogger("netcl")

Fixed = tuple[list[tuple[Any, str, Any]], list[tuple[Any, Any, Any]]]  # what must stay the same object, by name and of functions

MOST_CASES = 16  # kinds of arguments that are recorded; more would hold too much memory
MOST_LESSONS = 64  # times that functions nobody knew of are found
MOST_TRIALS = 8  # recordings that do not lead to a replay until a step is left alone


class _Calls:
    """Arguments taken apart: the tensors a replay rebinds, each memory once, and everything else as a key."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], queue: Any):
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self.around: tuple[Any, ...] = ()
        self.queue = queue
        self.args = tuple([arg if type(arg) is Tensor else self._part(arg) for arg in args])
        self.kwargs = {name: self._part(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        key = [self._tensor_key(arg) if type(arg) is Tensor else self._key(arg) for arg in self.args]
        named = [(name, self._key(arg)) for name, arg in self.kwargs.items()] if kwargs else ()
        self.key = (tuple(key), tuple(named), id(get_active_device()), *[mode() for mode in hooks.modes])
        self.with_history = bool(self.objects) and any([is_a(t, Tensor) and t.grad_fn is not None for t in self.objects])

    def _part(self, arg: Any) -> Any:
        if is_a(arg, Tensor):
            return arg
        if is_a(arg, np.ndarray):
            return Tensor.from_host(self._queue(), arg)
        if type(arg) in (list, tuple):
            parts: Any = type(arg)([self._part(part) for part in arg])
        elif type(arg) is dict:
            parts = {name: self._part(part) for name, part in arg.items()}
        else:
            return arg
        return parts if any([new is not old for new, old in zip(_items(parts), _items(arg), strict=True)]) else arg  # which it may change

    def held(self) -> list[int]:
        """What is in the containers among the arguments now."""
        return [id(part) for arg in (*self.args, *self.kwargs.values()) for part in _inside(arg)]

    def _queue(self) -> Any:
        return self.queue or get_active_device().queue

    def _key(self, arg: Any) -> Any:
        if is_a(arg, Tensor):
            return self._tensor_key(arg)
        if type(arg) in (list, tuple):
            return (type(arg).__name__, *[self._key(part) for part in arg])
        if type(arg) is dict:
            return ("dict", *[(name, self._key(part)) for name, part in arg.items()])
        if type(arg) in EXACTLY_PLAIN or is_a(arg, np.generic):
            return (type(arg), repr(arg))
        self.objects.append(arg)  # held, so that its number stays its own
        return ("object", id(arg))

    def _tensor_key(self, t: Tensor) -> tuple[Any, ...]:
        """A tensor that learns is this very tensor; of any other, only shape, dtype and place are looked at."""
        if t.requires_grad or t.context is None:
            self.objects.append(t)
            return ("object", id(t), t.backend)
        buffer = t.buffer
        for i, other in enumerate(self.tensors):
            if other.buffer is buffer:
                return ("as", i, t.shape, t.dtype)
        self.tensors.append(t)
        return (t.shape, t.dtype, id(t.queue))

    @property
    def on_numpy(self) -> bool:
        return bool(self.objects) and any([is_a(t, Tensor) and t.context is None for t in self.objects])


def _items(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _inside(arg: Any) -> Iterator[Any]:
    if type(arg) in (list, tuple, dict):
        for part in items_of(arg):
            yield part
            yield from _inside(part)


class _Program:
    """The recordings of one case in one state: what the last one told, and the graph, once two agree."""

    def __init__(self) -> None:
        self.story: Any = None
        self.trials = 0
        self.graph: Graph | None = None
        self.guards: Guards | None = None
        self.trusted: list[bool] = []
        self.buffers: list[Any] = []
        self.owners: dict[int, list[Any]] = {}  # of the memory from outside that the last recording used
        self.fixed: Fixed = ([], [])
        self.refused = ""

    def excuses(self, replayed: bool, old: Any, new: Any) -> bool:
        """Whether two recordings may use two memories in a place: the tensors that lay in the first are gone, or lie elsewhere by now; or
        it was an argument, and the step reaches it by another way too, which a recording after replays is there to find out."""
        if {old[0], new[0]} == {INPUT, OUTSIDE}:
            return replayed
        if old[0] != OUTSIDE or new[0] != OUTSIDE:
            return False
        return not any((t := ref()) is not None and t.buffer is old[1] for ref in self.owners.get(id(old[1]), ()))


class Guards:
    """What must still hold for a graph to be replayed, and what the host notes after a replay: gradients of leaves."""

    def __init__(self, recorder: Recorder, gradients: Sequence[tuple[Tensor, Any]], left: Sequence[Left], fixed: Fixed):
        names, self.functions = fixed
        self.facts = recorder.facts
        self.left = [one for one in left if not (one.name == "grad" and id(one.owner) in recorder.leaves)]
        used = {id(v.buffer) for v in recorder.values if v.kind == OUTSIDE and v.first >= 0}
        self.gradients = [(leaf, buffer) for leaf, buffer in gradients if id(buffer) in used]
        dependencies = recorder.dependencies.values()
        self.parts = [*names, *[(d.owner.__dict__, name, part) for d in dependencies for name, part in d.parts()]]
        owned = [(t, t.buffer) for d in dependencies for t in d.tensors()]
        outside = [(ref, v.buffer) for v in recorder.values if v.kind == OUTSIDE for ref in v.owners]
        known = {id(t) for t, _ in owned}
        self.owned = owned
        self.outside = [(ref, buffer) for ref, buffer in outside if ref() is not None and id(ref()) not in known]
        self.leaves = [(leaf, leaf.grad) for leaf in recorder.leaves.values()]

    def hold(self) -> bool:
        """Whether the recorded launches still mean what they did."""
        for attributes, name, part in self.parts:
            if attributes.get(name) is not part:
                return False
        for function, code, defaults in self.functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        for one in self.left:
            if not one.is_there():
                return False
        for t, buffer in self.owned:
            if t.buffer is not buffer:
                return False
        for leaf, buffer in self.gradients:
            if leaf.grad is None or leaf.grad.buffer is not buffer:
                return False
        for ref, buffer in self.outside:
            owner = ref()
            if owner is None or owner.buffer is not buffer:
                return False
        return all(fact() == said for fact, said in self.facts)

    def note(self) -> None:
        """After a replay."""
        for leaf, gradient in self.leaves:
            leaf.grad = gradient


class _Case:
    """Calls with one kind of arguments: whom their state is asked of, and the programs by state."""

    def __init__(self, objects: Sequence[Any]):
        self.objects = list(objects)
        self.modes: tuple[list[dict[str, Any]], list[str]] = [], []  # mappings, and names in them
        self.sizes: list[Sized] = []
        self.watched: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.programs: dict[Any, _Program] = {}
        self.seen = False

    def watch(self, recorder: Recorder) -> None:
        """Ask everything this recording rested on from now on."""
        known = {(id(of), name) for of, name in zip(*self.modes, strict=True)}
        tensors, leaves, sizes = ({id(t) for t in known_as} for known_as in (self.watched, self.leaves, self.sizes))
        for d in recorder.dependencies.values():
            self.sizes += [of for of in d.sizes if id(of) not in sizes]
            modes = [name for name in d.modes if (id(d.owner.__dict__), name) not in known]
            self.modes[0].extend([d.owner.__dict__] * len(modes))
            self.modes[1].extend(modes)
            self.watched += [t for t in d.tensors() if id(t) not in tensors]
            tensors |= {id(t) for t in d.tensors()}
        self.leaves += [t for t in recorder.leaves.values() if id(t) not in leaves]
        self.watched += [t for t in self.leaves if id(t) not in tensors]
        self.seen = True

    def state(self) -> tuple[Any, ...]:
        """Training or evaluation and other settings of every module, which tensors learn, which gradients and hooks there are."""
        return (*self.settings(), *[leaf.grad is None for leaf in self.leaves], *[leaf._hooks is None for leaf in self.leaves])

    def settings(self) -> tuple[Any, ...]:
        """What of that a replay leaves as it is."""
        return (*map(dict.get, *self.modes), *map(len, self.sizes), *[t.requires_grad for t in self.watched])

    def changed(self, settings: tuple[Any, ...]) -> bool:
        """Whether settings are no longer what they were. A tensor is another one or not: its values are not compared."""
        pairs = zip(settings, self.settings(), strict=True)
        return any(old is not new and (isinstance(old, Tensor) or isinstance(new, Tensor) or old != new) for old, new in pairs)


class CompiledFunction:
    """A function that is recorded and replayed; made by :func:`compile` and :func:`capture_graph`.

    Call it as the function itself. ``graphs`` are the recordings, ``refused`` says why some are not there. Results are fresh tensors;
    tensors that the function leaves behind (gradients, attributes) are overwritten by each replay.
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
        self._queue: Any = None
        self._lessons = 0
        self._refused = ""  # why this function is never replayed again
        self._surroundings = Surroundings(function)

    def __repr__(self) -> str:
        return f"compile({self.function!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has recordings of its own: those here are over the memory of this function's tensors."""
        return type(self), (self.function, self.strict, self.fuse)

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that calls are replayed from."""
        return [p.graph for case in self._cases.values() for p in case.programs.values() if p.graph is not None]

    @property
    def refused(self) -> list[str]:
        """Why calls were not recorded."""
        reasons = [p.refused for case in self._cases.values() for p in case.programs.values()]
        return list(dict.fromkeys(reason for reason in (self._refused, *reasons) if reason))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording.active.recorder is not None:
            return self._plain(args, kwargs)  # part of a step that is being recorded
        with self._lock:
            call = _Calls(args, kwargs, self._queue)
            if self._refused or call.on_numpy or call.with_history:
                return self._left_alone(call)
            call.around, _ = self._surroundings(call.objects)
            case = self._cases.get((call.key, call.around))
            if case is None:
                if len(self._cases) >= MOST_CASES:
                    kinds = f"more than {MOST_CASES} kinds of arguments and numbers around it"
                    self._refuse(f"it was called with {kinds}; one that counts is another each time")
                    return self._plain(call.args, call.kwargs)
                self._knows_more(call)
                case = self._place(_Case(call.objects), call)
            return self._run(case, call)

    def _knows_more(self, call: _Calls) -> bool:
        """Look which functions take part. If they read more than was told, nothing is known to be as before: all is recorded again."""
        more = self._surroundings.search(call.objects)
        if more:
            self._cases.clear()
            self._lessons += 1
        if not self._surroundings.complete or self._lessons > MOST_LESSONS:
            self._refuse_for_good("the functions it calls are too many, or others at every call")
        return more

    def _place(self, case: _Case, call: _Calls) -> _Case:
        """Put a case where calls like this one find it, from what is around by now."""
        call.around, kept = self._surroundings(call.objects)
        case.objects += kept
        case.programs.clear()
        self._cases[call.key, call.around] = case
        return case

    def _left_alone(self, call: _Calls) -> Any:
        if call.with_history and not self._refused:
            self._refuse("an argument carries its history for backward: compile the whole step, or detach() it")
        return self._plain(call.args, call.kwargs)

    def _plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.fuse:
            return self.function(*args, **kwargs)
        with fusing():
            return self.function(*args, **kwargs)

    def _run(self, case: _Case, call: _Calls) -> Any:
        state = case.state()
        program = case.programs.get(state)
        if program is not None and program.graph is not None:
            if program.graph.meets(call.tensors) is not None:
                return self._plain(call.args, call.kwargs)
            result, done = self._replayed(program, call.tensors)
            if done:
                return result
        elif program is not None and program.refused:
            return self._plain(call.args, call.kwargs)
        elif program is None and len(case.programs) >= MOST_CASES:
            self._refuse(f"it was found in more than {MOST_CASES} states: a setting of a module that changes is another one each time")
            return self._plain(call.args, call.kwargs)
        return self._recorded(case, state, call)

    def _replayed(self, program: _Program, tensors: Sequence[Tensor]) -> tuple[Any, bool]:
        assert program.graph is not None and program.guards is not None
        for trusted, t, buffer in zip(program.trusted, tensors, program.buffers, strict=True):
            if not trusted and t.buffer is not buffer:
                return None, False  # never seen to move: the step may reach this memory on other ways too
        if not program.guards.hold():
            program.graph = program.guards = program.story = None
            program.trials += 1
            return None, False
        result = program.graph.run(tensors)  # unchecked: the key of the case holds shapes, dtypes and queues
        program.guards.note()
        program.trials = 0
        return result, True

    def _recorded(self, case: _Case, state: Any, call: _Calls) -> Any:
        """Run as it is, listening; the first time of a case only to see what its state is made of."""
        if sys.getprofile() is not None:
            self._refuse("another profiler is at work (sys.setprofile), so that what it calls cannot be seen")
            return self._plain(call.args, call.kwargs)
        recorder = Recorder(call.tensors)
        gradients = [(leaf, leaf.grad.buffer) for leaf in case.leaves if leaf.grad is not None]
        settings, held = case.settings(), [*call.held()]
        kept = [part for arg in (*call.args, *call.kwargs.values()) for part in _inside(arg)]  # so that their numbers stay their own
        with recorder, self._surroundings.observed(call.objects) as seen:
            run = _Run(self._plain(call.args, call.kwargs), recorder)
        recorder.finish()
        if call.held() != held:
            recorder.host_work("a container among its arguments changes")
        del kept
        if case.changed(settings):
            recorder.host_work("a setting of a module changes, or which tensors learn")
        known = case.seen
        case.watch(recorder)
        if self._knows_more(call):
            self._place(case, call)
            return run.result
        program = case.programs.get(state)
        if recorder.queue is not None or (program is not None and program.story is not None):
            self._queue = recorder.queue or self._queue
            if known:
                self._keep(case.programs.setdefault(state, _Program()), recorder, run, call, gradients, seen)
        return run.result

    def _keep(
        self, program: _Program, recorder: Recorder, run: _Run, call: _Calls, gradients: Sequence[tuple[Tensor, Any]], seen: Seen
    ) -> None:
        """Compare a recording with the one before; make it a graph if they agree and everything it rests on is guarded."""
        left = self._surroundings.left(call.objects)
        for one in left:
            recorder.leaves_behind(one.name, one.tensors())
        if self._surroundings(call.objects)[0] != call.around:
            recorder.host_work("what it reads around it changes")
        if recorder.problem:
            self._give_up(program, recorder.problem)
            return
        fixed, (hidden, held) = self._surroundings.fixed(), self._surroundings.unguarded(call.objects)
        held += [*recorder.leaves.values(), *[t for d in recorder.dependencies.values() for t in d.tensors()]]
        of_held = [(t, t.grad) for t in held if t.grad is not None]
        held += [gradient for _, gradient in of_held]
        if not hidden and recorder.unheld(held):  # netcl's own tables and counters belong to the queue
            hidden = recorder.unheld([*held, *tensors_of(instance_dict(recorder.queue).values())])
        hidden = f"it reads what is not guarded: {hidden}" if hidden else seen.problem and f"it calls {seen.problem}"
        if self._agrees(program, recorder, run, call.tensors, hidden, fixed):
            if hidden:
                self._refuse_for_good(f"{hidden}; pass it, or what comes of it, as an argument")
                return
            run.copy_result(recorder)
            program.graph = Graph().build(recorder, call.tensors, run.tree)
            read = [(t, g.buffer) for t, g in of_held if id(t) not in recorder.leaves and g.array is None]
            program.guards = Guards(recorder, [*gradients, *read], left, fixed)

    def _agrees(self, program: _Program, recorder: Recorder, run: _Run, tensors: Sequence[Tensor], hidden: str, fixed: Fixed) -> bool:
        """Whether this recording tells the story of the one before. If not, the function is refused, unless memory moved, an argument was
        also reached by another way, or functions were replaced: then it is recorded again."""
        story = [*recorder.story(), _comparable_result(run.tree), tuple(leaf.grad is None for leaf in recorder.leaves.values())]
        before, program.story = program.story, story
        moved = [t.buffer is not old for t, old in zip(tensors, program.buffers, strict=False)]
        program.buffers = [t.buffer for t in tensors]
        replaced = not _same_fixed(program.fixed, fixed)
        unlike, excused = "", True
        if before is not None:
            unlike, excused = _first_difference(before, story, recorder, partial(program.excuses, program.graph is not None))
        program.fixed, program.owners = fixed, {id(v.buffer): v.owners for v in recorder.values if v.kind == OUTSIDE}
        if unlike and not (excused or replaced):
            self._refuse_for_good(f"two runs differ: {unlike}{hidden and f' ({hidden})'}")
            return False
        if before is None or unlike:
            program.trials += 1
            if program.trials > MOST_TRIALS:
                self._give_up(program, "the memory it works on is another one at every call")
            return False
        program.trusted = [new or old for new, old in zip(moved, program.trusted or [False] * len(moved), strict=True)]
        return True

    def _give_up(self, program: _Program, reason: str) -> None:
        program.refused = reason
        program.story = program.graph = None
        self._refuse(reason)

    def _refuse_for_good(self, reason: str) -> None:
        """Run the function eagerly from now on."""
        self._refused = self._refused or reason
        self._cases.clear()
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        name = self.__dict__.get("__qualname__", type(self.function).__name__)
        remedy = "results are right, calls cost what they cost without; docs/capture.md says how to make it replayable"
        text = message("compile", f"{name} is not replayed: {reason}", remedy)
        if self.strict:
            raise CaptureError(text)
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%s", text)


def _remembered_outputs(result: Any, recorder: Recorder) -> Any:
    """A result with what is remembered of each tensor in its place."""
    if isinstance(result, Tensor):
        return recorder.output(result)
    if isinstance(result, (list, tuple)):
        parts = [_remembered_outputs(part, recorder) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if type(result) is dict:
        return {key: _remembered_outputs(part, recorder) for key, part in result.items()}
    if result is not None and not isinstance(result, (bool, int, str)):
        recorder.host_work(f"the result holds a {type(result).__name__}")
    return result


def _comparable_result(tree: Any) -> Any:
    """A result in a form that two runs of a step agree on."""
    if isinstance(tree, Output):
        return (tree.value.known_as(), tree.shape, tree.dtype)
    if isinstance(tree, (list, tuple)):
        return tuple(_comparable_result(part) for part in tree)
    return tuple((key, _comparable_result(part)) for key, part in tree.items()) if type(tree) is dict else repr(tree)


def _own_copy(result: Any, recorder: Recorder) -> Any:
    """A result in memory of its own: what was recorded is overwritten by the next replay."""
    if isinstance(result, Tensor):
        return duplicate(result) if recorder.value_of(result.buffer).kind in (MADE, CONSTANT) else result
    if isinstance(result, (list, tuple)):
        parts = [_own_copy(part, recorder) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return {key: _own_copy(part, recorder) for key, part in result.items()} if type(result) is dict else result


class _Run:
    """What a recorded call returned, and what is remembered of it. The only holder of the result: its memory may be shared."""

    def __init__(self, result: Any, recorder: Recorder):
        self.result = result
        self.tree = _remembered_outputs(result, recorder)

    def copy_result(self, recorder: Recorder) -> None:
        self.result = _own_copy(self.result, recorder)


def _first_difference(before: list[Any], now: list[Any], recorder: Recorder, excuses: Callable[[Any, Any], bool]) -> tuple[str, bool]:
    what, excused = difference(before[:-2], now[:-2], recorder.nodes, excuses)
    if what or before[-2:] == now[-2:]:
        return what, excused
    return f"what they return or leave behind, {before[-2]}, then {now[-2]}", False


def _same_fixed(old: Fixed, new: Fixed) -> bool:
    """Whether classes, libraries and functions are what they were."""
    pairs = [(a, b) for i in (0, 1) for one, other in zip(old[i], new[i], strict=False) for a, b in zip(one, other, strict=True)]
    return [*map(len, old)] == [*map(len, new)] and all(a is b or (type(a) is str and a == b) for a, b in pairs)


class _Inference(CompiledFunction):
    """A compiled module: in evaluation nothing is recorded for backward. Attributes are the module's."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._own = frozenset(vars(self))

    def _plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.function.training:  # type: ignore[attr-defined]
            return super()._plain(args, kwargs)
        with hooks.call("no_grad"):
            return super()._plain(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["function"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_own", (name,)):
            object.__setattr__(self, name, value)
        else:
            setattr(self.function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.function, name)


def compile(function: Callable[..., Any] | None = None, *, fuse: bool = False) -> Any:  # named as torch names it
    """Make a model, a function or a whole training step replayable: recorded once, then enqueued without its Python.

    >>> import netcl
    >>> double = netcl.compile(lambda x: x * 2 + 1)
    >>> [double(netcl.full((2,), float(i))).tolist() for i in range(5)]
    [[1.0, 1.0], [3.0, 3.0], [5.0, 5.0], [7.0, 7.0], [9.0, 9.0]]

    A training step is a function of its batch that does everything from forward to ``opt.step()``; learning rates, schedulers, counters
    and random numbers go on as they would without. A function that reads something no guard covers, or whose two recordings differ, is
    refused with one warning that names the cause, and runs eagerly from then on. On the NumPy backend nothing is recorded. Arrays among the
    arguments become tensors. A module is compiled for evaluation.

    What eager code fuses is recorded fused. ``fuse=True`` fuses small tensors too, and joins softmaxes, norms and other folds of rows with
    what surrounds them: fewer launches, for a little more memory and sums that may be rounded otherwise.
    """
    if function is None:
        return partial(compile, fuse=fuse)
    if isinstance(function, CompiledFunction):
        return function
    if not callable(function):
        raise TypeError(message("compile", "a model or a function is compiled", given=type(function).__name__))
    return (_Inference if is_layer(function) else CompiledFunction)(function, fuse=fuse)


def capture_graph(function: Callable[..., Any] | None = None, *, inputs: Sequence[Tensor] = ()) -> Any:
    """Record device work. As decorator: like :func:`compile`, but what cannot be replayed raises :class:`CaptureError`.

    As context manager it records one block, over ``inputs``; run the block once before, so that programs are built and state is made:

    >>> import netcl
    >>> x = netcl.full((2,), 3.0)
    >>> with capture_graph(inputs=[x]) as graph:  # doctest: +SKIP
    ...     y = graph.returns(x * x)
    >>> graph.replay([netcl.full((2,), 4.0)]).tolist()  # doctest: +SKIP
    [16.0, 16.0]
    """
    return _captured_block(inputs) if function is None else CompiledFunction(function, strict=True)


@contextmanager
def _captured_block(inputs: Sequence[Tensor]) -> Iterator[Graph]:
    if any(isinstance(t.queue, CPUQueue) for t in inputs):
        raise CaptureError(message("capture_graph", "there is nothing to record on the NumPy backend", "use an OpenCL device"))
    if recording.active.recorder is not None:
        raise CaptureError(message("capture_graph", "a block is being recorded already"))
    graph, recorder = Graph(), Recorder(inputs)
    with recorder:
        yield graph
        tree = _remembered_outputs(graph.result, recorder)
    recorder.finish()
    if recorder.problem or recorder.queue is None:
        raise CaptureError(message("capture_graph", f"the block cannot be replayed: {recorder.problem or 'it launches nothing'}"))
    graph.build(recorder, inputs, tree)
