"""The lazy graph: ops that have not run. A chain of them becomes one kernel when a value is needed.

A :class:`TraceNode` is one pending op: a formula per element (``map``), a fold of the innermost axes (``fold``) or a sum over all other
axes (``columns``). Accessing the memory of a tensor over a node computes the node, the nodes it depends on, and those that share
work with it. :mod:`netcl.engine.fused_kernel` makes the kernels.

Eager code defers formulas over large tensors (``NETCL_FUSION=0`` turns this off). Inside :func:`fusing` (``ag.jit_compile``) formulas,
folds and normalizations of every size are deferred.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from netcl.core import dispatch, env
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, DType
from netcl.core.kernels import program
from netcl.core.tensor import DeferredTensor, Tensor, memory_of
from netcl.engine import rows
from netcl.engine.modes import Mode, in_mode, later, modes
from netcl.engine.opencl_text import Body
from netcl.engine.pointwise import profile_of

log = logging.getLogger("netcl")

# A GPU defers from this multiple of the CPU's threshold per compute unit: it moves values faster, at the same host cost.
CHAINED, MULTIPLIED = 1, 0.5  # of formulas; of products, whose kernels hide a part of the host cost
MOST_NODES = 48  # of a kernel: compile time grows more than linearly
MOST_FOLDS = 4  # nested folds: each is one more pass over the row, which computes formulas again
MOST_LEAVES = 12  # memory streams of a kernel
MOST_WAITING = 512  # pending nodes of a thread
MOST_HELD = 1 << 30  # bytes of inputs that pending nodes keep alive, or an eighth of the device's memory if that is more


class Space(NamedTuple):
    """The index space of a fold: the shape of its input and the number of innermost axes that are folded."""

    shape: tuple[int, ...]
    axes: int

    @property
    def lead(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.axes]

    @property
    def kept(self) -> tuple[int, ...]:
        return (*self.lead, *(1,) * self.axes)


class TraceNode:
    """A pending op: what to compute from which inputs. ``made`` is its result once it has run."""

    __slots__ = ("__weakref__", "body", "dtype", "inputs", "kind", "leaves", "level", "made", "mode", "name", "narrow", "numbers", "queue",
                 "readable", "real", "shape", "skipped", "space", "tensors", "users", "weight",
                 "whole")  # fmt: skip

    def __init__(
        self, kind: str, name: str, body: Body, inputs: tuple[Any, ...], numbers: tuple[Any, ...], shape: tuple[int, ...], dtype: str,
        real: str, queue: Any, space: Space | None, narrow: bool,
    ):  # fmt: skip
        self.kind, self.name, self.body, self.inputs, self.numbers = kind, name, body, inputs, numbers
        self.shape, self.dtype, self.real, self.queue, self.space, self.narrow = shape, dtype, real, queue, space, narrow
        self.mode, self.whole = modes.mode, modes.whole
        self.readable = dtype == "bool" or DTYPES[dtype].c_compute == real  # else it is rounded when stored
        self.made: Tensor | None = None
        self.skipped = False
        self.tensors: list[weakref.ref[Tensor]] = []
        self.users: list[weakref.ref[TraceNode]] = []
        self.leaves: dict[Any, Tensor] = {}
        weight, level = 1, 0
        for x in inputs:
            if type(x) is TraceNode:
                x.users.append(weakref.ref(self))
                weight += x.weight
                level = max(level, x.level)
                self.leaves.update(x.leaves)
            elif isinstance(x, Tensor):
                self.leaves[storage_key(x)] = x
        self.level: int = level + (kind == "fold")  # number of nested folds
        self.weight: int = weight if weight <= MOST_NODES else len(_below(self))  # an upper bound on the nodes this depends on

    def seen_by(self, tensor: Tensor) -> None:
        """Register a further tensor over this node."""
        self.tensors.append(weakref.ref(tensor))

    def alive(self) -> bool:
        """Whether a tensor over this node still exists."""
        return any(ref() is not None for ref in self.tensors)

    def compute(self, wanted: Sequence[TraceNode] = ()) -> Tensor:
        """Compute the node, what shares its work and the nodes of ``wanted`` that read the same inputs; returns the node's tensor."""
        with lock:
            if self.made is None:
                roots = gather(self, wanted)
                if wanted:
                    below = in_order(roots)
                    roots += [node for node in wanted if node not in roots and node in below]
                later.run(roots)
        assert self.made is not None
        return self.made

    def finish(self, made: Tensor) -> None:
        """Store the result and drop the inputs. Pending users of this node read its memory from now on."""
        self.made = made
        if self.whole is not None:
            self.whole.begun = True
        if self.users:
            _note_readers(_shared_values(made), self.users)
        self.inputs, self.leaves, self.users, self.tensors = (), {}, [], []

    def __repr__(self) -> str:
        return f"<{self.name}: {self.shape} {self.dtype}{'' if self.made is None else ', computed'}>"


class Whole:
    """An op expressed in formulas and folds. If nothing else is fused with them, ``call`` (its own kernels) computes ``results``."""

    __slots__ = ("begun", "call", "results")

    def __init__(self, call: Callable[[], Any]):
        self.call = call
        self.begun = False  # some of its formulas are computed, so that ``call`` must not run any more
        self.results: list[weakref.ref[TraceNode] | None] = []

    def run(self) -> None:
        """Compute the results with the op's own kernels."""
        with in_mode(None):
            made = self.call()
        for ref, tensor in zip(self.results, made if isinstance(made, tuple) else (made,), strict=True):
            node = None if ref is None else ref()
            if node is not None and node.made is None:
                node.finish(tensor._view(node.shape))


def as_formulas(form: Callable[[], Any], call: Callable[[], Any], inputs: Sequence[Any]) -> Any:
    """Express an op by ``form``, in formulas and folds; ``call`` is the op itself, which runs if nothing is fused with it."""
    if modes.whole is not None or any(waiting_node(x) is not None for x in inputs):
        return form()
    whole = modes.whole = Whole(call)
    try:
        made = form()
    finally:
        modes.whole = None
    for tensor in made if isinstance(made, tuple) else () if made is None else (made,):
        node = waiting_node(tensor)
        whole.results.append(None if node is None else weakref.ref(node))
    return made


def storage_key(x: Tensor) -> tuple[Any, ...]:
    """A key that tensors with the same memory and shape share."""
    owner = x._source if x._source is not None else (x.pool_handle or x.buffer) if x.array is None else x.array
    return id(owner), x.shape


def waiting_node(x: Any) -> TraceNode | None:
    """The pending node of a tensor, or ``None``."""
    if not isinstance(x, Tensor):
        return None
    source = x._source
    return source if type(source) is TraceNode and source.made is None else None


# ---- pending readers of memory

_readers: dict[int, list[weakref.ref[Any]]] = program.awaited
lock = threading.RLock()  # a thread may compute a value that another thread deferred
_noting = threading.RLock()  # guards _readers: a lost entry would be computed after its input has changed
_PRUNED_FROM = 64  # readers of one memory: from here on dead entries are removed whenever their number has doubled


def _note_readers(memory: Any, nodes: Sequence[weakref.ref[Any]]) -> None:
    """Register nodes as readers of ``memory``. Dead entries are pruned here: memory that is never written has no other occasion."""
    with _noting:
        refs = _readers.setdefault(id(memory), [])
        refs.extend(nodes)
        if len(refs) >= _PRUNED_FROM and not len(refs) & (len(refs) - 1):
            refs[:] = _unread(refs)


def _unread(refs: Sequence[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    """The references whose nodes are still pending."""
    return [ref for ref in refs if (node := ref()) is not None and node.made is None]


def _shared_values(x: Tensor) -> Any:
    """The object that tensors over the same memory share: the lease, or the array that owns it."""
    return x.pool_handle if x.array is None else memory_of(x.array)


def _before_write(memory: Any) -> None:
    """Compute the pending readers of ``memory``."""
    with _noting:
        refs = _readers.pop(id(memory), ())
    for ref in refs:
        node = ref()
        if node is not None and node.made is None:
            _tell_fusion("computed before its input changes", node)
            node.compute()


def register(node: Any) -> None:
    """Add a node to the pending ones and to the readers of its inputs; computes pending nodes if there are too many."""
    program.before_write = _before_write
    me, held = weakref.ref(node), 0
    for x in node.inputs:
        if type(x) is TraceNode and x.made is not None:  # computed meanwhile, because of another operand
            x = x.made
        if isinstance(x, Tensor):
            _note_readers(_shared_values(x), (me,))
            held += x.nbytes
    own = modes.__dict__  # the thread's own dictionary: one access costs as much as one attribute of ``modes``
    waiting = own["waiting"]
    waiting[id(node)] = me
    own["held"] += held
    if len(waiting) > MOST_WAITING or own["held"] > MOST_HELD:
        _shrink(_most_held(node))


def _most_held(node: Any) -> int:
    on_numpy = isinstance(node.queue, CPUQueue)
    return MOST_HELD if on_numpy else max(MOST_HELD, profile_of(node.queue).global_mem_size // 8)


def _shrink(most: int = MOST_HELD) -> None:
    """Drop nodes that are computed or dead; compute the others if they still exceed the limits."""
    left = [node for ref in modes.waiting.values() if (node := ref()) is not None and node.made is None]
    held = sum(x.nbytes for node in left for x in node.inputs if isinstance(x, Tensor))
    modes.waiting, modes.held = {id(node): weakref.ref(node) for node in left}, held
    if len(left) > MOST_WAITING // 2 or held > most // 2:
        modes.waiting, modes.held = {}, 0  # computing may defer formulas, whose registration must not recurse
        for node in left:
            if node.alive():
                node.compute()
        modes.waiting |= {id(node): weakref.ref(node) for node in left if node.made is None and node.alive()}
    with _noting:
        for key, refs in list(_readers.items()):
            refs[:] = _unread(refs)
            if not refs:
                del _readers[key]


def flush() -> None:
    """Compute all pending nodes of this thread that a tensor refers to."""
    if modes.waiting:
        found = [ref() for ref in modes.waiting.values()]
        _compute([node for node in found if node is not None and node.made is None and node.alive()])
        _shrink()


def compute(values: Iterable[Any]) -> None:
    """Compute the deferred tensors among ``values``, in shared kernels where possible."""
    found: list[Any] = [x._source for x in values if isinstance(x, Tensor)]
    _compute([node for node in found if node is not None and node.made is None])


def _compute(nodes: Sequence[Any]) -> None:
    for node in nodes:
        if node.made is None:
            node.compute([other for other in nodes if other.made is None and type(other) is TraceNode])


dispatch.fill("flush", flush)


# ---- modes


@contextmanager
def fusing(rows: bool = True, fast_math: bool = False) -> Iterator[None]:
    """Defer formulas of every size inside the block and, with ``rows``, folds of innermost axes."""
    with in_mode(Mode(rows, fast_math)):
        yield


TELLS = env.value("NETCL_DEBUG") >= 3


def _tell_fusion(what: str, *nodes: Any) -> None:
    if TELLS:
        log.warning("[fusion] %s: %s", what, ", ".join(node.name for node in nodes))


# ---- joining


def _joins(node: TraceNode, seen: tuple[int, ...], shape: tuple[int, ...], real: str) -> bool:
    """Whether a pending input, used with shape ``seen``, can be computed inside the kernel of an op whose result has ``shape``."""
    if node.real != real or node.mode != modes.mode or not node.readable or node.kind == "columns":
        return False
    if node.space is None:
        return seen == node.shape and (seen == shape or modes.mode is not None or math.prod(seen) == 1)
    if shape == node.space.shape:
        return seen == (node.space.kept if node.narrow else shape)
    return node.narrow and seen == shape and shape in (node.space.lead, node.space.kept)


def _regular(x: Tensor, space: Space) -> bool:
    """Whether a leaf has all of the folded axes or none of them."""
    tail = ((1,) * (len(space.shape) - x.ndim) + x.shape)[len(space.shape) - space.axes :]
    return tail == space.shape[len(space.shape) - space.axes :] or all(n == 1 for n in tail)


def _fits_rows(node: TraceNode, space: Space) -> bool:
    """Whether a node can be part of a kernel over rows: with several folded axes, its leaves must have all of them or none."""
    if node.space == space or space.axes == 1:
        return True
    return node.shape == space.shape and all(_regular(x, space) for x in node.leaves.values())


def _operands(values: Sequence[Any], shape: tuple[int, ...], real: str) -> tuple[tuple[Any, ...], Space | None]:
    """The tensors and pending nodes that an op reads, and their index space; nodes that cannot be fused are computed now."""
    nodes = [_under_shape(x) for x in values]
    for i, node in enumerate(nodes):
        if node is not None and not _joins(node, values[i].shape, shape, real):
            values[i]._source.compute()  # the original: ``node`` may be a reshaped copy of it
            nodes[i] = None
    spaces = {node.space for node in nodes if node is not None and node.space is not None}
    space = next(iter(spaces)) if len(spaces) == 1 else None
    dropped = space is not None and shape == space.lead and shape != space.shape
    for i, node in enumerate(nodes):
        if node is None:
            continue
        strange = len(spaces) > 1 and node.space is not None
        if strange or (space is not None and node.space is None and (dropped or not _fits_rows(node, space))):
            values[i]._source.compute()
            nodes[i] = None
    found = [x if node is None else node for x, node in zip(values, nodes, strict=True)]
    if _too_long(found):
        for x, node in zip(values, nodes, strict=True):
            if node is not None:
                _tell_fusion("the chain is long enough", node)
                x._source.compute()
        found, space, dropped = list(values), None, False
    if space is not None:
        found = [_in_space(x, space, dropped) for x in found]
    return tuple(found), space


def _eager_operands(values: Sequence[Any], shape: tuple[int, ...], real: str) -> tuple[Any, ...]:
    """The operands of an op outside of ``ag.jit_compile``: pending nodes of the result's shape, everything else as tensors."""
    found: list[Any] = []
    for x in values:
        node = x._source if isinstance(x, Tensor) else None
        if type(node) is TraceNode and node.made is None:
            if _joins(node, x.shape, shape, real):
                found.append(node)
                continue
            node.compute()
        found.append(x)
    if _too_long(found):
        for node in found:
            if type(node) is TraceNode and node.made is None:
                _tell_fusion("the chain is long enough", node)
                node.compute()
        return tuple(values)
    return tuple(found)


def _under_shape(x: Any) -> TraceNode | None:
    """The pending node of a tensor; for a reshaped tensor, a copy of the chain of formulas over its leaves in the new shape."""
    node = waiting_node(x)
    if node is None or node.space is not None or x.shape == node.shape or modes.mode is None or node.kind != "map":
        return node
    below = _below(node)
    plain = all(n.shape == node.shape for n in below) and all(t.shape == node.shape or t.size == 1 for t in node.leaves.values())
    return _reshaped(node, x.shape, {}) if plain else node


def _reshaped(node: TraceNode, shape: tuple[int, ...], done: dict[TraceNode, TraceNode]) -> TraceNode:
    if node not in done:
        inputs = []
        for x in node.inputs:
            if type(x) is TraceNode:
                x = _reshaped(x, shape, done) if x.made is None else x.made
            inputs.append(x._view(shape if x.shape == node.shape else ()) if isinstance(x, Tensor) else x)  # others: one element
        what = (node.kind, node.name, node.body, tuple(inputs), node.numbers)
        done[node] = TraceNode(*what, shape, node.dtype, node.real, node.queue, None, False)
        register(done[node])
    return done[node]


def _too_long(operands: Sequence[Any]) -> bool:
    """Whether one kernel for all operands would be too large. Nodes are counted exactly only if the upper bound exceeds the limit."""
    weight = leaves = 0
    for x in operands:
        weight, leaves = (weight + x.weight, leaves + len(x.leaves)) if type(x) is TraceNode else (weight, leaves + 1)
    nodes = [x for x in operands if type(x) is TraceNode]
    if weight >= MOST_NODES and len(in_order(nodes)) >= MOST_NODES:
        return True
    if leaves <= MOST_LEAVES:
        return False
    return len({key for x in operands for key in (x.leaves if type(x) is TraceNode else (id(x),))}) > MOST_LEAVES


def _in_space(x: Any, space: Space, dropped: bool) -> Any:
    """A leaf with the folded axes, as a kernel over rows reads it; the op's result may have dropped them."""
    if not isinstance(x, Tensor):
        return x
    if dropped:
        return x._view((*x.shape, *(1,) * space.axes))
    if not _regular(x, space):
        from netcl.engine.strided import broadcast_to

        return broadcast_to(x, space.shape)
    return x


def _followed(name: str, values: Sequence[Any], shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    """Fuse an op into the epilogue of a pending product among its operands, the last one first; ``None`` if none can."""
    for place in reversed(range(len(values))):
        x = values[place]
        if _of_product(x) and x._source.made is None and (made := later.finish(name, values, place, shape, dtype)) is not None:
            return made
    return None


def _of_product(x: Any) -> bool:
    return type(x) is DeferredTensor and type(x._source) is not TraceNode


def _made(node: TraceNode) -> Tensor:
    tensor = Tensor._deferred(node, node.shape, node.dtype, node.queue)
    if modes.trace is not None:
        modes.trace.append(node)
    register(node)
    return tensor


def defer(
    name: str, body: Body, values: Sequence[Any], numbers: Sequence[Any], shape: tuple[int, ...], dtype: DType, real: str, queue: Any
) -> Tensor:
    """A formula over tensors and numbers as a deferred tensor."""
    if real == "int" and dtype.name == "bool":  # a truth value is the same in every compute type: take that of the inputs
        real = next((node.real for x in values if (node := waiting_node(x)) is not None), real)
    if any([_of_product(x) for x in values]):
        values = [later.settle(x, values) if _of_product(x) else x for x in values]
        if name in later.follows and not numbers and (made := _followed(name, values, shape, dtype)) is not None:
            return made
    if modes.mode is None:
        operands = _eager_operands(values, shape, real)
        return _made(TraceNode("map", name, body, operands, tuple(numbers), shape, dtype.name, real, queue, None, False))
    operands, space = _operands(values, shape, real)
    narrow = space is not None and shape != space.shape
    return _made(TraceNode("map", name, body, operands, tuple(numbers), shape, dtype.name, real, queue, space, narrow))


def defer_fold(name: str, body: Body, x: Tensor, axes: int, keepdims: bool, dtype: DType, real: str) -> Tensor:
    """A fold of the innermost ``axes`` as a deferred tensor; ``body`` combines two values."""
    node, space = waiting_node(x), Space(x.shape, axes)
    fits = node is not None and _joins(node, x.shape, x.shape, real) and node.space in (None, space) and _fits_rows(node, space)
    if node is not None and (not fits or node.level >= MOST_FOLDS):
        node.compute()
        node = None
    shape = space.kept if keepdims else space.lead
    return _made(TraceNode("fold", name, body, (node or x,), (), shape, dtype.name, real, x.queue, space, True))


def defer_columns(name: str, body: Body, x: Tensor, axes: int, shape: tuple[int, ...], dtype: DType, real: str) -> Tensor | None:
    """A sum over all but the innermost ``axes`` of a deferred tensor; ``None`` if it cannot be fused with it."""
    node, space = waiting_node(x), Space(x.shape, axes)
    if node is None or not (_joins(node, x.shape, x.shape, real) and node.space in (None, space) and _fits_rows(node, space)):
        return None
    return _made(TraceNode("columns", name, body, (node,), (), shape, dtype.name, real, x.queue, space, False))


# ---- regions


class _Gathering:
    """A region under construction: nodes that the kernel of its root can compute."""

    def __init__(self, root: TraceNode):
        self.root = root
        self.inside = dict.fromkeys(_below(root))
        self.space = next((node.space for node in self.inside if node.space is not None), None)
        self.shape = root.shape if self.space is None else self.space.shape

    def accept(self, node: TraceNode) -> bool:
        """Add a node and its pending inputs, if one kernel can compute all."""
        if node.made is not None or node.mode != self.root.mode or node.real != self.root.real or node.queue is not self.root.queue:
            return False
        space = self.space or node.space
        if (node.shape if node.space is None else node.space.shape) != self.shape or node.space not in (None, space):
            return False
        more = [n for n in _below(node) if n not in self.inside]
        if space is not None and not all(n.space in (None, space) and _fits_rows(n, space) for n in (*self.inside, *more)):
            return False
        leaves = {key for n in (*self.inside, *more) for key in n.leaves}
        if len(self.inside) + len(more) > MOST_NODES or len(leaves) > MOST_LEAVES:
            return False
        self.inside |= dict.fromkeys(more)
        self.space = space
        return True

    def shares_input(self, node: TraceNode) -> bool:
        return any(key in n.leaves for n in self.inside for key in node.leaves)


def gather(root: TraceNode, wanted: Sequence[TraceNode] = ()) -> list[TraceNode]:
    """The roots of a region: ``root``, live nodes that share pending work with it, nodes of ``wanted`` that read the same inputs."""
    if not wanted and not root.users and all(len(node.users) == 1 for node in _below(root)[:-1]):
        return [root]  # a chain without other users
    region = _Gathering(root)
    below = set(region.inside)
    queue = list(region.inside)
    while queue:
        for ref in queue.pop().users:
            user = ref()
            if user is not None and user not in region.inside and region.accept(user):
                queue.extend(region.inside)
    for node in wanted:
        if node not in region.inside and region.shares_input(node):
            region.accept(node)
    used = {x for node in region.inside for x in node.inputs if type(x) is TraceNode}
    return [root, *(n for n in region.inside if n not in below and (n in wanted or (n not in used and n.alive())))]


def _below(node: TraceNode) -> list[TraceNode]:
    """A node and every pending node it depends on, inputs first."""
    order: dict[TraceNode, None] = {}
    _collect(node, order)
    return list(order)


def _collect(node: TraceNode, order: dict[TraceNode, None]) -> None:
    if node not in order:
        for x in node.inputs:
            if type(x) is TraceNode and x.made is None:
                _collect(x, order)
        order[node] = None


def in_order(roots: Sequence[TraceNode]) -> list[TraceNode]:
    """The roots and every pending node they depend on, inputs first."""
    return list(dict.fromkeys(node for root in roots for node in _below(root)))


def stored(order: Sequence[TraceNode], roots: Sequence[TraceNode]) -> list[TraceNode]:
    """The nodes whose values a kernel stores: its roots, and live intermediate values if storing them pays.

    Values per row are always stored. Whole tensors are stored if writing and reading them moves fewer bytes than computing them again
    from their leaves, or if they were skipped once before.
    """
    between = [node for node in order if node not in roots and node.alive()]
    if not between:
        return [node for node in order if node in roots]
    small = [node for node in between if node.narrow]
    large = [node for node in between if not node.narrow]
    leaves = {key: x.nbytes for node in large for key, x in node.leaves.items()}
    store = 2 * sum(math.prod(node.shape) * DTYPES[node.dtype].itemsize for node in large)
    again = sum(leaves.values())
    keep = large if again > store else [node for node in large if node.skipped]
    for node in large:
        node.skipped = True
    chosen = {*roots, *small, *keep}
    return [node for node in order if node in chosen]


class _Eager:
    """The number of elements from which eager code defers; 0 is never. Read once: reading the environment costs as much as a launch."""

    least = int(env.value("NETCL_FUSION"))


def worth_deferring(queue: Any, shape: tuple[int, ...], per_unit: float = CHAINED) -> bool:
    """Whether eager code defers an op over this shape: on OpenCL devices, if moving the values costs more than deferring."""
    least = _Eager.least
    if not least or isinstance(queue, CPUQueue):
        return False
    size, (cpu, _, units) = math.prod(shape), rows.device_of(queue)
    return size >= least and (cpu or least != env.FUSE_FROM or size >= per_unit * units * least)


@contextmanager
def eager_fusion(least: int) -> Iterator[None]:
    """Inside the block, eager code defers ops from ``least`` elements on; 0 is never. For tests and measurements.

    The plan caches hold these decisions and are cleared at both ends of the block.
    """
    before, _Eager.least = _Eager.least, least
    program.forget("plans")
    try:
        yield
    finally:
        _Eager.least = before
        program.forget("plans")


later.defer, later.worth = defer, worth_deferring
