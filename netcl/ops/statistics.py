"""Order statistics, reductions of two results, and reads and writes at scattered places, made of other ops.

``unique``, ``searchsorted``, ``bucketize`` and ``histc`` compute on the host, as do the lengths that a result's shape depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import launch
from netcl.ops.composed import _at, _tensor
from netcl.ops.registry import S, composite, op
from netcl.ops.sort import Ordered

Axis = int | None


class Extremes(NamedTuple):
    """The least and the largest value."""

    min: Tensor
    max: Tensor


# ---- two results


def _register_with_mean(name: str, ref: Callable[..., Any]) -> None:
    def call(F: Any, x: Tensor, axis: Any = None, keepdims: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
        return getattr(F, name)(x, axis, keepdims=keepdims, correction=correction), F.mean(x, axis, keepdims=keepdims)

    def both(x, axis=None, keepdims=False, correction=1):
        return ref(x, axis, ddof=correction, keepdims=keepdims), np.mean(x, axis, keepdims=keepdims)

    composite(ref=both, name=f"{name}_mean", inputs=("x",), samples=[S((4, 3), axis=0), S((5,), correction=0)], amp="float",
              doc=f"{name} and mean over axes.")(call)  # fmt: skip


_register_with_mean("std", np.std)
_register_with_mean("var", np.var)


@composite(ref=lambda x, axis=None, keepdims=False: (np.min(x, axis, keepdims=keepdims), np.max(x, axis, keepdims=keepdims)),
           samples=[S((4, 3)), S((4, 3), axis=1, keepdims=True)])  # fmt: skip
def aminmax(F: Any, x: Tensor, *, axis: Axis = None, keepdims: bool = False) -> Extremes:
    """The least and the largest value, ``(min, max)``."""
    return Extremes(F.amin(x, axis, keepdims=keepdims), F.amax(x, axis, keepdims=keepdims))


# ---- without NaN

_GAPS = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, np.nan]], np.float32)


@composite(
    ref=lambda x, axis=None, keepdims=False: np.nansum(x, axis, keepdims=keepdims), samples=[S(_GAPS), S(_GAPS, axis=0)], amp="float"
)
def nansum(F: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The sum over axes of what is not NaN."""
    return F.sum(F.masked_fill(x, F.isnan(x), 0), axis, keepdims=keepdims)


@composite(
    ref=lambda x, axis=None, keepdims=False: np.nanmean(x, axis, keepdims=keepdims), samples=[S(_GAPS), S(_GAPS, axis=1)], amp="float"
)
def nanmean(F: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The mean over axes of what is not NaN."""
    return F.div(F.nansum(x, axis, keepdims), F.sum(F.logical_not(F.isnan(x)), axis, keepdims=keepdims))


# ---- order


def _kth_ref(x, k, axis=-1, keepdims=False):
    order = np.take(np.argsort(x, axis, kind="stable"), [k - 1], axis)
    values = np.take_along_axis(x, order, axis)
    return (values, order) if keepdims else (values.squeeze(axis), order.squeeze(axis))


@composite(ref=_kth_ref, samples=[S((4, 3), k=2), S((4, 3), k=4, axis=0, keepdims=True)],
           errors=[(S((4, 3), k=4), r"\[kthvalue\] k must be between 1 and the size of the axis; k=4")])  # fmt: skip
def kthvalue(F: Any, x: Tensor, k: int, axis: int = -1, keepdims: bool = False) -> Ordered:
    """The k-th smallest value along an axis, counted from 1, and its index; NaN counts as the largest."""
    x = _tensor("kthvalue", x)
    at = _at("kthvalue", axis, x.ndim)
    if not 1 <= k <= (x.shape[at] if x.shape else 1):
        raise ShapeError(message("kthvalue", "k must be between 1 and the size of the axis", k=k, axis=axis, **{"x.shape": x.shape}))
    if not x.shape:
        return Ordered(F.clone(x), Tensor.zeros((), "int64", queue=x.queue))
    order = F.narrow(F.argsort(x, at), at, k - 1, 1)
    values = F.gather(x, at, order)
    return Ordered(values, order) if keepdims else Ordered(F.squeeze(values, at), F.squeeze(order, at))


def _median_ref(x, axis=None, keepdims=False):
    if axis is None:
        return _kth_ref(x.ravel(), (x.size + 1) // 2)[0]
    return _kth_ref(x, (x.shape[axis] + 1) // 2, axis, keepdims)


@composite(ref=_median_ref, samples=[S((4, 3)), S((4, 3), axis=0), S((2, 5), axis=-1, keepdims=True)],
           errors=[(S((0,)), r"\[median\] no elements")])  # fmt: skip
def median(F: Any, x: Tensor, axis: Axis = None, keepdims: bool = False) -> Any:
    """The median, of an even number of values the lower one; with an axis also its index, as in torch. One NaN makes it NaN."""
    x = _tensor("median", x)
    if axis is None:
        return F.median(F.reshape(x, (-1,)), 0).values
    at = _at("median", axis, x.ndim)
    if not x.size:
        raise ShapeError(message("median", "no elements", axis=axis, **{"x.shape": x.shape}))
    values, order = F.kthvalue(x, ((x.shape[at] if x.shape else 1) + 1) // 2, at, keepdims)
    if not dtypes.DTYPES[x.dtype].is_float:
        return Ordered(values, order)
    missing = F.isnan(x)
    gone = F.any(missing, at, keepdims=keepdims)
    return Ordered(F.where(gone, math.nan, values), F.where(gone, F.argmax(F.cast(missing, "int32"), at, keepdims), order))


@composite(ref=lambda x, q, axis=None, interpolation="linear", **keep: np.quantile(x, q, axis, method=interpolation, **keep),
           samples=[S((4, 3), q=0.3), S((4, 3), q=(0.0, 0.6, 1.0), axis=0), S((5,), q=0.4, interpolation="lower", axis=0, keepdims=True)],
           amp="float", errors=[(S((3,), q=1.5), r"\[quantile\] q must be between 0 and 1; q=1\.5"),
                                (S((3,), q=0.5, interpolation="cubic"), r"\[quantile\] unknown interpolation")])  # fmt: skip
def quantile(F: Any, x: Tensor, q: Any, axis: Axis = None, keepdims: bool = False, *, interpolation: str = "linear") -> Tensor:
    """The quantiles ``q`` (a number, or several, which become a first axis) along an axis, or of all values."""
    x = _tensor("quantile", x)
    wanted = np.asarray(q, np.float64)
    if ((wanted < 0) | (wanted > 1)).any():
        raise ShapeError(message("quantile", "q must be between 0 and 1", q=q))
    whole = x.shape
    x, at = (F.reshape(x, (-1,)), 0) if axis is None else (x, _at("quantile", axis, x.ndim))
    places = np.atleast_1d(wanted) * (x.shape[at] - 1)
    low, high = np.floor(places), np.ceil(places)
    forms = {"linear": places - low, "lower": 0 * low, "higher": high - low, "midpoint": (high - low) / 2, "nearest": np.rint(places) - low}
    if interpolation not in forms:
        raise ValueError(message("quantile", "unknown interpolation", f"known are {', '.join(forms)}", interpolation=interpolation))
    ordered, side = F.sort(x, at).values, (-1, *(1,) * (x.ndim - 1 - at))
    left, right = (F.index_select(ordered, at, Tensor.from_host(x.queue, ends.astype(np.int64))) for ends in (low, high))
    made = F.lerp(left, right, F.reshape(Tensor.from_host(x.queue, forms[interpolation], x.dtype), side))
    made = F.moveaxis(F.where(F.any(F.isnan(x), at, keepdims=True), math.nan, made), at, 0)
    if keepdims:
        kept = (1,) * len(whole) if axis is None else (*whole[:at], 1, *whole[at + 1 :])
        made = F.reshape(made, (len(places), *kept))
    return made if wanted.ndim else F.squeeze(made, 0)


@composite(ref=lambda x: np.sort(x, 0), samples=[S((4, 3))])
def msort(F: Any, x: Tensor) -> Tensor:
    """The values in order along the first axis."""
    return F.sort(x, 0).values


# ---- reads and writes at scattered places


@composite(ref=lambda x, mask: x[mask], samples=[S((3, 4), (3, 4), dtypes=("float32", "bool"))])
def masked_select(F: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The elements where the mask holds, along one axis. Waits for the device: their number is a shape."""
    x, mask = launch.as_tensors("masked_select", x, mask)
    shape = np.broadcast_shapes(x.shape, mask.shape)
    return F.getitem(F.expand(x, shape), F.expand(mask, shape))


_PLACES: dict[str, Any] = {"dtypes": ("float32", "int64"), "low": 0, "high": 3}


@composite(ref=lambda x, indices, axis=None: np.take_along_axis(x, indices, axis),
           samples=[S((3, 4), (1, 4), **_PLACES, axis=0), S((3, 4), (3, 2), **_PLACES, axis=1)])  # fmt: skip
def take_along_dim(F: Any, x: Tensor, indices: Tensor, axis: Axis = None) -> Tensor:
    """Elements at ``indices`` along an axis (or of the flattened tensor); the other axes broadcast."""
    x, indices = launch.as_tensors("take_along_dim", x, indices)
    if axis is None:
        return F.take(x, indices)
    at = _at("take_along_dim", axis, x.ndim)
    shape = np.broadcast_shapes(*((*t.shape[:at], 1, *t.shape[at + 1 :]) for t in (x, indices)))
    x, indices = (F.expand(t, (*shape[:at], t.shape[at], *shape[at + 1 :])) for t in (x, indices))
    return F.gather(x, at, indices)


def _written(x: np.ndarray, index: Any, value: Any) -> np.ndarray:
    out = x.copy()
    out[index] = value
    return out


def _rows(axis: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, index)


def _like(x: Tensor, values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else Tensor.from_host(x.queue, values, x.dtype)


@composite(ref=lambda x, axis, index, value: _written(x, _rows(axis, index), value), inputs=("x",),
           samples=[S((4, 3), axis=0, index=np.array([2, 0]), value=5.0)])  # fmt: skip
def index_fill(F: Any, x: Tensor, axis: int, index: Any, value: Any) -> Tensor:
    """x with ``value`` in the slices ``index`` along an axis."""
    x = _tensor("index_fill", x, 1)
    return F.setitem(F.clone(x), _rows(_at("index_fill", axis, x.ndim), index), value)


@composite(ref=lambda x, axis, index, src: _written(x, _rows(axis, index), src), inputs=("x",),
           samples=[S((4, 3), axis=1, index=np.array([2, 0]), src=np.ones((4, 2), np.float32))])  # fmt: skip
def index_copy(F: Any, x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """x with the slices of ``src`` at ``index`` along an axis."""
    x = _tensor("index_copy", x, 1)
    return F.setitem(F.clone(x), _rows(_at("index_copy", axis, x.ndim), index), _like(x, src))


@composite(ref=lambda x, indices, values: _written(x, tuple(indices), values), inputs=("x",),
           samples=[S((4, 3), indices=(np.array([2, 0]), np.array([1, 1])), values=7.0)])  # fmt: skip
def index_put(F: Any, x: Tensor, indices: Sequence[Any], values: Any) -> Tensor:
    """x with ``values`` at ``x[indices]``."""
    return F.setitem(F.clone(x), tuple(indices), values)


@composite(ref=lambda x, mask, source: _written(x, mask, np.ravel(source)[: mask.sum()]), inputs=("x",),
           samples=[S((2, 2), mask=np.array([[True, False], [False, True]]), source=np.arange(3, dtype=np.float32))])  # fmt: skip
def masked_scatter(F: Any, x: Tensor, mask: Any, source: Any) -> Tensor:
    """x with the elements of ``source``, in order, where the mask holds."""
    x, mask = launch.as_tensors("masked_scatter", x, mask)
    source = _like(x, source)
    mask = F.expand(mask, x.shape)
    count = int(F.count_nonzero(mask))
    return F.setitem(F.clone(x), mask, F.narrow(F.reshape(source, (-1,)), 0, 0, count))


def _grid(axis: int, index: Any) -> tuple[Any, ...]:
    """The index that ``scatter`` writes to: ``index`` along its axis, and every element its own place along the others."""
    sizes = index.shape
    return tuple(index if i == axis else np.arange(n).reshape(along_one(i, len(sizes))) for i, n in enumerate(sizes))


def along_one(axis: int, ndim: int) -> tuple[int, ...]:
    """A shape with all elements along one axis."""
    return tuple(-1 if i == axis else 1 for i in range(ndim))


@composite(ref=lambda x, axis, index, src: _written(x, _grid(axis, index), src), inputs=("x",),
           samples=[S((3, 4), axis=1, index=np.array([[0, 2], [3, 1]]), src=np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)),
                    S((3, 4), axis=0, index=np.array([[2, 0, 1]]), src=9.0)])  # fmt: skip
def scatter(F: Any, x: Tensor, axis: int, index: Any, src: Any) -> Tensor:
    """x with ``src`` (a tensor or a number) at the places ``index`` along an axis; of several values for one place the last is written."""
    x, index = launch.as_tensors("scatter", x, index)
    at = _at("scatter", axis, x.ndim)
    if np.ndim(src):
        src = F.getitem(_like(x, src), tuple(slice(0, n) for n in index.shape))
    return F.setitem(F.clone(x), _grid(at, index), src)


# ---- counting


@composite(ref=lambda x, weights=None, minlength=0: np.bincount(x, weights, minlength), inputs=("x",),
           samples=[S((9,), dtypes="int64", low=0, high=5), S((4,), dtypes="int32", low=0, high=2, minlength=6)],
           errors=[(S((3,)), r"\[bincount\] x must be a vector of integers")])  # fmt: skip
def bincount(F: Any, x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    """How often each of 0, 1, ... occurs in a vector of integers, or the sum of its weights. Waits for the device."""
    x = _tensor("bincount", x)
    if x.ndim != 1 or dtypes.DTYPES[x.dtype].is_float:
        raise ShapeError(message("bincount", "x must be a vector of integers", dtype=x.dtype, **{"x.shape": x.shape}))
    length = max(minlength, int(F.amax(x)) + 1 if x.size else 0)
    if weights is None:
        weights = Tensor.ones(x.shape, "int64", queue=x.queue)
    return F.index_add(Tensor.zeros((length,), weights.dtype, queue=x.queue), 0, x, weights)


@op(vjp=None, ref=lambda x, **how: np.unique(x), samples=[S((9,), dtypes="int64", low=0, high=5), S((2, 3))])
def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, axis: Axis = None) -> Any:
    """The different values in order; with them, where asked for, the place of every element among them and how often each occurs.

    Computed on the host.
    """
    x = _tensor("unique", x)
    values, inverse, counts = np.unique(x.to_host(), return_inverse=True, return_counts=True, axis=axis)
    inverse = np.reshape(inverse, x.shape if axis is None else -1)
    wanted = [inverse] * return_inverse + [counts] * return_counts
    found = Tensor.from_host(x.queue, values, x.dtype)
    return (found, *(Tensor.from_host(x.queue, part) for part in wanted)) if wanted else found


@op(vjp=None, ref=lambda x, values, right=False: np.searchsorted(x, values, "right" if right else "left"),
    samples=[S(np.arange(5.0, dtype=np.float32), (2, 3), high=5.0), S(np.arange(5), np.array([0, 3, 9]), right=True)],
    errors=[(S((2, 3), (4,)), r"\[searchsorted\] x must have 1 axes, got 2")])  # fmt: skip
def searchsorted(x: Tensor, values: Tensor, right: bool = False) -> Tensor:
    """Where in the ordered vector ``x`` each value would be inserted, before equal ones or (``right``) behind. Computed on the host."""
    x, values = launch.as_tensors("searchsorted", x, values)
    found = np.searchsorted(_tensor("searchsorted", x, 1, 1).to_host(), values.to_host(), "right" if right else "left")
    return Tensor.from_host(x.queue, np.asarray(found, np.int64))


@composite(ref=lambda x, boundaries, right=False: np.searchsorted(boundaries, x, "right" if right else "left"),
           samples=[S((2, 3), np.arange(5.0, dtype=np.float32), high=5.0)])  # fmt: skip
def bucketize(F: Any, x: Tensor, boundaries: Tensor, right: bool = False) -> Tensor:
    """The number of the interval between ordered boundaries each element lies in. Computed on the host."""
    return F.searchsorted(boundaries, x, right)


@op(vjp=None, ref=lambda x, bins=100, min=0, max=0: np.histogram(x, bins, (min, max) if min != max else None)[0].astype(np.float32),
    samples=[S((50,), bins=4, min=-1, max=1), S((9,), bins=3)])  # fmt: skip
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """How many elements lie in each of ``bins`` equal intervals between min and max (or the extremes). Computed on the host."""
    x = _tensor("histc", x)
    counts, _ = np.histogram(x.to_host(), bins, (min, max) if min != max else None)
    return Tensor.from_host(x.queue, counts.astype(np.float32), x.dtype)
