"""Resampling beyond the samples of its rows: PyTorch's numbers, coordinates at the edge, columns there and back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
import netcl.ops as F
from netcl.core.device import manager
from netcl.core.tensor import Tensor

_spec = importlib.util.spec_from_file_location("image_cases", Path(__file__).parents[1] / "golden" / "image_cases.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@pytest.mark.parametrize("k", range(len(golden.RESAMPLE)), ids=lambda k: golden.RESAMPLE[k].key)
def test_numbers_are_torchs(queue, k):
    golden.check("resample", k, queue)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    "sizes", [((7, 5), (7, 5)), ((5, 3), (64, 57)), ((64, 57), (5, 3)), ((1, 9), (4, 1)), ((33, 2), (100, 3))], ids=str
)
def test_the_gradient_is_the_transpose(queue, rng, mode, sizes):
    """<resample(x), g> = <x, gradient(g)>: no reader of a pixel is missed, at scales far from one."""
    x, g = (rng.normal(size=(1, 2, *size)).astype("f") for size in sizes)
    steps = tuple(n / m for n, m in zip(*sizes, strict=True))
    tx, tg = Tensor.from_host(queue, x), Tensor.from_host(queue, g)
    forward = F.resample2d(tx, size=sizes[1], steps=steps, mode=mode).to_host()
    back = F.resample2d(tg, size=sizes[0], steps=steps, mode=mode, back=True).to_host()
    scale = np.linalg.norm(forward) * np.linalg.norm(g)
    assert abs((forward.astype(np.float64) * g).sum() - (back.astype(np.float64) * x).sum()) < 1e-6 * scale


def test_a_grid_of_the_pixels_themselves_changes_nothing(queue, rng):
    x = rng.normal(size=(1, 2, 4, 5)).astype("f")
    ys, xs = np.meshgrid(np.linspace(-1, 1, 4), np.linspace(-1, 1, 5), indexing="ij")
    tx, grid = Tensor.from_host(queue, x), Tensor.from_host(queue, np.stack([xs, ys], -1)[None].astype("f"))
    np.testing.assert_allclose(F.grid_sample(tx, grid, align_corners=True).to_host(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
def test_wild_coordinates(queue, padding_mode):
    tx = Tensor.ones((1, 1, 3, 3), queue=queue, requires_grad=True)
    points = np.array([[np.nan, 0], [np.inf, 0], [-np.inf, 0], [1e30, -1e30], [0, 0]], np.float32).reshape(1, 1, 5, 2)
    grid = Tensor.from_host(queue, points, requires_grad=True)
    inside = 1.0 if padding_mode == "border" else 0.0
    got = ag.grid_sample(tx, grid, padding_mode=padding_mode)
    np.testing.assert_array_equal(got.to_host().reshape(-1), [inside] * 4 + [1.0])
    ag.sum(got).backward()
    assert np.isfinite(tx.grad.to_host()).all() and np.isfinite(grid.grad.to_host()).all()


def test_columns_there_and_back_count_the_windows(queue, rng):
    x = rng.normal(size=(1, 2, 6, 7)).astype("f")
    tx, ones = Tensor.from_host(queue, x), Tensor.ones((1, 2, 6, 7), queue=queue)
    options = {"kernel": (3, 2), "stride": (2, 1), "padding": 1}
    cols, count = (F.im2col(t, **options) for t in (tx, ones))
    back, times = (F.col2im(c, size=(6, 7), **options).to_host() for c in (cols, count))
    np.testing.assert_allclose(back, x * times, rtol=1e-6)


def test_columns_of_every_dtype(queue, rng):
    for dtype in ("uint8", "int64", "bool"):
        x = rng.integers(0, 2, (1, 1, 4, 4)).astype(dtype)
        tensor = Tensor.from_host(queue, x)
        got = F.im2col(tensor, kernel=(2, 2)).to_host()
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got[0, 0].reshape(3, 3), x[0, 0, :3, :3])


def test_empty_batches(queue):
    x, grid = Tensor.zeros((0, 2, 4, 4), queue=queue), Tensor.zeros((0, 3, 3, 2), queue=queue)
    assert F.interpolate(x, scale_factor=2).shape == (0, 2, 8, 8)
    assert F.grid_sample(x, grid).shape == (0, 2, 3, 3)


def test_gradients_have_gradients(rng):
    queue = manager.default("cpu").queue
    x = Tensor.from_host(queue, rng.normal(size=(1, 2, 4, 5)), "float64", requires_grad=True)
    grid = Tensor.from_host(queue, rng.uniform(-0.9, 0.9, (1, 2, 3, 2)), "float64")
    for call in (lambda x: ag.interpolate(x, scale_factor=1.5, mode="bilinear"), lambda x: ag.grid_sample(x, grid)):
        assert ag.gradgradcheck(lambda x, call=call: ag.square(call(x)), [x], rtol=1e-4, atol=1e-6)
