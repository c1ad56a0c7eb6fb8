"""Augmentations in NumPy, for the ``augment`` of a DataLoader (whole batches, in its workers) or its ``transforms`` (samples).

Most take images (N, C, H, W), or one image (C, H, W), and a generator: ``RandomCrop(32, padding=4)(images, rng)``; ``Mixup`` and
``CutMix`` take images and labels. Drawing and applying are two methods, so that :mod:`netcl.data.augment_gpu` can draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.data.errors import message

Drawn = tuple[np.ndarray, ...]


def pixels_after(matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Map every pixel of images of ``size`` by affine matrices (N, 2, 3); returns source coordinates ``(x, y)`` of shape (N, H, W, 2)."""
    y, x = np.meshgrid(np.arange(size[0], dtype=np.float32), np.arange(size[1], dtype=np.float32), indexing="ij")
    return np.einsum("nij,hwj->nhwi", matrix, np.stack([x, y, np.ones_like(x)], -1), dtype=np.float32)


def sample_bilinear(x: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Interpolate images bilinearly at ``points`` (N, H, W, 2), with zeros outside; returns values of shape (N, C, H, W)."""
    height, width = x.shape[2:]
    corner = np.floor(points).astype(np.int64)
    share = (points - corner).astype(np.float32)
    n = np.arange(len(x))[:, None, None]
    total = np.zeros((*points.shape[:3], x.shape[1]), np.float32)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        column, row = corner[..., 0] + dx, corner[..., 1] + dy
        weight = np.abs(1 - dx - share[..., 0]) * np.abs(1 - dy - share[..., 1])
        weight = weight * ((column >= 0) & (column < width) & (row >= 0) & (row < height))
        total += x[n, :, row.clip(0, height - 1), column.clip(0, width - 1)] * weight[..., None]
    return np.moveaxis(total, -1, 1).astype(x.dtype)


def _pair(name: str, value: Any) -> tuple[float, float]:
    """Return a range as two floats; a number ``d`` gives ``(-d, d)``."""
    low, high = (-value, value) if np.ndim(value) == 0 else value
    if low > high:
        raise ValueError(message(name, "degrees, shear and scale must have low <= high", given=(low, high)))
    return float(low), float(high)


class Augmentation:
    """Base class of augmentations, which draw random numbers for a batch and then apply them."""

    on_device = False
    with_labels = False

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        """Draw the random numbers for a batch of the given shape."""
        return ()

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        """Apply the drawn numbers to a batch."""
        raise NotImplementedError(message(type(self).__name__, "an augmentation must have a method apply"))

    def __call__(self, x: Any, rng: np.random.Generator | None = None) -> Any:
        """Return a changed batch or image; without a generator (a loader passes one), each call draws new numbers."""
        rng = np.random.default_rng() if rng is None else rng
        if len(x.shape) not in (3, 4):
            raise ValueError(message(type(self).__name__, "images must have the shape (N, C, H, W) or (C, H, W)", shape=x.shape))
        if len(x.shape) == 3:
            return self.apply(x[None], *self.draw(rng, (1, *x.shape)))[0]
        return self.apply(x, *self.draw(rng, x.shape))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


class Compose(Augmentation):
    """Applies several augmentations one after the other; all in NumPy, or all on the device."""

    def __init__(self, *parts: Augmentation):
        self.parts = parts
        self.on_device = any(part.on_device for part in parts)
        if any(part.on_device != self.on_device or part.with_labels for part in parts):
            what = "parts must not change labels, and must all run in NumPy or all on the device"
            raise ValueError(message("Compose", what, "give the loader a list: augment=[...]", parts=[type(x).__name__ for x in parts]))

    def __call__(self, x: Any, rng: np.random.Generator | None = None) -> Any:
        rng = np.random.default_rng() if rng is None else rng
        for part in self.parts:
            x = part(x, rng)
        return x


class Normalize(Augmentation):
    """Normalizes every channel: ``(x - mean) / std``."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean, self.std = (np.asarray(values, np.float32).reshape(1, -1, 1, 1) for values in (mean, std))
        if not (self.std > 0).all():
            raise ValueError(message("Normalize", "std must be above 0", std=list(std)))

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return (x - self.mean) / self.std


class RandomHorizontalFlip(Augmentation):
    """Flips each image left to right with probability ``p``."""

    axis = -1

    def __init__(self, p: float = 0.5):
        if isinstance(p, bool) or not isinstance(p, int | float | np.number) or not 0 <= p <= 1:
            raise ValueError(message(type(self).__name__, "p must be a number from 0 to 1", p=repr(p)))
        self.p = p

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        return (rng.random(shape[0]) < self.p,)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return np.where(drawn[0][:, None, None, None], np.flip(x, self.axis), x)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Flips each image top to bottom with probability ``p``."""

    axis = -2


class RandomCrop(Augmentation):
    """Crops a random window of ``size`` from the image, which is first padded with ``padding`` zeros on every side."""

    def __init__(self, size: int | tuple[int, int], padding: int = 0):
        self.size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        self.padding = padding
        if min(self.size) < 1 or padding < 0:
            raise ValueError(message("RandomCrop", "sizes must be at least 1 and padding at least 0", size=self.size, padding=padding))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        room = [n + 2 * self.padding - k for n, k in zip(shape[2:], self.size, strict=True)]
        if min(room) < 0:
            what = "the window must fit into the padded image"
            raise ValueError(message("RandomCrop", what, image=shape[2:], size=self.size, padding=self.padding))
        return tuple(rng.integers(0, n + 1, shape[0]) - self.padding for n in room)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        top, left = (start + self.padding for start in drawn)
        wide = np.pad(x, [(0, 0), (0, 0), *[(self.padding, self.padding)] * 2])
        rows, columns = (start[:, None] + np.arange(n) for start, n in zip((top, left), self.size, strict=True))
        return np.moveaxis(wide[np.arange(len(x))[:, None, None], :, rows[:, :, None], columns[:, None, :]], -1, 1)


class RandomAffine(Augmentation):
    """Rotates, translates, scales and shears images about the center, bilinear, with zeros outside.

    - **degrees**: a range of angles, counterclockwise, or ``d`` for ``(-d, d)``.
    - **translate**: the largest shift, as a fraction of the image size: one number or ``(vertical, horizontal)``.
    - **scale**: a range of factors.
    - **shear**: a range of shear angles of the vertical axis.
    """

    def __init__(self, degrees: Any = 0, translate: Any = 0, scale: tuple[float, float] = (1, 1), shear: Any = 0):
        self.degrees, self.shear = _pair("RandomAffine", degrees), _pair("RandomAffine", shear)
        self.translate = (translate, translate) if np.ndim(translate) == 0 else tuple(translate)
        self.scale = _pair("RandomAffine", scale)
        if self.scale[0] <= 0:
            raise ValueError(message("RandomAffine", "scale factors must be above 0", scale=scale))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        """Draw matrices (N, 2, 3) that map a pixel of the result to its source in the image."""
        n, _, height, width = shape
        angle, shear = (np.deg2rad(rng.uniform(*limits, n)) for limits in (self.degrees, self.shear))
        scale = rng.uniform(*self.scale, n)
        down, across = (rng.uniform(-share, share, n) * size for share, size in zip(self.translate, (height, width), strict=True))
        cos, sin, tan = np.cos(angle), -np.sin(angle), np.tan(shear)  # rows count downwards: this turns against the clock
        linear = np.stack([np.stack([cos, sin - tan * cos], -1), np.stack([-sin, cos + tan * sin], -1)], 1) / scale[:, None, None]
        centre = np.array([(width - 1) / 2, (height - 1) / 2])
        offset = centre - np.einsum("nij,nj->ni", linear, centre + np.stack([across, down], -1))
        return (np.concatenate([linear, offset[..., None]], -1).astype(np.float32),)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return sample_bilinear(x, pixels_after(drawn[0], x.shape[2:]))


class RandomRotation(RandomAffine):
    """Rotates images about the center by an angle from the range ``degrees``, or from ``(-degrees, degrees)``."""

    def __init__(self, degrees: Any):
        super().__init__(degrees)


class ColorJitter(Augmentation):
    """Changes brightness, contrast and (for three channels) saturation by factors from ``max(0, 1 - v)`` to ``1 + v``."""

    def __init__(self, brightness: float = 0, contrast: float = 0, saturation: float = 0):
        if min(brightness, contrast, saturation) < 0:
            what = "brightness, contrast and saturation must be at least 0"
            raise ValueError(message("ColorJitter", what, brightness=brightness, contrast=contrast, saturation=saturation))
        self.brightness, self.contrast, self.saturation = brightness, contrast, saturation

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        amounts = (self.brightness, self.contrast, self.saturation)
        return tuple(rng.uniform(max(0, 1 - v), 1 + v, (shape[0], 1, 1, 1)).astype(np.float32) for v in amounts)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        brightness, contrast, saturation = drawn
        x = x * brightness
        if self.contrast:
            mean = x.mean((1, 2, 3), keepdims=True)
            x = (x - mean) * contrast + mean
        if self.saturation and x.shape[1] == 3:
            grey = x.mean(1, keepdims=True)
            x = (x - grey) * saturation + grey
        return x


def _box(rng: np.random.Generator, shape: tuple[int, ...], tall: Any, wide: Any) -> Drawn:
    """Place a box of ``tall`` by ``wide`` pixels at random in each image; returns its bounds (top, bottom, left, right), ends excluded."""
    n, _, height, width = shape
    top, left = (rng.integers(0, np.maximum(room - side, 0) + 1, n) for room, side in ((height, tall), (width, wide)))
    return tuple(values.reshape(n, 1, 1, 1) for values in (top, top + tall, left, left + wide))


class RandomErasing(Augmentation):
    """Sets a rectangle of each image to ``value`` with probability ``p``.

    - **scale**: the range of the rectangle's share of the image area. **ratio**: the range of the rectangle's height over its width.
    """

    def __init__(
        self, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33), ratio: tuple[float, float] = (0.3, 3.3), value: float = 0
    ):
        self.p, self.scale, self.ratio, self.value = p, scale, ratio, value

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        """Draw the bounds of rows and columns of each rectangle, ends excluded; a rectangle is empty where nothing is erased."""
        n, _, height, width = shape
        chosen = rng.random(n) < self.p
        area = rng.uniform(self.scale[0], self.scale[1], n) * height * width
        ratio = np.exp(rng.uniform(np.log(self.ratio[0]), np.log(self.ratio[1]), n))
        tall = np.clip(np.rint(np.sqrt(area * ratio)), 1, height).astype(np.int64) * chosen
        wide = np.clip(np.rint(np.sqrt(area / ratio)), 1, width).astype(np.int64)
        return _box(rng, shape, tall, wide)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return np.where(inside(drawn, x.shape), np.asarray(self.value, x.dtype), x)


class Cutout(RandomErasing):
    """Sets a square with sides of ``size`` pixels to ``value`` in every image."""

    def __init__(self, size: int, value: float = 0):
        self.size, self.value = size, value

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        return _box(rng, shape, self.size, self.size)


def inside(box: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask (N, 1, H, W), true inside the boxes (first row, end row, first column, end column)."""
    rows, columns = np.arange(shape[2]).reshape(1, 1, -1, 1), np.arange(shape[3]).reshape(1, 1, 1, -1)
    return (rows >= box[0]) & (rows < box[1]) & (columns >= box[2]) & (columns < box[3])


class GaussianNoise(Augmentation):
    """Adds normal noise of the given standard deviation to every pixel."""

    def __init__(self, std: float = 0.1):
        self.std = std

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        return (rng.standard_normal(shape, np.float32),)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return x + np.float32(self.std) * drawn[0]


class Mixup(Augmentation):
    """Mixes each sample with a random sample of the batch, by a weight from ``Beta(alpha, alpha)``; labels become (N, classes)."""

    with_labels = True

    def __init__(self, classes: int, alpha: float = 0.2):
        self.classes, self.alpha = classes, alpha

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        """Draw the partner of each image, and the partner's weight from 0 to 1."""
        return rng.permutation(shape[0]), rng.beta(self.alpha, self.alpha, shape[0]).astype(np.float32)

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return self.mixed(x, *drawn)

    def mixed(self, x: Any, partner: np.ndarray, share: np.ndarray) -> Any:
        """Return ``x * (1 - share) + x[partner] * share``, sample by sample."""
        weight = share.reshape(-1, *[1] * (x.ndim - 1))
        return x * (1 - weight) + x[partner] * weight

    def one_hot(self, y: Any) -> Any:
        """Return labels (N,) as one-hot probabilities (N, classes)."""
        return np.eye(self.classes, dtype=np.float32)[y]

    def __call__(self, x: Any, y: Any, rng: np.random.Generator | None = None) -> Any:  # type: ignore[override]
        rng = np.random.default_rng() if rng is None else rng
        drawn = self.draw(rng, x.shape)
        return self.apply(x, *drawn), self.mixed(self.one_hot(y), *drawn[:2])


class CutMix(Mixup):
    """Replaces a rectangle of each image by the same rectangle of a random image of the batch, and mixes their labels by area."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        """Draw the partner of each image, the rectangle's share of the image area, and the rectangle's bounds."""
        n, _, height, width = shape
        side = np.sqrt(rng.beta(self.alpha, self.alpha, n))
        tall, wide = (np.rint(side * size).astype(np.int64) for size in (height, width))
        box = _box(rng, shape, tall, wide)
        return rng.permutation(n), (tall * wide / (height * width)).astype(np.float32), *box

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return np.where(inside(drawn[2:], x.shape), x[drawn[0]], x)
