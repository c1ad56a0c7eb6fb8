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


def plain(values, dtype="float32"):
    with netcl.device("cpu"):
        return Tensor.from_host(np.asarray(values, dtype), dtype=dtype)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda: F.pad(plain(np.zeros((2, 1, 1))), 1, fill=(5, 7)), [[[c, c, c], [c, 0, c], [c, c, c]] for c in (5, 7)]),
        (lambda: F.pad(plain([[[1, 2, 3]]]), [-1, 0, 1, 0], fill=9), [[[2, 3, 9]]]),
        (lambda: F.pad(plain([[[1, 2, 3]]]), [2, 0, -1, 0], padding_mode="edge"), [[[1, 1, 1, 2]]]),
        (lambda: F.resize(plain([[[-10, -20], [-30, -40]]], "int16"), [1, 1]), [[[-25]]]),
        (lambda: F.rotate(plain([[[-1, 2], [3, -4]]], "int64"), 90), [[[2, -4], [-1, 3]]]),
        (lambda: F.rotate(plain([[[0, 1], [2, 3], [4, 5], [6, 7]]]), 270, expand=True), [[[6, 4, 2, 0], [7, 5, 3, 1]]]),
        (lambda: F.adjust_saturation(plain([[range(90, 96)]], "uint8"), 1.3), [[[*range(90, 96)]]]),
        (lambda: F.hflip(plain([[[0.1, 1 / 3]]], "float64")), [[[1 / 3, 0.1]]]),
        (lambda: F.adjust_brightness(plain([[[0.1]]], "float64"), 0.7), [[[0.7 * 0.1]]]),
        (lambda: F.vflip(plain([[[1], [2]]]).to("bfloat16")).dtype, "bfloat16"),
        (lambda: F.resized_crop(plain(np.ones((1, 4, 4))), 0, 0, 2, 4, [1]), [[[1, 1]]]),  # the shorter side, as resize
        (lambda: F.affine(plain([[range(6), range(6, 12)]]), 0, [0, 0], 1, [20.0]), [[[0, 0, 2, 3, 10, 11], [0, 1, 8, 9, 0, 0]]]),
    ],
)
def test_arguments_that_torchvision_takes(made, wanted):
    """Fill per channel, negative padding, negative integers, one size, one angle, dtypes; numbers are torchvision's."""
    got = made()
    assert (got if isinstance(got, str) else got.tolist()) == wanted


def test_images_with_a_palette():
    image = Image.fromarray(cases.pixels()).convert("P")
    padded = F.pad(image, 2, padding_mode="edge")
    assert padded.mode == "P" and padded.convert("RGB").getpixel((0, 0)) == image.convert("RGB").getpixel((0, 0))
    assert F.adjust_hue(image, 0.5).mode == "P" and F.adjust_hue(image, 0.5).convert("RGB") != image.convert("RGB")
