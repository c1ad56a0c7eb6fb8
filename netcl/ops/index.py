"""Gathering and adding by index. Sums are deterministic: they use no atomics.

An index out of range in a list or an array, or with the NumPy backend, raises ``IndexError`` at once. Indices in a device tensor are
checked without waiting for the device. Kernels skip invalid indices (reads give zeros, additions do nothing) and set a flag, which
:func:`check_indices` turns into the error. With ``NETCL_DEBUG`` of 1 or more, these ops check the flag right away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import env, recording
from netcl.core.backend.cpu import storage_of
from netcl.core.commands import constant
from netcl.core.device import queue_of
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.queue_state import queue_state
from netcl.core.tensor import Tensor, duplicate, wrap_array
from netcl.engine import launch
from netcl.engine.operands import common_shape
from netcl.engine.registry import S, composite, op
from netcl.engine.strided import ELEMENTS, broadcast_to, copy_block, dense, widen_rows
from netcl.ops.movement import along
from netcl.ops.sort import sort_keys

_MANY_COLUMNS = {True: 16, False: 4096}  # elements per work-item: on a CPU, on a GPU
_LANES = {True: 16, False: 1}
_BLOCK = 1024  # elements a work-item counts in nonzero
_CPU_ROW = 1 << 14  # elements of a row that a work-item of a CPU copies


# ---- indices


class Faults:
    """The out-of-range flag of a queue, and a code for each op and size that uses it."""

    def __init__(self, queue: Any):
        self.flag = constant(Tensor.zeros((1,), "int32", queue=queue))
        self.codes: dict[tuple[str, int], int] = {}
        self.pending = False

    def next(self, name: str, size: int) -> tuple[Tensor, int]:
        """Return the flag, and the code that a kernel writes to it if an index is out of range."""
        recording.again(self._expect)
        return self.flag, self.codes.setdefault((name, size), len(self.codes) + 1)

    def _expect(self) -> None:
        self.pending = True

    def check(self) -> None:
        """Wait for the device; raise ``IndexError`` if an index was out of range since the last check."""
        self.pending = read = False  # first, because reading the flag calls this again
        try:
            code = int(self.flag.to_host()[0])
            read = True
        finally:
            self.pending = not read  # an index out of range has not been raised yet
        if not code:
            return
        self.flag.fill_(0)
        name, size = list(self.codes)[code - 1]
        raise IndexError(message(name, "an index in a tensor is out of range", "NETCL_DEBUG=1 raises this in the failing call", size=size))


def faults_of(queue: Any) -> Faults:
    """Return the :class:`Faults` of a queue, created at first use and stored on it."""
    try:
        return queue.netcl.faults
    except AttributeError:
        with recording.paused():
            return queue_state(queue).part("faults", Faults)


def check_indices(queue: Any = None) -> None:
    """Raise ``IndexError`` if an index in a tensor was out of range; waits for the device if there are unchecked indices."""
    faults = getattr(queue_state(queue_of(queue)), "faults", None)
    if faults is not None and faults.pending:
        faults.check()


def _check_in_debug(queue: Any) -> None:
    if env.value("NETCL_DEBUG") >= 1:
        faults_of(queue).check()


def indices(name: str, index: Any, like: Tensor, size: int, wrap: bool = False) -> Tensor:
    """Convert an index-like value to an integer tensor on the device of ``like``; values on the host are checked."""
    if isinstance(index, Tensor):
        (_, index) = launch.as_tensors(name, like, index)
        if index.dtype not in launch.INTEGERS:
            what, remedy = "index must be a tensor of integers", 'cast it: index.to("int64")'
            raise DtypeError(message(name, what, remedy, dtype=index.dtype, shape=index.shape))
        if index.array is None:
            return index
        host = index.array
    else:
        host = np.asarray(index)
        host = host.astype(np.int64) if not host.size else host
    return Tensor.from_host(like.queue, check_host(name, host, size, wrap))


def check_host(name: str, host: np.ndarray, size: int, wrap: bool = False) -> np.ndarray:
    """Return host indices as int64. ``wrap``: negative ones count from the end. ``IndexError`` names the first index out of range."""
    if host.dtype.kind not in "iu":
        raise DtypeError(message(name, "index must consist of integers", dtype=host.dtype, shape=host.shape))
    wide = host.astype(np.int64)
    bad = (wide < (-size if wrap else 0)) | (wide >= size)
    if bad.any():
        raise IndexError(message(name, f"index {int(wide[bad].flat[0])} is out of range", size=size))
    return np.where(wide < 0, wide + size, wide) if wrap else wide


def _index_kernel(queue: Any, name: str, index: str, dtype: str = "float32", **defines: Any) -> Any:
    return launch.kernel(queue, __file__, "index.cl", name, {"IDX": index, "X": dtype}, defines)


def _around_axis(name: str, x: Tensor, axis: int) -> tuple[int, int, int, int]:
    """Return the axis, and the sizes before, along and after it."""
    if not x.shape:
        raise ShapeError(message(name, "x must have at least one dimension to index, got 0"))
    at = launch.check_axis(name, axis, x.ndim)
    return at, math.prod(x.shape[:at]), x.shape[at], math.prod(x.shape[at + 1 :])


# ---- rows


def take_rows(name: str, x: Tensor, index: Tensor, outer: int, n: int, inner: int, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with ``out[o, l] = x[o, index[l]]`` for rows of ``inner`` elements."""
    if x.array is not None and index.array is not None:
        rows = np.take(x.array.reshape(outer, n, inner), index.array.reshape(-1), axis=1)
        return wrap_array(rows.reshape(shape), x.dtype, x.queue)
    out = Tensor.empty(shape, x.dtype, queue=x.queue)
    if not out.size:
        return out
    if not n:
        raise IndexError(message(name, "x must have elements along the axis", size=0))
    itemsize, wide = widen_rows(x, out, inner)
    chunk = min(wide, _CPU_ROW) if launch.on_cpu_device(x.queue) else 1
    total = outer * index.size
    kernel = _index_kernel(x.queue, "take_rows", index.dtype, T=ELEMENTS[itemsize])
    args = (x, index, out, *faults_of(x.queue).next(name, n), total, n, index.size, wide, chunk)
    kernel(x.queue, total * -(-wide // chunk), launch.LOCAL_1D, *args)
    _check_in_debug(x.queue)
    return out


@op(
    vjp=lambda F, g, x_shape, axis, index: (F.index_add(Tensor.zeros(x_shape, g.dtype, queue=g.queue), axis, index, g), None),
    ref=lambda x, axis, index: np.take(x, index, axis),
    samples=[
        S((5, 3), 0, np.array([4, 0, 0, 2])),
        S((2, 5, 4), 1, np.array([1, 1, 3], np.int32)),
        S((3, 7), -1, np.array([6])),
        S((3, 7), 0, np.zeros(0, np.int64)),
    ],
    errors=[
        (S((5, 3), 0, np.array([[1]])), r"\[index_select\] index must have one dimension; index\.shape=\(1, 1\)"),
        (S((5, 3), 0, np.array([1.0])), r"\[index_select\] index must be a tensor of integers"),
    ],
)
def index_select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Select slices along an axis by ``index``, in the order of the indices."""
    (x,) = launch.as_tensors("index_select", x)
    at, outer, n, inner = _around_axis("index_select", x, axis)
    index = indices("index_select", index, x, n)
    if index.ndim != 1:
        raise ShapeError(message("index_select", "index must have one dimension", **{"index.shape": index.shape}))
    return take_rows("index_select", x, index, outer, n, inner, along(x.ndim, at, index.size, x.shape))


def add_rows(name: str, out: Tensor, index: Tensor, src: Tensor, outer: int, n: int, inner: int, skipped: int = -1) -> Tensor:
    """Compute ``out[o, index[l]] += src[o, l]`` for rows, in place, and return ``out``; rows with the index ``skipped`` are not added."""
    if out.array is not None:
        return _add_numpy(out, index.array.reshape(-1), src, outer, n, inner, skipped)  # type: ignore[union-attr]
    if not src.size or not n:
        return out
    _add_sorted(out, _scatter_keys(name, index, n, index.size, 1, n, skipped), src, outer, index.size, n, inner)
    _check_in_debug(out.queue)
    return out


def _key_type(keys: Tensor) -> str:
    return "uint" if keys.dtype == "int32" else "ulong"


def _scatter_keys(name: str, index: Tensor, n: int, count: int, inner: int, nowhere: int, skipped: int = -1) -> Tensor:
    """Return the number of the element that each index of a scatter names, as a sort key: unsigned, in an int32 or int64 tensor.

    ``count`` and ``inner`` are the sizes of ``index`` along and after the axis, whose size in the target is ``n``. The key is ``nowhere``
    for an index that is out of range or equal to ``skipped``.
    """
    queue, total = index.queue, index.size
    keys = Tensor.empty((total,), "int32" if nowhere < 2**32 - 1 else "int64", queue=queue)
    kernel = _index_kernel(queue, "scatter_keys", index.dtype, KEY=_key_type(keys))
    kernel(queue, total, launch.LOCAL_1D, index, keys, *faults_of(queue).next(name, n), total, n, count, inner, nowhere, skipped)
    return keys


def _add_sorted(out: Tensor, keys: Tensor, src: Tensor, outer: int, count: int, n: int, inner: int) -> None:
    queue, lanes = out.queue, _LANES[launch.on_cpu_device(out.queue)]
    ordered, order = sort_keys(keys, 1, count)
    items = outer * count * -(-inner // lanes)
    kernel = _index_kernel(queue, "add_sorted", "int64", out.dtype, KEY=_key_type(keys), LANES=lanes)
    kernel(queue, items, launch.LOCAL_1D, out, ordered, order, src, count, n, inner, items)


def _add_numpy(out: Tensor, index: np.ndarray, src: Tensor, outer: int, n: int, inner: int, skipped: int) -> Tensor:
    """Add rows of ``src`` to ``out`` by index, in place, with ``reduceat``, which is faster than ``np.add.at``. Returns ``out``."""
    row = dtypes.DTYPES[out.dtype]
    wide = launch.decoded(out).reshape(outer, n, inner).copy()
    values = launch.decoded(src).reshape(outer, index.size, inner)
    keep = np.flatnonzero(index != skipped)
    order = keep[np.argsort(index[keep], kind="stable")]
    if order.size and inner and outer:
        where, starts = np.unique(index[order], return_index=True)
        wide[:, where] += np.add.reduceat(values[:, order], starts, axis=1, dtype=wide.dtype)
    np.copyto(out.array, dtypes.encode(wide.reshape(out.shape), row))  # type: ignore[arg-type]
    return out


@op(
    vjp=lambda F, g, axis, index: (g, None, F.index_select(g, axis, index)),
    ref="numpy",
    samples=[
        S((5, 3), 0, np.array([4, 0, 0, 2]), (4, 3)),
        S((2, 4, 3), 1, np.array([1, 1, 1, 1, 0], np.int32), (2, 5, 3)),
        S((40,), 0, np.arange(300) % 7, (300,)),
        S((3, 2), 0, np.zeros(0, np.int64), (0, 2)),
    ],
    errors=[(S((5, 3), 0, np.array([1, 2]), (3, 3)), r"\[index_add\] index must have one dimension, and src one slice per index; ")],
)
def index_add(x: Tensor, axis: int, index: Tensor, src: Tensor) -> Tensor:
    """Return ``x`` with the slices of ``src`` added at ``index``, which may name a slice several times; ``x`` stays unchanged."""
    x, src = launch.as_tensors("index_add", x, src)
    launch.check_dtype("index_add", x, launch.NUMBERS)
    at, outer, n, inner = _around_axis("index_add", x, axis)
    index = indices("index_add", index, x, n)
    expected = along(x.ndim, at, index.size, x.shape)
    if src.shape != expected or index.ndim != 1:
        what, shapes = "index must have one dimension, and src one slice per index", {"src.shape": src.shape, "index.shape": index.shape}
        raise ShapeError(message("index_add", what, **shapes, expected=expected))
    _check_same_dtype("index_add", x, src)
    return add_rows("index_add", duplicate(x), index, src, outer, n, inner)


def _check_same_dtype(name: str, x: Tensor, src: Tensor) -> None:
    if x.dtype != src.dtype:
        raise DtypeError(message(name, "x and src must have the same dtype", "cast one first", x=x.dtype, src=src.dtype))


# ---- embedding


@op(
    vjp=lambda F, g, index, weight_shape, padding_idx: (None, F.embedding_grad(g, index, weight_shape[0], padding_idx)),
    ref="numpy",
    samples=[
        S((4,), (7, 3), dtypes=("int64", None), low=(0, -1.0), high=(7, 1.0)),
        S((2, 5), (6, 16), dtypes=("int32", None), low=(0, -1.0), high=(6, 1.0)),
        S((0,), (6, 2), dtypes=("int64", None), low=(0, -1.0), high=(6, 1.0)),
    ],
    errors=[
        (S((3,), (7, 3)), r"\[embedding\] index must be a tensor of integers"),
        (S((3,), (7,), dtypes=("int64", None), low=0, high=2), r"\[embedding\] weight must be a matrix; weight\.shape=\(7,\)"),
    ],
)
def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of ``weight`` that ``index`` names. The row ``padding_idx`` gets no gradient."""
    (weight,) = launch.as_tensors("embedding", weight)
    if weight.ndim != 2:
        raise ShapeError(message("embedding", "weight must be a matrix", **{"weight.shape": weight.shape}))
    index = indices("embedding", index, weight, weight.shape[0])
    count, width = weight.shape
    return take_rows("embedding", weight, index, 1, count, width, (*index.shape, width))


def _embedding_grad_vjp(F, g, index, x_dtype, padding_idx):
    rows = F.embedding(index, g)
    if padding_idx is None:
        return rows, None
    kept = F.cast(F.ne(index, padding_idx), x_dtype)
    return F.mul(rows, F.unsqueeze(kept, -1)), None


@op(
    vjp=_embedding_grad_vjp,
    ref="numpy",
    samples=[
        S((4, 3), np.array([2, 0, 2, 6]), count=7),
        S((2, 5, 40), np.array([[1, 1, 1, 0, 3], [3, 2, 1, 1, 0]], np.int32), count=6, padding_idx=1),
    ],
)
def embedding_grad(x: Tensor, index: Tensor, count: int, padding_idx: int | None = None) -> Tensor:
    """Compute the gradient of ``embedding``: the rows of ``x`` summed by index into ``count`` rows; row ``padding_idx`` stays 0."""
    (x,) = launch.as_tensors("embedding_grad", x)
    index = indices("embedding_grad", index, x, count)
    out = Tensor.zeros((count, x.shape[-1]), x.dtype, queue=x.queue)
    return add_rows("embedding_grad", out, index, x, 1, count, x.shape[-1], -1 if padding_idx is None else padding_idx % count)


# ---- elements


def _along_axis(name: str, x: Tensor, axis: int, index: Any, src: Tensor | None = None) -> tuple[int, Tensor]:
    at, _, n, _ = _around_axis(name, x, axis)
    index = indices(name, index, x, n)
    fits = index.ndim == x.ndim and all(i == at or a <= b for i, (a, b) in enumerate(zip(index.shape, x.shape, strict=True)))
    fits = fits and (src is None or (src.ndim == x.ndim and all(a <= b for a, b in zip(index.shape, src.shape, strict=True))))
    if not fits:
        shapes = {"index.shape": index.shape, "x.shape": x.shape} | ({} if src is None else {"src.shape": src.shape})
        what = "index must have as many dimensions as x and fit into it except along the indexed axis"
        what += "" if src is None else ", and src must have as many dimensions and at least the sizes of index"
        raise ShapeError(message(name, what, **shapes, axis=axis))
    return at, index


def _corner(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the corner of ``x`` that has ``shape``: the first elements along every axis."""
    if tuple(shape) == x.shape:
        return x
    out = Tensor.empty(tuple(shape), x.dtype, queue=x.queue)
    copy_block(shape, x, 0, dense(x.shape), out, 0, dense(shape))
    return out


@op(
    vjp=lambda F, g, x_shape, axis, index: (F.scatter_add(Tensor.zeros(x_shape, g.dtype, queue=g.queue), axis, index, g), None),
    ref="numpy",
    samples=[
        S((4, 3), 0, np.array([[3, 0, 1], [0, 0, 2]])),
        S((2, 5), 1, np.array([[4], [2]], np.int32)),
        S((3, 4, 5), -1, np.array([[[1, 0]], [[4, 4]]])),
        S((2, 3), 1, np.zeros((2, 0), np.int64)),
    ],
    errors=[
        (
            S((4, 3), 0, np.array([1, 2])),
            r"\[gather\] index must have as many dimensions as x and fit into it except along the indexed axis",
        ),
        (S((4, 3), 2, np.array([[1]])), r"\[gather\] axis must be in range for 2 dimensions, got 2"),
    ],
)
def gather(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Read ``x`` at one index per element of the result, along an axis: ``out[i][j] = x[index[i][j]][j]`` for axis 0."""
    (x,) = launch.as_tensors("gather", x)
    at, index = _along_axis("gather", x, axis, index)
    x = _corner(x, along(x.ndim, at, x.shape[at], index.shape))
    if x.array is not None:
        picked = np.take_along_axis(x.array, index.array, at)  # type: ignore[arg-type]
        return wrap_array(picked, x.dtype, x.queue)
    out = Tensor.empty(index.shape, x.dtype, queue=x.queue)
    if not out.size:
        return out
    if not x.shape[at]:
        raise IndexError(message("gather", "x must have elements along the axis", size=0))
    inner = math.prod(x.shape[at + 1 :])
    kernel = _index_kernel(x.queue, "gather", index.dtype, T=ELEMENTS[dtypes.DTYPES[x.dtype].itemsize])
    flag, code = faults_of(x.queue).next("gather", x.shape[at])
    kernel(x.queue, out.size, launch.LOCAL_1D, x, index, out, flag, code, out.size, x.shape[at], index.shape[at], inner)
    _check_in_debug(x.queue)
    return out


def _scatter_add_vjp(F, g, axis, index, src_shape):
    picked = F.gather(g, axis, index)
    if picked.shape != src_shape:
        picked = F.strided_unslice(picked, src_shape, (0,) * len(src_shape), (1,) * len(src_shape))
    return g, None, picked


@op(
    vjp=_scatter_add_vjp,
    ref="numpy",
    samples=[
        S((4, 3), 0, np.array([[3, 0, 1], [0, 0, 1]]), (2, 3)),
        S((2, 5), 1, np.array([[4, 4, 4]], np.int32), (2, 4)),
        S((3, 20, 7), 1, np.random.default_rng(0).integers(0, 20, (3, 33, 7)), (3, 33, 7)),
        S((3, 2), 0, np.zeros((0, 2), np.int64), (0, 2)),
    ],
    errors=[(S((4, 3), 0, np.array([[1, 2]]), (1, 1)), r"\[scatter_add\] index must have as many .* and src must have as many dimensions")],
)
def scatter_add(x: Tensor, axis: int, index: Tensor, src: Tensor) -> Tensor:
    """Return ``x`` with ``src`` added at ``index`` along an axis: ``out[index[i][j]][j] += src[i][j]`` for axis 0; indices may repeat."""
    x, src = launch.as_tensors("scatter_add", x, src)
    launch.check_dtype("scatter_add", x, launch.NUMBERS)
    _check_same_dtype("scatter_add", x, src)
    at, index = _along_axis("scatter_add", x, axis, index, src)
    whole, src = duplicate(x), _corner(src, index.shape)
    region = along(x.ndim, at, x.shape[at], index.shape)
    if not index.size or not x.size:
        return whole
    if region == x.shape:
        return _add_at(whole, at, index, src)
    part = _add_at(_corner(x, region), at, index, src)
    copy_block(region, part, 0, dense(region), whole, 0, dense(whole.shape))
    return whole


def _add_at(out: Tensor, at: int, index: Tensor, src: Tensor) -> Tensor:
    """Add ``src`` to ``out`` at ``index``, in place, and return ``out``; all three have equal sizes except along ``at``."""
    outer, n, inner, count = math.prod(out.shape[:at]), out.shape[at], math.prod(out.shape[at + 1 :]), index.shape[at]
    if out.array is not None:
        flat = index.array.reshape(outer, count, inner) * inner + np.arange(inner)  # type: ignore[union-attr]
        flat = flat + (np.arange(outer) * n * inner)[:, None, None]
        return _add_numpy(out, flat.reshape(-1), src, 1, out.size, 1, -1)
    queue, on_cpu = out.queue, launch.on_cpu_device(out.queue)
    if outer * inner >= _MANY_COLUMNS[on_cpu] and out.dtype not in dtypes.HALVES:
        kernel, fault = _index_kernel(queue, "add_columns", index.dtype, out.dtype), faults_of(queue).next("scatter_add", n)
        kernel(queue, outer * inner, launch.LOCAL_1D, out, index, src, *fault, outer * inner, n, count, inner)
    else:
        _add_sorted(out, _scatter_keys("scatter_add", index, n, count, inner, out.size), src, 1, index.size, out.size, 1)
    _check_in_debug(queue)
    return out


# ---- several indices as one, and flat ones


def joined_index(name: str, parts: Sequence[tuple[Any, int]], like: Tensor) -> Tensor:
    """Combine indices of several axes into one flat index; indices broadcast, and negative indices count from the end."""
    on_device = [index for index, _ in parts if isinstance(index, Tensor) and index.array is None]
    shapes = [np.shape(index) if not isinstance(index, Tensor) else index.shape for index, _ in parts]
    shape = common_shape(name, shapes, [f"index{i}" for i in range(len(parts))]) if parts else ()
    strides = dense(tuple([size for _, size in parts]))
    if not on_device:
        hosts = [np.asarray(index.array if isinstance(index, Tensor) else index) for index, _ in parts]
        checked = [check_host(name, host, size, wrap=True) for host, (_, size) in zip(hosts, parts, strict=True)]
        terms = (np.broadcast_to(host, shape) * stride for host, stride in zip(checked, strides, strict=True))
        flat = sum(terms, np.zeros(shape, np.int64))
        return Tensor.from_host(like.queue, flat)
    out = before = Tensor.empty(shape, "int64", queue=like.queue)
    for i, ((index, size), stride) in enumerate(zip(parts, strides, strict=True)):
        whole = broadcast_to(indices(name, index, like, size, wrap=True), shape)
        kernel, fault = _index_kernel(like.queue, "join_index", whole.dtype), faults_of(like.queue).next(name, size)
        out = Tensor.empty(shape, "int64", queue=like.queue)
        kernel(like.queue, out.size, launch.LOCAL_1D, whole, before, out, *fault, out.size, size, stride, int(i == 0))
        before = out
    return out


@composite(
    ref=lambda x, index: np.take(x, index),
    samples=[S((3, 4), np.array([[0, 11], [-1, 5]])), S((5,), np.array(3))],
    errors=[(S((3, 4), np.array([1.5])), r"\[take\] index must be a tensor of integers")],
)
def take(F: Any, x: Tensor, index: Tensor) -> Tensor:
    """Return elements of the flattened tensor, in the shape of ``index``; negative indices count from the end."""
    (x,) = launch.as_tensors("take", x)
    if isinstance(index, Tensor) and index.dtype not in launch.INTEGERS:
        indices("take", index, x, x.size)
    flat = joined_index("take", [(index, x.size)], x)
    picked = F.index_select(F.reshape(x, (x.size,)), 0, F.reshape(flat, (flat.size,)))
    return F.reshape(picked, flat.shape)


# ---- masks


@composite(
    ref=lambda x, mask, value: np.where(mask, value, x),
    samples=[
        S((3, 5), (3, 5), dtypes=(None, "bool"), value=2.5),
        S((2, 3, 5), (3, 5), dtypes=(None, "bool"), value=-1.0),
        S((2, 3, 5), (2, 1, 1), dtypes=(None, "bool"), value=0.0),
        S((2, 3), (), dtypes=(None, "bool"), value=1.0),
    ],
    errors=[
        (S((3, 5), (4, 5), dtypes=(None, "bool"), value=0.0), r"\[masked_fill\] mask must broadcast to x; x\.shape=\(3, 5\)"),
        (S((3, 5), (3, 5), value=0.0), r"\[masked_fill\] mask must have a dtype that this op accepts"),
    ],
)
def masked_fill(F: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Return ``value`` where ``mask`` is true, else ``x``; the mask broadcasts to ``x``."""
    x, mask = launch.as_tensors("masked_fill", x, mask)
    launch.check_dtype("masked_fill", mask, ("bool", "uint8"), "mask")
    lead = len(x.shape) - len(mask.shape)
    if lead < 0 or any(m not in (1, n) for m, n in zip(mask.shape, x.shape[lead:], strict=True)):
        raise ShapeError(message("masked_fill", "mask must broadcast to x", **{"x.shape": x.shape, "mask.shape": mask.shape}))
    if isinstance(value, Tensor):
        return F.where(mask, F.cast(F.reshape(value, ()), x.dtype), x)
    stored, row = storage_of(value, x.dtype, "masked_fill")
    return F.where(mask, dtypes.decode(stored, row).item(), x)  # a number that x holds


def flat_nonzero(x: Tensor) -> Tensor:
    """Return the positions of nonzero elements in the flattened tensor. Waits for the device: their number determines the shape."""
    if x.array is not None:
        return wrap_array(np.flatnonzero(launch.decoded(x)).astype(np.int64), "int64", x.queue)
    blocks = -(-x.size // _BLOCK)
    counts = Tensor.empty((blocks,), "int32", queue=x.queue)
    _index_kernel(x.queue, "count_blocks", "int64", x.dtype)(x.queue, blocks, launch.LOCAL_1D, x, counts, x.size, _BLOCK)
    ends = np.cumsum(counts.to_host(), dtype=np.int64)
    out = Tensor.empty((int(ends[-1]) if blocks else 0,), "int64", queue=x.queue)
    if out.size:
        starts = Tensor.from_host(x.queue, np.concatenate([[0], ends[:-1]]))
        _index_kernel(x.queue, "write_positions", "int64", x.dtype)(x.queue, blocks, launch.LOCAL_1D, x, starts, out, x.size, _BLOCK)
    return out


@op(
    vjp=None,
    ref=lambda x: np.argwhere(x),
    samples=[
        S((3, 5), dtypes="bool"),
        S((3000,), dtypes="int32", low=-1, high=2),
        S((2, 3, 4), dtypes="uint8", low=0, high=2),
        S((0, 2), dtypes="bool"),
        S((), dtypes="bool"),
    ],
    at_once=True,
)
def nonzero(x: Tensor) -> Tensor:
    """Return the coordinates of nonzero elements as int64, a row per element. Waits for the device: their number determines the shape."""
    (x,) = launch.as_tensors("nonzero", x)
    flat = flat_nonzero(x)
    if x.array is not None:
        coordinates = np.stack(np.unravel_index(flat.array, x.shape), 1) if x.shape else np.zeros((flat.size, 0))  # type: ignore[arg-type]
        return wrap_array(coordinates.astype(np.int64), "int64", x.queue)
    out = Tensor.empty((flat.size, x.ndim), "int64", queue=x.queue)
    if out.size:
        kernel = _index_kernel(x.queue, "unravel", "int64")
        for axis, (size, stride) in enumerate(zip(x.shape, dense(x.shape), strict=True)):
            kernel(x.queue, flat.size, launch.LOCAL_1D, flat, out, flat.size, x.ndim, axis, size, stride)
    return out


# ---- one hot


@op(
    vjp=None,
    ref="numpy",
    samples=[
        S((5,), dtypes="int64", low=0, high=4, num_classes=4),
        S((2, 3), dtypes="int32", low=0, high=4),
        S((3,), dtypes="int64", low=0, high=9, num_classes=9, dtype="float32"),
        S((0,), dtypes="int64", low=0, high=2, num_classes=3),
    ],
    errors=[(S((3,)), r"\[one_hot\] index must be a tensor of integers")],
)
def one_hot(index: Tensor, num_classes: int = -1, dtype: str = "int64") -> Tensor:
    """Add a last axis of size ``num_classes`` with 1 at the index and 0 elsewhere; ``num_classes=-1``: the largest index plus one."""
    (index,) = launch.as_tensors("one_hot", index)
    if num_classes < 0:
        values = index.to_host()
        if values.dtype.kind in "iu":
            num_classes = int(values.max()) + 1 if values.size else 0
    row = dtypes.lookup(dtype, "one_hot")
    index = indices("one_hot", index, index, num_classes)
    if index.array is not None:
        hot = index.array[..., None] == np.arange(num_classes)
        return wrap_array(dtypes.encode(hot.astype(row.host), row), row.name, index.queue)
    out = Tensor.empty((*index.shape, num_classes), row.name, queue=index.queue)
    if out.size:
        kernel, fault = _index_kernel(index.queue, "one_hot", index.dtype, row.name), faults_of(index.queue).next("one_hot", num_classes)
        kernel(index.queue, out.size, launch.LOCAL_1D, index, out, *fault, out.size, num_classes)
        _check_in_debug(index.queue)
    return out


# ---- writing


def put_flat(x: Tensor, index: Tensor, values: Tensor) -> None:
    """Write ``x.flat[index] = values`` in place; of several values for one element the last is written."""
    if x.array is not None:
        x.array.reshape(-1)[index.array.reshape(-1)] = values.array.reshape(-1)  # type: ignore[union-attr]
        return
    if not index.size:
        return
    queue, count, keys = x.queue, index.size, _scatter_keys("setitem", index, x.size, index.size, 1, x.size)
    ordered, order = sort_keys(keys, 1, count)
    kernel = _index_kernel(queue, "put_sorted", "int64", T=ELEMENTS[dtypes.DTYPES[x.dtype].itemsize], KEY=_key_type(keys))
    kernel(queue, count, launch.LOCAL_1D, x, ordered, order, values, count, x.size)
    _check_in_debug(queue)
