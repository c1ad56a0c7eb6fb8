"""The elements of a recording: values, which are blocks of device memory, and nodes, which are enqueued commands over them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from netcl.core.recording import Number
from netcl.core.tensor import Tensor
from netcl.core.writes import Writes, writes_of

INPUT, OUTSIDE, MADE, CONSTANT = "input", "outside", "made", "constant"


@dataclass(eq=False)
class Value:
    """A block of memory: an ``input``, from ``outside`` (a parameter), ``made`` by the step, or an uploaded ``constant``."""

    kind: str
    buffer: Any
    nbytes: int
    lease: Any = None  # the pool's handle; weak while recording, so that lifetimes are those of the step
    place: int = -1  # of an input, among the inputs; of what the step makes, in the order of first use
    first: int = -1
    last: int = -1
    written: bool = False
    owners: list[weakref.ref[Tensor]] = field(default_factory=list)
    versions: dict[Writes, None] = field(default_factory=dict)  # write times of the tensors over it
    marks: dict[int, Writes] = field(default_factory=dict)  # of these, the ones that the step writes

    def noted(self, tensor: Tensor) -> None:
        """Record that replays write to this tensor in place."""
        mark = writes_of(tensor)
        self.marks[id(mark)] = mark

    def held(self) -> Any:
        """Return the lease; ``None`` if it has ended."""
        return self.lease() if isinstance(self.lease, weakref.ref) else self.lease

    def known_as(self) -> tuple[Any, ...]:
        """Return a key that is equal in two recordings of a step. It contains the buffer: the ``id`` of a released buffer may be reused."""
        return (self.kind, self.buffer) if self.kind == OUTSIDE else (self.kind, self.place)


@dataclass(eq=False)
class CommandNode:
    """One enqueued command: a ``launch`` (kernel, sizes, arguments), a ``fill``, a ``copy`` or an ``upload``.

    ``args`` are values, numbers (:class:`~netcl.core.recording.Number` if a replay computes them again), arrays or local memory; in
    transfers the values come first. ``reads`` and ``writes`` are the values among them.
    """

    kind: str
    args: tuple[Any, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    kernel: Any = None
    sizes: tuple[int, ...] = ()
    local: tuple[int, ...] | None = None
    op: str = ""  # the function of netcl.ops that enqueued it

    @property
    def name(self) -> str:
        """The kernel's name, or the kind."""
        return self.kernel.name if self.kernel is not None else self.kind

    def signature(self) -> tuple[Any, ...]:
        """Return the node in a form that is equal for two recordings of the same step."""
        return (self.kind, self.kernel, self.sizes, self.local, tuple(_shown_argument(arg) for arg in self.args))


def _shown_argument(arg: Any) -> Any:
    if isinstance(arg, Value):
        return arg.known_as()
    if isinstance(arg, Number):
        return ("again", arg.source, arg.index)
    if isinstance(arg, np.ndarray):
        return (arg.shape, arg.dtype.str, arg.tobytes())
    return (type(arg).__name__, repr(arg) if isinstance(arg, (bool, int, float, np.generic)) else arg.size)
