"""Softmax and row norms as formulas and folds, for the NumPy backend and for deferral in compiled functions.

The formulas take an evaluator ``r``. :class:`ArrayRows` evaluates them at once, on arrays; :class:`_Rows` adds them to the generated kernel
of a compiled function. Each entry of :data:`FUSED` defers an op. It returns ``None`` for a call that it cannot defer; the op's own kernel
then runs and raises its errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from netcl.core.dtype import DTYPES, STORED
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch, lazy_graph
from netcl.engine.expression import ThroughOps, evaluate
from netcl.engine.map_kernel import fusable
from netcl.engine.modes import deferral
from netcl.engine.plan import planned
from netcl.engine.reduction import SAME, busy, fold_innermost, formula, formula_of_arrays
from netcl.engine.registry import REGISTRY, Op, Reduction, parse


class _Rows:
    """A builder of deferred formulas over the rows of a tensor, in the compute type of its dtype."""

    def __init__(self, name: str, like: Tensor, axes: int = 1):
        self.name, self.axes, self.dtype = name, axes, like.dtype
        self.real = DTYPES[like.dtype].c_compute
        self.wide = STORED[self.real]

    def of(self, text: str, dtype: str = "", numbers: dict[str, Any] | None = None, **bound: Any) -> Tensor:
        return formula(self.name, text, bound, numbers or {}, dtype or self.wide, self.real)

    def fold(self, name: str, x: Tensor) -> Tensor:
        row = REGISTRY[name]
        assert isinstance(row, Reduction)
        return fold_innermost(row, x, self.axes, True, (), self.wide, self.real)


class OpRows:
    """An evaluator of formulas by the ops of ``F``, for second derivatives; reductions are over ``axes``."""

    dtype = ""

    def __init__(self, F: Any, like: Tensor, axes: tuple[int, ...]):
        self.F, self.axes = F, axes

    def of(self, text: str, dtype: str = "", numbers: dict[str, Any] | None = None, **bound: Any) -> Any:
        return evaluate(parse(text), ThroughOps(bound | (numbers or {}), self.F))

    def fold(self, name: str, x: Any) -> Any:
        return getattr(self.F, name)(x, axis=self.axes, keepdims=True)


class ArrayRows:
    """An evaluator of formulas over arrays; reductions are over ``axes``."""

    dtype = ""

    def __init__(self, like: np.ndarray, axes: tuple[int, ...]):
        self.axes, self.real = axes, "double" if like.dtype == np.float64 else "float"

    def of(self, text: str, dtype: str = "", numbers: dict[str, Any] | None = None, **bound: Any) -> np.ndarray:
        return formula_of_arrays(text, bound, numbers or {}, self.real)

    def fold(self, name: str, x: np.ndarray) -> np.ndarray:
        if name == "amax":
            return x.max(self.axes, keepdims=True, initial=-np.inf)
        total = x.sum(self.axes, keepdims=True)
        return total if name == "sum" else total / max(math.prod(x.shape[axis] for axis in self.axes), 1)


# ---- formulas


def softmax_rows(r, x):
    e = r.of("EXP_BELOW(v0 - v1)", v0=x, v1=r.fold("amax", x))
    return r.of("v0 * v1", r.dtype, v0=e, v1=r.of("1 / v0", v0=r.fold("sum", e)))


def log_softmax_rows(r, x):
    z = r.of("v0 - v1", v0=x, v1=r.fold("amax", x))
    return r.of("v0 - v1", r.dtype, v0=z, v1=r.of("LOG(v0)", v0=r.fold("sum", r.of("EXP_BELOW(v0)", v0=z))))


def softmax_grad_rows(r, upstream, y):
    total = r.fold("sum", r.of("v0 * v1", v0=upstream, v1=y))
    return r.of("v1 * (v0 - v2)", r.dtype, v0=upstream, v1=y, v2=total)


def log_softmax_grad_rows(r, upstream, y):
    return r.of("v0 - EXP_BELOW(v1) * v2", r.dtype, v0=upstream, v1=y, v2=r.fold("sum", upstream))


def norm_rows(r, x, weight, bias, centered, eps):
    """Return the result, the means (``None`` if not ``centered``) and one over the standard deviations."""
    mean = r.fold("mean", x) if centered else None
    d = r.of("v0 - v1", v0=x, v1=mean) if centered else x
    rstd = r.of("RSQRT(v0 + eps)", v0=r.fold("mean", r.of("v0 * v0", v0=d)), numbers={"eps": eps})
    bound = {name: t for name, t in {"v0": d, "v1": rstd, "v2": weight, "v3": bias}.items() if t is not None}
    return r.of(f"v0 * v1{' * v2' * ('v2' in bound)}{' + v3' * ('v3' in bound)}", r.dtype, **bound), mean, rstd


def norm_grad_rows(r, upstream, x, weight, mean, rstd, centered):
    gw = upstream if weight is None else r.of("v0 * v1", v0=upstream, v1=weight)
    xh = r.of("(v0 - v1) * v2", v0=x, v1=mean, v2=rstd)
    bound = {"v0": gw, "v1": xh, "v2": r.fold("mean", r.of("v0 * v1", v0=gw, v1=xh)), "v3": rstd}
    if not centered:
        return r.of("v3 * (v0 - v1 * v2)", r.dtype, **bound)
    return r.of("v3 * (v0 - v1 * v2 - v4)", r.dtype, **bound, v4=r.fold("mean", gw))


def norm_weight_terms(r, upstream, x, mean, rstd):
    """Return the terms whose sums are the gradients of weight and bias."""
    return r.of("v0 * (v1 - v2) * v3", v0=upstream, v1=x, v2=mean, v3=rstd), r.of("v0", v0=upstream)


def along_axis(rows: Callable[..., Any], *arrays: np.ndarray, axis: int) -> np.ndarray:
    """Evaluate the formula ``rows`` along an axis of arrays."""
    return rows(ArrayRows(arrays[-1], (axis,) if arrays[-1].ndim else ()), *arrays)


def by_ops(rows: Callable[..., Any]) -> Callable[..., Any]:
    """Return the formula ``rows`` of two tensors, along an axis, as the ``formula`` of an op."""
    return lambda F, upstream, y, axis=-1, dtype=None: rows(OpRows(F, y, (axis,) if y.ndim else ()), upstream, y)


# ---- deferred ops


def _last(x: Any, axis: int) -> bool:
    """Whether ``axis`` is the last axis of ``x``, a float tensor that the device supports, and the rows of ``x`` keep the device busy."""
    if not isinstance(x, Tensor) or x.dtype not in launch.FLOATS or not x.ndim or not x.size or not -x.ndim <= axis < x.ndim:
        return False
    real = DTYPES[x.dtype].c_compute
    count = x.size // x.shape[-1]
    return axis % x.ndim == x.ndim - 1 and fusable(x.queue, x.shape, real, DTYPES[x.dtype], (x,)) and busy(x.queue, count, x.shape[-1])


def _deferred_along_axis(name: str, rows: Callable[..., Any], count: int) -> Callable[..., Tensor | None]:
    """Return a function that defers an op of ``count`` tensors and an axis. The function returns ``None`` for calls it cannot defer."""

    def deferred(*args: Any, axis: int = -1, widen: bool = False, dtype: str | None = None, **named: Any) -> Tensor | None:
        if named:
            return None  # tensors that are passed by name run the op's own kernels
        tensors, y = args[:count], args[count - 1]
        if not _last(y, *(args[count:] or (axis,))) or any(not isinstance(t, Tensor) or t.shape != y.shape for t in tensors):
            return None
        r = _Rows(name, y)
        r.dtype = dtype or (r.wide if widen else y.dtype)
        return rows(r, *tensors)

    return deferred


def _is_row_norm(x: Any, axes: int, groups: int, *others: Any) -> bool:
    """Whether a row norm is over trailing axes, has valid operands, and its rows keep the device busy."""
    if groups or not isinstance(x, Tensor) or not 1 <= axes <= x.ndim or x.dtype not in launch.FLOATS or not x.size:
        return False
    count = math.prod(x.shape[: x.ndim - axes])
    fits = all(t is None or (isinstance(t, Tensor) and t.shape == x.shape[x.ndim - axes :]) for t in others)
    return fits and fusable(x.queue, x.shape, DTYPES[x.dtype].c_compute, DTYPES[x.dtype], (x,)) and busy(x.queue, count, x.size // count)


def _row_norm(
    x: Any, weight: Any = None, bias: Any = None, *, axes: int = 1, groups: int = 0, centered: bool = True, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not _is_row_norm(x, axes, groups, weight, bias):
        return None
    r, lead = _Rows("row_norm", x, axes), x.shape[: x.ndim - axes]
    y, mean, rstd = norm_rows(r, x, weight, bias, centered, eps)
    stats = Tensor.zeros(lead, r.wide, queue=x.queue) if mean is None else with_shape(mean, lead)
    return y, stats, with_shape(rstd, lead)


def _row_norm_grad(
    upstream: Any, x: Any, weight: Any, mean: Any, rstd: Any, *, axes: int = 1, groups: int = 0, centered: bool = True
) -> Tensor | None:
    if not _is_row_norm(x, axes, groups, weight) or not isinstance(upstream, Tensor) or upstream.shape != x.shape:
        return None
    kept = (*mean.shape, *(1,) * axes)
    stats = with_shape(mean, kept), with_shape(rstd, kept)
    return norm_grad_rows(_Rows("row_norm_grad", x, axes), upstream, x, weight, *stats, centered)


def _row_norm_weight_grad(upstream: Any, x: Any, mean: Any, rstd: Any, *, axes: int = 1, groups: int = 0) -> tuple[Tensor, Tensor] | None:
    if not _is_row_norm(x, axes, groups) or not isinstance(upstream, Tensor) or upstream.shape != x.shape or x.ndim == axes:
        return None
    r, kept = _Rows("row_norm_weight_grad", x, axes), (*mean.shape, *(1,) * axes)
    shape, dtype = x.shape[x.ndim - axes :], DTYPES[mean.dtype]
    terms = norm_weight_terms(r, upstream, x, with_shape(mean, kept), with_shape(rstd, kept))
    sums = [lazy_graph.defer_columns("columns", SAME, t, axes, shape, dtype, r.real) for t in terms]
    return None if sums[0] is None or sums[1] is None else (sums[0], sums[1])


def _row_norm_grads(
    upstream: Any, x: Any, weight: Any, mean: Any, rstd: Any, *, axes: int = 1, groups: int = 0, centered: bool = True
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not any(lazy_graph.waiting_node(t) is not None for t in (upstream, x)):
        return None  # the op's own kernel reads them once for all three; a chain that takes the first further would read them again
    d_x = _row_norm_grad(upstream, x, weight, mean, rstd, axes=axes, groups=groups, centered=centered)
    sums = None if d_x is None else _row_norm_weight_grad(upstream, x, mean, rstd, axes=axes, groups=groups)
    return None if d_x is None or sums is None else (d_x, *sums)


FUSED: dict[str, Callable[..., Any]] = {
    "softmax": _deferred_along_axis("softmax", softmax_rows, 1), "log_softmax": _deferred_along_axis("log_softmax", log_softmax_rows, 1),
    "softmax_grad": _deferred_along_axis("softmax_grad", softmax_grad_rows, 2),
    "log_softmax_grad": _deferred_along_axis("log_softmax_grad", log_softmax_grad_rows, 2),
    "row_norm": _row_norm, "row_norm_grad": _row_norm_grad, "row_norm_weight_grad": _row_norm_weight_grad,
    "row_norm_grads": _row_norm_grads,
}  # fmt: skip


def fused(name: str) -> Callable[..., Any]:
    """Return a function that defers an op as formulas in compiled functions; it returns ``None`` if the op's own kernels must run."""
    form = FUSED[name]

    def formulas(*args: Any, **kwargs: Any) -> Any:
        if deferral.mode is None or not deferral.mode.rows:
            return None
        return lazy_graph.as_formulas(lambda: form(*args, **kwargs), lambda: _planned_op(name)(*args, **kwargs), args)

    return formulas


@cache
def _planned_op(name: str) -> Callable[..., Any]:
    row = REGISTRY[name]
    assert isinstance(row, Op)
    return planned(row, row.call)


def deferred_expand(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return ``x`` repeated to ``shape`` as a deferred tensor, whose readers load ``x``; ``None`` if deferring is impossible or slower."""
    real = DTYPES[x.dtype].c_compute
    wanted = deferral.mode is not None or lazy_graph.worth_deferring(x.queue, shape)
    if not wanted or not fusable(x.queue, shape, real, DTYPES[x.dtype], (x,)):
        return None
    return lazy_graph.defer("expand", SAME, (x,), (), shape, DTYPES[x.dtype], real, x.queue)
