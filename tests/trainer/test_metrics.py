"""Metrics on the device against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from netcl import ops
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.trainer import AUC, F1, MAE, R2, Accuracy, ConfusionMatrix, TopK
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


def test_targets_may_be_scores_of_sequences():
    outputs = np.array([[[3, 1, 2], [1, 3, 2], [1, 2, 3]], [[3, 1, 2], [1, 2, 3], [3, 1, 2]]], np.float32)
    targets = np.array([[[1, 0, 0], [0, 1, 0], [1, 0, 0]], [[0, 1, 0], [0, 0, 1], [0, 0, 1]]], np.float32)
    for metric, wanted in ((Accuracy(), 0.5), (TopK(2), 4 / 6)):
        metric.update(Tensor.from_host(outputs), Tensor.from_host(targets))
        assert metric.compute() == pytest.approx(wanted)


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ShapeError, match=r"\[accuracy\] outputs must have the shape of targets plus a class axis"):
        Accuracy().update(Tensor.zeros((4, 3)), Tensor.zeros((5,)))
    for shape in ((4,), (4, 1)):  # every score of one class is the highest
        with pytest.raises(
            ShapeError, match=r"plus a class axis of at least 2, .*; outputs=\(4, 1\), .* for one score per sample, use auc"
        ):
            Accuracy().update(Tensor.zeros((4, 1)), Tensor.zeros(shape))
    with pytest.raises(ShapeError, match=r"\[auc\] outputs must have one score per sample, or one per class"):
        AUC().update(Tensor.zeros((4, 3, 2)), Tensor.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"\[metrics\] unknown metric; name='acuracy'; known are accuracy, f1, auc, mae, r2, top2"):
        make_metric("acuracy")
    assert np.isnan(Accuracy().compute())


def test_labels_that_the_loss_ignores_are_not_counted():
    scores = Tensor.from_host(np.array([[1, 2, 0], [3, 1, 0], [0, 1, 2]], np.float32))
    for metric, wanted in ((Accuracy(), 0.5), (TopK(2), 0.5), (Accuracy(), float("nan"))):
        labels = [-100, 0, 1] if wanted == 0.5 and metric.name == "accuracy" else [-100, 0, 0] if wanted == 0.5 else [-100] * 3
        metric.update(scores, Tensor.from_host(np.array(labels)))
        assert metric.compute() == pytest.approx(wanted, nan_ok=True)


def of(metric, outputs, targets, device, pieces: int = 2) -> float:
    for x, y in zip(np.array_split(outputs, pieces), np.array_split(targets, pieces), strict=True):
        metric.update(Tensor.from_host(device.queue, x), Tensor.from_host(device.queue, y))
    return metric.compute()


def test_f1_is_the_mean_over_classes(device, rng):
    scores, labels = rng.standard_normal((60, 4)).astype(np.float32), rng.integers(0, 3, 60)  # class 3 is only predicted
    chosen = scores.argmax(1)
    expected = []
    for i in range(4):
        hit, named = ((chosen == i) & (labels == i)).sum(), (chosen == i).sum() + (labels == i).sum()
        expected.append(2 * hit / named)
    assert of(F1(), scores, labels, device) == pytest.approx(np.mean(expected), rel=1e-6)


def test_auc_counts_pairs(device, rng):
    scores, labels = rng.integers(0, 6, 50).astype(np.float32), rng.integers(0, 2, 50)  # with ties
    pairs = scores[labels == 1][:, None] - scores[labels == 0]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert of(AUC(), scores, labels, device) == pytest.approx(expected)
    both = np.stack([-scores, scores], axis=1)
    assert of(AUC(), both, labels, device) == pytest.approx(expected)
    assert np.isnan(of(AUC(), scores, np.zeros(50, np.int64), device))
    assert np.isnan(of(AUC(), np.where(scores > 4, np.nan, scores).astype(np.float32), labels, device))
    for wrong in (labels + 1, 2 * labels - 1):
        with pytest.raises(ValueError, match=r"\[auc\] targets must be the numbers of 2 classes, from 0, or one-hot; found=\["):
            of(AUC(), scores, wrong, device)


def test_auc_of_several_classes_compares_probabilities(device, rng):
    scores, labels = rng.standard_normal((40, 3)).astype(np.float32), rng.integers(0, 3, 40)
    likely = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    areas = [(likely[labels == i, i][:, None] > likely[labels != i, i]).mean() for i in range(3)]
    assert of(AUC(), scores, labels, device) == pytest.approx(np.mean(areas))
    assert of(AUC(), likely, labels, device) == pytest.approx(np.mean(areas))
    shifted = scores + rng.integers(-8, 8, (40, 1)).astype(np.float32)  # adds to all scores of a sample, and to none of its probabilities
    assert of(AUC(), shifted, labels, device) == pytest.approx(np.mean(areas), abs=1e-3)


def test_errors_of_a_regression(device, rng):
    x, y = rng.standard_normal((2, 30, 2)).astype(np.float32) + 50
    assert of(MAE(), x, y, device) == pytest.approx(np.abs(x - y).mean(), rel=1e-4)
    assert of(MAE(unit=10.0), x, y, device) == pytest.approx(10 * np.abs(x - y).mean(), rel=1e-4)
    assert of(MAE([1.0, 10.0]), x, y, device) == pytest.approx((np.abs(x - y) * [1, 10]).mean(), rel=1e-4)
    assert of(MAE(), np.full(30000, 3, np.float16), np.zeros(30000, np.float16), device) == 3.0
    exact = 1 - np.square(x - y, dtype=np.float64).sum() / np.square(y - y.mean(0, dtype=np.float64)).sum()
    assert of(R2(), x, y, device) == pytest.approx(exact, rel=1e-5)
    for metric in (MAE(), R2()):
        with pytest.raises(ShapeError, match=r"same shape; outputs=\(30, 2\), targets=\(30,\); reshape"):
            of(metric, x, y[:, 0], device, pieces=1)


@pytest.mark.parametrize("name", ["f1", "auc", "mae", "r2"])
def test_a_metric_continues_from_its_state(name, device, rng):
    outputs, targets = rng.standard_normal((20, 2)).astype(np.float32), rng.integers(0, 2, 20)
    if name in ("mae", "r2"):
        targets = rng.standard_normal((20, 2)).astype(np.float32)
    whole, half, rest = make_metric(name), make_metric(name), make_metric(name)
    expected = of(whole, outputs, targets, device)
    of(half, outputs[:10], targets[:10], device, pieces=1)
    rest.load_state_dict(half.state_dict())
    assert of(rest, outputs[10:], targets[10:], device, pieces=1) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [lambda: ConfusionMatrix(2), F1, Accuracy], ids=["confusion", "f1", "accuracy"])
def test_counts_go_on_beyond_what_float32_counts(device, kind):
    """Dense predictions have more than 2**24 targets after a few batches."""
    metric = kind()
    scores, labels = Tensor.from_host(device.queue, np.eye(2, dtype=np.float32)), Tensor.from_host(device.queue, np.array([0, 1]))
    metric.update(scores, labels)
    metric.load_state_dict({"samples": 2**25, "sums": [ops.mul(total, 2**24) for total in metric.sums]})
    metric.update(scores, labels)
    counted = metric.sums[0].to_host()
    assert counted.sum() == 2**25 + 2 and counted.dtype == np.int64
