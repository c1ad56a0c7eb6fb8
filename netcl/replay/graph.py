"""A recorded step that can be replayed: a list of prepared launches over planned memory.

Values that are used only inside the step share memory (:mod:`netcl.replay.memory_plan`). Tensors that outlive the step, such as gradients,
keep their memory, and every replay overwrites them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import platforms
from netcl.core.backend.opencl import backend_of
from netcl.core.errors import DeviceError, DtypeError, OutOfMemoryError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.memory import BufferHandle, get_persistent_pool
from netcl.core.nested import map_leaves
from netcl.core.recording import Number
from netcl.core.tensor import Tensor, over_memory, with_shape
from netcl.core.waiting_runs import flush_waiting, waiting
from netcl.core.writes import Writes, clock, stamp, wrote
from netcl.ops.views import base_of, views_of
from netcl.replay.fold_constants import FoldedCommands, KeptValues
from netcl.replay.memory_plan import MemoryBlock, lease_blocks, needed, share
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, CommandNode, Value

MOST_REBINDS = 8  # launches that use a result; with more, a copy is cheaper than binding a fresh buffer


@dataclass(eq=False)
class Output:
    """A tensor of the result: its value, shape and dtype."""

    value: Value
    shape: tuple[int, ...]
    dtype: str
    tensor: Tensor | None = None  # of a value from outside: the tensor itself


class Graph:
    """A recorded step that can be replayed.

    ``nodes`` are its commands, ``values`` the memory they use, ``inputs`` the values that a replay rebinds, ``planned_bytes`` the size of
    the memory that values inside a replay share. ``replay(inputs)`` runs it on tensors of the same shapes and dtypes.
    """

    def __init__(self) -> None:
        self.nodes: list[CommandNode] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.queue: Any = None
        self.planned_bytes = 0
        self.result: Any = None
        self._like: list[tuple[tuple[int, ...], str]] = []

    def returns(self, result: Any) -> Any:
        """Set the result of replays (tensors, also in lists, tuples, dicts), inside ``with capture_graph()``; returns ``result``."""
        self.result = result
        return result

    # ---- making it

    def build(self, recording: Any, inputs: Sequence[Tensor], result: Any, kept: KeptValues) -> Graph:
        """Plan the memory of a recording, prepare its launches and return the graph; computes values that depend only on weights."""
        self.values, self.inputs = recording.values, recording.inputs
        self.queue, self.result = recording.queue, result
        self._context = self.queue.context  # which the driver is asked for
        outputs = [output.value for output in _outputs(result)]
        self.nodes = needed(recording.nodes, outputs)
        self._folded = FoldedCommands(self._run_once, self.queue)
        self.nodes = needed(self._folded.take(self.nodes, outputs, kept), outputs)
        self._like = [(t.shape, t.dtype) for t in inputs]
        self._sources, self._undos, self._checks = list(recording.sources), list(recording.undos), list(recording.checks)
        self._last_numbers: list[Any] = [None] * len(self._sources)
        self._lock, self._pool = program.state(self.queue).lock, get_persistent_pool(self.queue)
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

    def _run_once(self, node: CommandNode, buffers: Mapping[Value, Any]) -> None:
        args = [buffers[arg] if isinstance(arg, Value) else arg for arg in node.args]
        if node.kind == "launch":
            program.Prepared(node.kernel, self.queue, node.sizes, node.local, args).observed()
        else:
            self._transfer(node, buffers)()

    def _place_values(self) -> None:
        """Choose a buffer for every value: its own if a tensor still uses it, a new one at each replay for a result, else a shared one."""
        self._buffers: dict[Value, Any] = {value: value.buffer for value in self.values}
        self._leases: list[Any] = []
        self._fresh: dict[Value, list[Callable[[Any], None]]] = {value: [] for value in self._renewable()}
        passing, left, pool = [], [], self._pool
        for value in self.values:
            lease = value.held()
            if value.kind != MADE or lease is not None:
                value.lease = lease
                self._leases.append(lease)
                if value.kind == MADE and value.first >= 0 and lease.pool is pool and value.buffer.size >= lease.bucket:
                    left.append(MemoryBlock(lease.bucket, lease, pool.cuts).add(value, 0, lease.bucket, len(self.nodes)))
            elif value not in self._fresh and value.first >= 0:
                passing.append(value)
        self._share(passing, left)

    def _share(self, passing: Sequence[Value], left: Sequence[MemoryBlock]) -> None:
        """Place ``passing``, values used only inside a replay, in shared blocks, or in ``left``, memory that the step writes later."""
        pool = self._pool
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
            self._buffers[value] = value.buffer = None  # the buffer of the recorded run is released
        pool.clear()  # a replay needs nothing else of what the eager run allocated
        self._leases += [block.lease for block in mine]
        self.planned_bytes = sum(block.used for block in mine)
        for block in (*mine, *left):
            for value, at in block.members:
                if block.lease is not value.lease:
                    self._buffers[value] = block.lease.part(at, pool.bucket_of(value.nbytes))

    def _renewable(self) -> list[Value]:
        """Return the results that get new memory at each replay instead of a copy: no tensor holds them, only a few launches use them."""
        outputs = {output.value: 0 for output in _outputs(self.result)}
        moved = {value for node in self.nodes if node.kind != "launch" for value in (*node.reads, *node.writes)}
        for node in self.nodes:
            for value in {*node.reads, *node.writes} & outputs.keys():
                outputs[value] += 1
        single = [value for value in outputs if value.kind == MADE and value.held() is None and value not in moved]
        return [value for value in single if 0 < outputs[value] <= MOST_REBINDS]

    def _prepare(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._launches: list[tuple[program.Prepared, CommandNode]] = []
        self._numbers: dict[tuple[int, int], list[tuple[program.Prepared, int]]] = {}
        self._rebinds: list[list[Callable[[Any], None]]] = [[] for _ in self.inputs]
        for node in self.nodes:
            if node.kind == "launch":
                self._prepare_launch(node)
            elif not self._stays(node):
                self._prepare_transfer(node)
        self._answers = any(launch.answers for launch, _ in self._launches)

    def _stays(self, node: CommandNode) -> bool:
        """Whether the result of a transfer persists until the next replay, so that the transfer need not be repeated."""
        value = node.writes[0]
        return node.kind == "upload" and value.kind == CONSTANT and not value.written

    def _prepare_launch(self, node: CommandNode) -> None:
        args = [self._buffers[arg] if isinstance(arg, Value) else arg for arg in node.args]
        launch = program.Prepared(node.kernel, self.queue, node.sizes, node.local, args)
        self._launches.append((launch, node))
        self._calls.append(launch.call)
        for index, arg in enumerate(node.args):
            if isinstance(arg, Number):
                self._numbers.setdefault((arg.source, arg.index), []).append((launch, index))
            elif isinstance(arg, Value) and arg.kind == INPUT:
                self._rebinds[arg.place].append(partial(launch.set, index))
            elif isinstance(arg, Value) and arg in self._fresh:
                self._fresh[arg].append(partial(launch.set, index))

    def _prepare_transfer(self, node: CommandNode) -> None:
        position = len(self._calls)
        self._calls.append(self._transfer(node))
        for value in {*node.reads, *node.writes}:
            if value.kind == INPUT:
                self._rebinds[value.place].append(partial(self._rebind_transfer, node, position, value))

    def _rebind_transfer(self, node: CommandNode, position: int, value: Value, buffer: Any) -> None:
        self._buffers[value] = buffer
        self._calls[position] = self._transfer(node)

    def _transfer(self, node: CommandNode, buffers: Mapping[Value, Any] | None = None) -> Callable[[], Any]:
        backend, buffers = backend_of(self.queue), self._buffers if buffers is None else buffers
        target = buffers[node.writes[0]]
        if node.kind == "fill":
            return partial(backend.fill_bytes, target, *node.args[1:])
        if node.kind == "copy":
            return partial(backend.copy_bytes, target, buffers[node.reads[0]], node.args[2])
        return partial(backend.upload_bytes, target, node.args[1])

    # ---- running it

    def replay(self, inputs: Sequence[Tensor] = ()) -> Any:
        """Replay the step on ``inputs`` and return its result, without waiting for the device; computed results are new tensors.

        Tensors that the recorded step stored elsewhere (gradients, attributes) are overwritten in place.
        """
        self._check_inputs(inputs)
        return self.run(inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run the step like :meth:`replay`, without checking shapes and dtypes of the inputs. The caller has called :meth:`meets`."""
        if platforms.forked_child:
            platforms.check_process()
        for i, t in enumerate(inputs):
            if t.queue is not self.queue:
                if t.context != self.queue.context:
                    what = f"input {i} must be on the recorded device"
                    raise DeviceError(message("replay", what, "use tensor.to(device)", given=t.device))
                t.wait()
        for check in self._checks:
            check.run(inputs)
        for deferred, settler in hooks.settlers:
            if deferred:
                settler()
        if hooks.readers:
            self._compute_readers(inputs)
        bound, fresh = self._bound, {}
        with self._lock:
            if self._folded.read:
                self._folded.refresh()
            for i, t in enumerate(inputs):
                buffer = t.memory  # computed by meets
                if bound[i] is not buffer:
                    bound[i] = None  # an interrupt may leave some arguments bound to the old buffer
                    for rebind in self._rebinds[i]:
                        rebind(buffer)
                    bound[i] = buffer
            for value, rebinds in self._fresh.items():  # memory for the results of this replay
                fresh[value] = lease = self._pool.allocate(value.nbytes)
                for rebind in rebinds:
                    rebind(lease.buffer)
            self._note_writes(inputs)
            self._run_parts()
            if type(self.result) is Output:
                return self._returned(self.result, inputs, fresh, {})
            made: dict[Value, Tensor] = {}
            return map_leaves(self.result, lambda leaf: self._returned(leaf, inputs, fresh, made) if type(leaf) is Output else leaf)

    def _compute_readers(self, inputs: Sequence[Tensor]) -> None:
        """Compute the deferred values of other threads that read memory which a replay overwrites."""
        for key in hooks.readers.keys() & self._overwritten.keys():
            hooks.readers.compute(self._overwritten[key])
        for i in self._rewritten:
            inputs[i]._compute_readers()

    def _note_writes(self, inputs: Sequence[Tensor]) -> None:
        if self._changed:
            wrote([inputs[i] for i in self._changed])
        else:
            clock.last = clock.tick()
        now = clock.last
        for mark in self._marks:
            mark.last = now
        if clock.copied != self._copied_at:
            self._copied_at, self._copied = clock.copied, [mark for mark in self._marks if mark.copies is not None]
        for mark in self._copied:
            stamp(mark, now)

    def meets(self, inputs: Sequence[Tensor]) -> int | None:
        """Return the index of the first input that shares memory with another value, if the step writes to that memory; else ``None``.

        A view that holds a copy shares the memory of its base.
        """
        for i, t in enumerate(inputs):
            if t.memory is None:
                t.realize()
            if id(t.memory) in self._written or (self._outside and i in self._rewritten and id(t.memory) in self._outside):
                return i
            if t.place is not None and self._meets_base(inputs, i):
                return i
        return None

    def _meets_base(self, inputs: Sequence[Tensor], i: int) -> bool:
        """Whether the step writes to the input ``i`` and to one of its views or its base, or reads one of them after such a write."""
        t, base = inputs[i], base_of(inputs[i])
        if i in self._rewritten and (not t.place.is_plain() or any(id(view.memory) in self._outside for view in views_of(t))):
            return True
        written = [inputs[at].memory for at in self._rewritten]
        return base is not None and (id(base.memory) in self._written or any(base.memory is memory for memory in written))

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._like):
            what = "the number of inputs must equal that of the recorded step"
            raise ShapeError(message("replay", what, wanted=len(self._like), given=len(inputs)))
        for i, (t, (shape, dtype)) in enumerate(zip(inputs, self._like, strict=True)):
            if t.shape != shape or t.dtype != dtype:
                kind = ShapeError if t.shape != shape else DtypeError
                seen = {"recorded": f"{shape} {dtype}", "given": f"{t.shape} {t.dtype}"}
                raise kind(message("replay", f"input {i} must have the recorded shape and dtype", "record again for this input", **seen))
        met = self.meets(inputs)
        if met is not None:
            what = f"input {met} must not share memory with another value of the step, because the step writes to that memory"
            raise ValueError(message("replay", what, "pass a clone()", shape=inputs[met].shape))

    def _run_parts(self) -> None:
        """Enqueue all commands and call the sources: the functions that compute numbers for the commands.

        Sources before the first one that can be undone run at the beginning, the other sources where the step called them.

        If a source raises, as a schedule does at its end, the commands before the source are enqueued. If a command fails, later sources
        are not called, and the sources right before the command are undone. So counters and parameters stay consistent, as in eager code.
        """
        old, current, done = self._last_numbers, -1, 0
        try:
            for first, last, done, end in self._parts:
                for i in range(first, last):
                    current = i
                    new = self._sources[i]()
                    current = -1
                    if new != (known := old[i]):
                        old[i] = None  # an interrupt may leave some arguments with the old numbers
                        self._pass_on(i, new, known)
                        old[i] = new
                if end > done:
                    self._run(self._calls[done:end], first, last)
        finally:
            if current >= 0:
                self._run(self._calls[done : self._until[current]], 0, 0)

    def _pass_on(self, source: int, new: Any, old: Any) -> None:
        several = isinstance(new, (list, tuple))
        for index, number in enumerate(new if several else (new,)):
            if not several or old is None or number != old[index]:
                for launch, at in self._numbers.get((source, index), ()):
                    launch.set(at, number)

    def _run(self, calls: Sequence[Callable[[], object]], first: int, last: int) -> None:
        """Enqueue ``calls``. If the first one fails, the sources ``first`` to ``last - 1``, which ran just before it, are undone."""
        call = None
        if waiting:
            flush_waiting(self.queue)
        try:
            if hooks.launch_observers:
                self._run_observed(calls)
            elif self._answers:
                for call in calls:
                    if call():
                        next(launch for launch, _ in self._launches if launch.call is call).observed()
            else:
                for call in calls:
                    call()
        except (platforms.opencl().Error, DeviceError, OutOfMemoryError) as error:
            if call is calls[0]:
                for undo in filter(None, self._undos[first:last]):
                    undo()
            if not isinstance(error, platforms.opencl().Error):
                raise
            raise program.failure("replay", "to replay a recorded step", error) from None

    def _run_observed(self, calls: Sequence[Callable[[], object]]) -> None:
        """Enqueue ``calls`` with events, which launch observers such as a profiler receive."""
        launches = {id(launch.call): (launch, node) for launch, node in self._launches}
        for call in calls:
            launch, node = launches.get(id(call), (None, None))
            if launch is None or node is None:
                call()
                continue
            event = launch.observed()
            for observer in hooks.launch_observers:
                observer(launch.kernel, self.queue, launch.sizes, launch.local, node.args, event)

    def _returned(self, output: Output, inputs: Sequence[Tensor], fresh: Mapping[Value, BufferHandle], made: dict[Value, Tensor]) -> Tensor:
        """Return the tensor of an output. ``made`` are the results of this replay so far; outputs of one value share their memory."""
        value = output.value
        if output.tensor is not None:
            return output.tensor
        if value.kind == INPUT or value in made:
            return same_memory(inputs[value.place] if value.kind == INPUT else made[value], output.shape)
        handle = fresh.get(value)
        if handle is None:
            handle = backend_of(self.queue).clone(self._buffers[value], output.shape, dtypes.DTYPES[output.dtype])
        made[value] = over_memory(handle.buffer, output.shape, output.dtype, self._context, self.queue, handle)
        return made[value]

    def table(self) -> str:
        """Return the commands of a replay, one per line: op, kernel, sizes, bytes read and written."""
        rows = [f"{'':4} {'op':24} {'kernel':32} {'items':>20} {'reads':>12} {'writes':>12}"]
        for i, node in enumerate(self.nodes):
            read, written = (sum(value.nbytes for value in values) for values in (node.reads, node.writes))
            items = " x ".join(map(str, node.sizes))
            rows.append(f"{i:4} {node.op[:24]:24} {node.name[:32]:32} {items:>20} {read:12} {written:12}")
        return "\n".join(rows)

    @property
    def commands(self) -> int:
        """The number of commands that a replay enqueues."""
        return len(self._calls)

    def __repr__(self) -> str:
        launches = sum(node.kind == "launch" for node in self.nodes)
        return f"<Graph: {launches} launches, {len(self.nodes) - launches} transfers, {self.planned_bytes} planned bytes>"


def same_memory(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``t`` itself or, if its shape differs, a tensor of ``shape`` over its memory."""
    return t if t.shape == shape else with_shape(t, shape)


def _outputs(tree: Any) -> list[Output]:
    found: list[Any] = []
    map_leaves(tree, found.append)
    return [leaf for leaf in found if isinstance(leaf, Output)]
