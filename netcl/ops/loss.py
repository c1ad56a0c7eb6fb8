"""Losses. ``reduction`` is ``mean``, ``sum`` or ``none`` everywhere; names without ``_loss`` are short for torch's.

Class numbers are checked before anything is computed: on the host where the labels came from it (a small tensor remembers what it was
made of), else by reading them back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import Pointwise, S, alias, composite, register

IGNORE = -100


# ---- labels


def check_labels(name: str, target: Tensor, classes: int, ignore: int) -> None:
    """Raise if a label is neither a class nor to be ignored, naming the first such label and its place."""
    known = target.host_ref if target.backend == "cl" else None
    labels = (target.to_host() if known is None else dtypes.decode(known, dtypes.DTYPES[target.dtype])).reshape(-1)
    if labels.dtype.kind == "i" and labels.size and labels.view(f"u{labels.itemsize}").max() < classes:
        return  # the usual case, in one pass instead of eight: negative numbers are large ones without their sign
    wrong = (labels != ignore) & ~((labels >= 0) & (labels < classes) & (labels == np.floor(labels)))
    if wrong.any():
        at = int(np.argmax(wrong))
        index = tuple(int(i) for i in np.unravel_index(at, target.shape))
        what = f"label {labels[at]:g} is not a class"
        raise ShapeError(
            message(name, what, f"classes are 0..{classes - 1}; {ignore} is ignored", index=index, **{"target.shape": target.shape})
        )


def _check_classes(name: str, x: Tensor, target: Tensor, weight: Tensor | None, ignore: int) -> None:
    """Shapes and labels of a classification; classes are axis 1 (axis 0 of a vector)."""
    axis = min(1, x.ndim - 1)
    if not x.ndim or target.shape not in (x.shape, x.shape[:axis] + x.shape[axis + 1 :]):
        what = "targets are class numbers, one per row, or probabilities of the logits' shape"
        raise ShapeError(message(name, what, **{"x.shape": x.shape, "target.shape": target.shape}))
    classes = x.shape[axis]
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(message(name, "one weight per class is needed", classes=classes, **{"weight.shape": weight.shape}))
    if target.shape != x.shape:
        recording.check_each_run(target, lambda labels: check_labels(name, labels, classes, ignore))


_BAD_LABEL = (S((2, 3), np.array([0, 3])), r"label 3 is not a class; index=\(1,\), target.shape=\(2,\); classes are 0..2; -100 is ignored")


# ---- reductions


def _check_reduction(name: str, reduction: str, *more: str) -> None:
    if reduction not in ("mean", "sum", "none", *more):
        raise ValueError(message(name, f"reduction is {', '.join(('mean', 'sum', *more))} or none", reduction=repr(reduction)))


def _with_reduction(F: Any, name: str, loss: Any, reduction: str) -> Any:
    _check_reduction(name, reduction)
    return loss if reduction == "none" else F.sum(loss) if reduction == "sum" else F.mean(loss)


def _ref(loss: np.ndarray, reduction: str) -> np.ndarray:
    return loss if reduction == "none" else np.asarray(loss.sum() if reduction == "sum" else loss.mean())


_BAD_REDUCTION = (S((3,), (3,), reduction="most"), r"reduction is mean, sum or none; reduction='most'")
_PAIRS = [S((3, 5), (3, 5)), S((257,), (257,), reduction="sum"), S((2, 3), (2, 3), reduction="none")]


def _same_shape(name: str, x: Any, target: Any, *more: Any) -> list[Any]:
    """The arguments as tensors; shapes of x and target must be equal, for ``(N, 1)`` against ``(N,)`` would broadcast to (N, N)."""
    x, target, *rest = launch.as_tensors(name, x, target, *more)
    if x.shape != target.shape:
        remedy = f"target.reshape({x.shape})" if x.size == target.size else f"target.expand({x.shape}), if broadcasting is meant"
        remedy += ", or x.squeeze(1)" if x.shape == (*target.shape, 1) and target.ndim == 1 else ""
        what = "x and target must have the same shape"
        raise ShapeError(message(name, what, f"pass {remedy}", **{"x.shape": x.shape, "target.shape": target.shape}))
    return [x, target, *rest]


def _unlike(name: str) -> tuple[Any, str]:
    text = r"x\.shape=\(4, 1\), target\.shape=\(4,\); pass target\.reshape\(\(4, 1\)\), or x\.squeeze\(1\)"
    return S((4, 1), (4,)), rf"\[{name}\] x and target must have the same shape; {text}"


# ---- classification


def _cross_entropy_ref(
    x: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> np.ndarray:
    classes = x.shape[1]
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    w = np.ones(classes) if weight is None else weight
    counted = np.ones((x.shape[0], *x.shape[2:]))
    if target.shape == x.shape:
        wanted = target
    else:
        counted = np.where(target == ignore_index, 0.0, 1.0)
        hot = np.eye(classes)[np.where(target == ignore_index, 0, target).astype(int)] * counted[..., None]
        wanted = np.moveaxis(hot, -1, 1)
    smooth = (wanted * (1 - label_smoothing) + label_smoothing / classes) * np.expand_dims(counted, 1)
    weighted = w.reshape(1, -1, *[1] * (x.ndim - 2))
    loss = -(smooth * logp * weighted).sum(1)
    if reduction == "mean":
        return np.asarray(loss.sum() / (loss.size if target.shape == x.shape else (wanted * weighted).sum()))
    return _ref(loss, reduction)


_CE: dict[str, Any] = {"dtypes": ("float32", "int64", "float32"), "low": (-4.0, 0, 0.5), "high": (4.0, 3, 2.0)}


@composite(
    ref=_cross_entropy_ref,
    amp="float",
    tol=2,
    samples=[
        S((4, 3), (4,), None, **_CE),
        S((5, 3), (5,), (3,), **_CE),
        S((2, 3, 4, 5), (2, 4, 5), (3,), **_CE),
        S((4, 3), (4,), None, label_smoothing=0.1, **_CE),
        S((5, 3), (5,), (3,), label_smoothing=0.2, reduction="sum", **_CE),
        S((3, 3), np.array([1, IGNORE, 2]), (3,), label_smoothing=0.1, **_CE),
        S((4, 3), (4,), None, reduction="none", **_CE),
        S((4, 3), (4, 3), None, low=0.1, high=0.5),
        S((4, 3), (4, 3), (3,), label_smoothing=0.1, low=0.1, high=0.5),
    ],
    errors=[
        _BAD_LABEL,
        (S((2, 3), np.array([-1, 0])), r"\[cross_entropy\] label -1 is not a class"),
        (S((2, 3), np.array([0, 1, 2])), r"\[cross_entropy\] targets are class numbers, one per row, or probabilities"),
        (S((2, 3), np.array([0, 1]), (4,)), r"\[cross_entropy\] one weight per class is needed; classes=3, weight.shape=\(4,\)"),
        (S((2, 3), np.array([0, 1]), reduction="most"), r"reduction is mean, sum or none"),
    ],
)
def cross_entropy(
    F: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Softmax and negative log-likelihood in one: ``-log(softmax(x)[target])``.

    Logits ``(N, C, ...)``. Targets of shape ``(N,)`` or ``(N, ...)`` are class numbers of any dtype, targets of the logits' shape
    are probabilities. ``mean`` divides by the weight of the labels that count.
    """
    _check_reduction("cross_entropy", reduction)
    x, target, weight = launch.as_tensors("cross_entropy", x, target, weight)
    _check_classes("cross_entropy", x, target, weight, ignore_index)
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return F.cross_entropy_forward(x, target, weight, **options)[0]


def _nll_ref(
    x: np.ndarray, target: np.ndarray, weight: np.ndarray | None = None, *, ignore_index: int = IGNORE, reduction: str = "mean"
) -> np.ndarray:
    counted = target != ignore_index
    label = np.where(counted, target, 0).astype(int)
    weights = counted * (np.ones(x.shape[1]) if weight is None else weight)[label]
    loss = -weights * np.take_along_axis(x, np.expand_dims(label, 1), 1).squeeze(1)
    return np.asarray(loss.sum() / weights.sum()) if reduction == "mean" else _ref(loss, reduction)


@composite(
    ref=_nll_ref,
    amp="float",
    samples=[S((4, 3), (4,), None, **_CE), S((2, 3, 5), (2, 5), (3,), **_CE), S((4, 3), (4,), (3,), reduction="sum", **_CE)],
    errors=[(S((2, 3), np.array([0, 3])), r"\[nll\] label 3 is not a class")],
)
def nll(F: Any, x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = IGNORE, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of log-probabilities ``(N, C, ...)``: ``-x[target]``."""
    _check_reduction("nll", reduction)
    x, target, weight = launch.as_tensors("nll", x, target, weight)
    _check_classes("nll", x, target, weight, ignore_index)
    return F.cross_entropy_forward(x, target, weight, reduction=reduction, ignore_index=ignore_index, log_probs=True)[0]


# ---- regression


@composite(
    ref=lambda x, target, *, reduction="mean": _ref((x - target) ** 2, reduction),
    amp="float",
    samples=_PAIRS,
    errors=[_BAD_REDUCTION, _unlike("mse")],
)
def mse(F: Any, x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """The squared difference."""
    x, target = _same_shape("mse", x, target)
    return _with_reduction(F, "mse", F.square(F.sub(x, target)), reduction)


@composite(
    ref=lambda x, target, *, reduction="mean": _ref(np.abs(x - target), reduction), amp="float", samples=_PAIRS, errors=[_unlike("l1")]
)
def l1(F: Any, x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """The absolute difference."""
    x, target = _same_shape("l1", x, target)
    return _with_reduction(F, "l1", F.abs(F.sub(x, target)), reduction)


def _smooth_l1_ref(x: np.ndarray, target: np.ndarray, *, beta: float = 1.0, reduction: str = "mean") -> np.ndarray:
    d = np.abs(x - target)
    return _ref(np.where(d < beta, d * d / (2 * beta) if beta else 0 * d, d - beta / 2), reduction)


@composite(ref=_smooth_l1_ref, amp="float", samples=[*_PAIRS, S((9,), (9,), beta=0.3)], errors=[_unlike("smooth_l1")])
def smooth_l1(F: Any, x: Tensor, target: Tensor, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """``d^2 / (2 beta)`` where ``d = |x - target| < beta``, else ``d - beta / 2``."""
    x, target = _same_shape("smooth_l1", x, target)
    if not beta:
        return l1(F, x, target, reduction=reduction)
    d = F.abs(F.sub(x, target))
    return _with_reduction(F, "smooth_l1", F.where(F.lt(d, beta), F.mul(F.square(d), 0.5 / beta), F.sub(d, beta / 2)), reduction)


@composite(
    ref=lambda x, target, *, delta=1.0, reduction="mean": delta * _smooth_l1_ref(x, target, beta=delta, reduction=reduction),
    amp="float",
    samples=[*_PAIRS, S((9,), (9,), delta=0.4)],
    errors=[_unlike("huber")],
)
def huber(F: Any, x: Tensor, target: Tensor, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """``delta`` times the smooth L1 loss with ``beta = delta``."""
    x, target = _same_shape("huber", x, target)
    return F.mul(smooth_l1(F, x, target, beta=delta, reduction=reduction), float(delta))


# ---- probabilities


def _bce_ref(x: np.ndarray, target: np.ndarray, weight: np.ndarray | None = None, *, reduction: str = "mean") -> np.ndarray:
    loss = -(target * np.maximum(np.log(x), -100) + (1 - target) * np.maximum(np.log(1 - x), -100))
    return _ref(loss if weight is None else loss * weight, reduction)


# A row of its own for its gradient: that of the logarithms is infinite at 0 and 1, and held there, as in torch.
register(Pointwise("bce_elements", "-(v1 * yes + (1 - v1) * no)", ("g * (v0 - v1) / MAX(v0 * (1 - v0), 1e-12)", "g * (no - yes)"),
                   lambda x, target: _bce_ref(x, target, reduction="none"), amp="float", domain=(0.1, 0.9), tol=2,
                   let={"yes": "MAX(LOG(v0), -100)", "no": "MAX(LOG1P(-v0), -100)"},
                   doc="Binary cross-entropy of each element."))  # fmt: skip


@composite(
    ref=_bce_ref,
    amp="float",
    tol=2,
    samples=[S((3, 5), (3, 5), None, low=0.1, high=0.9), S((7,), (7,), (7,), reduction="sum", low=0.1, high=0.9)],
    errors=[_unlike("bce")],
)
def bce(F: Any, x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy of probabilities; logarithms are held above -100, as in torch."""
    x, target, weight = _same_shape("bce", x, target, weight)
    loss = F.bce_elements(x, target)
    return _with_reduction(F, "bce", loss if weight is None else F.mul(loss, weight), reduction)


def _bce_logits_ref(
    x: np.ndarray, target: np.ndarray, weight: np.ndarray | None = None, pos_weight: np.ndarray | None = None, *, reduction: str = "mean"
) -> np.ndarray:
    p = 1.0 if pos_weight is None else pos_weight
    loss = p * target * np.logaddexp(0, -x) + (1 - target) * np.logaddexp(0, x)
    return _ref(loss if weight is None else loss * weight, reduction)


@composite(
    ref=_bce_logits_ref,
    amp="float",
    samples=[
        S((3, 5), (3, 5), None, None, low=(-4.0, 0.0, 0, 0), high=(4.0, 1.0, 1, 1)),
        S((3, 5), (3, 5), (5,), (5,), low=(-4.0, 0.0, 0.5, 0.5), high=(4.0, 1.0, 2.0, 2.0)),
        S((9,), (9,), None, None, reduction="none"),
    ],
    errors=[_unlike("bce_with_logits")],
)
def bce_with_logits(
    F: Any, x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Sigmoid and binary cross-entropy in one, without overflow; ``pos_weight`` multiplies the part of the positives."""
    x, target, weight, pos_weight = _same_shape("bce_with_logits", x, target, weight, pos_weight)
    yes = F.mul(target, F.log_sigmoid(x))
    yes = yes if pos_weight is None else F.mul(yes, pos_weight)
    loss = F.neg(F.add(yes, F.mul(F.sub(1.0, target), F.log_sigmoid(F.neg(x)))))
    return _with_reduction(F, "bce_with_logits", loss if weight is None else F.mul(loss, weight), reduction)


def _kl_div_ref(x: np.ndarray, target: np.ndarray, *, reduction: str = "mean", log_target: bool = False) -> np.ndarray:
    loss = np.exp(target) * (target - x) if log_target else target * (np.log(target) - x)
    return np.asarray(loss.sum() / x.shape[0]) if reduction == "batchmean" else _ref(loss, reduction)


@composite(
    ref=_kl_div_ref,
    amp="float",
    tol=2,
    samples=[
        S((3, 5), (3, 5), low=(-3.0, 0.1), high=(0.0, 0.9)),
        S((3, 5), (3, 5), log_target=True, reduction="batchmean", low=-3.0, high=0.0),
    ],
    errors=[_unlike("kl_div")],
)
def kl_div(F: Any, x: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """``target (log target - x)`` for log-probabilities x; ``log_target``: so is the target. ``batchmean`` divides by the batch."""
    _check_reduction("kl_div", reduction, "batchmean")
    x, target = _same_shape("kl_div", x, target)
    if log_target:
        loss = F.mul(F.exp(target), F.sub(target, x))
    else:
        held = F.where(F.eq(target, 0.0), 1.0, target)  # 0 log 0 is 0
        loss = F.mul(target, F.sub(F.log(held), x))
    return F.mul(F.sum(loss), 1.0 / (x.shape or (1,))[0]) if reduction == "batchmean" else _with_reduction(F, "kl_div", loss, reduction)


# ---- similarity


@composite(
    ref=lambda x, target, *, margin=1.0, reduction="mean": _ref(np.maximum(0, margin - x * target), reduction),
    amp="float",
    samples=[S((3, 5), (3, 5)), S((9,), (9,), margin=0.5, reduction="sum")],
)
def hinge(F: Any, x: Tensor, target: Tensor, *, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """``max(0, margin - x target)`` for targets of -1 and 1."""
    x, target = _same_shape("hinge", x, target)
    return _with_reduction(F, "hinge", F.relu(F.sub(float(margin), F.mul(x, target))), reduction)


def _cosine_ref(a: np.ndarray, b: np.ndarray, *, axis: int = 1, eps: float = 1e-8) -> np.ndarray:
    lengths = [np.maximum(np.sqrt((v * v).sum(axis)), eps) for v in (a, b)]
    return (a * b).sum(axis) / (lengths[0] * lengths[1])


def _length(F: Any, x: Any, axis: int, eps: float) -> Any:
    """The Euclidean length along an axis, at least ``eps``; smooth at 0."""
    return F.sqrt(F.clamp(F.sum(F.square(x), axis=axis), min=eps * eps))


@composite(ref=_cosine_ref, amp="float", tol=2, samples=[S((3, 5), (3, 5)), S((2, 3, 4), (2, 3, 4), axis=2), S((7,), (7,), axis=0)])
def cosine_similarity(F: Any, a: Tensor, b: Tensor, *, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """``a . b / (|a| |b|)`` along an axis; lengths count as at least ``eps``."""
    a, b = launch.as_tensors("cosine_similarity", a, b)
    return F.div(F.sum(F.mul(a, b), axis=axis), F.mul(_length(F, a, axis, eps), _length(F, b, axis, eps)))


def _triplet_ref(
    anchor: np.ndarray,
    positive: np.ndarray,
    negative: np.ndarray,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> np.ndarray:
    near, far = ((np.abs(anchor - other + eps) ** p).sum(-1) ** (1 / p) for other in (positive, negative))
    return _ref(np.maximum(0, near - far + margin), reduction)


@composite(
    ref=_triplet_ref,
    amp="float",
    tol=2,
    samples=[S((4, 5), (4, 5), (4, 5)), S((3, 2), (3, 2), (3, 2), margin=2.0, p=3.0, reduction="none")],
)
def triplet(
    F: Any,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``max(0, |anchor - positive| - |anchor - negative| + margin)`` over the last axis, in the p-norm."""
    anchor, positive, negative = launch.as_tensors("triplet", anchor, positive, negative)
    near, far = (F.norm(F.add(F.sub(anchor, other), eps), p, axis=-1) for other in (positive, negative))
    return _with_reduction(F, "triplet", F.relu(F.add(F.sub(near, far), float(margin))), reduction)


def _info_nce_ref(a: np.ndarray, b: np.ndarray, *, temperature: float = 0.07, reduction: str = "mean") -> np.ndarray:
    unit = [v / np.sqrt((v * v).sum(1, keepdims=True)) for v in (a, b)]
    return _cross_entropy_ref(unit[0] @ unit[1].T / temperature, np.arange(len(a)), reduction=reduction)


@composite(
    ref=_info_nce_ref,
    amp="float",
    tol=10,
    samples=[S((4, 5), (4, 5), temperature=0.5), S((3, 8), (3, 8), temperature=1.0, reduction="sum")],
)
def info_nce(F: Any, a: Tensor, b: Tensor, *, temperature: float = 0.07, reduction: str = "mean") -> Tensor:
    """Row i of ``a`` must find row i of ``b`` among all rows of ``b``, by cosine similarity over a temperature."""
    a, b = launch.as_tensors("info_nce", a, b)
    unit = [F.div(v, F.unsqueeze(_length(F, v, 1, 1e-8), 1)) for v in (a, b)]
    logits = F.mul(F.matmul(unit[0], F.permute(unit[1], (1, 0))), 1.0 / temperature)
    return cross_entropy(F, logits, Tensor.arange(a.shape[0], queue=a.queue), reduction=reduction)


def _contrastive_ref(a: np.ndarray, b: np.ndarray, target: np.ndarray, *, margin: float = 1.0, reduction: str = "mean") -> np.ndarray:
    d = np.sqrt(((a - b) ** 2).sum(-1))
    return _ref(target * d**2 + (1 - target) * np.maximum(0, margin - d) ** 2, reduction)


@composite(
    ref=_contrastive_ref,
    amp="float",
    tol=2,
    samples=[
        S((4, 5), (4, 5), (4,), low=(-1.0, -1.0, 0.0), high=(1.0, 1.0, 1.0), margin=2.5),
        S((3, 2), (3, 2), (3,), low=(-1.0, -1.0, 0.0), high=1.0, margin=3.0, reduction="none"),
    ],
)
def contrastive(F: Any, a: Tensor, b: Tensor, target: Tensor, *, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """``t d^2 + (1 - t) max(0, margin - d)^2`` for the distance d of pairs that belong together (t = 1) or not (t = 0)."""
    a, b, target = launch.as_tensors("contrastive", a, b, target)
    d = _length(F, F.sub(a, b), -1, 1e-12)
    apart = F.square(F.relu(F.sub(float(margin), d)))
    return _with_reduction(F, "contrastive", F.add(F.mul(target, F.square(d)), F.mul(F.sub(1.0, target), apart)), reduction)


for _name, _short in {
    "nll_loss": "nll", "mse_loss": "mse", "l1_loss": "l1", "smooth_l1_loss": "smooth_l1", "huber_loss": "huber",
    "binary_cross_entropy": "bce", "binary_cross_entropy_with_logits": "bce_with_logits", "triplet_margin_loss": "triplet",
    "hinge_loss": "hinge", "contrastive_loss": "contrastive",
}.items():  # fmt: skip
    alias(_name, _short)
