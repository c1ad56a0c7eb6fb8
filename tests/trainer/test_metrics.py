"""Metrics on the device against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.trainer import Accuracy, ConfusionMatrix, TopK
from netcl.trainer.metrics import make_metric


def test_metrics_over_batches_of_unlike_sizes(device, rng):
    parts = [(rng.normal(size=(n, 7)).astype(np.float32), rng.integers(0, 7, n)) for n in (33, 8, 1)]
    metrics = [Accuracy(), TopK(3), ConfusionMatrix(7)]
    for scores, labels in parts:
        for metric in metrics:
            metric.update(Tensor.from_host(device.queue, scores), Tensor.from_host(device.queue, labels))
    scores, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    chosen = scores.argmax(1)
    expected = np.zeros((7, 7), int)
    np.add.at(expected, (labels, chosen), 1)
    rank = (scores > np.take_along_axis(scores, labels[:, None], 1)).sum(1)
    assert metrics[0].compute() == pytest.approx((chosen == labels).mean())
    assert metrics[1].compute() == pytest.approx((rank < 3).mean())
    np.testing.assert_array_equal(metrics[2].compute(), expected)


def test_scores_of_sequences_and_of_pixels(rng):
    scores, labels = rng.normal(size=(2, 5, 3)).astype(np.float32), rng.integers(0, 3, (2, 5))
    last, second = Accuracy(), Accuracy()
    last.update(Tensor.from_host(scores), Tensor.from_host(labels))
    second.update(Tensor.from_host(np.ascontiguousarray(scores.transpose(0, 2, 1))), Tensor.from_host(labels))
    assert last.compute() == second.compute() == pytest.approx((scores.argmax(-1) == labels).mean())


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ShapeError, match=r"\[accuracy\] the outputs are not scores of these targets"):
        Accuracy().update(Tensor.zeros((4, 3)), Tensor.zeros((5,)))
    with pytest.raises(ValueError, match=r"\[metrics\] no metric has this name; name='acuracy'; known are accuracy, top2"):
        make_metric("acuracy")
    assert np.isnan(Accuracy().compute())
