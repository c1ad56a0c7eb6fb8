"""The tape: the graph of recorded ops, which :mod:`netcl.autograd.backward_pass` follows.

A result refers to the :class:`Node` that made it (``grad_fn``). A node refers to the nodes and leaves of its inputs, and to the values
that its gradient formula reads. Backward releases these node by node, unless the graph is retained.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import isgeneratorfunction
from typing import Any, NamedTuple

import numpy as np

from netcl import ops
from netcl.core.dtype import DTYPES
from netcl.core.errors import AutogradError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import RemovableHandle, Source, Tensor, deferred_tensor
from netcl.core.tracebacks import user_line
from netcl.core.writes import clock, writes_of
from netcl.engine.modes import deferral, in_mode
from netcl.engine.operands import Like


class _Modes(threading.local):
    """The autograd state of a thread: the current tape, the observer of ops, and callbacks and walk of the running backward pass.

    ``observer(row, function, *args, **kwargs)``, if set, is called instead of every op; tracers use it.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.observer: Callable[..., Any] | None = None
        self.finishers: list[Callable[[], None]] | None = None
        self.walk: Any = None
        self.expecting: dict[int, weakref.WeakMethod[Callable[[BaseException], None]]] = {}


modes = _Modes()
#: Per thread and asyncio task: whether ops are recorded, and whether values are checked. A context variable is read faster than ``modes``.
grad_mode: ContextVar[bool] = ContextVar("grad_mode", default=True)
anomaly_mode: ContextVar[bool | str] = ContextVar("anomaly_mode", default=False)  # "nan": infinities are no anomaly
hooks.modes += (grad_mode.get, anomaly_mode.get)


class Saved(NamedTuple):
    """What a node of an op keeps for its gradient: the row, the inputs and other arguments, and the outputs that the gradient reads."""

    row: Any
    inputs: list[Any]
    options: Mapping[str, Any]
    outputs: Any


make_like, make_saved = partial(tuple.__new__, Like), partial(tuple.__new__, Saved)  # half the time of calling the class
LASTING = frozenset(ops.names())  # a program may remove an op that it has registered
RELEASED = "backward has already released the memory of this graph"
_FLOAT_DTYPES = frozenset(name for name, row in DTYPES.items() if row.is_float)


def like(x: Any) -> Like:
    """Return the shape and dtype of a tensor."""
    return make_like((x.shape, x.dtype))


Edge = tuple[Any, int] | None


class Node:
    """One recorded op: ``rule(node, F, gradients)`` returns a gradient, or ``None``, per input.

    ``edges`` are the destinations of these gradients: ``(leaf tensor, 0)``, ``(node, index of its output)`` or ``None``.
    """

    __slots__ = ("__weakref__", "edges", "fusing", "hooks", "likes", "name", "order", "outputs", "rule", "saved", "call_site")

    def __init__(self, name: str, rule: Callable[..., Sequence[Any]], edges: list[Edge], likes: list[Like | None], saved: Any):
        self.name = name
        self.rule: Callable[..., Sequence[Any]] | None = rule
        self.edges = edges
        self.likes = likes
        self.saved = saved
        self.order = clock.tick()
        self.outputs: list[Like] = []
        self.hooks: tuple[tuple[int, Callable[[Tensor], Tensor | None]], ...] = ()
        self.call_site = _call_site() if anomaly_mode.get() else ""
        self.fusing = deferral.mode  # backward uses the deferral mode of forward

    def attach(self, outputs: Sequence[Any]) -> None:
        """Make this node the ``grad_fn`` of the floating-point outputs."""
        self.outputs = seen = []
        for index, out in enumerate(outputs):
            seen.append(make_like((out.shape, out.dtype)))
            if out.dtype in _FLOAT_DTYPES:
                out._requires_grad = True
                out.grad_fn = self
                out.output_nr = index
        if modes.tape is not None:
            modes.tape.nodes.append(self)
        if anomaly_mode.get():
            for out in outputs:
                check_finite(self, out, "returned")

    def __call__(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the op's inputs from those of its outputs; ``None`` for an input that requires none.

        Does not accumulate ``.grad``, call hooks or release memory.
        """
        if self.rule is None:
            raise RuntimeError(message(self.name, RELEASED, "pass retain_graph=True to the first backward"))
        if len(gradients) != len(self.outputs) or all(g is None for g in gradients):
            what = f"expected one gradient or None for each of its {len(self.outputs)} outputs, and at least one gradient"
            raise ShapeError(message(self.name, what, given=len(gradients), none=sum(g is None for g in gradients)))
        for given, out in zip(gradients, self.outputs, strict=True):
            if given is not None and (not isinstance(given, Tensor) or given.shape != out.shape):
                shape = given.shape if isinstance(given, Tensor) else type(given).__name__
                raise ShapeError(message(self.name, "a gradient must be a tensor of the output's shape", given=shape, output=out.shape))
        with no_grad(), in_mode(self.fusing):
            back = self.rule(self, ops, list(gradients))
            return tuple(
                None if g is None or seen is None else fit_gradient(ops, g, seen) for g, seen in zip(back, self.likes, strict=True)
            )

    def add_hook(self, index: int, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook`` with the gradient of output ``index``; the returned handle removes the hook."""
        entry = (index, hook)
        self.hooks = tuple(sorted((*self.hooks, entry), key=lambda each: isinstance(each[1], KeptGradient)))  # kept as hooks leave it

        def remove() -> None:
            self.hooks = tuple(kept for kept in self.hooks if kept is not entry)

        return RemovableHandle(remove)

    def release(self) -> None:
        """Release everything that was kept for backward. A parameter's cast is kept: ``autocast`` shares it among several losses."""
        if self.name == "cast" and any(edge is not None and isinstance(edge[0], Tensor) for edge in self.edges):
            return
        self.saved = self.rule = None
        self.edges = []

    def __repr__(self) -> str:
        return f"<{self.name}: {[out.shape for out in self.outputs]}>"


def edge_of(x: Tensor) -> tuple[Any, int]:
    """Return the edge along which the gradient of a tensor is sent: ``(leaf, 0)`` or ``(node, index of its output)``."""
    return (x, 0) if x.grad_fn is None else (x.grad_fn, x.output_nr)


def edges_to(inputs: Sequence[Any]) -> tuple[list[Edge], list[Like | None]]:
    """Return the edges to the inputs of an op, and the inputs' types; both are ``None`` for an input that requires no gradient."""
    learning = [x if isinstance(x, Tensor) and x._requires_grad else None for x in inputs]
    return [x if x is None else edge_of(x) for x in learning], [x if x is None else like(x) for x in learning]


def _call_site() -> str:
    """Return the line of the user's program that called the op."""
    line = user_line()
    return f"{line.filename}:{line.lineno} in {line.name}: {line.line}"


def recording(tensors: Iterable[Any]) -> bool:
    """Whether an op on these inputs must be recorded."""
    for x in tensors:
        if isinstance(x, Tensor) and x._requires_grad:
            return grad_mode.get()
    return False


# ---- changes in place


class _Changed(Source):
    """The source of a tensor that was changed in place after an op saved it for backward: reading its values raises."""

    def __init__(self, node: Node, tensor: Tensor):
        self.text = message(
            node.name,
            "a tensor that backward reads must not be changed in place after the op saved it",
            "change it after backward, change a clone(), or run the forward pass again",
            shape=tensor.shape, dtype=tensor.dtype, kept_at=node.order, version=writes_of(tensor).last,
        )  # fmt: skip

    def compute(self) -> Tensor:
        raise AutogradError(self.text)

    made = property(compute)  # fusion reads this first


def intact(node: Node, *kept: Any) -> Any:
    """Return the saved tensors of a node, or lists of them. A tensor that was changed in place raises when its values are read."""
    return _stand_ins(node, kept) if _any_changed(kept, node.order) else kept


def _any_changed(kept: Iterable[Any], order: int) -> bool:
    for x in kept:
        kind = type(x)
        if kind is Tensor:
            if x.writes is not None and x.writes.last > order:
                return True
        elif (kind is list or kind is tuple) and _any_changed(x, order):
            return True
    return False


def _stand_ins(node: Node, kept: Any) -> Any:
    if isinstance(kept, (list, tuple)) and not isinstance(kept, Like):
        return type(kept)([_stand_ins(node, part) for part in kept])
    if not isinstance(kept, Tensor) or writes_of(kept).last < node.order:
        return kept
    return deferred_tensor(_Changed(node, kept), kept.shape, kept.dtype, kept.queue)


def changing_history(tensor: Tensor) -> None:
    """Raise on an unrecorded write to the result of a recorded op, while gradients are enabled and backward may still use the op."""
    if grad_mode.get() and tensor.grad_fn.rule is not None:
        what = "cannot overwrite its result by from_host, write or out=: they are not recorded, and gradients would ignore the change"
        remedy = "use copy_() or x[...] = values, which are recorded, or do it inside no_grad()"
        raise AutogradError(message(tensor.grad_fn.name, what, remedy, shape=tensor.shape, dtype=tensor.dtype))


def fit_gradient(F: Any, gradient: Tensor, like: Like) -> Tensor:
    """Convert a gradient to the shape and dtype of its input; sums over broadcast axes."""
    if gradient.shape != like.shape:
        extra = len(gradient.shape) - len(like.shape)
        axes = tuple(i for i, n in enumerate(gradient.shape) if n != 1 and (i < extra or like.shape[i - extra] == 1))
        gradient = F.reshape(F.sum(gradient, axis=axes) if axes else gradient, like.shape)
    return gradient if gradient.dtype is like.dtype else F.cast(gradient, like.dtype)


@cache
def differentiable_ops() -> Any:
    """Return ``netcl.autograd``, which imports this module."""
    import netcl.autograd

    return netcl.autograd


def check_finite(node: Node, value: Tensor, verb: str) -> None:
    values = value.to_host()
    wrong = np.isnan if anomaly_mode.get() == "nan" else lambda x: ~np.isfinite(x)
    bad = np.argwhere(wrong(values)) if values.dtype.kind == "f" else np.empty((0, 0), int)
    if len(bad):
        first = tuple(bad[0].tolist())
        what = f"every value must be finite, but the op {verb} one that is not"
        remedy = "run the forward pass inside detect_anomaly() too, to see where it was called"
        where = f"called at {node.call_site}" if node.call_site else remedy
        raise FloatingPointError(message(node.name, what, where, index=first, value=values[first], shape=value.shape))


# ---- public functions


class Tape:
    """A context manager that enables recording and lists the recorded nodes: ``with Tape() as tape: ...``, then ``tape.backward(loss)``.

    A tape is optional: ops are also recorded without one, and ``loss.backward()`` computes the same gradients.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._previous: list[tuple[Tape | None, bool]] = []

    def __enter__(self) -> Tape:
        self._previous.append((modes.tape, grad_mode.get()))
        modes.tape = self
        grad_mode.set(True)
        return self

    def __exit__(self, *exc: object) -> None:
        modes.tape, enabled = self._previous.pop()
        grad_mode.set(enabled)

    def backward(self, loss: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Accumulate the gradients of ``loss`` in the leaves; clears the list of nodes unless the graph is retained."""
        hooks.call("backward", loss, gradient, retain_graph=retain_graph, create_graph=create_graph)
        if not (retain_graph or create_graph):
            self.reset()

    def reset(self) -> None:
        """Clear the list of recorded nodes."""
        self.nodes.clear()

    def __len__(self) -> int:
        return len(self.nodes)


class _Setting(ContextDecorator):
    """A mode as context manager and decorator; the previous value is restored on exit."""

    variable: ContextVar[Any]

    def __init__(self, value: Any):
        self.value = value
        self._previous: list[Any] = []

    def _recreate_cm(self) -> _Setting:
        """Return a new context manager for each call of a decorated function, because threads and tasks may run it at the same time."""
        new = object.__new__(type(self))
        new.value, new._previous = self.value, []
        return new

    def __call__(self, function: Any) -> Any:
        if not isgeneratorfunction(function):
            return super().__call__(function)

        @wraps(function)
        def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return (yield from _Resumed(self, function(*args, **kwargs)))

        return steps

    def __enter__(self) -> _Setting:
        previous, entered = self.variable.get(), False
        try:
            self._previous.append(previous)
            self.variable.set(self.value)
            entered = True
        finally:
            if not entered:  # an interrupt: __exit__ will not be called
                self.variable.set(previous)
        return self

    def __exit__(self, *exc: object) -> None:
        self.variable.set(self._previous[-1])  # before pop(): an interrupt may come after each call
        self._previous.pop()


class _Resumed(Generator):
    """A generator that runs in a mode; between two yields the mode is the caller's."""

    def __init__(self, setting: _Setting, inner: Any):
        self.setting, self.inner = setting, inner

    def send(self, value: Any) -> Any:
        with self.setting._recreate_cm():
            return self.inner.send(value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        with self.setting._recreate_cm():
            return self.inner.throw(kind if value is None else value)


class _Switch(_Setting):
    """A setting that takes effect when it is created: as a statement for good, in ``with`` and as a decorator for the block."""

    _entered = False

    def __init__(self, value: Any):
        super().__init__(value)
        super().__enter__()
        self._entered = True

    def __enter__(self) -> _Setting:
        entered, self._entered = self._entered, False
        return self if entered else super().__enter__()

    def __call__(self, function: Any) -> Any:
        if self._entered:
            self.__exit__()
            self._entered = False
        return super().__call__(function)


class set_grad_enabled(_Switch):
    """Record ops only if a flag is true: ``set_grad_enabled(flag)`` from now on, ``with set_grad_enabled(flag): ...`` in a block."""

    variable = grad_mode


class no_grad(_Setting):
    """A context manager that records nothing: ``with no_grad(): ...``. It is also a decorator, with or without parentheses."""

    variable = grad_mode
    records = False

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        return super().__new__(cls) if function is None else cls()(function)

    def __init__(self) -> None:
        super().__init__(self.records)


class enable_grad(no_grad):
    """A context manager that records ops again inside ``no_grad``: ``with enable_grad(): ...``."""

    records = True


class set_detect_anomaly(_Switch):
    """Check recorded ops for NaN and Inf if a flag is true: ``set_detect_anomaly(flag)`` from now on, or ``with`` it in a block."""

    variable = anomaly_mode


class detect_anomaly(_Setting):
    """A context manager that raises, with op and call site, if a recorded op or its gradient has NaN or Inf: ``with detect_anomaly():``."""

    variable = anomaly_mode

    def __init__(self) -> None:
        super().__init__(True)


def is_grad_enabled() -> bool:
    """Whether ops are being recorded in this thread or asyncio task."""
    return grad_mode.get()


def get_current_tape() -> Tape | None:
    """Return the tape that lists the nodes of this thread, set by ``with Tape()`` or :func:`set_current_tape`, or ``None``."""
    return modes.tape


def set_current_tape(tape: Tape | None) -> None:
    """Set the tape that lists recorded nodes; ``None`` for no tape."""
    modes.tape = tape


def debug_tape(tape: Tape) -> str:
    """Describe the recorded ops of a tape, one line each: number, op, shapes of the inputs that require grad, shapes of the outputs."""
    rows = []
    for i, node in enumerate(tape.nodes):
        ins = ", ".join(str(like.shape) for like in node.likes if like is not None)
        rows.append(f"{i:4d} {node.name:24s} {ins} -> {', '.join(str(out.shape) for out in node.outputs)}")
    return "\n".join(rows)


class KeptGradient:
    """The hook of :func:`retain_grad`: adds the gradient to ``.grad`` of a tensor that is not a leaf."""

    def __init__(self, tensor: Tensor):
        self.there = weakref.ref(tensor)

    def __call__(self, gradient: Tensor) -> None:
        kept = self.there()
        if kept is not None:
            kept.grad = gradient if kept.grad is None else ops.add(kept.grad, gradient)


def keeps_gradient(tensor: Tensor) -> bool:
    """Whether :func:`retain_grad` was called for the values that a tensor has now."""
    return tensor.grad_fn is not None and any(isinstance(hook, KeptGradient) and hook.there() is tensor for _, hook in tensor.grad_fn.hooks)


def retain_grad(tensor: Tensor) -> None:
    """Make backward keep ``.grad`` of a tensor that is not a leaf: the gradient of its values after all writes in place."""
    if not tensor.requires_grad:
        raise AutogradError(message("retain_grad", "the tensor must require grad", "compute it from one that does", shape=tensor.shape))
    if tensor.grad_fn is not None and not keeps_gradient(tensor):
        tensor.register_hook(KeptGradient(tensor))


class AccumulationHook:
    """A hook of :func:`register_post_accumulate_grad_hook`."""

    def __init__(self, function: Callable[[Tensor], None]):
        self.function = function

    def __call__(self, leaf: Tensor) -> None:
        self.function(leaf)


def register_post_accumulate_grad_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook(tensor)`` after backward has added a gradient to ``grad`` of a leaf; ``remove()`` of the result removes the hook."""
    if tensor.grad_fn is not None or not tensor.requires_grad:
        what = "only a leaf tensor that requires a gradient accumulates one"
        raise AutogradError(message("register_post_accumulate_grad_hook", what, shape=tensor.shape))
    return tensor.register_hook(AccumulationHook(hook))
