"""Scans along an axis: running sums, and the position of the extreme element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.device import CPUQueue, profile_of
from netcl.core.dtype import DTYPES
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, wrap_array
from netcl.engine import launch
from netcl.engine.map_kernel import CPU_WIDTH, as_compute, from_compute
from netcl.engine.operands import check_out, operand
from netcl.engine.reduction import Shape3, axes_of, folded_shape, sums_of_slices
from netcl.engine.registry import S, op

_SLICE = 1024  # elements from which a slice is worth a work-item of its own
_COMPARED = 16  # elements that a work-item of a CPU compares at a time
_WALK = 64  # elements that one work-item of a work-group walks before another work-group is worth a second launch
_IN_FLIGHT = 8  # elements that a work-item of a work-group loads before it compares them


def _scan_shape(name: str, x: Tensor, axis: Any) -> Shape3:
    if axis is None:
        return Shape3(1, x.size, 1)
    axes = axes_of(name, axis, x.shape)
    if not x.shape:
        return Shape3(1, 1, 1)
    if len(axes) != 1:
        raise ShapeError(message(name, "axis must be one integer", "pass one axis, or none for all elements", axis=axis))
    (a,) = axes
    return Shape3(math.prod(x.shape[:a]), x.shape[a], math.prod(x.shape[a + 1 :]))


def _scan_kernel(name: str, kernel: str, x: Tensor, target: str, compute: str, n: int, **defines: int) -> Any:
    launch.check_double(name, x.queue, (x.dtype, target))
    macros: dict[str, int | str] = {"REAL": compute, "INDEX": launch.index_type(n), **defines}
    return launch.kernel(x.queue, __file__, "scan.cl", kernel, {"X": x.dtype, "Y": target}, macros)


def _slicing(shape: Shape3, queue: Any) -> tuple[int, int]:
    """Return length and number of slices: more than one only if the columns alone leave the device idle."""
    profile = profile_of(queue)
    wanted = (4 if profile.device_type == "cpu" else 256) * profile.max_compute_units
    columns = shape.rows * shape.inner
    slices = max(1, min(-(-wanted // columns), shape.length // _SLICE))
    length = -(-shape.length // slices)
    length = -(-length // CPU_WIDTH) * CPU_WIDTH
    return length, -(-shape.length // length)


def _scan_local_size(queue: Any, items: int) -> int:
    return 1 if profile_of(queue).device_type == "cpu" and items <= 1024 else 64


# ---- cumsum


@op(vjp=lambda F, g, axis, reverse: F.cumsum(g, axis=axis, reverse=not reverse), ref="numpy", amp="float", tol=4,
    samples=[S((257,), axis=0), S((3, 5, 7), axis=1), S((3, 5), axis=-1, reverse=True), S((4000,), axis=0), S((0, 3), axis=1), S((6,))],
    errors=[(S((2, 3), axis=2), r"\[cumsum\] axis must be in range for 2 dimensions, got 2; x.shape=\(2, 3\)")])  # fmt: skip
def cumsum(x: Tensor, axis: int | None = None, reverse: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Running sums along an axis, or over the flattened tensor without one; ``reverse`` runs from the end."""
    x = operand("cumsum", x)
    shape = _scan_shape("cumsum", x, axis)
    row = DTYPES[x.dtype]
    result, compute = (row, row.c_compute) if row.is_float else (DTYPES["int64"], "long")
    target_shape = (x.size,) if axis is None else x.shape
    if isinstance(x.queue, CPUQueue):
        made = _cumsum_numpy(x, axis, reverse, compute, result, target_shape)
        return made if out is None else check_out("cumsum", out, target_shape, result.name).write(made)
    target = Tensor.empty(target_shape, result.name, queue=x.queue) if out is None else check_out("cumsum", out, target_shape, result.name)
    if math.prod(shape):
        _cumsum_cl(x, target, shape, compute, reverse)
    return target


def _cumsum_numpy(x: Tensor, axis: int | None, reverse: bool, compute: str, result: dtypes.DType, shape: tuple[int, ...]) -> Tensor:
    values = as_compute(x, compute)
    wide = np.float64 if values.dtype.kind == "f" else np.int64
    values, along = (values.reshape(-1), 0) if axis is None or not shape else (values, axis)
    flipped = np.flip(values, along) if reverse else values
    with np.errstate(all="ignore"):
        sums = np.cumsum(flipped, along, dtype=wide)
        return from_compute((np.flip(sums, along) if reverse else sums).reshape(shape), shape, result, x.queue, (x,))


def _cumsum_cl(x: Tensor, target: Tensor, shape: Shape3, compute: str, reverse: bool) -> None:
    """Scan in one launch, or in slices: sum each slice, scan these sums, then scan each slice from the sum before it."""
    queue = x.queue
    kernel = _scan_kernel("cumsum", "scan", x, target.dtype, compute, math.prod(shape))
    length, slices = _slicing(shape, queue)
    before = x
    if slices > 1:
        before = _before_slices(x, shape, compute, length, slices, reverse)
    items = shape.rows * slices * shape.inner
    kernel(queue, items, _scan_local_size(queue, items), x, before, target, *shape, length, slices, int(reverse), 0)


def _before_slices(x: Tensor, shape: Shape3, compute: str, length: int, slices: int, reverse: bool) -> Tensor:
    queue = x.queue
    totals = sums_of_slices(x, shape, compute, length)
    before = Tensor.empty(totals.shape, totals.dtype, queue=queue)
    kernel = _scan_kernel("cumsum", "scan", totals, totals.dtype, compute, math.prod(shape))
    sizes = (shape.rows, slices, shape.inner, slices, 1)
    items = shape.rows * shape.inner
    kernel(queue, items, _scan_local_size(queue, items), totals, totals, before, *sizes, int(reverse), 1)
    return before


# ---- argmax, argmin


def _arg(name: str, x: Any, axis: int | None, keepdims: bool, finite: bool = False) -> Tensor:
    x = operand(name, x)
    shape = _scan_shape(name, x, axis)
    axes = tuple(range(x.ndim)) if axis is None else axes_of(name, axis, x.shape)
    result_shape = folded_shape(x.shape, axes, keepdims)
    size = math.prod(result_shape)
    if shape.length == 0 and size:
        raise ShapeError(message(name, "x must have elements along the axis", axis=axis, **{"x.shape": x.shape}))
    if isinstance(x.queue, CPUQueue):
        return _arg_numpy(_finite_place if finite else np.argmin if name == "argmin" else np.argmax, x, axis, result_shape)
    target = Tensor.empty(result_shape, "int64", queue=x.queue)
    if size:
        _arg_cl(name, x, target, shape, finite)
    return target


def _arg_numpy(find: Callable[..., Any], x: Tensor, axis: int | None, shape: tuple[int, ...]) -> Tensor:
    assert x.array is not None
    values = dtypes.decode(x.array, DTYPES[x.dtype])
    if not math.prod(shape):
        return Tensor.empty(shape, "int64", queue=x.queue)
    return wrap_array(np.asarray(find(values, axis=axis), np.int64).reshape(shape), "int64", x.queue)


def _arg_cl(name: str, x: Tensor, target: Tensor, shape: Shape3, finite: bool) -> None:
    queue = x.queue
    columns, profile, lanes = shape.rows * shape.inner, profile_of(queue), 1
    length, slices = _slicing(shape, queue)
    if profile.device_type != "cpu" and slices > 1:  # few long columns: a work-group each, or several where one would take long
        lanes = 1 << (min(1024, int(profile.max_work_group_size)).bit_length() - 1)
        if shape.length > _WALK * lanes:
            lanes = min(lanes, 256)
            slices = min(slices, _IN_FLIGHT * lanes, -(-shape.length // (_IN_FLIGHT * lanes)))
        else:
            slices = 1
        length = -(-shape.length // slices)

    def built(kernel: str, **macros: int) -> Any:
        compute, smallest = DTYPES[x.dtype].c_compute, int(name == "argmin")
        return _scan_kernel(name, kernel, x, x.dtype, compute, math.prod(shape), SMALLEST=smallest, **macros)

    ends = int(finite and slices == 1)
    winners = target if slices == 1 else Tensor.empty((shape.rows, slices, shape.inner), "int64", queue=queue)
    at_once = _COMPARED if shape.inner == 1 else min(_COMPARED, 1 << (shape.inner.bit_length() - 1))
    if profile.device_type == "cpu" and (shape.inner > 1 or shape.length >= 2 * at_once):
        items = shape.rows * slices * -(-shape.inner // at_once)
        built("extreme_at_once", AT_ONCE=at_once)(queue, items, _scan_local_size(queue, items), x, winners, *shape, length, slices, ends)
    else:
        local = lanes if lanes > 1 else _scan_local_size(queue, columns * slices)
        built("extreme", LANES=lanes)(queue, columns * slices * lanes, local, x, winners, winners, *shape, length, slices, 0, ends)
    if slices > 1:
        local = lanes if lanes > 1 else _scan_local_size(queue, columns)
        built("extreme", LANES=lanes)(queue, columns * lanes, local, x, winners, target, *shape, length, slices, 1, int(finite))


def _finite_place(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.where(np.isfinite(x.max(axis)), x.argmax(axis), -1)


_ARG_SAMPLES = [S((257,)), S((3, 5, 7), axis=1), S((2, 40, 37), axis=1), S((3, 5), axis=-1, keepdims=True), S((5000,)),
                S((9,), dtypes="int32", high=3, low=0)]  # fmt: skip


@op(vjp=None, ref=lambda x, axis=None, keepdims=False: np.argmax(x, axis=axis, keepdims=keepdims), samples=_ARG_SAMPLES,
    errors=[(S((0,)), r"\[argmax\] x must have elements along the axis; axis=None, x.shape=\(0,\)")])  # fmt: skip
def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position of the largest element as int64, the first of equals; NaN is larger than all. Without an axis: in the flattened tensor."""
    return _arg("argmax", x, axis, keepdims)


@op(vjp=None, ref=lambda x, axis=None, keepdims=False: np.argmax(x, axis=axis, keepdims=keepdims), samples=_ARG_SAMPLES,
    errors=[(S((0,)), r"\[finite_argmax\] x must have elements along the axis; axis=None, x.shape=\(0,\)")])  # fmt: skip
def finite_argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """:func:`argmax`, but -1 where the largest element is infinite or NaN."""
    return _arg("finite_argmax", x, axis, keepdims, True)


@op(vjp=None, ref=lambda x, axis=None, keepdims=False: np.argmin(x, axis=axis, keepdims=keepdims), samples=_ARG_SAMPLES,
    errors=[(S((0,)), r"\[argmin\] x must have elements along the axis; axis=None, x.shape=\(0,\)")])  # fmt: skip
def argmin(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position of the smallest element as int64, the first of equals; NaN is smaller than all. Without an axis: in the flattened tensor."""
    return _arg("argmin", x, axis, keepdims)
