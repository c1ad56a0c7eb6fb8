"""Functions of images against torchvision's results, on PIL images and on tensors."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl.core.tensor import Tensor
from netcl.vision import functional as F
from netcl.vision import utils

Image = pytest.importorskip("PIL.Image")
GOLDEN = Path(__file__).parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))
import vision_cases as cases  # noqa: E402


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "vision.npz", allow_pickle=False) as file:
        return dict(file)


def image(kind: str, queue=None):
    array = cases.pixels()
    if kind == "pil":
        return Image.fromarray(array)
    array = np.moveaxis(array, -1, 0)
    with netcl.device("cpu"):
        queue = queue or netcl.ones(1).queue
    return Tensor.from_host(queue, array if kind == "uint8" else array.astype(np.float32) / 255)


@pytest.mark.parametrize(("key", "name", "options", "kind"), cases.listed(), ids=lambda v: v if isinstance(v, str) else "")
def test_results_are_torchvisions(key, name, options, kind):
    made, wanted = np.asarray(getattr(F, name)(image(kind), **options)), golden()[key]
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    off = np.abs(made.astype(np.float64) - wanted.astype(np.float64))
    if name in ("rotate", "affine") and kind != "pil":  # a place between two pixels may be rounded to either
        assert (off > (1 if kind == "uint8" else 1e-3)).mean() <= 0.01
    else:
        assert off.max() <= (2e-6 * max(1, np.abs(wanted).max()) if wanted.dtype.kind == "f" else 1) and (off > 0.5).mean() <= 0.02


@pytest.mark.parametrize("i", range(len(cases.GRIDS)))
def test_grids_are_torchvisions(i):
    batch = Tensor.from_host(np.random.default_rng(6).random((5, 3, 4, 6), np.float32))
    np.testing.assert_allclose(utils.make_grid(batch, **cases.GRIDS[i]).to_host(), golden()[f"grid.{i}"], rtol=1e-5, atol=1e-6)


def test_tensors_stay_on_their_device(queue):
    for kind in cases.TENSORS:
        made, wanted = (F.gaussian_blur(F.resize(image(kind, where), [9, 14]), 3) for where in (queue, None))
        assert made.queue is queue
        np.testing.assert_array_equal(made.to_host(), wanted.to_host())
