"""Losses against PyTorch's values and gradients, and what labels may be."""

from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor

GOLDEN = np.load(Path(__file__).parent.parent / "golden/losses.npz")
CASES = {
    "cross_entropy": lambda a, d: ag.cross_entropy(a, d["labels"]),
    "cross_entropy_weight": lambda a, d: ag.cross_entropy(a, d["labels"], d["weight"]),
    "cross_entropy_smooth": lambda a, d: ag.cross_entropy(a, d["labels"], d["weight"], label_smoothing=0.2),
    "cross_entropy_sum": lambda a, d: ag.cross_entropy(a, d["labels"], reduction="sum", label_smoothing=0.1),
    "cross_entropy_soft": lambda a, d: ag.cross_entropy(a, d["p"], d["weight"], label_smoothing=0.1),
    "cross_entropy_dense": lambda a, d: ag.cross_entropy(a, d["dense_labels"], d["weight"]),
    "nll": lambda a, d: ag.nll_loss(a, d["labels"], d["weight"]),
    "mse": lambda a, d: ag.mse_loss(a, d["y"]),
    "l1": lambda a, d: ag.l1_loss(a, d["y"]),
    "smooth_l1": lambda a, d: ag.smooth_l1_loss(a, d["y"], beta=0.7),
    "huber": lambda a, d: ag.huber_loss(a, d["y"], delta=0.6),
    "bce": lambda a, d: ag.binary_cross_entropy(a, d["q"]),
    "bce_with_logits": lambda a, d: ag.binary_cross_entropy_with_logits(a, d["q"], pos_weight=d["weight"]),
    "kl_div": lambda a, d: ag.kl_div(a, d["q"], reduction="batchmean"),
    "cosine_similarity": lambda a, d: ag.cosine_similarity(a, d["y"]).sum(),
    "triplet": lambda a, d: ag.triplet_margin_loss(a, d["y"], d["signs"]),
    "hinge": lambda a, d: ag.hinge_loss(a, d["signs"]),
}
LEAF = {"cross_entropy_dense": "dense", "bce": "p"}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_pytorchs(name, device):
    data = {key: Tensor.from_host(device.queue, GOLDEN[key]) for key in GOLDEN.files if "." not in key}
    leaf = Tensor.from_host(device.queue, GOLDEN[LEAF.get(name, "x")], requires_grad=True)
    loss = CASES[name](leaf, data)
    loss.backward()
    np.testing.assert_allclose(loss.to_host(), GOLDEN[f"{name}.value"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leaf.grad.to_host(), GOLDEN[f"{name}.grad"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "float32", "float16", "bfloat16"])
def test_labels_of_any_dtype(device, dtype):
    x = Tensor.from_host(device.queue, GOLDEN["x"])
    labels = np.array([0, 1, 2, 3, 4, 0])
    want = ag.cross_entropy(x, Tensor.from_host(device.queue, labels)).item()
    assert ag.cross_entropy(x, Tensor.from_host(device.queue, labels, dtype)).item() == pytest.approx(want)


def test_a_wrong_label_is_named(device):
    x = Tensor.from_host(device.queue, np.zeros((2, 3, 4), np.float32))
    labels = np.zeros((2, 4), np.int64)
    labels[1, 2] = 7
    with pytest.raises(
        ShapeError, match=r"\[cross_entropy\] labels must be classes, got 7; index=\(1, 2\), target.shape=\(2, 4\); classes are 0..2"
    ):
        ag.cross_entropy(x, Tensor.from_host(device.queue, labels))


def test_labels_made_on_the_device_are_checked_too(device):
    x = Tensor.from_host(device.queue, np.zeros((2, 3), np.float32))
    labels = Tensor.from_host(device.queue, np.array([1, 2])) + 2
    with pytest.raises(ShapeError, match=r"labels must be classes, got 3; index=\(0,\)"):
        ag.cross_entropy(x, labels)
    changed = Tensor.from_host(device.queue, np.array([1, 2]))
    changed.fill_(5)
    with pytest.raises(ShapeError, match="labels must be classes, got 5"):
        ag.cross_entropy(x, changed)


def test_nothing_counted_is_not_a_number(device):
    x = Tensor.from_host(device.queue, np.zeros((2, 3), np.float32))
    assert np.isnan(ag.cross_entropy(x, Tensor.from_host(device.queue, np.array([-100, -100]))).item())


def test_certain_probabilities_have_torchs_gradient(device):
    x = Tensor.from_host(device.queue, np.array([0.0, 1.0, 1.0, 0.0], np.float32), requires_grad=True)
    loss = ag.binary_cross_entropy(x, Tensor.from_host(device.queue, np.array([0.0, 1.0, 0.5, 1.0], np.float32)), reduction="sum")
    loss.backward()
    assert loss.item() == 150.0
    np.testing.assert_allclose(x.grad.to_host(), [0.0, 0.0, 0.5e12, -1e12], rtol=1e-6)


def test_a_target_of_zero_counts_nothing_in_half_too(device):
    x = Tensor.from_host(device.queue, np.array([-1.0, -2.0], np.float16))
    assert ag.kl_div(x, Tensor.from_host(device.queue, np.array([0.0, 1.0], np.float16)), reduction="none").tolist() == [0.0, 2.0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_reaches_rows_whose_own_class_has_no_weight(device, reduction):
    """The gradient is ``softmax * sum(t) - t`` over the weights of the labels; off the label, ``t = smoothing / classes * weight``."""
    x = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [0.0, 1.0, -2.0]])
    labels, weight, smoothing = np.array([1, 0, -100]), np.array([0.5, 0.0, 2.0]), 0.3
    t = (smoothing / 3 + (1 - smoothing) * (labels[:, None] == np.arange(3))) * weight * (labels != -100)[:, None]
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    want = (p * t.sum(1, keepdims=True) - t) / (0.5 if reduction == "mean" else 1)
    leaf = Tensor.from_host(device.queue, x, "float32", requires_grad=True)
    given = [Tensor.from_host(device.queue, values) for values in (labels, weight.astype("f4"))]
    ag.cross_entropy(leaf, *given, label_smoothing=smoothing, reduction=reduction).sum().backward()
    np.testing.assert_allclose(leaf.grad.to_host(), want, rtol=1e-5, atol=1e-6)


def test_contrastive_loss_by_hand(device):
    a, b = (Tensor.from_host(device.queue, np.array(rows, np.float32)) for rows in ([[0, 0], [3, 0]], [[3, 4], [3, 1]]))
    together = Tensor.from_host(device.queue, np.array([1, 0], np.float32))
    np.testing.assert_allclose(ag.contrastive_loss(a, b, together, margin=3.0, reduction="none").to_host(), [25, 4], rtol=1e-6)


@pytest.mark.parametrize("loss", [ag.smooth_l1, ag.huber], ids=["smooth_l1", "huber"])
def test_second_derivative_where_prediction_and_target_are_equal(device, loss):
    x = ag.tensor(np.float32([0.0, 1.5]), requires_grad=True, queue=device.queue)
    (first,) = ag.grad(loss(x, ag.tensor(np.float32([0.0, 1.5]), queue=device.queue), reduction="sum"), x, create_graph=True)
    (second,) = ag.grad(first.sum(), x)
    assert second.tolist() == [1.0, 1.0]
