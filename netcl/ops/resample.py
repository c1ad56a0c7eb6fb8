"""Resampling of images: interpolation, sampling at a grid of coordinates, and pixel shuffles, with the conventions of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, composite, op
from netcl.ops.conv.geometry import Pair, frozen, pair
from netcl.ops.images import from_signal, image, run_lines, to_signal
from netcl.ops.pointwise import unary

Steps = Sequence[float]


def _one_of(name: str, label: str, value: Any, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ShapeError(message(name, f"{label} must be one of {', '.join(legal)}", **{label: repr(value)}))


# ---- in NumPy


def _resampled(x: np.ndarray, size: Pair, steps: Steps, mode: str, align: bool, back: bool = False) -> np.ndarray:
    """Resample images one axis at a time, or (``back``) compute the gradient for images of ``size``."""
    for axis, (n, step) in enumerate(zip(size, steps, strict=True), 2):  # type: ignore[arg-type]
        was = x.shape[axis]
        index, shares = _resize_taps(n if back else was, was if back else n, step, mode, align, False)
        shares = shares.astype(x.dtype).reshape(*shares.shape, *(1,) * (x.ndim - 1))
        moved = np.moveaxis(x, axis, 0)
        if back:
            made = np.zeros((n, *moved.shape[1:]), x.dtype)
            for k in range(index.shape[1]):
                np.add.at(made, index[:, k], shares[:, k] * moved)
        else:
            made = sum(shares[:, k] * moved[index[:, k]] for k in range(index.shape[1]))
        x = np.moveaxis(made, 0, axis)
    return x


# ---- interpolation


@op(vjp=lambda F, g, x_shape, steps, mode, align_corners, back:
        F.resample2d(g, size=x_shape[2:], steps=steps, mode=mode, align_corners=align_corners, back=not back), ref="numpy",
    samples=[
        S((1, 2, 3, 4), size=(6, 8), steps=(0.5, 0.5)),
        S((2, 1, 5, 7), size=(3, 9), steps=(5 / 3, 7 / 9), mode="bilinear"),
        S((1, 2, 6, 8), size=(3, 4), steps=(0.5, 0.5), back=True),
        S((2, 1, 3, 9), size=(5, 7), steps=(5 / 3, 7 / 9), mode="bilinear", back=True),
        S((1, 1, 11, 4), size=(4, 9), steps=(0.3, 8 / 3), mode="bilinear", align_corners=True, back=True),
    ])  # fmt: skip
def resample2d(x: Tensor, *, size: Pair, steps: Steps, mode: str = "nearest", align_corners: bool = False, back: bool = False) -> Tensor:
    """Resample images to height and width ``size``, at points ``steps`` input pixels apart; the basis of :func:`interpolate`.

    ``back`` computes the gradient for images of ``size``; ``x`` is then the gradient of the result.
    """
    x, wanted = image("resample2d", x), pair("resample2d", "size", frozen(size), 1)
    if x.backend == "cpu":
        return launch.run_cpu(_resampled, x, size=wanted, steps=steps, mode=mode, align=align_corners, back=back)
    y = Tensor.empty((*x.shape[:2], *wanted), x.dtype, queue=x.queue)
    before, after = (wanted, x.shape[2:]) if back else (x.shape[2:], wanted)
    parts = [part for step in steps for part in (float(np.float32(step)), step - float(np.float32(step)))]
    numbers = (math.prod(x.shape[:2]), *before, *after, *parts, (mode == "bilinear") + 2 * align_corners)
    defines = {"REAL": dtypes.DTYPES[x.dtype].c_compute}
    run_lines("resample.cl", "resample_grad" if back else "resample", defines, y, x, y, *numbers)
    return y


_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area")


def _target_size(size: Any, wanted: Any, factor: Any, mode: str, align: bool, smooth: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return, per resampled axis, the result's size and the distance between neighboring results in input pixels."""
    name = "interpolate"
    _one_of(name, "mode", mode, _MODES)
    if (wanted is None) == (factor is None):
        raise ShapeError(message(name, "exactly one of size and scale_factor must be given", size=wanted, scale_factor=factor))
    if align and mode in ("nearest", "nearest-exact", "area"):
        raise ShapeError(message(name, "align_corners requires a linear or cubic mode", mode=repr(mode)))
    label, value = ("size", wanted) if factor is None else ("scale_factor", factor)
    values = value if isinstance(value, tuple) else (value,) * len(size)
    if len(values) != len(size):
        raise ShapeError(message(name, f"{label} must be one number or one per resampled axis", **{label: value, "axes": len(size)}))
    outs, steps, kept = [], [], smooth or mode.endswith("linear")  # whether an axis that keeps its size is copied, as in torch
    for n, each in zip(size, values, strict=True):
        out = int(each) if factor is None else math.floor(n * each)
        if out < 1 or n < 1:
            raise ShapeError(message(name, f"x and the result must not be empty, got {n} and {out}", size=wanted, scale_factor=factor))
        outs.append(out)
        steps.append(((n - 1) / (out - 1) if out > 1 else 0.0) if align else n / out if factor is None or (kept and n == out) else 1 / each)
    return tuple(outs), tuple(steps)


def cubic_kernel(x: np.ndarray, a: float) -> np.ndarray:
    """Return the cubic convolution kernel with parameter ``a`` at distances ``x``."""
    x = np.abs(x)
    return np.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, np.where(x < 2, ((x - 5) * x + 8) * x * a - 4 * a, 0))


def _resize_taps(n: int, outs: int, step: float, mode: str, align: bool, antialias: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of an axis that contribute to each output, and their weights, both ``(outs, taps)``."""
    out, cubic = np.arange(outs), mode == "bicubic"
    if mode.startswith("nearest"):
        index = np.floor((out + 0.5 * (mode == "nearest-exact")).astype(np.float32) * np.float32(step))[:, None]
        shares = np.ones((outs, 1))
    elif mode == "area" or antialias:
        wide = max(step, 1.0)
        center, support = step * (out + 0.5), (1 + cubic) * wide
        first, last = np.maximum(np.trunc(center - support + 0.5), 0), np.minimum(np.trunc(center + support + 0.5), n)
        if mode == "area":
            first, last = out * n // outs, -((out + 1) * n // -outs)
        index = first[:, None] + np.arange(int((last - first).max()))
        away = (index - center[:, None] + 0.5) / wide
        shares = cubic_kernel(away, -0.5) if cubic else np.ones_like(away) if mode == "area" else np.maximum(1 - np.abs(away), 0)
        shares *= index < last[:, None]
        shares /= shares.sum(1, keepdims=True)
    else:
        center = out * step if align else (out + 0.5) * step - 0.5
        center = center if cubic else np.maximum(center, 0)
        index = np.floor(center)[:, None] + np.arange(-cubic, 2 + cubic)
        away = index - center[:, None]
        shares = cubic_kernel(away, -0.75) if cubic else 1 - np.abs(away)
    return np.clip(index, 0, n - 1).astype(np.int64), shares


def weighted_axis(F: Any, x: Any, axis: int, index: np.ndarray, shares: np.ndarray) -> Any:
    """Return ``x`` with an axis replaced by sums of its slices ``index``, weighted by ``shares``; both are ``(results, taps)``."""
    count, taps = index.shape
    picked = F.index_select(x, axis, Tensor.from_host(x.queue, index.reshape(-1)))
    if taps == 1:
        return picked
    parts = F.reshape(picked, (*x.shape[:axis], count, taps, *x.shape[axis + 1 :]))
    weights = Tensor.from_host(x.queue, shares.reshape((count, taps, *(1,) * (x.ndim - 1 - axis))), x.dtype)
    return F.sum(F.mul(parts, weights), axis + 1)


@composite(ref="numpy",
    samples=[
        S((2, 3, 4, 5), scale_factor=2),
        S((1, 2, 7, 5), size=(3, 8)),
        S((1, 2, 5, 6), scale_factor=(1.7, 0.6), mode="bilinear"),
        S((2, 3, 4, 5), size=(9, 3), mode="bilinear", align_corners=True),
        S((1, 2, 3, 3), size=(1, 1), mode="bilinear", align_corners=True),
        S((2, 3, 7), scale_factor=2),
        S((2, 3, 7), size=12, mode="linear"),
        S((1, 2, 5, 4), size=(7, 3), mode="bicubic"),
        S((1, 2, 5, 9), size=(7, 3), mode="bilinear", antialias=True),
        S((1, 2, 5, 7), size=(3, 9), mode="area"),
        S((1, 1, 2, 3, 4), size=(3, 2, 5), mode="trilinear"),
    ],
    errors=[
        (S((2, 3), scale_factor=2), r"\[interpolate\] x must have three to five dimensions; x.shape=\(2, 3\)"),
        (S((1, 1, 4, 4)), r"\[interpolate\] exactly one of size and scale_factor must be given; size=None, scale_factor=None"),
        (S((1, 1, 4, 4), size=2, mode="cubic"), r"\[interpolate\] mode must be one of nearest, nearest-exact, .*; mode='cubic'"),
        (S((1, 1, 4, 4), size=2, align_corners=True), r"\[interpolate\] align_corners requires a linear or cubic mode"),
        (S((1, 1, 4, 4), size=2, antialias=True), r"\[interpolate\] antialias requires x with 4 dimensions and mode bilinear or bicubic"),
        (S((1, 1, 4), size=2, mode="bicubic"), r"\[interpolate\] mode must be one of .*, area, linear for x with 3 dimensions; mode='"),
        (S((1, 1, 4), size=2, mode="bilinear"), r"\[interpolate\] mode must be one of .*, area, linear for x with 3 dimensions"),
        (S((1, 1, 4, 4), size=2, mode="linear"), r"\[interpolate\] mode must be one of .*, bilinear, bicubic for x with 4 dimensions"),
        (S((1, 1, 4, 4, 4), size=2, mode="bilinear"), r"\[interpolate\] mode must be one of .*, area, trilinear for x with 5 dimensions"),
        (S((1, 1, 4, 4), scale_factor=0.1), r"\[interpolate\] x and the result must not be empty, got 4 and 0; "),
        (S((1, 1, 4, 4), size=2, mode="bicubic", dtypes=("int64",)), r"\[interpolate\] x must have a dtype that this op accepts"),
        (S((1, 1, 4, 4), size=(1, 2, 3)), r"\[interpolate\] size must be one number or one per resampled axis"),
    ])  # fmt: skip
def interpolate(
    F: Any, x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:  # fmt: skip
    """Resize images ``(batch, channels, height, width)``, signals ``(batch, channels, length)`` or volumes of five axes.

    Give ``size`` or ``scale_factor`` (a number, or one per axis). ``mode`` is ``nearest``, ``nearest-exact``, ``area``, for signals
    ``linear``, for images ``bilinear`` and ``bicubic``, for volumes ``trilinear``. ``align_corners=True`` aligns the
    centers of the corner pixels, otherwise the outer edges are aligned. ``antialias`` widens the kernel of ``bilinear`` and ``bicubic``
    where an image shrinks.

    >>> import netcl.ops as F
    >>> from netcl.core.tensor import Tensor
    >>> F.interpolate(Tensor.ones((1, 3, 8, 8)), scale_factor=2).shape
    (1, 3, 16, 16)
    """
    if len(x.shape) not in (3, 4, 5):
        raise ShapeError(message("interpolate", "x must have three to five dimensions", **{"x.shape": x.shape}))
    align, ndim = bool(align_corners), len(x.shape)
    outs, steps = _target_size(x.shape[2:], frozen(size), frozen(scale_factor), mode, align, antialias)
    if recompute_scale_factor:
        steps = _target_size(x.shape[2:], outs, None, mode, align, antialias)[1]
    if antialias and (mode not in ("bilinear", "bicubic") or ndim != 4):
        what = "antialias requires x with 4 dimensions and mode bilinear or bicubic"
        raise ShapeError(message("interpolate", what, mode=repr(mode), **{"x.shape": x.shape}))
    modes = ("nearest", "nearest-exact", "area", *{3: ("linear",), 4: ("bilinear", "bicubic"), 5: ("trilinear",)}[ndim])
    if mode not in modes:
        what = f"mode must be one of {', '.join(modes)} for x with {ndim} dimensions"
        raise ShapeError(message("interpolate", what, mode=repr(mode), **{"x.shape": x.shape}))
    if ndim < 5 and mode in ("nearest", "linear", "bilinear") and not antialias:
        images, wanted, steps = (from_signal(F, x), (1, *outs), (1.0, *steps)) if ndim == 3 else (x, outs, steps)
        kind = "nearest" if mode == "nearest" else "bilinear"
        y = F.resample2d(images, size=wanted, steps=steps, mode=kind, align_corners=align)
        return to_signal(F, y) if ndim == 3 else y
    (x,) = launch.as_tensors("interpolate", x)
    if mode != "nearest-exact":
        launch.check_dtype("interpolate", x)
    for axis, (out, step) in enumerate(zip(outs, steps, strict=True), 2):
        x = weighted_axis(F, x, axis, *_resize_taps(x.shape[axis], out, step, mode, align, antialias))
    return x


# ---- grids


unary("reflect_points", "ABS(REMAINDER(v0 - 1, 4) - 2) - 1", "g * SIGN(REMAINDER(v0 - 1, 4) - 2)",
      lambda x: np.abs(np.remainder(x - 1, 4) - 2) - 1, kinks=(-3.0, -1.0, 1.0, 3.0), tol=2, accepts="float",
      doc="x reflected at -1 and 1, as often as needed.")  # fmt: skip

#: The weights of the pixels around a point: polynomials in its distance from the pixel before it, lowest power first.
_SHARES: dict[str, list[list[float]]] = {"bilinear": [[1, -1], [0, 1]], "nearest": [[1, 0]],
           "bicubic": [[0, -0.75, 1.5, -0.75], [1, 0, -2.25, 1.25], [0, 0.75, 1.5, -1.25], [0, 0, -0.75, 0.75]]}  # fmt: skip


def _grid_taps(F: Any, v: Tensor, size: int, mode: str, padding_mode: str, align: bool) -> tuple[Tensor, Tensor]:
    """Return the pixels along one axis for coordinates ``(batch, points)`` and their weights, both ``(batch, taps, points)``."""
    at = F.mul(F.add(v, 1.0), (size - 1) / 2) if align else F.sub(F.mul(F.add(v, 1.0), size / 2), 0.5)
    low, high = (-2.0, size + 1.0) if padding_mode == "zeros" or mode == "bicubic" else (0.0, size - 1.0)
    at = F.where(F.gt(at, low), F.where(F.lt(at, high), at, high), low)  # NaN becomes the lower end
    first = (F.round if mode == "nearest" else F.floor)(at.detach())
    taps, powers = len(_SHARES[mode]), Tensor.from_host(v.queue, np.array(_SHARES[mode]).T[..., None], v.dtype)
    weight, away = F.select(powers, 0, len(_SHARES[mode][0]) - 1), F.unsqueeze(F.sub(at, first), 1)
    for power in range(len(_SHARES[mode][0]) - 2, -1, -1):
        weight = F.add(F.mul(weight, away), F.select(powers, 0, power))
    index = F.add(F.unsqueeze(F.cast(first, "int64"), 1), Tensor.from_host(v.queue, np.arange(taps)[:, None] - (taps > 2)))
    if padding_mode == "zeros":
        weight = F.where(F.logical_and(F.ge(index, 0), F.lt(index, size)), weight, 0.0)
    elif padding_mode == "reflection":
        index = F.remainder(index, max(2 * (size - align), 1))
        index = F.minimum(index, F.sub(2 * size - 1 - align, index))
    return F.clamp(index, 0, size - 1), F.expand(weight, index.shape)


@composite(ref="numpy", amp="float",
    samples=[
        S((1, 2, 4, 5), (1, 3, 4, 2)),
        S((2, 3, 5, 4), (2, 4, 3, 2), align_corners=True, low=-1.3, high=1.3),
        S((1, 2, 4, 5), (1, 5, 3, 2), padding_mode="border", low=-1.4, high=1.4),
        S((2, 2, 5, 6), (2, 4, 5, 2), mode="nearest", low=-1.2, high=1.2),
        S((1, 2, 4, 5), (1, 5, 3, 2), padding_mode="reflection", low=-2.4, high=2.4),
        S((1, 2, 3, 4, 5), (1, 2, 3, 2, 3), low=-1.2, high=1.2),
    ],
    errors=[
        (S((1, 2, 4), (1, 3, 4, 2)), r"\[grid_sample\] x must have 4 or 5 dimensions, got 3"),
        (S((1, 2, 4, 4), (2, 3, 4, 2)), r"\[grid_sample\] grid must be \(batch, height, width, 2\) with the batch of x; x.shape="),
        (S((1, 2, 3, 4, 4), (1, 2, 3, 4, 3), mode="bicubic"), r"\[grid_sample\] mode bicubic requires x with 4 dimensions"),
        (S((1, 2, 4, 4), (1, 3, 4, 2), mode="cubic"), r"\[grid_sample\] mode must be one of bilinear, nearest, bicubic; mode='cubic'"),
        (S((1, 2, 4, 4), (1, 3, 4, 2), padding_mode="wrap"), r"\[grid_sample\] padding_mode must be one of zeros, border, reflection; "),
    ])  # fmt: skip
def grid_sample(
    F: Any, x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = False
) -> Tensor:
    """Sample images ``(batch, channels, height, width)`` at the points of ``grid`` ``(batch, height, width, 2)``; also volumes.

    A point is ``(x, y)`` with -1 and 1 at the edges of the image (``align_corners=True``: at the centers of its corner pixels). Points
    outside the image read zeros, the nearest pixels (``padding_mode="border"``) or mirror images (``padding_mode="reflection"``). ``mode``
    is ``bilinear``, ``nearest`` or, for images, ``bicubic``. Points of volumes are ``(x, y, z)``.
    """
    name, (x, grid), align = "grid_sample", launch.as_tensors("grid_sample", x, grid), bool(align_corners)
    shapes = {"x.shape": x.shape, "grid.shape": grid.shape}
    _one_of(name, "mode", mode, tuple(_SHARES))
    _one_of(name, "padding_mode", padding_mode, ("zeros", "border", "reflection"))
    if x.ndim not in (4, 5) or (x.ndim == 5 and mode == "bicubic"):
        what = f"x must have 4 or 5 dimensions, got {x.ndim}" if mode != "bicubic" else "mode bicubic requires x with 4 dimensions"
        raise ShapeError(message(name, what, **shapes))
    for t, label in ((x, "x"), (grid, "grid")):
        launch.check_dtype(name, t, name=label)
    if grid.ndim != x.ndim or grid.shape[-1] != x.ndim - 2 or grid.shape[0] != x.shape[0]:
        form = "height, width, 2" if x.ndim == 4 else "depth, height, width, 3"
        raise ShapeError(message(name, f"grid must be (batch, {form}) with the batch of x", **shapes))
    if min(x.shape[1:]) < 1:
        raise ShapeError(message(name, "x must have at least one channel and one pixel", **shapes))
    return sampled(F, x, grid, mode, padding_mode, align)


def sampled(F: Any, x: Tensor, grid: Tensor, mode: str, padding_mode: str, align: bool) -> Tensor:
    """Compute :func:`grid_sample` in any number of dimensions: by its kernel, or as a weighted sum of gathered pixels."""
    if x.ndim == 4 and mode != "bicubic":
        points = F.reflect_points(grid) if padding_mode == "reflection" else grid
        return F.sample_images(x, points, linear=mode == "bilinear", border=padding_mode != "zeros", align=align)
    (batch, channels, *sizes), kind, count = x.shape, dtypes.sum_dtype(x.dtype), math.prod(grid.shape[1:-1])
    points = F.reshape(F.cast(grid, kind), (batch, count, len(sizes)))
    points = F.reflect_points(points) if padding_mode == "reflection" else points
    index, weight = Tensor.from_host(x.queue, np.arange(batch).reshape(-1, 1, 1)), Tensor.ones((1, 1, 1), kind, queue=x.queue)
    for axis, size in enumerate(sizes):
        at, share = _grid_taps(F, F.select(points, -1, len(sizes) - 1 - axis), size, mode, padding_mode, align)
        shape = batch, index.shape[1] * at.shape[1], count
        index = F.reshape(F.add(F.unsqueeze(F.mul(index, size), 2), F.unsqueeze(at, 1)), shape)
        weight = F.reshape(F.mul(F.unsqueeze(weight, 2), F.unsqueeze(share, 1)), shape)
    rows = F.reshape(F.moveaxis(x, 1, -1), (batch * math.prod(sizes), channels))
    picked = F.reshape(F.index_select(rows, 0, F.reshape(index, (index.size,))), (*index.shape, channels))
    y = F.cast(F.sum(F.mul(F.cast(picked, kind), F.unsqueeze(weight, -1)), 1), x.dtype)
    return F.reshape(F.transpose(y, 1, 2), (batch, channels, *grid.shape[1:-1]))


@composite(ref="numpy", samples=[S((2, 2, 3), size=(2, 3, 4, 5)), S((1, 2, 3), size=(1, 1, 1, 3), align_corners=True),
                                     S((1, 3, 4), size=(1, 1, 2, 3, 2))],
           errors=[(S((2, 3, 3), size=(2, 1, 4, 4)), r"\[affine_grid\] theta must have shape \(2, 2, 3\); .*\(2, 3, 3\)")])  # fmt: skip
def affine_grid(F: Any, theta: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Return the grid with which :func:`grid_sample` applies affine maps ``theta`` ``(batch, 2, 3)`` to images (or volumes) of ``size``."""
    axes, theta = len(size) - 2, launch.as_tensors("affine_grid", theta)[0]
    if theta.shape != (size[0], axes, axes + 1):
        what = f"theta must have shape {(size[0], axes, axes + 1)}"
        raise ShapeError(message("affine_grid", what, size=tuple(size), **{"theta.shape": theta.shape}))
    lines = [
        np.zeros(1) if n == 1 and align_corners else np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1
        for n in size[2:]
    ]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(tuple(size[2:]))], -1).reshape(-1, axes + 1)
    moved = F.matmul(Tensor.from_host(theta.queue, points, theta.dtype), F.transpose(theta, 1, 2))
    return F.reshape(moved, (*theta.shape[:1], *size[2:], axes))


# ---- shuffles


def _check_shuffle(name: str, x: Any, factor: int, fits: bool, rule: str) -> None:
    if len(x.shape) != 4 or factor < 1 or not fits:
        what = f"x must have four dimensions, and factor must be at least 1 and {rule}"
        raise ShapeError(message(name, what, **{"x.shape": x.shape, "factor": factor}))


@composite(ref="numpy", samples=[S((2, 8, 3, 4), factor=2), S((1, 9, 2, 1), factor=3)],
    errors=[(S((1, 6, 2, 2), factor=2),
             r"\[pixel_shuffle\] x must have four dimensions, and factor must be at least 1 and have a square that divides")])  # fmt: skip
def pixel_shuffle(F: Any, x: Tensor, factor: int) -> Tensor:
    """Rearrange ``(n, c * factor^2, h, w)`` to ``(n, c, h * factor, w * factor)``: channels become neighboring pixels."""
    _check_shuffle("pixel_shuffle", x, factor, not sum(x.shape[1:2]) % max(1, factor) ** 2, "have a square that divides the channels")
    n, c, h, w = x.shape
    parts = F.reshape(F.clone(x) if factor == 1 or h * w == 1 else x, (n, c // factor**2, factor, factor, h, w))
    return F.reshape(F.permute(parts, (0, 1, 4, 2, 5, 3)), (n, c // factor**2, h * factor, w * factor))


@composite(ref="numpy", samples=[S((2, 2, 6, 4), factor=2), S((1, 1, 3, 6), factor=3)],
    errors=[(S((1, 1, 5, 4), factor=2), r"\[pixel_unshuffle\] x must have four dimensions, and factor must be at least 1")])  # fmt: skip
def pixel_unshuffle(F: Any, x: Tensor, factor: int) -> Tensor:
    """The inverse of :func:`pixel_shuffle`."""
    fits = not any(size % max(1, factor) for size in x.shape[2:])
    _check_shuffle("pixel_unshuffle", x, factor, fits, "divide height and width")
    n, c, h, w = x.shape
    parts = F.reshape(F.clone(x) if h * w == factor**2 or factor == 1 else x, (n, c, h // factor, factor, w // factor, factor))
    return F.reshape(F.permute(parts, (0, 1, 3, 5, 2, 4)), (n, c * factor**2, h // factor, w // factor))
