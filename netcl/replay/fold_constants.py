"""Runs the constant commands of a recorded step once and keeps their results.

These are the commands that depend only on constants and on tensors from outside that no command writes, such as packed or reordered
weights. They run again after such a tensor was written. Recordings that share a :class:`KeptValues` also share equal results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from netcl.core.memory import BufferHandle, get_persistent_pool, shares_host
from netcl.core.recording import Number
from netcl.core.writes import Writes
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, CommandNode, Value

_KEPT_BYTES = 1 << 26  # kept results may take this much, and twice the memory from outside


class KeptValue:
    """A result of constant commands. It keeps memory only if replays read it, not if it is an intermediate result."""

    lease: BufferHandle | None = None


class KeptValues(weakref.WeakValueDictionary[Any, KeptValue]):
    """Results of constant commands, keyed by the commands, so that graphs can share them. A result exists as long as a graph uses it."""


class FoldedCommands:
    """The constant commands of a graph and their results. ``call(node, buffers)`` runs a command."""

    def __init__(self, call: Callable[[CommandNode, dict[Value, Any]], object], queue: Any):
        self._call, self._pool, self._queue = call, get_persistent_pool(queue), queue
        self.nodes: list[CommandNode] = []
        self._given: dict[Value, Any] = {}
        self.results: dict[Value, KeptValue] = {}
        self._places: dict[KeptValue, Value] = {}
        self.read: list[Writes] = []  # the marks of memory that the commands read
        self._times: list[int] = []

    def take(self, nodes: Sequence[CommandNode], outputs: Collection[Value], kept: KeptValues) -> list[CommandNode]:
        """Run the constant commands and return the others. If no command reads the results, or they are too large, run none.

        From then on, the results count as values from outside the step.
        """
        once = _constant_nodes(nodes, outputs)
        made = {value for node in once for value in node.writes}
        rest = [node for node in nodes if node not in once]
        used = [value for value in dict.fromkeys(value for node in rest for value in node.reads) if value in made]
        given = {value: value.buffer for node in once for value in node.reads if value not in made}
        if not used or sum(value.nbytes for value in used) > _KEPT_BYTES + 2 * sum(value.nbytes for value in given):
            return list(nodes)
        self.nodes, self._given = list(once), given
        self.results = _results(once, kept, id(self._queue))
        self._places = {result: value for value, result in reversed(self.results.items())}  # values with equal results: the first one
        self.read = list({mark: None for value in given for mark in value.versions})
        for value in made:
            value.first = value.last = -1
        for value in used:
            result = self.results[value]
            value.lease = result.lease = result.lease or self._pool.allocate(value.nbytes)
        self._compute()
        for value in used:
            value.kind, value.buffer = OUTSIDE, value.lease.buffer
        return rest

    def refresh(self) -> None:
        """Compute the results again if a tensor that they depend on was written since."""
        if [mark.last for mark in self.read] != self._times:
            self._compute()

    def _compute(self) -> None:
        times = [mark.last for mark in self.read]  # before the commands run: a write in between is noticed next time
        leases = {}
        for value, result in self.results.items():  # temporary memory if the result is intermediate, or kept for another value
            leases[value] = (result.lease if self._places[result] is value else None) or self._pool.allocate(value.nbytes)
        buffers = self._given | {value: lease.buffer for value, lease in leases.items()}
        for node in self.nodes:
            self._call(node, buffers)
        self._times = times  # not if a command failed: the next replay computes all of them again


def _constant_nodes(nodes: Sequence[CommandNode], outputs: Collection[Value]) -> dict[CommandNode, None]:
    """Return the commands whose operands are constant, in order.

    A value is constant if only constant commands write it, and other commands read it only after the last of these writes.
    """
    uploads = {node for node in nodes if node.kind == "upload" and node.writes[0].kind == CONSTANT and not node.writes[0].written}
    moving = {value for node in nodes if node not in uploads for value in node.writes if value.kind != MADE or value.held() is not None}
    read = {value for node in nodes for value in node.reads}
    moving |= {*outputs, *(value for value in read if value.kind == INPUT or (value.kind == OUTSIDE and not _notes_writes(value)))}
    fixed = [node for node in nodes if node.kind != "upload" and node.writes and not any(isinstance(arg, Number) for arg in node.args)]
    while True:
        once = dict.fromkeys(node for node in fixed if moving.isdisjoint((*node.reads, *node.writes)))
        last = {value: i for i, node in enumerate(nodes) if node in once for value in node.writes}
        rest = [(i, node) for i, node in enumerate(nodes) if node not in once and node not in uploads]
        more = {value for i, node in rest for value in (*node.writes, *[value for value in node.reads if last.get(value, -1) > i])} - moving
        if not more:
            return once
        moving |= more


def _notes_writes(value: Value) -> bool:
    """Whether netcl knows of every write to the memory of a value; it does not for the caller's own array (``share=True``)."""
    lease = value.held()
    return bool(value.versions) and lease is not None and not shares_host(lease)


def _results(nodes: Iterable[CommandNode], kept: KeptValues, queue: int) -> dict[Value, KeptValue]:
    """Return the result that each value holds after the constant commands. Equal commands over the same memory share one result."""
    now: dict[Value, KeptValue] = {}

    def shown(arg: Any, written: Sequence[Value]) -> Any:
        if isinstance(arg, Value):
            return now.get(arg) or (written.index(arg) if arg in written else arg.buffer)
        if isinstance(arg, int | float | np.generic):
            return (type(arg), repr(arg))
        return arg if isinstance(arg, Hashable) else arg.tobytes()

    for node in nodes:
        command = (queue, node.kind, node.kernel, node.sizes, node.local, *[shown(arg, node.writes) for arg in node.args])
        now |= {value: kept.setdefault((i, *command), KeptValue()) for i, value in enumerate(node.writes)}
    return now
