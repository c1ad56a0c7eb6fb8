"""The kernels of :func:`netcl.ops.grid_sample` for images. A value is the nearest pixel or is interpolated between four pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, op
from netcl.ops.pointwise import cast

# ---- NumPy


def _spots(values: np.ndarray, size: int, linear: bool, border: bool, align: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pixel before each coordinate, the weight of the next pixel, and d(position) / d(coordinate).

    Unless ``linear``, return the pixel nearest to each coordinate, and zeros for the weight and the derivative.
    """
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
    """Return pixels around each point as ``(inside, flat index, row weight, column weight)``, and :func:`_spots` of columns and rows."""
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
    """Return pixels of each plane, zero outside the image: ``(n, c, points)``."""
    flat = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    values = np.take_along_axis(flat, np.broadcast_to(index[:, None], (*x.shape[:2], index.shape[1])), 2)
    return np.where(inside[:, None], values, 0)


def _sample_cpu(x: np.ndarray, grid: np.ndarray, *, linear: bool, border: bool, align: bool) -> np.ndarray:
    found, _, _ = _corners(grid.astype(x.dtype), x.shape[2:], linear, border, align)
    y = sum((down * across)[:, None] * _picked(x, inside, index) for inside, index, down, across in found)
    return y.reshape(*x.shape[:2], *grid.shape[1:3])


def _sample_image_grad_cpu(dy: np.ndarray, grid: np.ndarray, *, size: Any, linear: bool, border: bool, align: bool) -> np.ndarray:
    found, _, _ = _corners(grid.astype(dy.dtype), size, linear, border, align)
    planes, pixels = math.prod(dy.shape[:2]), size[0] * size[1]
    dx, flat = np.zeros(planes * pixels, dy.dtype), dy.reshape(*dy.shape[:2], dy.shape[2] * dy.shape[3])
    offset = (np.arange(planes) * pixels).reshape(*dy.shape[:2], 1)
    for inside, index, down, across in found:
        np.add.at(dx, (index[:, None] + offset).reshape(-1), (np.where(inside, down * across, 0)[:, None] * flat).reshape(-1))
    return dx.reshape(*dy.shape[:2], *size)


def _sample_grid_grad_cpu(dy: np.ndarray, x: np.ndarray, grid: np.ndarray, *, linear: bool, border: bool, align: bool) -> np.ndarray:
    if not linear:
        return np.zeros(grid.shape, grid.dtype)
    found, h, v = _corners(grid.astype(x.dtype), x.shape[2:], linear, border, align)
    a, b, d, e = (_picked(x, inside, index) for inside, index, _, _ in found)
    flat = dy.reshape(*dy.shape[:2], dy.shape[2] * dy.shape[3])
    down, across = v[1][:, None], h[1][:, None]
    left = (flat * ((1 - down) * (b - a) + down * (e - d))).sum(axis=1) * h[2]
    up = (flat * ((1 - across) * (d - a) + across * (e - b))).sum(axis=1) * v[2]
    return np.stack([left, up], axis=-1).reshape(grid.shape)


# ---- ops


def _sample_kernel(name: str, image: Tensor, grid: Tensor) -> Any:
    """Return a kernel of ``sample_images.cl``; grid gradients have the dtype of the grid, other results the dtype of the images."""
    y = grid.dtype if name == "sample_grid_grid_grad" else image.dtype
    operands = {"X": image.dtype, "D": image.dtype, "G": grid.dtype, "Y": y}
    return launch.kernel(image.queue, __file__, "sample_images.cl", name, operands, {"REAL": dtypes.DTYPES[image.dtype].c_compute})


def _grid_grad_by_ops(
    F: Any, dy: Tensor, x: Tensor, grid: Tensor, *, linear: bool = True, border: bool = False, align: bool = False
) -> Tensor:
    if not linear:
        return F.mul(grid, 0.0)
    (batch, channels, height, width), points = x.shape, grid.shape[1] * grid.shape[2]
    spots = []
    for axis, size in enumerate((width, height)):
        v = F.add(F.cast(F.reshape(F.select(grid, -1, axis), (batch, points)), x.dtype), 1.0)
        at, slope = (F.mul(v, (size - 1) / 2), (size - 1) / 2) if align else (F.sub(F.mul(v, size / 2), 0.5), size / 2)
        low, high = (0.0, size - 1.0) if border else (-2.0, size + 1.0)
        moves = F.cast(F.logical_and(F.gt(at, low), F.lt(at, high)), x.dtype)
        at = F.where(F.gt(at, low), F.where(F.lt(at, high), at, high), low)
        first = F.floor(at.detach())
        spots.append((first, F.unsqueeze(F.sub(at, first), 1), F.mul(moves, slope) if border else slope))
    (column, across, h), (row, down, v) = spots
    flat, shown, corners = F.reshape(x, (batch, channels, height * width)), (batch, channels, points), []
    for below, beside in ((0, 0), (0, 1), (1, 0), (1, 1)):
        i, j = F.add(row, float(below)), F.add(column, float(beside))
        inside = F.logical_and(F.logical_and(F.ge(i, 0), F.lt(i, height)), F.logical_and(F.ge(j, 0), F.lt(j, width)))
        index = F.cast(F.where(inside, F.add(F.mul(i, float(width)), j), 0.0), "int64")
        corners.append(F.where(F.unsqueeze(inside, 1), F.gather(flat, 2, F.expand(F.unsqueeze(index, 1), shown)), 0.0))
    (a, b, c, d), dy = corners, F.reshape(dy, shown)
    left = F.mul(F.sum(F.mul(dy, F.lerp(F.sub(b, a), F.sub(d, c), down)), 1), h)
    up = F.mul(F.sum(F.mul(dy, F.lerp(F.sub(c, a), F.sub(d, b), across)), 1), v)
    return F.cast(F.reshape(F.stack([left, up], -1), grid.shape), grid.dtype)


def _sample_vjp(F, g, x, grid, needs, linear, border, align):
    options = {"linear": linear, "border": border, "align": align}
    dx = F.sample_images_input_grad(g, grid, size=x.shape[2:], **options) if needs[0] else None
    return dx, F.sample_images_grid_grad(g, x, grid, **options) if needs[1] else None


@op(vjp=_sample_vjp, ref="numpy", amp="float",
    samples=[S((1, 2, 4, 5), (1, 3, 4, 2)), S((2, 3, 5, 4), (2, 4, 3, 2), align=True, low=-1.3, high=1.3),
             S((1, 2, 4, 5), (1, 5, 3, 2), border=True, low=-1.4, high=1.4),
             S((2, 2, 5, 6), (2, 4, 5, 2), linear=False, low=-1.2, high=1.2)])  # fmt: skip
def sample_images(x: Tensor, grid: Tensor, *, linear: bool = True, border: bool = False, align: bool = False) -> Tensor:
    """Sample images for :func:`grid_sample`: bilinear if ``linear``, else nearest. Outside points read the edge if ``border``, else 0."""
    x, grid = launch.as_tensors("sample_images", x, grid)
    if x.backend == "cpu":
        return launch.run_cpu(_sample_cpu, x, grid, linear=linear, border=border, align=align)
    y = Tensor.empty((*x.shape[:2], *grid.shape[1:3]), x.dtype, queue=x.queue)
    points = grid.shape[1] * grid.shape[2]
    size, how = (grid.shape[0] * points,), linear + 2 * align + 4 * border
    if y.size:
        _sample_kernel("sample_grid", x, grid)(x.queue, size, (launch.LOCAL_1D,), x, grid, y, *x.shape, points, how)
    return y


def _sample_grad_vjp(F, g, dy, grid, needs, linear, border, align):
    options = {"linear": linear, "border": border, "align": align}
    back = F.sample_images(g, grid, **options) if needs[0] else None
    return back, F.sample_images_grid_grad(dy, g, grid, **options) if needs[1] else None


@op(vjp=_sample_grad_vjp, ref="numpy", amp="float",
    samples=[S((1, 2, 3, 4), (1, 3, 4, 2), size=(4, 5)), S((2, 3, 4, 3), (2, 4, 3, 2), size=(5, 4), align=True, low=-1.3, high=1.3),
             S((1, 2, 5, 3), (1, 5, 3, 2), size=(4, 5), border=True, low=-1.4, high=1.4)])  # fmt: skip
def sample_images_input_grad(
    dy: Tensor, grid: Tensor, *, size: Sequence[int], linear: bool = True, border: bool = False, align: bool = False
) -> Tensor:
    """The gradient of :func:`sample_images` with respect to images of height and width ``size``.

    One work-item per plane adds the points in order, so that two runs agree bit for bit.
    """
    dy, grid = launch.as_tensors("sample_images_input_grad", dy, grid)
    if dy.backend == "cpu":
        return launch.run_cpu(_sample_image_grad_cpu, dy, grid, size=size, linear=linear, border=border, align=align)
    sums = dtypes.sum_dtype(dy.dtype)
    dx = Tensor.empty((*dy.shape[:2], *size), sums, queue=dy.queue)
    local, points = 1 if launch.on_cpu_device(dy.queue) else launch.LOCAL_1D, dy.shape[2] * dy.shape[3]
    numbers = (*dx.shape, points, linear + 2 * align + 4 * border)
    _sample_kernel("sample_grid_grad", dy, grid)(dy.queue, (math.prod(dy.shape[:2]),), (local,), dy, grid, dx, *numbers)
    return dx if sums == dy.dtype else cast(dx, dy.dtype)


@op(vjp=None, formula=_grid_grad_by_ops, ref="numpy", amp="float", tol=100.0,
    samples=[S((1, 2, 3, 4), (1, 2, 4, 5), (1, 3, 4, 2)),
             S((1, 2, 5, 3), (1, 2, 4, 5), (1, 5, 3, 2), border=True, low=-1.4, high=1.4)])  # fmt: skip
def sample_images_grid_grad(
    dy: Tensor, x: Tensor, grid: Tensor, *, linear: bool = True, border: bool = False, align: bool = False
) -> Tensor:
    """The gradient of :func:`sample_images` with respect to its grid; zero unless ``linear``."""
    dy, x, grid = launch.as_tensors("sample_images_grid_grad", dy, x, grid)
    if x.backend == "cpu":
        return launch.run_cpu(_sample_grid_grad_cpu, dy, x, grid, dtype=grid.dtype, linear=linear, border=border, align=align)
    result = Tensor.empty(grid.shape, grid.dtype, queue=x.queue)
    points = grid.shape[1] * grid.shape[2]
    numbers = (*x.shape, points, linear + 2 * align + 4 * border)
    kernel = _sample_kernel("sample_grid_grid_grad", x, grid)
    kernel(x.queue, (grid.shape[0] * points,), (launch.LOCAL_1D,), dy, x, grid, result, *numbers)
    return result
