"""Winograd's convolution: its matrices, how exact it is in all three passes, when it is taken."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from netcl import ops as F
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.tensor import Tensor
from netcl.ops.conv import plans, winograd
from netcl.ops.conv.geometry import geometry
from netcl.ops.epilogue import Epilogue

CONFIG = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "simt", "winograd_channels": 1})


@pytest.mark.parametrize("points", [winograd.TILE_POINTS, [Fraction(n) for n in (0, 1, -1, 2, 3)]])
def test_matrices_make_a_convolution_exactly(points):
    outputs, weights, inputs = winograd.matrices(points)
    for out in range(winograd.OUT):
        for tap in range(winograd.TAPS):
            row = [sum(outputs[out][e] * weights[e][tap] * inputs[e][i] for e in range(winograd.TILE)) for i in range(winograd.TILE)]
            assert row == [i == out + tap for i in range(winograd.TILE)]


def test_powers_of_the_points_are_exact_in_float32():
    p, q = winograd.POINTS
    for value in (*(point**n for point in (p, q) for n in (1, 2, 3)), p**2 + q**2, p**2 * q**2):
        assert Fraction(float(np.float32(float(value)))) == value


def job_of(kind, n, c, h, w, f, padding):
    g = geometry(kind, (n, c, h, w), (f, c, 3, 3), (1, 1), padding, (1, 1), 1)
    return plans.Convolution(kind, g, "float32")


def shapes_of(conv):
    """Of both operands, and of the result."""
    x, w, y = conv.g.x_shape, conv.g.w_shape, conv.g.y_shape
    return {plans.FORWARD: (x, w, y), plans.INPUT_GRAD: (y, w, x), plans.WEIGHT_GRAD: (x, y, w)}[conv.kind]


def run(conv, queue, first, second):
    a, b = (Tensor.from_host(queue, array.astype(np.float32)) for array in (first, second))
    result = Tensor.empty(shapes_of(conv)[2], "float32", queue=queue)
    plans.run(conv, queue, a, b, result, CONFIG)
    return result.to_host()


def matrices_of(conv, first, second):
    """The convolution as the product of two matrices, and the result's order of axes."""
    kind, (ph, pw) = conv.kind, conv.g.pad
    if kind == plans.INPUT_GRAD:
        second, (ph, pw) = second[:, :, ::-1, ::-1].swapaxes(0, 1), (2 - ph, 2 - pw)
    padded = np.pad(first, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))  # n, c, oh, ow, 3, 3
    if kind == plans.WEIGHT_GRAD:
        taps = windows.transpose(1, 4, 5, 0, 2, 3).reshape(-1, windows.shape[0] * np.prod(windows.shape[2:4]))
        return second.transpose(1, 0, 2, 3).reshape(len(second[0]), -1), taps
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, windows.shape[1] * 9), second.reshape(len(second), -1)


def in_shape(conv, product):
    n, c, h, w = shapes_of(conv)[2]
    return product.reshape(n, c, h, w) if conv.kind == plans.WEIGHT_GRAD else product.reshape(n, h, w, c).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("kind", [plans.FORWARD, plans.INPUT_GRAD, plans.WEIGHT_GRAD])
@pytest.mark.parametrize("sizes", [(2, 33, 9, 14, 20, (1, 2)), (3, 16, 8, 12, 24, (1, 1))], ids=str)
def test_the_error_is_within_four_times_that_of_a_plain_sum(cl_queue, unoptimized, rng, kind, sizes):
    conv = job_of(kind, *sizes)
    first, second = (rng.normal(size=shape).astype("f") for shape in shapes_of(conv)[:2])
    if kind != plans.INPUT_GRAD:
        first = np.maximum(first + np.float32(0.5), 0)  # a mean, as after batch norm and ReLU
    left, right = matrices_of(conv, first, second)
    exact = left.astype(np.float64) @ right.astype(np.float64).T
    plain = np.cumsum(left[:, None] * right[None], axis=2, dtype=np.float32)[:, :, -1]
    got = run(conv, cl_queue, first, second)
    assert np.abs(got - in_shape(conv, exact)).max() <= 4 * np.abs(plain - exact).max()


def test_long_sums_go_in_parts(cl_queue, unoptimized, rng, monkeypatch):
    assert winograd._useful_parts(64, 64, 12544, units=132) == 11 and winograd._useful_parts(512, 512, 128, units=132) == 1
    conv = job_of(plans.WEIGHT_GRAD, 3, 4, 12, 20, 5, (1, 1))
    first, second = (rng.normal(size=shape).astype("f") for shape in shapes_of(conv)[:2])
    monkeypatch.setattr(winograd, "_useful_parts", lambda *sizes: 2)
    got, (left, right) = run(conv, cl_queue, first, second), matrices_of(conv, first, second)
    np.testing.assert_allclose(got, in_shape(conv, left.astype(np.float64) @ right.astype(np.float64).T), rtol=0, atol=1e-4)


@pytest.mark.parametrize("epilogue", [Epilogue("float32", "float32", "relu"), Epilogue("float32", result="float16")], ids=str)
def test_it_ends_in_what_follows(cl_queue, unoptimized, rng, epilogue):
    """Bit for bit as the ops one by one."""
    conv = job_of(plans.FORWARD, 1, 3, 8, 12, 4, (1, 1))._replace(bias="float32")
    shapes = (*shapes_of(conv)[:2], (4,), conv.g.y_shape)
    x, w, bias, residual = (Tensor.from_host(cl_queue, rng.normal(size=shape).astype("f")) for shape in shapes)
    plain, got = Tensor.empty(conv.g.y_shape, queue=cl_queue), Tensor.empty(conv.g.y_shape, epilogue.stored, queue=cl_queue)
    plans.run(conv, cl_queue, x, w, plain, CONFIG, bias=bias)
    added = residual if epilogue.residual else None
    plans.run(conv._replace(epilogue=epilogue), cl_queue, x, w, got, CONFIG, bias=bias, residual=added)
    alone = plain if added is None else F.relu(F.add(plain, added))
    np.testing.assert_array_equal(got.to_host(), F.cast(alone, epilogue.stored).to_host())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_every_output_it_should(cl_queue, unoptimized, rng, bad):
    """And others of its tile: there infinity minus infinity is no number."""
    conv = job_of(plans.FORWARD, 1, 4, 12, 12, 4, (1, 1))
    x, w = (rng.normal(size=shape) for shape in shapes_of(conv)[:2])
    clean = run(conv, cl_queue, x, w)
    x[0, 2, 5, 6] = bad
    got = run(conv, cl_queue, x, w)
    assert not np.isfinite(got[0, :, 4:7, 5:8]).any()
    np.testing.assert_array_equal(got[0, :, 8:], clean[0, :, 8:])


@pytest.mark.parametrize(
    "sizes, expected",
    [((64, 64, 56, 56, 64), True), ((128, 512, 4, 4, 512), True), ((128, 3, 32, 32, 64), False), ((1, 64, 8, 8, 64), False)],
)
def test_it_is_taken_where_it_pays(sizes, expected):
    assert {winograd.pays(job_of(kind, *sizes, (1, 1))) for kind in (plans.FORWARD, plans.INPUT_GRAD, plans.WEIGHT_GRAD)} == {expected}


@pytest.mark.parametrize("sizes, expected", [((1, 64, 28, 28, 64), True), ((1, 64, 16, 16, 64), False), ((1, 16, 28, 28, 64), False)])
def test_it_is_taken_for_few_results(cl_device, sizes, expected):
    """With tiles and channels enough for the transforms; where all units are busy, the model decides."""
    policy = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"why": "a rule"})
    large, small = (dataclasses.replace(cl_device.profile, max_compute_units=units, max_alloc_size=2**34) for units in (132, 1))
    conv = job_of(plans.FORWARD, *sizes, (1, 1))
    assert winograd.suits(conv, policy, large) is expected and not winograd.suits(conv, policy, small)
