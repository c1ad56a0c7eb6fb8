"""In-place writes: one clock, and one record per block of memory that all tensors over it share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from netcl.core import dispatch, recording


class clock:
    """Orders in-place writes and recorded ops. ``last`` is the time of the last in-place write."""

    tick = itertools.count(1).__next__
    last = 0
    copied = 0  # counts blocks of memory that got their first copied view


class Writes:
    """The time (of :class:`clock`) of the last in-place write to a block of memory. All tensors over the memory share this object."""

    __slots__ = ("__weakref__", "base", "copies", "last")

    def __init__(self, last: int = 0):
        self.last = last
        self.copies: Any = None  # set by ops.views: weak references to the views that hold a copy of a part of the memory
        self.base: Any = None  # set by ops.views: returns a tensor over the whole memory


def wrote(tensors: Iterable[Any]) -> None:
    """Record an in-place write to tensors; tapes and recorders see it through their memory."""
    clock.last = now = clock.tick()
    for t in tensors:
        if t._place is not None and not t._place.is_plain():
            dispatch.call("check_write", t)
        if t._written is None:
            t._written = Writes(now)
        else:
            stamp(t._written, now)
    if recording.listening:
        recording.changed(tensors)


def stamp(written: Writes, now: int) -> None:
    """Set the time of the last write; views that hold copies are refreshed at their next use."""
    written.last = now
    if written.copies is not None:
        dispatch.call("refresh_copies", written)


def wrote_again(t: Any) -> None:
    """Record a write again after it was done, because views of ``t`` that were operands were refreshed before it."""
    if t._written is not None and t._written.copies is not None:
        wrote((t,))
