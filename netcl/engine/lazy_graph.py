"""The lazy graph: ops that have not run. Chains of them become few kernels when a value is needed; see docs/internals/fusion.md.

A :class:`TraceNode` is one pending op: a formula per element (``map``), a fold of the innermost axes (``fold``) or a sum over all other
axes (``columns``). :mod:`netcl.engine.fused_kernel` makes the kernels.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from netcl.core import env
from netcl.core.device import CPUQueue, profile_of
from netcl.core.dtype import DType
from netcl.core.hooks import Readers, hooks
from netcl.core.tensor import CountedSource, Tensor, deferred_tensor, memory_of, with_shape
from netcl.engine import fused_kernel
from netcl.engine.modes import Mode, deferral, in_mode
from netcl.engine.opencl_text import Body
from netcl.engine.schedule import PendingNode, Space, fits_rows, gather_roots, is_regular, nodes_below, too_long
from netcl.engine.strided import broadcast_to

log = logging.getLogger("netcl")

# Fraction of the CPU's threshold, per compute unit of a GPU: it moves values faster at the same host cost, part of which a product hides.
CHAINED, MULTIPLIED = 1, 0.5
MOST_FOLDS = 4  # nested folds: each takes one more pass over the row, which recomputes formulas
MOST_WAITING = 512  # pending nodes of a thread
MOST_HELD = 1 << 30  # bytes of inputs that pending nodes keep alive, or an eighth of the device's memory if that is more


class TraceNode(PendingNode):
    """A pending op with its inputs. ``made`` is its result once it has run."""

    __slots__ = ()

    def compute(self, wanted: Sequence[PendingNode] = ()) -> Tensor:
        """Compute this node and return its tensor. The kernel may also compute nodes that share work, and ``wanted`` nodes."""
        with lock:
            if self.made is None:
                roots = gather_roots(self, wanted)
                if wanted:
                    below = nodes_below(*roots)
                    roots += [node for node in wanted if node not in roots and node in below]
                fused_kernel.run(roots)
        assert self.made is not None
        return self.made

    def finish(self, made: Tensor) -> None:
        """Store the result and drop the inputs. Pending users of this node read its memory from now on."""
        self.made = made
        if self.whole is not None:
            self.whole.call = None
        if self.users:
            _note_readers(_shared_values(made), self.users)
        self.inputs, self.leaves, self.users, self.tensors = (), {}, [], []


class Product(CountedSource):
    """A pending product whose kernel may include the ops that follow it (an epilogue)."""

    __slots__ = ()
    shape: tuple[int, ...]

    def settled(self, x: Tensor, values: Sequence[Any]) -> Tensor:
        """Return ``x``, a result of this product. It becomes a formula if an op over ``values`` also reads the product without epilogue."""
        return x

    def joined(self, name: str, values: Sequence[Any], place: int, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """Fuse the op ``name`` over ``values`` into this product, which is ``values[place]``; ``None`` if it cannot be fused."""
        return None

    def by_channel(self, scale: Tensor, shift: Tensor) -> Tensor | None:
        """Return ``scale * product + shift``, with a scale and a shift per channel, as another product; ``None`` if that is impossible."""
        return None


class Whole:
    """An op expressed in formulas and folds. If nothing is fused with these, ``call`` computes ``results`` with the op's own kernels."""

    __slots__ = ("call", "results")

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call  # which holds the inputs; ``None`` once one of the formulas has been computed
        self.results: list[weakref.ref[TraceNode] | None] = []

    def run(self) -> None:
        """Compute the results with the op's own kernels."""
        assert self.call is not None
        with in_mode(None):
            made = self.call()
        for ref, tensor in zip(self.results, made if isinstance(made, tuple) else (made,), strict=True):
            node = None if ref is None else ref()
            if node is not None and node.made is None:
                node.finish(with_shape(tensor, node.shape))


def as_formulas(form: Callable[[], Any], call: Callable[[], Any], inputs: Sequence[Any]) -> Any:
    """Return ``form()``, an op in formulas and folds. If nothing is fused with these, ``call()`` computes the op with its own kernels."""
    if deferral.whole is not None or any(waiting_node(x) is not None for x in inputs):
        return form()
    whole = deferral.whole = Whole(call)
    try:
        made = form()
    finally:
        deferral.whole = None
    for tensor in made if isinstance(made, tuple) else () if made is None else (made,):
        node = waiting_node(tensor)
        whole.results.append(None if node is None else weakref.ref(node))
    return made


def waiting_node(x: Any) -> TraceNode | None:
    """Return the pending node of a tensor, or ``None``."""
    if not isinstance(x, Tensor):
        return None
    source = x.source
    return source if type(source) is TraceNode and source.made is None else None


# ---- pending readers of memory


class NodeReaders(Readers):
    """Weak references to pending nodes, by the memory that they read."""

    def compute(self, memory: Any) -> None:
        with _noting:
            refs = self.pop(id(memory), ())
        for ref in refs:
            node = ref()
            if node is not None and node.made is None:
                _log_fusion("computed before its input changes", node)
                node.compute()


hooks.readers = NodeReaders()
lock = threading.RLock()  # a value that one thread left may be computed by another
_noting = threading.RLock()  # guards changes of hooks.readers: a lost entry would compute a value after its input has changed
_PRUNED_FROM = 64  # number of readers of one memory from which dead ones are pruned, whenever their number has doubled


def _note_readers(memory: Any, nodes: Sequence[weakref.ref[Any]]) -> None:
    """Register nodes as readers of ``memory`` and remove dead entries. No other code removes them if the memory is never written."""
    with _noting:
        refs = hooks.readers.setdefault(id(memory), [])
        refs.extend(nodes)
        if len(refs) >= _PRUNED_FROM and not len(refs) & (len(refs) - 1):
            refs[:] = _unread(refs)


def _unread(refs: Sequence[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    """Return the references whose nodes are still pending."""
    return [ref for ref in refs if (node := ref()) is not None and node.made is None]


def _shared_values(x: Tensor) -> Any:
    """Return the object that tensors over the same memory share: the lease, or the array that owns the memory."""
    memory = x.realize()
    return memory_of(memory) if isinstance(memory, np.ndarray) else x.lease


def add_pending(node: Any) -> None:
    """Add a node to the pending ones and to the readers of its inputs; computes pending nodes if there are too many."""
    me, held = weakref.ref(node), 0
    for x in node.inputs:
        if type(x) is TraceNode and x.made is not None:  # computed meanwhile, because of another operand
            x = x.made
        if isinstance(x, Tensor):
            _note_readers(_shared_values(x), (me,))
            held += x.nbytes
    own = deferral.__dict__  # the thread's own dictionary: one access costs as much as one attribute of ``deferral``
    waiting = own["waiting"]
    waiting.append(me)
    own["held"] += held
    if len(waiting) > MOST_WAITING or own["held"] > MOST_HELD:
        _shrink(most_held(node.queue))


def most_held(queue: Any) -> int:
    """Return how many bytes of inputs the pending nodes of a queue may keep alive."""
    return MOST_HELD if isinstance(queue, CPUQueue) else max(MOST_HELD, profile_of(queue).global_mem_size // 8)


def _shrink(most: int = MOST_HELD) -> None:
    """Drop nodes that are computed or dead; compute the others if they still exceed the limits."""
    left = [node for ref in deferral.waiting if (node := ref()) is not None and node.made is None]
    held = sum(x.nbytes for node in left for x in node.inputs if isinstance(x, Tensor))
    deferral.waiting, deferral.held = [weakref.ref(node) for node in left], held
    if len(left) > MOST_WAITING // 2 or held > most // 2:
        deferral.waiting, deferral.held = [], 0  # computing may defer formulas, whose registration must not recurse
        for node in left:
            if node.alive():
                node.compute()
        deferral.waiting += [weakref.ref(node) for node in left if node.made is None and node.alive()]
    with _noting:
        for key, refs in list(hooks.readers.items()):
            refs[:] = _unread(refs)
            if not refs:
                del hooks.readers[key]


def flush() -> None:
    """Compute all pending nodes of this thread that a tensor refers to."""
    if deferral.waiting:
        found = [ref() for ref in deferral.waiting]
        _compute([node for node in found if node is not None and node.made is None and node.alive()])
        _shrink()


def compute(values: Iterable[Any]) -> None:
    """Compute the deferred tensors among ``values``, in shared kernels where possible."""
    found: list[Any] = [x.source for x in values if isinstance(x, Tensor)]
    _compute([node for node in found if node is not None and node.made is None])


def _compute(nodes: Sequence[Any]) -> None:
    for node in nodes:
        if node.made is None:
            node.compute([other for other in nodes if other.made is None and type(other) is TraceNode])


hooks.settlers.append((True, flush))  # what waits differs between threads


# ---- modes


@contextmanager
def fusing(rows: bool = True, fast_math: bool = False) -> Iterator[None]:
    """Defer formulas of every size inside the block and, with ``rows``, folds of innermost axes; ``fast_math`` applies to their kernels."""
    with in_mode(Mode(rows, fast_math)):
        yield


def _log_fusion(what: str, *nodes: Any) -> None:
    if fused_kernel.TELLS:
        log.warning("[fusion] %s: %s", what, ", ".join(node.name for node in nodes))


# ---- joining


def _joins(node: TraceNode, seen: tuple[int, ...], shape: tuple[int, ...], real: str) -> bool:
    """Whether a pending input, used with shape ``seen``, can be computed inside the kernel of an op whose result has ``shape``."""
    if node.real != real or node.mode != deferral.mode or not node.readable or node.kind == "columns":
        return False
    if node.space is None:
        return seen == node.shape and (seen == shape or deferral.mode is not None or math.prod(seen) == 1)
    if shape == node.space.shape:
        return seen == (node.space.kept if node.narrow else shape)
    return node.narrow and seen == shape and shape in (node.space.lead, node.space.kept)


def _operands(values: Sequence[Any], shape: tuple[int, ...], real: str) -> tuple[tuple[Any, ...], Space | None]:
    """Return the tensors and pending nodes that an op reads, and their index space; nodes that cannot be fused are computed now."""
    nodes = [_under_shape(x) for x in values]
    for i, node in enumerate(nodes):
        if node is not None and not _joins(node, values[i].shape, shape, real):
            values[i].source.compute()  # its own node, which ``x`` represents under another shape
            nodes[i] = None
    spaces = {node.space for node in nodes if node is not None and node.space is not None}
    space = next(iter(spaces)) if len(spaces) == 1 else None
    dropped = space is not None and shape == space.lead and shape != space.shape
    for i, node in enumerate(nodes):
        if node is None:
            continue
        strange = len(spaces) > 1 and node.space is not None
        if strange or (space is not None and node.space is None and (dropped or not fits_rows(node, space))):
            values[i].source.compute()
            nodes[i] = None
    found = [x if node is None else node for x, node in zip(values, nodes, strict=True)]
    if too_long(found):
        for x, node in zip(values, nodes, strict=True):
            if node is not None:
                _log_fusion("the chain is long enough", node)
                x.source.compute()
        found, space, dropped = list(values), None, False
    if space is not None:
        found = [_in_space(x, space, dropped) for x in found]
    return tuple(found), space


def _eager_operands(values: Sequence[Any], shape: tuple[int, ...], real: str) -> tuple[Any, ...]:
    """Return the operands of an op outside of ``ag.jit_compile``: pending nodes that can be fused, everything else unchanged."""
    found: list[Any] = []
    for x in values:
        node = x.source if isinstance(x, Tensor) else None
        if type(node) is TraceNode and node.made is None:
            if _joins(node, x.shape, shape, real):
                found.append(node)
                continue
            node.compute()
        found.append(x)
    if too_long(found):
        for node in found:
            if type(node) is TraceNode and node.made is None:
                _log_fusion("the chain is long enough", node)
                node.compute()
        return tuple(values)
    return tuple(found)


def _under_shape(x: Any) -> TraceNode | None:
    """Return the pending node of a tensor, or ``None``. For a reshaped tensor, copy the chain of formulas with the new shape."""
    node = waiting_node(x)
    if node is None or node.space is not None or x.shape == node.shape or deferral.mode is None or node.kind != "map":
        return node
    below = nodes_below(node)
    plain = all(n.shape == node.shape for n in below) and all(t.shape == node.shape or t.size == 1 for t in node.leaves.values())
    return _reshaped(node, x.shape, {}) if plain else node


def _reshaped(node: TraceNode, shape: tuple[int, ...], done: dict[TraceNode, TraceNode]) -> TraceNode:
    if node not in done:
        inputs = []
        for x in node.inputs:
            if type(x) is TraceNode:
                x = _reshaped(x, shape, done) if x.made is None else x.made
            inputs.append(with_shape(x, shape if x.shape == node.shape else ()) if isinstance(x, Tensor) else x)  # others have one element
        what = (node.kind, node.name, node.body, tuple(inputs), node.numbers)
        done[node] = TraceNode(*what, shape, node.dtype, node.real, node.queue, None, False)
        add_pending(done[node])
    return done[node]


def _in_space(x: Any, space: Space, dropped: bool) -> Any:
    """Return a leaf for a kernel over rows: with axes of size 1 appended if ``dropped``, broadcast if it has only some folded axes."""
    if not isinstance(x, Tensor):
        return x
    if dropped:
        return with_shape(x, (*x.shape, *(1,) * space.axes))
    if not is_regular(x, space):
        return broadcast_to(x, space.shape)
    return x


def _appended(name: str, values: Sequence[Any], shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    """Fuse an op into the epilogue of a pending product among its operands, the last such operand first; ``None`` if not possible."""
    for place in reversed(range(len(values))):
        x = values[place]
        if _of_product(x) and x.source.made is None and (made := x.source.joined(name, values, place, shape, dtype)) is not None:
            return made
    return None


def onto_product(name: str, values: Sequence[Any], shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    """Return the deferred result of an op over a pending product, computed by the product's kernel; ``None`` if that is impossible."""
    if not any([_of_product(x) for x in values]):
        return None
    settled = [x.source.settled(x, values) if _of_product(x) else x for x in values]
    return _appended(name, settled, shape, dtype)


def _of_product(x: Any) -> bool:
    return isinstance(x, Tensor) and x.memory is None and isinstance(x.source, Product)


def _made(node: TraceNode) -> Tensor:
    tensor = deferred_tensor(node, node.shape, node.dtype, node.queue)
    if deferral.trace is not None:
        deferral.trace.append(node)
    add_pending(node)
    return tensor


def defer(
    name: str, body: Body, values: Sequence[Any], numbers: Sequence[Any], shape: tuple[int, ...], dtype: DType, real: str, queue: Any
) -> Tensor:
    """Defer a formula over tensors and numbers; returns the deferred tensor."""
    if real == "int" and dtype.name == "bool":  # a truth value is the same in every compute type: take that of the inputs
        real = next((node.real for x in values if (node := waiting_node(x)) is not None), real)
    if any([_of_product(x) for x in values]):
        values = [x.source.settled(x, values) if _of_product(x) else x for x in values]
        if not numbers and (made := _appended(name, values, shape, dtype)) is not None:
            return made
    if deferral.mode is None:
        operands = _eager_operands(values, shape, real)
        return _made(TraceNode("map", name, body, operands, tuple(numbers), shape, dtype.name, real, queue, None, False))
    operands, space = _operands(values, shape, real)
    narrow = space is not None and shape != space.shape
    return _made(TraceNode("map", name, body, operands, tuple(numbers), shape, dtype.name, real, queue, space, narrow))


def defer_fold(name: str, body: Body, x: Tensor, axes: int, keepdims: bool, dtype: DType, real: str) -> Tensor:
    """Defer a fold of the innermost ``axes``; ``body`` combines two values. Returns the deferred tensor."""
    node, space = waiting_node(x), Space(x.shape, axes)
    fits = node is not None and _joins(node, x.shape, x.shape, real) and node.space in (None, space) and fits_rows(node, space)
    if node is not None and (not fits or node.level >= MOST_FOLDS):
        node.compute()
        node = None
    shape = space.kept if keepdims else space.lead
    return _made(TraceNode("fold", name, body, (node or x,), (), shape, dtype.name, real, x.queue, space, True))


def defer_columns(name: str, body: Body, x: Tensor, axes: int, shape: tuple[int, ...], dtype: DType, real: str) -> Tensor | None:
    """Defer a sum over all but the innermost ``axes`` of ``x``; ``None`` unless ``x`` is pending and the sum can be fused with it."""
    node, space = waiting_node(x), Space(x.shape, axes)
    if node is None or not (_joins(node, x.shape, x.shape, real) and node.space in (None, space) and fits_rows(node, space)):
        return None
    return _made(TraceNode("columns", name, body, (node,), (), shape, dtype.name, real, x.queue, space, False))


#: Elements from which eager code defers ops; 0 means never. It is read once: the environment is as slow as a launch.
EAGER_FROM = int(env.value("NETCL_FUSION"))


def worth_deferring(queue: Any, shape: tuple[int, ...], per_unit: float = CHAINED) -> bool:
    """Whether an op has enough elements to defer."""
    size = math.prod(shape)
    return size >= EAGER_FROM and size >= deferred_from(queue, per_unit)


def deferred_from(queue: Any, per_unit: float = CHAINED) -> float:
    """Return the elements from which ops are deferred: NETCL_FUSION; on GPUs by default, ``per_unit`` times that per compute unit."""
    if not EAGER_FROM or isinstance(queue, CPUQueue):
        return math.inf
    profile = profile_of(queue)
    return EAGER_FROM * (1 if profile.device_type == "cpu" or EAGER_FROM != env.FUSE_FROM else max(1, per_unit * profile.max_compute_units))
