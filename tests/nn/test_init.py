"""Start values: distributions, shapes, repetition, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.core.device import queue_of
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.ops import random


def test_distributions(device):
    random.manual_seed(1)
    shape = (64, 256)
    expected = {
        "uniform_": ((-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
        "normal_": ((2.0, 0.5), 2.0, 0.5),
        "xavier_uniform_": ((2.0,), 0.0, 2 * math.sqrt(2 / 320)),
        "xavier_normal_": ((), 0.0, math.sqrt(2 / 320)),
        "kaiming_uniform_": ((0.0, "fan_in", "relu"), 0.0, math.sqrt(2 / 256)),
        "kaiming_normal_": ((0.2, "fan_out"), 0.0, math.sqrt(2 / 1.04 / 64)),
        "trunc_normal_": ((0.0, 1.0, -1.0, 1.0), 0.0, 0.5396),
    }
    for name, (args, mean, std) in expected.items():
        values = getattr(init, name)(Tensor.empty(shape), *args).to_host()
        assert abs(values.mean() - mean) < 5 * std / 128, name
        assert abs(values.std() / std - 1) < 0.03, name


def test_truncation_is_exact_and_the_quantiles_are_right(device):
    random.manual_seed(2)
    values = init.trunc_normal_(Tensor.empty((20001,)), 1.0, 2.0, -1.0, 4.0).to_host()
    assert values.min() >= -1 and values.max() <= 4
    below = lambda x: 0.5 * (1 + math.erf((x - 1) / 2 / math.sqrt(2)))  # noqa: E731
    want = (below(2.0) - below(-1.0)) / (below(4.0) - below(-1.0))
    assert abs((values <= 2.0).mean() - want) < 0.015


@pytest.mark.parametrize("y", [-0.9999999, -0.99, -0.5, 0.0, 1e-4, 0.7, 0.999999])
def test_the_inverse_error_function(y):
    found = ag.erfinv(Tensor.from_host(queue_of("cpu"), np.array(y), "float64")).item()
    assert math.erf(found) == pytest.approx(y, rel=3e-6, abs=1e-9)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (4, 2, 3)])
def test_orthogonal(device, shape):
    w = init.orthogonal_(Tensor.empty(shape), gain=2.0).to_host().reshape(shape[0], -1)
    small = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-5)


def test_given_values(device):
    assert init.orthogonal_(Tensor.empty((0, 3))).shape == (0, 3)
    assert init.constant_(Tensor.empty((2,)), 3.0).tolist() == [3.0, 3.0]
    assert init.eye_(Tensor.empty((2, 3))).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert (init.sparse_(Tensor.empty((10, 4)), 0.25).to_host() == 0).sum(axis=0).tolist() == [3] * 4
    conv = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
    init.dirac_(conv.weight, groups=2)
    x = np.arange(32, dtype=np.float32).reshape(1, 4, 2, 4)
    np.testing.assert_array_equal(conv(x).to_host(), x)


def test_half_starts_from_the_same_numbers(device):
    random.manual_seed(5)
    wide = init.normal_(Tensor.empty((9, 7))).to_host()
    random.manual_seed(5)
    half = init.normal_(Tensor.empty((9, 7), "float16")).to_host()
    np.testing.assert_array_equal(half, wide.astype(np.float16))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda t: init.eye_(t), ShapeError, r"\[eye_\] the tensor must be a matrix; shape=\(3,\)"),
        (lambda t: init.orthogonal_(t), ShapeError, r"\[orthogonal_\]"),
        (lambda t: init.kaiming_normal_(t), ShapeError, r"\[init\] the tensor must have at least two dimensions for fan in and fan out"),
        (lambda t: init.kaiming_normal_(t, mode="fan"), ValueError, r"\[kaiming\] mode must be fan_in or fan_out; mode='fan'"),
        (lambda t: init.calculate_gain("soft"), ValueError, r"\[calculate_gain\] unknown nonlinearity"),
        (lambda t: init.dirac_(t), ShapeError, r"\[dirac_\]"),
        (lambda t: init.sparse_(t, 0.5), ShapeError, r"\[sparse_\]"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(Tensor.empty((3,), device="cpu"))
