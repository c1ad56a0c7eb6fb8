"""Running extremes, windows, counts, searches, and scatters that combine values. Ops computed on the host by NumPy state this."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, composite
from netcl.ops.composed import as_like, grid_of
from netcl.ops.composed import row as made_of
from netcl.ops.linalg import on_host
from netcl.ops.movement import along
from netcl.ops.sort import Ordered, ordered

_at = launch.check_axis

# ---- scans and windows


def _cumulative(name: str, larger: bool) -> Any:
    def call(F: Any, x: Tensor, axis: int) -> Ordered:
        """Compute running extremes and their indices in doubling steps; the gradient is that of the gather at the end."""
        x = launch.as_tensors(name, x)[0]
        at, step, values = _at(name, axis, x.ndim), 1, x.detach()
        places = np.arange(x.shape[at] if x.shape else 1).reshape((-1, *(1,) * max(x.ndim - 1 - at, 0)) if x.shape else ())
        index = F.clone(F.expand(Tensor.from_host(x.queue, places), x.shape))
        while x.shape and step < x.shape[at]:
            rest = x.shape[at] - step
            before, origin = (F.cat([F.narrow(t, at, 0, step), F.narrow(t, at, 0, rest)], at) for t in (values, index))
            kept = F.gt(before, values) if larger else F.lt(before, values)
            if dtypes.DTYPES[x.dtype].is_float:
                kept = F.logical_or(kept, F.logical_and(F.isnan(before), F.logical_not(F.isnan(values))))
            values, index, step = F.where(kept, before, values), F.where(kept, origin, index), 2 * step
        return ordered(F, x, at, index)

    return call


for _name, _extreme, _what in (("cummax", np.maximum, "largest"), ("cummin", np.minimum, "least")):
    made_of(_name, _cumulative(_name, _name == "cummax"), "numpy", S((7,), axis=0), S((2, 5, 3), axis=1),
            S((9,), axis=0, dtypes="int64", low=0, high=4), errors=[(S((3, 2), axis=2), rf"\[{_name}\] axis must be in range")],
            doc=f"The {_what} value up to each element along an axis, and its index (of equal values the last); NaN stays.")  # fmt: skip


def _unfold(F: Any, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    at = _at("unfold", dimension, x.ndim)
    length = x.shape[at] if x.shape else 1
    if not 0 <= size <= length or step < 1:
        raise ShapeError(message("unfold", f"size must be from 0 to {length}, the axis size, and step at least 1", size=size, step=step))
    if not x.shape:
        return F.narrow(F.reshape(x, (1,)), 0, 0, size)  # (size,), as in torch
    sizes = along(x.ndim, at, (length - size) // step + 1, x.shape)
    moves = (*(along(x.ndim, axis, step if axis == at else 1) for axis in range(x.ndim)), along(x.ndim, at, 1))
    return F.strided_block(x, (0,) * x.ndim, (*sizes, size), moves)


made_of("unfold", _unfold, lambda x, dimension, size, step: np.take(np.lib.stride_tricks.sliding_window_view(x, size, dimension),
        np.arange(0, x.shape[dimension] - size + 1, step), dimension), S((7, 2), dimension=0, size=3, step=2),
        S((2, 6), dimension=1, size=6, step=1),
        errors=[(S((4,), dimension=0, size=5, step=1), r"\[unfold\] size must be from 0 to 4, the axis size, and step at least 1; size=5")],
        doc="Slices of ``size`` elements of an axis, ``step`` apart, on a new last axis: a view, read-only if they overlap.")  # fmt: skip


# ---- writes


_REDUCED = {"prod": (np.multiply, 1), "amax": (np.maximum, -math.inf), "amin": (np.minimum, math.inf)}


def _scatter_extreme_vjp(F, g, out, x, axis, index, src, reduce, include_self):
    """Share the gradient evenly among all elements equal to the extreme; for ``prod``, multiply it by the product of the other elements."""
    part = F.getitem(src, tuple(slice(0, n) for n in index.shape))
    named = F.scatter(F.cast(F.mul(out, 0), "bool"), axis, index, True)
    if reduce == "prod":
        zero, one = F.eq(part, 0), F.eq(x, 0)
        filled = F.where(zero, 1.0, part)
        own = F.mul(x, 0) if not include_self else F.cast(one, x.dtype)
        zeros = F.gather(F.scatter_add(own, axis, index, F.cast(zero, x.dtype)), axis, index)
        rest = F.scatter_reduced(F.where(one, 1.0, x) if include_self else x, axis, index, filled, "prod", include_self)
        others = F.where(F.eq(F.sub(zeros, F.cast(zero, x.dtype)), 0), F.div(F.gather(rest, axis, index), filled), 0.0)
        d_src, whole = F.mul(F.gather(g, axis, index), others), F.scatter_reduced(F.add(F.mul(x, 0), 1.0), axis, index, part, "prod", True)
        d_x = F.mul(g, whole)
    else:
        mine, theirs = F.cast(F.eq(x, out), g.dtype), F.cast(F.eq(part, F.gather(out, axis, index)), g.dtype)
        mine = mine if include_self else F.where(named, 0.0, mine)
        each = F.div(g, F.clamp_min(F.scatter_add(mine, axis, index, theirs), 1.0))
        d_x, d_src = F.mul(mine, each), F.mul(theirs, F.gather(each, axis, index))
    d_x = d_x if include_self else F.where(named, 0.0, g)
    if d_src.shape != src.shape:
        d_src = F.strided_unslice(d_src, src.shape, (0,) * src.ndim, (1,) * src.ndim)
    return d_x, None, d_src


_WHERE = np.array([[0, 2, 0, 3], [1, 1, 2, 0]])


@on_host("x index src", vjp=_scatter_extreme_vjp, ref="numpy", takes="any", amp="float", tol=4,
         samples=[S((2, 5), 1, _WHERE, (3, 4), reduce=how, include_self=own) for how in _REDUCED for own in (True, False)])  # fmt: skip
def scatter_reduced(x, axis, index, src, reduce, include_self):
    """The products, largest or least values of :func:`scatter_reduce`. Computed on the host."""
    combine, neutral = _REDUCED[reduce]
    wide = x.dtype.kind == "f"
    neutral = neutral if wide or reduce == "prod" else np.iinfo(x.dtype).min if neutral < 0 else np.iinfo(x.dtype).max
    at, out = grid_of(axis, index), x.copy()
    if not include_self:
        out[at] = neutral
    combine.at(out, at, src[tuple(slice(0, n) for n in index.shape)])
    return out


def _scatter_reduce(F: Any, x: Tensor, axis: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    index, src, axis = launch.as_tensors("scatter_reduce", x, index)[1], as_like(x, src), _at("scatter_reduce", axis, x.ndim)
    if reduce not in ("sum", "mean", *_REDUCED):
        raise ValueError(message("scatter_reduce", "reduce must be sum, prod, mean, amax or amin", reduce=repr(reduce)))
    fits = x.ndim == index.ndim == src.ndim and all(
        m <= k and (m <= n or i == axis) for i, (n, m, k) in enumerate(zip(x.shape, index.shape, src.shape, strict=True))
    )
    if not fits or x.dtype != src.dtype:
        what = "index must fit into src and, except along the axis, into x, all of the same ndim; x and src must have the same dtype"
        shapes = {"x.shape": x.shape, "index.shape": index.shape, "src.shape": src.shape}
        raise ShapeError(message("scatter_reduce", what, **shapes, dtypes=(x.dtype, src.dtype)))
    if reduce in _REDUCED:
        return F.scatter_reduced(x, axis, index, src, reduce, include_self)
    made = F.scatter_add(x if include_self else F.scatter(x, axis, index, 0), axis, index, src)
    if reduce == "sum":
        return made
    ones = Tensor.ones(index.shape, x.dtype, queue=x.queue)
    own = Tensor.full(x.shape, int(include_self), x.dtype, queue=x.queue)
    count = F.clamp_min(F.scatter_add(own, axis, index, ones), 1)
    return F.div(made, count) if dtypes.DTYPES[x.dtype].is_float else F.floor_divide(made, count)


_SRC = np.arange(8, dtype=np.float32).reshape(2, 4) / 4 - 1
made_of("scatter_reduce", _scatter_reduce, "numpy",
        *(S((2, 5), axis=1, index=_WHERE, src=_SRC, reduce=how, include_self=own) for how in ("sum", "mean", "amax")
        for own in (True, False)),
        tol=4, errors=[(S((2, 5), axis=1, index=_WHERE, src=_SRC, reduce="max"),
        r"\[scatter_reduce\] reduce must be sum, prod, mean, amax or amin"),
                       (S((2, 5), axis=0, index=_WHERE, src=_SRC[:1], reduce="sum"), r"\[scatter_reduce\] index must fit into src")],
        doc="A copy of x with the values of src combined into the elements at index, by sum, prod, mean, amax or amin. "
            "Without ``include_self`` x itself does not count. prod, amax and amin are computed on the host.")  # fmt: skip


def _masked_scatter(F: Any, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    mask = F.expand(mask, x.shape)
    if mask.dtype != "bool":
        raise DtypeError(message("masked_scatter", "mask must be a bool tensor", dtype=mask.dtype))
    order = F.sub(F.cumsum(F.reshape(mask, (-1,)), 0), 1)
    taken = F.index_select(F.reshape(source, (-1,)), 0, F.clamp(order, 0, max(source.size - 1, 0)))
    if (n := int(F.sum(mask))) > source.size:
        raise ShapeError(message("masked_scatter", f"source must have at least {n} elements, one per true mask value", source=source.shape))
    return F.where(mask, F.reshape(taken, x.shape), x)


made_of("masked_scatter", _masked_scatter, "numpy", S((3, 4), (3, 4), (12,), dtypes=("float32", "bool", "float32")),
        doc="x with the first elements of source where the mask is true. Waits for the device.")  # fmt: skip


# ---- counts and search


@composite(ref=lambda x, bins=100, min=0, max=0: np.histogram(x, bins, None if min == max else (min, max))[0].astype(x.dtype),
           samples=[S((50,), bins=7), S((5, 9), bins=4, min=-0.5, max=0.75)], inputs=("x",),
           errors=[(S((3,), bins=4, min=2, max=1), r"\[histc\] max must not be below min; min=2, max=1")])  # fmt: skip
def histc(F: Any, x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the elements in ``bins`` equal parts of ``[min, max]``, or of the range of x if ``min == max`` (waits for the device)."""
    x = launch.as_tensors("histc", x)[0].detach()
    launch.check_dtype("histc", x)
    if max < min:
        raise ShapeError(message("histc", "max must not be below min", min=min, max=max))
    if min == max and x.size:
        min, max = F.amin(x).item(), F.amax(x).item()
    if not math.isfinite(max - min):
        raise ValueError(message("histc", "min, max and the range of x must be finite", "pass min= and max=", min=min, max=max))
    min, max = (min - 1, max + 1) if min == max else (min, max)
    inside = F.logical_and(F.ge(x, min), F.le(x, max))
    place = F.clamp(F.floor(F.mul(F.div(F.sub(x, min), max - min), bins)), 0, bins - 1)
    place = F.cast(F.where(inside, place, float(bins)), "int64")
    zeros, ones = Tensor.zeros((bins + 1,), "int64", queue=x.queue), Tensor.ones((x.size,), "int64", queue=x.queue)
    counts = F.index_add(zeros, 0, F.reshape(place, (-1,)), ones)
    return F.cast(F.narrow(counts, 0, 0, bins), x.dtype)


def _searched(sequence, values, right):
    side: Any = "right" if right else "left"
    if sequence.ndim == 1:
        return np.searchsorted(sequence, values, side)
    rows = zip(sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1]), strict=True)
    return np.stack([np.searchsorted(row, wanted, side) for row, wanted in rows]).reshape(values.shape)


_SORTED = np.array([0.1, 0.3, 0.3, 0.7], np.float32)


@on_host("sorted_sequence values", vjp=None, takes="any",
         ref=lambda sorted_sequence, values, right=False: _searched(sorted_sequence, values, right),
         samples=[S(_SORTED, (5,)), S(_SORTED, np.array([0.3, 0.9], np.float32), right=True),
         S(np.stack([_SORTED, 2 * _SORTED]), (2, 3))])  # fmt: skip
def searchsorted(sorted_sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """Return where values would be inserted along the sorted last axis: before equal values, or after them if ``right``. On the host."""
    if side not in (None, "left", "right") or (side == "left" and right):
        raise ValueError(message("searchsorted", "side must be left or right and agree with right", side=repr(side), right=right))
    if sorter is not None:
        sorted_sequence = np.take_along_axis(sorted_sequence, np.asarray(sorter), -1)
    if sorted_sequence.ndim > 1 and sorted_sequence.shape[:-1] != values.shape[:-1]:
        what = "sorted_sequence and values must agree in all axes but the last"
        raise ShapeError(message("searchsorted", what, sorted_sequence=sorted_sequence.shape, values=values.shape))
    return _searched(sorted_sequence, values, right or side == "right").astype(np.int32 if out_int32 else np.int64)


made_of("bucketize", lambda F, x, boundaries, **how: F.searchsorted(boundaries, x, **how),
        lambda x, boundaries, right=False: np.searchsorted(boundaries, x, "right" if right else "left"), S((2, 4), _SORTED),
        S((3,), _SORTED, right=True),
        doc="For each element, the index of the interval between boundaries that contains it. Computed on the host.")  # fmt: skip


@on_host("x", vjp=None, takes="any", ref=None, samples=[S((9,))])
def mode_indices(x, axis=-1):
    """Return the last index of the most frequent value (of several, the smallest) along an axis. Computed on the host."""
    rows = np.moveaxis(x, axis, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    found = []
    for row in flat:
        values, counts = np.unique(row, return_counts=True, equal_nan=False)
        places = np.flatnonzero(row == values[np.argmax(counts)])
        found.append(places[-1] if places.size else 0)  # only of NaN: every NaN is distinct, as in torch
    return np.array(found, np.int64).reshape(rows.shape[:-1])


def _mode(F: Any, x: Tensor, axis: int = -1, keepdims: bool = False) -> Ordered:
    at = _at("mode", axis, x.ndim)
    if not x.size:
        raise ShapeError(message("mode", "x must not be empty", **{"x.shape": x.shape}))
    index = F.unsqueeze(F.mode_indices(x, at), at) if x.shape else Tensor.zeros((), "int64", queue=x.queue)
    return ordered(F, x, at, index, keepdims)


made_of("mode", _mode, "numpy", S((9,), dtypes="int64", low=0, high=4), S((5, 3), axis=0, keepdims=True),
        errors=[(S((0,)), r"\[mode\] x must not be empty")],
        doc="The most frequent value along an axis (of several the smallest) and its last index. Computed on the host.")  # fmt: skip


# ---- special functions


@composite(ref=lambda x, n: 1 / x + 0.5 / x**2 + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7),
         samples=[S((5,), n=1, low=12.0, high=20.0)],
           inputs=("x",), amp="float", errors=[(S((3,), n=2), r"\[polygamma\] n must be 0 or 1; n=2")])  # fmt: skip
def polygamma(F: Any, x: Any, n: Any) -> Tensor:
    """The n-th derivative of digamma, for n of 0 and 1: ``polygamma(1, x)`` as in torch, or ``polygamma(x, 1)``."""
    x, n = (n, x) if isinstance(x, int) else (x, n)
    if n not in (0, 1):
        raise ValueError(message("polygamma", "n must be 0 or 1", n=n))
    return F.digamma(x) if n == 0 else F.trigamma(x)
