"""Metrics, accumulated on the device batch by batch; the host waits only when a value is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netcl import ops
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor


class Metric:
    """A metric accumulated over batches: :meth:`count` returns what a batch adds, :meth:`value` the metric of the sums.

    A subclass sets ``name`` and defines :meth:`count`, and :meth:`value` where the metric is not a mean. ``sums`` are tensors on the
    device of the outputs, kept until :meth:`reset`.
    """

    name = "metric"

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.samples = 0

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        """What a batch adds to the sums: tensors, still being computed."""
        raise NotImplementedError

    def value(self, sums: Sequence[np.ndarray], samples: int) -> Any:
        """The metric from the sums over ``samples`` targets; by default the mean of the first."""
        return float(sums[0]) / samples

    def reset(self) -> None:
        """Set the sums to zero."""
        self.sums, self.samples = [], 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch, without waiting for the device."""
        as_scores = outputs.ndim > 1 and outputs.shape == targets.shape
        self.add(self.count(outputs, targets), targets.size // targets.shape[-1] if as_scores else targets.size)

    def add(self, parts: Sequence[Tensor], samples: int) -> None:
        """Add sums that have been computed."""
        self.sums = [ops.add(total, part) for total, part in zip(self.sums, parts, strict=True)] if self.sums else list(parts)
        self.samples += samples

    def compute(self) -> Any:
        """The metric over everything since :meth:`reset`; ``nan`` if that is nothing. Waits for the device."""
        return self.value([total.to_host() for total in self.sums], self.samples) if self.samples else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint in the middle of an epoch."""
        return {"samples": self.samples, "sums": list(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self.samples, self.sums = int(state["samples"]), list(state["sums"])


class Mean(Metric):
    """The mean of a number per batch, weighted by the size of the batch: the trainer's loss."""

    def __init__(self, name: str = "loss"):
        super().__init__()
        self.name = name

    def include(self, number: Tensor, samples: int) -> None:
        """Add a 0-d tensor that is the mean over ``samples``."""
        self.add([ops.mul(number, float(samples))], samples)


def _labels(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as rows of classes and labels as one axis. Classes are the last axis, or the second as in dense predictions."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[:-1] == targets.shape:
        return ops.reshape(outputs, (-1, outputs.shape[-1])), ops.reshape(targets, (-1,))
    if outputs.ndim == targets.ndim + 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
        order = (0, *range(2, outputs.ndim), 1)
        return ops.reshape(ops.permute(outputs, order), (-1, outputs.shape[1])), ops.reshape(targets, (-1,))
    if outputs.shape == targets.shape and outputs.ndim > 1:
        return outputs, ops.argmax(targets, axis=-1)
    raise ShapeError(message(name, "the outputs are not scores of these targets", outputs=outputs.shape, targets=targets.shape))


class Accuracy(Metric):
    """The share of targets whose score is the highest.

    >>> metric = Accuracy()
    >>> metric.update(Tensor.from_host([[0.1, 0.9], [0.8, 0.2]]), Tensor.from_host([1, 1]))
    >>> metric.compute()
    0.5
    """

    name = "accuracy"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        scores, labels = _labels(self.name, outputs, targets)
        return [ops.sum(ops.eq(ops.argmax(scores, axis=1), labels))]


class TopK(Metric):
    """The share of targets whose score is among the ``k`` highest.

    >>> metric = TopK(2)
    >>> metric.update(Tensor.from_host([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]]), Tensor.from_host([2, 1]))
    >>> metric.compute()
    0.5
    """

    def __init__(self, k: int = 5):
        super().__init__()
        if k < 1:
            raise ValueError(message("TopK", "k is at least 1", k=k))
        self.k, self.name = k, f"top{k}"

    def count(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        scores, labels = _labels(self.name, outputs, targets)
        _, best = ops.topk(scores, min(self.k, scores.shape[1]))
        return [ops.sum(ops.eq(best, ops.reshape(labels, (-1, 1))))]


class ConfusionMatrix(Metric):
    """How often class ``j`` was the highest score where class ``i`` is right: ``matrix[i, j]``, integers.

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
        scores, labels = _labels(self.name, outputs, targets)
        if scores.shape[1] != self.classes:
            raise ShapeError(message(self.name, f"was made for {self.classes} classes", outputs=outputs.shape))
        right, chosen = (ops.one_hot(index, self.classes) for index in (labels, ops.argmax(scores, axis=1)))
        return [ops.matmul(ops.transpose(ops.cast(right, "float32"), 0, 1), ops.cast(chosen, "float32"))]  # type: ignore[operator]

    def value(self, sums: Sequence[np.ndarray], samples: int) -> np.ndarray:
        return np.rint(sums[0]).astype(np.int64)


def make_metric(given: str | Metric) -> Metric:
    """A metric by its name (``accuracy``, ``top5``), or the metric itself.

    >>> make_metric("top3").name
    'top3'
    """
    if isinstance(given, Metric):
        return given
    top = re.fullmatch(r"top([1-9]\d*)", given) if isinstance(given, str) else None
    if top:
        return TopK(int(top[1]))
    if given != Accuracy.name:
        raise ValueError(message("metrics", "no metric has this name", "known are accuracy, top2, top3, ...", name=repr(given)))
    return Accuracy()
