"""Reductions: rows that fold axes, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.engine.operands import operand
from netcl.engine.pointwise import run
from netcl.engine.reduction import Axis, axes_of, folded_shape, run_fold
from netcl.engine.registry import Reduction, S, alias, op, register
from netcl.ops.pointwise import NE

# ---- gradients


def _with_folded_axes(F: Any, g: Any, shape: tuple[int, ...], axis: Axis) -> Any:
    """Return the gradient with the reduced axes as axes of size 1, so that it broadcasts against the input."""
    return F.reshape(g, folded_shape(shape, axes_of("backward", axis, shape), True))


def _folded_count(shape: tuple[int, ...], axis: Axis) -> int:
    return math.prod(shape[a] for a in axes_of("backward", axis, shape))


def _prod_vjp(F: Any, g: Any, x: Any, axis: Axis) -> Any:
    """Multiply ``g`` by the products of the elements before and after each: no quotient, so that zeros are right in every derivative."""
    axes = axes_of("backward", axis, x.shape)
    order = (*(a for a in range(x.ndim) if a not in axes), *axes)
    shape = tuple(x.shape[a] for a in order)
    kept = x.ndim - len(axes)
    rows = F.reshape(F.reorder(x, order), (*shape[:kept], math.prod(shape[kept:])))
    if not rows.size:
        return F.mul(x, _with_folded_axes(F, g, x.shape, axis))

    def before(rows: Any) -> Any:
        one = type(x).full((*shape[:kept], 1), 1, x.dtype, queue=x.queue)
        return F.cumprod(F.cat([one, F.narrow(rows, -1, 0, rows.shape[-1] - 1)], -1), -1)

    others = F.mul(before(rows), F.flip(before(F.flip(rows, -1)), -1))
    back = tuple(order.index(a) for a in range(x.ndim))
    return F.mul(_with_folded_axes(F, g, x.shape, axis), F.reorder(F.reshape(others, shape), back))


def _extreme_vjp(F: Any, g: Any, out: Any, x: Any, axis: Axis) -> Any:
    """Share the gradient evenly among all elements equal to the extreme; for NaN, as in torch, among those of the whole tensor only."""
    hit = F.eq(x, _with_folded_axes(F, out, x.shape, axis))
    hit = F.cast(F.logical_or(hit, F.isnan(x)) if axis is None else hit, x.dtype)
    return F.mul(_with_folded_axes(F, g, x.shape, axis), F.div(hit, F.sum(hit, axis=axis, keepdims=True)))


def _var_vjp(F: Any, g: Any, x: Any, axis: Axis, correction: float | None) -> Any:
    correction = 1 if correction is None else correction
    scale = 2.0 / max(_folded_count(x.shape, axis) - correction, 0) if _folded_count(x.shape, axis) > correction else math.nan
    return F.mul(_with_folded_axes(F, F.mul(g, scale), x.shape, axis), F.sub(x, F.mean(x, axis=axis, keepdims=True)))


def _std_vjp(F: Any, g: Any, out: Any, x: Any, axis: Axis, correction: float | None) -> Any:
    halved = F.where(F.eq(out, 0.0), 0.0, F.div(g, F.mul(out, 2.0)))  # equal values: the gradient is shared
    return _var_vjp(F, halved, x, axis, correction)


def _logsumexp_vjp(F: Any, g: Any, out: Any, x: Any, axis: Axis) -> Any:
    top = F.where(F.eq(out, -math.inf), 0.0, out)
    return F.mul(_with_folded_axes(F, g, x.shape, axis), F.exp(F.sub(x, _with_folded_axes(F, top, x.shape, axis))))


# ---- rows

_NO_AXIS = (S((2, 3), axis=2), r"\[{}\] axis must be in range for 2 dimensions, got 2; x.shape=\(2, 3\)")


def reduction(name: str, combine: str, neutral: str, ref: Callable[..., Any], vjp: Callable[..., Any] | None, **columns: Any) -> Reduction:
    """Register a reduction; returns its row."""
    row = Reduction(name, combine, neutral, ref, vjp, errors=[(_NO_AXIS[0], _NO_AXIS[1].replace("{}", name))], **columns)
    register(row)
    return row


_SUM = reduction("sum", "v0 + v1", "0", np.sum, lambda F, g, x_shape, axis: F.expand(_with_folded_axes(F, g, x_shape, axis), x_shape),
                 result="sum", amp="wide", doc="Sum over axes; integers and bool give int64.")  # fmt: skip
reduction("mean", "v0 + v1", "0", np.mean, lambda F, g, x_shape, axis:
          F.expand(F.div(_with_folded_axes(F, g, x_shape, axis), max(_folded_count(x_shape, axis), 1)), x_shape),
          finish="v0 / n", accepts="float", amp="wide", doc="Mean over axes.")  # fmt: skip
reduction("prod", "v0 * v1", "1", np.prod, _prod_vjp, result="sum", domain=(0.5, 1.5), tol=4, doc="Product over axes.")
reduction("amax", "MAX(v0, v1)", "LOWEST", np.max, _extreme_vjp, empty=False, amp="keep",
          doc="Largest element; NaN wins. The gradient of ties is shared.")  # fmt: skip
reduction("amin", "MIN(v0, v1)", "HIGHEST", np.min, _extreme_vjp, empty=False, amp="keep",
          doc="Smallest element; NaN wins. The gradient of ties is shared.")  # fmt: skip
reduction("any", "MAX(v0, v1)", "0", np.any, None, map="v0 != 0", result="bool", amp="keep",
          doc="Whether some element is not zero; of uint8, as uint8.")  # fmt: skip
reduction("all", "MIN(v0, v1)", "1", np.all, None, map="v0 != 0", result="bool", amp="keep",
          doc="Whether no element is zero; of uint8, as uint8.")  # fmt: skip


def _reference_var(x: np.ndarray, axis: Any = None, keepdims: bool = False, correction: float = 1) -> np.ndarray:
    return np.var(x, axis=axis, keepdims=keepdims, ddof=correction)


reduction("var", "v0 + v1", "0", _reference_var, _var_vjp, given="mean", map="(v0 - v1) * (v0 - v1)", finish="v0 / MAX(n - correction, 0)",
          params={"correction": 1}, accepts="float", tol=2, doc="Variance, in two passes; divided by n - correction.")  # fmt: skip
reduction("std", "v0 + v1", "0", lambda *a, **k: np.sqrt(_reference_var(*a, **k)), _std_vjp, given="mean", map="(v0 - v1) * (v0 - v1)",
          finish="SQRT(v0 / MAX(n - correction, 0))", params={"correction": 1}, accepts="float", tol=2,
          doc="Standard deviation: the square root of var.")  # fmt: skip
reduction("logsumexp", "v0 + v1", "0", lambda x, **how: np.log(np.sum(np.exp(x), **how)), _logsumexp_vjp, given="amax",
          map="EXP(v0 - WHERE(ISFINITE(v1), v1, 0))", finish="LOG(v0) + WHERE(ISFINITE(v1), v1, 0)", result="float", tol=2,
          doc="log(sum(exp(x))) without overflow.")  # fmt: skip
alias("reduce_sum", "sum")
alias("reduce_mean", "mean")
alias("reduce_max", "amax")


# ---- reductions that are not one row

_ABS: dict[str, Any] = {"combine": "v0 + v1", "neutral": "0", "vjp": None, "ref": np.linalg.norm, "result": "float"}
_NORMS: dict[float, Reduction] = {
    0.0: Reduction("norm_0", map="v0 != 0", **_ABS),
    1.0: Reduction("norm_1", map="ABS(v0)", **_ABS),
    2.0: Reduction("norm_2", map="v0 * v0", finish="SQRT(v0)", **_ABS),
    math.inf: Reduction("norm_inf", map="ABS(v0)", **{**_ABS, "combine": "MAX(v0, v1)", "empty": False}),
    -math.inf: Reduction("norm_least", map="ABS(v0)", **{**_ABS, "combine": "MIN(v0, v1)", "neutral": "HIGHEST", "empty": False}),
}
_NORM_P = Reduction("norm_p", map="POW(ABS(v0), p)", finish="POW(v0, 1 / p)", params={"p": 3.0}, **_ABS)


def _order(p: float | str) -> float:
    """Return ``p`` as a number; the Frobenius norm is the 2-norm of all elements."""
    if isinstance(p, str) and p != "fro":
        raise ValueError(message("norm", 'p must be a number or "fro"', "other norms of matrices: netcl.linalg.matrix_norm", p=repr(p)))
    return 2.0 if p == "fro" else float(p)


def _norm_vjp(F: Any, g: Any, out: Any, x: Any, p: float, axis: Axis) -> Any:
    p = _order(p)
    if p == 0:
        return F.mul(x, 0.0)
    g, out = _with_folded_axes(F, g, x.shape, axis), _with_folded_axes(F, out, x.shape, axis)
    if p == 1:
        return F.mul(g, F.sign(x))
    if math.isinf(p):
        hit = F.cast(F.eq(F.abs(x), out), x.dtype)
        return F.mul(F.mul(g, F.sign(x)), F.div(hit, F.sum(hit, axis=axis, keepdims=True)))
    none = F.eq(out, 0)
    length = F.where(none, 1.0, out)
    if p == 2:
        return F.mul(g, F.div(x, length))  # not (g / length) * x: of short vectors, that quotient overflows in 16 bits
    size = F.where(none, 0.0, F.div(F.abs(x), length))
    power = F.where(F.eq(size, 0), 0.0, F.pow(F.where(F.eq(size, 0), 1.0, size), p - 1))
    return F.mul(g, F.mul(F.sign(x), power))


@op(vjp=_norm_vjp, ref="numpy", amp="float", tol=2,
    samples=[S((257,)), S((3, 5, 7), p=1, axis=1), S((4, 6), p=3, axis=(0, 1)), S((5, 9), p=math.inf, axis=-1, keepdims=True), S((0,))],
    errors=[(S((2, 3), axis=2), r"\[norm_2\] axis must be in range for 2 dimensions, got 2"),
            (S((2, 3), p="nuc"), r"\[norm\] p must be a number or \"fro\"; p='nuc'; other norms of matrices")])  # fmt: skip
def norm(x: Tensor, p: float | str = 2, axis: Axis = None, keepdims: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Compute the p-norm over axes: ``sum(|x|**p) ** (1/p)``; p may be infinite, 0 counts nonzero elements, "fro" is 2."""
    order = _order(p)
    row = _NORMS.get(order, _NORM_P)
    return run_fold(row, x, axis, keepdims, (order,) if row is _NORM_P else (), out)


@op(vjp=None, ref=lambda x, axis=None, keepdims=False: np.asarray(np.count_nonzero(x, axis=axis, keepdims=keepdims)),
    samples=[S((257,)), S((3, 5, 7), axis=1, dtypes="int32", high=2), S((0,)), S((4, 5), axis=(0, 1), dtypes="bool")])  # fmt: skip
def count_nonzero(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Count nonzero elements, as int64."""
    x = operand("count_nonzero", x)
    return run_fold(_SUM, x if x.dtype == "bool" else run(NE, (x, 0)), axis, keepdims)
