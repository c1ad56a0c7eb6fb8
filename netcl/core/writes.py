"""In-place writes: a global clock, and one record per block of memory, shared by all tensors over it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from netcl.core import recording
from netcl.core.hooks import hooks


class clock:
    """The global counter that orders in-place writes and recorded ops. ``last`` is the time of the last in-place write."""

    tick = itertools.count(1).__next__
    last = 0
    copied = 0  # counts blocks of memory that got their first copied view


class Writes:
    """The time (of :class:`clock`) of the last in-place write to a block of memory. All tensors over the memory share this object."""

    last = 0
    copies: Any = None  # set by ops.views: weak references to the views that hold a copy of a part of the memory
    base: Any = None  # set by ops.views: returns a tensor over the whole memory
    detached: Any = None  # set by ops.views: weak references to tensors that may share the memory of one of the views


def writes_of(t: Any) -> Writes:
    """Return the :class:`Writes` record that all tensors over the memory of ``t`` share."""
    if t.writes is None:
        t.writes = Writes()
    return t.writes


def extent(t: Any) -> tuple[object, object]:
    """Return the shape of ``t`` and, if it is a slice or transposition, its offset and strides in the memory that it shares."""
    return t.shape, None if t.place is None or t.place.strides is None else (t.place.offset, t.place.strides)


def read_views(t: Any) -> None:
    """Refresh the views that hold copies of the memory of ``t``, which is about to get other memory."""
    for ref in (None if t.writes is None else t.writes.copies) or ():
        if (view := ref()) is not None:
            view.realize()


def wrote(tensors: Iterable[Any]) -> None:
    """Record the time of an in-place write to the memory of each tensor, and report it to the recorder."""
    clock.last = now = clock.tick()
    for t in tensors:
        if t.place is not None and not t.place.is_plain():
            hooks.call("check_write", t)
        if t.writes is None:
            t.writes = Writes()
        stamp(t.writes, now)
    if recording.listening:
        recording.changed(tensors)


def stamp(written: Writes, now: int) -> None:
    """Set the time of the last write; views that hold copies are refreshed at their next use."""
    written.last = now
    if written.copies is not None:
        hooks.call("refresh_copies", written)


def rewrote(t: Any) -> None:
    """Record a write to ``t`` a second time, once it is enqueued: views or threads may have read old values since the first record."""
    written = t.writes
    if written is None or written.copies is not None:
        wrote((t,))
    else:
        written.last = clock.last = clock.tick()
