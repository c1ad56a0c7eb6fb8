"""Sorting: stable; NaN counts as the largest value, as in NumPy and torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.device import profile_of
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch
from netcl.engine.registry import S, composite, op
from netcl.engine.strided import dense, take_block
from netcl.ops.movement import along, reorder
from netcl.ops.pointwise import cast

MOST = 64  # largest k for which topk does not sort everything
_LONG = 1024  # minimum elements of an axis for which that pays
LOCAL_PER_UNIT = 64  # work-items that keep a compute unit of a GPU busy
INSERTION_RUN = 16  # elements that a work-item sorts by insertion
_CHUNK = {True: 4096, False: 16}  # elements a work-item merges: on a CPU, on a GPU


class Ordered(NamedTuple):
    """Values along an axis, and their indices in the input along that axis."""

    values: Tensor
    indices: Tensor


def ordered(F: Any, x: Tensor, axis: int | np.integer, indices: Tensor, keepdims: bool = True) -> Ordered:
    """Return the values of ``x`` at ``indices`` along an axis, and the indices; without ``keepdims``, drop the axis, of size 1."""
    values = F.gather(x, axis, indices) if x.shape else F.clone(x)
    return Ordered(values, indices) if keepdims or not x.shape else Ordered(F.squeeze(values, axis), F.squeeze(indices, axis))


def _sort_kernel(queue: Any, name: str, dtype: str) -> Any:
    row = dtypes.DTYPES[dtype]
    wide, unsigned = row.itemsize == 8, row.name in ("uint32", "uint64")
    macros = {"KEY": "ulong" if wide else "uint", "KIND": (2 if wide else 1) if row.is_float else 3 if unsigned else 0}
    return launch.kernel(queue, __file__, "sort.cl", name, {"X": dtype}, macros)


def _sort_keys(x: Tensor, descending: bool = False) -> Tensor:
    """Return unsigned keys that sort like ``x``, or in reverse if ``descending``: int64 for dtypes of 8 bytes, else int32."""
    keys = Tensor.empty(x.shape, "int64" if dtypes.DTYPES[x.dtype].itemsize == 8 else "int32", queue=x.queue)
    _sort_kernel(x.queue, "make_keys", x.dtype)(x.queue, x.size, launch.LOCAL_1D, x, keys, x.size, int(descending))
    return keys


def sort_keys(keys: Tensor, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """Sort every row of unsigned keys (held in an int32 or int64 tensor); returns the keys and their source positions (int32)."""
    queue, dtype = keys.queue, "int64" if keys.dtype == "int64" else "int32"
    sorted_, order = (Tensor.empty((rows, n), kind, queue=queue) for kind in (dtype, "int32"))
    items = rows * -(-n // INSERTION_RUN)
    _sort_kernel(queue, "sort_blocks", dtype)(queue, items, launch.LOCAL_1D, keys, sorted_, order, rows, n)
    on_cpu = launch.on_cpu_device(queue)
    chunk = min(_CHUNK[on_cpu], n)
    run, spare = INSERTION_RUN, None
    while run < n:
        spare = spare or tuple(Tensor.empty((rows, n), kind, queue=queue) for kind in (dtype, "int32"))
        merge = _sort_kernel(queue, "merge_runs", dtype)
        merge(queue, rows * -(-n // chunk), 1 if on_cpu else launch.LOCAL_1D, sorted_, order, *spare, rows, n, run, chunk)
        (sorted_, order), spare = spare, (sorted_, order)
        run *= 2
    return sorted_, order


def _numpy_keys(values: np.ndarray, descending: bool) -> np.ndarray:
    """Return the rank of each value, negated if ``descending``. Equal values have equal ranks, so a stable sort keeps their order."""
    _, ranks = np.unique(values, return_inverse=True, equal_nan=True)
    ranks = ranks.reshape(values.shape)
    return -ranks if descending else ranks


@op(
    vjp=None,
    ref="numpy",
    samples=[
        S((7,)),
        S((3, 40), descending=True),
        S((33, 4), axis=0),
        S((2, 3, 5), axis=1),
        S((1,)),
        S((0, 3), axis=0),
        S((300,), dtypes="int32", low=-9, high=9),
    ],
    errors=[(S((3, 2), axis=2), r"\[argsort\] axis must be in range for 2 dimensions, got 2")],
)
def argsort(x: Tensor, axis: int = -1, descending: bool = False) -> Tensor:
    """The int64 indices that sort along an axis; equal values keep their order, NaN counts as the largest value."""
    (x,) = launch.as_tensors("argsort", x)
    at = launch.check_axis("argsort", axis, x.ndim)
    if x.array is not None:
        return launch.run_cpu(
            lambda v: np.argsort(_numpy_keys(v, descending), at, kind="stable") if v.ndim else np.zeros((), int), x, dtype="int64"
        )
    if x.size == 0 or not x.shape:
        return Tensor.zeros(x.shape, "int64", queue=x.queue)
    back = [*range(at), *range(at + 1, x.ndim), at]
    moved = x if at == x.ndim - 1 else reorder(x, back)
    n = moved.shape[-1]
    _, order = sort_keys(_sort_keys(moved, descending), x.size // n, n)
    out = cast(with_shape(order, moved.shape), "int64")
    return out if moved is x else reorder(out, np.argsort(back).tolist())


@composite(
    ref="numpy",
    samples=[S((7,)), S((3, 40), descending=True), S((33, 4), axis=0)],
    errors=[(S((3, 2), axis=2), r"\[argsort\] axis must be in range for 2 dimensions, got 2")],
)
def sort(F: Any, x: Tensor, axis: int = -1, descending: bool = False) -> Ordered:
    """The values in order along an axis, and their indices. Stable; NaN counts as the largest value.

    >>> from netcl import ops
    >>> values, indices = ops.sort(Tensor.from_host([3.0, 1.0, 2.0]))
    >>> values.tolist(), indices.tolist()
    ([1.0, 2.0, 3.0], [1, 2, 0])
    """
    (x,) = launch.as_tensors("sort", x)
    return ordered(F, x, axis, F.argsort(x, axis, descending))


@op(
    vjp=None,
    ref="numpy",
    samples=[S((9,), k=3), S((3, 3000), k=7), S((5000, 2), k=64, axis=0, largest=False), S((2, 1500), k=65), S((4, 5), k=0)],
    errors=[(S((3, 2), k=3), r"\[topk\] k must be from 0 to 2, the size of the axis; k=3, axis=-1, x\.shape=\(3, 2\)")],
)
def top_indices(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> Tensor:
    """Return the positions of the ``k`` largest (or smallest) values along an axis, in order; int64. Of equal values the first is taken."""
    (x,) = launch.as_tensors("topk", x)
    at = launch.check_axis("topk", axis, x.ndim)
    if not x.shape or not 0 <= k <= x.shape[at]:
        what = f"k must be from 0 to {x.shape[at]}, the size of the axis" if x.shape else "x must have at least one dimension"
        raise ShapeError(message("topk", what, k=k, axis=axis, **{"x.shape": x.shape}))
    n = x.shape[at]
    if x.array is not None or not 0 < k <= MOST or n < _LONG or not x.size:
        order = argsort(x, at, largest)
        return take_block(order, along(x.ndim, at, k, x.shape), 0, dense(x.shape))
    back = [*range(at), *range(at + 1, x.ndim), at]
    moved = x if at == x.ndim - 1 else reorder(x, back)
    out = with_shape(_top_rows(_sort_keys(moved, largest), x.size // n, n, k), (*moved.shape[:-1], k))
    return out if moved is x else reorder(out, np.argsort(back).tolist())


def _top_rows(keys: Tensor, rows: int, n: int, k: int) -> Tensor:
    """Return the positions of the ``k`` smallest keys of every row, found among the ``k`` smallest of each part of the row."""
    queue, on_cpu = keys.queue, launch.on_cpu_device(keys.queue)
    items = 4 * profile_of(queue).max_compute_units * (1 if on_cpu else LOCAL_PER_UNIT)
    chunk = max(4 * k, -(-n // max(1, items // rows)), 512)
    parts = max(1, n // chunk)
    best, from_ = (Tensor.empty((rows, parts * k), kind, queue=queue) for kind in (keys.dtype, "int32"))
    kernel = _sort_kernel(queue, "least_of_parts", keys.dtype)
    kernel(queue, rows * parts, 1 if on_cpu else launch.LOCAL_1D, keys, best, from_, rows, n, parts, chunk, k)
    _, order = sort_keys(best, rows, parts * k)
    out = Tensor.empty((rows, k), "int64", queue=queue)
    _sort_kernel(queue, "pick", keys.dtype)(queue, out.size, launch.LOCAL_1D, order, from_, out, out.size, parts * k, k)
    return out


@composite(
    ref="numpy",
    samples=[S((9,), k=3), S((3, 40), k=1), S((6, 4), k=2, axis=0, largest=False), S((5,), k=5), S((5,), k=0)],
    errors=[(S((3, 2), k=3), r"\[topk\] k must be from 0 to 2, the size of the axis; k=3, axis=-1, x\.shape=\(3, 2\)")],
)
def topk(F: Any, x: Tensor, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Ordered:
    """Return the ``k`` largest (or smallest) values along an axis and their indices, always in order; ``sorted`` is ignored."""
    (x,) = launch.as_tensors("topk", x)
    return ordered(F, x, axis, F.top_indices(x, k, axis, largest))


@op(
    vjp=None,
    ref=lambda x, values, invert=False: np.isin(x, values, invert=invert),
    samples=[
        S((5, 7), (9,), dtypes="int64", low=0, high=20),
        S((5, 7), (0,), dtypes="int64", low=0, high=20),
        S((40,), (3, 11), dtypes="int32", low=-9, high=20, invert=True),
    ],
    errors=[(S((3,), (2,), dtypes=("int64", "float32"), high=5), r"\[isin\] x and values must have the same dtype; x=int64")],
)
def isin(x: Tensor, values: Tensor, invert: bool = False) -> Tensor:
    """Return, for every element of ``x``, whether it is among ``values`` (NaN never is); ``invert`` negates the result."""
    x, values = launch.as_tensors("isin", x, values)
    if x.dtype != values.dtype:
        raise ShapeError(message("isin", "x and values must have the same dtype", "cast one first", x=x.dtype, values=values.dtype))
    if x.array is not None:
        return launch.run_cpu(lambda a, b: np.isin(a, b, invert=invert), x, values, dtype="bool")
    if x.size == 0 or values.size == 0:
        return Tensor.full(x.shape, invert, "bool", queue=x.queue)
    known, _ = sort_keys(_sort_keys(values), 1, values.size)
    out = Tensor.empty(x.shape, "bool", queue=x.queue)
    args = (_sort_keys(x), known, out, x.size, values.size, int(invert))
    _sort_kernel(x.queue, "search", x.dtype)(x.queue, x.size, launch.LOCAL_1D, *args)
    return out
