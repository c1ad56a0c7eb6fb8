"""Memory for the values of a recorded step: which nodes are needed, and which values share a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from netcl.core.memory import BufferHandle, get_persistent_pool
from netcl.replay.values import MADE, CommandNode, Value


def needed(nodes: Sequence[CommandNode], wanted: Iterable[Value]) -> list[CommandNode]:
    """Drop the nodes whose results nobody reads; return the others and set the lifetimes of their values.

    If no tensor holds a value that the step made, only later nodes can read it, unless it is ``wanted`` as a result.
    """
    last = set(wanted)
    live = {v for node in nodes for v in (*node.reads, *node.writes) if v.kind != MADE or v.held() is not None} | last
    kept: list[CommandNode] = []
    for node in reversed(nodes):
        if not node.writes or any(value in live for value in node.writes):
            live.update(node.reads, node.writes)  # a node may also read what it writes, to accumulate
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
    """Memory that values share: at different times and, if the memory is cut into sub-buffers (``cuts``), at different offsets."""

    nbytes: int
    lease: Any = None
    cuts: bool = False
    members: list[tuple[Value, int]] = field(default_factory=list)  # with their offsets
    taken: list[tuple[int, int, int, int]] = field(default_factory=list)  # first and last node, first byte and end

    def room(self, value: Value, nbytes: int) -> int:
        """Return the lowest offset at which ``nbytes`` are free during the value's lifetime. It may lie beyond the end of the block."""
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
        """The number of bytes that values occupy, from the beginning of the block."""
        return max((end for _, _, _, end in self.taken), default=0)


def share(
    values: Iterable[Value], size_of: Callable[[int], int] = int, there: Sequence[MemoryBlock] = (), cuts: bool = False, most: int = 1 << 62
) -> list[MemoryBlock]:
    """Place values that are used only inside a step in memory blocks; returns the new blocks.

    Larger values are placed first. Each takes the smallest block with room during its lifetime; existing blocks are preferred.

    ``size_of`` gives the allocated size of a value, since pools round up; ``there`` are existing blocks. If ``cuts``,
    values may be sub-buffers, and new blocks grow up to ``most`` bytes.
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
    """Return leases of at least ``sizes`` bytes. Leases in ``others`` belong to other graphs; they are shared if not much larger."""
    free, taken, pool = sorted(others, key=lambda lease: lease.nbytes), [], get_persistent_pool(queue)
    for nbytes in sizes:
        lease = next((old for old in free if nbytes <= old.nbytes <= 2 * nbytes + 4096), None)
        if lease is None:
            lease = pool.reuse(nbytes) or pool.allocate(nbytes, what="memory of a recorded step")
        else:
            free.remove(lease)
        taken.append(lease)
    return taken
