"""Batch norm: each channel of ``(N, C, ...)`` is normalized by statistics of the batch, or by running averages."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.device import profile_of
from netcl.core.dtype import DTYPES, HALVES, sum_dtype
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.kernel_selector import KernelVariant, Problem, get_kernel_selector
from netcl.core.tensor import Tensor, with_shape
from netcl.core.writes import wrote
from netcl.engine import launch, lazy_graph, rows
from netcl.engine.map_kernel import fusable
from netcl.engine.modes import deferral
from netcl.engine.plan import planned
from netcl.engine.reduction import formula
from netcl.engine.registry import S, composite, op
from netcl.ops.fused_rows import OpRows
from netcl.ops.norm import (
    all_gradients,
    batch_view,
    check_affine,
    defines_of,
    empty_pair,
    join_moments,
    norm_arrays,
    operands_of,
    parts_of,
    run_channels,
    run_norm_rows,
    sums,
    through_statistics,
)
from netcl.ops.pointwise import add, mul, neg, relu, rsqrt, sub

FUSED_ELEMENTS = 1 << 16  # up to this size a GPU folds and applies in one launch for any number of channels: two launches would cost more

_BATCH_SAMPLES = [
    S((5, 3, 7, 5), (3,), (3,), None, None), S((3, 2, 257), (2,), None, None, None), S((33, 17), (17,), (17,), None, None),
    S((300, 2), None, None, None, None), S((2, 70, 4, 4), None, None, None, None), S((0, 3, 2), (3,), (3,), None, None),
]  # fmt: skip
_BATCH_GRAD_SAMPLES = [
    S((5, 3, 7, 5), (5, 3, 7, 5), (3,), (3,), (3,), high=2.0), S((33, 17), (33, 17), (17,), (17,), (17,)),
    S((300, 2), (300, 2), None, (2,), (2,)),
    S((2, 70, 4, 4), (2, 70, 4, 4), None, (70,), (70,)), S((0, 3, 2), (0, 3, 2), (3,), (3,), (3,)),
]  # fmt: skip


# ---- NumPy


def _inference_cpu(x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float, fuse_relu: bool) -> np.ndarray:
    view = batch_view(x.shape)
    scale = 1 / np.sqrt(var + var.dtype.type(eps)) * (1 if weight is None else weight)
    y = (x.reshape(view.shape) - mean.reshape(view.stats)) * scale.reshape(view.stats)
    y = (y if bias is None else y + bias.reshape(view.affine)).reshape(x.shape)
    return np.maximum(y, 0) if fuse_relu else y


# ---- checks and launches


def _check_batch(name: str, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, labels: tuple[str, str] = ("mean", "var")) -> None:
    launch.check_dtype(name, x)
    if x.ndim < 2:
        raise ShapeError(message(name, "x must be (N, C, ...)", x=x.shape))
    check_affine(name, x.shape[1:2], weight, bias)
    given, both = dict(zip(labels, (mean, var), strict=True)), " and ".join(labels)
    if (mean is None) != (var is None):
        shapes = {label: getattr(t, "shape", None) for label, t in given.items()}
        raise ShapeError(message(name, f"{both} must both be given, or neither", **shapes))
    for label, t in given.items():
        if t is not None and t.shape != x.shape[1:2]:
            raise ShapeError(message(name, f"{label} must have shape {x.shape[1:2]}", **{label: t.shape}))
    if mean is not None and var is not None and mean.dtype != var.dtype:
        raise DtypeError(message(name, f"{both} must have the same dtype", **{label: t.dtype for label, t in given.items()}))


def _train_cpu(x: Tensor, weight: Any, bias: Any, running: tuple[Any, Any], momentum: float, eps: float) -> Any:
    def compute(a: np.ndarray, w: Any, b: Any) -> tuple[np.ndarray, ...]:
        view = batch_view(a.shape)
        y, mean, rstd = norm_arrays(a, w, b, view, eps)
        if running[0] is not None and a.size:
            var = a.reshape(view.shape).var(view.stat_axes, ddof=1)
            for t, new in zip(running, (mean.reshape(-1), var), strict=True):
                t.write((1 - momentum) * t.to_host() + momentum * new)
        return y, mean.reshape(-1), rstd.reshape(-1)

    dtype = sum_dtype(x.dtype)
    return launch.run_cpu(compute, x, weight, bias, dtype=(x.dtype, dtype, dtype))


def _fuses(queue: Any, x: Tensor, span: int) -> bool:
    """Whether to reduce and normalize in one launch: if ``span`` > 1 and channels occupy the device or, on a GPU, ``x`` is small."""
    cpu, _, units = rows.device_of(queue)
    return span > 1 and (x.shape[1] >= units if cpu else x.size <= FUSED_ELEMENTS or 4 * x.shape[1] >= 3 * units)


def _apply_args(x: Tensor, span: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return which kernel applies the statistics (``columns`` or ``rows``), its extra arguments, the number of rows and their length."""
    images, channels = x.shape[:2]
    return ("columns", (), images, channels) if span == 1 else ("rows", (channels,), images * channels, span)


def _defers(x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether to defer the result, so that a following addition and ReLU run in the kernel that applies the statistics."""
    real = DTYPES[x.dtype].c_compute
    if deferral.mode is None and not lazy_graph.worth_deferring(x.queue, x.shape):
        return False
    same = all(t is None or DTYPES[t.dtype].c_compute == real for t in (weight, bias))
    return same and fusable(x.queue, x.shape, real, DTYPES[x.dtype], (x,))


def _applied(x: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the normalized ``x`` as a deferred formula over statistics that are already computed."""
    given = {"v0": x, "v1": mean, "v2": rstd, "v3": weight, "v4": bias}
    seen = (x.shape[1], *(1,) * (x.ndim - 2))
    bound = {name: t.detach() if t is x else with_shape(t, seen) for name, t in given.items() if t is not None}
    text = f"(v0 - v1) * {'v2' if weight is None else '(v2 * v3)'}{'' if bias is None else ' + v4'}"
    return formula("batch_norm", text, bound, {}, x.dtype, DTYPES[x.dtype].c_compute, x.shape)


def _statistics(
    x: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float, weight: Any = None, bias: Any = None, y: Any = None
) -> tuple[Tensor, Tensor]:
    """Compute mean and one over the standard deviation of every channel, and update the running statistics, if any.

    For ``x`` that :func:`_fuses`, the same launch can normalize it to ``y``, with ``weight`` and ``bias``.
    """
    if running_mean is not None:
        wrote((running_mean, running_var))
    sizes = parts_of(x.queue, *batch_view(x.shape).shape)
    mean, rstd = empty_pair(x.shape[1:2], x, sum_dtype(x.dtype))
    operands = operands_of(x, x, x if y is None else y, weight, bias, mean, running_mean)
    defines = defines_of(weight, bias, per_element=sizes.span == 1, columns=sizes.span == 1)
    # A negative momentum means there is nothing to update.
    update = (mean, mean, eps, -1.0) if running_mean is None else (running_mean, running_var, eps, momentum)
    if _fuses(x.queue, x, sizes.span) or (sizes.span > 1 and sizes.parts == 1):
        given = (x if weight is None else weight, x if bias is None else bias, mean if y is None else y)
        defines["APPLIES"] = int(y is not None)
        run_channels("batch_norm_channels", operands, defines, x.queue, sizes, sizes.channels, x, *given, mean, rstd, *update)
        return mean, rstd
    parts = empty_pair((sizes.parts, sizes.channels), x, mean.dtype)
    split = (sizes.chunk, sizes.parts)
    run_channels("moment_parts", operands, defines, x.queue, sizes, sizes.parts * sizes.channels, x, *parts, *split)
    join_moments(operands, defines, x.queue, sizes.channels, *parts, mean, rstd, *update, *split, *sizes[:3])
    return mean, rstd


_planned_statistics = planned("batch_norm_statistics", _statistics)


def _deferred_train(
    x: Any, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None, *, momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Compute the statistics and defer the result. Return the result and the statistics, or ``None`` if deferring is impossible."""
    x, weight, bias, running_mean, running_var = _check_train(x, weight, bias, running_mean, running_var)
    if x.backend == "cpu" or not x.size or not _defers(x, weight, bias):
        return None
    x.realize()
    mean, rstd = _planned_statistics(x, running_mean, running_var, momentum, eps)
    return _applied(x, weight, bias, mean, rstd), mean, rstd


def _check_train(*tensors: Any) -> list[Any]:
    x, weight, bias, running_mean, running_var = launch.as_tensors("batch_norm", *tensors)
    _check_batch("batch_norm", x, weight, bias, running_mean, running_var, ("running_mean", "running_var"))
    if x.shape[1] and x.size == x.shape[1]:
        remedy = "pass a larger batch (drop_last=True of a DataLoader), or call model.eval() first"
        raise ShapeError(message("batch_norm", "training requires more than one value per channel", remedy, x=x.shape))
    return [x, weight, bias, running_mean, running_var]


def _train_cl(x: Tensor, weight: Any, bias: Any, running: tuple[Any, Any], momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, span = Tensor.empty(x.shape, x.dtype, queue=x.queue), math.prod(x.shape[2:])
    if _fuses(x.queue, x, span):
        return y, *_statistics(x, *running, momentum, eps, weight, bias, y)
    mean, rstd = _statistics(x, *running, momentum, eps)
    kind, extra, n_rows, n = _apply_args(x, span)
    operands, defines = operands_of(x, x, y, weight, bias, mean), defines_of(weight, bias, per_element=span == 1, columns=span == 1)
    args = (x, x if weight is None else weight, x if bias is None else bias, mean, rstd, y, eps, *extra)
    run_norm_rows(f"norm_apply_{kind}", operands, defines, x, n_rows, n, *args)
    return y, mean, rstd


# ---- gradients


def _batch_norm_train_vjp(F, g, out1, out2, x, weight, needs):
    gy, g_mean, g_rstd = g
    mean, rstd = out1, out2
    gy = F.mul(x, 0) if gy is None else gy
    d_x, d_weight, d_bias = F.batch_norm_grad(gy, x, weight, mean, rstd)
    d_x = through_statistics(F, d_x, g_mean, g_rstd, x, mean, rstd, batch_view(x.shape), True)
    return d_x, d_weight if needs[1] else None, d_bias if needs[2] else None, None, None


def _batch_norm_inference_vjp(F, g, x, mean, var, weight, bias, eps, fuse_relu, needs):
    if fuse_relu:  # the result is recomputed rather than kept
        g = F.where(F.le(F.batch_norm_inference(x, mean, var, weight, bias, eps=eps), 0), F.mul(g, 0), g)
    rstd, view = F.rsqrt(F.add(var, eps)), batch_view(x.shape)
    g = F.reshape(g, view.shape)
    d_bias = F.sum(g, axis=view.stat_axes) if needs[1] or needs[4] else None
    deviation = F.sub(F.reshape(x, view.shape), F.reshape(mean, view.stats))
    d_weight = F.mul(F.sum(F.mul(g, deviation), axis=view.stat_axes), rstd) if needs[2] or needs[3] else None
    scale = rstd if weight is None else F.mul(rstd, weight)
    d_x = F.reshape(F.mul(g, F.reshape(scale, view.stats)), x.shape) if needs[0] else None
    d_mean = F.neg(F.mul(d_bias, scale)) if needs[1] else None
    d_var = F.mul(F.mul(d_weight, scale), F.mul(rstd, -0.5)) if needs[2] else None
    return d_x, d_mean, d_var, d_weight if needs[3] else None, d_bias if needs[4] else None


def _before_relu(upstream: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """If ``upstream`` is the pending gradient of a ReLU, return that ReLU's own upstream gradient and its result; else ``None``."""
    node = lazy_graph.waiting_node(upstream)
    if node is None or node.name != "relu_vjp" or node.shape != x.shape or upstream.shape != x.shape or math.prod(x.shape[2:]) == 1:
        return None
    given = dict(zip(node.body.inputs, node.inputs, strict=True))
    g, kept = given["g"], given["out"]
    if not all(isinstance(t, Tensor) and t.shape == x.shape and t.dtype == node.dtype for t in (g, kept)):
        return None  # one of them is pending too: a kernel for all pending values reads less
    return g.detach(), kept.detach()


def _grads(g: Tensor, kept: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias. ``g`` is the gradient of the norm's result or, if given, of its ReLU ``kept``."""
    y, above = Tensor.empty(x.shape, x.dtype, queue=x.queue), (g, g if kept is None else kept)
    sizes = parts_of(x.queue, *batch_view(x.shape).shape)
    operands = operands_of(g, x, y, weight, weight, mean) | ({} if kept is None else {"K": kept.dtype})
    defines = defines_of(weight, weight, per_element=sizes.span == 1, columns=sizes.span == 1, masked=kept is not None)
    w = x if weight is None else weight
    if _fuses(x.queue, x, sizes.span):
        weight_grad, bias_grad = empty_pair(mean.shape, x, mean.dtype)
        whole, args = sizes._replace(chunk=sizes.images, parts=1), (*above, x, w, mean, rstd, y, weight_grad, bias_grad)
        run_channels("batch_norm_grad_channels", operands, defines, x.queue, whole, sizes.channels, *args)
        return y, weight_grad, bias_grad
    weight_grad, bias_grad = sums(operands, g, kept, x, mean, rstd, sizes, 0, 1)
    kind, extra, n_rows, n = _apply_args(x, sizes.span)
    given = (*(above if kind == "rows" else (g,)), x, w, mean, rstd, weight_grad, bias_grad, y, float(sizes.images * sizes.span))
    run_norm_rows(f"batch_norm_grad_{kind}", operands, defines, x, n_rows, n, *given, *extra)
    return y, weight_grad, bias_grad


_planned_grads = planned("batch_norm_before_relu", _grads)


def _deferred_grad(upstream: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients, computed together with a pending ReLU gradient; ``None`` if that is impossible."""
    before = _before_relu(upstream, x) if isinstance(x, Tensor) and x.size and x.backend == "cl" else None
    return None if before is None else _planned_grads(*before, x, weight, mean, rstd)


# ---- ops


@op(vjp=_batch_norm_train_vjp, ref="numpy", samples=_BATCH_SAMPLES, tol=4,
    deferred=_deferred_train,
    errors=[(S((1, 3), None, None, None, None), r"\[batch_norm\] training requires more than one value per channel")])  # fmt: skip
def batch_norm_train(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, running_mean: Tensor | None = None,
    running_var: Tensor | None = None, *, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize by the batch's own statistics; returns the result, the means and one over the standard deviations.

    Running statistics are updated in place, if given. For this update, the batch's variance is divided by n - 1 instead of n.
    """
    x, weight, bias, running_mean, running_var = _check_train(x, weight, bias, running_mean, running_var)
    running = (running_mean, running_var)
    if x.backend == "cpu":
        return _train_cpu(x, weight, bias, running, momentum, eps)
    if not x.size:
        dtype, channels = sum_dtype(x.dtype), x.shape[1:2]
        rstd = Tensor.full(channels, eps**-0.5, dtype, queue=x.queue)
        return Tensor.empty(x.shape, x.dtype, queue=x.queue), Tensor.zeros(channels, dtype, queue=x.queue), rstd
    return _train_cl(x, weight, bias, running, momentum, eps)


@op(vjp=None, ref="numpy", samples=_BATCH_GRAD_SAMPLES, tol=8,
    formula=lambda F, g, x, weight, mean, rstd:
        all_gradients(g, x, weight, mean, rstd, batch_view(x.shape), rows=partial(OpRows, F)),
    deferred=_deferred_grad, defer_if=lambda upstream, *rest: lazy_graph.waiting_node(upstream) is not None)  # fmt: skip
def batch_norm_grad(upstream: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`batch_norm_train`: input, weight, bias."""
    upstream, x, weight, mean, rstd = launch.as_tensors("batch_norm_grad", upstream, x, weight, mean, rstd)
    _check_batch("batch_norm_grad", x, weight, None, mean, rstd, ("mean", "rstd"))
    if x.backend == "cpu":
        kinds = (x.dtype, mean.dtype, mean.dtype)
        return launch.run_cpu(all_gradients, upstream, x, weight, mean, rstd, dtype=kinds, view=batch_view(x.shape))
    if not x.size:
        none = Tensor.zeros(mean.shape, mean.dtype, queue=x.queue)
        return Tensor.empty(x.shape, x.dtype, queue=x.queue), none, Tensor.zeros(mean.shape, mean.dtype, queue=x.queue)
    return _grads(upstream, None, x, weight, mean, rstd)


def _into_product(
    x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, fuse_relu: bool = False
) -> Tensor | None:
    """In a recorded step, fold the norm into the weights and bias of the pending product ``x``; ``None`` if that is impossible."""
    product, given = getattr(x, "source", None), [t for t in (mean, var, weight, bias) if t is not None]
    if recording.active.recorder is None or not isinstance(product, lazy_graph.Product) or x.requires_grad or x.dtype in HALVES:
        return None
    if x.shape != product.shape or any(type(t) is not Tensor or t.dtype != x.dtype or recording.made(t, or_given=True) for t in given):
        return None
    _check_batch("batch_norm", x, weight, bias, mean, var)
    mean, var, weight, bias = (None if t is None else t.detach() for t in (mean, var, weight, bias))
    scale = rsqrt(add(var, eps)) if weight is None else mul(rsqrt(add(var, eps)), weight)
    shift = mul(neg(mean), scale) if bias is None else sub(bias, mul(mean, scale))
    y = product.by_channel(scale, shift)
    return relu(y) if fuse_relu and y is not None else y


@op(
    vjp=_batch_norm_inference_vjp, ref="numpy", tol=4, deferred=_into_product,
    samples=[S((2, 3, 7, 5), (3,), (3,), (3,), (3,), low=0.1, high=2.0), S((3, 17), (17,), (17,), None, None, low=0.1),
             S((2, 3, 7, 5), (3,), (3,), (3,), (3,), low=0.1, high=2.0, fuse_relu=True),
             S((3, 17), (17,), (17,), None, None, low=0.1, fuse_relu=True), S((0, 3), (3,), (3,), None, None, low=0.1)],
)  # fmt: skip
def batch_norm_inference(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5,
    fuse_relu: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize by given statistics; ``fuse_relu=True`` also applies a ReLU."""
    x, mean, var, weight, bias = launch.as_tensors("batch_norm", x, mean, var, weight, bias)
    _check_batch("batch_norm", x, weight, bias, mean, var)
    if x.backend == "cpu":
        return launch.run_cpu(_inference_cpu, x, mean, var, weight, bias, eps=eps, fuse_relu=fuse_relu)
    ends = fuse_relu
    if fuse_relu:
        flags = {"training": False, "fuse_relu": True}
        problem = Problem("batchnorm", (*x.shape[:2], math.prod(x.shape[2:]), 1), x.dtype, flags, profile_of(x.queue))
        ends = get_kernel_selector().choose(problem, (x.shape,)).variant is KernelVariant.BATCHNORM_FUSED
    y = Tensor.empty(x.shape, x.dtype, queue=x.queue)
    if x.size:
        kind, extra, n_rows, n = _apply_args(x, math.prod(x.shape[2:]))
        defines = defines_of(weight, bias, per_element=kind == "columns", columns=kind == "columns", variance=True, relu=ends)
        args = (x, x if weight is None else weight, x if bias is None else bias, mean, var, y, eps, *extra)
        run_norm_rows(f"norm_apply_{kind}", operands_of(x, x, y, weight, bias, mean), defines, x, n_rows, n, *args)
    return relu(y) if fuse_relu and not ends else y


@composite(
    ref="numpy", tol=4,
    samples=[S((4, 3, 5), None, None, (3,), (3,), training=True, fuse_relu=True),
             S((4, 3, 5), None, None, (3,), (3,), training=True), S((4, 3, 5), (3,), (3,), (3,), (3,), low=0.1)],
    errors=[(S((4, 3), (3,), None), r"\[batch_norm\] running_mean and running_var must both be given, or neither; running_mean=\(3,\)"),
            (S((4, 3), None, None, (4,)), r"\[batch_norm\] weight must have shape \(3,\); weight=\(4,\)")],
)  # fmt: skip
def batch_norm(
    F: Any, x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, *, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, fuse_relu: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize each channel of ``(N, C, ...)`` by its running statistics; in training or without them, by the statistics of the batch.

    Training updates ``running_mean`` and ``running_var`` in place, if given: ``running = (1 - momentum) * running + momentum * batch``. For
    this update, the batch's variance is divided by n - 1. ``fuse_relu=True`` applies a ReLU to the result.

    >>> from netcl import ops
    >>> ops.batch_norm([[1.0], [3.0]], training=True, eps=0.0).tolist()
    [[-1.0], [1.0]]
    """
    if training or running_mean is None or running_var is None:
        y = F.batch_norm_train(x, weight, bias, running_mean, running_var, momentum=momentum, eps=eps)[0]
        return F.relu(y) if fuse_relu else y
    return F.batch_norm_inference(x, running_mean, running_var, weight, bias, eps=eps, fuse_relu=fuse_relu)
