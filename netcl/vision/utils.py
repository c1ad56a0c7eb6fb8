"""Functions of ``torchvision.utils``: grids of images, and image files."""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.core.errors import DtypeError, message
from netcl.core.tensor import Tensor
from netcl.vision import functional


def make_grid(
    tensor: Any, nrow: int = 8, padding: int = 2, normalize: bool = False, value_range: tuple[float, float] | None = None,
    scale_each: bool = False, pad_value: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return images (batch, channels, height, width), or a list of them, as one image with ``nrow`` images per row.

    ``normalize`` scales values to 0..1 from ``value_range``, by default the range of all images or, with ``scale_each``, of each image.

    >>> make_grid(Tensor.zeros((5, 1, 4, 6)), nrow=3).shape
    (3, 14, 26)
    """
    images = np.stack([t.to_host() for t in tensor]) if isinstance(tensor, list | tuple) else tensor.to_host()
    images = images[(None,) * (4 - images.ndim)] if 2 <= images.ndim < 4 else images
    if images.ndim != 4:
        raise ValueError(message("make_grid", "images must have 2 to 4 axes", shape=images.shape))
    images = np.repeat(images, 3, 1) if images.shape[1] == 1 else images
    if normalize:
        _check_floats("make_grid", images)
        axes = (1, 2, 3) if scale_each else None
        low, high = value_range or (images.min(axes, keepdims=True), images.max(axes, keepdims=True))
        images = ((np.clip(images, low, high) - low) / np.maximum(np.asarray(high) - low, 1e-5)).astype(images.dtype)
    if len(images) == 1:
        return functional.host_tensor(images[0])
    count, channels, height, width = images.shape
    columns = min(nrow, count)
    rows, tall, wide = -(-count // columns), height + padding, width + padding
    grid = np.full((channels, rows * tall + padding, columns * wide + padding), pad_value, images.dtype)
    for i, image in enumerate(images):
        top, left = i // columns * tall + padding, i % columns * wide + padding
        grid[:, top : top + height, left : left + width] = image
    return functional.host_tensor(grid)


def _check_floats(op: str, images: np.ndarray) -> None:
    if images.dtype.kind != "f":
        what, remedy = "images must be floats", "call functional.convert_image_dtype(images) first"
        raise DtypeError(message(op, what, remedy, dtype=images.dtype))


def save_image(tensor: Any, fp: Any, format: str | None = None, **options: Any) -> None:
    """Write the grid of ``tensor`` (see :func:`make_grid`), with values from 0 to 1, to a path or a file."""
    grid = make_grid(tensor, **options).to_host()
    _check_floats("save_image", grid)
    pixels = np.clip(grid * 255 + 0.5, 0, 255).astype(np.uint8)
    functional.pillow().fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1))).save(fp, format=format)
