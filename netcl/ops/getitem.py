"""``x[...]`` and ``x[...] = value`` with torch's indices: integers, slices, ``None``, ``...``, integer arrays, boolean masks.

An index is parsed to a :class:`Selection`: ranges for the basic part, and index arrays, which are read by one gather of rows. Masks
become index arrays. Integers are taken first, so ``x[0, :, array]`` has the axes of the array last, as in torch; in NumPy, the integer
counts as an array, and the axes come first. Reading is composed of differentiable ops; writing is in place, and
:mod:`netcl.autograd.in_place` records it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.engine import launch
from netcl.engine.operands import from_values
from netcl.engine.registry import composite, op
from netcl.engine.strided import broadcast_strides, copy_block, dense
from netcl.ops.index import flat_nonzero, joined_index, put_flat
from netcl.ops.movement import sum_to


class Selection(NamedTuple):
    """An index resolved for a tensor of a given shape: the elements it selects and the axes of the result."""

    shape: tuple[int, ...]  # of x, with the axes that a mask covers joined into one
    walks: tuple[range, ...]  # per axis of that shape, what slices and plain integers take
    arrays: tuple[tuple[int, Any], ...]  # axis and integer index
    layout: tuple[Any, ...]  # of the result: the axis it comes from, None for a new one, "arrays" for theirs (first if not adjacent)


def _is_mask(item: Any) -> bool:
    return (item.dtype == "bool") if isinstance(item, Tensor) else np.asarray(item).dtype == bool


def _is_array(item: Any) -> bool:
    return isinstance(item, (Tensor, np.ndarray, list, tuple, range, bool, np.bool_))


def _spelled(index: Any, ndim: int) -> list[Any]:
    """Return the items of an index, with the ellipsis expanded and missing slices added."""
    if isinstance(index, list) and any(isinstance(item, list | tuple | range | Tensor | np.ndarray) for item in index):
        what, remedy = "a list must not hold indices: torch takes it as a tuple, NumPy as an array", "index with a tuple or an array"
        raise IndexError(message("getitem", what, remedy, index=_shown(index)))
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_axes_of(item) for item in items if item is not None and item is not Ellipsis)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or used > ndim:
        what = "the index must have at most one '...'" if len(dots) > 1 else f"the index must name at most {ndim} axes, got {used}"
        raise IndexError(message("getitem", what, index=_shown(index)))
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (ndim - used), *items[at + len(dots) :]]


def _axes_of(item: Any) -> int:
    if not _is_array(item) or not _is_mask(item):
        return 1
    return item.ndim if isinstance(item, Tensor) else np.ndim(item)


def _shown(index: Any) -> str:
    if isinstance(index, tuple):
        return f"({', '.join(_shown(item) for item in index)})"
    return f"tensor{index.shape}" if isinstance(index, (Tensor, np.ndarray)) else repr(index)


def _positions(mask: Any, covered: tuple[int, ...]) -> Any:
    """Return the positions of a mask's true elements in the axes it covers, flattened."""
    shape = mask.shape if isinstance(mask, Tensor) else np.shape(mask)
    if tuple(shape) != covered:
        raise IndexError(message("getitem", "the mask must have the shape of the axes it covers", mask=tuple(shape), axes=covered))
    return flat_nonzero(mask) if isinstance(mask, Tensor) else np.flatnonzero(mask)


def _check_array(item: Any) -> Any:
    array: Any = item if isinstance(item, Tensor) else np.asarray(item)
    if array is not item and array.size == 0:
        return array.astype(np.int64)
    kind = array.dtype if isinstance(array, Tensor) else array.dtype.name
    if kind == "uint8" and array is item and isinstance(item, Tensor):  # torch takes it as a mask, NumPy as positions
        raise DtypeError(message("getitem", "an index must not be uint8", 'cast a mask to "bool", positions to "int64"', shape=item.shape))
    if kind not in launch.INTEGERS:
        raise DtypeError(message("getitem", "an index must be integers, slices, None, '...' or booleans", dtype=kind))
    return array


def _item_range(item: Any, size: int) -> range:
    if isinstance(item, slice):
        parts = [None if part is None else part.__index__() for part in (item.start, item.stop, item.step)]
        if parts[2] == 0:
            raise ShapeError(message("getitem", "the step of a slice cannot be 0"))
        return range(size)[slice(*parts)]
    at = int(item)
    if not -size <= at < size:
        raise IndexError(message("getitem", f"index {at} is out of range", size=size))
    return range(at % size, at % size + 1)


def selection_of(x: Tensor, index: Any) -> Selection:
    """Return the :class:`Selection` of an index for ``x``; raises for an invalid index."""
    items = _spelled(index, x.ndim)
    shape: list[int] = []
    walks: list[range] = []
    arrays: list[tuple[int, Any]] = []
    places: list[int] = []
    layout: list[Any] = []
    at = 0
    for item in items:
        if item is None:
            layout.append(None)
            continue
        axis, covered = len(shape), x.shape[at : at + _axes_of(item)]
        at += len(covered)
        shape.append(math.prod(covered))
        if _is_array(item):
            positions = _positions(item, covered) if _is_mask(item) else _check_array(item)
            walks.append(range(shape[-1]))
            arrays.append((axis, positions))
            if positions.ndim:  # one without axes is an integer
                places.append(len(layout))
                layout.append("arrays")
        elif isinstance(item, (slice, int, np.integer)):
            walks.append(_item_range(item, shape[-1]))
            if isinstance(item, slice):
                layout.append(axis)
        else:
            raise DtypeError(message("getitem", "an index must be integers, slices, None, '...' or booleans", got=type(item).__name__))
    if places:
        first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        layout = [part for part in layout if part != "arrays"]
        layout.insert(first, "arrays")
    return Selection(tuple(shape), tuple(walks), tuple(arrays), tuple(layout))


def result_shape(selected: Selection, picked: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the shape of ``x[index]``; ``picked`` is the broadcast shape of its integer arrays."""
    sizes: list[int] = []
    for part in selected.layout:
        sizes.extend(picked if part == "arrays" else [1 if part is None else len(selected.walks[part])])
    return tuple(sizes)


def _start(walk: range) -> int:
    return walk.start if len(walk) else 0


@composite(ref=None)
def getitem(F: Any, x: Tensor, index: Any) -> Tensor:
    """Return ``x[index]``. Indices out of range raise ``IndexError``; device tensors of indices are checked later (:mod:`netcl.ops.index`).

    >>> from netcl import ops
    >>> ops.getitem(Tensor.arange(6), [5, -3, 1]).tolist()
    [5, 3, 1]
    """
    (x,) = launch.as_tensors("getitem", x)
    return indexed(F, x, index, joined_index)


def indexed(F: Any, x: Tensor, index: Any, joined: Callable[[str, Sequence[tuple[Any, int]], Tensor], Tensor]) -> Tensor:
    """Return ``x[index]``; ``joined`` combines the integer arrays of an index, as :func:`netcl.ops.index.joined_index` does."""
    selected = selection_of(x, index)
    y = x if selected.shape == x.shape else F.reshape(x, selected.shape)
    if any(walk != range(n) for walk, n in zip(selected.walks, selected.shape, strict=True)):
        y = F.strided_slice(y, [_start(w) for w in selected.walks], [len(w) for w in selected.walks], [w.step for w in selected.walks])
    if not selected.arrays:
        shape = result_shape(selected)
        return y if y is not x and y.shape == shape else F.reshape(y, shape)
    left = [axis for axis in range(len(y.shape)) if axis in selected.layout or any(axis == at for at, _ in selected.arrays)]
    y = F.reshape(y, [y.shape[axis] for axis in left]) if len(left) < len(y.shape) else y  # without the axes of integers
    axes = [left.index(axis) for axis, _ in selected.arrays]
    if axes[-1] - axes[0] != len(axes) - 1:
        y = F.permute(y, [*axes, *(i for i in range(len(y.shape)) if i not in axes)])
        axes = list(range(len(axes)))
    flat = joined("getitem", [(item, y.shape[axis]) for (_, item), axis in zip(selected.arrays, axes, strict=True)], x)
    rows = math.prod(y.shape[axes[0] : axes[-1] + 1])
    y = F.reshape(y, (*y.shape[: axes[0]], rows, *y.shape[axes[-1] + 1 :]))
    y = F.index_select(y, axes[0], F.reshape(flat, (flat.size,)))
    before = selected.layout[: selected.layout.index("arrays")] if "arrays" in selected.layout else ()
    to, order = sum(part is not None for part in before), [i for i in range(len(y.shape)) if i != axes[0]]
    if flat.ndim and to != axes[0]:
        y = F.permute(y, [*order[:to], axes[0], *order[to:]])
    return F.reshape(y, result_shape(selected, flat.shape))


# ---- writing


def _written_value(x: Tensor, value: Any, cast: bool) -> Tensor:
    """Return the value to write as a tensor that shares no memory with ``x``. A tensor of another dtype is cast, or raises."""
    if not isinstance(value, Tensor):
        return from_values("setitem", value, x.queue, x.dtype)
    (_, value) = launch.as_tensors("setitem", x, value)
    if value.dtype != x.dtype and cast:
        return value.detach().to(x.dtype)
    if value.dtype != x.dtype:
        what = "x and the value must have the same dtype"
        raise DtypeError(message("setitem", what, f'cast it: value.to("{x.dtype}")', x=x.dtype, value=value.dtype))
    same = value.buffer is x.buffer if x.array is None else np.may_share_memory(value.array, x.array)
    return duplicate(value) if same else value


def _broadcast(value: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that repeat a value over ``shape``; the value may have surplus leading axes of size one, as in NumPy."""
    extra = max(0, value.ndim - len(shape))
    sizes = value.shape[extra:]
    pairs = zip(sizes, shape[len(shape) - len(sizes) :], strict=True)
    if any(n != 1 for n in value.shape[:extra]) or any(n not in (1, m) for n, m in pairs):
        raise ShapeError(message("setitem", "the value must broadcast to the indexed elements", value=value.shape, target=shape))
    return broadcast_strides(sizes, shape)


def block_of(selected: Selection, strides: Sequence[int]) -> tuple[int, list[int]]:
    """Return the offset and strides of the elements that a basic index selects in a tensor with ``strides``."""
    start = sum(_start(walk) * stride for walk, stride in zip(selected.walks, strides, strict=True))
    return start, [0 if part is None else selected.walks[part].step * strides[part] for part in selected.layout]


def _setitem_vjp(F: Any, g: Any, index: Any, value_shape: tuple[int, ...], needs: tuple[bool, ...]) -> tuple[Any, Any]:
    old = F.setitem(F.clone(g), index, 0) if needs[0] else None
    if not needs[1]:
        return old, None
    picked = F.getitem(g, index)
    extra = max(0, len(value_shape) - picked.ndim)
    return old, F.reshape(sum_to(F, picked, tuple(value_shape[extra:])), value_shape)


@op(vjp=_setitem_vjp, ref=None, inputs=("x", "value"), at_once=True)
def setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    """Write ``x[index] = value`` in place. If an index names an element twice, the last value stays.

    Gradients flow to ``value`` and to the elements of the previous ``x`` that are not overwritten.
    """
    selected = selection_of(x, index)
    given = _written_value(x, value, cast=not selected.arrays)
    x._changing()
    x.host_ref = None
    if not selected.arrays:
        shape = result_shape(selected)
        copy_block(shape, given, 0, _broadcast(given, shape), x, *block_of(selected, dense(x.shape)))
        return x
    from netcl import ops

    positions = Tensor.from_host(x.queue, np.arange(x.size, dtype=np.int64).reshape(x.shape))
    places = ops.function("getitem")(positions, index)
    whole = Tensor.empty(places.shape, x.dtype, queue=x.queue)
    copy_block(places.shape, given, 0, _broadcast(given, places.shape), whole, 0, dense(places.shape))
    put_flat(x, places, whole)
    return x
