"""Ops with torch's names that split, summarize and integrate, composed of other ops and differentiated through them."""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S
from netcl.ops.composed import row
from netcl.ops.sort import ordered

# ---- parts of a tensor


def _tensor_split(F: Any, x: Tensor, indices_or_sections: Any, axis: int = 0) -> Any:
    at, given = launch.check_axis("tensor_split", axis, x.ndim), indices_or_sections
    n = x.shape[at]
    if isinstance(given, int | np.integer):
        if given < 1:
            raise ShapeError(message("tensor_split", "the number of parts must be positive", indices_or_sections=given))
        return F.split(x, [n // given + (i < n % given) for i in range(given)], at)
    ends = [slice(0, int(end)).indices(n)[1] for end in given]
    return tuple(F.narrow(x, at, a, max(b - a, 0)) for a, b in zip([0, *ends], [*ends, n], strict=True))


def _split_along(name: str, axis: int) -> Any:
    def call(F: Any, x: Tensor, indices_or_sections: Any) -> Any:
        if x.ndim < {"hsplit": 1, "vsplit": 2, "dsplit": 3}[name]:
            raise ShapeError(message(name, "x must have more dimensions", **{"x.shape": x.shape}))
        at = min(axis, x.ndim - 1)
        if isinstance(indices_or_sections, int) and (indices_or_sections < 1 or x.shape[at] % indices_or_sections):
            what = "the axis must split into equal parts"
            raise ShapeError(message(name, what, "use tensor_split", indices_or_sections=indices_or_sections, **{"x.shape": x.shape}))
        return F.tensor_split(x, indices_or_sections, at)

    return call


row("tensor_split", _tensor_split, lambda x, indices_or_sections, axis=0: tuple(np.array_split(x, indices_or_sections, axis)),
    S((5, 3), indices_or_sections=3), S((4, 6), indices_or_sections=(1, 3), axis=1),
    doc="An axis split into parts whose sizes differ by at most one, or before the given indices.")  # fmt: skip
for _name, _along in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2)):
    row(_name, _split_along(_name, _along), getattr(np, _name), S((4, 4, 4), indices_or_sections=2),
        doc=f"Equal parts of axis {_along}, or parts before the given indices.")  # fmt: skip


def _replaced(F: Any, name: str, x: Tensor, src: Tensor, view: Any) -> Tensor:
    """Return a copy of ``x`` with ``src`` in place of the elements that ``view`` takes from an array of its shape."""
    places = view(np.arange(x.size).reshape(x.shape))
    if places.shape != src.shape:
        raise ShapeError(message(name, "src must have the shape of the elements it replaces", src=src.shape, expected=places.shape))
    at = Tensor.from_host(x.queue, np.ascontiguousarray(places).reshape(-1))
    return F.reshape(F.index_copy(F.reshape(x, (-1,)), 0, at, F.cast(F.reshape(src, (-1,)), x.dtype)), x.shape)


def _sliced(x: Any, axis: int, item: Any) -> Any:
    before = [slice(None)] * launch.check_axis("scatter", axis, x.ndim)
    return x[tuple([*before, item])] if before else x[item]


def _written(x: np.ndarray, src: np.ndarray, axis: int, item: Any) -> np.ndarray:
    out = x.copy()
    _sliced(out, axis, item)[...] = src
    return out


def _put_diagonal(x: np.ndarray, src: np.ndarray, offset: int = 0) -> np.ndarray:
    out = x.copy()
    out[np.arange(len(src)), np.arange(len(src)) + offset] = src
    return out


row("diagonal_scatter", lambda F, x, src, offset=0, dim1=0, dim2=1:
    _replaced(F, "diagonal_scatter", x, src, lambda places: np.diagonal(places, offset, dim1, dim2)),
    _put_diagonal, S((3, 4), (3,), offset=1), doc="A copy of x with ``src`` in place of a diagonal.")  # fmt: skip
row("select_scatter", lambda F, x, src, axis, index: _replaced(F, "select_scatter", x, src, lambda places: _sliced(places, axis, index)),
    lambda x, src, axis, index: _written(x, src, axis, index), S((3, 4), (3,), axis=1, index=2),
    doc="A copy of x with ``src`` in place of the slice ``index`` of an axis.")  # fmt: skip
row("slice_scatter", lambda F, x, src, axis=0, start=None, end=None, step=1:
    _replaced(F, "slice_scatter", x, src, lambda places: _sliced(places, axis, slice(start, end, step))),
    lambda x, src, axis, start, end, step: _written(x, src, axis, slice(start, end, step)),
    S((5, 3), (2, 3), axis=0, start=1, end=5, step=2), doc="A copy of x with ``src`` in place of slices of an axis.")  # fmt: skip


def _block_diag(F: Any, *tensors: Any) -> Tensor:
    """A matrix with the given matrices along its diagonal, else zeros."""
    blocks = [F.reshape(t, t.shape if t.ndim == 2 else (1, t.size)) for t in launch.as_tensors("block_diag", *tensors)]
    ends = list(itertools.accumulate(block.shape[1] for block in blocks))
    return F.cat([F.pad(block, (end - block.shape[1], ends[-1] - end)) for block, end in zip(blocks, ends, strict=True)], 0)


def _combinations(F: Any, x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = np.array(list(choose(range(x.shape[0]), r)), np.int64).reshape(-1, r)
    return F.reshape(F.index_select(x, 0, Tensor.from_host(x.queue, places.reshape(-1))), places.shape)


def _stacked_blocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.zeros((a.shape[0] + b.shape[0], a.shape[1] + b.shape[1]), a.dtype)
    out[: a.shape[0], : a.shape[1]], out[a.shape[0] :, a.shape[1] :] = a, b
    return out


row("block_diag", lambda F, a, b, *more: _block_diag(F, a, b, *more), _stacked_blocks, S((2, 2), (1, 3)),
    doc="A matrix with the given matrices along its diagonal, else zeros.")  # fmt: skip
row("combinations", _combinations, lambda x, r=2, with_replacement=False: np.array(list(itertools.combinations(x, r))), S((4,)),
    doc="Every choice of ``r`` elements of a vector, a row each.")  # fmt: skip
row("diagflat", lambda F, x, offset=0: F.diag(F.reshape(x, (-1,)), offset), lambda x, offset=0: np.diagflat(x, offset), S((2, 2), offset=1),
    doc="A matrix with the elements of x on a diagonal.")  # fmt: skip
row("chain_matmul", lambda F, a, b, *more: reduce(F.matmul, more, F.matmul(a, b)), lambda a, b: a @ b, S((2, 3), (3, 4)), amp="half",
    doc="The product of matrices, from the left.")  # fmt: skip


# ---- statistics


def _cov(F: Any, x: Tensor, *, correction: int = 1) -> Tensor:
    rows = F.reshape(x, (1, x.size)) if x.ndim < 2 else x
    centered = F.sub(rows, F.mean(rows, -1, keepdims=True))
    made = F.div(F.matmul(centered, F.transpose(centered, 0, 1)), float(max(rows.shape[1] - correction, 0)))
    return made if rows.shape[0] != 1 else F.reshape(made, ())


def _corrcoef(F: Any, x: Tensor) -> Tensor:
    covariance = F.cov(x)
    if not covariance.ndim:
        return F.div(covariance, covariance)
    spread = F.sqrt(F.diagonal(covariance))
    return F.clamp(F.div(F.div(covariance, F.unsqueeze(spread, 1)), F.unsqueeze(spread, 0)), -1.0, 1.0)


def _nanmedian(F: Any, x: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
    if axis is None:
        return F.nanmedian(F.reshape(x, (-1,)), 0).values
    at = launch.check_axis("nanmedian", axis, x.ndim)
    if not dtypes.DTYPES[x.dtype].is_float or not x.ndim:
        return F.median(x, at, keepdims)
    counts = F.sum(F.logical_not(F.isnan(x)), at, keepdims=True)
    middle = F.clamp(F.floor_divide(F.sub(counts, 1), 2), 0)
    return ordered(F, x, at, F.gather(F.argsort(x, at), at, middle), keepdims)  # NaN is sorted last


row("cov", _cov, lambda x: np.cov(x), S((3, 5)), S((1, 5)), S((5,)), amp="float",
    doc="The covariance matrix of variables (rows) over observations (columns).")  # fmt: skip
row("corrcoef", _corrcoef, lambda x: np.corrcoef(x), S((3, 5)), S((1, 5)), amp="float", tol=2,
    doc="The correlation matrix of variables (rows) over observations (columns).")  # fmt: skip
row("nanmedian", _nanmedian, lambda x: np.sort(x, None)[(x.size - 1) // 2], S((5,)), amp="float",
    doc="The median of the values that are not NaN, as ``median`` gives it.")  # fmt: skip
row("dist", lambda F, a, b, p=2.0: F.norm(F.sub(a, b), p), lambda a, b: np.linalg.norm((a - b).ravel()), S((3, 4), (3, 4)), amp="float",
    doc="The p-norm of a - b.")  # fmt: skip


# ---- integrals and powers


def _areas(F: Any, y: Tensor, x: Any, dx: float, axis: int) -> Tensor:
    """Return the areas of the trapezoids between neighbors of an axis, along the last axis."""
    last = F.moveaxis(y, axis, -1)
    n = last.shape[-1]
    heights = F.add(F.mul(F.narrow(last, -1, 1, n - 1), 0.5), F.mul(F.narrow(last, -1, 0, n - 1), 0.5))  # sums of integers may wrap around
    if x is None:
        return F.mul(heights, dx)
    (x,) = launch.as_tensors("trapezoid", x)
    x = F.mul(x, 1.0)
    return F.mul(heights, F.diff(x if x.ndim == 1 else F.moveaxis(x, axis, -1), axis=-1))


def _trapezoids(y: np.ndarray, axis: int) -> np.ndarray:
    last = np.moveaxis(y, axis, -1)
    return (last[..., 1:] + last[..., :-1]) / 2


row("trapezoid", lambda F, y, x=None, *, dx=1.0, axis=-1: F.sum(_areas(F, y, x, dx, axis), -1),
    lambda y, x=None, dx=1.0, axis=-1: _trapezoids(y, axis).sum(-1) * dx, S((3, 5)), S((3, 5), dx=0.5, axis=0), amp="float",
    doc="The integral along an axis by the trapezoidal rule, over points ``x`` or steps ``dx``.")  # fmt: skip
row("cumulative_trapezoid", lambda F, y, x=None, *, dx=1.0, axis=-1: F.moveaxis(F.cumsum(_areas(F, y, x, dx, axis), -1), -1, axis),
    lambda y: _trapezoids(y, -1).cumsum(-1), S((3, 5)), amp="float",
    doc="The integrals from the start of an axis to each point, by the trapezoidal rule.")  # fmt: skip


def _float_power(F: Any, x: Tensor, exponent: Any) -> Tensor:
    return F.pow(F.cast(x, "float64"), F.cast(exponent, "float64") if isinstance(exponent, Tensor) else float(exponent))


def _exponents(x: Tensor, N: int | None, increasing: bool) -> Tensor:
    powers = np.arange(x.shape[0] if N is None else N)
    return Tensor.from_host(x.queue, powers if increasing else powers[::-1].copy(), x.dtype)


def _norm_factor(F: Any, x: Tensor, p: float, axis: int, maxnorm: float) -> Tensor:
    at = launch.check_axis("renorm", axis, x.ndim)
    norms = F.norm(x, p, tuple(i for i in range(x.ndim) if i != at), keepdims=True)
    return F.where(F.gt(norms, maxnorm), F.div(maxnorm, F.add(norms, 1e-7)), 1.0)


row("float_power", _float_power, lambda x, exponent: np.float_power(x, exponent), S((3,), exponent=2.0, dtypes="int64", low=1, high=5),
    doc="x to a power, computed in float64.")  # fmt: skip
row("vander", lambda F, x, N=None, increasing=False: F.pow(F.unsqueeze(x, -1), _exponents(x, N, increasing)),
    lambda x: np.vander(x), S((3,)), doc="The powers of the elements of a vector, a row each; ``N`` columns.")  # fmt: skip
row("renorm", lambda F, x, p, axis, maxnorm: F.mul(x, _norm_factor(F, x, p, axis, maxnorm)),
    lambda x, p, axis, maxnorm: x * np.minimum(1, maxnorm / (np.linalg.norm(x, p, 1, keepdims=True) + 1e-7)),
    S((3, 4), p=2.0, axis=0, maxnorm=1.0), amp="float", tol=2,
    doc="x with the p-norm of each slice of an axis scaled down to ``maxnorm``.")  # fmt: skip
