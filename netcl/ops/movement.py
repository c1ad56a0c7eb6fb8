"""Ops that move elements. Reshaping shares memory; most other ops copy strided blocks. Some results are views (:mod:`netcl.ops.views`).

Some ops have a gradient of their own; the others are composed of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate, product
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, duplicate, with_shape, wrap_array
from netcl.engine import launch
from netcl.engine.registry import S, composite, op
from netcl.engine.strided import ELEMENTS, copy_block, dense, take_block
from netcl.ops import fused_rows, views

SizesArgument = int | Sequence[int]
Ints = tuple[int, ...]
ViewPlaces = tuple[tuple[tuple[int, Ints], ...], Ints]  # offset and shape of each view, and the strides of the views


def sizes_of(first: SizesArgument, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the sizes of a call ``f(x, 2, 3)`` or ``f(x, (2, 3))`` as one tuple."""
    sizes = (first, *more) if isinstance(first, (int, np.integer)) else (*first, *more)
    return sizes if set(map(type, sizes)) == {int} else tuple(int(n) for n in sizes)


def _checked_axes(name: str, axes: SizesArgument, ndim: int) -> tuple[int, ...]:
    found = tuple(launch.check_axis(name, axis, ndim) for axis in sizes_of(axes))
    if len(set(found)) != len(found):
        raise ShapeError(message(name, "every axis must be named only once", axes=axes))
    return found


def _as_tensor(name: str, x: Any) -> Tensor:
    return x if type(x) is Tensor else launch.as_tensors(name, x)[0]


def along(ndim: int, axis: int, value: int, other: Any = 0) -> tuple[Any, ...]:
    """Return a tuple with ``value`` at ``axis`` and ``other`` (one value, or one per axis) at every other axis."""
    values = list(other) if isinstance(other, (tuple, list)) else [other] * ndim
    values[axis] = value
    return tuple(values)


# ---- the same memory under another shape


def _resolved_shape(shape: tuple[int, ...], size: int, x_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with its -1, if any, replaced by the remaining size."""
    if -1 not in shape and math.prod(shape) == size and min(shape, default=0) >= 0:
        return shape
    known = math.prod(n for n in shape if n != -1)
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise ShapeError(message("reshape", "shape must consist of sizes and at most one -1", shape=shape))
    if -1 in shape and known and size % known == 0:
        return tuple(size // known if n == -1 else n for n in shape)
    if -1 in shape or known != size:
        raise ShapeError(message("reshape", f"shape must have the number of elements of x, got {shape} for {size}", **{"x.shape": x_shape}))
    return shape


@op(
    vjp=lambda F, g, x_shape: F.reshape(g, x_shape),
    ref=lambda x, shape: np.reshape(x, shape),
    samples=[S((2, 6), shape=(3, 4)), S((2, 3, 4), shape=(-1, 4)), S((1,), shape=()), S((0, 3), shape=(3, 0))],
    errors=[
        (S((2, 3), shape=(4, 2)), r"\[reshape\] shape must have the number of elements of x, got \(4, 2\) for 6"),
        (S((2, 3), shape=(-1, -1)), r"\[reshape\] shape must consist of sizes and at most one -1"),
    ],
    at_once=True,
)
def reshape(x: Tensor, shape: SizesArgument, *more: int) -> Tensor:
    """The same elements in another shape; shares memory. One size may be -1.

    >>> reshape(Tensor.arange(6), (2, -1)).shape
    (2, 3)
    """
    x = _as_tensor("reshape", x)
    return with_shape(x, _resolved_shape(sizes_of(shape, more), x.size, x.shape))


@composite(
    ref="numpy",
    samples=[S((2, 3, 4)), S((2, 3, 4, 5), start_axis=1), S((2, 3, 4, 5), start_axis=1, end_axis=2), S(())],
    errors=[(S((2, 3), start_axis=1, end_axis=0), r"\[flatten\] start_axis must not be after end_axis")],
)
def flatten(F: Any, x: Tensor, start_axis: int = 0, end_axis: int = -1) -> Tensor:
    """Join the axes ``start_axis`` to ``end_axis`` into one; shares memory."""
    x = _as_tensor("flatten", x)
    first, last = (launch.check_axis("flatten", axis, x.ndim) for axis in (start_axis, end_axis))
    if first > last:
        raise ShapeError(message("flatten", "start_axis must not be after end_axis", start_axis=start_axis, end_axis=end_axis))
    return F.reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@composite(
    ref=lambda x, axis=None: np.squeeze(x, None if axis is None else tuple(a for a in np.atleast_1d(axis) if x.shape[a] == 1)),
    samples=[S((1, 3, 1)), S((1, 3, 1), axis=0), S((2, 3), axis=1), S((1, 3, 1), axis=(0, 2))],
    errors=[(S((1, 3), axis=2), r"\[squeeze\] axis must be in range for 2 dimensions, got 2")],
)
def squeeze(F: Any, x: Tensor, axis: SizesArgument | None = None) -> Tensor:
    """Drop all axes of size one, or only the named axes; a named axis of another size stays. Shares memory."""
    x = _as_tensor("squeeze", x)
    named = range(x.ndim) if axis is None else _checked_axes("squeeze", axis, x.ndim)
    return F.reshape(x, tuple(n for i, n in enumerate(x.shape) if n != 1 or i not in named))


@composite(
    ref=lambda x, axis: np.expand_dims(x, axis),
    samples=[S((2, 3), axis=0), S((2, 3), axis=-1), S((), axis=0)],
    errors=[(S((2, 3), axis=3), r"\[unsqueeze\] axis must be in range for 3 dimensions, got 3")],
)
def unsqueeze(F: Any, x: Tensor, axis: int) -> Tensor:
    """Insert an axis of size one; shares memory."""
    x = _as_tensor("unsqueeze", x)
    at = launch.check_axis("unsqueeze", axis, x.ndim + 1)
    return F.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


@op(vjp=lambda F, g: g, ref=np.copy, samples=[S((3, 5)), S(()), S((0, 2))])
def clone(x: Tensor) -> Tensor:
    """Return a copy with memory of its own; gradients flow through it."""
    return duplicate(_as_tensor("clone", x))


# ---- permutations


@op(
    vjp=lambda F, g, order: F.reorder(g, sorted(range(len(order)), key=list(order).__getitem__)),
    ref=lambda x, order: np.transpose(x, order),
    samples=[S((2, 3, 4), order=(2, 0, 1)), S((33, 41), order=(1, 0)), S((3, 2, 40, 9), order=(0, 3, 1, 2)), S((), order=())],
    errors=[(S((2, 3), order=(0, 0)), r"\[reorder\] every axis must be named only once; axes=\(0, 0\)")],
    at_once=True,
)
def reorder(x: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the axes: the op that ``permute`` and ``transpose`` call."""
    x = _as_tensor("reorder", x)
    return views.take_views(x, _reorder_layout, order)[0]


def _reorder_layout(shape: Ints, strides: Ints, order: Sequence[int]) -> ViewPlaces:
    return _reordered_axes(shape, strides, tuple(order))


@lru_cache(4096)
def _reordered_axes(shape: Ints, strides: Ints, order: Ints) -> ViewPlaces:
    if len(order) != len(shape):
        what = f"axes must name all {len(shape)} dimensions, got {len(order)}"
        raise ShapeError(message("permute", what, **{"x.shape": shape, "axes": order}))
    axes = _checked_axes("reorder", order, len(shape))
    return ((0, tuple(shape[i] for i in axes)),), tuple(strides[i] for i in axes)


@composite(
    ref=lambda x, axes: np.transpose(x, axes),
    samples=[S((2, 3, 4), axes=(2, 0, 1)), S((2, 3), axes=(-1, 0)), S((0, 3), axes=(1, 0))],
    errors=[
        (S((2, 3), axes=(0, 0)), r"\[permute\] every axis must be named only once; axes=\(0, 0\)"),
        (S((2, 3), axes=(0,)), r"\[permute\] axes must name all 2 dimensions, got 1"),
    ],
)
def permute(F: Any, x: Tensor, axes: SizesArgument, *more: int) -> Tensor:
    """Permute the axes.

    >>> from netcl import ops
    >>> ops.permute(Tensor.zeros((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    x = _as_tensor("permute", x)
    return F.reorder(x, _checked_axes("permute", sizes_of(axes, more), x.ndim))


@composite(
    ref=lambda x, axis0=-2, axis1=-1: np.swapaxes(x, axis0, axis1),
    samples=[S((3, 5)), S((2, 3, 4), axis0=0, axis1=2), S((65, 70)), S((2, 3), axis0=1, axis1=1)],
    errors=[(S((3, 5), axis0=0, axis1=2), r"\[transpose\] axis must be in range for 2 dimensions, got 2")],
)
def transpose(F: Any, x: Tensor, axis0: int = -2, axis1: int = -1) -> Tensor:
    """Exchange two axes, by default the last two."""
    x = _as_tensor("transpose", x)
    a, b = (launch.check_axis("transpose", axis, x.ndim) for axis in (axis0, axis1))
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return F.reorder(x, order)


# ---- broadcasting and repeating


def sum_to(F: Any, g: Any, shape: tuple[int, ...]) -> Any:
    """Return the gradient of a broadcast: ``g`` summed back to ``shape``."""
    if g.shape == shape:
        return g
    extra = len(g.shape) - len(shape)
    axes = tuple(i for i, n in enumerate(g.shape) if i < extra or (shape[i - extra] == 1 and n != 1))
    return F.reshape(F.sum(g, axis=axes), shape) if axes else F.reshape(g, shape)


def _expand_layout(have: Ints, strides: Ints, shape: SizesArgument, *more: int) -> ViewPlaces:
    wanted = sizes_of(shape, more)
    extra = len(wanted) - len(have)
    sizes = tuple(have[i - extra] if n == -1 and i >= extra else n for i, n in enumerate(wanted))
    if extra < 0 or any(n < 0 or old not in (1, n) for n, old in zip(sizes, (1,) * extra + have, strict=True)):
        raise ShapeError(message("expand", "x must broadcast to the shape", **{"x.shape": have, "shape": wanted}))
    steps = tuple(0 if n == 1 and size != 1 else step for n, size, step in zip(have, sizes[extra:], strides, strict=True))
    return ((0, sizes),), (0,) * extra + steps


@op(
    vjp=lambda F, g, x_shape: sum_to(F, g, x_shape),
    ref=lambda x, shape: np.broadcast_to(x, [x.shape[i - len(shape)] if n == -1 else n for i, n in enumerate(shape)]).copy(),
    samples=[
        S((3, 1), shape=(3, 4)),
        S((3,), shape=(2, 3)),
        S((1, 3, 1), shape=(5, 2, -1, 7)),
        S((), shape=(2, 2)),
        S((0, 1), shape=(0, 3)),
    ],
    errors=[
        (S((3, 2), shape=(3, 4)), r"\[expand\] x must broadcast to the shape; x\.shape=\(3, 2\), shape=\(3, 4\)"),
        (S((3, 2), shape=(2,)), r"\[expand\] x must broadcast to the shape"),
    ],
    deferred=lambda x, shape, *more: fused_rows.deferred_expand(
        x := _as_tensor("expand", x), _expand_layout(x.shape, x.shape, shape, *more)[0][0][1]
    ),
)
def expand(x: Tensor, shape: SizesArgument, *more: int) -> Tensor:
    """Repeat along axes of size one and along new leading axes; -1 keeps a size. The result is a view, read-only if elements repeat."""
    x = _as_tensor("expand", x)
    ((_, sizes),), strides = _expand_layout(x.shape, dense(x.shape), shape, *more)
    return take_block(x, sizes, 0, strides)


def _repeat_vjp(F, g, x_shape):
    shape = (1,) * (len(g.shape) - len(x_shape)) + x_shape
    if not g.size:
        return Tensor.zeros(x_shape, g.dtype, queue=g.queue)
    parts = F.reshape(g, [n for size, whole in zip(shape, g.shape, strict=True) for n in (whole // size, size)])
    return F.reshape(F.sum(parts, axis=tuple(range(0, 2 * len(shape), 2))), x_shape)


@op(
    vjp=_repeat_vjp,
    ref=lambda x, repeats: np.tile(x, repeats),
    samples=[S((2, 3), repeats=(2, 1)), S((3,), repeats=(2, 4)), S((2, 3), repeats=(0, 2)), S((), repeats=(3,))],
    errors=[(S((2, 3), repeats=(2,)), r"\[repeat\] repeats must have at least 2 numbers, got 1")],
)
def repeat(x: Tensor, repeats: SizesArgument, *more: int) -> Tensor:
    """Repeat the whole tensor along each axis, as ``torch.Tensor.repeat``; there may be more repeats than axes."""
    x = _as_tensor("repeat", x)
    times = sizes_of(repeats, more)
    if len(times) < x.ndim or min(times, default=0) < 0:
        what = f"repeats must have at least {x.ndim} numbers, got {len(times)}" if len(times) < x.ndim else "repeats cannot be negative"
        raise ShapeError(message("repeat", what, **{"x.shape": x.shape, "repeats": times}))
    shape = (1,) * (len(times) - x.ndim) + x.shape
    sizes = [n for pair in zip(times, shape, strict=True) for n in pair]
    walked = [n for stride in dense(shape) for n in (0, stride)]
    return with_shape(take_block(x, sizes, 0, walked), tuple(r * n for r, n in zip(times, shape, strict=True)))


@composite(
    ref=lambda x, repeats: np.tile(x, repeats),
    samples=[S((2, 3), repeats=2), S((2, 3), repeats=(2, 1, 3)), S((2, 3, 2), repeats=(3, 1))],
    errors=[(S((2, 3), repeats=(-1,)), r"\[repeat\] repeats cannot be negative")],
)
def tile(F: Any, x: Tensor, repeats: SizesArgument, *more: int) -> Tensor:
    """Repeat the whole tensor along each axis, as ``numpy.tile``; missing leading repeats are ones."""
    x = _as_tensor("tile", x)
    times = sizes_of(repeats, more)
    return F.repeat(x, (1,) * (x.ndim - len(times)) + times)


# ---- parts


@op(
    vjp=lambda F, g, x_shape, starts, steps: F.strided_unslice(g, x_shape, starts, steps),
    ref="numpy",
    samples=[S((5, 7), starts=(1, 6), sizes=(2, 3), steps=(2, -2)), S((4,), starts=(0,), sizes=(0,), steps=(1,))],
    errors=[(S((5,), starts=(3,), sizes=(3,), steps=(1,)), r"\[strided_slice\] a slice must lie inside the tensor, .*; shape=\(5,\)")],
    at_once=True,
)
def strided_slice(x: Tensor, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Take ``sizes`` elements along each axis, beginning at ``starts``, ``steps`` apart (which may be negative)."""
    x = _as_tensor("strided_slice", x)
    return views.take_views(x, _slice_layout, starts, sizes, steps)[0]


def _slice_layout(shape: Ints, strides: Ints, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> ViewPlaces:
    return _checked_slice("strided_slice", shape, strides, tuple(starts), tuple(sizes), tuple(steps))


@lru_cache(4096)
def _checked_slice(name: str, shape: Ints, strides: Ints, starts: Ints, sizes: Ints, steps: Ints) -> ViewPlaces:
    for n, start, size, step in zip(shape, starts, sizes, steps, strict=True):
        ends = (start, start + (size - 1) * step)
        if step == 0 or size < 0 or (size and (min(ends) < 0 or max(ends) >= n)):
            what = "a slice must lie inside the tensor, with sizes of at least 0 and steps other than 0"
            raise ShapeError(message(name, what, shape=shape, starts=starts, sizes=sizes, steps=steps))
    start = sum(s * stride for s, stride in zip(starts, strides, strict=True))
    return ((start, sizes),), tuple(step * stride for step, stride in zip(steps, strides, strict=True))


@op(
    vjp=lambda F, g, x_shape, starts, steps: F.strided_slice(g, starts, x_shape, steps),
    ref="numpy",
    samples=[S((2, 3), shape=(5, 7), starts=(1, 6), steps=(2, -2)), S((2,), shape=(2,), starts=(0,), steps=(1,))],
    errors=[(S((3,), shape=(5,), starts=(3,), steps=(1,)), r"\[strided_unslice\] a slice must lie inside the tensor, .*; shape=\(5,\)")],
    deferred=lambda x, *how, **more: strided_unslice(x, *how, **more) if views.any_pending(x) else None,
    defer_if=views.any_pending,
)
def strided_unslice(x: Tensor, shape: Sequence[int], starts: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Return zeros of ``shape`` with ``x`` at the elements that ``strided_slice`` reads: the gradient of that op."""
    x = _as_tensor("strided_unslice", x)
    shape = tuple(shape)
    ((start, _),), strides = _checked_slice("strided_unslice", shape, dense(shape), tuple(starts), x.shape, tuple(steps))
    return views.copy_blocks(shape, (x,), (start,), strides)


@composite(
    ref=lambda x, axis, start, length: np.take(x, np.arange(length) + start % max(x.shape[axis], 1), axis),
    samples=[S((5, 3), axis=0, start=1, length=3), S((5, 3), axis=-1, start=-2, length=2), S((4, 3), axis=0, start=0, length=0)],
    errors=[
        (S((5, 3), axis=0, start=3, length=3), r"\[narrow\] start must be from -5 to 5, and length from 0 .*; start=3, length=3, axis=0"),
        (S((5, 3), axis=2, start=0, length=1), r"\[narrow\] axis must be in range for 2 dimensions, got 2"),
    ],
)
def narrow(F: Any, x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """Take ``length`` elements of one axis, beginning at ``start``; a negative start counts from the end."""
    x = _as_tensor("narrow", x)
    at = _real_axis("narrow", x, axis)
    first = start + x.shape[at] if start < 0 else start
    if length < 0 or not 0 <= first <= x.shape[at] - length:
        what = f"start must be from -{x.shape[at]} to {x.shape[at]}, and length from 0 to the number of elements from start on"
        raise ShapeError(message("narrow", what, start=start, length=length, axis=axis, **{"x.shape": x.shape}))
    return _part_along(F, x, at, first, length)


def _real_axis(name: str, x: Tensor, axis: int) -> int:
    if not x.shape:
        raise ShapeError(message(name, "x must have at least one dimension, got 0"))
    return launch.check_axis(name, axis, x.ndim)


def _part_along(F: Any, x: Tensor, axis: int, start: int, length: int, step: int = 1) -> Tensor:
    return F.strided_slice(x, along(x.ndim, axis, start), along(x.ndim, axis, length, x.shape), along(x.ndim, axis, step, 1))


@composite(
    name="slice",
    ref=lambda x, axis=0, start=None, stop=None, step=1: x[(slice(None),) * (axis % x.ndim) + (slice(start, stop, step),)],
    samples=[S((7, 3), start=1, stop=6, step=2), S((3, 7), axis=1, stop=-2), S((3, 7), axis=-1, step=-2), S((5,), start=4, stop=2)],
    errors=[(S((7, 3), step=0), r"\[slice\] the step cannot be 0")],
)
def slice_(F: Any, x: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Tensor:
    """Return ``x[start:stop:step]`` along one axis; bounds beyond the ends are clipped, as in Python."""
    x = _as_tensor("slice", x)
    at = _real_axis("slice", x, axis)
    if step == 0:
        raise ShapeError(message("slice", "the step cannot be 0", axis=axis))
    walk = range(x.shape[at])[slice(start, stop, step)]
    return _part_along(F, x, at, walk.start if len(walk) else 0, len(walk), step)


@composite(
    ref=lambda x, axes: np.flip(x, axes),
    samples=[S((3, 5), axes=0), S((3, 5), axes=(0, 1)), S((2, 3, 4), axes=(-1,)), S((0, 3), axes=1)],
    errors=[(S((3, 5), axes=2), r"\[flip\] axis must be in range for 2 dimensions, got 2")],
)
def flip(F: Any, x: Tensor, axes: SizesArgument, *more: int) -> Tensor:
    """Reverse the order of the elements along the named axes."""
    x = _as_tensor("flip", x)
    named = _checked_axes("flip", sizes_of(axes, more), x.ndim) if x.shape else ()
    starts = tuple(max(n - 1, 0) if i in named else 0 for i, n in enumerate(x.shape))
    return views.own(F.strided_slice(x, starts, x.shape, tuple(-1 if i in named else 1 for i in range(x.ndim))))


# ---- joining and splitting


@composite(
    ref=lambda xs, axis=0: np.concatenate(xs, axis),
    inputs=("xs",),
    samples=[S([(2, 3), (4, 3)]), S([(2, 3, 4), (2, 1, 4), (2, 5, 4)], axis=1), S([(2, 3), (2, 0), (2, 2)], axis=-1), S([(3,)])],
    errors=[
        (S([(2, 3), (2, 4)]), r"\[cat\] shapes must not be \(\), and must be equal except .*; shapes=\[\(2, 3\), \(2, 4\)\], axis=0"),
        (S([]), r"\[cat\] at least one tensor must be given"),
    ],
)
def cat(F: Any, xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis; different dtypes are promoted as in arithmetic.

    >>> from netcl import ops
    >>> ops.cat([Tensor.zeros((2, 3)), Tensor.ones((1, 3))]).shape
    (3, 3)
    """
    if not xs:
        raise ShapeError(message("cat", "at least one tensor must be given"))
    tensors = launch.as_tensors("cat", *xs)
    shapes = [t.shape for t in tensors]
    at = launch.check_axis("cat", axis, len(shapes[0]))
    rest = {tuple(n for i, n in enumerate(shape) if i != at) for shape in shapes}
    if len(rest) > 1 or len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        raise ShapeError(message("cat", "shapes must not be (), and must be equal except along the axis", shapes=shapes, axis=axis))
    if any(t.dtype != tensors[0].dtype for t in tensors):
        common = reduce(dtypes.promote, (dtypes.DTYPES[t.dtype] for t in tensors))
        tensors = [F.cast(t, common.name) for t in tensors]
    return F.joined(tensors, axis=at, lengths=tuple(t.shape[at] for t in tensors))


@op(
    vjp=lambda F, g, axis, lengths: (list(F.split(g, lengths, axis)),),
    ref=lambda xs, axis, lengths: np.concatenate(xs, axis),
    inputs=("xs",),
    samples=[S([(2, 3), (4, 3)], axis=0, lengths=(2, 4))],
    errors=[
        (S([(2, 3), (4, 3)], axis=0, lengths=(2, 3)), r"\[joined\] lengths must be the sizes of the tensors"),
        (S([(2, 3), (4, 5)], axis=0, lengths=(2, 4)), r"\[joined\] lengths must be the sizes of the tensors"),
        (S([(2, 3), (4, 3)], axis=0, lengths=(6,)), r"\[joined\] lengths must be the sizes of the tensors"),
    ],
    deferred=lambda xs, **how: joined(xs, **how) if views.any_pending(xs) else None,
    defer_if=views.any_pending,
)
def joined(xs: Sequence[Tensor], *, axis: int, lengths: Sequence[int]) -> Tensor:
    """Concatenate checked tensors; ``lengths`` are their sizes along the axis, so that backward need not keep the tensors."""
    first = xs[0]
    if [x.shape for x in xs] != [along(first.ndim, axis, n, first.shape) for n in lengths]:
        what = "lengths must be the sizes of the tensors along the axis, and all other sizes must be equal"
        raise ShapeError(message("joined", what, shapes=[x.shape for x in xs], axis=axis, lengths=tuple(lengths)))
    shape = along(first.ndim, axis, sum(lengths), first.shape)
    parts, strides = _split_layout(shape, dense(shape), lengths, axis)
    return views.copy_blocks(shape, xs, [start for start, _ in parts], strides)


@composite(
    ref=lambda xs, axis=0: np.stack(xs, axis),
    inputs=("xs",),
    samples=[S([(2, 3), (2, 3)]), S([(2, 3), (2, 3), (2, 3)], axis=-1), S([(), ()])],
    errors=[
        (S([(2, 3), (3, 2)]), r"\[stack\] all tensors must have the same shape; shapes=\[\(2, 3\), \(3, 2\)\]"),
        (S([(2,)], axis=2), r"\[stack\] axis must be in range for 2 dimensions, got 2"),
    ],
)
def stack(F: Any, xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stack tensors of one shape along a new axis."""
    if not xs:
        raise ShapeError(message("stack", "at least one tensor must be given"))
    tensors = launch.as_tensors("stack", *xs)
    if len({t.shape for t in tensors}) > 1:
        raise ShapeError(message("stack", "all tensors must have the same shape", shapes=[t.shape for t in tensors]))
    at = launch.check_axis("stack", axis, tensors[0].ndim + 1)
    return F.cat([F.unsqueeze(t, at) for t in tensors], at)


def _split_lengths(x_shape: tuple[int, ...], sizes: SizesArgument, axis: int) -> tuple[list[int], int]:
    at = launch.check_axis("split", axis, len(x_shape))
    n = x_shape[at] if x_shape else 0
    if not isinstance(sizes, (int, np.integer)):
        lengths = [int(size) for size in sizes]
        if sum(lengths) != n or min(lengths, default=0) < 0:
            what = f"sizes must be at least 0 and add up to the length of the axis, {n}"
            raise ShapeError(message("split", what, sizes=lengths, axis=axis))
        return lengths, at
    if sizes <= 0 or not x_shape:
        raise ShapeError(message("split", "size must be at least 1, and x must have a dimension", size=sizes, **{"x.shape": x_shape}))
    return [min(int(sizes), n - start) for start in range(0, n, int(sizes))] or [0], at


def _split_vjp(F, g, x_shape, sizes, axis):
    lengths, at = _split_lengths(x_shape, sizes, axis)
    g = g if isinstance(g, tuple) else (g,)
    known = next(part for part in g if part is not None)
    shapes = [along(len(x_shape), at, n, x_shape) for n in lengths]
    parts = [Tensor.zeros(shape, known.dtype, queue=known.queue) if part is None else part for part, shape in zip(g, shapes, strict=True)]
    return F.cat(parts, at)  # unused parts count as zeros


@op(
    vjp=_split_vjp,
    ref="numpy",
    samples=[S((7, 3), sizes=3), S((3, 7), sizes=(2, 0, 5), axis=1), S((4, 2), sizes=4, axis=0)],
    errors=[
        (S((7, 3), sizes=(3, 3)), r"\[split\] sizes must be at least 0 and add up to the length of the axis, 7"),
        (S((7, 3), sizes=0), r"\[split\] size must be at least 1, and x must have a dimension"),
    ],
    at_once=True,
)
def split(x: Tensor, sizes: SizesArgument, axis: int = 0) -> tuple[Tensor, ...]:
    """Split an axis into parts of ``sizes`` elements (the last may be shorter), or of the sizes in a list."""
    x = _as_tensor("split", x)
    return views.take_views(x, _split_layout, sizes, axis)


def _split_layout(shape: Ints, strides: Ints, sizes: SizesArgument, axis: int = 0) -> ViewPlaces:
    return _split_parts(shape, strides, sizes if isinstance(sizes, (int, np.integer)) else tuple(sizes), axis)


@lru_cache(4096)
def _split_parts(shape: Ints, strides: Ints, sizes: SizesArgument, axis: int) -> ViewPlaces:
    lengths, at = _split_lengths(shape, sizes, axis)
    starts = [start * strides[at] for start in accumulate(lengths[:-1], initial=0)]
    return tuple((start, along(len(shape), at, length, shape)) for start, length in zip(starts, lengths, strict=True)), strides


def _unbind_vjp(F, g, axis, order):
    g = g if isinstance(g, tuple) else (g,)
    like = next(part for part in g if part is not None)
    order = range(len(like.shape)) if order is None else order
    return F.bound([Tensor.zeros(like.shape, like.dtype, queue=like.queue) if part is None else part for part in g], axis=axis, order=order)


@op(
    vjp=_unbind_vjp,
    ref=lambda x, axis=0, order=None: tuple(np.transpose(part, order) for part in np.moveaxis(x, axis, 0)),
    samples=[S((2, 4, 3, 5, 6), axis=2, order=(0, 2, 1, 3)), S((3, 2)), S((2, 3, 4), axis=-2, order=(1, 0))],
    errors=[(S((2, 3), axis=0, order=(0, 1)), r"\[unbind\] order must name each of the 1 remaining dimensions once")],
    at_once=True,
)
def unbind(x: Tensor, axis: int = 0, *, order: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Return the slices along an axis, each with its remaining axes in ``order``: for instance q, k and v of one projection."""
    x = _as_tensor("unbind", x)
    return views.take_views(x, _unbind_layout, axis, order)


def _unbind_layout(shape: Ints, strides: Ints, axis: int = 0, order: Sequence[int] | None = None) -> ViewPlaces:
    return _unbound_parts(shape, strides, axis, tuple(range(len(shape) - 1) if order is None else order))


@lru_cache(4096)
def _unbound_parts(shape: Ints, strides: Ints, axis: int, order: Ints) -> ViewPlaces:
    rank = len(shape) - 1
    if rank < 0:
        raise ShapeError(message("unbind", "x must have at least one dimension", axis=axis))
    at = launch.check_axis("unbind", axis, rank + 1)
    if sorted(order) != list(range(rank)):
        raise ShapeError(message("unbind", f"order must name each of the {rank} remaining dimensions once", order=order))
    kept = [i + (i >= at) for i in order]
    one = tuple(shape[i] for i in kept)
    return tuple((i * strides[at], one) for i in range(shape[at])), tuple(strides[i] for i in kept)


@op(
    vjp=lambda F, g, axis, order: (list(F.unbind(g, axis=axis, order=order)),),
    ref=lambda xs, axis, order: np.stack([np.transpose(x, np.argsort(order)) for x in xs], axis),
    inputs=("xs",),
    samples=[S([(2, 5, 4, 6)] * 3, axis=2, order=(0, 2, 1, 3)), S([(3,), (3,)], axis=0, order=(0,))],
    deferred=lambda xs, **how: bound(xs, **how) if views.any_pending(xs) else None,
    defer_if=views.any_pending,
)
def bound(xs: Sequence[Tensor], *, axis: int, order: Sequence[int]) -> Tensor:
    """Stack tensors along an axis: the inverse of :func:`unbind` with the same ``order``."""
    first = xs[0]
    at = launch.check_axis("bound", axis, first.ndim + 1)
    back = sorted(range(len(order)), key=order.__getitem__)  # the inverse of ``order``
    shape = [first.shape[i] for i in back]
    shape.insert(at, len(xs))
    if (found := views.stacked(xs)) is not None:
        base, offset, step, of_part = found
        steps = [of_part[i] for i in back]
        steps.insert(at, step)
        return views.unshared_block(base, offset, tuple(shape), tuple(steps))
    parts, strides = _unbind_layout(tuple(shape), dense(tuple(shape)), at, order)
    return views.copy_blocks(tuple(shape), xs, [start for start, _ in parts], strides)


@composite(
    ref="numpy",
    samples=[S((7, 3), chunks=3), S((3, 8), chunks=2, axis=-1), S((5, 2), chunks=4)],
    errors=[(S((7, 3), chunks=0), r"\[chunk\] chunks must be at least 1; chunks=0")],
)
def chunk(F: Any, x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Split an axis into at most ``chunks`` parts of equal size; the last may be shorter. An axis of size 0 gives ``chunks`` parts."""
    x = _as_tensor("chunk", x)
    if chunks < 1:
        raise ShapeError(message("chunk", "chunks must be at least 1", chunks=chunks))
    at = _real_axis("chunk", x, axis)
    return F.split(x, -(-x.shape[at] // chunks) or (0,) * chunks, at)


# ---- rolling


@op(
    vjp=lambda F, g, shifts, axis: F.roll(g, -shifts if isinstance(shifts, int) else tuple(-n for n in shifts), axis),
    ref=lambda x, shifts, axis=None: np.roll(x, shifts, axis),
    samples=[
        S((7,), shifts=2),
        S((3, 5), shifts=(1, -2), axis=(0, 1)),
        S((3, 5), shifts=-1),
        S((4, 3), shifts=9, axis=0),
        S((0, 3), shifts=1, axis=0),
    ],
    errors=[(S((3, 5), shifts=(1, 2), axis=0), r"\[roll\] shifts and axis must have the same length; shifts=\(1, 2\), axis=0")],
)
def roll(x: Tensor, shifts: SizesArgument, axis: SizesArgument | None = None) -> Tensor:
    """Shift elements along axes with wraparound; without an axis, over the flattened tensor."""
    x = _as_tensor("roll", x)
    if axis is None:
        return with_shape(roll(with_shape(x, (x.size,)), shifts, 0), x.shape)
    if not x.shape:
        raise ShapeError(message("roll", "a tensor without dimensions has no axis to roll", "pass no axis", axis=axis))
    amounts, axes = sizes_of(shifts), _checked_axes("roll", axis, x.ndim)
    if len(amounts) != len(axes):
        raise ShapeError(message("roll", "shifts and axis must have the same length", shifts=shifts, axis=axis))
    pairs = {at: amount % max(x.shape[at], 1) for amount, at in zip(amounts, axes, strict=True)}
    out = Tensor.empty(x.shape, x.dtype, queue=x.queue)
    strides = dense(x.shape)
    pieces = []  # of each axis, the one or two pieces as (length, source position, target position)
    for i, n in enumerate(x.shape):
        amount = pairs.get(i, 0)
        pieces.append([(n - amount, 0, amount), (amount, n - amount, 0)] if amount else [(n, 0, 0)])
    for block in product(*pieces):
        source, target = (sum(piece[side] * stride for piece, stride in zip(block, strides, strict=True)) for side in (1, 2))
        copy_block([piece[0] for piece in block], x, source, strides, out, target, strides)
    return out


# ---- triangles


def _register_triangle(name: str, where: str) -> None:
    def call(x: Tensor, diagonal: int = 0) -> Tensor:
        x = _as_tensor(name, x)
        if x.ndim < 2:
            raise ShapeError(message(name, "x must have at least two dimensions", **{"x.shape": x.shape}))
        if x.array is not None:
            return wrap_array(getattr(np, name)(x.array, diagonal), x.dtype, x.queue)
        out = Tensor.empty(x.shape, x.dtype, queue=x.queue)
        if not x.size:
            return out
        chunk_, local = (4096, 1) if launch.on_cpu_device(x.queue) else (1, launch.LOCAL_1D)
        kernel = launch.kernel(x.queue, __file__, "movement.cl", "triangle", {}, {"T": ELEMENTS[dtypes.DTYPES[x.dtype].itemsize]})
        kernel(x.queue, -(-x.size // chunk_), local, x, out, x.size, x.shape[-2], x.shape[-1], diagonal, int(name == "triu"), chunk_)
        return out

    op(vjp=lambda F, g, diagonal: getattr(F, name)(g, diagonal), name=name, inputs=("x",),
       ref=lambda x, diagonal=0: getattr(np, name)(x, diagonal),
       samples=[S((3, 5)), S((5, 3), diagonal=1), S((2, 4, 4), diagonal=-2), S((3, 0)), S((1, 1), diagonal=1)],
       errors=[(S((3,)), rf"\[{name}\] x must have at least two dimensions")],
       doc=f"The matrices of the last two axes with zeros {where} a diagonal.")(call)  # fmt: skip


_register_triangle("tril", "above")
_register_triangle("triu", "below")


#: The ops whose results are views, and how each places them.
LAYOUTS: dict[str, views.ViewLayout | None] = {
    "reshape": None, "expand": _expand_layout, "reorder": _reorder_layout,
    "strided_slice": _slice_layout, "split": _split_layout, "unbind": _unbind_layout,
    "strided_block": views.block_layout,
}  # fmt: skip
