"""Metrics, accumulated on the device batch by batch; the host waits only when a value is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from netcl import ops
from netcl.core import recording
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor


class Metric:
    """A metric accumulated over batches: :meth:`count` returns the terms of a batch, :meth:`value` computes the metric from their sums.

    A subclass sets ``name`` and defines :meth:`count`, and :meth:`value` where the metric is not a mean. ``sums`` are tensors on the
    device of the outputs, kept until :meth:`reset`.
    """

    name = "metric"

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.samples = 0

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """Return the tensors that a batch adds to the sums; must not wait for the device."""
        raise NotImplementedError

    def value(self, sums: Sequence[np.ndarray], samples: int) -> Any:
        """Return the metric computed from the sums over ``samples`` targets; by default the first sum divided by ``samples``."""
        return float(sums[0]) / samples

    def reset(self) -> None:
        """Discard the sums and the number of samples."""
        self.sums, self.samples = [], 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch, without waiting for the device."""
        recording.host_work("update() of a metric")
        as_scores = outputs.ndim > 1 and outputs.shape == targets.shape
        self.add(self.count(outputs, targets), targets.size // targets.shape[-1] if as_scores else targets.size)

    def add(self, parts: Sequence[Tensor], samples: int) -> None:
        """Add the result of :meth:`count` for ``samples`` targets."""
        self.sums = [ops.add(total, part) for total, part in zip(self.sums, parts, strict=True)] if self.sums else list(parts)
        self.samples += samples

    def compute(self) -> Any:
        """Return the metric over all batches since :meth:`reset`, ``nan`` if there were none. Waits for the device."""
        value = self.value([total.to_host() for total in self.sums], self.samples) if self.samples else float("nan")
        return value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the number of samples, for a checkpoint in the middle of an epoch."""
        return {"samples": self.samples, "sums": list(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self.samples, self.sums = int(state["samples"]), list(state["sums"])


class Mean(Metric):
    """The mean of one number per batch, weighted by the size of the batch or by ``weight``; the trainer uses it for the loss."""

    def __init__(self, name: str = "loss"):
        super().__init__()
        self.name = name

    def include(self, number: Tensor, samples: int, weight: Tensor | None = None) -> None:
        """Add a 0-d tensor that is the mean over ``samples`` samples. All numbers have a ``weight``, or none has."""
        recording.host_work("include() of a metric")
        number = number.float()  # float16 sums would overflow
        self.add([ops.mul(number, float(samples))] if weight is None else [ops.mul(number, weight), weight], samples)

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        return float(sums[0]) / (float(sums[1]) if len(sums) > 1 else samples)


def _flat_labels(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores ``(samples, classes)`` and labels ``(samples,)``. Classes are the last axis or, for dense predictions, the second.

    Targets with the shape of the outputs are scores over the last axis: the label is the class with the highest score.
    """
    flat = None
    if outputs.ndim == targets.ndim + 1 and outputs.shape[:-1] == targets.shape:
        flat = outputs, targets
    elif outputs.ndim == targets.ndim + 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
        flat = ops.permute(outputs, (0, *range(2, outputs.ndim), 1)), targets
    elif outputs.shape == targets.shape and outputs.ndim > 1:
        flat = outputs, ops.argmax(targets, axis=-1)
    if flat is None or flat[0].shape[-1] < 2:
        what = "outputs must have the shape of targets plus a class axis of at least 2, last or second, or the shape of targets"
        raise ShapeError(message(name, what, "for one score per sample, use auc", outputs=outputs.shape, targets=targets.shape))
    return ops.reshape(flat[0], (-1, flat[0].shape[-1])), ops.reshape(flat[1], (-1,))


class _Share(Metric):
    """The share of the labels that are a hit; labels of -100, which cross-entropy ignores, are left out."""

    def hits(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the number of labels that are a hit."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        scores, labels = _flat_labels(self.name, outputs, targets)
        signed = ops.cast(labels, "int64") if labels.dtype == "uint8" else labels  # in which -100 is 156
        return [self.hits(scores, labels), ops.sum(ops.ne(signed, -100))]

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        return float(sums[0]) / float(sums[1]) if sums[1] else float("nan")


class Accuracy(_Share):
    """The share of samples whose target class has the highest score, without targets of -100.

    >>> metric = Accuracy()
    >>> metric.update(Tensor.from_host([[0.1, 0.9], [0.8, 0.2]]), Tensor.from_host([1, 1]))
    >>> metric.compute()
    0.5
    """

    name = "accuracy"

    def hits(self, scores: Tensor, labels: Tensor) -> Tensor:
        return ops.sum(ops.eq(ops.argmax(scores, axis=1), labels))


class TopK(_Share):
    """The share of samples whose target class is among the ``k`` highest scores, without targets of -100.

    >>> metric = TopK(2)
    >>> metric.update(Tensor.from_host([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]]), Tensor.from_host([2, 1]))
    >>> metric.compute()
    0.5
    """

    def __init__(self, k: int = 5):
        super().__init__()
        if k < 1:
            raise ValueError(message("TopK", "k must be at least 1", k=k))
        self.k, self.name = k, f"top{k}"

    def hits(self, scores: Tensor, labels: Tensor) -> Tensor:
        _, best = ops.topk(scores, min(self.k, scores.shape[1]))
        return ops.sum(ops.eq(best, ops.reshape(labels, (-1, 1))))


class ConfusionMatrix(Metric):
    """The confusion matrix, int64: ``matrix[i, j]`` samples of class ``i`` have their highest score for class ``j``.

    >>> metric = ConfusionMatrix(2)
    >>> metric.update(Tensor.from_host([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), Tensor.from_host([1, 1, 0]))
    >>> metric.compute().tolist()
    [[0, 1], [1, 1]]
    """

    name = "confusion"

    def __init__(self, classes: int):
        super().__init__()
        self.classes = classes

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        scores, labels = _flat_labels(self.name, outputs, targets)
        if scores.shape[1] != self.classes:
            raise ShapeError(message(self.name, f"outputs must have {self.classes} classes", outputs=outputs.shape))
        right, chosen = (ops.one_hot(index, self.classes) for index in (labels, ops.argmax(scores, axis=1)))
        matrix = ops.matmul(ops.transpose(ops.cast(right, "float32"), 0, 1), ops.cast(chosen, "float32"))  # type: ignore[operator]
        return [ops.cast(matrix, "int64")]  # over many batches, float32 would stop counting at 2**24

    def value(self, sums: Sequence[np.ndarray], samples: int) -> np.ndarray:
        return sums[0]


class F1(Metric):
    """The mean over classes of the F1 score, ``2 precision recall / (precision + recall)``; classes that never occur are left out.

    >>> metric = F1()
    >>> metric.update(Tensor.from_host([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), Tensor.from_host([1, 0, 0]))
    >>> round(metric.compute(), 4)
    0.6667
    """

    name = "f1"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        classes = _flat_labels(self.name, outputs, targets)[0].shape[1]
        return ConfusionMatrix(classes).count(outputs, targets)

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        matrix = sums[0].astype(np.float64)
        named = matrix.sum(axis=0) + matrix.sum(axis=1)
        return float(np.mean((2 * np.diag(matrix) / named.clip(1))[named > 0]))


class _Collected(Metric):
    """A metric that needs all outputs and targets: both are kept until :meth:`reset`."""

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        return [outputs, targets]

    def add(self, parts: Sequence[Tensor], samples: int) -> None:
        self.sums = [*self.sums, *parts]
        self.samples += samples

    def both(self, sums: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Return all outputs and all targets, as float64."""
        return (np.concatenate(sums[i::2]).astype(np.float64) for i in (0, 1))


class AUC(_Collected):
    """The area under the ROC curve: the probability that a positive sample scores higher than a negative one. Ties count half.

    Outputs are one score per sample, or one per class; for more than two classes the areas of each class against the rest are averaged.

    >>> metric = AUC()
    >>> metric.update(Tensor.from_host([0.1, 0.4, 0.35, 0.8]), Tensor.from_host([0, 0, 1, 1]))
    >>> metric.compute()
    0.75
    """

    name = "auc"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        if outputs.ndim not in (1, 2) or targets.shape not in (outputs.shape, outputs.shape[:1], (*outputs.shape[:1], 1)):
            what = "outputs must have one score per sample, or one per class, and targets one label per sample or the shape of outputs"
            raise ShapeError(message(self.name, what, outputs=outputs.shape, targets=targets.shape))
        return super().count(outputs, targets)

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        scores, labels = (values.reshape(len(values), -1) for values in self.both(sums))
        if np.isnan(scores).any():
            return float("nan")
        _check_labels(scores.shape[1], labels)
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
        if scores.shape[1] <= 2:
            return _roc_area(scores[:, -1] - (scores[:, 0] if scores.shape[1] == 2 else 0.0), labels == 1)
        if scores.min() < 0 or not np.allclose(scores.sum(axis=1), 1.0, atol=1e-2):  # of different samples only probabilities compare
            scores = scores - scores.max(axis=1, keepdims=True)
            scores = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        areas = [_roc_area(scores[:, i], labels == i) for i in range(scores.shape[1]) if 0 < (labels == i).sum() < len(labels)]
        return float(np.mean(areas)) if areas else float("nan")


def _check_labels(classes: int, labels: np.ndarray) -> None:
    known = [0, 1] if classes == 1 or labels.shape[1] > 1 else range(classes)
    if not np.isin(labels, known).all() or (labels.shape[1] > 1 and (labels.sum(axis=1) != 1).any()):
        what = f"targets must be the numbers of {max(2, classes)} classes, from 0, or one-hot"
        raise ValueError(message("auc", what, found=np.unique(labels)[:8].tolist()))


def _roc_area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, by the Mann-Whitney statistic of mean ranks; ``nan`` without positives or negatives."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place.reshape(-1)]
    yes, no = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no)) if yes and no else float("nan")


def _check_same_shape(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        remedy = "reshape one of them: y[:, None], or outputs.squeeze(-1)"
        what = "outputs and targets must have the same shape"
        raise ShapeError(message(name, what, remedy, outputs=outputs.shape, targets=targets.shape))


class MAE(Metric):
    """The mean absolute error times ``unit``, the scale by which targets were divided: a number, or one per column.

    >>> metric = MAE()
    >>> metric.update(Tensor.from_host([1.0, 4.0]), Tensor.from_host([2.0, 2.0]))
    >>> metric.compute()
    1.5
    """

    name = "mae"

    def __init__(self, unit: float | Sequence[float] = 1.0):
        super().__init__()
        self.unit = np.asarray(unit)

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        _check_same_shape(self.name, outputs, targets)
        errors = ops.abs(ops.sub(ops.cast(outputs, "float32"), targets))  # float16 sums would overflow
        return [ops.sum(errors, axis=tuple(range(max(1, errors.ndim - 1))))]

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        return float(np.mean(sums[0] * self.unit)) / samples


class R2(_Collected):
    """The coefficient of determination: 1 for exact outputs, 0 for outputs that are the mean of the targets.

    >>> metric = R2()
    >>> metric.update(Tensor.from_host([1.0, 2.0, 4.0]), Tensor.from_host([1.0, 2.0, 3.0]))
    >>> metric.compute()
    0.5
    """

    name = "r2"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        _check_same_shape(self.name, outputs, targets)
        return super().count(outputs, targets)

    def value(self, sums: Sequence[np.ndarray], samples: int) -> float:
        outputs, targets = self.both(sums)
        spread = np.square(targets - targets.mean(axis=0)).sum()
        return float(1 - np.square(targets - outputs).sum() / spread) if spread else float("nan")


NAMED: dict[str, type[Metric]] = {kind.name: kind for kind in (Accuracy, F1, AUC, MAE, R2)}


def make_metric(given: str | Metric) -> Metric:
    """Return a metric by its name (``accuracy``, ``top5``, ``f1``, ``auc``, ``mae``, ``r2``), or the metric itself.

    >>> make_metric("top3").name
    'top3'
    """
    if isinstance(given, Metric):
        return given
    top = re.fullmatch(r"top([1-9]\d*)", given) if isinstance(given, str) else None
    if top:
        return TopK(int(top[1]))
    if given not in NAMED:
        raise ValueError(message("metrics", "unknown metric", f"known are {', '.join(NAMED)}, top2, top3, ...", name=repr(given)))
    return NAMED[given]()
