"""ONNX operators over images and signals: convolutions, pooling, resizing, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.onnx.handlers import Node, _ints, handles


def _pads(node: Node, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(begin, end)`` per axis of ``pads`` or ``auto_pad``."""
    axes, auto = len(kernel), node.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        flat = node.get("pads", [0] * 2 * axes) if auto == "NOTSET" else [0] * 2 * axes
        return [(flat[i], flat[axes + i]) for i in range(axes)]
    strides, dilations = node.get("strides", [1] * axes), node.get("dilations", [1] * axes)
    found = []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        found.append((total // 2, total - total // 2) if auto == "SAME_UPPER" else (total - total // 2, total // 2))
    return found


def _planes(node: Node, x: Tensor) -> int:
    if x.ndim not in (3, 4):
        raise node.fault("only signals and images are supported, with one or two axes beside batch and channels", shape=x.shape)
    return x.ndim - 2


def _one(values: Any) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _strides_of(node: Node, axes: int) -> dict[str, Any]:
    return {"stride": _one(node.get("strides", [1] * axes)), "dilation": _one(node.get("dilations", [1] * axes))}


def _padded(x: Tensor, pads: list[tuple[int, int]], value: float) -> Tensor:
    return ag.pad(x, [side for pair in reversed(pads) for side in pair], value=value) if any(map(any, pads)) else x


@handles("Conv")
def _conv(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = _planes(node, x)
    pads = _pads(node, x.shape[2:], w.shape[2:])
    if any(begin != end for begin, end in pads):
        x, pads = _padded(x, pads, 0.0), [(0, 0)] * axes
    options = {**_strides_of(node, axes), "groups": node.get("group", 1)}
    return (ag.conv1d if axes == 1 else ag.conv2d)(x, w, bias, padding=_one([begin for begin, _ in pads]), **options)


@handles("ConvTranspose")
def _conv_transpose(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = _planes(node, x)
    pads = _pads(node, x.shape[2:], w.shape[2:])
    if any(begin != end for begin, end in pads) or node.get("output_shape") or node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise node.fault("only symmetric pads are supported, and no output_shape", pads=node.get("pads"))
    options = {**_strides_of(node, axes), "groups": node.get("group", 1), "padding": _one([begin for begin, _ in pads])}
    options["output_padding"] = _one(node.get("output_padding", [0] * axes))
    return (ag.conv_transpose1d if axes == 1 else ag.conv_transpose2d)(x, w, bias, **options)


def _ceiled(node: Node, x: Tensor, kernel: tuple[int, ...], pads: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Padding at the end that makes the windows ``ceil_mode`` adds fit; windows that would start beyond the image are left out."""
    if not node.get("ceil_mode", 0):
        return pads
    found, ones = [], [1] * len(kernel)
    sizes = zip(x.shape[2:], kernel, node.get("strides", ones), node.get("dilations", ones), pads, strict=True)
    for n, k, s, d, (begin, end) in sizes:
        outs = -(-(n + begin + end - d * (k - 1) - 1) // s) + 1
        outs -= (outs - 1) * s >= n + begin
        found.append((begin, max(end, (outs - 1) * s + d * (k - 1) + 1 - n - begin)))
    return found


@handles("MaxPool")
def _max_pool(node: Node, x: Tensor) -> Tensor:
    axes, kernel = _planes(node, x), tuple(node.get("kernel_shape"))
    if len(node.outputs) > 1 and node.outputs[1]:
        raise node.fault("the places of the maxima are not supported")
    x = _padded(x, _ceiled(node, x, kernel, _pads(node, x.shape[2:], kernel)), -math.inf)
    return (ag.max_pool1d if axes == 1 else ag.max_pool2d)(x, _one(kernel), **_strides_of(node, axes))


@handles("AveragePool")
def _average_pool(node: Node, x: Tensor) -> Tensor:
    axes, kernel = _planes(node, x), tuple(node.get("kernel_shape"))
    if any(d != 1 for d in node.get("dilations", [1])):
        raise node.fault("dilated windows are not supported", dilations=node.get("dilations"))
    pads = _pads(node, x.shape[2:], kernel)
    wide = _ceiled(node, x, kernel, pads)
    pool, stride = ag.avg_pool1d if axes == 1 else ag.avg_pool2d, _one(node.get("strides", [1] * axes))
    total = pool(_padded(x, wide, 0.0), _one(kernel), stride=stride)
    inside = pads if node.get("count_include_pad", 0) else [(0, 0)] * axes
    if inside == wide:
        return total
    counted = np.pad(np.ones((1, 1, *x.shape[2:]), np.float32), [(0, 0), (0, 0), *inside], constant_values=1.0)
    rest = [(w[0] - i[0], w[1] - i[1]) for w, i in zip(wide, inside, strict=True)]
    counted = np.pad(counted, [(0, 0), (0, 0), *rest])
    return ag.div(total, pool(Tensor.from_host(x.queue, counted, x.dtype), _one(kernel), stride=stride))


@handles("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node, x: Tensor) -> Tensor:
    return (ag.mean if node.kind == "GlobalAveragePool" else ag.amax)(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@handles("BatchNormalization")
def _batch_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if node.get("training_mode", 0):
        raise node.fault("batch norms in training mode are not supported")
    return ag.batch_norm(x, mean, var, weight, bias, eps=node.get("epsilon", 1e-5))


@handles("InstanceNormalization")
def _instance_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ag.group_norm(x, x.shape[1], weight, bias, eps=node.get("epsilon", 1e-5))


@handles("GroupNormalization")
def _group_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = node.get("num_groups")
    if node.opset < 21:  # weights are per group until then
        column = (groups, 1)
        weight, bias = (ag.reshape(ag.expand(ag.reshape(t, column), (groups, x.shape[1] // groups)), (-1,)) for t in (weight, bias))
    return ag.group_norm(x, groups, weight, bias, eps=node.get("epsilon", 1e-5))


@handles("LayerNormalization")
def _layer_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if len(node.outputs) > 1 and any(node.outputs[1:]):
        raise node.fault("mean and deviation as results are not supported")
    return ag.layer_norm(x, x.shape[node.get("axis", -1) % x.ndim :], weight, bias, eps=node.get("epsilon", 1e-5))


@handles("DepthToSpace")
def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b, rows = node.get("blocksize"), node.get("mode", "DCR") == "DCR"
    parts = ag.reshape(x, (n, b, b, c // b**2, h, w) if rows else (n, c // b**2, b, b, h, w))
    return ag.reshape(ag.permute(parts, (0, 3, 4, 1, 5, 2) if rows else (0, 1, 4, 2, 5, 3)), (n, c // b**2, h * b, w * b))


#: Mode, transformation of coordinates and rounding that ``interpolate`` has: whether the mode is linear, and ``align_corners``.
_RESIZES = {
    ("nearest", "asymmetric", "floor"): (False, False),
    ("linear", "half_pixel", ""): (True, False),
    ("linear", "pytorch_half_pixel", ""): (True, False),
    ("linear", "align_corners", ""): (True, True),
}


@handles("Resize", sizes=(1, 2, 3))
def _resize(node: Node, x: Tensor, region: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
    axes = _planes(node, x)
    by_size = sizes is not None and bool(np.size(sizes))
    given = _ints(sizes) if by_size else [float(s) for s in np.asarray(scales)]
    form = _resize_form(node, [g / n for g, n in zip(given, x.shape, strict=False)] if by_size else given)
    same = len(given) == x.ndim and given[:2] == (list(x.shape[:2]) if by_size else [1.0, 1.0])
    odd = form[1:2] == ("align_corners",) and not by_size and any(n * s % 1 for n, s in zip(x.shape, given, strict=False))
    single = form[1:2] == ("pytorch_half_pixel",) and 1 in given[2:]
    if form not in _RESIZES or not same or odd or single or node.get("antialias", 0) or node.get("axes") is not None:
        raise node.fault("images and signals are resized by nearest (asymmetric, floor) or linear interpolation", form=form)
    linear, align = _RESIZES[form]
    target = {"size": tuple(given[2:])} if by_size else {"scale_factor": tuple(given[2:])}
    return ag.interpolate(x, **target, mode=("linear" if axes == 1 else "bilinear") if linear else "nearest", align_corners=align)


def _resize_form(node: Node, scales: Sequence[float]) -> tuple[str, str, str]:
    """Mode, transformation and rounding. Where pixels are repeated a whole number of times, both nearest modes are the same."""
    mode, moved = node.get("mode", "nearest"), node.get("coordinate_transformation_mode", "half_pixel")
    rounding = node.get("nearest_mode", "round_prefer_floor") if mode == "nearest" else ""
    whole = all(s == int(s) and s >= 1 for s in scales)
    return (mode, "asymmetric", "floor") if (moved, rounding) == ("half_pixel", "round_prefer_floor") and whole else (mode, moved, rounding)
