"""Images at other resolutions: interpolation, sampling under a grid of coordinates, and pixel shuffles. Conventions are torch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.pointwise import run
from netcl.engine.registry import S, composite, op
from netcl.ops.conv.geometry import Pair, frozen, pair
from netcl.ops.images import from_signal, image, to_signal
from netcl.ops.pointwise import cast, unary

Steps = Sequence[float]


def _one_of(name: str, label: str, value: Any, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ShapeError(message(name, f"unknown {label}", f"known: {', '.join(legal)}", **{label: repr(value)}))


# ---- one axis in NumPy


def _neighbors(size: int, outs: int, step: float, linear: bool, align: bool, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per output: the pixel before it, the pixel after it, and the latter's share."""
    out = np.arange(outs)
    if not linear:
        low = np.minimum((out.astype(np.float32) * np.float32(step)).astype(np.int64), size - 1)
        return low, low, np.zeros(outs, dtype)
    out = out.astype(dtype)
    where = out * dtype(step) if align else (out + dtype(0.5)) * dtype(step) - dtype(0.5)
    where = np.maximum(where, 0)
    low = np.minimum(where.astype(np.int64), size - 1)
    return low, np.minimum(low + 1, size - 1), (where - low).astype(dtype)


def _along(x: np.ndarray, axis: int, outs: int, step: float, linear: bool, align: bool) -> np.ndarray:
    low, high, share = _neighbors(x.shape[axis], outs, step, linear, align, x.dtype.type)
    if not linear:
        return np.take(x, low, axis)
    share = share.reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    return (1 - share) * np.take(x, low, axis) + share * np.take(x, high, axis)


def _back(dy: np.ndarray, axis: int, size: int, step: float, linear: bool, align: bool) -> np.ndarray:
    low, high, share = _neighbors(size, dy.shape[axis], step, linear, align, dy.dtype.type)
    g = np.moveaxis(dy, axis, 0)
    dx = np.zeros((size, *g.shape[1:]), dy.dtype)
    share = share.reshape(-1, *([1] * (g.ndim - 1)))
    np.add.at(dx, low, (1 - share) * g)
    if linear:
        np.add.at(dx, high, share * g)
    return np.moveaxis(dx, 0, axis)


def cpu_resample(x: np.ndarray, *, size: Pair, steps: Steps, linear: bool, align: bool) -> np.ndarray:
    return _along(_along(x, 2, size[0], steps[0], linear, align), 3, size[1], steps[1], linear, align)  # type: ignore[index]


def cpu_resample_grad(dy: np.ndarray, *, size: Pair, steps: Steps, linear: bool, align: bool) -> np.ndarray:
    return _back(_back(dy, 2, size[0], steps[0], linear, align), 3, size[1], steps[1], linear, align)  # type: ignore[index]


# ---- definitions


def _matrix(size: int, outs: int, step: float, mode: str, align: bool) -> np.ndarray:
    """``(outs, size)``: the weight of every pixel in every output."""
    weights = np.zeros((outs, size))
    for o in range(outs):
        if mode == "nearest":
            weights[o, min(math.floor(np.float32(o) * np.float32(step)), size - 1)] = 1
            continue
        where = max(o * step if align else (o + 0.5) * step - 0.5, 0.0)
        low = min(math.floor(where), size - 1)
        weights[o, low] += 1 - (where - low)
        weights[o, min(low + 1, size - 1)] += where - low
    return weights


def _ref_resample(x, *, size, steps, mode="nearest", align_corners=False):
    down, across = (_matrix(n, m, s, mode, align_corners) for n, m, s in zip(x.shape[2:], size, steps, strict=True))
    return np.einsum("oh,nchw,pw->ncop", down, x, across)


def _ref_resample_grad(dy, *, size, steps, mode="nearest", align_corners=False):
    down, across = (_matrix(n, m, s, mode, align_corners) for n, m, s in zip(size, dy.shape[2:], steps, strict=True))
    return np.einsum("oh,ncop,pw->nchw", down, dy, across)


def _ref_interpolate(x, size=None, scale_factor=None, mode="nearest", align_corners=False, antialias=False):
    outs, steps = _target_size("ref", x.shape[2:], frozen(size), frozen(scale_factor), mode, align_corners)
    for axis, (out, step) in enumerate(zip(outs, steps, strict=True), 2):
        if mode in ("nearest", "linear", "bilinear") and not antialias:
            weights = _matrix(x.shape[axis], out, step, mode, align_corners)
        else:
            index, shares = _taps(x.shape[axis], out, step, mode, align_corners, antialias)
            weights = np.zeros((out, x.shape[axis]))
            np.add.at(weights, (np.arange(out)[:, None], index), shares)
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ weights.T, -1, axis)
    return x


# ---- interpolation


def _resample_kernel(name: str, image: Tensor, grid: Tensor) -> Any:
    """A kernel of ``resample.cl``. One program serves them all, so results have the dtype of what they belong to."""
    real, y = dtypes.DTYPES[image.dtype].c_compute, grid.dtype if name == "sample_grid_grid_grad" else image.dtype
    operands = {"X": image.dtype, "D": image.dtype, "G": grid.dtype, "Y": y}
    return launch.kernel(image.queue, __file__, "resample.cl", name, operands, {"REAL": real})


def _how(mode: str, align_corners: bool, padding_mode: str = "zeros") -> int:
    return (mode == "bilinear") + 2 * align_corners + 4 * (padding_mode == "border")


def _run_resample(kernel: str, source: Tensor, result: Tensor, size: Any, outs: Any, steps: Steps, mode: str, align: bool) -> Tensor:
    """Launch a kernel of ``resample.cl`` that fills ``result``: a row per work-item on CPUs, an element on other devices."""
    if not result.size:
        return result
    queue, (planes, across) = result.queue, (math.prod(result.shape[:2]), result.shape[3])
    span = across if launch.on_cpu_device(queue) else 1
    built = _resample_kernel(kernel, source, source)
    parts = [part for step in steps for part in (float(np.float32(step)), step - float(np.float32(step)))]
    items = planes * result.shape[2] * -(-across // span)
    built(queue, (items,), (1 if span > 1 else launch.LOCAL_1D,), source, result, planes, *size, *outs, *parts, _how(mode, align), span)
    return result


def _resample_vjp(F, g, x_shape, steps, mode, align_corners):
    return F.resample2d_input_grad(g, size=x_shape[2:], steps=steps, mode=mode, align_corners=align_corners)


@op(vjp=_resample_vjp, ref=_ref_resample, cpu=cpu_resample,
    samples=[
        S((1, 2, 3, 4), size=(6, 8), steps=(0.5, 0.5)),
        S((2, 1, 5, 7), size=(3, 9), steps=(5 / 3, 7 / 9), mode="bilinear"),
    ])  # fmt: skip
def resample2d(x: Tensor, *, size: Pair, steps: Steps, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """Images of height and width ``size`` whose neighbours lie ``steps`` input pixels apart; what :func:`interpolate` is made of."""
    x = image("resample2d", x)
    wanted = pair("resample2d", "size", frozen(size), 1)
    if x.backend == "cpu":
        return launch.run_cpu(cpu_resample, x, size=wanted, steps=steps, linear=mode == "bilinear", align=align_corners)
    y = Tensor.empty((*x.shape[:2], *wanted), x.dtype, queue=x.queue)
    return _run_resample("resample", x, y, x.shape[2:], wanted, steps, mode, align_corners)


def _resample_grad_vjp(F, g, dy_shape, steps, mode, align_corners):
    return F.resample2d(g, size=dy_shape[2:], steps=steps, mode=mode, align_corners=align_corners)


@op(vjp=_resample_grad_vjp, ref=_ref_resample_grad, cpu=cpu_resample_grad,
    samples=[
        S((1, 2, 6, 8), size=(3, 4), steps=(0.5, 0.5)),
        S((2, 1, 3, 9), size=(5, 7), steps=(5 / 3, 7 / 9), mode="bilinear"),
        S((1, 1, 11, 4), size=(4, 9), steps=(0.3, 8 / 3), mode="bilinear", align_corners=True),
    ])  # fmt: skip
def resample2d_input_grad(dy: Tensor, *, size: Pair, steps: Steps, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """The gradient of :func:`resample2d` with respect to an image of height and width ``size``."""
    dy = image("resample2d_input_grad", dy, label="dy")
    wanted = pair("resample2d_input_grad", "size", frozen(size), 1)
    if dy.backend == "cpu":
        return launch.run_cpu(cpu_resample_grad, dy, size=wanted, steps=steps, linear=mode == "bilinear", align=align_corners)
    dx = Tensor.empty((*dy.shape[:2], *wanted), dy.dtype, queue=dy.queue)
    return _run_resample("resample_grad", dy, dx, wanted, dy.shape[2:], steps, mode, align_corners)


_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area")


def _target_size(name: str, size: Any, wanted: Any, factor: Any, mode: str, align: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The result's sizes, and the distance of its neighbours in input pixels, per resampled axis."""
    _one_of(name, "mode", mode, _MODES)
    if (wanted is None) == (factor is None):
        raise ShapeError(message(name, "exactly one of size and scale_factor is needed", size=wanted, scale_factor=factor))
    if align and mode in ("nearest", "nearest-exact", "area"):
        raise ShapeError(message(name, "align_corners has a meaning for linear and cubic modes only", mode=repr(mode)))
    label, value = ("size", wanted) if factor is None else ("scale_factor", factor)
    values = value if isinstance(value, tuple) else (value,) * len(size)
    if len(values) != len(size):
        raise ShapeError(message(name, f"{label} is one number or one per resampled axis", **{label: value, "axes": len(size)}))
    outs, steps = [], []
    for n, each in zip(size, values, strict=True):
        out = int(each) if factor is None else math.floor(n * each)
        if out < 1 or n < 1:
            raise ShapeError(message(name, f"an axis of {n} pixels cannot become {out}", size=wanted, scale_factor=factor))
        outs.append(out)
        steps.append(((n - 1) / (out - 1) if out > 1 else 0.0) if align else n / out if factor is None else 1 / each)
    return tuple(outs), tuple(steps)


def cubic_kernel(x: np.ndarray, a: float) -> np.ndarray:
    """The kernel of cubic convolution."""
    x = np.abs(x)
    return np.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, np.where(x < 2, ((x - 5) * x + 8) * x * a - 4 * a, 0))


def _taps(n: int, outs: int, step: float, mode: str, align: bool, antialias: bool) -> tuple[np.ndarray, np.ndarray]:
    """``(outs, taps)``: the pixels of an axis that every output is made of, and their shares."""
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
        shares = (cubic_kernel(away, -0.5) if cubic else np.ones_like(away) if mode == "area" else np.maximum(1 - np.abs(away), 0)) * (
            index < last[:, None]
        )
        shares /= shares.sum(1, keepdims=True)
    else:
        center = out * step if align else (out + 0.5) * step - 0.5
        center = center if cubic else np.maximum(center, 0)
        index = np.floor(center)[:, None] + np.arange(-cubic, 2 + cubic)
        away = index - center[:, None]
        shares = cubic_kernel(away, -0.75) if cubic else 1 - np.abs(away)
    return np.clip(index, 0, n - 1).astype(np.int64), shares


def weighted_axis(F: Any, x: Any, axis: int, index: np.ndarray, shares: np.ndarray) -> Any:
    """An axis replaced by weighted sums of its slices."""
    count, taps = index.shape
    picked = F.index_select(x, axis, Tensor.from_host(x.queue, index.reshape(-1)))
    if taps == 1:
        return picked
    parts = F.reshape(picked, (*x.shape[:axis], count, taps, *x.shape[axis + 1 :]))
    weights = Tensor.from_host(x.queue, shares.reshape((count, taps, *(1,) * (x.ndim - 1 - axis))), x.dtype)
    return F.sum(F.mul(parts, weights), axis + 1)


@composite(ref=_ref_interpolate,
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
        (S((2, 3), scale_factor=2), r"\[interpolate\] x has three to five axes; x.shape=\(2, 3\)"),
        (S((1, 1, 4, 4)), r"\[interpolate\] exactly one of size and scale_factor is needed; size=None, scale_factor=None"),
        (S((1, 1, 4, 4), size=2, mode="cubic"), r"\[interpolate\] unknown mode; mode='cubic'; known: nearest, nearest-exact, linear"),
        (S((1, 1, 4, 4), size=2, align_corners=True), r"\[interpolate\] align_corners has a meaning for linear and cubic modes only"),
        (S((1, 1, 4, 4), size=2, antialias=True), r"\[interpolate\] antialias is for images in mode bilinear or bicubic; mode='nearest'"),
        (S((1, 1, 4), size=2, mode="bicubic"), r"\[interpolate\] mode bicubic takes x with 4 axes; x.shape=\(1, 1, 4\)"),
        (S((1, 1, 4, 4), scale_factor=0.1), r"\[interpolate\] an axis of 4 pixels cannot become 0; "),
        (S((1, 1, 4, 4), size=(1, 2, 3)), r"\[interpolate\] size is one number or one per resampled axis; size=\(1, 2, 3\), axes=2"),
    ])  # fmt: skip
def interpolate(
    F: Any, x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:  # fmt: skip
    """Images ``(batch, channels, height, width)``, signals ``(batch, channels, length)`` or volumes of five axes at another size.

    Give ``size`` or ``scale_factor`` (a number, or one per axis). ``mode`` is ``nearest``, ``nearest-exact``, ``area``, for signals
    ``linear``, for images ``bilinear`` and ``bicubic``, for volumes ``trilinear``. ``align_corners=True`` puts the corner pixels of both
    on top of each other; otherwise their outer edges. ``antialias`` widens the kernel of ``bilinear`` and ``bicubic``
    where an image shrinks.

    >>> import netcl.ops as F
    >>> from netcl.core.tensor import Tensor
    >>> F.interpolate(Tensor.ones((1, 3, 8, 8)), scale_factor=2).shape
    (1, 3, 16, 16)
    """
    if len(x.shape) not in (3, 4, 5):
        raise ShapeError(message("interpolate", "x has three to five axes", **{"x.shape": x.shape}))
    align, ndim = bool(align_corners), len(x.shape)
    outs, steps = _target_size("interpolate", x.shape[2:], frozen(size), frozen(scale_factor), mode, align)
    if recompute_scale_factor:
        steps = _target_size("interpolate", x.shape[2:], outs, None, mode, align)[1]
    if antialias and (mode not in ("bilinear", "bicubic") or ndim != 4):
        raise ShapeError(message("interpolate", "antialias is for images in mode bilinear or bicubic", mode=repr(mode)))
    needed = {"bicubic": 4, "trilinear": 5}.get(mode, ndim)
    if needed != ndim or (ndim == 5 and mode in ("linear", "bilinear")):
        raise ShapeError(message("interpolate", f"mode {mode} takes x with {max(needed, 3)} axes", **{"x.shape": x.shape}))
    if ndim < 5 and mode in ("nearest", "linear", "bilinear") and not antialias:
        images, wanted, steps = (from_signal(F, x), (1, *outs), (1.0, *steps)) if ndim == 3 else (x, outs, steps)
        kind = "nearest" if mode == "nearest" else "bilinear"
        y = F.resample2d(images, size=wanted, steps=steps, mode=kind, align_corners=align)
        return to_signal(F, y) if ndim == 3 else y
    (x,) = launch.as_tensors("interpolate", x)
    for axis, (out, step) in enumerate(zip(outs, steps, strict=True), 2):
        x = weighted_axis(F, x, axis, *_taps(x.shape[axis], out, step, mode, align, antialias))
    return x


# ---- grids in NumPy


def _spots(values: np.ndarray, size: int, linear: bool, border: bool, align: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per value: the pixel before it, the share of the pixel after it, and the slope of the coordinate in pixels."""
    at = (values + 1) / 2 * (size - 1) if align else ((values + 1) * size - 1) / 2
    slope = np.full(at.shape, (size - 1) / 2 if align else size / 2, at.dtype)
    if border:
        slope = np.where((at > 0) & (at < size - 1), slope, 0)
        at = np.where(at > 0, np.minimum(at, size - 1), 0)
    else:
        at = np.where(at > -2, np.minimum(at, size + 1), -2)
    if not linear:
        return np.rint(at).astype(np.int64), np.zeros_like(at), np.zeros_like(at)
    low = np.floor(at)
    return low.astype(np.int64), at - low, slope


def _corners(grid: np.ndarray, size: Any, linear: bool, border: bool, align: bool) -> Any:
    """The pixels under each point as ``(inside, flat index, share down, share across)``, and the two spots."""
    h, v = (_spots(grid[..., k].reshape(grid.shape[0], grid.shape[1] * grid.shape[2]), size[1 - k], linear, border, align) for k in (0, 1))
    found = []
    for down in (0, 1) if linear else (0,):
        for across in (0, 1) if linear else (0,):
            row, column = v[0] + down, h[0] + across
            inside = (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
            index = np.where(inside, row * size[1] + column, 0)
            found.append((inside, index, v[1] if down else 1 - v[1], h[1] if across else 1 - h[1]))
    return found, h, v


def _picked(x: np.ndarray, inside: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``(n, c, points)``: pixels of each plane, zero where there is none."""
    flat = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    values = np.take_along_axis(flat, np.broadcast_to(index[:, None], (*x.shape[:2], index.shape[1])), 2)
    return np.where(inside[:, None], values, 0)


def cpu_grid_sample(x: np.ndarray, grid: np.ndarray, *, linear: bool, border: bool, align: bool) -> np.ndarray:
    found, _, _ = _corners(grid.astype(x.dtype), x.shape[2:], linear, border, align)
    y = sum((down * across)[:, None] * _picked(x, inside, index) for inside, index, down, across in found)
    return y.reshape(*x.shape[:2], *grid.shape[1:3])


def cpu_grid_sample_grad(dy: np.ndarray, grid: np.ndarray, *, size: Any, linear: bool, border: bool, align: bool) -> np.ndarray:
    found, _, _ = _corners(grid.astype(dy.dtype), size, linear, border, align)
    planes, pixels = math.prod(dy.shape[:2]), size[0] * size[1]
    dx, flat = np.zeros(planes * pixels, dy.dtype), dy.reshape(*dy.shape[:2], dy.shape[2] * dy.shape[3])
    offset = (np.arange(planes) * pixels).reshape(*dy.shape[:2], 1)
    for inside, index, down, across in found:
        np.add.at(dx, (index[:, None] + offset).reshape(-1), (np.where(inside, down * across, 0)[:, None] * flat).reshape(-1))
    return dx.reshape(*dy.shape[:2], *size)


def cpu_grid_sample_grid_grad(dy: np.ndarray, x: np.ndarray, grid: np.ndarray, *, linear: bool, border: bool, align: bool) -> np.ndarray:
    if not linear:
        return np.zeros(grid.shape, grid.dtype)
    found, h, v = _corners(grid.astype(x.dtype), x.shape[2:], linear, border, align)
    a, b, d, e = (_picked(x, inside, index) for inside, index, _, _ in found)
    flat = dy.reshape(*dy.shape[:2], dy.shape[2] * dy.shape[3])
    down, across = v[1][:, None], h[1][:, None]
    left = (flat * ((1 - down) * (b - a) + down * (e - d))).sum(axis=1) * h[2]
    up = (flat * ((1 - across) * (d - a) + across * (e - b))).sum(axis=1) * v[2]
    return np.stack([left, up], axis=-1).reshape(grid.shape)


# ---- grids, defined


def _ref_weights(grid, size, mode, padding_mode, align_corners):
    """For every point of one image: its pixels and their weights, point by point."""
    rows = []
    for u, t in grid.reshape(-1, 2):
        at = [((u, t)[k] + 1) / 2 * (size[1 - k] - 1) if align_corners else (((u, t)[k] + 1) * size[1 - k] - 1) / 2 for k in (0, 1)]
        if padding_mode == "border":
            at = [min(max(a, 0.0), size[1 - k] - 1.0) for k, a in enumerate(at)]
        low = [round(a) if mode == "nearest" else math.floor(a) for a in at]
        share = [0.0 if mode == "nearest" else a - b for a, b in zip(at, low, strict=True)]
        corners = [(low[1] + i, low[0] + j, abs(1 - i - share[1]) * abs(1 - j - share[0])) for i in (0, 1) for j in (0, 1)]
        rows.append([(r, c, w) for r, c, w in corners if 0 <= r < size[0] and 0 <= c < size[1]])
    return rows


def _ref_grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False):
    if padding_mode == "reflection":
        grid, padding_mode = np.arcsin(np.sin(grid * np.pi / 2)) * 2 / np.pi, "border"
    out = np.zeros((*x.shape[:2], grid.shape[1] * grid.shape[2]))
    for n in range(x.shape[0]):
        for p, corners in enumerate(_ref_weights(grid[n], x.shape[2:], mode, padding_mode, align_corners)):
            for r, c, weight in corners:
                out[n, :, p] += weight * x[n, :, r, c]
    return out.reshape(*x.shape[:2], *grid.shape[1:3])


def _ref_grid_sample_grad(dy, grid, *, size, mode="bilinear", padding_mode="zeros", align_corners=False):
    dx, flat = np.zeros((*dy.shape[:2], *size)), dy.reshape(*dy.shape[:2], -1)
    for n in range(dy.shape[0]):
        for p, corners in enumerate(_ref_weights(grid[n], size, mode, padding_mode, align_corners)):
            for r, c, weight in corners:
                dx[n, :, r, c] += weight * flat[n, :, p]
    return dx


# ---- sampling


def _checked_grid(name: str, image: Tensor, grid: Tensor, mode: str, padding_mode: str, label: str = "x") -> None:
    _one_of(name, "mode", mode, ("bilinear", "nearest"))
    _one_of(name, "padding_mode", padding_mode, ("zeros", "border", "reflection")[: 2 + (name == "grid_sample")])
    launch.check_dtype(name, grid, name="grid")
    if grid.ndim != 4 or grid.shape[3] != 2 or grid.shape[0] != image.shape[0]:
        what = f"grid is (batch, height, width, 2) with the batch of {label}"
        raise ShapeError(message(name, what, **{f"{label}.shape": image.shape, "grid.shape": grid.shape}))
    if min(image.shape[1:]) < 1:
        raise ShapeError(message(name, f"{label} has no pixels", **{f"{label}.shape": image.shape}))


def _flags(mode: str, padding_mode: str, align_corners: bool) -> dict[str, Any]:
    return {"linear": mode == "bilinear", "border": padding_mode == "border", "align": align_corners}


_REFLECTED = unary("reflect_points", "ABS(REMAINDER(v0 - 1, 4) - 2) - 1", "g * SIGN(REMAINDER(v0 - 1, 4) - 2)",
                   lambda x: np.abs(np.remainder(x - 1, 4) - 2) - 1, kinks=(-3.0, -1.0, 1.0, 3.0), tol=2, accepts="float",
                   doc="x reflected at -1 and 1, as often as needed.")  # fmt: skip


def _grid_sample_vjp(F, g, x, grid, needs, mode, padding_mode, align_corners):
    if padding_mode == "reflection":
        dx, d_points = _grid_sample_vjp(F, g, x, F.reflect_points(grid), needs, mode, "border", align_corners)
        return dx, F.mul(d_points, F.sign(F.sub(F.remainder(F.sub(grid, 1), 4), 2))) if needs[1] else None
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    dx = F.grid_sample_input_grad(g, grid, size=x.shape[2:], **options) if needs[0] else None
    return dx, F.grid_sample_grid_grad(g, x, grid, **options) if needs[1] else None


_GRIDS = [
    S((1, 2, 4, 5), (1, 3, 4, 2)),
    S((2, 3, 5, 4), (2, 4, 3, 2), align_corners=True, low=-1.3, high=1.3),
    S((1, 2, 4, 5), (1, 5, 3, 2), padding_mode="border", low=-1.4, high=1.4),
    S((2, 2, 5, 6), (2, 4, 5, 2), mode="nearest", low=-1.2, high=1.2),
    S((1, 2, 4, 5), (1, 5, 3, 2), padding_mode="reflection", low=-2.4, high=2.4),
]


@op(vjp=_grid_sample_vjp, ref=_ref_grid_sample, cpu=cpu_grid_sample, amp="float", samples=_GRIDS,
    errors=[
        (S((1, 2, 4), (1, 3, 4, 2)), r"\[grid_sample\] x has four axes: batch, channels, height, width; x.shape=\(1, 2, 4\)"),
        (S((1, 2, 4, 4), (2, 3, 4, 2)), r"\[grid_sample\] grid is \(batch, height, width, 2\) with the batch of x; x.shape="),
        (S((1, 2, 4, 4), (1, 3, 4, 2), mode="bicubic"), r"\[grid_sample\] unknown mode; mode='bicubic'; known: bilinear, nearest"),
        (S((1, 2, 4, 4), (1, 3, 4, 2), padding_mode="wrap"), r"\[grid_sample\] unknown padding_mode; .*known: zeros, border, reflection"),
    ])  # fmt: skip
def grid_sample(x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False) -> Tensor:
    """The values of images ``(batch, channels, height, width)`` at the points of ``grid`` ``(batch, height, width, 2)``.

    A point is ``(x, y)`` with -1 and 1 at the edges of the image (``align_corners=True``: at the centres of its corner pixels). Outside
    lie zeros; with ``padding_mode="border"`` the nearest pixels; with ``"reflection"`` mirror images.
    """
    x, grid = launch.as_tensors("grid_sample", x, grid)
    x = image("grid_sample", x)
    _checked_grid("grid_sample", x, grid, mode, padding_mode)
    if padding_mode == "reflection":
        grid, padding_mode = run(_REFLECTED, (grid,)), "border"
    if x.backend == "cpu":
        return launch.run_cpu(cpu_grid_sample, x, grid, **_flags(mode, padding_mode, align_corners))
    y = Tensor.empty((*x.shape[:2], *grid.shape[1:3]), x.dtype, queue=x.queue)
    points = grid.shape[1] * grid.shape[2]
    kernel = _resample_kernel("sample_grid", x, grid)
    kernel(x.queue, (grid.shape[0] * points,), (launch.LOCAL_1D,), x, grid, y, *x.shape, points, _how(mode, align_corners, padding_mode))
    return y


def _grid_sample_grad_vjp(F, g, dy, grid, needs, mode, padding_mode, align_corners):
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    back = F.grid_sample(g, grid, **options) if needs[0] else None
    return back, F.grid_sample_grid_grad(dy, g, grid, **options) if needs[1] else None


@op(vjp=_grid_sample_grad_vjp, ref=_ref_grid_sample_grad, cpu=cpu_grid_sample_grad, amp="float",
    samples=[
        S((1, 2, 3, 4), (1, 3, 4, 2), size=(4, 5)),
        S((2, 3, 4, 3), (2, 4, 3, 2), size=(5, 4), align_corners=True, low=-1.3, high=1.3),
        S((1, 2, 5, 3), (1, 5, 3, 2), size=(4, 5), padding_mode="border", low=-1.4, high=1.4),
    ],
    errors=[(S((1, 2, 3, 3), (1, 3, 4, 2), size=(4, 5)),
             r"\[grid_sample_input_grad\] dy and grid differ in height and width; dy.shape=\(1, 2, 3, 3\), ")])  # fmt: skip
def grid_sample_input_grad(
    dy: Tensor, grid: Tensor, *, size: Pair, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """The gradient of :func:`grid_sample` with respect to an image of height and width ``size``.

    Points add up in their order: one work-item per plane, so that two runs agree bit for bit.
    """
    name = "grid_sample_input_grad"
    dy, grid = launch.as_tensors(name, dy, grid)
    dy, wanted = image(name, dy, label="dy"), pair(name, "size", frozen(size), 1)
    _checked_grid(name, dy, grid, mode, padding_mode, "dy")
    if dy.shape[2:] != grid.shape[1:3]:
        raise ShapeError(message(name, "dy and grid differ in height and width", **{"dy.shape": dy.shape, "grid.shape": grid.shape}))
    if dy.backend == "cpu":
        return launch.run_cpu(cpu_grid_sample_grad, dy, grid, size=wanted, **_flags(mode, padding_mode, align_corners))
    sums = dtypes.sum_dtype(dy.dtype)
    dx = Tensor.empty((*dy.shape[:2], *wanted), sums, queue=dy.queue)
    local, points = 1 if launch.on_cpu_device(dy.queue) else launch.LOCAL_1D, dy.shape[2] * dy.shape[3]
    numbers = (*dy.shape[:2], *wanted, points, _how(mode, align_corners, padding_mode))
    _resample_kernel("sample_grid_grad", dy, grid)(dy.queue, (math.prod(dy.shape[:2]),), (local,), dy, grid, dx, *numbers)
    return dx if sums == dy.dtype else cast(dx, dy.dtype)


def _ref_grid_grad(dy, x, grid, mode="bilinear", padding_mode="zeros", align_corners=False, step=1e-6):
    """Central differences of the definition."""
    out = np.zeros(grid.shape)
    for k in (0, 1):
        shift = np.zeros(2)
        shift[k] = step
        up, down = (_ref_grid_sample(x, grid + sign * shift, mode, padding_mode, align_corners) for sign in (1, -1))
        out[..., k] = (dy * (up - down) / (2 * step)).sum(axis=1)
    return out


@op(vjp=None, ref=_ref_grid_grad, cpu=cpu_grid_sample_grid_grad, amp="float", tol=100.0,
    samples=[
        S((1, 2, 3, 4), (1, 2, 4, 5), (1, 3, 4, 2)),
        S((1, 2, 5, 3), (1, 2, 4, 5), (1, 5, 3, 2), padding_mode="border", low=-1.4, high=1.4),
    ])  # fmt: skip
def grid_sample_grid_grad(
    dy: Tensor, x: Tensor, grid: Tensor, *, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """The gradient of :func:`grid_sample` with respect to its grid; zero for the nearest pixel. It has no gradient itself."""
    name = "grid_sample_grid_grad"
    dy, x, grid = launch.as_tensors(name, dy, x, grid)
    x, dy = image(name, x), image(name, dy, label="dy")
    _checked_grid(name, x, grid, mode, padding_mode)
    if dy.shape != (*x.shape[:2], *grid.shape[1:3]):
        raise ShapeError(message(name, "dy is not the gradient of a sample of x under grid", **{"dy.shape": dy.shape, "x.shape": x.shape}))
    if x.backend == "cpu":
        return launch.run_cpu(cpu_grid_sample_grid_grad, dy, x, grid, dtype=grid.dtype, **_flags(mode, padding_mode, align_corners))
    result = Tensor.empty(grid.shape, grid.dtype, queue=x.queue)
    points = grid.shape[1] * grid.shape[2]
    numbers = (*x.shape, points, _how(mode, align_corners, padding_mode))
    kernel = _resample_kernel("sample_grid_grid_grad", x, grid)
    kernel(x.queue, (grid.shape[0] * points,), (launch.LOCAL_1D,), dy, x, grid, result, *numbers)
    return result


def _affine_ref(theta, size, align_corners=False):
    lines = [np.linspace(-1, 1, n) * (1 if align_corners else (n - 1) / n) if n > 1 else np.zeros(1) for n in size[2:]]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(size[2:])], -1)
    return np.einsum("...k,njk->n...j", points, theta)


@composite(ref=_affine_ref, samples=[S((2, 2, 3), size=(2, 3, 4, 5)), S((1, 2, 3), size=(1, 1, 1, 3), align_corners=True),
                                     S((1, 3, 4), size=(1, 1, 2, 3, 2))],
           errors=[(S((2, 3, 3), size=(2, 1, 4, 4)), r"\[affine_grid\] theta must be \(batch, 2, 3\); .*shape=\(2, 3, 3\)")])  # fmt: skip
def affine_grid(F: Any, theta: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """The grid with which :func:`grid_sample` moves images of ``size`` by the affine maps ``theta`` ``(batch, 2, 3)``; 3-D ones too."""
    axes, theta = len(size) - 2, launch.as_tensors("affine_grid", theta)[0]
    if theta.shape != (size[0], axes, axes + 1):
        raise ShapeError(
            message("affine_grid", f"theta must be (batch, {axes}, {axes + 1})", size=tuple(size), **{"theta.shape": theta.shape})
        )
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
        raise ShapeError(message(name, f"x has four axes, and {rule}", **{"x.shape": x.shape, "factor": factor}))


def _ref_pixel_shuffle(x, factor):
    n, c, h, w = x.shape
    out = np.zeros((n, c // factor**2, h * factor, w * factor), x.dtype)
    for i in range(factor):
        for j in range(factor):
            out[:, :, i::factor, j::factor] = x[:, i * factor + j :: factor**2]
    return out


def _ref_pixel_unshuffle(x, factor):
    n, c, h, w = x.shape
    out = np.zeros((n, c * factor**2, h // factor, w // factor), x.dtype)
    for i in range(factor):
        for j in range(factor):
            out[:, i * factor + j :: factor**2] = x[:, :, i::factor, j::factor]
    return out


@composite(ref=_ref_pixel_shuffle, samples=[S((2, 8, 3, 4), factor=2), S((1, 9, 2, 1), factor=3)],
    errors=[(S((1, 6, 2, 2), factor=2),
             r"\[pixel_shuffle\] x has four axes, and the factor's square divides its channels; x.shape=\(1, 6, 2, 2\), ")])  # fmt: skip
def pixel_shuffle(F: Any, x: Tensor, factor: int) -> Tensor:
    """``(n, c * factor^2, h, w)`` becomes ``(n, c, h * factor, w * factor)``: channels turn into neighbouring pixels."""
    _check_shuffle("pixel_shuffle", x, factor, not sum(x.shape[1:2]) % max(1, factor) ** 2, "the factor's square divides its channels")
    n, c, h, w = x.shape
    parts = F.reshape(x, (n, c // factor**2, factor, factor, h, w))
    return F.reshape(F.permute(parts, (0, 1, 4, 2, 5, 3)), (n, c // factor**2, h * factor, w * factor))


@composite(ref=_ref_pixel_unshuffle, samples=[S((2, 2, 6, 4), factor=2), S((1, 1, 3, 6), factor=3)],
    errors=[(S((1, 1, 5, 4), factor=2), r"\[pixel_unshuffle\] x has four axes, and the factor divides its height and width")])  # fmt: skip
def pixel_unshuffle(F: Any, x: Tensor, factor: int) -> Tensor:
    """The inverse of :func:`pixel_shuffle`."""
    fits = not any(size % max(1, factor) for size in x.shape[2:])
    _check_shuffle("pixel_unshuffle", x, factor, fits, "the factor divides its height and width")
    n, c, h, w = x.shape
    parts = F.reshape(x, (n, c, h // factor, factor, w // factor, factor))
    return F.reshape(F.permute(parts, (0, 1, 3, 5, 2, 4)), (n, c * factor**2, h // factor, w // factor))
