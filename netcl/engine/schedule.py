"""The graph of pending values: its nodes, and which of them one kernel computes together.

:mod:`netcl.engine.lazy_graph` makes the nodes, :mod:`netcl.engine.fused_kernel` computes a group of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from netcl.core.dtype import DTYPES
from netcl.core.tensor import CountedSource, Tensor
from netcl.engine.modes import deferral
from netcl.engine.opencl_text import Body

MOST_NODES = 48  # nodes of a chain: longer chains are split, because compile time grows faster than linearly
MOST_LEAVES = 12  # memory streams of a kernel


class Space(NamedTuple):
    """The index space of folds: the whole shape and the number of innermost axes that are folded."""

    shape: tuple[int, ...]
    axes: int

    @property
    def lead(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.axes]

    @property
    def kept(self) -> tuple[int, ...]:
        return (*self.lead, *(1,) * self.axes)


class PendingNode(CountedSource):
    """The base class of :class:`netcl.engine.lazy_graph.TraceNode`: a pending op, its inputs, and the users of its value."""

    __slots__ = ("body", "dtype", "inputs", "kind", "leaves", "level", "made", "mode", "name", "narrow", "numbers", "queue",
                 "readable", "real", "shape", "skipped", "space", "users", "weight", "whole")  # fmt: skip

    def __init__(
        self, kind: str, name: str, body: Body, inputs: tuple[Any, ...], numbers: tuple[Any, ...], shape: tuple[int, ...], dtype: str,
        real: str, queue: Any, space: Space | None, narrow: bool,
    ):  # fmt: skip
        self.kind, self.name, self.body, self.inputs, self.numbers = kind, name, body, inputs, numbers
        self.shape, self.dtype, self.real, self.queue, self.space, self.narrow = shape, dtype, real, queue, space, narrow
        self.mode, self.whole = deferral.mode, deferral.whole
        self.readable = dtype == "bool" or DTYPES[dtype].c_compute == real  # other readers see the unrounded value
        self.made: Tensor | None = None
        self.skipped = False
        self.tensors = []
        self.users: list[weakref.ref[PendingNode]] = []
        self.leaves: dict[Any, Tensor] = {}
        weight, level = 1, 0
        for x in inputs:
            if isinstance(x, PendingNode):
                x.users.append(weakref.ref(self))
                weight += x.weight
                level = max(level, x.level)
                self.leaves.update(x.leaves)
            elif isinstance(x, Tensor):
                self.leaves[storage_key(x)] = x
        self.level: int = level + (kind == "fold")  # how many folds deep
        self.weight: int = weight if weight <= MOST_NODES else len(nodes_below(self))  # an upper bound on the number of nodes below

    def __repr__(self) -> str:
        return f"<{self.name}: {self.shape} {self.dtype}{'' if self.made is None else ', computed'}>"

    def finish(self, made: Tensor) -> None:
        """Store the result and drop the inputs."""
        raise NotImplementedError


def storage_key(x: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal only for tensors over the same memory with the same shape."""
    owner = x.source if x.source is not None else (x.pool_handle or x.buffer) if x.array is None else x.array
    return id(owner), x.shape


def is_regular(x: Tensor, space: Space) -> bool:
    """Whether a leaf has all of the folded axes or none of them."""
    tail = ((1,) * (len(space.shape) - x.ndim) + x.shape)[len(space.shape) - space.axes :]
    return tail == space.shape[len(space.shape) - space.axes :] or all(n == 1 for n in tail)


def fits_rows(node: PendingNode, space: Space) -> bool:
    """Whether a node can be part of a kernel over rows: with several folded axes, its leaves must have all of them or none."""
    if node.space == space or space.axes == 1:
        return True
    return node.shape == space.shape and all(is_regular(x, space) for x in node.leaves.values())


def too_long(operands: Sequence[Any]) -> bool:
    """Whether a kernel for all operands would be too large. Nodes and leaves are counted exactly only if an upper bound exceeds a limit."""
    weight = leaves = 0
    for x in operands:
        weight, leaves = (weight + x.weight, leaves + len(x.leaves)) if isinstance(x, PendingNode) else (weight, leaves + 1)
    nodes = [x for x in operands if isinstance(x, PendingNode)]
    if weight >= MOST_NODES and len(nodes_below(*nodes)) >= MOST_NODES:
        return True
    if leaves <= MOST_LEAVES:
        return False
    return len({key for x in operands for key in (x.leaves if isinstance(x, PendingNode) else (id(x),))}) > MOST_LEAVES


class _Gathering:
    """A region that grows: nodes that can be computed by the same kernel as its root."""

    def __init__(self, root: PendingNode):
        self.root = root
        self.inside = dict.fromkeys(nodes_below(root))
        self.space = next((node.space for node in self.inside if node.space is not None), None)
        self.shape = root.shape if self.space is None else self.space.shape

    def accept(self, node: PendingNode) -> bool:
        """Add a node and the nodes it depends on, if one kernel can compute them; returns whether it did."""
        if node.made is not None or node.mode != self.root.mode or node.real != self.root.real or node.queue is not self.root.queue:
            return False
        space = self.space or node.space
        if (node.shape if node.space is None else node.space.shape) != self.shape or node.space not in (None, space):
            return False
        more = [n for n in nodes_below(node) if n not in self.inside]
        if space is not None and not all(n.space in (None, space) and fits_rows(n, space) for n in (*self.inside, *more)):
            return False
        leaves = {key for n in (*self.inside, *more) for key in n.leaves}
        if len(self.inside) + len(more) > MOST_NODES or len(leaves) > MOST_LEAVES:
            return False
        self.inside |= dict.fromkeys(more)
        self.space = space
        return True


def gather_roots(root: PendingNode, wanted: Sequence[PendingNode] = ()) -> list[PendingNode]:
    """Return the roots of a kernel: ``root`` and, if they fit, live nodes that share its work and ``wanted`` nodes that share inputs."""
    if not wanted and not root.users and all(len(node.users) == 1 for node in nodes_below(root)[:-1]):
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
        if node not in region.inside and any(key in n.leaves for n in region.inside for key in node.leaves):
            region.accept(node)
    used = {x for node in region.inside for x in node.inputs if isinstance(x, PendingNode)}
    return [root, *(n for n in region.inside if n not in below and (n in wanted or (n not in used and n.alive())))]


def nodes_below(*roots: PendingNode) -> list[PendingNode]:
    """Return ``roots`` and every pending node they depend on, inputs first."""
    order: dict[PendingNode, None] = {}
    for root in roots:
        _collect(root, order)
    return list(order)


def _collect(node: PendingNode, order: dict[PendingNode, None]) -> None:
    if node not in order:
        for x in node.inputs:
            if isinstance(x, PendingNode) and x.made is None:
                _collect(x, order)
        order[node] = None


def stored(order: Sequence[PendingNode], roots: Sequence[PendingNode]) -> list[PendingNode]:
    """Return the nodes whose values a kernel writes: its roots, and those live intermediate values that are worth storing.

    Values with one element per row are always stored. Larger values are stored if writing and rereading them costs less than rereading
    their inputs. A value that was not stored the first time is stored the second time.
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
