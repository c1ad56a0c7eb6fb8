"""Reductions, softmax and row norms expressed in deferred formulas and folds, for compiled functions.

Each entry of :data:`FUSED` expresses an op in formulas and folds. It returns ``None`` for a call that is not over rows; the op's own
kernel then runs and raises its errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from netcl.core.dtype import DTYPES, STORED
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import fused_kernel, launch, lazy_graph
from netcl.engine.call import planned
from netcl.engine.map_kernel import fusable
from netcl.engine.modes import deferral
from netcl.engine.reduction import SAME, busy, fold_innermost, formula
from netcl.engine.registry import REGISTRY, Op, Reduction

# ---- ops


def _last(x: Any, axis: int) -> bool:
    """Whether ``axis`` is the last axis of a float tensor whose rows the device can fuse."""
    if not isinstance(x, Tensor) or x.dtype not in launch.FLOATS or not x.ndim or not x.size or not -x.ndim <= axis < x.ndim:
        return False
    real = DTYPES[x.dtype].c_compute
    count = x.size // x.shape[-1]
    return axis % x.ndim == x.ndim - 1 and fusable(x.queue, x.shape, real, DTYPES[x.dtype], (x,)) and busy(x.queue, count, x.shape[-1])


class _Rows:
    """Formulas over the rows of a tensor in its compute type, whatever it is stored in."""

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


def _deferred_softmax(x: Any, axis: int = -1) -> Tensor | None:
    if not _last(x, axis):
        return None
    r = _Rows("softmax", x)
    e = r.of("EXP_BELOW(v0 - v1)", v0=x, v1=r.fold("amax", x))
    return r.of("v0 * v1", x.dtype, v0=e, v1=r.of("1 / v0", v0=r.fold("sum", e)))


def _log_softmax(x: Any, axis: int = -1) -> Tensor | None:
    if not _last(x, axis):
        return None
    r = _Rows("log_softmax", x)
    z = r.of("v0 - v1", v0=x, v1=r.fold("amax", x))
    return r.of("v0 - v1", x.dtype, v0=z, v1=r.of("LOG(v0)", v0=r.fold("sum", r.of("EXP_BELOW(v0)", v0=z))))


def _softmax_grad(upstream: Any, y: Any, axis: int = -1) -> Tensor | None:
    if not _last(y, axis) or not isinstance(upstream, Tensor) or upstream.shape != y.shape:
        return None
    r = _Rows("softmax_grad", y)
    total = r.fold("sum", r.of("v0 * v1", v0=upstream, v1=y))
    return r.of("v1 * (v0 - v2)", y.dtype, v0=upstream, v1=y, v2=total)


def _log_softmax_grad(upstream: Any, y: Any, axis: int = -1) -> Tensor | None:
    if not _last(y, axis) or not isinstance(upstream, Tensor) or upstream.shape != y.shape:
        return None
    r = _Rows("log_softmax_grad", y)
    return r.of("v0 - EXP_BELOW(v1) * v2", y.dtype, v0=upstream, v1=y, v2=r.fold("sum", upstream))


def _is_row_norm(x: Any, axes: int, groups: int, *others: Any) -> bool:
    """Whether a row norm is over trailing axes and has valid operands."""
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
    mean = r.fold("mean", x) if centered else None
    d = r.of("v0 - v1", v0=x, v1=mean) if centered else x
    spread = r.fold("mean", r.of("v0 * v0", v0=d))
    rstd = r.of("RSQRT(v0 + eps)", v0=spread, numbers={"eps": eps})
    text = "v0 * v1"
    bound: dict[str, Any] = {"v0": d, "v1": rstd}
    if weight is not None:
        text, bound = f"{text} * v2", {**bound, "v2": weight}
    if bias is not None:
        text, bound = f"{text} + v3", {**bound, "v3": bias}
    y = r.of(text, x.dtype, **bound)
    stats = Tensor.zeros(lead, r.wide, queue=x.queue) if mean is None else with_shape(mean, lead)
    return y, stats, with_shape(rstd, lead)


def _row_norm_grad(
    upstream: Any, x: Any, weight: Any, mean: Any, rstd: Any, *, axes: int = 1, groups: int = 0, centered: bool = True
) -> Tensor | None:
    if not _is_row_norm(x, axes, groups, weight) or not isinstance(upstream, Tensor) or upstream.shape != x.shape:
        return None
    r = _Rows("row_norm_grad", x, axes)
    kept = (*mean.shape, *(1,) * axes)
    gw = upstream if weight is None else r.of("v0 * v1", v0=upstream, v1=weight)
    xh = r.of("(v0 - v1) * v2", v0=x, v1=with_shape(mean, kept), v2=with_shape(rstd, kept))
    slope = r.fold("mean", r.of("v0 * v1", v0=gw, v1=xh))
    bound: dict[str, Any] = {"v0": gw, "v1": xh, "v2": slope, "v3": with_shape(rstd, kept)}
    if not centered:
        return r.of("v3 * (v0 - v1 * v2)", x.dtype, **bound)
    return r.of("v3 * (v0 - v1 * v2 - v4)", x.dtype, **bound, v4=r.fold("mean", gw))


def _row_norm_weight_grad(upstream: Any, x: Any, mean: Any, rstd: Any, *, axes: int = 1, groups: int = 0) -> tuple[Tensor, Tensor] | None:
    if not _is_row_norm(x, axes, groups) or not isinstance(upstream, Tensor) or upstream.shape != x.shape or x.ndim == axes:
        return None
    r, kept = _Rows("row_norm_weight_grad", x, axes), (*mean.shape, *(1,) * axes)
    shape, dtype = x.shape[x.ndim - axes :], DTYPES[mean.dtype]
    gx = r.of("v0 * (v1 - v2) * v3", v0=upstream, v1=x, v2=with_shape(mean, kept), v3=with_shape(rstd, kept))
    g = r.of("v0", v0=upstream)
    sums = [lazy_graph.defer_columns("columns", SAME, t, axes, shape, dtype, r.real) for t in (gx, g)]
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
    "softmax": _deferred_softmax, "log_softmax": _log_softmax, "softmax_grad": _softmax_grad, "log_softmax_grad": _log_softmax_grad,
    "row_norm": _row_norm, "row_norm_grad": _row_norm_grad, "row_norm_weight_grad": _row_norm_weight_grad,
    "row_norm_grads": _row_norm_grads,
}  # fmt: skip


def fused(name: str) -> Callable[..., Any]:
    """Return a function that expresses an op in formulas, for compiled functions; it gives ``None`` where the op's kernels must run."""
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
    """Return ``x`` repeated to ``shape`` as a deferred tensor whose readers load ``x``; ``None`` if that is not worthwhile."""
    real = DTYPES[x.dtype].c_compute
    wanted = deferral.mode is not None or lazy_graph.worth_deferring(x.queue, shape)
    if not wanted or not fusable(x.queue, shape, real, DTYPES[x.dtype], (x,)):
        return None
    return lazy_graph.defer("expand", SAME, (x,), (), shape, DTYPES[x.dtype], real, x.queue)


__all__ = ["FUSED", "deferred_expand", "fused", "fused_kernel"]
