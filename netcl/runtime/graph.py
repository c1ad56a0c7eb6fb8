"""A recorded step: nodes over values, memory planned by lifetimes, and a list of prepared launches to replay.

A :class:`Value` is a block of device memory as the step saw it, a :class:`Node` one thing that was enqueued. Values that the step
makes and drops share memory (:func:`share`); what it leaves behind (gradients, say) keeps its own and is overwritten by every replay.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import platforms
from netcl.core.backend.opencl import backend_of
from netcl.core.errors import DeviceError, DtypeError, OutOfMemoryError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.memory import BufferHandle, get_persistent_pool
from netcl.core.recording import Number
from netcl.core.tensor import Tensor, with_shape
from netcl.core.writes import Writes, clock, stamp, writes_of, wrote

INPUT, OUTSIDE, MADE, CONSTANT = "input", "outside", "made", "constant"
MOST_REBINDS = 8  # launches a result may be rebound in before a copy is cheaper
SMALL = 4096  # bytes of a filled value that is kept rather than filled at every replay


@dataclass(eq=False)
class Value:
    """A block of memory: an ``input``, something from ``outside`` (a parameter, a running statistic), ``made`` by the step, or a
    ``constant`` the host sent while it was recorded."""

    kind: str
    buffer: Any
    nbytes: int
    lease: Any = None  # the pool's; weak while recording, so that lifetimes stay those of the step
    place: int = -1  # of an input, among the inputs; of anything else, in the order of first use
    first: int = -1
    last: int = -1
    written: bool = False
    owners: list[weakref.ref[Tensor]] = field(default_factory=list)
    marks: dict[int, Writes] = field(default_factory=dict)  # where tensors over it keep when it was last written in place

    def noted(self, tensor: Tensor) -> None:
        """Replays change this tensor in place."""
        mark = writes_of(tensor)
        self.marks[id(mark)] = mark

    def held(self) -> Any:
        """The lease, if anything still holds it."""
        return self.lease() if isinstance(self.lease, weakref.ref) else self.lease

    def known_as(self) -> tuple[Any, ...]:
        """What two recordings of one step agree on. The buffer itself, since a number of one that is gone may belong to another."""
        return (self.kind, self.buffer) if self.kind == OUTSIDE else (self.kind, self.place)


@dataclass(eq=False)
class Node:
    """One thing enqueued: a ``launch`` (kernel, sizes, arguments), a ``fill``, a ``copy`` or an ``upload``.

    ``args`` are values, numbers of the host (:class:`~netcl.core.recording.Number` where they are asked anew), or local memory;
    of a fill, a copy or an upload the values come first. ``reads`` and ``writes`` are the values among them.
    """

    kind: str
    args: tuple[Any, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    kernel: Any = None
    sizes: tuple[int, ...] = ()
    local: tuple[int, ...] | None = None
    op: str = ""  # the function of netcl.ops that asked for it

    @property
    def name(self) -> str:
        """The kernel's name, or the kind."""
        return self.kernel.name if self.kernel is not None else self.kind

    def story(self) -> tuple[Any, ...]:
        """The node in a form that is equal for two recordings of the same step."""
        return (self.kind, self.kernel, self.sizes, self.local, tuple(_shown_argument(arg) for arg in self.args))


def _shown_argument(arg: Any) -> Any:
    if isinstance(arg, Value):
        return arg.known_as()
    if isinstance(arg, Number):
        return ("again", arg.source, arg.index)
    if isinstance(arg, np.ndarray):
        return (arg.shape, arg.dtype.str, arg.tobytes())
    return (type(arg).__name__, repr(arg) if isinstance(arg, (bool, int, float, np.generic)) else arg.size)


# ---- memory


def needed(nodes: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
    """The nodes without those whose results nobody reads; the lives of their values are set anew.

    What a step made and nobody holds is read only by later nodes, or ``wanted`` as a result.
    """
    last = set(wanted)
    live = {v for node in nodes for v in (*node.reads, *node.writes) if v.kind != MADE or v.held() is not None} | last
    kept: list[Node] = []
    for node in reversed(nodes):
        if not node.writes or any(value in live for value in node.writes):
            live.update(node.reads, node.writes)  # what is written may be read as well: to add to it, say
            kept.append(node)
    kept.reverse()
    for value in {v for node in nodes for v in (*node.reads, *node.writes)}:
        value.first = value.last = -1
    for i, node in enumerate(kept):
        for value in (*node.reads, *node.writes):
            value.first, value.last = (i if value.first < 0 else value.first), i
    for value in last:
        value.last = len(kept)
    return kept


@dataclass(eq=False)
class MemoryBlock:
    """Memory that values take turns in and, where it ``cuts``, lie side by side in. ``lease`` is there before, or comes later."""

    nbytes: int
    lease: Any = None
    cuts: bool = False
    members: list[tuple[Value, int]] = field(default_factory=list)  # with their offsets
    taken: list[tuple[int, int, int, int]] = field(default_factory=list)  # first and last node, first byte and end

    def room(self, value: Value, nbytes: int) -> int:
        """The lowest offset from which so many bytes are free all the value's life; it may be beyond the end."""
        at = 0
        for begin, end in sorted((begin, end) for first, last, begin, end in self.taken if first <= value.last and value.first <= last):
            if at + nbytes <= begin:
                break
            at = max(at, end)
        return at

    def takes(self, at: int, nbytes: int) -> bool:
        return at + nbytes <= self.nbytes and (at == 0 or self.cuts)

    def add(self, value: Value, at: int, nbytes: int, last: int | None = None) -> MemoryBlock:
        self.members.append((value, at))
        self.taken.append((value.first, value.last if last is None else last, at, at + nbytes))
        self.nbytes = max(self.nbytes, at + nbytes)
        return self

    @property
    def used(self) -> int:
        """The bytes from its beginning that values lie in."""
        return max((end for _, _, _, end in self.taken), default=0)


def share(
    values: Iterable[Value], size_of: Callable[[int], int] = int, there: Sequence[MemoryBlock] = (), cuts: bool = False, most: int = 1 << 62
) -> list[MemoryBlock]:
    """The blocks for values that live only inside a step: the largest value first, each into the smallest block with room all its life.

    ``size_of`` says what so many bytes take, since pools round up; ``there`` are blocks that exist anyway. Where memory ``cuts``,
    new blocks grow, up to ``most`` bytes.
    """
    blocks = list(there)
    new: list[MemoryBlock] = []
    for value in sorted(values, key=lambda v: (-size_of(v.nbytes), v.first)):
        nbytes = size_of(value.nbytes)
        places = [(block, block.room(value, nbytes)) for block in blocks if block.nbytes >= nbytes]
        block, at = min((p for p in places if p[0].takes(p[1], nbytes)), key=lambda p: (p[0] in new, p[0].nbytes), default=(None, 0))
        if block is None and new and cuts:
            block, at = new[-1], new[-1].room(value, nbytes)
        if block is None or at + nbytes > max(most, block.nbytes):
            block, at = MemoryBlock(nbytes, cuts=cuts), 0
            new.append(block)
            blocks.append(block)
        block.add(value, at, nbytes)
    return new


def lease_blocks(queue: Any, sizes: Sequence[int], others: Sequence[BufferHandle]) -> list[BufferHandle]:
    """Memory for blocks, largest first: those of other graphs where they are not much larger."""
    free, taken, pool = sorted(others, key=lambda lease: lease.nbytes), [], get_persistent_pool(queue)
    for nbytes in sizes:
        lease = next((old for old in free if nbytes <= old.nbytes <= 2 * nbytes + 4096), None)
        if lease is None:
            lease = pool.reuse(nbytes) or pool.allocate(nbytes, what="memory of a recorded step")
        else:
            free.remove(lease)
        taken.append(lease)
    return taken


# ---- results


@dataclass(eq=False)
class Output:
    """A tensor of the result: where its values are after a replay, and what it looks like."""

    value: Value
    shape: tuple[int, ...]
    dtype: str
    tensor: Tensor | None = None  # of a value from outside: the tensor itself


class Graph:
    """A recorded step that can be replayed.

    ``nodes`` is what it enqueues, ``values`` the memory it does so over, ``inputs`` the values that a replay rebinds,
    ``planned_bytes`` what the values that live only inside a replay take together. ``replay(inputs)`` runs it on tensors of
    the same shapes and dtypes and returns what the step returned, in fresh tensors; nothing waits for the device.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.queue: Any = None
        self.planned_bytes = 0
        self.result: Any = None
        self._like: list[tuple[tuple[int, ...], str]] = []

    def returns(self, result: Any) -> Any:
        """Say, inside ``with capture_graph(...) as graph``, what a replay gives back: tensors, also in lists, tuples and dicts."""
        self.result = result
        return result

    # ---- making it

    def build(self, recording: Any, inputs: Sequence[Tensor], result: Any) -> Graph:
        """Plan the memory of a recording and prepare its launches."""
        self.values, self.inputs = recording.values, recording.inputs
        self.queue, self.result = recording.queue, result
        outputs: list[Value] = []
        rebuilt(result, lambda output: outputs.append(output.value))
        self.nodes = needed(recording.nodes, outputs)
        self._like = [(t.shape, t.dtype) for t in inputs]
        self._sources, self._undos, self._checks = list(recording.sources), list(recording.undos), list(recording.checks)
        self._said: list[Any] = [None] * len(self._sources)
        self._bound = [value.buffer for value in self.inputs]
        self._changed = [i for i, value in enumerate(self.inputs) if value.marks]
        lasting = (value for value in self.values if value.kind == OUTSIDE or (value.kind == MADE and value.held() is not None))
        self._marks = [mark for value in lasting for mark in value.marks.values()]
        self._copied: list[Writes] = []  # of these, the marks of memory that views hold copies of
        self._copied_at = -1
        self._place_values()
        written = {value for node in self.nodes for value in node.writes}
        self._rewritten = [i for i, value in enumerate(self.inputs) if value in written]
        self._written = {id(value.buffer) for value in written if value.kind != INPUT and value.buffer is not None}
        self._outside = {id(value.buffer) for value in self.values if value.kind == OUTSIDE} if self._rewritten else set()
        self._overwritten = {id(lease): lease for value in written if value.kind != INPUT and (lease := value.held()) is not None}
        self._prepare()
        order = {id(node): i for i, node in enumerate(recording.nodes)}
        called = [order[id(node)] for node in self.nodes if node.kind == "launch" or not self._stays(node)]
        self._until = [bisect_left(called, at) for at in recording.asked]
        first = next((i for i, undo in enumerate(self._undos) if undo is not None), len(self._undos))
        begins = [until if i >= first else 0 for i, until in enumerate(self._until)]  # calls that a source waits for
        self._parts: list[tuple[int, int, int, int]] = []  # (first source, end, first call, end): sources run first
        asked = done = 0
        for i, begin in enumerate([*begins, len(self._calls)]):
            if begin > done or i == len(begins):
                self._parts.append((asked, i, done, begin))
                asked, done = i, begin
        return self

    def _place_values(self) -> None:
        """A buffer for every value: its own if somebody still holds it, one anew at each replay for a result, else one it shares."""
        self._buffers: dict[Value, Any] = {value: value.buffer for value in self.values}
        self._leases: list[Any] = []
        self._fresh: dict[Value, list[Callable[[Any], None]]] = {value: [] for value in self._renewable()}
        self._known = self._filled_once()
        passing, left, pool = [], [], get_persistent_pool(self.queue)
        for value in self.values:
            lease = value.held()
            if value.kind != MADE or lease is not None:
                value.lease = lease
                self._leases.append(lease)
                if value.kind == MADE and value.first >= 0 and lease.pool is pool and value.buffer.size >= lease.bucket:
                    left.append(MemoryBlock(lease.bucket, lease, pool.cuts).add(value, 0, lease.bucket, len(self.nodes)))
            elif value in self._known:
                self._keep_filled(value)
            elif value not in self._fresh and value.first >= 0:
                passing.append(value)
        self._share(passing, left)

    def _share(self, passing: Sequence[Value], left: Sequence[MemoryBlock]) -> None:
        """Memory for passing values. What the step leaves behind is free for them until the step writes it; graphs of one queue take turns
        on the rest, for nothing in it outlives a replay."""
        pool = get_persistent_pool(self.queue)
        with program.state(self.queue).lock:
            shared: weakref.WeakSet[BufferHandle] = self.queue.netcl.part("blocks", lambda _: weakref.WeakSet())
            others = list(shared)
            there = [MemoryBlock(lease.bucket, lease, True) for lease in (*others, *pool.gaps())] if pool.cuts else []
            new = share(passing, pool.bucket_of, (*left, *there), pool.cuts, pool.limit)
            for block, lease in zip(new, lease_blocks(self.queue, [block.nbytes for block in new], [] if there else others), strict=True):
                block.lease = lease
            mine = [block for block in (*new, *there) if block.members]
            shared.update(block.lease for block in mine)
        for value in passing:
            self._buffers[value] = value.buffer = None  # what it lay in when the step ran
        pool.clear()  # of what running the step took, a replay takes nothing but the above
        self._leases += [block.lease for block in mine]
        self.planned_bytes = sum(block.used for block in mine)
        for block in (*mine, *left):
            for value, at in block.members:
                if block.lease is not value.lease:
                    self._buffers[value] = block.lease.part(at, pool.bucket_of(value.nbytes))

    def _renewable(self) -> list[Value]:
        """Results that nobody else holds and that only launches touch: they can be bound to fresh memory instead of being copied."""
        outputs: dict[Value, int] = {}
        rebuilt(self.result, lambda output: outputs.setdefault(output.value, 0))
        moved = {value for node in self.nodes if node.kind != "launch" for value in (*node.reads, *node.writes)}
        for node in self.nodes:
            for value in {*node.reads, *node.writes} & outputs.keys():
                outputs[value] += 1
        single = [value for value in outputs if value.kind == MADE and value.held() is None and value not in moved]
        return [value for value in single if 0 < outputs[value] <= MOST_REBINDS]

    def _filled_once(self) -> dict[Value, list[Node]]:
        """Small values of nobody else that are filled and from then on only read: they keep what they are filled with."""
        fills: dict[Value, list[Node]] = {}
        changed = {value for node in self.nodes if node.kind != "fill" for value in node.writes}
        for node in self.nodes:
            value = node.writes[0] if node.kind == "fill" else None
            if value is not None and value.kind == MADE and value.nbytes <= SMALL and value.held() is None:
                fills.setdefault(value, []).append(node)
        return {value: nodes for value, nodes in fills.items() if value not in changed and value not in self._fresh}

    def _keep_filled(self, value: Value) -> None:
        lease = get_persistent_pool(self.queue).allocate(value.nbytes)
        self._leases.append(lease)
        self._buffers[value] = lease.buffer
        for node in self._known[value]:
            self._transfer(node)()

    def _prepare(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._launches: list[tuple[program.Prepared, Node]] = []
        self._numbers: dict[tuple[int, int], list[tuple[program.Prepared, int]]] = {}
        self._rebinds: list[list[Callable[[Any], None]]] = [[] for _ in self.inputs]
        for node in self.nodes:
            if node.kind == "launch":
                self._prepare_launch(node)
            elif not self._stays(node):
                self._prepare_transfer(node)
        self._answers = any(launch.answers for launch, _ in self._launches)

    def _stays(self, node: Node) -> bool:
        """Whether what a transfer puts in place is still there at the next replay."""
        value = node.writes[0]
        return value in self._known or (node.kind == "upload" and value.kind == CONSTANT and not value.written)

    def _prepare_launch(self, node: Node) -> None:
        args = [self._buffers[arg] if isinstance(arg, Value) else arg for arg in node.args]
        launch = node.kernel.prepare(self.queue, node.sizes, node.local, args)
        self._launches.append((launch, node))
        self._calls.append(launch.call)
        for index, arg in enumerate(node.args):
            if isinstance(arg, Number):
                self._numbers.setdefault((arg.source, arg.index), []).append((launch, index))
            elif isinstance(arg, Value) and arg.kind == INPUT:
                self._rebinds[arg.place].append(partial(launch.set, index))
            elif isinstance(arg, Value) and arg in self._fresh:
                self._fresh[arg].append(partial(launch.set, index))

    def _prepare_transfer(self, node: Node) -> None:
        position = len(self._calls)
        self._calls.append(self._transfer(node))
        for value in {*node.reads, *node.writes}:
            if value.kind == INPUT:
                self._rebinds[value.place].append(partial(self._rebind_transfer, node, position, value))

    def _rebind_transfer(self, node: Node, position: int, value: Value, buffer: Any) -> None:
        self._buffers[value] = buffer
        self._calls[position] = self._transfer(node)

    def _transfer(self, node: Node) -> Callable[[], Any]:
        backend = backend_of(self.queue)
        target = self._buffers[node.writes[0]]
        if node.kind == "fill":
            return partial(backend.fill_bytes, target, *node.args[1:])
        if node.kind == "copy":
            return partial(backend.copy_bytes, target, self._buffers[node.reads[0]], node.args[2])
        return partial(backend.upload_bytes, target, node.args[1])

    # ---- running it

    def replay(self, inputs: Sequence[Tensor] = ()) -> Any:
        """Run the step on these inputs; the result is in fresh tensors that nothing has waited for.

        Tensors that the step left behind (gradients, attributes) are overwritten in place.
        """
        self._check_inputs(inputs)
        return self.run(inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """:meth:`replay` without checking the inputs: their shapes and dtypes match, and the step writes none of their memory."""
        if platforms.forked_child:
            platforms.check_process()
        for i, t in enumerate(inputs):
            if t.queue is not self.queue:
                self._check_place(i, t)
        for where, function in self._checks:
            function(inputs[where] if isinstance(where, int) else where)
        hooks.settle()
        self._compute_readers(inputs)
        with program.state(self.queue).lock:
            self._bind(inputs)
            fresh = {value: self._renew(value) for value in self._fresh}
            self._note_writes(inputs)
            self._run_parts()
            return rebuilt(self.result, lambda output: self._returned(output, inputs, fresh))

    def _compute_readers(self, inputs: Sequence[Tensor]) -> None:
        """Before anything is overwritten, what other threads left waiting and reads the same memory is computed."""
        if hooks.readers:
            for key in hooks.readers.keys() & self._overwritten.keys():
                hooks.readers.compute(self._overwritten[key])
            for i in self._rewritten:
                inputs[i]._compute_readers()

    def _note_writes(self, inputs: Sequence[Tensor]) -> None:
        wrote([inputs[i] for i in self._changed])
        now = clock.last
        for mark in self._marks:
            mark.last = now
        if clock.copied != self._copied_at:
            self._copied_at, self._copied = clock.copied, [mark for mark in self._marks if mark.copies is not None]
        for mark in self._copied:
            stamp(mark, now)

    def meets(self, inputs: Sequence[Tensor]) -> int | None:
        """The first input in memory that the step writes, or reads under another name while it writes the input: its commands are not in
        order for that."""
        for i, t in enumerate(inputs):
            if id(t.buffer) in self._written or (self._outside and i in self._rewritten and id(t.buffer) in self._outside):
                return i
        return None

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._like):
            what = "the recorded step takes another number of inputs"
            raise ShapeError(message("replay", what, wanted=len(self._like), given=len(inputs)))
        for i, (t, (shape, dtype)) in enumerate(zip(inputs, self._like, strict=True)):
            if t.shape != shape or t.dtype != dtype:
                kind = ShapeError if t.shape != shape else DtypeError
                seen = {"recorded": f"{shape} {dtype}", "given": f"{t.shape} {t.dtype}"}
                raise kind(message("replay", f"input {i} is unlike the recorded one", "record again for this kind", **seen))
        met = self.meets(inputs)
        if met is not None:
            raise ValueError(
                message("replay", f"input {met} lies in memory that the step writes", "give it a clone()", shape=inputs[met].shape)
            )

    def _check_place(self, i: int, t: Tensor) -> None:
        if t.context != self.queue.context:
            raise DeviceError(message("replay", f"input {i} lives on another device", "move it with tensor.to(device)", given=t.device))
        t.wait()

    def _bind(self, inputs: Sequence[Tensor]) -> None:
        bound = self._bound
        for i, t in enumerate(inputs):
            buffer = t.buffer
            if bound[i] is not buffer:
                bound[i] = buffer
                for rebind in self._rebinds[i]:
                    rebind(buffer)

    def _run_parts(self) -> None:
        """Launch everything, and repeat what the host does in a step: up to the first source that can be undone at the beginning, from
        there on between the launches where the step did it.

        If a source raises (a schedule that is at its end), the launches before it are made; if a launch fails, the sources after it are not
        asked, and those right before it are undone: counters and parameters stay together, as without a recording.
        """
        said, asking, done = self._said, -1, 0
        try:
            for first, last, done, end in self._parts:
                for i in range(first, last):
                    asking = i
                    new = self._sources[i]()
                    asking = -1
                    if new != said[i]:
                        self._pass_on(i, new, said[i])
                        said[i] = new
                if end > done:
                    self._run(self._calls[done:end], first, last)
        finally:
            if asking >= 0:
                self._run(self._calls[done : self._until[asking]], 0, 0)

    def _pass_on(self, source: int, new: Any, old: Any) -> None:
        several = isinstance(new, (list, tuple))
        for index, number in enumerate(new if several else (new,)):
            if not several or old is None or number != old[index]:
                for launch, at in self._numbers.get((source, index), ()):
                    launch.set(at, number)

    def _run(self, calls: Sequence[Callable[[], object]], first: int, last: int) -> None:
        """Enqueue ``calls``. If the first one fails, the sources ``first`` to ``last - 1``, which ran just before it, are undone."""
        call = None
        try:
            if hooks.launch_observers:
                self._run_observed(calls)
            elif self._answers:
                for call in calls:
                    if call():
                        self._say_why(call)
            else:
                for call in calls:
                    call()
        except (platforms.opencl().Error, DeviceError, OutOfMemoryError) as error:
            if call is calls[0]:
                for undo in filter(None, self._undos[first:last]):
                    undo()
            if not isinstance(error, platforms.opencl().Error):
                raise
            raise program.failure("replay", "in a recorded step", error) from None

    def _say_why(self, call: Callable[[], object]) -> None:
        """A launch that answered with an error, made again by the way that raises it."""
        next(launch for launch, _ in self._launches if launch.call is call).observed()

    def _run_observed(self, calls: Sequence[Callable[[], object]]) -> None:
        """As eager code does it, for who listens to launches (a profile)."""
        launches = {id(launch.call): (launch, node) for launch, node in self._launches}
        for call in calls:
            launch, node = launches.get(id(call), (None, None))
            if launch is None or node is None:
                call()
                continue
            event = launch.observed()
            for observer in hooks.launch_observers:
                observer(launch.kernel, self.queue, launch.sizes, launch.local, node.args, event)

    def _renew(self, value: Value) -> BufferHandle:
        """Memory for a result of this replay."""
        lease = backend_of(self.queue).pool.allocate(value.nbytes)
        for rebind in self._fresh[value]:
            rebind(lease.buffer)
        return lease

    def _returned(self, output: Output, inputs: Sequence[Tensor], fresh: Mapping[Value, BufferHandle]) -> Tensor:
        value = output.value
        if output.tensor is not None:
            return output.tensor
        if value.kind == INPUT:
            given = inputs[value.place]
            return given if given.shape == output.shape else with_shape(given, output.shape)
        handle = fresh.get(value)
        if handle is None:
            handle = backend_of(self.queue).clone(self._buffers[value], output.shape, dtypes.DTYPES[output.dtype])
        return Tensor(handle.buffer, output.shape, output.dtype, self.queue.context, self.queue, handle)

    def table(self) -> str:
        """What a replay enqueues, a line each: the op, the kernel, its sizes, and the bytes of what it reads and writes."""
        rows = [f"{'':4} {'op':24} {'kernel':32} {'items':>20} {'reads':>12} {'writes':>12}"]
        for i, node in enumerate(self.nodes):
            read, written = (sum(value.nbytes for value in values) for values in (node.reads, node.writes))
            items = " x ".join(map(str, node.sizes))
            rows.append(f"{i:4} {node.op[:24]:24} {node.name[:32]:32} {items:>20} {read:12} {written:12}")
        return "\n".join(rows)

    def __repr__(self) -> str:
        launches = sum(node.kind == "launch" for node in self.nodes)
        return f"<Graph: {launches} launches, {len(self.nodes) - launches} transfers, {self.planned_bytes} planned bytes>"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result, in order: of lists, tuples and dictionaries in each other."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def rebuilt(tree: Any, of: Callable[[Any], Any]) -> Any:
    """A result again, with ``of`` called on every :class:`Output` in it."""
    if isinstance(tree, Output):
        return of(tree)
    if isinstance(tree, (list, tuple)):
        parts = [rebuilt(part, of) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, dict):
        return {key: rebuilt(part, of) for key, part in tree.items()}
    return tree
