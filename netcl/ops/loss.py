"""Loss functions. ``reduction`` is ``mean``, ``sum`` or ``none``, for ``kl_div`` also ``batchmean``. Some have torch's names as aliases.

Class labels are checked on the host. A small tensor may have kept the host values that it was made from; otherwise labels are read back.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.operands import common_shape
from netcl.engine.registry import Pointwise, S, alias, composite, register
from netcl.ops.cross_entropy import check_target

IGNORE = -100


# ---- labels


def check_labels(name: str, target: Tensor, classes: int, ignore: int) -> None:
    """Raise if a label is neither a class nor the ignored value; the error names the first such label and its index."""
    labels = target.host_ref if target.backend == "cl" else None
    if labels is None:
        labels = target.to_host()
    elif labels.dtype.kind != "i":  # bfloat16 is stored as uint16
        labels = dtypes.decode(labels, dtypes.DTYPES[target.dtype])
    labels = labels.reshape(-1)
    if labels.dtype.kind == "i" and labels.size and np.maximum.reduce(labels.view(f"u{labels.itemsize}")) < classes:
        return  # the usual case, in one pass instead of eight: negative numbers are large ones without their sign
    wrong = (labels != ignore) & ~((labels >= 0) & (labels < classes) & (labels == np.floor(labels)))
    if wrong.any():
        at = int(np.argmax(wrong))
        index = tuple(int(i) for i in np.unravel_index(at, target.shape))
        what, remedy = f"labels must be classes, got {labels[at]:g}", f"classes are 0..{classes - 1}; {ignore} is ignored"
        raise ShapeError(message(name, what, remedy, index=index, **{"target.shape": target.shape}))


def _check_classes(name: str, x: Tensor, target: Tensor, weight: Tensor | None, ignore: int) -> None:
    """Check shapes and labels of a classification."""
    classes = x.shape[check_target(name, x, target, weight)]
    if target.shape == x.shape and ignore >= 0:
        raise ValueError(message(name, "ignore_index must not be given for targets that are probabilities", ignore_index=ignore))
    if target.shape != x.shape:
        recording.check_each_run(target, lambda labels: check_labels(name, labels, classes, ignore))


_BAD_LABEL = (S((2, 3), np.array([0, 3])), r"labels must be classes, got 3")


# ---- reductions


def _check_reduction(name: str, reduction: object) -> None:
    more = ("batchmean",) * (name == "kl_div")
    if reduction not in ("mean", "sum", "none", *more):
        raise ValueError(message(name, f"reduction must be {', '.join(('mean', 'sum', *more))} or none", reduction=repr(reduction)))


_BAD_REDUCTION = (S((3,), (3,), reduction="most"), r"reduction must be mean, sum or none; reduction='most'")
_PAIRS = [S((3, 5), (3, 5)), S((257,), (257,), reduction="sum"), S((2, 3), (2, 3), reduction="none")]


def _same_shape(name: str, x: Any, target: Any, *more: Any) -> list[Any]:
    """Convert the arguments to tensors; raises unless x and target have the same shape, because ``(N, 1)`` and ``(N,)`` would broadcast."""
    x, target, *rest = launch.as_tensors(name, x, target, *more)
    if x.shape != target.shape:
        remedy = f"target.reshape({x.shape})" if x.size == target.size else f"target.expand({x.shape}), if broadcasting is meant"
        remedy += ", or x.squeeze(1)" if x.shape == (*target.shape, 1) and target.ndim == 1 else ""
        what = "x and target must have the same shape"
        raise ShapeError(message(name, what, f"pass {remedy}", **{"x.shape": x.shape, "target.shape": target.shape}))
    return [x, target, *rest]


_UNLIKE = r"x\.shape=\(4, 1\), target\.shape=\(4,\); pass target\.reshape\(\(4, 1\)\), or x\.squeeze\(1\)"


def _loss(name: str, elements: Any, *samples: Any, doc: str, errors: Any = (), alike: bool = True, **columns: Any) -> None:
    """Register a loss that ``elements`` computes per element, with ``reduction``. ``alike``: x and target must have equal shapes."""
    own = inspect.signature(elements)
    inputs = tuple(own.parameters)[1 : 1 + len(samples[0].shapes)]
    tensors = _same_shape if alike else launch.as_tensors

    def call(F: Any, *args: Any, reduction: str = "mean", **options: Any) -> Tensor:
        if len(args) < 2:
            own.bind(F, *args, **options)  # raises if a tensor is missing
        _check_reduction(name, args[-1] if type(args[-1]) is bool else reduction)  # torch takes size_average in this place
        given = tensors(name, *args, *(options.pop(label, None) for label in inputs[len(args) :]))
        loss = elements(F, *given, **options)
        if reduction == "batchmean":
            return F.div(F.sum(loss), float((loss.shape or (1,))[0]))
        return loss if reduction == "none" else F.sum(loss) if reduction == "sum" else F.mean(loss)

    reduction = inspect.Parameter("reduction", inspect.Parameter.KEYWORD_ONLY, default="mean", annotation="str")
    kinds = {None: "Tensor | None", inspect.Parameter.empty: "Tensor"}
    typed = [p.replace(annotation=kinds[p.default]) if p.name in inputs else p for p in own.parameters.values()]
    call.__signature__ = own.replace(parameters=[*typed, reduction], return_annotation="Tensor")  # type: ignore[attr-defined]
    unlike = [(S((4, 1), (4,)), rf"\[{name}\] x and target must have the same shape; {_UNLIKE}")] * alike
    composite(ref="numpy", name=name, inputs=inputs,
              samples=samples, errors=[*unlike, *errors], doc=doc, **{"amp": "float", **columns})(call)  # fmt: skip


# ---- classification


_CE: dict[str, Any] = {"dtypes": ("float32", "int64", "float32"), "low": (-4.0, 0, 0.5), "high": (4.0, 3, 2.0)}


@composite(
    ref="numpy",
    amp="wide",
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
        (S((2, 3), np.array([-1, 0])), r"\[cross_entropy\] labels must be classes, got -1"),
        (S((2, 3), np.array([0, 1, 2])), r"\[cross_entropy\] target must be class numbers of shape \(2,\) or probabilities of"),
        (S((2, 3), np.array([0, 1]), (4,)), r"\[cross_entropy\] weight must have one number for each of the 3 classes; weight=\(4,\)"),
        (S((2, 3), np.array([0, 1]), reduction="most"), r"reduction must be mean, sum or none"),
    ],
)
def cross_entropy(
    F: Any, x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = IGNORE, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Softmax and negative log-likelihood combined: ``-log(softmax(x)[target])``.

    ``x`` holds logits ``(N, C, ...)``. Targets of shape ``(N,)`` or ``(N, ...)`` are class numbers of any dtype; targets of the shape of
    ``x`` are probabilities. ``mean`` divides by the total weight of the labels that are not ignored, or by the rows of probabilities.
    """
    _check_reduction("cross_entropy", reduction)
    x, target, weight = launch.as_tensors("cross_entropy", x, target, weight)
    _check_classes("cross_entropy", x, target, weight, ignore_index)
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return F.cross_entropy_forward(x, target, weight, **options)[0]


@composite(
    ref="numpy",
    amp="wide",
    samples=[S((4, 3), (4,), None, **_CE), S((2, 3, 5), (2, 5), (3,), **_CE), S((4, 3), (4,), (3,), reduction="sum", **_CE)],
    errors=[(S((2, 3), np.array([0, 3])), r"\[nll\] labels must be classes, got 3")],
)
def nll(F: Any, x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = IGNORE, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of log-probabilities ``(N, C, ...)``: ``-x[target]``."""
    _check_reduction("nll", reduction)
    x, target, weight = launch.as_tensors("nll", x, target, weight)
    _check_classes("nll", x, target, weight, ignore_index)
    return F.cross_entropy_forward(x, target, weight, reduction=reduction, ignore_index=ignore_index, log_probs=True)[0]


# ---- regression


def _smooth_l1(F: Any, x: Any, target: Any, *, beta: float = 1.0) -> Any:
    if beta < 0:
        raise ValueError(message("smooth_l1", "beta must not be negative", beta=beta))
    d = F.sub(x, target)
    size = F.abs(d)
    if not beta:
        return size
    near = F.lt(size, beta)  # the square of a far difference, which may be infinite, has no part in the gradient
    return F.where(near, F.mul(F.square(F.where(near, d, 0.0)), 0.5 / beta), F.sub(size, beta / 2))


def _huber(F: Any, x: Any, target: Any, *, delta: float = 1.0) -> Any:
    if delta <= 0:
        raise ValueError(message("huber", "delta must be positive", delta=delta))
    return F.mul(_smooth_l1(F, x, target, beta=delta), float(delta))


_loss("mse", lambda F, x, target: F.square(F.sub(x, target)), *_PAIRS, errors=[_BAD_REDUCTION],
      doc="The squared difference.")  # fmt: skip
_loss("l1", lambda F, x, target: F.abs(F.sub(x, target)), *_PAIRS, doc="The absolute difference.")
_loss("smooth_l1", _smooth_l1, *_PAIRS, S((9,), (9,), beta=0.3),
      doc="``d^2 / (2 beta)`` where ``d = |x - target| < beta``, else ``d - beta / 2``.")  # fmt: skip
_loss("huber", _huber, *_PAIRS, S((9,), (9,), delta=0.4),
      doc="``delta`` times the smooth L1 loss with ``beta = delta``.")  # fmt: skip


# ---- probabilities


def _bce_ref(x, target, weight=None):
    loss = -(target * np.maximum(np.log(x), -100) + (1 - target) * np.maximum(np.log(1 - x), -100))
    return loss if weight is None else loss * weight


# A row of its own for its gradient: that of the logarithms is infinite at 0 and 1, and held there, as in torch.
register(Pointwise("bce_elements", "-(v1 * yes + (1 - v1) * no)", ("g * (v0 - v1) / MAX(v0 * (1 - v0), 1e-12)", "g * (no - yes)"),
                   _bce_ref, amp="float", domain=(0.1, 0.9), tol=2,
                   let={"yes": "MAX(LOG(v0), -100)", "no": "MAX(LOG1P(-v0), -100)"},
                   doc="Binary cross-entropy of each element."))  # fmt: skip


def _weighted(F: Any, loss: Any, weight: Any) -> Any:
    return loss if weight is None else F.mul(loss, weight)


def _bce_with_logits(F: Any, x: Any, target: Any, weight: Any = None, pos_weight: Any = None) -> Any:
    yes = _weighted(F, F.mul(target, F.log_sigmoid(x)), pos_weight)
    return _weighted(F, F.neg(F.add(yes, F.mul(F.sub(1.0, target), F.log_sigmoid(F.neg(x))))), weight)


def _kl_div(F: Any, x: Any, target: Any, *, log_target: bool = False) -> Any:
    if log_target:
        return F.mul(F.exp(target), F.sub(target, x))
    return F.mul(target, F.sub(F.log(F.where(F.eq(target, 0.0), 1.0, target)), x))  # 0 log 0 is 0


_loss("bce", lambda F, x, target, weight=None: _weighted(F, F.bce_elements(x, target), weight),
      S((3, 5), (3, 5), None, low=0.1, high=0.9), S((7,), (7,), (7,), reduction="sum", low=0.1, high=0.9), tol=2,
      doc="Binary cross-entropy of probabilities; logarithms are clamped to at least -100, as in torch.")  # fmt: skip
_loss("bce_with_logits", _bce_with_logits,
      S((3, 5), (3, 5), None, None, low=(-4.0, 0.0, 0, 0), high=(4.0, 1.0, 1, 1)),
      S((3, 5), (3, 5), (5,), (5,), low=(-4.0, 0.0, 0.5, 0.5), high=(4.0, 1.0, 2.0, 2.0)), S((9,), (9,), None, None, reduction="none"),
      doc="Sigmoid and binary cross-entropy in one, without overflow; ``pos_weight`` multiplies the term of the positives.")  # fmt: skip
_loss("kl_div", _kl_div,
      S((3, 5), (3, 5), low=(-3.0, 0.1), high=(0.0, 0.9)), S((3, 5), (3, 5), log_target=True, reduction="batchmean", low=-3.0, high=0.0),
      tol=2, doc="``target (log target - x)`` for log-probabilities x; ``log_target``: the target is logarithmic too. ``batchmean`` "
      "divides by the batch size.")  # fmt: skip


# ---- similarity


def _in_float32(F: Any, x: Tensor) -> Tensor:
    """Return a tensor in float32 or float64: sums of squares of halves and integers overflow, and a small ``eps`` is 0 in float16."""
    return x if x.dtype == "float64" else F.cast(x, "float32")


def _length(F: Any, x: Any, axis: int, eps: float) -> Any:
    """Return the Euclidean length along an axis, at least ``eps``, with a finite gradient at 0."""
    return F.sqrt(F.clamp(F.sum(F.square(x), axis=axis), min=eps * eps))


@composite(ref="numpy", amp="float", tol=2, samples=[S((3, 5), (3, 5)), S((2, 3, 4), (2, 3, 4), axis=2), S((7,), (7,), axis=0)])
def cosine_similarity(F: Any, a: Tensor, b: Tensor, *, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """``a . b / (|a| |b|)`` along an axis of the broadcast shape; lengths are clamped to at least ``eps``."""
    a, b = launch.as_tensors("cosine_similarity", a, b)
    kind = dtypes.promote(dtypes.DTYPES[a.dtype], dtypes.DTYPES[b.dtype])
    a, b = _in_float32(F, a), _in_float32(F, b)
    if a.shape != b.shape:
        shape = common_shape("cosine_similarity", (a.shape, b.shape), ("a", "b"))
        a, b = F.expand(a, shape), F.expand(b, shape)
    made = F.div(F.sum(F.mul(a, b), axis=axis), F.mul(_length(F, a, axis, eps), _length(F, b, axis, eps)))
    return F.cast(made, kind.name) if kind.is_float else made


def _triplet(F: Any, anchor: Any, positive: Any, negative: Any, *, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6) -> Any:
    near, far = (F.norm(F.add(F.sub(anchor, other), eps), p, axis=-1) for other in (positive, negative))
    return F.clamp(F.add(F.sub(near, far), float(margin)), min=0.0)


def _contrastive(F: Any, a: Any, b: Any, target: Any, *, margin: float = 1.0) -> Any:
    d = _length(F, F.sub(a, b), -1, 1e-12)
    apart = F.square(F.relu(F.sub(float(margin), d)))
    return F.add(F.mul(target, F.square(d)), F.mul(F.sub(1.0, target), apart))


_loss("hinge", lambda F, x, target, *, margin=1.0: F.relu(F.sub(float(margin), F.mul(x, target))),
      S((3, 5), (3, 5)), S((9,), (9,), margin=0.5, reduction="sum"),
      doc="``max(0, margin - x target)`` for targets of -1 and 1.")  # fmt: skip
_loss("triplet", _triplet, S((4, 5), (4, 5), (4, 5)), S((3, 2), (3, 2), (3, 2), margin=2.0, p=3.0, reduction="none"),
      alike=False, tol=2,
      doc="``max(0, |anchor - positive| - |anchor - negative| + margin)`` over the last axis, in the p-norm.")  # fmt: skip
_loss("contrastive", _contrastive,
      S((4, 5), (4, 5), (4,), low=(-1.0, -1.0, 0.0), high=(1.0, 1.0, 1.0), margin=2.5),
      S((3, 2), (3, 2), (3,), low=(-1.0, -1.0, 0.0), high=1.0, margin=3.0, reduction="none"), alike=False, tol=2,
      doc="``t d^2 + (1 - t) max(0, margin - d)^2`` for the distance d of pairs that belong together (t = 1) or not (t = 0).")  # fmt: skip


@composite(ref="numpy", amp="float", tol=10,
           samples=[S((4, 5), (4, 5), temperature=0.5), S((3, 8), (3, 8), temperature=1.0, reduction="sum")])  # fmt: skip
def info_nce(F: Any, a: Tensor, b: Tensor, *, temperature: float = 0.07, reduction: str = "mean") -> Tensor:
    """Contrastive loss: row i of ``a`` must match row i of ``b`` among all rows of ``b``, by cosine similarity / ``temperature``."""
    a, b = launch.as_tensors("info_nce", a, b)
    unit = [F.cast(F.div(w, F.unsqueeze(_length(F, w, 1, 1e-8), 1)), v.dtype) for v in (a, b) for w in (_in_float32(F, v),)]
    logits = F.mul(F.matmul(unit[0], F.permute(unit[1], (1, 0))), 1.0 / temperature)
    return cross_entropy(F, logits, Tensor.arange(a.shape[0], queue=a.queue), reduction=reduction)


for _name, _short in {
    "nll_loss": "nll", "mse_loss": "mse", "l1_loss": "l1", "smooth_l1_loss": "smooth_l1", "huber_loss": "huber",
    "binary_cross_entropy": "bce", "binary_cross_entropy_with_logits": "bce_with_logits", "triplet_margin_loss": "triplet",
    "hinge_loss": "hinge", "contrastive_loss": "contrastive",
}.items():  # fmt: skip
    alias(_name, _short)
