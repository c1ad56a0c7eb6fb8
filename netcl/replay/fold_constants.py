"""Commands of a recorded step that compute the same at every replay: run once, their results kept.

These are the commands that depend only on constants and on tensors from outside that no command writes, such as packed or reordered
weights. They run again after such a tensor was written. Recordings that share a :class:`KeptValues` also share equal results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from netcl.core.memory import BufferHandle, get_persistent_pool
from netcl.core.recording import Number
from netcl.core.writes import Writes
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, CommandNode, Value

_KEPT_BYTES = 1 << 26  # kept results may take this much, and twice the memory from outside


class KeptValue:
    """A result of constant commands. Its memory exists while replays read it; an intermediate result has none."""

    lease: BufferHandle | None = None


class KeptValues(weakref.WeakValueDictionary[Any, KeptValue]):
    """Results by the commands that compute them. A result lives as long as a graph uses it."""


class FoldedCommands:
    """The constant commands of a graph and their results. ``call(node, buffers)`` runs a command."""

    def __init__(self, call: Callable[[CommandNode, dict[Value, Any]], object], queue: Any):
        self._call, self._pool = call, get_persistent_pool(queue)
        self.nodes: list[CommandNode] = []
        self._given: dict[Value, Any] = {}
        self.results: dict[Value, KeptValue] = {}
        self._read: list[Writes] = []
        self._times: list[int] = []

    def take(self, nodes: Sequence[CommandNode], outputs: Collection[Value], kept: KeptValues) -> list[CommandNode]:
        """Compute the constant commands and return the others; return all if nothing reads the results or they are too large.

        The results become values from outside.
        """
        once = _constant_nodes(nodes, outputs)
        writers: dict[Value, list[CommandNode]] = {}
        for node in once:
            for value in node.writes:
                writers.setdefault(value, []).append(node)
        rest = [node for node in nodes if node not in once]
        used = [value for value in dict.fromkeys(value for node in rest for value in node.reads) if value in writers]
        given = {value: value.buffer for node in once for value in node.reads if value not in writers}
        if not used or sum(value.nbytes for value in used) > _KEPT_BYTES + 2 * sum(value.nbytes for value in given):
            return list(nodes)
        self.nodes, self._given = list(once), given
        self.results = {value: _result_of(value, writers, kept) for value in writers}
        self._read = list({mark: None for value in given for mark in value.versions})
        for value in writers:
            value.first = value.last = -1
        for value in used:
            result = self.results[value]
            value.lease = result.lease = result.lease or self._pool.allocate(value.nbytes)
        self._compute()
        for value in used:
            value.kind, value.buffer = OUTSIDE, value.lease.buffer
        return rest

    def refresh(self) -> None:
        """Compute the results again if memory that they depend on was written in between."""
        if [mark.last for mark in self._read] != self._times:
            self._compute()

    def _compute(self) -> None:
        self._times = [mark.last for mark in self._read]  # before the commands run: a write in between is noticed next time
        leases = {value: result.lease or self._pool.allocate(value.nbytes) for value, result in self.results.items()}
        buffers = self._given | {value: lease.buffer for value, lease in leases.items()}
        for node in self.nodes:
            self._call(node, buffers)


def _constant_nodes(nodes: Sequence[CommandNode], outputs: Collection[Value]) -> dict[CommandNode, None]:
    """The commands whose operands are constant, in order. A value is constant if all commands that write it are."""
    uploads = {node for node in nodes if node.kind == "upload" and node.writes[0].kind == CONSTANT and not node.writes[0].written}
    moving = {value for node in nodes if node not in uploads for value in node.writes if value.kind != MADE or value.held() is not None}
    read = {value for node in nodes for value in node.reads}
    moving |= {*outputs, *(value for value in read if value.kind == INPUT or (value.kind == OUTSIDE and not value.versions))}
    fixed = [node for node in nodes if node.kind != "upload" and node.writes and not any(isinstance(arg, Number) for arg in node.args)]
    while True:
        once = dict.fromkeys(node for node in fixed if moving.isdisjoint((*node.reads, *node.writes)))
        more = {value for node in nodes if node not in once and node not in uploads for value in node.writes} - moving
        if not more:
            return once
        moving |= more


def _result_of(value: Value, writers: dict[Value, list[CommandNode]], kept: KeptValues, above: tuple[Value, ...] = ()) -> KeptValue:
    """The result of the commands that write a value: equal commands over the same memory have one result."""
    above = (*above, value)

    def shown(arg: Any) -> Any:
        if isinstance(arg, Value):
            return (
                len(above) - above.index(arg) if arg in above else _result_of(arg, writers, kept, above) if arg in writers else arg.buffer
            )
        if isinstance(arg, int | float | np.generic):
            return (type(arg), repr(arg))
        return arg if isinstance(arg, Hashable) else arg.tobytes()

    key = tuple(
        (node.kind, node.kernel, node.sizes, node.local, node.writes.index(value), *map(shown, node.args)) for node in writers[value]
    )
    return kept.setdefault(key, KeptValue())
