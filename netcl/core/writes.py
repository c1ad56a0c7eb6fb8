"""When memory was written in place: one clock, and one mark that all tensors over the same memory share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from netcl.core import recording
from netcl.core.hooks import hooks


class clock:
    """The order of what happens to values: writes in place and ops that a tape records. ``last`` is when anything was last written."""

    tick = itertools.count(1).__next__
    last = 0
    copied = 0  # how often memory without views that hold copies of it got its first one


class Writes:
    """When one block of memory was last written in place, by the :class:`clock`. All tensors over the memory share this object."""

    __slots__ = ("__weakref__", "base", "copies", "last")

    def __init__(self, last: int = 0):
        self.last = last
        self.copies: Any = None  # filled by ops.views: the views that hold a copy of a part of the memory, weakly
        self.base: Any = None  # filled by ops.views: finds a tensor over the whole memory


def writes_of(t: Any) -> Writes:
    """Where all tensors over the memory of a tensor keep when it was last written in place."""
    if t.writes is None:
        t.writes = Writes()
    return t.writes


def wrote(tensors: Iterable[Any]) -> None:
    """Note that the values of tensors change in place: every tensor over the same memory knows, and so do tapes and recordings."""
    clock.last = now = clock.tick()
    for t in tensors:
        if t.place is not None and not t.place.is_plain():
            hooks.call("check_write", t)
        if t.writes is None:
            t.writes = Writes(now)
        else:
            stamp(t.writes, now)
    if recording.listening:
        recording.changed(tensors)


def stamp(written: Writes, now: int) -> None:
    """Note when memory was written; views that hold copies of it are read again when they are next used."""
    written.last = now
    if written.copies is not None:
        hooks.call("refresh_copies", written)


def wrote_again(t: Any) -> None:
    """Note a write after it was done, too: a view of ``t`` that was an operand has been read in between."""
    if t.writes is not None and t.writes.copies is not None:
        wrote((t,))
