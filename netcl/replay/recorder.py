"""The recorder: an observer of launches, transfers and allocations that stores the commands of a step and the memory they use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.hooks import hooks
from netcl.core.memory import shares_host
from netcl.core.recording import Number
from netcl.core.tensor import Tensor
from netcl.core.tracebacks import user_line
from netcl.core.writes import Writes, writes_of
from netcl.ops.views import base_of
from netcl.replay.graph import Output
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, CommandNode, Value


class CaptureError(RuntimeError):
    """Raised when a step cannot be recorded, or its recording cannot be replayed."""


class Dependency:
    """An object that a recording depends on: attributes in ``modes`` are compared by value, ``parts`` by identity, ``sizes`` by length."""

    def __init__(self, owner: Any, modes: Sequence[str], parts: Sequence[str], sizes: Sequence[Sized]):
        self.owner = owner
        self.sizes = tuple(sizes)
        self.modes = tuple(modes)
        self.names = frozenset(parts)

    def parts(self) -> list[tuple[str, Any]]:
        """Return the current ``(name, value)`` of the named attributes and of every attribute that is a tensor."""
        return [(name, part) for name, part in vars(self.owner).items() if name in self.names or isinstance(part, Tensor)]

    def tensors(self) -> list[Tensor]:
        return [part for _, part in self.parts() if isinstance(part, Tensor)]


class ValueCheck:
    """A check of values on the host before each replay. A tensor that was not written since its last check is not checked again."""

    __slots__ = ("_at", "_last", "_of", "function", "where")

    def __init__(self, where: int | Tensor, function: Callable[[Any], None]):
        self.where, self.function = where, function
        self._of: Callable[[], Tensor | None] = lambda: None  # the tensor that was checked last
        self._last: Writes | None = None
        self._at = 0

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Check the values; ``inputs`` are those of the replay."""
        t = inputs[self.where] if isinstance(self.where, int) else self.where
        writes = t.writes
        if writes is not None and writes is self._last and writes.last == self._at and self._of() is t:
            return
        self.function(t)
        if not shares_host(t.lease):
            self._of, self._last = weakref.ref(t), writes_of(t)
            self._at = self._last.last


def gradients_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, weakref.ref[Tensor] | None]]:
    """Return the tensors with their current gradients."""
    return [(t, None if t.grad is None else weakref.ref(t.grad)) for t in tensors]


class Recorder:
    """A recording of one run of a step: ``with recorder: step(...)``.

    ``problem`` is the reason why the run cannot be replayed, or empty. ``graded`` are tensors whose gradient the step may read or set.
    """

    replays = True

    def __init__(self, inputs: Sequence[Tensor], graded: Iterable[Tensor] = ()):
        self.nodes: list[CommandNode] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.sources: list[Callable[[], Any]] = []
        self.undos: list[Callable[[], None] | None] = []
        self.asked: list[int] = []  # number of nodes before each source was called
        self.facts: list[tuple[Callable[[], Any], Any]] = []
        self.checks: list[ValueCheck] = []
        self.ends: dict[Callable[[], None], None] = {}
        self.dependencies: dict[int, Dependency] = {}
        self.leaves: dict[int, Tensor] = {}
        self.queue: Any = None
        self.problem = ""
        self.trains = False
        self._now: dict[int, Value] = {}  # which value a buffer holds
        self._gradients = gradients_of(graded)  # of other leaves, at their first use
        self._used = 0
        for t in inputs:
            if id(t.buffer) in self._now:
                self.problem = self.problem or "two inputs share their memory"
            self.inputs.append(self._add(Value(INPUT, t.buffer, t.nbytes, None, len(self.inputs))))

    def __enter__(self) -> Recorder:
        hooks.settle()  # values deferred before the step are not part of it
        entered = False
        try:
            hooks.launch_observers.append(self.launch)
            recording.start(self)
            entered = True
        finally:
            if not entered:  # an interrupt: __exit__ will not be called
                self._end()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                hooks.settle()
        finally:
            try:
                self._end()
            finally:
                self._end()  # an interrupt may have come before the first call did anything

    def _end(self) -> None:
        for end in self.ends:
            end()
        if recording.active.recorder is self:
            recording.stop()
        if self.launch in hooks.launch_observers:
            hooks.launch_observers.remove(self.launch)

    # ---- values

    def _add(self, value: Value) -> Value:
        self._now[id(value.buffer)] = value
        self.values.append(value)
        return value

    def value_of(self, buffer: Any, tensor: Any = None) -> Value:
        """Return the value that a buffer holds now. A buffer that existed before the step is a value from outside."""
        value = self._now.get(id(buffer))
        if value is None or value.buffer is not buffer:
            value = self._add(Value(OUTSIDE, buffer, buffer.size))
        if tensor is not None and value.kind == OUTSIDE:
            value.lease = value.lease or tensor.pool_handle
            value.versions[writes_of(tensor)] = None
            if all(owner() is not tensor for owner in value.owners):
                value.owners.append(weakref.ref(tensor))
                if tensor.requires_grad and tensor.grad_fn is None:
                    self._gradients += gradients_of([tensor])
        return value

    def _touch(self, value: Value) -> Value:
        value.last = len(self.nodes)
        if value.first < 0:
            value.first = value.last
            if value.kind not in (INPUT, OUTSIDE):  # the others are known by what they are
                value.place = self._used
                self._used += 1
        return value

    def _append(self, node: CommandNode) -> None:
        for value in (*node.reads, *node.writes):
            self._touch(value)
        for value in node.writes:
            value.written = value.written or node.kind != "upload"
        node.op = recording.active.op
        self.nodes.append(node)

    # ---- launches, transfers and allocations

    def launch(self, kernel: Any, queue: Any, sizes: tuple[int, ...], local: Any, args: tuple[Any, ...], event: Any) -> None:
        del event
        if recording.active.recorder is not self:
            return  # a launch of another thread, or inside ``paused``
        self._on(queue)
        described: list[Any] = []
        reads: list[Value] = []
        writes: list[Value] = []
        for arg, only_read in zip(args, kernel.reads_only, strict=True):
            buffer = arg.buffer if isinstance(arg, Tensor) else arg if hasattr(arg, "int_ptr") else None
            if buffer is None:
                described.append(arg)
                continue
            value = self.value_of(buffer, arg if isinstance(arg, Tensor) else None)
            described.append(value)
            (reads if only_read else writes).append(value)
            if value.kind == MADE and not only_read and isinstance(arg, Tensor):
                value.noted(arg)  # if the step leaves it behind, replays overwrite it
        self._append(CommandNode("launch", tuple(described), tuple(reads), tuple(writes), kernel, sizes, local))

    def _on(self, queue: Any) -> None:
        if self.queue is None:
            self.queue = queue
        elif queue is not self.queue:
            self.problem = self.problem or "it works on more than one queue"

    def allocated(self, handle: Any) -> None:
        if not isinstance(handle.buffer, np.ndarray):
            self._add(Value(MADE, handle.buffer, handle.nbytes, weakref.ref(handle)))

    def upload(self, buffer: Any, stored: Any) -> None:
        value = self.value_of(buffer)
        if value.kind == MADE and value.first < 0:
            value.kind, value.lease = CONSTANT, value.held()
        kept = np.ascontiguousarray(stored).copy() if stored.nbytes else stored
        self._append(CommandNode("upload", (value, kept), (), (value,)))

    def fill(self, buffer: Any, pattern: Any, offset: int, nbytes: int) -> None:
        value = self.value_of(buffer)
        self._append(CommandNode("fill", (value, pattern, offset, nbytes), (), (value,)))

    def copy(self, target: Any, source: Any, nbytes: int) -> None:
        to, of = self.value_of(target), self.value_of(source)
        self._append(CommandNode("copy", (to, of, nbytes), (of,), (to,)))

    def changed(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if t.array is None:
                self.value_of(t.buffer).noted(t)

    # ---- work of the host

    def read(self, what: str) -> None:
        if not self.problem:
            line = user_line()
            self.problem = f"it reads values on the host ({what} at {line.filename}:{line.lineno}), and its further work may depend on them"

    def host_work(self, what: str) -> None:
        self.problem = self.problem or f"it runs Python that a replay would leave out: {what}"

    def again(self, function: Callable[[], Any], undo: Callable[[], None] | None = None) -> Any:
        with recording.paused():
            answer = function()
        place = len(self.sources)
        self.sources.append(function)
        self.undos.append(undo)
        self.asked.append(len(self.nodes))
        if isinstance(answer, float):
            return Number.of(answer, place, 0)
        if isinstance(answer, (list, tuple)):
            return [Number.of(number, place, index) for index, number in enumerate(answer)]
        return answer

    def requires(self, fact: Callable[[], Any]) -> None:
        if all(known is not fact for known, _ in self.facts):
            self.facts.append((fact, fact()))

    def depends(self, owner: Any, modes: Sequence[str], parts: Sequence[str], sizes: Sequence[Sized]) -> None:
        if id(owner) not in self.dependencies:
            self.dependencies[id(owner)] = Dependency(owner, modes, parts, sizes)

    def leaf(self, tensor: Tensor) -> None:
        self.leaves.setdefault(id(tensor), tensor)

    def made(self, tensor: Tensor, or_given: bool = False) -> bool:
        value = self._now.get(id(tensor.buffer))
        return value is not None and value.kind in (MADE, INPUT if or_given else MADE) and value.buffer is tensor.buffer

    def check(self, tensor: Tensor, function: Callable[[Any], None]) -> None:
        value = self.value_of(tensor.buffer, tensor)
        with recording.paused():
            function(tensor)
        if value.kind == INPUT:
            self.checks.append(ValueCheck(value.place, function))
        elif value.kind == OUTSIDE:
            self.checks.append(ValueCheck(tensor, function))
        elif value.kind != CONSTANT or value.written:  # a constant needs one check only
            self.read("a check of values that the step computes")

    # ---- after the run

    def output(self, tensor: Tensor) -> Output:
        """Return the :class:`Output` for a tensor of the result; its value is kept to the end of the step."""
        if tensor.array is not None:
            self.problem = self.problem or "a result is on the NumPy backend"
            return Output(Value(CONSTANT, None, 0), tensor.shape, tensor.dtype, tensor)
        if tensor.grad_fn is not None and tensor.grad_fn.rule is not None:
            self.problem = self.problem or "a result carries its history for backward: record the whole step, or use no_grad()"
        value = self.value_of(tensor.buffer, tensor)
        self._touch(value)
        return Output(value, tensor.shape, tensor.dtype, tensor if value.kind == OUTSIDE else None)

    def leaves_behind(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Report that the step has set ``name`` to these tensors. A replay sets nothing: none may be an argument or a view of one."""
        inputs = {id(value.buffer) for value in self.inputs}
        owners = [t if (base := base_of(t)) is None else base for t in tensors]
        if any(t.array is None and id(t.buffer) in inputs for t in owners):
            self.problem = self.problem or f"it leaves an argument behind ({name}), which a replay would not"

    def finish(self) -> None:
        """Check that memory from outside has an owner, and find the leaves whose gradient was replaced."""
        if any(v.kind == OUTSIDE and v.lease is None and not v.owners and v.first >= 0 for v in self.values):
            self.problem = self.problem or "it fills or copies memory from outside that no kernel uses"
        for t, before in self._gradients:
            if (t.grad is None) != (before is None) or (before is not None and t.grad is not before()):
                self.leaf(t)

    def unheld(self, held: Iterable[Tensor]) -> str:
        """Describe a tensor from outside the step that is not in ``held``: no guard notices its replacement. Empty if there is none."""
        known = {id(t.buffer) for t in held if t.array is None}
        for value in self.values:
            if value.kind == OUTSIDE and value.first >= 0 and value.owners and id(value.buffer) not in known:
                shape = next((t.shape for ref in value.owners if (t := ref()) is not None), None)
                return f"a tensor{f' of shape {shape}' if shape is not None else ''} that no name in its code leads to"
        return ""

    def left_behind(self, known: Iterable[Tensor]) -> str:
        """Describe memory that the step allocated and that something other than the ``known`` tensors holds; empty if there is none."""
        buffers = {id(t.buffer) for t in known if t.array is None}
        for value in self.values:
            if value.kind == MADE and value.first >= 0 and id(value.buffer) not in buffers and value.held() is not None:
                writer = next((node.op or node.name for node in self.nodes if value in node.writes), "an op")
                return f"it leaves a result of {writer} behind ({value.nbytes} bytes), and no name in its code leads to it"
        return ""

    def signature(self) -> list[tuple[Any, ...]]:
        """Return the recording in a form that is equal for two runs of the same step."""
        return [node.signature() for node in self.nodes]


def difference(
    a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]], nodes: Sequence[CommandNode], excuses: Callable[[Any, Any], bool]
) -> tuple[str, bool]:
    """Return the first difference between two recordings, or "", and whether ``excuses`` accepts all differences."""
    elsewhere = ""
    for i, (one, other, node) in enumerate(zip(a, b, nodes, strict=False)):
        name = f"{node.name} of {node.op}" if node.op else node.name
        if one[:-1] != other[:-1]:
            sizes = f" over {one[2]}, then {other[2]} items" if one[1] is other[1] and one[2] != other[2] else ""
            return f"command {i} was {getattr(one[1], 'name', one[0])}, then {name}{sizes}", False
        for at, (old, new) in enumerate(zip(one[-1], other[-1], strict=False)):
            if old != new:
                what = f"argument {at} of command {i} ({name}) was {_short(old)}, then {_short(new)}"
                if not excuses(old, new):
                    return what, False
                elsewhere = elsewhere or what
    return (elsewhere, True) if len(a) == len(b) else (f"it enqueued {len(a)} commands, then {len(b)}: {_first_more(a, b, nodes)}", False)


def _first_more(a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]], nodes: Sequence[CommandNode]) -> str:
    at = min(len(a), len(b))
    if len(a) > at:
        return f"command {at} ({getattr(a[at][1], 'name', a[at][0])}) is missing"
    return f"command {at} ({nodes[at].name}{' of ' + nodes[at].op if nodes[at].op else ''}) is new"


def _short(part: Any) -> str:
    text = str(part[-1] if isinstance(part, tuple) and isinstance(part[0], str) and part[0] not in (MADE, OUTSIDE, INPUT) else part)
    return text if len(text) < 60 else f"{text[:57]}..."
