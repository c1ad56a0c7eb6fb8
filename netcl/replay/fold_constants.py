"""Commands of a recorded step that compute the same at every replay: run once, their results kept.

These are the commands that depend only on constants and on memory from outside that no command writes, such as packed or reordered
weights. Recordings that share a :class:`KeptValues` also share equal results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from netcl.core.memory import BufferHandle, get_persistent_pool
from netcl.core.recording import Number
from netcl.replay.values import CONSTANT, INPUT, MADE, OUTSIDE, CommandNode, Value

_KEPT_BYTES = 1 << 26  # kept results may take this much, and twice the memory from outside


class KeptValue:
    """A result of constant commands. Its memory exists while replays read it; an intermediate result has none."""

    lease: BufferHandle | None = None


class KeptValues(weakref.WeakValueDictionary[Any, KeptValue]):
    """Results by the commands that compute them. A result lives as long as a graph uses it."""


def fold_constants(
    nodes: Sequence[CommandNode],
    outputs: Collection[Value],
    queue: Any,
    kept: KeptValues,
    call: Callable[[CommandNode, dict[Value, Any]], object],
) -> tuple[list[CommandNode], list[KeptValue]]:
    """The commands that remain, and the results that they read. Those become values from outside.

    The caller guarantees that memory from outside does not change between replays. ``call(node, buffers)`` runs a command.
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
        return list(nodes), []
    names = {value: _result_of(value, writers, kept) for value in writers}
    todo, run = {value for value in used if names[value].lease is None}, list[CommandNode]()
    while True:  # commands that write a result, and results that these commands use
        run = [node for node in once if todo.intersection(node.writes)]
        read = {value for node in run for value in node.reads if value in names and names[value].lease is None}
        if todo.issuperset(more := read.union(*(node.writes for node in run))):
            break
        todo |= more
    pool = get_persistent_pool(queue)
    leases = {value: pool.allocate(value.nbytes) for value in todo}
    buffers = given | {value: name.lease.buffer for value, name in names.items() if name.lease is not None}
    buffers |= {value: lease.buffer for value, lease in leases.items()}
    for node in run:
        call(node, buffers)
    for value in writers:
        value.first = value.last = -1
    for value in used:
        names[value].lease = value.lease = names[value].lease or leases[value]
        value.kind, value.buffer = OUTSIDE, value.lease.buffer
    return rest, [names[value] for value in used]


def _constant_nodes(nodes: Sequence[CommandNode], outputs: Collection[Value]) -> dict[CommandNode, None]:
    """The commands whose operands are constant, in order. A value is constant if all commands that write it are."""
    uploads = {node for node in nodes if node.kind == "upload" and node.writes[0].kind == CONSTANT and not node.writes[0].written}
    moving = {value for node in nodes if node not in uploads for value in node.writes if value.kind != MADE or value.held() is not None}
    moving |= {*outputs, *(value for node in nodes for value in node.reads if value.kind == INPUT)}
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
