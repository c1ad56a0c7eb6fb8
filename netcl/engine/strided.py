"""Copies between strided blocks of two tensors; used by permute, slicing, cat, pad, flip, expand and repeat.

A block is an offset and one stride per axis, in elements; strides may be 0 (broadcast) or negative (reversed). Axes are merged,
and elements are widened to at most 16 bytes. Then device, number of axes and layout select a kernel. A kernel does not depend on the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.plan import planned

ELEMENTS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong", 16: "uint4"}
_TURNED_TILE, _TURNED_ROWS = 32, 8
_LEAST_TILE = 8  # size along both axes below which tiles do not pay
_CPU_RUN = 1 << 16  # bytes that a CPU's work-item copies at a time
_CPU_ITEM = 1 << 14  # bytes of whole rows that a work-item copies on a CPU
_FEW_AXES, _ALL_AXES = 4, 8  # of the kernels
_GROUP = 256  # work-items of a GPU's group
_ITEM_ROWS = 4  # elements that a GPU's work-item copies: loads in flight together
_MOST_GROUPS = 65535  # along the second and third dimension of a launch


class CopyAxis(NamedTuple):
    """One axis of a copy: its size and its strides in source and destination."""

    size: int
    source: int
    target: int


class Copy(NamedTuple):
    """A copy as data: element size, offsets of the first elements in source and destination, axes from outermost to innermost."""

    itemsize: int
    source: int
    target: int
    axes: tuple[CopyAxis, ...]


@lru_cache(4096)
def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> dense((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def merge(axes: Sequence[CopyAxis]) -> tuple[CopyAxis, ...]:
    """Drop axes of size one, and merge neighboring axes that source and target each traverse with one stride.

    >>> merge((CopyAxis(2, 12, 12), CopyAxis(3, 4, 4), CopyAxis(4, 1, 1)))
    (CopyAxis(size=24, source=1, target=1),)
    """
    merged: list[CopyAxis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        last = merged[-1] if merged else None
        if last and last.source == axis.source * axis.size and last.target == axis.target * axis.size:
            merged[-1] = CopyAxis(last.size * axis.size, axis.source, axis.target)
        else:
            merged.append(axis)
    return tuple(merged)


def widen(copy: Copy, most: int = 16) -> Copy:
    """Return the same copy with the widest elements, up to ``most`` bytes, that divide its innermost axis, strides and offsets."""
    if not copy.axes or copy.axes[-1][1:] != (1, 1):
        return copy
    *outer, inner = copy.axes
    common = math.gcd(copy.source, copy.target, inner.size, *(n for axis in outer for n in axis[1:]))
    factor = 1
    while common % (2 * factor) == 0 and copy.itemsize * 2 * factor <= most:
        factor *= 2
    axes = [CopyAxis(axis.size, axis.source // factor, axis.target // factor) for axis in outer]
    axes.append(CopyAxis(inner.size // factor, 1, 1))
    return Copy(copy.itemsize * factor, copy.source // factor, copy.target // factor, merge(axes))


def widen_rows(x: Tensor, y: Tensor, inner: int) -> tuple[int, int]:
    """Return the bytes (at most 16) of the widest aligned element that divides a row of ``inner`` elements, and its number per row."""
    itemsize = wide = dtypes.DTYPES[x.dtype].itemsize
    while inner * itemsize % (2 * wide) == 0 and 2 * wide <= alignment(x, y):
        wide *= 2
    return wide, inner * itemsize // wide


# ---- launches


_Launch = tuple[Any, Any, Any, tuple[int, ...]]  # kernel, global size, local size, numbers


def _copy_kernel(queue: Any, name: str, copy: Copy) -> Any:
    far = (sum((a.size - 1) * max(0, stride) for a, stride in ((a, a[side]) for a in copy.axes)) for side in (1, 2))
    ends = [start + n for start, n in zip((copy.source, copy.target), far, strict=True)]
    index = launch.index_type(max(copy.source, copy.target, *ends, math.prod(a.size for a in copy.axes)))  # of elements and of work-items
    return launch.kernel(queue, __file__, "strided.cl", name, {}, {"T": ELEMENTS[copy.itemsize], "INDEX": index})


def _run_copy(queue: Any, copy: Copy, src: Tensor, dst: Tensor) -> None:
    tiled = _transposition(queue, copy)
    if tiled is None and len(copy.axes) > _ALL_AXES:
        first, rest = copy.axes[0], copy.axes[1:]
        for i in range(first.size):
            part = copy._replace(source=copy.source + i * first.source, target=copy.target + i * first.target, axes=rest)
            _run_copy(queue, part, src, dst)
        return
    form = _plain_copy if len(copy.axes) > _FEW_AXES else _row_copy if launch.on_cpu_device(queue) else _grid_copy
    kernel, size, local, args = tiled or form(queue, copy)
    kernel(queue, size, local, src, dst, *args)


def _with_unit_axes(copy: Copy, count: int) -> tuple[CopyAxis, ...]:
    return (CopyAxis(1, 0, 0),) * (count - len(copy.axes)) + copy.axes


def _grid_copy(queue: Any, copy: Copy) -> _Launch:
    """Return a launch in three dimensions for a copy of few axes on a GPU."""
    axes = _with_unit_axes(copy, _FEW_AXES)
    size, source, target = axes[3]
    if len(copy.axes) == 1 and size % _ITEM_ROWS == 0:  # one long run: copy it as rows
        size //= _ITEM_ROWS
        axes = (*axes[:2], CopyAxis(_ITEM_ROWS, size * source, size * target), CopyAxis(size, source, target))
    sizes = [axis.size for axis in axes]
    group = min(_GROUP, program.state(queue).max_work_group)
    across = min(1 << (sizes[3] - 1).bit_length(), group)
    down = max(1, group // across)
    rows, blocks = (min(n, _MOST_GROUPS) for n in (-(-sizes[2] // (down * _ITEM_ROWS)), sizes[0] * sizes[1]))
    args = (copy.source, copy.target, *sizes, *(a.source for a in axes), *(a.target for a in axes))
    return _copy_kernel(queue, "copy_grid", copy), (-(-sizes[3] // across) * across, rows * down, blocks), (across, down, 1), args


def _row_copy(queue: Any, copy: Copy) -> _Launch:
    """Return a launch for a copy of few axes on a CPU: a work-item copies some rows or a part of a row."""
    axes = _with_unit_axes(copy, _FEW_AXES)
    inner, rows = axes[3].size, math.prod(axis.size for axis in axes[:3])
    chunk, _ = _elements_per_item(queue, inner, copy.itemsize)
    count = max(1, _CPU_ITEM // (chunk * copy.itemsize))
    sizes = (chunk, count, rows, *(axis.size for axis in axes[1:]))
    args = (copy.source, copy.target, *sizes, *(a.source for a in axes), *(a.target for a in axes))
    return _copy_kernel(queue, "copy_rows", copy), -(-rows // count) * -(-inner // chunk), 1, args


def _plain_copy(queue: Any, copy: Copy) -> _Launch:
    axes = _with_unit_axes(copy, _ALL_AXES)
    inner, rows = axes[-1].size, math.prod(axis.size for axis in axes[:-1])
    chunk, local = _elements_per_item(queue, inner, copy.itemsize)
    sizes = (rows, *(axis.size for axis in axes[1:]))
    args = (copy.source, copy.target, chunk, *sizes, *(a.source for a in axes), *(a.target for a in axes))
    return _copy_kernel(queue, "copy8", copy), rows * -(-inner // chunk), local, args


def _elements_per_item(queue: Any, inner: int, itemsize: int) -> tuple[int, int]:
    """Return the number of elements per work-item and of work-items per group."""
    if not launch.on_cpu_device(queue):
        return 1, 4 * launch.LOCAL_1D
    run = max(1, _CPU_RUN // itemsize)
    return (run, 1) if inner > run // 8 else (inner, launch.LOCAL_1D)


def _transposition(queue: Any, copy: Copy) -> _Launch | None:
    """Return a launch in tiles if source and destination are dense along different axes that are long enough; else ``None``."""
    q = len(copy.axes) - 1
    p = next((i for i, axis in enumerate(copy.axes[:-1]) if axis.source == 1), None)
    if p is None or copy.axes[q].target != 1 or copy.axes[q].source in (0, 1) or len(copy.axes) > 5:
        return None
    fast, slow = copy.axes[p], copy.axes[q]
    if min(fast.size, slow.size) < _LEAST_TILE:
        return None
    batch = [axis for i, axis in enumerate(copy.axes) if i not in (p, q)]
    batch = [CopyAxis(1, 0, 0)] * (3 - len(batch)) + batch
    blocks = -(-fast.size // _TURNED_TILE) * -(-slow.size // _TURNED_TILE) * math.prod(axis.size for axis in batch)
    args = (copy.source, copy.target, fast.size, slow.size, slow.source, fast.target, batch[1].size, batch[2].size,
            *(axis.source for axis in batch), *(axis.target for axis in batch))  # fmt: skip
    if launch.on_cpu_device(queue):
        return _copy_kernel(queue, "transpose_cached", copy), blocks, 1, (*args, blocks)
    return _copy_kernel(queue, "transpose_local", copy), (blocks * _TURNED_TILE, _TURNED_ROWS), (_TURNED_TILE, _TURNED_ROWS), args


def alignment(*tensors: Tensor) -> int:
    """Return the alignment in bytes that all tensors have, at most 16. It is 16 unless a tensor uses the memory of a host array."""
    if all([t.host_ref is None for t in tensors]):
        return 16
    addresses = [t.host_ref.__array_interface__["data"][0] for t in tensors if t.host_ref is not None]
    return math.gcd(16, *addresses)


# ---- doing it


def _copy_block(
    sizes: Sequence[int], src: Tensor, s_start: int, s_strides: Sequence[int], dst: Tensor, d_start: int, d_strides: Sequence[int]
) -> Tensor:
    """Copy a block of ``sizes`` from ``src`` into ``dst`` and return ``dst``. Dtypes must be equal and blocks must not overlap."""
    if 0 in sizes:
        return dst
    if dst.array is not None:
        _strided_array(dst, sizes, d_start, d_strides)[...] = _strided_array(src, sizes, s_start, s_strides)
        return dst
    axes = merge([CopyAxis(*axis) for axis in zip(sizes, s_strides, d_strides, strict=True)])
    copy = Copy(dtypes.DTYPES[src.dtype].itemsize, s_start, d_start, axes)
    _run_copy(dst.queue, widen(copy, alignment(src, dst)), src, dst)
    return dst


copy_block = planned("copy_block", _copy_block)


def _strided_array(x: Tensor, sizes: Sequence[int], start: int, strides: Sequence[int]) -> np.ndarray:
    array = x.array
    assert array is not None
    steps = [stride * array.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[start:], tuple(sizes), steps)


def _take_block(x: Tensor, sizes: Sequence[int], start: int, strides: Sequence[int]) -> Tensor:
    out = Tensor.empty(tuple(sizes), x.dtype, queue=x.queue)
    return _copy_block(sizes, x, start, strides, out, 0, dense(out.shape))


take_block = planned("take_block", _take_block)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` repeated along new and size-one axes; ``x`` itself if its shape is ``shape``. The caller has checked the shapes."""
    return x if tuple(shape) == x.shape else take_block(x, shape, 0, broadcast_strides(x.shape, shape))


def broadcast_strides(shape: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that traverse a contiguous tensor of ``shape`` as if it had the shape ``to``."""
    strides = dense(tuple(shape))
    walked = [0 if n == 1 and wanted != 1 else stride for n, stride, wanted in zip(shape, strides, to[len(to) - len(shape) :], strict=True)]
    return (0,) * (len(to) - len(shape)) + tuple(walked)
