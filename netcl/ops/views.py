"""Views: slices and transpositions are copies, which this module keeps consistent with the tensor they were taken from.

A :class:`Place` holds the position of a view in the memory of its base. A view is a deferred tensor (:class:`PendingCopy`) until its values
are needed, so a view of a view is copied once. A write to a view writes its base. After a write to the base, views become deferred again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from netcl.core import memory, recording
from netcl.core.commands import PlannedMemory
from netcl.core.errors import AutogradError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Source, Tensor, duplicate, memory_of, with_shape, wrap_array
from netcl.core.writes import Writes, clock, rewrote, writes_of, wrote
from netcl.engine import launch, lazy_graph
from netcl.engine.plan import planned
from netcl.engine.registry import S, composite, op
from netcl.engine.strided import copy_block, dense, take_block

_VIEWS_PRUNED_FROM = 32  # entries of a weak list from which it is pruned whenever its length has doubled


class SharedHistory:
    """The autograd state of memory that a base and its views share: where the base's gradient goes, and the attached tensors."""

    __slots__ = ("attached", "edge", "leaf", "shape", "size")

    def __init__(self, size: int) -> None:
        self.size = size  # of the memory, in elements
        self.shape: tuple[int, ...] = (size,)  # of the tensor that has the edge
        self.edge: tuple[Any, int] | None = None
        self.leaf = False  # whether the base is a leaf that requires grad
        self.attached: list[weakref.ref[Tensor]] = []

    def comes_from(self, x: Tensor) -> None:
        """Take over the shape and the history of ``x``, a tensor over all of the memory."""
        self.shape, self.leaf = x.shape, x.requires_grad and (x.grad_fn is None or self.leaf)  # also if x is a reshaped leaf
        self.edge = None if x.grad_fn is None else (x.grad_fn, x.output_nr)

    def members(self) -> list[Tensor]:
        """Return the attached tensors that are alive and still have this history."""
        return [t for t in _alive(self.attached) if t.place is not None and t.place.history is self]


class Place:
    """The position of a view in the memory of its base: offset and strides in elements.

    ``strides=None``: the view shares the memory of its base. ``source``: set for a tensor that torch would copy, the record of the base of
    the copied view. This tensor may share its memory with that view and with other copies of it.
    """

    __slots__ = ("history", "offset", "source", "strides")

    def __init__(
        self, offset: int, strides: tuple[int, ...] | None, history: SharedHistory | None = None, source: Writes | None = None
    ):  # fmt: skip
        self.offset, self.strides, self.history, self.source = offset, strides, history, source

    def is_plain(self) -> bool:
        """Whether a write of constants can ignore base and history."""
        return self.strides is None and self.source is None and (self.history is None or self.history.edge is None)


_UNSHARED = Place(0, None)  # of memory that only pending blocks refer to: see unshared_block


def _alive(refs: Sequence[weakref.ref[Tensor]]) -> list[Tensor]:
    return [t for ref in refs if (t := ref()) is not None]


def _note(refs: list[weakref.ref[Tensor]], t: Tensor) -> None:
    refs.append(weakref.ref(t))
    if len(refs) >= _VIEWS_PRUNED_FROM and not len(refs) & (len(refs) - 1):
        refs[:] = [ref for ref in refs if ref() is not None]


def is_copy(t: Tensor) -> bool:
    """Whether a tensor is a view that holds a copy of a part of its base."""
    return t.place is not None and t.place.strides is not None


def base_of(t: Tensor) -> Tensor | None:
    """Return a tensor over the memory that ``t`` holds a partial copy of; ``None`` if there is none, or if it was released."""
    return writes_of(t).base() if is_copy(t) else None


def overlap(views: Sequence[Tensor]) -> bool:
    """Whether two of ``views``, which hold copies of parts of one base, have an element of it in common."""
    used = np.zeros(max((_base_size(view) for view in views if view.size), default=0), bool)
    for view in views:
        if view.size:
            part = np.lib.stride_tricks.as_strided(used[view.place.offset :], view.shape, view.place.strides)
            if part.any():
                return True
            part[...] = True
    return False


def views_of(t: Tensor) -> list[Tensor]:
    """Return the views that hold copies of parts of the memory of ``t``."""
    return _copies(writes_of(t))


# ---- making views


#: The function of an op that returns views: ``layout(shape, strides, *arguments of the op)`` returns the offset and the shape of each view
#: in a tensor with this shape and these strides, and the strides of the views. ``None``: the result has the memory of the input.
ViewLayout = Callable[..., tuple[Sequence[tuple[int, tuple[int, ...]]], tuple[int, ...]]]


def link(x: Tensor, out: Tensor | Sequence[Tensor], layout: ViewLayout | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Record that ``out``, a tensor or several, consists of views of ``x``, at the places that ``layout`` returns for the arguments."""
    if x.place is None:
        x.place = Place(0, None)
    place = x.place
    if place.history is None:
        place.history = SharedHistory(x.size if place.strides is None else _base_size(x))
        _note(place.history.attached, x)
    history = place.history
    if place.strides is None:
        history.comes_from(x)
    if layout is not None:
        parts, strides = layout(x.shape, place.strides or dense(x.shape), *args, **kwargs)
        for i, view in enumerate((out,) if isinstance(out, Tensor) else out):
            _join_family(x, view, Place(place.offset + parts[i][0], strides, history))
            _note(history.attached, view)
        return
    assert isinstance(out, Tensor)
    if out.place is None:
        out.place = place
    elif out.place.strides is None and place.strides is not None:
        return  # not a view but a copy
    else:
        out.place.history = history
    _note(history.attached, out)


def _base_size(view: Tensor) -> int:
    """Return the minimum size of the base of ``view``, which holds a copy of a part of it."""
    return 1 + view.place.offset + sum((n - 1) * max(0, step) for n, step in zip(view.shape, view.place.strides, strict=True))


def own(x: Tensor) -> Tensor:
    """Make ``x`` independent of the tensor it is a slice of, and return ``x``: for ops that copy in torch, such as ``flip``."""
    x.place = x.writes = None
    return x


def _join_family(x: Tensor, view: Tensor, place: Place) -> None:
    """Register ``view``, which holds a copy of a part of ``x``, with the base of ``x``."""
    written = writes_of(x)
    if written.base is None:
        written.base = _base(x)
    view.place, view.writes = place, written
    if written.copies is None:
        written.copies = []
        clock.copied += 1
    _note(written.copies, view)


def _base(x: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns a tensor over the memory of ``x``, or ``None`` after that memory has been released."""
    there, written, kind = weakref.ref(x), weakref.ref(writes_of(x)), (x.shape, x.dtype, x.context, x.queue)
    host = x.host_ref if memory.shares_host(x.lease) else None
    copied = None if x.place is None else x.place.source
    memory_owner: Any = x.source
    weak = True
    if memory_owner is None and x.array is not None:
        memory_owner = memory_of(x.array)
        weak = memory_owner.size == x.size and memory_owner.dtype == x.array.dtype and memory_owner.flags.c_contiguous
        memory_owner = memory_owner if weak else x.array  # a part of an array of the caller's
    elif memory_owner is None:
        memory_owner, weak = x.pool_handle or x.buffer, x.pool_handle is not None
    held: Callable[[], Any] = weakref.ref(memory_owner) if weak else partial(lambda owner: owner, memory_owner)
    del memory_owner

    def find() -> Tensor | None:
        t, mark = there(), written()
        if t is not None and t.writes is mark:
            return t
        owner = held()
        if owner is None or mark is None:
            return None
        shape, dtype, context, queue = kind
        if hasattr(owner, "compute"):
            made = with_shape(owner.compute(), shape)
        elif context is None:
            made = wrap_array(owner.reshape(shape), dtype, queue)
        elif isinstance(owner, memory.BufferHandle):
            made = Tensor(owner.buffer, shape, dtype, context, queue, owner)
        else:
            made = Tensor(owner, shape, dtype, context, queue)
        made.writes, made.host_ref, made.place = mark, host, None if copied is None else Place(0, None, None, copied)
        return made

    return find


def follow(t: Tensor, alias: Tensor) -> Tensor:
    """Make ``alias``, a new tensor over the memory of the view ``t``, a view too; if strides cannot express its shape, make it a copy."""
    place = t.place
    if place.source is not None:
        alias.place = Place(0, None, None, place.source)
        _note(place.source.detached, alias)
    elif place.strides is not None:
        strides = restrided(t.shape, place.strides, alias.shape)
        if strides is None:
            _detach_copy(t, alias)
        else:
            alias.place = Place(place.offset, strides)
            _note(writes_of(alias).copies, alias)
    return alias


@lru_cache(4096)
def restrided(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a strided block in another shape; ``None`` if only a copy can have that shape.

    >>> restrided((2, 3), (3, 1), (6,)), restrided((3, 2), (1, 3), (6,))
    ((1,), None)
    """
    if 0 in shape or math.prod(shape) == 1:
        return dense(new)
    old = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    result, at, count, seen, base = [0] * len(new), len(new) - 1, 1, 1, old[-1][1]
    for i in reversed(range(len(old))):
        count *= old[i][0]
        if i and old[i - 1][1] == count * base:
            continue
        while at >= 0 and (seen < count or new[at] == 1):
            result[at] = seen * base
            seen *= new[at]
            at -= 1
        if seen != count:
            return None
        if i:
            base, count, seen = old[i - 1][1], 1, 1
    return tuple(result)


def contiguous(x: Tensor) -> Tensor:
    """Return ``x`` itself or, if it is a view that is not contiguous in its base, a copy, as torch does."""
    if not is_copy(x) or _is_dense(x.shape, x.place.strides):
        return x
    made: Tensor = hooks.call("reshape", x, x.shape)
    _detach_copy(x, made)
    return made


def _detach_copy(view: Tensor, copy: Tensor) -> None:
    """Make ``copy``, a tensor over the memory of ``view``, independent of later writes to the base of ``view``."""
    if type(copy.source) is Reread:
        copy.realize()
    source = writes_of(view)
    if source.detached is None:
        source.detached = []
    _note(source.detached, copy)
    copy.place, copy.writes = Place(0, None, None, source), Writes()
    copy.writes.last = source.last


# ---- copying views


class PendingCopy(Source):
    """The source of a view that has not been copied: a strided block of the memory of a base. Writes to the base compute it first."""

    __slots__ = ("__weakref__", "group", "inputs", "made", "offset", "queue", "shape", "strides")
    name = "view"

    def __init__(self, base: Tensor, shape: tuple[int, ...], offset: int, strides: tuple[int, ...], group: PendingParts | None = None):
        self.inputs: tuple[Tensor, ...] = (base,)  # empty once the view is copied
        self.shape, self.offset, self.strides, self.queue, self.group = shape, offset, strides, base.queue, group
        self.made: Tensor | None = None

    def alive(self) -> bool:
        """Whether a tensor of this source still exists: only tensors refer to it strongly."""
        return True

    def compute(self, wanted: Sequence[Source] = ()) -> Tensor:
        """Return the values of the view, copied from the base at the first call. Other pending values are not computed."""
        with lazy_graph.lock:
            if self.made is None and self.group is not None:
                self.group.compute()
            elif self.made is None:
                made = _taken_over(self.inputs[0], self.shape, self.strides)
                self.made = take_block(self.inputs[0], self.shape, self.offset, self.strides) if made is None else made
                self.inputs = ()
        assert self.made is not None
        return self.made


class PendingParts:
    """The parts of a split that have not been copied. The first part that is needed copies all others that still exist: one plan."""

    __slots__ = ("__weakref__", "inputs", "made", "parts", "queue")
    name = "split"
    alive = PendingCopy.alive

    def __init__(self, base: Tensor):
        self.inputs: tuple[Tensor, ...] = (base,)
        self.made: bool | None = None  # True once the parts are copied
        self.parts: list[weakref.ref[PendingCopy]] = []
        self.queue = base.queue

    def compute(self, wanted: Sequence[Source] = ()) -> None:
        """Copy the parts."""
        with lazy_graph.lock:
            parts = [part for ref in self.parts if (part := ref()) is not None and part.made is None]
            if parts:
                sizes = tuple([n for part in parts for n in part.shape])
                made = _take_blocks(self.inputs[0], tuple([part.offset for part in parts]), sizes, parts[0].strides)
                for part, values in zip(parts, made, strict=True):
                    part.made, part.inputs, part.group = values, (), None
            self.made, self.inputs = True, ()


@partial(planned, "take_blocks")
def _take_blocks(base: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Copy blocks at ``offsets``. ``sizes`` are all sizes of the first block, then of the second and so on: the key of a plan is short."""
    rank = len(strides)
    return tuple(take_block(base, sizes[i * rank : (i + 1) * rank], start, strides) for i, start in enumerate(offsets))


def _pending_source(x: Tensor) -> PendingCopy | None:
    return x.source if x.memory is None and isinstance(x.source, PendingCopy) else None


def strided(x: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """Return the base of a pending view, and the offset and strides of the view there; for any other ``x``, ``x`` itself as a block."""
    source = _pending_source(x)
    if source is not None and (inputs := source.inputs):
        strides = source.strides if x.shape == source.shape else restrided(source.shape, source.strides, x.shape)
        if strides is not None:
            return inputs[0], source.offset, strides
    return x, 0, dense(x.shape)


def base_layout(x: Tensor) -> tuple[object, int, tuple[int, ...]]:
    """Return an object that all views of one base share, and offset and strides of ``x`` in the base, also if ``x`` has been copied.

    The object has the ``size`` of the base, which itself may no longer exist. For a tensor that is no view, it is ``x`` itself.
    """
    place = x.place
    if place is None or place.strides is None or place.history is None:
        return x, 0, dense(x.shape)
    return place.history, place.offset, place.strides


def take_views(x: Tensor, layout: ViewLayout, *args: Any) -> tuple[Tensor, ...]:
    """Return the views of ``x`` that ``layout`` places."""
    base, offset, strides = strided(x)
    return blocks(base, offset, *layout(x.shape, strides, *args))


def unshared_block(base: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a strided block of ``base`` as :func:`blocks` does; only such blocks, and no other tensors, may use the memory of ``base``.

    Where a reordered view of blocks would be a copy of all of ``base`` in its own order, the first such view takes over its memory.
    """
    base.place = _UNSHARED
    return blocks(base, offset, ((0, shape),), strides)[0]


def stacked(xs: Sequence[Tensor]) -> tuple[Tensor, int, int, tuple[int, ...]] | None:
    """Return base, offset, distance and strides of ``xs`` if these are :func:`unshared_block` of one base at equal distances."""
    places = [strided(x) for x in xs]
    base, start, strides = places[0]
    step = (places[-1][1] - start) // max(1, len(xs) - 1)
    if base.place is not _UNSHARED or step < 0 or len({x.shape for x in xs}) > 1:
        return None
    same = all(place[0] is base and place[1:] == (start + i * step, strides) for i, place in enumerate(places))
    return (base, start, step, strides) if same else None


def _taken_over(base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor | None:
    """Return a tensor over the memory of ``base`` if that is unshared, and a block is all of it in its order; else ``None``.

    Other blocks are copied from now on. They are readers of the memory, so a write to the tensor computes them first.
    """
    if base.place is not _UNSHARED or math.prod(shape) != base.size or not _is_dense(shape, strides):
        return None
    base.place = None
    return with_shape(base, shape)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all([n == 1 or a == b for n, a, b in zip(shape, strides, dense(shape), strict=True)])


def blocks(base: Tensor, offset: int, parts: Sequence[tuple[int, tuple[int, ...]]], strides: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return strided blocks of ``base`` as new tensors with its current values; they are copied when the values are needed.

    ``parts`` are the positions of the blocks after ``offset``, and their shapes.
    """
    if _copied_at_once(base):
        return tuple([take_block(base, shape, offset + start, strides) for start, shape in parts])
    group = None if len(parts) == 1 else PendingParts(base)
    made = []
    for start, shape in parts:
        view = Tensor(None, shape, base.dtype, base.context, base.queue)
        view.source = source = PendingCopy(base, shape, offset + start, strides, group)
        made.append(view)
        if group is not None:
            group.parts.append(weakref.ref(source))
    lazy_graph.add_pending(source if group is None else group)
    return tuple(made)


def _copied_at_once(base: Tensor) -> bool:
    """Whether blocks of ``base`` are copied immediately: in plans, and in host memory, which the caller may write without notice."""
    there = base.memory if base.memory is not None else base.realize()
    return isinstance(there, (np.ndarray, PlannedMemory)) or (base.host_ref is not None and memory.shares_host(base.lease))


def is_pending(x: object) -> bool:
    """Whether ``x`` is a view that has not been copied."""
    return isinstance(x, Tensor) and (source := _pending_source(x)) is not None and source.made is None


def any_pending(xs: object = (), *_: object) -> bool:
    """Whether ``xs``, a tensor or several, include a view that has not been copied."""
    return any([is_pending(x) for x in xs]) if isinstance(xs, list | tuple) else is_pending(xs)


#: Sizes of a block; its offset and strides in the source; its offset and strides in the target.
BlockCopy = tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]


def copy_blocks(shape: tuple[int, ...], xs: Sequence[Tensor], offsets: Sequence[int], strides: tuple[int, ...]) -> Tensor:
    """Return a new tensor of ``shape``: ``xs`` at ``offsets``, ``strides`` apart, zeros elsewhere. Pending views are read in their base."""
    bases: list[Tensor] = []
    blocks: list[BlockCopy] = []
    for x, offset in zip(xs, offsets, strict=True):
        source = _pending_source(x)
        if source is not None and (inputs := source.inputs) and (steps := restrided(x.shape, strides, source.shape)) is not None:
            bases.append(inputs[0])
            blocks.append((source.shape, source.offset, source.strides, offset, steps))
        else:
            bases.append(x)
            blocks.append((x.shape, 0, dense(x.shape), offset, strides))
    whole, base = sum([x.size for x in xs]) == math.prod(shape), bases[0]
    if whole and all([other is base and block[1:3] == block[3:] for other, block in zip(bases, blocks, strict=True)]):
        made = _taken_over(base, shape, dense(shape))
        if made is not None:
            return made
    return _copy_blocks(shape, bases, blocks, whole)


@partial(planned, "copy_blocks")
def _copy_blocks(shape: tuple[int, ...], bases: Sequence[Tensor], blocks: Sequence[BlockCopy], whole: bool) -> Tensor:
    out = (Tensor.empty if whole else Tensor.zeros)(shape, bases[0].dtype, queue=bases[0].queue)
    for base, (sizes, start, steps, offset, strides) in zip(bases, blocks, strict=True):
        copy_block(sizes, base, start, steps, out, offset, strides)
    return out


# ---- refreshing views


class Reread(PendingCopy):
    """The source of a view whose base has been written. Later writes do not compute it first, so a copy must not share it."""

    __slots__ = ()


_stale: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id


def _memory_object(t: Tensor) -> Any:
    return t.buffer if t.array is None else memory_of(t.array)


def _copies(written: Writes) -> list[Tensor]:
    return [view for view in _alive(written.copies or ()) if view.writes is written and is_copy(view)]


def refresh_copies(written: Writes) -> None:
    """Mark the views of a written base as stale; they are copied again at their next use."""
    views = _copies(written)
    base = written.base() if views else None
    if base is not None:
        for view in views:
            if not is_pending(view):
                view.realize()
                view._compute_readers()
            elif type(view.source) is Reread:
                continue
            place = view.place
            view.source, view.memory, view.lease = Reread(base, view.shape, place.offset, place.strides), None, None
            _stale[id(view)] = view
    written.copies = [weakref.ref(view) for view in views] or None


def _settle() -> None:
    """Refresh stale views before a step is recorded or replayed, because refreshing is not part of the step."""
    if recording.active.recorder is None:
        for view in list(_stale.values()):
            view.realize()
        _stale.clear()


hooks.settlers.append((_stale, _settle))


# ---- writing


def write_into(t: Tensor, values: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Write ``values`` of the same dtype into ``t`` (into its base if ``t`` is a view); returns ``t``. ``strides`` broadcast ``values``."""
    walked = dense(values.shape) if strides is None else strides
    target, offset, steps = writable(t)
    if values.writes is not None and values.writes is target.writes:
        values = duplicate(values)
    target._compute_readers()
    target.host_ref = target.host_ref if memory.shares_host(target.pool_handle) else None
    wrote((target,))  # before the write too: an interrupt after it must not leave views with old values
    copy_block(t.shape, values, 0, walked, target, offset, steps)
    rewrote(target)
    return t


def publish(t: Tensor) -> None:
    """Record a write to the memory of ``t``. If ``t`` is a view that holds a copy, also write its values to its base."""
    if is_copy(t):
        write_into(t, Tensor(t.realize(), t.shape, t.dtype, t.context, t.queue, t.lease))
    else:
        wrote((t,))


def writable(t: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """Return the tensor whose memory a write to ``t`` changes (``t`` or its base), and the offset and strides of ``t`` in that memory."""
    place = t.place
    if place is None or place.strides is None:
        check_write(t)
        return t, 0, dense(t.shape)
    if t.size and repeats(t.shape, place.strides):
        what = "cannot write in place to an expanded or overlapping view: several of its elements are one element of its base"
        raise AutogradError(message("in place", what, "write to a clone()", shape=t.shape))
    if recording.listening and not recording.made(t):
        recording.host_work("a write to a view that was made before the step")
    written = writes_of(t)
    base = written.base()
    if base is None:
        base = _rebuilt(written, t)
    check_write(base)
    return base, place.offset, place.strides


def _rebuilt(written: Writes, t: Tensor) -> Tensor:
    """Return new memory for a base that no tensor holds any more, with copies of the parts that its views still hold."""
    views = _copies(written)
    base = Tensor.empty((max(_base_size(view) for view in views),), t.dtype, queue=t.queue)
    for view in views:
        copy_block(view.shape, view, 0, dense(view.shape), base, view.place.offset, view.place.strides)
    base.writes = written
    written.base = _base(base)
    return base


def check_write(t: Tensor) -> None:
    """Raise if a write to the memory of ``t`` would not reach its base. A view whose base and other views are gone becomes independent."""
    place = t.place
    if place is None:
        return
    if place.source is not None:
        there = _memory_object(t)
        for other in (*_copies(place.source), *_alive(place.source.detached)):
            if other.writes is not t.writes and not is_pending(other) and _memory_object(other) is there:
                what = "cannot write in place to this copy of a view: it still shares its memory with the view, or with another copy"
                raise AutogradError(message("in place", what, "write to a clone()", shape=t.shape))
        place.source = None
    elif place.strides is not None:
        written = writes_of(t)
        if written.base() is not None or len(_copies(written)) > 1:
            what = "this operation cannot write to a view: its base would not see the change"
            raise AutogradError(message("in place", what, "write to a clone(), or to the base: base[index] = value", shape=t.shape))
        t.place = written.base = written.copies = None  # the record stays: recordings that read the view know it


# ---- strided blocks as ops


@lru_cache(4096)
def repeats(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a strided block may contain an element twice.

    >>> repeats((2, 3), (3, 1)), repeats((2, 3), (1, 1)), repeats((2, 3), (0, 1)), repeats((2, 0), (0, 1))
    (False, True, True, False)
    """
    reach = 0
    for step, n in sorted((abs(step), n) for n, step in zip(sizes, strides, strict=True) if n > 1 and 0 not in sizes):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


@lru_cache(4096)
def _check_block(name: str, size: int, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    ends = [(n - 1) * step for n, step in zip(sizes, strides, strict=True)]
    low, high = offset + sum(min(0, end) for end in ends), offset + sum(max(0, end) for end in ends)
    if min(sizes, default=1) < 0 or (0 not in sizes and (low < 0 or high >= size)):
        what = "the strided block must lie inside the tensor"
        raise ShapeError(message(name, what, elements=size, size=sizes, stride=strides, storage_offset=offset))


def block_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], starts: Sequence[int], sizes: Sequence[int], moves: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
    """Return offset, shape and strides of :func:`strided_block`."""
    offset = sum(start * step for start, step in zip(starts, strides, strict=True))
    return ((offset, tuple(sizes)),), tuple(sum(n * step for n, step in zip(move, strides, strict=True)) for move in moves)


def _strided_block_vjp(F, g, x_shape, starts, sizes, moves):
    """Return zeros with ``g`` added at the elements of the block."""
    ((offset, _),), strides = block_layout(x_shape, dense(x_shape), starts, sizes, moves)
    if expanded := tuple(axis for axis, step in enumerate(strides) if not step):
        g = F.sum(g, axis=expanded)
        strides = tuple(step for step in strides if step)
    zeros = Tensor.zeros(x_shape, g.dtype, queue=g.queue)
    if not repeats(g.shape, strides):
        return F.as_strided_scatter(zeros, g, g.shape, strides, offset)
    every = np.arange(zeros.size, dtype=np.int64)[offset:]
    taken = np.lib.stride_tricks.as_strided(every, g.shape, [every.itemsize * step for step in strides])
    places = Tensor.from_host(g.queue, taken.reshape(-1))
    return F.reshape(F.index_add(F.reshape(zeros, (zeros.size,)), 0, places, F.reshape(g, (g.size,))), x_shape)


@op(
    vjp=_strided_block_vjp,
    ref="numpy",
    samples=[
        S((3, 5), starts=(0, 1), sizes=(3,), moves=((1, 1),)),
        S((2, 7), starts=(0, 0), sizes=(2, 3, 3), moves=((1, 0), (0, 2), (0, 1))),
        S((5,), starts=(4,), sizes=(2, 3), moves=((0,), (-2,))),
    ],
    errors=[(S((3, 5), starts=(0, 0), sizes=(4,), moves=((1, 1),)), r"\[strided_block\] the strided block must lie inside the tensor")],
    at_once=True,
)
def strided_block(x: Tensor, starts: Sequence[int], sizes: Sequence[int], moves: Sequence[Sequence[int]]) -> Tensor:
    """A view that begins at the element ``starts``. A step along its axis ``i`` is the step ``moves[i]`` in x."""
    for axis, n in enumerate(x.shape):
        _check_block("strided_block", n, tuple(sizes), tuple(move[axis] for move in moves), starts[axis])
    return take_views(x, block_layout, starts, sizes, moves)[0]


@composite(
    ref="numpy",
    samples=[
        S((3, 4), size=(4, 3), stride=(1, 4)),
        S((5, 4), size=(2, 2), stride=(8, -2), storage_offset=3),
        S((6,), size=(4, 3), stride=(1,) * 2),
    ],
    errors=[(S((3,), size=(2,), stride=(3,)), r"\[strided_block\] the strided block must lie inside the tensor")],
)
def as_strided(F: Any, x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """A view of a contiguous tensor, given by size, stride and offset in elements; by default it begins at the first element of x."""
    (x,) = launch.as_tensors("as_strided", x)
    if is_copy(x) and not _is_dense(x.shape, x.place.strides):
        given = {"x.shape": x.shape, "stride": x.place.strides}
        raise ShapeError(message("as_strided", "x must be contiguous in its base", "use the base, or x.contiguous()", **given))
    start = 0 if storage_offset is None else storage_offset - (x.place.offset if is_copy(x) else 0)
    return F.strided_block(F.reshape(x, (x.size,)), (start,), size, tuple((step,) for step in stride))


def _strided_scatter_vjp(F: Any, g: Any, size: Any, stride: Any, storage_offset: int, needs: Any) -> Any:
    zeros = Tensor.zeros(tuple(size), g.dtype, queue=g.queue)
    old = F.as_strided_scatter(g, zeros, size, stride, storage_offset) if needs[0] else None
    return old, F.strided_block(F.reshape(g, (g.size,)), (storage_offset,), size, tuple((n,) for n in stride)) if needs[1] else None


@op(
    vjp=_strided_scatter_vjp,
    ref="numpy",
    samples=[S((3, 4), (4, 3), size=(4, 3), stride=(1, 4)), S((5, 4), (2, 2), size=(2, 2), stride=(8, -2), storage_offset=3)],
    errors=[
        (S((3,), (2,), size=(2,), stride=(3,)), r"\[as_strided_scatter\] the strided block must lie inside the tensor"),
        (S((4,), (3, 2), size=(3, 2), stride=(1, 1)), r"\[as_strided_scatter\] the strided block must not contain an element twice"),
    ],
)
def as_strided_scatter(x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> Tensor:
    """Return ``x`` with ``src`` at the elements that :func:`as_strided` reads."""
    sizes, strides = tuple(size), tuple(stride)
    _check_block("as_strided_scatter", x.size, sizes, strides, storage_offset)
    if repeats(sizes, strides):
        raise ShapeError(message("as_strided_scatter", "the strided block must not contain an element twice", size=sizes, stride=strides))
    out = duplicate(x)
    copy_block(sizes, src, 0, dense(sizes), out, storage_offset, strides)
    return out
