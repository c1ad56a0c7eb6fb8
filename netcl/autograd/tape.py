"""The tape: the graph of recorded ops, and backward over it.

A result refers to the :class:`Node` that made it (``grad_fn``). A node refers to the nodes and leaves of its inputs, and to the values
that its gradient formula reads. Backward releases these node by node, unless the graph is retained.
"""

from __future__ import annotations

import heapq
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from netcl import ops
from netcl.core import recording as recorded
from netcl.core.dtype import DTYPES, HALVES
from netcl.core.errors import AutogradError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Remover, Source, Tensor, deferred_tensor, duplicate, memory_of
from netcl.core.tracebacks import user_line
from netcl.core.writes import clock, writes_of
from netcl.engine import lazy_graph
from netcl.engine.modes import deferral, in_mode
from netcl.ops import update


class _Modes(threading.local):
    """The autograd state of a thread: the current tape, the observer of ops, and callbacks of backward.

    ``observer(row, function, *args, **kwargs)``, if set, is called instead of every op; tracers use it.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.observer: Callable[..., Any] | None = None
        self.finishers: list[Callable[[], None]] | None = None
        self.expecting: dict[int, weakref.WeakMethod[Callable[[BaseException], None]]] = {}


modes = _Modes()
#: Per thread and asyncio task: whether ops are recorded, and whether values are checked. A context variable is read faster than ``modes``.
grad_mode: ContextVar[bool] = ContextVar("grad_mode", default=True)
anomaly_mode: ContextVar[bool] = ContextVar("anomaly_mode", default=False)
hooks.modes += (grad_mode.get, anomaly_mode.get)


class Like(NamedTuple):
    """The shape and dtype of an input that backward does not keep."""

    shape: tuple[int, ...]
    dtype: str


make_like = partial(tuple.__new__, Like)  # half the time of calling the class
_WALKED = "backward has already released the memory of this graph"
_FLOAT_DTYPES = frozenset(name for name, row in DTYPES.items() if row.is_float)


def like(x: Any) -> Like:
    """Return the shape and dtype of a tensor."""
    return make_like((x.shape, x.dtype))


class Node:
    """One recorded op: ``rule(node, F, gradients)`` returns a gradient, or ``None``, per input.

    ``edges`` are the destinations of these gradients: ``(leaf tensor, 0)``, ``(node, index of its output)`` or ``None``.
    """

    __slots__ = ("__weakref__", "edges", "fusing", "hooks", "likes", "name", "order", "outputs", "rule", "saved", "site")

    def __init__(self, name: str, rule: Callable[..., Sequence[Any]], inputs: Sequence[Any], saved: Any):
        self.name = name
        self.rule: Callable[..., Sequence[Any]] | None = rule
        self.edges: list[tuple[Any, int] | None] = []
        self.likes: list[Like | None] = []
        for x in inputs:
            if isinstance(x, Tensor) and x._learns:
                self.edges.append((x, 0) if x.grad_fn is None else (x.grad_fn, x.output_nr))  # as edge_of does
                self.likes.append(make_like((x.shape, x.dtype)))
            else:
                self.edges.append(None)
                self.likes.append(None)
        self.saved = saved
        self.order = clock.tick()
        self.outputs: list[Like] = []
        self.hooks: tuple[tuple[int, Callable[[Tensor], Tensor | None]], ...] = ()
        self.site = _op_site() if anomaly_mode.get() else ""
        self.fusing = deferral.mode  # backward uses the deferral mode of forward

    def attach(self, outputs: Sequence[Any]) -> None:
        """Make this node the ``grad_fn`` of the floating-point outputs."""
        self.outputs = seen = []
        for index, out in enumerate(outputs):
            seen.append(make_like((out.shape, out.dtype)))
            if out.dtype in _FLOAT_DTYPES:
                out._learns = True
                out.grad_fn = self
                out.output_nr = index
        if modes.tape is not None:
            modes.tape.nodes.append(self)
        if anomaly_mode.get():
            for out in outputs:
                _check_finite(self, out, "returned")

    def __call__(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the op's inputs from those of its outputs; ``None`` for an input that requires none.

        Does not accumulate ``.grad``, call hooks or release memory.
        """
        if self.rule is None:
            raise RuntimeError(message(self.name, _WALKED, "pass retain_graph=True to the first backward"))
        if len(gradients) != len(self.outputs) or all(g is None for g in gradients):
            what = f"expected one gradient or None for each of its {len(self.outputs)} outputs, and at least one gradient"
            raise ShapeError(message(self.name, what, given=len(gradients), none=sum(g is None for g in gradients)))
        for given, out in zip(gradients, self.outputs, strict=True):
            if given is not None and (not isinstance(given, Tensor) or given.shape != out.shape):
                shape = given.shape if isinstance(given, Tensor) else type(given).__name__
                raise ShapeError(message(self.name, "a gradient must be a tensor of the output's shape", given=shape, output=out.shape))
        with no_grad(), in_mode(self.fusing):
            back = self.rule(self, ops, list(gradients))
            return tuple(None if g is None or seen is None else _fit(ops, g, seen) for g, seen in zip(back, self.likes, strict=True))

    def add_hook(self, index: int, hook: Callable[[Tensor], Tensor | None]) -> Remover:
        """Call ``hook`` with the gradient of output ``index``; the returned handle removes the hook."""
        entry = (index, hook)
        self.hooks = tuple(sorted((*self.hooks, entry), key=lambda each: isinstance(each[1], KeptGradient)))  # kept as hooks leave it

        def remove() -> None:
            self.hooks = tuple(kept for kept in self.hooks if kept is not entry)

        return Remover(remove)

    def release(self) -> None:
        """Release everything that was kept for backward."""
        self.saved = self.rule = None
        self.edges = []

    def __repr__(self) -> str:
        return f"<{self.name}: {[out.shape for out in self.outputs]}>"


def edge_of(x: Tensor) -> tuple[Any, int]:
    """Return the edge along which the gradient of a tensor is sent: ``(leaf, 0)`` or ``(node, index of its output)``."""
    return (x, 0) if x.grad_fn is None else (x.grad_fn, x.output_nr)


def _op_site() -> str:
    """Return the line of the user's program that called the op."""
    line = user_line()
    return f"{line.filename}:{line.lineno} in {line.name}: {line.line}"


def recording(tensors: Iterable[Any]) -> bool:
    """Whether an op on these inputs must be recorded."""
    for x in tensors:
        if isinstance(x, Tensor) and x._learns:
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


# ---- backward


def run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    wanted: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """Run backward from ``outputs``: accumulate ``.grad`` in the leaves or, if ``wanted`` names tensors, return their gradients."""
    enabled, finishers = grad_mode.get(), modes.finishers
    callbacks: list[Callable[[], None]] = []
    grad_mode.set(create_graph)
    modes.finishers = callbacks if finishers is None else finishers
    failed = True
    try:
        walk = _Walk(wanted, create_graph, retain_graph or create_graph)
        for out, gradient in zip(outputs, gradients, strict=True):
            walk.start(out, gradient)
        walk.run()
        walk.finish()
        modes.finishers = finishers
        for callback in callbacks:
            recorded.host_work("a callback after backward")
            callback()
        failed = False
        return [walk.found[key] for key in walk.targets]
    finally:
        grad_mode.set(enabled)
        modes.finishers = finishers
        if failed and modes.expecting and (error := sys.exc_info()[1]) is not None:
            for tell in [known() for known in modes.expecting.values()]:
                if tell is not None:
                    tell(error)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once at the end of the running backward pass; for hooks that need all gradients."""
    if modes.finishers is None:
        raise RuntimeError(message("after_backward", "a backward pass must be running", "call it from a hook of a tensor"))
    modes.finishers.append(callback)


def expect_backward(owner: object, failed: Callable[[BaseException], None]) -> None:
    """Call ``failed``, a method of ``owner``, with the error of each backward of this thread that fails. The references are weak."""
    modes.expecting[id(owner)] = weakref.WeakMethod(failed)


def expect_no_backward(owner: object) -> None:
    """Undo :func:`expect_backward`."""
    modes.expecting.pop(id(owner), None)


def walk_under_way() -> object | None:
    """Return an object that identifies the running backward pass; ``None`` outside of one."""
    return modes.finishers


class _Walk:
    def __init__(self, wanted: Sequence[Tensor] | None, create_graph: bool, retain: bool):
        self.F = differentiable_ops() if create_graph else ops
        self.retain = retain
        self.pending: dict[Node, list[Tensor | None]] = {}
        self.heap: list[tuple[int, Node]] = []
        self.wanted = wanted
        self.targets = [] if wanted is None else [_edge_key(edge_of(t)) for t in wanted]
        self.found: dict[tuple[int, int], Tensor | None] = dict.fromkeys(self.targets)
        self.handed: dict[int, Any] = {}
        self.leaves: list[Tensor] = []
        self.held: dict[Tensor, Tensor] = {}  # partial gradients of leaves with hooks
        self.narrow: dict[Tensor, Tensor] = {}  # 16-bit gradients of float32 leaves, which are cast together at the end
        self.due: Counter[Tensor] | None = None  # the number of gradients each of these leaves may still receive

    def start(self, out: Any, gradient: Any) -> None:
        if not isinstance(out, Tensor):
            raise TypeError(message("backward", "the outputs must be tensors", given=type(out).__name__))
        if not out.requires_grad:
            what = "the tensor must require grad to be differentiated"
            raise ValueError(message("backward", what, "set requires_grad=True on the leaves before the forward pass", shape=out.shape))
        if gradient is None:
            if out.size != 1:
                what = "gradient must be given unless the tensor has exactly one element"
                raise ShapeError(message("backward", what, "pass gradient=, or reduce the tensor to a scalar first", shape=out.shape))
            gradient = Tensor.full(out.shape, 1, out.dtype, queue=out.queue)
        elif not isinstance(gradient, Tensor):
            what = "gradient must be a tensor"
            raise TypeError(message("backward", what, "pass ag.tensor(...)", gradient=type(gradient).__name__, tensor=out.shape))
        elif gradient.shape != out.shape:
            raise ShapeError(message("backward", "gradient must have the shape of the tensor", gradient=gradient.shape, tensor=out.shape))
        else:
            self.handed[id(_memory_owner(gradient))] = _memory_owner(gradient)  # the caller's tensor: a leaf must get a copy
        self.send(edge_of(out), gradient)

    def send(self, edge: tuple[Any, int], gradient: Tensor) -> None:
        """Add a gradient to a leaf or to an output of a node."""
        target, index = edge
        if self.found and (key := _edge_key(edge)) in self.found:
            self.found[key] = _sum(self.F, self.found[key], gradient)
        if isinstance(target, Tensor):
            if self.wanted is not None:
                return
            if target._hooks:
                self.held[target] = _sum(self.F, self.held.get(target), gradient)
            else:
                self.accumulate(target, gradient)
            return
        if target not in self.pending:
            if target.rule is None:
                raise RuntimeError(message("backward", _WALKED, "pass retain_graph=True to the first backward", op=target.name))
            self.pending[target] = [None] * len(target.outputs)
            heapq.heappush(self.heap, (-target.order, target))
        grads = self.pending[target]
        before = grads[index]
        grads[index] = gradient if before is None else self.F.add(before, gradient)

    def cast_later(self, edge: tuple[Any, int] | None, gradient: Tensor | None) -> bool:
        """Collect a 16-bit gradient of a leaf for :meth:`finish`, which casts all of them in one launch; returns whether it did."""
        leaf = None if edge is None else edge[0]
        if not isinstance(leaf, Tensor) or gradient is None or self.wanted is not None or self.F is not ops or anomaly_mode.get():
            return False
        if leaf.dtype != "float32" or gradient.dtype not in HALVES or leaf in self.narrow or _hooked((edge,)):
            return False
        if gradient.memory is None or gradient.array is not None:  # the kernel of a deferred gradient may include the cast
            return False
        self.narrow[leaf] = gradient
        return True

    def accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        if self.narrow and leaf in self.narrow:
            self.accumulate(leaf, ops.cast(self.narrow.pop(leaf), leaf.dtype))
        if recorded.listening and recorded.active.recorder is not None:
            recorded.active.recorder.leaf(leaf)
        hooks: Sequence[Callable[[Tensor], Tensor | None]] = leaf._hooks or ()
        for hook in hooks:
            recorded.host_work("a hook on a gradient")
            gradient = _hook_answer(gradient, hook(gradient))
        self.leaves.append(leaf)
        if leaf.grad is not None:
            if self.F is ops and leaf.grad.grad_fn is None:
                ops.add(leaf.grad, gradient, out=leaf.grad)  # in place, as torch does it: no second copy, and recorded launches find it
            else:
                leaf.grad = self.F.add(leaf.grad, gradient)
            return
        # Rules may return one tensor for several inputs; .grad is changed in place by optimizers, so no two leaves may share it.
        storage = _memory_owner(gradient)
        if id(storage) in self.handed:
            gradient = duplicate(gradient) if gradient.grad_fn is None else self.F.clone(gradient)
            storage = _memory_owner(gradient)
        self.handed[id(storage)] = storage
        leaf.grad = gradient
        if isinstance(gradient.source, lazy_graph.Product):
            gradient.realize()  # a deferred product keeps its operands in memory

    def run(self) -> None:
        while self.heap:
            _, node = heapq.heappop(self.heap)
            grads = self.pending.pop(node)
            for index, hook in node.hooks:
                recorded.host_work("a hook on a gradient")
                gradient = grads[index]
                if gradient is not None:
                    grads[index] = _hook_answer(gradient, hook(gradient))
            edges = node.edges
            if node.fusing is None:
                self.step(node, grads)
            else:
                with in_mode(node.fusing):
                    self.step(node, grads)
            if self.due is not None:
                self.due.subtract(_hooked(edges))
            if self.held and self.heap:
                self.hand_over()
        self.hand_over()

    def hand_over(self) -> None:
        """Pass complete gradients to leaves with hooks: a hook receives the whole gradient, once."""
        if self.heap and self.due is None:
            self.due = _still_due(self.pending)
        for leaf in [leaf for leaf in self.held if not self.heap or not self.due or self.due[leaf] <= 0]:
            self.accumulate(leaf, self.held.pop(leaf))

    def step(self, node: Node, grads: list[Tensor | None]) -> None:
        assert node.rule is not None
        edges, likes = node.edges, node.likes
        later = node.name == "cast" and self.cast_later(edges[0], grads[0])
        back = [None] if later else node.rule(node, self.F, grads)
        if not self.retain:
            node.release()
        anomaly = anomaly_mode.get()
        for edge, wanted, gradient in zip(edges, likes, back, strict=True):
            if edge is not None and wanted is not None and gradient is not None:
                if anomaly:
                    _check_finite(node, gradient, "has a gradient with")
                fits = gradient.shape == wanted.shape and gradient.dtype is wanted.dtype
                self.send(edge, gradient if fits else _fit(self.F, gradient, wanted))

    def finish(self) -> None:
        """Cast the gradients that :meth:`cast_later` has collected, and compute the deferred gradients together."""
        narrow, self.narrow = self.narrow, {}
        if len(narrow) > 1:
            wide = [Tensor.empty(leaf.shape, leaf.dtype, queue=leaf.queue) for leaf in narrow]
            update.apply(update.COPY, [wide, list(narrow.values())])
        else:
            wide = [ops.cast(gradient, leaf.dtype) for leaf, gradient in narrow.items()]
        for leaf, gradient in zip(narrow, wide, strict=True):
            self.accumulate(leaf, gradient)
        lazy_graph.compute([*(leaf.grad for leaf in self.leaves), *self.found.values()])


def _hooked(edges: Iterable[tuple[Any, int] | None]) -> list[Tensor]:
    """Return the leaves with hooks that ``edges`` lead to."""
    return [edge[0] for edge in edges if edge is not None and isinstance(edge[0], Tensor) and edge[0]._hooks]


def _still_due(pending: Iterable[Node]) -> Counter[Tensor]:
    """Count, for each leaf with hooks, the edges that lead to the leaf from ``pending`` nodes and all nodes reachable from them."""
    due: Counter[Tensor] = Counter()
    reached, nodes = set(pending), list(pending)
    while nodes:
        node = nodes.pop()
        due.update(_hooked(node.edges))
        above = {edge[0] for edge in node.edges if edge is not None and isinstance(edge[0], Node)} - reached
        reached |= above
        nodes.extend(above)
    return due


def _edge_key(edge: tuple[Any, int]) -> tuple[int, int]:
    return id(edge[0]), edge[1]


def _memory_owner(t: Tensor) -> Any:
    """Return the object that owns a tensor's memory; for a tensor with a source, the source."""
    if t.source is not None:
        return t.source
    return (t.pool_handle or t.buffer) if t.array is None else memory_of(t.array)


def _sum(F: Any, a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else F.add(a, b)


def _hook_answer(gradient: Any, answer: Any) -> Any:
    """Return the gradient, or the one a hook returned instead."""
    if answer is None:
        return gradient
    if not isinstance(answer, Tensor):
        raise TypeError(message("backward", "a hook must return a tensor or None", given=type(answer).__name__))
    if (answer.shape, answer.dtype) != (gradient.shape, gradient.dtype):
        values = {"gradient": f"{gradient.shape} {gradient.dtype}", "answer": f"{answer.shape} {answer.dtype}"}
        raise ShapeError(message("backward", "a hook must return a gradient of the same shape and dtype", **values))
    return answer


def _fit(F: Any, gradient: Tensor, like: Like) -> Tensor:
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


def _check_finite(node: Node, value: Tensor, verb: str) -> None:
    values = value.to_host()
    bad = np.argwhere(~np.isfinite(values)) if values.dtype.kind == "f" else np.empty((0, 0), int)
    if len(bad):
        first = tuple(bad[0].tolist())
        what = f"every value must be finite, but the op {verb} one that is not"
        where = f"called at {node.site}" if node.site else "run the forward pass inside detect_anomaly() too, to see where it was called"
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
        backward(loss, gradient, retain_graph=retain_graph, create_graph=create_graph)
        if not (retain_graph or create_graph):
            self.reset()

    def reset(self) -> None:
        """Clear the list of recorded nodes."""
        self.nodes.clear()

    def __len__(self) -> int:
        return len(self.nodes)


def backward(tensor: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Accumulate the gradients of ``tensor`` in ``.grad`` of its leaves; ``gradient`` is needed unless the tensor has one element."""
    run_backward([tensor], [gradient], retain_graph=retain_graph, create_graph=create_graph)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``outputs`` with respect to ``inputs``; does not change ``.grad`` of leaves.

    ``create_graph=True`` records the gradients themselves. An unused input raises or, with ``allow_unused=True``, gives ``None``.
    """
    outs, ins = _listed("outputs", outputs), _listed("inputs", inputs)
    given = [None] * len(outs) if grad_outputs is None else _listed("grad_outputs", grad_outputs, type(None))
    if len(given) != len(outs):
        raise ShapeError(message("grad", "grad_outputs must have one entry per output", outputs=len(outs), grad_outputs=len(given)))
    for i, x in enumerate(ins):
        if not x.requires_grad:
            remedy = "set requires_grad=True before the forward pass"
            raise ValueError(message("grad", f"input {i} must require grad", remedy, shape=x.shape))
    retain = create_graph if retain_graph is None else retain_graph
    found = run_backward(outs, given, wanted=ins, create_graph=create_graph, retain_graph=retain)
    missing = [i for i, g in enumerate(found) if g is None]
    if missing and not allow_unused:
        what = f"input {missing[0]} must be used to compute the outputs"
        raise ValueError(message("grad", what, "pass allow_unused=True to get None for it", shape=ins[missing[0]].shape))
    return tuple(found)


def _listed(what: str, given: Any, *others: type) -> list[Any]:
    """Return one tensor, or several, as a list; raises if an item is neither a tensor nor one of the ``others``."""
    values = [given] if isinstance(given, Tensor) or not isinstance(given, Iterable) else list(given)
    for x in values:
        if not isinstance(x, (Tensor, *others)):
            raise TypeError(message("grad", f"{what} must be a tensor or a list of tensors", given=type(x).__name__))
    return values


class _Setting(ContextDecorator):
    """A mode as context manager and decorator; the previous value is restored on exit."""

    variable: ContextVar[bool]

    def __init__(self, value: Any):
        self.value = value
        self._previous: list[Any] = []

    def _recreate_cm(self) -> _Setting:
        """Return a new context manager for each call of a decorated function, because threads and tasks may run it at the same time."""
        new = object.__new__(type(self))
        new.value, new._previous = self.value, []
        return new

    def __enter__(self) -> _Setting:
        self._previous.append(self.variable.get())
        self.variable.set(self.value)
        return self

    def __exit__(self, *exc: object) -> None:
        self.variable.set(self._previous.pop())


class set_grad_enabled(_Setting):
    """A context manager that records ops only if its flag is true: ``with set_grad_enabled(flag): ...``."""

    variable = grad_mode


class no_grad(set_grad_enabled):
    """A context manager that records nothing: ``with no_grad(): ...``. It is also a decorator."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(set_grad_enabled):
    """A context manager that records ops again inside ``no_grad``: ``with enable_grad(): ...``."""

    def __init__(self) -> None:
        super().__init__(True)


class set_detect_anomaly(_Setting):
    """A context manager that checks recorded ops for NaN and Inf if its flag is true: ``with set_detect_anomaly(flag): ...``."""

    variable = anomaly_mode


class detect_anomaly(set_detect_anomaly):
    """A context manager that raises, with op and call site, if a recorded op or its gradient has NaN or Inf: ``with detect_anomaly():``."""

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
