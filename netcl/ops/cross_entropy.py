"""Cross-entropy kernels: forward, reduction and backward. :mod:`netcl.ops.loss` checks the labels and calls them.

Targets are class labels of any dtype, or probabilities of the logits' shape. A label that is neither a class nor ``ignore_index``
gives NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from netcl.core.dtype import sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, new_result
from netcl.engine import launch, rows
from netcl.engine.registry import S, op
from netcl.ops.movement import along
from netcl.ops.pointwise import cast


class LossProblem(NamedTuple):
    """The sizes and options of a call: (outer, classes, inner) logits, whether targets are probabilities, and the keyword arguments."""

    outer: int
    classes: int
    inner: int
    probabilities: bool
    reduction: str
    ignore_index: int
    label_smoothing: float
    log_probs: bool
    widen: bool = False

    @property
    def rows(self) -> int:
        return self.outer * self.inner


def _class_axis(shape: tuple[int, ...]) -> int:
    return min(1, len(shape) - 1)


def check_target(name: str, logits: Tensor, target: Tensor, weight: Tensor | None) -> int:
    """Return the axis of the classes: 1, or 0 of a vector; raises unless the shapes of target and weight fit the logits."""
    if not logits.ndim:
        raise ShapeError(message(name, "logits must be (C,), (N, C) or (N, C, ...)", logits=logits.shape))
    axis = _class_axis(logits.shape)
    labels = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    if target.shape not in (labels, logits.shape):
        what = f"target must be class numbers of shape {labels} or probabilities of shape {logits.shape}"
        raise ShapeError(message(name, what, target=target.shape, logits=logits.shape))
    if weight is not None and weight.shape != (logits.shape[axis],):
        raise ShapeError(message(name, f"weight must have one number for each of the {logits.shape[axis]} classes", weight=weight.shape))
    return axis


def _problem(name: str, logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> LossProblem:
    launch.check_dtype(name, logits, name="logits")
    if not 0 <= options["label_smoothing"] <= 1:
        raise ShapeError(message(name, "label_smoothing must be between 0 and 1", label_smoothing=options["label_smoothing"]))
    return LossProblem(*rows.around(logits.shape, check_target(name, logits, target, weight)), target.shape == logits.shape, **options)


# ---- NumPy


def _targets_cpu(target: np.ndarray, weight: Any, p: LossProblem, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return targets with weights and smoothing as (outer, classes, inner), and the weight of each row as (outer, inner)."""
    w = np.ones(p.classes, dtype) if weight is None else weight
    smooth, sharp = dtype.type(p.label_smoothing / max(p.classes, 1)), dtype.type(1 - p.label_smoothing)
    if p.probabilities:
        t = target.reshape(p.outer, p.classes, p.inner) * sharp + smooth
        return t * w[:, None], np.ones((p.outer, p.inner), dtype)
    labels = target.reshape(p.outer, 1, p.inner)
    numbers, ignored = labels[:, 0], labels[:, 0] == p.ignore_index
    with np.errstate(invalid="ignore"):
        bad = ~((numbers >= 0) & (numbers < p.classes) & (numbers == np.floor(numbers)) | ignored)
    seen = ~ignored & ~bad
    index = np.where(seen, labels[:, 0], 0).astype(np.int64)
    counts = np.where(seen, w[index] if p.classes else 0, 0).astype(dtype)
    t = np.where(seen, smooth, 0)[:, None] * w[:, None]
    if p.classes:
        np.put_along_axis(t, index[:, None], np.take_along_axis(t, index[:, None], 1) + sharp * counts[:, None], 1)
    counts[bad] = np.nan
    t.transpose(0, 2, 1)[bad] = np.nan
    return t, counts


def _forward_cpu(logits: Any, target: Any, weight: Any, p: LossProblem, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    x = logits.reshape(p.outer, p.classes, p.inner)
    t, counts = _targets_cpu(target, weight, p, x.dtype)
    logs = np.zeros((p.outer, p.inner), x.dtype)
    if not p.log_probs:
        most = x.max(1, keepdims=True, initial=-np.inf)
        logs = (most + np.log(np.exp(x - most).sum(1, keepdims=True)))[:, 0]
    # A class that no label names does not count, even if its logit is -infinity; a weight or probability of 0 times infinity is NaN.
    counted = p.probabilities or (t if weight is None else _targets_cpu(target, None, p, x.dtype)[0]) != 0
    losses = np.where(counted, t * (logs[:, None] - x), 0).sum(1)
    logs = logs.reshape(shape)
    one = np.ones((), x.dtype)
    if p.reduction == "none":
        return losses.reshape(shape), logs, one
    return (losses.sum() / counts.sum(), logs, 1 / counts.sum()) if p.reduction == "mean" else (losses.sum(), logs, one)


def _grad_cpu(g: Any, logits: Any, target: Any, weight: Any, logs: Any, scale: Any, p: LossProblem) -> np.ndarray:
    x = logits.reshape(p.outer, p.classes, p.inner)
    t, _ = _targets_cpu(target, weight, p, x.dtype)
    share = 0 if p.log_probs else np.exp(x - logs.reshape(p.outer, 1, p.inner)) * t.sum(1, keepdims=True)
    upstream = np.broadcast_to(g.reshape((p.outer, 1, p.inner) if p.reduction == "none" else (1, 1, 1)), (p.outer, 1, p.inner)) * scale
    ignored = False if p.probabilities else (target == p.ignore_index).reshape(p.outer, 1, p.inner)
    return (np.where(ignored, 0, upstream) * (share - t)).reshape(logits.shape).astype(x.dtype)


# ---- OpenCL


def _spread_of(p: LossProblem, operands: dict[str, Tensor]) -> rows.Spread:
    cpu, most, _ = rows.device_of(operands["X"].queue)
    if p.inner > 1:
        return rows.Spread(min(rows.COLUMN_LOCAL, most), 1, 1, 1)
    return rows.row_spread(cpu, most, p.classes, any(t.dtype == "float64" for t in operands.values()))


def _run_loss(kernel: str, p: LossProblem, spread: rows.Spread, operands: dict[str, Tensor], *args: Any, **more: int) -> None:
    """Launch a kernel over the rows of logits; ``more`` are macros."""
    queue = operands["X"].queue
    dtypes = {key: t.dtype for key, t in operands.items()}
    facts = (p.probabilities, p.log_probs, p.label_smoothing > 0, p.inner > 1, p.reduction != "none")
    names = ("PROBABILITIES", "LOG_PROBS", "SMOOTHED", "STRIDED", "REDUCED")
    defines = {"HAS_WEIGHT": int("W" in dtypes), "WHOLE": 0, **dict(zip(names, map(int, facts), strict=True)), **more}
    known = {key: dtypes.get(key, dtypes["X"]) for key in ("X", "L", "W", "M", "G", "Y")}
    found = rows.row_kernel(queue, __file__, "cross_entropy.cl", kernel, known, spread, defines)
    numbers = (p.label_smoothing, p.ignore_index, p.inner, p.rows, p.classes, spread.each)
    found(queue, -(-p.rows // spread.each) * spread.group, spread.local, *args, *numbers)


def _forward_cl(logits: Tensor, target: Tensor, weight: Tensor | None, p: LossProblem, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    sums = sum_dtype(logits.dtype)
    queue, dtype = logits.queue, sums if p.widen else logits.dtype
    losses, logs, counts = (new_result(shape, sums, queue) for _ in range(3))
    operands = {"X": logits, "L": target, "M": losses} | ({} if weight is None else {"W": weight})
    spread, mean = _spread_of(p, operands), int(p.reduction == "mean")
    whole = p.reduction != "none" and -(-p.rows // spread.each) * spread.group <= spread.local  # one work-group
    total, scale = (losses, losses) if p.reduction == "none" else (new_result((), dtype, queue), new_result((), sums, queue))
    given = (logits, target, logits if weight is None else weight, losses, logs, counts, total, scale, mean)
    _run_loss("cross_entropy", p, spread, operands | {"Y": total}, *given, WHOLE=int(whole))
    if p.reduction == "none":
        return cast(losses, dtype), logs, Tensor.ones((), sums, queue=queue)
    if whole:
        return total, logs, scale
    real = "float64" if any(t.dtype == "float64" for t in operands.values()) else sums
    kinds = dict.fromkeys("XLWG", real) | {"M": sums, "Y": dtype}  # the total depends neither on the labels nor on the weights
    finish = rows.row_kernel(queue, __file__, "cross_entropy.cl", "cross_entropy_total", kinds, spread, {})
    finish(queue, spread.local, spread.local, losses, counts, total, scale, mean, p.rows)
    return total, logs, scale


# ---- ops


def _forward_vjp(F, g, out1, out2, logits, target, weight, reduction, ignore_index, label_smoothing, log_probs, needs):
    upstream, *others = g
    if any(needs[1:]) or any(t is not None for t in others):
        return (NotImplemented,) * 3
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "log_probs": log_probs}
    return F.cross_entropy_grad(upstream, logits, target, weight, out1, out2, **options), None, None


def _targets_by_ops(F: Any, logits: Any, target: Any, weight: Any, ignored: int, smoothing: float) -> tuple[Any, Any, Any]:
    """Return the targets with weights and smoothing in the shape of the logits, the weight of each row, and which rows are ignored."""
    axis = _class_axis(logits.shape)
    classes, by_class = logits.shape[axis], along(logits.ndim, axis, -1, 1)
    w = 1.0 if weight is None else F.reshape(weight, by_class)
    even, sharp = smoothing / classes, 1 - smoothing
    if target.shape == logits.shape:
        ones = Tensor.ones(_kept_axis(logits.shape), logits.dtype, queue=logits.queue)
        return F.mul(F.add(F.mul(target, sharp), even), w), ones, F.eq(ones, 0.0)
    labels = F.reshape(F.cast(target, logits.dtype), _kept_axis(logits.shape))
    named = F.cast(F.eq(labels, F.reshape(Tensor.arange(classes, dtype=logits.dtype, queue=logits.queue), by_class)), logits.dtype)
    skipped, one = F.eq(labels, float(ignored)), F.sum(named, axis=axis, keepdims=True)
    seen = F.where(skipped, 0.0, F.div(one, one))  # NaN for a label that is no class
    t = F.mul(F.mul(F.add(F.mul(named, sharp), even), w), seen)
    return t, F.mul(F.sum(F.mul(named, w), axis=axis, keepdims=True), seen), skipped


def _forward_by_ops(
    F: Any, logits: Any, target: Any, weight: Any = None, *, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, log_probs: bool = False, widen: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    logits = F.cast(logits, sum_dtype(logits.dtype))
    axis, shape = _class_axis(logits.shape), (*logits.shape[:1], *logits.shape[2:])[: logits.ndim - 1]
    t, counts, _ = _targets_by_ops(F, logits, target, weight, ignore_index, label_smoothing)
    logs = F.mul(counts, 0.0) if log_probs else F.logsumexp(logits, axis=axis, keepdims=True)
    losses, one = F.sum(F.mul(t, F.sub(logs, logits)), axis=axis), Tensor.ones((), logits.dtype, queue=logits.queue)
    if reduction == "mean":
        scale = F.div(one, F.sum(counts))
        return F.mul(F.sum(losses), scale), F.reshape(logs, shape), scale
    return losses if reduction == "none" else F.sum(losses), F.reshape(logs, shape), one


def _grad_by_ops(
    F: Any, upstream: Any, logits: Any, target: Any, weight: Any, logarithms: Any, scale: Any, *, reduction: str = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, log_probs: bool = False,
) -> Any:  # fmt: skip
    logits, kept = F.cast(logits, logarithms.dtype), _kept_axis(logits.shape)
    t, _, skipped = _targets_by_ops(F, logits, target, weight, ignore_index, label_smoothing)
    factor = F.where(skipped, 0.0, F.mul(F.reshape(upstream, kept if reduction == "none" else ()), scale))
    if log_probs:
        return F.mul(factor, F.neg(t))
    shares = F.exp(F.sub(logits, F.reshape(logarithms, kept)))
    return F.mul(factor, F.sub(F.mul(shares, F.sum(t, axis=_class_axis(logits.shape), keepdims=True)), t))


def _kept_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    return along(len(shape), _class_axis(shape), 1, shape)


_L = {"dtypes": (None, "int64", None)}
_CROSS_ENTROPY_SAMPLES = [
    S((3, 5), (3,), None, high=(1.0, 5), low=(-1.0, 0), **_L),
    S((2, 257), (2,), (257,), high=(1.0, 257, 2.0), low=(-1.0, 0, 0.5), **_L),
    S((33, 10), (33,), None, dtypes=(None, "int16", None), low=(-1.0, 0), high=(1.0, 10), reduction="sum"),
    S((4, 3, 5), (4, 5), (3,), high=(1.0, 3, 2.0), low=(-1.0, 0, 0.5), label_smoothing=0.1, dtypes=(None, "uint8", None)),
    S((4, 5), (4,), None, high=(1.0, 5), low=(-1.0, 0), ignore_index=2, reduction="none", label_smoothing=0.2, **_L),
    S((4, 5), (4, 5), (5,), low=0.1),
    S((2, 3, 7), (2, 3, 7), None, low=0.1, label_smoothing=0.3, reduction="none"),
    S((3, 5), (3,), None, high=(1.0, 5), low=(-1.0, 0), log_probs=True, **_L),
    S((5,), np.array(2), None),
    S((0, 5), (0,), None, high=(1.0, 5), low=(-1.0, 0), reduction="sum", **_L),
]
_CROSS_ENTROPY_GRAD_SAMPLES = [
    S((), (3, 5), (3,), None, (3,), (), dtypes=(None, None, "int64", None, None, None), high=(1.0, 1.0, 5, 1.0, 2.0, 1.0),
      low=(-1.0, -1.0, 0, 0.0, 1.0, 0.5)),
    S((2, 7), (2, 257, 7), (2, 7), (257,), (2, 7), (), dtypes=(None, None, "int32", None, None, None), reduction="none",
      label_smoothing=0.1, high=(1.0, 1.0, 257, 2.0, 7.0, 1.0), low=(-1.0, -1.0, 0, 0.5, 6.0, 0.5)),
    S((), (4, 5), (4, 5), (5,), (4,), (), low=(-1.0, -1.0, 0.1, 0.5, 1.0, 0.5), high=(1.0, 1.0, 1.0, 1.0, 2.0, 1.0)),
]  # fmt: skip
_CROSS_ENTROPY_ERRORS = [
    (S((2, 3), (3,), None), r"target must be class numbers of shape \(2,\) or probabilities of shape \(2, 3\); target=\(3,\)"),
    (S((2, 3), np.array([0, 1]), (2,)), r"weight must have one number for each of the 3 classes; weight=\(2,\)"),
]


@op(vjp=_forward_vjp, formula=_forward_by_ops, ref="numpy", amp="wide", tol=4, samples=_CROSS_ENTROPY_SAMPLES,
    errors=_CROSS_ENTROPY_ERRORS)  # fmt: skip
def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, log_probs: bool = False, widen: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the loss, the log-sum-exp of each row, and a factor: one over the divisor of the mean, or 1 for other reductions.

    With ``log_probs``, logits must be log-probabilities, and no log-sum-exp is computed. With ``widen``, the loss of 16-bit logits is
    float32. :func:`netcl.ops.cross_entropy` checks labels.
    """
    logits, target, weight = launch.as_tensors("cross_entropy", logits, target, weight)
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "log_probs": log_probs}
    p = _problem("cross_entropy", logits, target, weight, **options, widen=widen)
    shape = logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else ()
    if logits.backend == "cpu":
        sums = sum_dtype(logits.dtype)
        return launch.run_cpu(_forward_cpu, logits, target, weight, dtype=(sums if widen else logits.dtype, sums, sums), p=p, shape=shape)
    return _forward_cl(logits, target, weight, p, shape) if p.rows and p.classes else _empty(logits, p, shape)


def _empty(logits: Tensor, p: LossProblem, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the result for no rows or no classes: a loss of NaN for a mean, else 0."""
    where = {"queue": logits.queue}
    sums = sum_dtype(logits.dtype)
    dtype = sums if p.widen else logits.dtype
    loss = Tensor.full(shape if p.reduction == "none" else (), math.nan if p.reduction == "mean" else 0, dtype, **where)
    return loss, Tensor.full(shape, -math.inf, sums, **where), Tensor.full((), math.inf if p.reduction == "mean" else 1, sums, **where)


@op(vjp=None, formula=_grad_by_ops, ref="numpy", amp="float", samples=_CROSS_ENTROPY_GRAD_SAMPLES, tol=4)
def cross_entropy_grad(
    upstream: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, logarithms: Tensor, scale: Tensor, *, reduction: str = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, log_probs: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of the logits: ``upstream * scale * (softmax * sum(target) - target)``, without the softmax term if ``log_probs``."""
    name = "cross_entropy_grad"
    upstream, logits, target, weight, logarithms, scale = launch.as_tensors(name, upstream, logits, target, weight, logarithms, scale)
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "log_probs": log_probs}
    p = _problem(name, logits, target, weight, **options)
    if upstream.size != (n := p.rows if reduction == "none" else 1):
        raise ShapeError(message(name, f"upstream must have {n} elements, as the loss does", upstream=upstream.shape, reduction=reduction))
    if logits.backend == "cpu":
        return launch.run_cpu(_grad_cpu, upstream, logits, target, weight, logarithms, scale, dtype=logits.dtype, p=p)
    y = new_result(logits.shape, logits.dtype, logits.queue)
    if y.size:
        scale = cast(scale, logarithms.dtype)
        operands = {"X": logits, "L": target, "M": logarithms, "G": upstream, "Y": y} | ({} if weight is None else {"W": weight})
        given = (upstream, logits, target, logits if weight is None else weight, logarithms, scale, y)
        _run_loss("cross_entropy_grad", p, _spread_of(p, operands), operands, *given)
    return y
