"""Operators that read images between their pixels: ``Resize``, ``GridSample``, ``RoiAlign``, ``DeformConv``; and ``Col2Im``."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.table import OnnxNode
from netcl.ops.resample import cubic_kernel, sampled, weighted_axis

#: Modes of rounding of ``Resize`` besides ``floor``.
_RESIZE_ROUNDINGS: dict[str, Any] = {"ceil": np.ceil}
_RESIZE_ROUNDINGS |= {"round_prefer_floor": lambda x: np.ceil(x - 0.5), "round_prefer_ceil": lambda x: np.floor(x + 0.5)}


def coordinates(node: OnnxNode, scale: float = 1.0) -> tuple[str, str]:
    """Return the coordinate transformation and the rounding of ``Resize``; before opset 11 both were fixed, as in onnxruntime."""
    if node.opset < 11:
        return "asymmetric", "ceil" if scale < 1 else "floor"
    return node["coordinate_transformation_mode"], node["nearest_mode"]


def scaled_size(n: int, scale: float) -> int:
    """Return the size of a scaled axis, in float32 as onnxruntime computes it: 6 by the float32 nearest to 5/3 is 10, not 9."""
    return int(np.float32(n) * np.float32(scale))


def resized(node: OnnxNode, x: Tensor, region: Any, scales: Any, sizes: Any) -> Tensor:
    """Run ``Resize`` in any mode, axis by axis, as weighted sums of slices. ``region`` is the operator's ``roi``."""
    axes = [axis % x.ndim for axis in node["axes"] or range(x.ndim)]
    if sizes:
        scales = [size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
        if node["keep_aspect_ratio_policy"] in ("not_larger", "not_smaller"):
            scales = [(min if node["keep_aspect_ratio_policy"] == "not_larger" else max)(scales)] * len(axes)
            sizes = [int(x.shape[axis] * scale + 0.5) for axis, scale in zip(axes, scales, strict=True)]
    else:
        sizes = [scaled_size(x.shape[axis], scale) for axis, scale in zip(axes, scales, strict=True)]
    out = x if DTYPES[x.dtype].is_float or node["mode"] == "nearest" else ag.cast(x, "float32")
    beyond = np.zeros((1,) * x.ndim, bool)
    for i, (axis, scale, size) in enumerate(zip(axes, scales, sizes, strict=True)):
        edges = (region[i], region[len(axes) + i]) if region else (0.0, 1.0)
        if scale == 1 and size == x.shape[axis] and edges == (0.0, 1.0):
            continue
        center = _centers(coordinates(node)[0], x.shape[axis], size, scale, edges)
        out = weighted_axis(ag, out, axis, *_shares(node, x.shape[axis], scale, center))
        if coordinates(node)[0] == "tf_crop_and_resize":
            outside = (center < 0) | (center > x.shape[axis] - 1)
            beyond = beyond | outside.reshape([-1 if other == axis else 1 for other in range(x.ndim)])
    if beyond.any():
        out = ag.where(Tensor.from_host(x.queue, np.broadcast_to(beyond, out.shape).copy()), node["extrapolation_value"], out)
    return ag.cast(out, x.dtype)


def _centers(mode: str, n: int, outs: int, scale: float, edges: tuple[float, float]) -> np.ndarray:
    """Return the positions of ``outs`` output pixels on an axis of ``n`` input pixels; ``edges`` are the region's bounds, as fractions."""
    y, width = np.arange(outs, dtype=np.float64), scale * n
    if width == 1 and mode in ("align_corners", "pytorch_half_pixel"):
        return y * 0
    if mode == "align_corners":
        return y * (n - 1) / (width - 1)
    if mode == "asymmetric":
        return y / scale
    if mode == "tf_crop_and_resize":
        low, high = edges
        return low * (n - 1) + ((high - low) * (n - 1) / 2 + 0 * y if width == 1 else y * (high - low) * (n - 1) / (width - 1))
    moved = n / 2 * (1 - outs / width) if mode == "half_pixel_symmetric" else 0.0
    return moved + (y + 0.5) / scale - 0.5


def _shares(node: OnnxNode, n: int, scale: float, center: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each output pixel, the indices and the weights of the input pixels in its weighted sum."""
    if node["mode"] == "nearest":
        index = _RESIZE_ROUNDINGS.get(coordinates(node, scale)[1], np.floor)(center)[:, None]
        return np.clip(index, 0, n - 1).astype(np.int64), np.ones_like(index)
    cubic, shrink = node["mode"] == "cubic", min(scale, 1.0) if node["antialias"] else 1.0
    reach = math.ceil((1 + cubic) / shrink)
    index = np.floor(center)[:, None] + np.arange(1 - reach, reach + 1)
    away = (index - center[:, None]) * shrink
    shares = cubic_kernel(away, node["cubic_coeff_a"]) if cubic else np.maximum(1 - np.abs(away), 0)
    if node["exclude_outside"]:
        shares = np.where((index < 0) | (index >= n), 0, shares)
    return np.clip(index, 0, n - 1).astype(np.int64), shares / shares.sum(1, keepdims=True)


def _grid_sample(node: OnnxNode, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node["mode"], node["mode"])
    return sampled(ag, x, grid, mode, node["padding_mode"], bool(node["align_corners"]))


def _roi_align(node: OnnxNode, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    """Run ``RoiAlign``: each bin becomes the mean of its samples or, with mode ``max``, the largest weighted pixel value in them."""
    (_, c, h, w), high, wide = x.shape, node["output_height"], node["output_width"]
    half = node.opset >= 16 and node["coordinate_transformation_mode"] == "half_pixel"
    made = []
    for (x1, y1, x2, y2), row in zip(rois.to_host() * node["spatial_scale"] - 0.5 * half, batches.to_host(), strict=True):
        axes = []
        for low, up, n, bins in ((y1, y2, h, high), (x1, x2, w, wide)):
            length = (up - low if half else max(up - low, 1.0)) / bins
            count = node["sampling_ratio"] or max(math.ceil(length), 1)
            axes.append(_roi_taps(low + (np.arange(bins * count) + 0.5) * length / count, n, (bins, count)))
        (row_at, row_share), (col_at, col_share) = axes
        places = row_at[:, None, :, None, :, None] * w + col_at[None, :, None, :, None, :]
        shares = row_share[:, None, :, None, :, None] * col_share[None, :, None, :, None, :]
        picked = ag.index_select(ag.reshape(ag.select(x, 0, int(row)), (c, -1)), 1, Tensor.from_host(x.queue, places.reshape(-1)))
        values = ag.reshape(picked, (c, *places.shape)) * Tensor.from_host(x.queue, shares.astype(np.float32), x.dtype)
        if node["mode"] == "max":
            made.append(ag.amax(values, (3, 4, 5, 6)))
        else:
            made.append(ag.mean(ag.sum(values, (5, 6)), (3, 4)))
    return ag.stack(made) if made else Tensor.zeros((0, c, high, wide), x.dtype, queue=x.queue)


def _roi_taps(p: np.ndarray, n: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return two pixels and their weights per point of an axis, as ``(bins, samples, 2)``; points far outside have weight 0."""
    outside, p = (p < -1) | (p > n), np.clip(p, 0, n - 1)
    low = np.floor(p).astype(np.int64)
    index = np.stack([low, np.minimum(low + 1, n - 1)], -1)
    shares = np.where(outside[:, None], 0, np.stack([1 - (p - low), p - low], -1))
    return index.reshape(*shape, 2), shares.reshape(*shape, 2)


def _deform_conv(node: OnnxNode, x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Run ``DeformConv``: gather the columns of the moved windows, then compute one product per group."""
    (n, c, *sizes), kernel, groups, parts = x.shape, list(w.shape[2:]), node["group"], node["offset_group"]
    strides, dilations, pads = (node[name] or [usual] * (2 + 2 * (name == "pads")) for name, usual in
                                (("strides", 1), ("dilations", 1), ("pads", 0)))  # fmt: skip
    outs, taps = offset.shape[2:], math.prod(kernel)
    moved = ag.reshape(offset, (n, parts, taps, 2, *outs))
    images = ag.reshape(x, (n * parts, c // parts, *sizes))
    columns = []
    for tap, place in enumerate(itertools.product(*map(range, kernel))):
        points = []
        for i in (1, 0):  # a grid has x before y
            start = np.arange(outs[i]) * strides[i] - pads[i] + place[i] * dilations[i]
            fixed = Tensor.from_host(x.queue, start.reshape((-1, 1) if i == 0 else (1, -1)).astype(np.float32), x.dtype)
            pixel = ag.reshape(ag.select(ag.select(moved, 2, tap), 2, i), (n * parts, *outs)) + fixed
            points.append((pixel * 2.0 + 1.0) / float(sizes[i]) - 1.0)
        picked = ag.grid_sample(images, ag.stack(points, -1), "bilinear", "zeros", False)
        if mask is not None:
            picked = picked * ag.reshape(ag.select(ag.reshape(mask, (n, parts, taps, *outs)), 2, tap), (n * parts, 1, *outs))
        columns.append(ag.reshape(picked, (n, groups, c // groups, 1, -1)))
    flat = ag.reshape(ag.cat(columns, 3), (n, groups, c // groups * taps, -1))
    out = ag.reshape(ag.matmul(ag.reshape(w, (1, groups, w.shape[0] // groups, -1)), flat), (n, w.shape[0], *outs))
    return out if bias is None else out + ag.reshape(bias, (1, -1, 1, 1))


def _col2im(node: OnnxNode, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    """Run ``Col2Im``: sum each column into the pixels it came from, for images of any number of dimensions."""
    sizes, kernel = image.to_host().tolist(), block.to_host().tolist()
    axes = len(sizes)
    strides, dilations, pads = node["strides"] or [1] * axes, node["dilations"] or [1] * axes, node["pads"] or [0] * 2 * axes
    padded = [n + pads[i] + pads[axes + i] for i, n in enumerate(sizes)]
    place = np.zeros((1,) * 2 * axes, np.int64)
    for i, (n, k, s, d) in enumerate(zip(padded, kernel, strides, dilations, strict=True)):
        at = np.arange(k)[:, None] * d + np.arange((n - d * (k - 1) - 1) // s + 1) * s
        shape = [1] * 2 * axes
        shape[i], shape[axes + i] = at.shape
        place = place * n + at.reshape(shape)
    rows, channels = x.shape[0], x.shape[1] // math.prod(kernel)
    zeros = Tensor.zeros((rows, channels, math.prod(padded)), x.dtype, queue=x.queue)
    flat = ag.index_add(zeros, 2, Tensor.from_host(x.queue, place.reshape(-1)), ag.reshape(x, (rows, channels, -1)))
    out = ag.reshape(flat, (rows, channels, *padded))
    for i, n in enumerate(sizes):
        out = ag.narrow(out, 2 + i, pads[i], n)
    return out


IMPORTS |= {"GridSample": _grid_sample, "RoiAlign": _roi_align, "DeformConv": _deform_conv, "Col2Im": _col2im}
