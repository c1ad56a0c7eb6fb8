"""Pooling beyond the samples of its rows: PyTorch's numbers, places of maxima, ties and NaN."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
import netcl.ops as F
from netcl.core.device import manager
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.ops.pool import Windows

_spec = importlib.util.spec_from_file_location("image_cases", Path(__file__).parents[1] / "golden" / "image_cases.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@pytest.mark.parametrize("k", range(len(golden.POOL)), ids=lambda k: golden.POOL[k].key)
def test_numbers_are_torchs(queue, k):
    golden.check("pool", k, queue)


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}], ids=str)
def test_places_point_at_the_maxima(queue, rng, options):
    x = rng.normal(size=(2, 3, 9, 8)).astype("f")
    tensor = Tensor.from_host(queue, x)
    values, places = (t.to_host() for t in F.max_pool2d(tensor, **options, return_indices=True))
    np.testing.assert_array_equal(np.take_along_axis(x.reshape(2, 3, -1), places.reshape(2, 3, -1), 2).reshape(values.shape), values)


def test_places_of_signals_and_adaptive_windows(queue, rng):
    x = rng.normal(size=(2, 3, 11)).astype("f")
    tensor = Tensor.from_host(queue, x)
    values, places = (t.to_host() for t in F.max_pool1d(tensor, 3, return_indices=True))
    np.testing.assert_array_equal(np.take_along_axis(x, places, 2), values)
    image = Tensor.from_host(queue, x.reshape(2, 3, 1, 11))
    values, places = (t.to_host() for t in F.adaptive_max_pool2d(image, (1, 4), return_indices=True))
    np.testing.assert_array_equal(np.take_along_axis(x, places[:, :, 0], 2), values[:, :, 0])


def test_the_first_of_equals_gets_the_gradient(queue):
    x = Tensor.from_host(queue, np.zeros((1, 1, 4, 4), np.float32), requires_grad=True)
    ag.sum(ag.max_pool2d(x, 2)).backward()
    np.testing.assert_array_equal(x.grad.to_host()[0, 0], [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])


def test_padding_never_wins_and_nan_always_does(queue):
    x = np.full((1, 1, 3, 3), -5.0, np.float32)
    x[0, 0, 2, 2] = np.nan
    tensor = Tensor.from_host(queue, x)
    y = F.max_pool2d(tensor, 3, 2, 1).to_host()[0, 0]
    np.testing.assert_array_equal(y, [[-5, -5], [-5, np.nan]])
    lowest = Tensor.from_host(queue, np.full((1, 1, 2, 2), -np.inf, np.float32))
    assert np.isneginf(F.max_pool2d(lowest, 2, 1, 1).to_host()).all()


def test_infinity_reaches_only_the_windows_that_hold_it(queue):
    x = np.ones((1, 1, 4, 4), np.float32)
    x[0, 0, 0, 0] = np.inf
    tensor = Tensor.from_host(queue, x)
    np.testing.assert_array_equal(F.avg_pool2d(tensor, 2).to_host()[0, 0], [[np.inf, 1], [1, 1]])
    np.testing.assert_array_equal(F.adaptive_avg_pool2d(tensor, 2).to_host()[0, 0], [[np.inf, 1], [1, 1]])


def test_an_empty_batch(queue):
    x = Tensor.zeros((0, 3, 5, 5), queue=queue)
    assert F.max_pool2d(x, 2).shape == F.avg_pool2d(x, 2).shape == F.adaptive_avg_pool2d(x, 2).shape == (0, 3, 2, 2)


def test_integers(queue, rng):
    x = rng.integers(-99, 99, (1, 2, 5, 5)).astype(np.int64)
    tensor = Tensor.from_host(queue, x)
    got = F.max_pool2d(tensor, 3, 1).to_host()
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3)).max(axis=(4, 5)))


def test_gradients_have_gradients(rng):
    x = Tensor.from_host(manager.default("cpu").queue, rng.normal(size=(1, 2, 5, 6)), "float64", requires_grad=True)
    for pool in (lambda x: ag.max_pool2d(x, 3, 2, 1), lambda x: ag.avg_pool2d(x, 2, 1), lambda x: ag.adaptive_avg_pool2d(x, 2)):
        assert ag.gradgradcheck(lambda x, pool=pool: ag.square(pool(x)), [x], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 1), (2, 3)])
def test_gradients_of_many_planes(device, kernel, stride):
    """A CPU then gives a plane to each work-item; windows that overlap, touch, and leave pixels out."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 9, 7, 8)).astype(np.float32)
    windows = Windows(x.shape[2:], tuple((size - kernel) // stride + 1 for size in x.shape[2:]), (kernel,) * 2, (stride,) * 2)
    y, places = F.pool_max(Tensor.from_host(device.queue, x), windows=windows)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    found = F.pool_max_grad(Tensor.from_host(device.queue, dy), places, windows=windows).to_host()
    expected = np.zeros((36, 56))
    np.add.at(expected, (np.arange(36)[:, None], places.to_host().reshape(36, -1)), dy.reshape(36, -1))
    np.testing.assert_allclose(found, expected.reshape(x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [8, 11, 16, 23])
def test_pairs_of_many_planes(device, width):
    """The vectors a CPU takes windows of 2 x 2 in: short rows, whole ones, overlapping ones; equals and NaN as elsewhere."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (8, 16, 5, width)).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = np.nan
    values, places = (t.to_host() for t in F.max_pool2d(Tensor.from_host(device.queue, x), 2, return_indices=True))
    windows = x[:, :, :4, : width // 2 * 2].reshape(8, 16, 2, 2, width // 2, 2).swapaxes(3, 4).reshape(*values.shape, 4)
    best = np.argmax(windows, axis=-1)
    np.testing.assert_array_equal(values, np.max(windows, axis=-1))
    at = (2 * np.arange(2)[:, None] + best // 2) * width + 2 * np.arange(width // 2) + best % 2
    np.testing.assert_array_equal(places, at)


@pytest.mark.parametrize(("kernel", "stride", "padding", "ceil"), [(3, 2, 1, False), (3, 1, 1, False), ((5, 4), (3, 2), (2, 1), True)])
def test_windows_of_many_planes_that_reach_into_the_padding(cl_device, kernel, stride, padding, ceil):
    """A CPU takes the windows inside a line in vectors and those at its ends one by one."""
    rng, options = np.random.default_rng(0), {"stride": stride, "padding": padding, "ceil_mode": ceil, "return_indices": True}
    for size in ((9, 23), (7, 9), (4, 5)):
        x = rng.integers(-3, 3, (8, 16, *size)).astype(np.float32)
        x[rng.random(x.shape) < 0.05] = np.nan
        found, expected = (
            [t.to_host() for t in F.max_pool2d(Tensor.from_host(queue, x), kernel, **options)]
            for queue in (cl_device.queue, manager.default("cpu").queue)
        )
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_whole_planes_are_reduced_on_other_devices_than_cpus(cl_queue, unoptimized, rng, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu_device", lambda queue: False)
    x, seen = rng.standard_normal((3, 5, 11, 13)).astype(np.float32), []
    hooks.launch_observers.append(lambda kernel, *rest: seen.append(kernel.name))
    try:
        y = F.adaptive_avg_pool2d(Tensor.from_host(cl_queue, x), 1).to_host()
    finally:
        hooks.launch_observers.pop()
    np.testing.assert_allclose(y, x.astype(np.float64).mean((2, 3), keepdims=True), rtol=1e-5, atol=1e-6)
    assert seen and "pool_average" not in seen


@pytest.mark.parametrize("pool", [F.max_pool2d, lambda x, n, **options: F.adaptive_max_pool2d(x, 2, **options)], ids=["max", "adaptive"])
def test_indices_are_int64(queue, pool):
    _, places = pool(Tensor.from_host(queue, np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)), 2, return_indices=True)
    assert (places.dtype, places.tolist()) == ("int64", [[[[5, 7], [13, 15]]]])
