"""The backward pass: sends gradients from outputs through the recorded graph to its leaves.

A graph is walked node by node. If the same graph comes again, with other values, a plan of the walk runs instead.
"""

from __future__ import annotations

import heapq
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from netcl import ops
from netcl.autograd.tape import (
    LASTING,
    RELEASED,
    AccumulationHook,
    Node,
    Saved,
    anomaly_mode,
    check_finite,
    differentiable_ops,
    edge_of,
    fit_gradient,
    grad_mode,
    keeps_gradient,
    modes,
)
from netcl.core import recording as recorded
from netcl.core.device import CPUQueue, profile_of
from netcl.core.dtype import HALVES
from netcl.core.errors import OutOfMemoryError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.tensor import Tensor, duplicate, memory_of
from netcl.engine import lazy_graph
from netcl.engine.lazy_graph import MULTIPLIED, deferred_from
from netcl.engine.modes import in_mode
from netcl.engine.plan import Plan, key_operands, make_plan, plan_cache
from netcl.ops import update

log = logging.getLogger("netcl")


def run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    wanted: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    retain_graph: bool = False,
    into: _Walk | None = None,
    since: int = 0,
) -> list[Tensor | None]:
    """Run backward from ``outputs``: accumulate ``.grad`` in the leaves or, if ``wanted`` names tensors, return their gradients.

    Gradients of leaves that only the walk ``into`` wants, and of nodes made before the time ``since``, are added there.
    """
    enabled, finishers, outer = grad_mode.get(), modes.finishers, modes.walk
    callbacks: list[Callable[[], None]] = []
    failed = True
    try:
        grad_mode.set(create_graph)
        modes.finishers = callbacks if finishers is None else finishers
        if wanted is None and not create_graph and len(outputs) == 1 and _ran_as_plan(outputs[0], gradients[0], retain_graph, since):
            failed = False
            return []
        modes.walk = walk = _Walk(wanted, create_graph, retain_graph or create_graph, into, since)
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
        modes.finishers, modes.walk = finishers, outer
        if failed and modes.expecting and (error := sys.exc_info()[1]) is not None:
            for report in [known() for known in modes.expecting.values()]:
                if report is not None:
                    report(error)


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
    def __init__(self, wanted: Sequence[Tensor] | None, create_graph: bool, retain: bool, into: _Walk | None = None, since: int = 0):
        self.into, self.since = into, since
        self.F = differentiable_ops() if create_graph else ops
        self.retain = retain
        self.given: list[tuple[tuple[object, int], Tensor]] = []
        self.pending: dict[Node, list[Tensor | None]] = {}
        self.heap: list[tuple[int, Node]] = []
        self.wanted = wanted
        self.targets = [] if wanted is None else [_edge_key(edge_of(t)) for t in wanted]
        self.found: dict[tuple[int, int], Tensor | None] = dict.fromkeys(self.targets)
        self.passed: set[Node] | None = None  # if tensors are wanted, the nodes on the way to these
        self.handed: dict[int, Any] = {}  # by id, memory of gradients that leaves, hooks, functions of the user or the caller may hold
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
            self.hand(gradient)
        self.given.append((edge_of(out), gradient))

    def hand(self, gradient: Any) -> None:
        """Note that others may hold ``gradient`` or a tensor over its memory."""
        if isinstance(gradient, Tensor):
            owner = _memory_owner(gradient)
            self.handed[id(owner)] = owner

    def own(self, gradient: Tensor | None) -> Any:
        """Return a gradient, or a copy if others may hold it: a leaf's is changed in place, and what a hook keeps must stay the same."""
        if gradient is not None and id(_memory_owner(gradient)) in self.handed:
            gradient = duplicate(gradient) if gradient.grad_fn is None else self.F.clone(gradient)
        self.hand(gradient)
        return gradient

    def answered(self, gradient: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Call a hook with a gradient and return its answer, or the gradient."""
        recorded.host_work("a hook on a gradient")
        answer = _hook_answer(gradient, hook(gradient))
        self.hand(answer)
        return answer

    def after_hooks(self, leaf: Tensor, gradient: Tensor) -> tuple[Tensor, list[AccumulationHook]]:
        """Return the gradient of a leaf as its hooks leave it, and the hooks that run after the gradient was accumulated."""
        found = leaf._hooks or ()
        later = [hook for hook in found if type(hook) is AccumulationHook]
        if len(later) < len(found):
            gradient = self.own(gradient)
        for hook in found:
            if type(hook) is not AccumulationHook:
                gradient = self.answered(gradient, hook)
        return gradient, later

    def send(self, edge: tuple[Any, int], gradient: Tensor) -> None:
        """Add a gradient to a leaf or to an output of a node."""
        target, index = edge
        if isinstance(target, Tensor):
            if self.wanted is not None:
                if (key := _edge_key(edge)) in self.found:
                    self.found[key] = _sum(self.F, self.found[key], gradient)
                elif self.into is not None:
                    self.into.send(edge, gradient)
            elif not target.requires_grad:  # the leaf was frozen after the forward pass
                return
            elif target._hooks:
                self.held[target] = _sum(self.F, self.held.get(target), gradient)
            else:
                self.accumulate(target, gradient)
            return
        if self.into is not None and target.order < self.since:  # outside of a checkpoint, whose function uses its result
            if self.into.passed is not None:
                self.into.passed |= _nodes_to(self.into.all_found(), [target])
            return self.into.send(edge, gradient)
        passed = self.passed is None or target in self.passed
        if not passed and _edge_key(edge) not in self.found:
            return
        if target not in self.pending:
            if passed and target.rule is None:
                raise RuntimeError(message("backward", RELEASED, "pass retain_graph=True to the first backward", op=target.name))
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
        if leaf.dtype != "float32" or not leaf.requires_grad or gradient.dtype not in HALVES or leaf in self.narrow or _hooked((edge,)):
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
        gradient, later = self.after_hooks(leaf, gradient)
        self.leaves.append(leaf)
        if leaf.grad is None:
            leaf.grad = gradient = self.own(gradient)
            if isinstance(gradient.source, lazy_graph.Product):
                gradient.realize()  # a deferred product keeps its operands in memory
        elif self.F is ops and leaf.grad.grad_fn is None and id(_memory_owner(leaf.grad)) not in self.handed:
            ops.add(leaf.grad, gradient, out=leaf.grad)  # in place, as torch does it: no second copy, and recorded launches find it
        else:  # a node may still have to read the gradient that the leaf got in this walk: a rule may return it for several inputs
            leaf.grad = self.F.add(leaf.grad, gradient)
        for hook in later:
            recorded.host_work("a hook on a gradient")
            hook(leaf)

    def all_found(self) -> set[tuple[int, int]]:
        """Return the keys of the tensors that this walk, or the one it adds to, has to find."""
        return {*self.found, *(self.into.all_found() if self.into else ())}

    def run(self) -> None:
        if self.wanted is not None:
            self.passed = _nodes_to(self.all_found(), [edge[0] for edge, _ in self.given])
        for edge, given in self.given:
            self.send(edge, given)
        while self.heap:
            _, node = heapq.heappop(self.heap)
            grads = self.pending.pop(node)
            for index, hook in node.hooks:
                if grads[index] is not None:
                    grads[index] = self.answered(self.own(grads[index]), hook)
            for index in range(len(grads)) if self.found else ():
                if (id(node), index) in self.found:
                    self.found[id(node), index] = grads[index]
            if self.passed is not None and node not in self.passed:
                continue
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
        for leaf in dict.fromkeys(self.wanted or ()):
            if leaf.grad_fn is None and (gradient := self.found[id(leaf), 0]) is not None:
                self.found[id(leaf), 0] = self.after_hooks(leaf, gradient)[0]

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
        foreign = type(node.saved) is not Saved or node.name not in LASTING  # a function of the user, which may keep or return any tensor
        back = [None] if later else node.rule(node, self.F, list(map(self.own, grads)) if foreign else grads)
        if foreign:
            for gradient in back:
                self.hand(gradient)
        if not self.retain:
            node.release()
        anomaly = anomaly_mode.get()
        for edge, wanted, gradient in zip(edges, likes, back, strict=True):
            if edge is not None and wanted is not None and gradient is not None:
                if anomaly:
                    check_finite(node, gradient, "has a gradient with")
                fits = gradient.shape == wanted.shape and gradient.dtype is wanted.dtype
                self.send(edge, gradient if fits else fit_gradient(self.F, gradient, wanted))

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


# ---- plans


class _RecordedGraph(NamedTuple):
    """The recorded graph below an output: nodes from newest to oldest, the leaves, and the operands of a plan, the gradient first."""

    root: Node
    output: int
    nodes: list[Node]
    leaves: list[Tensor]
    operands: list[Tensor]


class _BackwardPlan(NamedTuple):
    """The plan of a backward pass, and the indices of the nodes that it visits."""

    plan: Plan
    visited: list[int]


class _KnownPasses:
    """The plans of a queue's backward passes by key, the length of these keys together, and the hashes of keys that came once."""

    __slots__ = ("length", "plans", "seen")

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], _BackwardPlan | str] = {}
        self.length = 0
        self.seen: set[int] = set()


_PASSES = "backward passes"
_NOT_PLANNED = "a backward pass without a plan"
_MOST_SEEN = 1024
_MOST_KEYS = 1 << 17  # entries of keys, about ten per launch: a launch of a plan takes up to 6 KB on PoCL, and lengths of sequences vary
_MOST_MEMORY = 1 / 16  # of the device, for gradients and temporaries: a walk allocates them while it releases saved tensors


def _ran_as_plan(out: Tensor, gradient: Tensor | None, retain: bool, since: int) -> bool:
    """Run the plan of a backward pass; ``False`` if the graph must be walked. A graph is planned when its key comes for the second time."""
    key: list[Any] = []
    graph = _planned_graph(out, gradient, key)
    if graph is None or graph.nodes[-1].order < since:
        return False
    plans, signature = plan_cache(out.queue), tuple(key)
    known = plans.get(_PASSES) or plans.setdefault(_PASSES, _KnownPasses())
    found = known.plans.get(signature)
    if found is None:
        if hash(signature) not in known.seen:
            if len(known.seen) >= _MOST_SEEN:
                known.seen.clear()
            known.seen.add(hash(signature))
            return False
        found = _make_backward_plan(graph)
        if known.length + len(signature) > _MOST_KEYS:
            known = plans[_PASSES] = _KnownPasses()
        known.plans[signature] = found
        known.length += len(signature)
    if not isinstance(found, _BackwardPlan):
        return False
    try:
        gradients = found.plan.run(graph.operands)
    except OutOfMemoryError as error:
        log.info("[backward] is walked, which needs less memory at a time: %s", error)
        return False
    for leaf, made in zip(graph.leaves, gradients, strict=True):
        if made is not None and leaf.requires_grad:
            leaf.grad = made
    if not retain:
        for i in found.visited:
            graph.nodes[i].release()
    return True


def _planned_graph(out: Any, gradient: Any, key: list[Any]) -> _RecordedGraph | None:
    """Return the graph below ``out``, and fill ``key``; ``None`` if its backward pass does what a plan cannot, such as calling hooks."""
    if type(out) is not Tensor or type(out.grad_fn) is not Node or not out.requires_grad or isinstance(out.queue, CPUQueue):
        return None
    if hooks.launch_observers or recorded.active.recorder is not None or anomaly_mode.get():
        return None
    queue, root = out.queue, out.grad_fn
    nodes = _nodes_below(root, deferred_from(queue, MULTIPLIED))
    if nodes is None:
        return None
    gradient = _unit_gradient(queue, out.shape, out.dtype) if gradient is None and math.prod(out.shape) == 1 else gradient
    if type(gradient) is not Tensor or gradient.shape != out.shape or gradient.queue is not queue or gradient.memory is None:
        return None
    graph = _RecordedGraph(root, out.output_nr, nodes, [], [gradient])
    numbers = {node: number for number, node in enumerate(nodes)}
    leaves: dict[int, int] = {}
    key += (get_kernel_selector().revision, numbers[root], out.output_nr)
    if key_operands((gradient,), key) is None:
        return None
    for node in nodes:
        row, inputs, options, outs = node.saved
        key += (row, len(node.outputs), *options)
        kept = key_operands((*inputs, outs, *options.values()), key)
        if kept is None:
            return None
        for x in kept:
            if x.queue is not queue or x.memory is None or (x.writes is not None and x.writes.last > node.order):
                return None
        graph.operands.extend(kept)
        for edge, seen in zip(node.edges, node.likes, strict=True):
            if edge is None:
                key.append(None)
            elif type(edge[0]) is Node:
                key += (numbers[edge[0]], edge[1])
            else:
                leaf = edge[0]
                number = leaves.setdefault(id(leaf), len(leaves))
                key.append(~number)
                if leaf.queue is not queue or (leaf.shape, leaf.dtype) != seen:
                    return None
                if number == len(graph.leaves):
                    graph.leaves.append(leaf)
    return graph


def _nodes_below(root: Node, most: float) -> list[Node] | None:
    """Return the nodes from newest to oldest.

    ``None`` if a node or a leaf has hooks, a leaf has a gradient, a node is not that of an op, or has ``most`` elements or more.
    """
    nodes, met = [root], {root}
    for node in nodes:
        if type(node.saved) is not Saved or node.hooks or node.fusing is not None:
            return None
        for like in node.outputs:
            if math.prod(like.shape) >= most:
                return None
        for edge in node.edges:
            if edge is None:
                continue
            target = edge[0]
            if type(target) is not Node:
                if target.grad is not None:
                    return None
            elif target not in met:
                met.add(target)
                nodes.append(target)
    nodes.sort(key=attrgetter("order"), reverse=True)
    return None if _hooked([edge for node in nodes for edge in node.edges]) else nodes


def _unit_gradient(queue: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return the gradient of an output with one element."""
    plans, key = plan_cache(queue), (_PASSES, shape, dtype)
    if key not in plans:
        plans[key] = Tensor.full(shape, 1, dtype, queue=queue, persistent=True)
    return plans[key]


def _make_backward_plan(graph: _RecordedGraph) -> _BackwardPlan | str:
    """Plan the walk over a graph; :data:`_NOT_PLANNED` if a rule does what a plan cannot repeat, or if the plan needs much memory."""
    visited: list[int] = []
    kept = [(*inputs, outs, *options.values()) for _, inputs, options, outs in (node.saved for node in graph.nodes)]
    queue = graph.operands[0].queue
    plan = make_plan("backward", queue, graph.operands, partial(_walk_copies, graph, visited), [graph.operands[0], *kept], {})
    if type(plan) is not Plan or plan.writes or sum([n for _, n in plan.rooms]) > _MOST_MEMORY * profile_of(queue).global_mem_size:
        return _NOT_PLANNED
    return _BackwardPlan(plan, visited)


def _walk_copies(graph: _RecordedGraph, visited: list[int], gradient: Tensor, *kept: Sequence[Any]) -> list[Tensor | None]:
    """Walk over copies of the nodes, which have ``kept`` as their saved values; returns the gradients of the leaves."""
    commands = gradient.queue
    copies: dict[Any, Any] = {node: copy(node) for node in graph.nodes}
    where = {"context": commands.context, "queue": commands, "requires_grad": True}
    stand_ins: dict[int, Tensor] = {id(leaf): Tensor(None, leaf.shape, leaf.dtype, **where) for leaf in graph.leaves}
    for node, values in zip(graph.nodes, kept, strict=True):
        row, inputs, options, _ = node.saved
        count = len(inputs)
        edges = [edge and (copies[edge[0]] if type(edge[0]) is Node else stand_ins[id(edge[0])], edge[1]) for edge in node.edges]
        copies[node].edges = edges
        copies[node].saved = Saved(row, list(values[:count]), dict(zip(options, values[count + 1 :], strict=True)), values[count])
    walk = _Walk(None, False, False)
    walk.handed = {id(x.memory): x.memory for x in commands.given}  # a gradient must have memory of its own
    walk.send((copies[graph.root], graph.output), gradient)
    walk.run()
    walk.finish()
    visited += [number for number, node in enumerate(graph.nodes) if copies[node].rule is None]
    return [leaf.grad for leaf in stand_ins.values()]


# ---- gradients on their way


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


def _nodes_to(targets: Container[tuple[int, int]], roots: Iterable[object]) -> set[Node]:
    """Return the nodes below ``roots`` that lead to targets.

    A checkpoint may, because its function can use them without an argument, and a released node may have done so.
    """
    met = {root for root in roots if type(root) is Node}
    below, found = list(met), set()
    for node in below:
        above = {edge[0] for edge in node.edges if edge is not None and type(edge[0]) is Node} - met
        met |= above
        below.extend(above)
    for node in sorted(below, key=attrgetter("order")):
        leads = [edge is not None and (_edge_key(edge) in targets or (type(edge[0]) is Node and edge[0] in found)) for edge in node.edges]
        if node.name == "checkpoint" or node.rule is None or any(leads):
            found.add(node)
    return found


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


def backward(
    tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Accumulate the gradients of one or several tensors in ``.grad`` of their leaves, or of ``inputs`` alone.

    ``grad_tensors`` has a gradient for each tensor; tensors with one element need none.
    """
    outs: Any = tensors if isinstance(tensors, list | tuple) else [tensors]
    given = [grad_tensors] if outs is not tensors else [None] * len(outs) if grad_tensors is None else list(grad_tensors)
    if len(given) != len(outs):
        raise ShapeError(message("backward", "grad_tensors must have one entry per tensor", tensors=len(outs), grad_tensors=len(given)))
    if inputs is None:
        run_backward(outs, given, retain_graph=bool(retain_graph), create_graph=create_graph)
        return
    ins = list(dict.fromkeys(_listed("inputs", inputs)))
    if not ins:
        raise ValueError(message("backward", "inputs must not be empty", "leave it out for all leaves"))
    found = grad(outs, ins, given, retain_graph, create_graph, allow_unused=True)
    owners = {id(_memory_owner(gradient)) for gradient in found if gradient is not None}  # one may be the gradient of several inputs
    for x, gradient in zip(ins, found, strict=True):
        if gradient is None or keeps_gradient(x):  # a hook of retain_grad() has added it
            continue
        if x.grad is None:
            x.grad = differentiable_ops().clone(gradient)
        elif create_graph or x.grad.grad_fn is not None or id(_memory_owner(x.grad)) in owners:
            x.grad = differentiable_ops().add(x.grad, gradient)
        else:
            ops.add(x.grad, gradient, out=x.grad)
        recorded.leaf(x)


def grad(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None, create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None, *,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of ``outputs`` with respect to ``inputs``; does not change ``.grad`` of leaves.

    ``create_graph=True`` records the gradients themselves. An unused input raises, gives ``None`` (``allow_unused=True``) or zeros
    (``materialize_grads=True``). ``only_inputs`` is ignored, as in torch.
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
    if materialize_grads:
        found = [Tensor.zeros(x.shape, x.dtype, queue=x.queue) if g is None else g for x, g in zip(ins, found, strict=True)]
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
