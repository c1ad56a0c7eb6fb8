"""Image filters in NumPy: the last two axes are height and width, borders are reflected. Floats keep their dtype, others become float32.

Filters are functions of an array, so ``functools.partial(filters.gaussian, sigma=1)`` is a transform of a DataLoader.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.data.errors import message


def convolve(x: Any, kernel: Any) -> np.ndarray:
    """Correlate each pixel's neighborhood with a kernel of odd sides (not flipped, as in networks).

    >>> convolve(np.eye(3), np.ones((1, 3)))[1]
    array([2., 1., 2.])
    """
    x, kernel = np.asarray(x), np.asarray(kernel, np.float64)
    windows = _windows("convolve", x, kernel.shape)
    return np.einsum("...ij,ij->...", windows, kernel).astype(_kept(x))


def _kept(x: np.ndarray) -> Any:
    return x.dtype if x.dtype.kind == "f" else np.float32


def _windows(name: str, x: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return the neighborhood of every pixel as a view: (..., H, W, h, w)."""
    if len(size) != 2 or any(n % 2 == 0 for n in size):
        raise ValueError(message(name, "a kernel must have two odd sides", size=size))
    if x.ndim < 2 or any(n <= k // 2 for n, k in zip(x.shape[-2:], size, strict=True)):
        raise ValueError(message(name, "x must have a height and a width larger than half of the kernel", shape=x.shape, size=size))
    border = [(0, 0)] * (x.ndim - 2) + [(n // 2, n // 2) for n in size]
    return np.lib.stride_tricks.sliding_window_view(np.pad(x, border, mode="reflect"), size, axis=(-2, -1))


def _separable(x: Any, weights: np.ndarray) -> np.ndarray:
    return convolve(convolve(x, weights[None, :]), weights[:, None])


def box(x: Any, size: int = 3) -> np.ndarray:
    """Average over a square with sides of ``size`` pixels."""
    return _separable(x, np.full(size, 1 / size))


def gaussian(x: Any, sigma: float = 1.0) -> np.ndarray:
    """Blur with a normal distribution of ``sigma`` pixels, truncated at three sigma.

    >>> float(gaussian(np.ones((8, 8)), 2.0).min().round(6))
    1.0
    """
    if not sigma > 0:
        raise ValueError(message("gaussian", "sigma must be above 0", sigma=sigma))
    at = np.arange(-int(np.ceil(3 * sigma)), int(np.ceil(3 * sigma)) + 1)
    weights = np.exp(-0.5 * (at / sigma) ** 2)
    return _separable(x, weights / weights.sum())


def median(x: Any, size: int = 3) -> np.ndarray:
    """Take the median over a square with sides of ``size`` pixels, which removes outliers."""
    x = np.asarray(x)
    return np.median(_windows("median", x, (size, size)), axis=(-2, -1)).astype(_kept(x))


def sobel(x: Any) -> np.ndarray:
    """Return the magnitude of the gradient at each pixel."""
    kernel = np.outer([1, 2, 1], [-1, 0, 1]) / 8
    return np.hypot(convolve(x, kernel), convolve(x, kernel.T))


def laplacian(x: Any) -> np.ndarray:
    """Return the Laplacian: the sum of the four neighbors minus four times the pixel."""
    return convolve(x, [[0, 1, 0], [1, -4, 1], [0, 1, 0]])


def sharpen(x: Any, amount: float = 1.0, sigma: float = 1.0) -> np.ndarray:
    """Sharpen: add ``amount`` times the difference between the image and its blurred form."""
    x = np.asarray(x).astype(_kept(np.asarray(x)))
    return (x + amount * (x - gaussian(x, sigma))).astype(x.dtype)
