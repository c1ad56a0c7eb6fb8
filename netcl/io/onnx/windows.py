"""Convolutions, pooling and resizing between ONNX and netcl, both directions side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.exports import EXPORTS
from netcl.io.onnx.graph import Name, OnnxGraph
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.sampling import coordinates, resized, scaled_size
from netcl.io.onnx.table import OnnxNode
from netcl.io.onnx.trace import Call, Unsupported
from netcl.nn import volume
from netcl.ops.conv.geometry import frozen, paddings

# ---- windows: kernel, strides, dilations, padding


def _per_axis(value: Any, axes: int) -> list[int]:
    return [int(value)] * axes if isinstance(value, int | np.integer) else [int(n) for n in value]


def _window(call: Call, kernel: Sequence[int], padding: Any) -> dict[str, Any]:
    """Return the ONNX attributes of a convolution or pooling; ``pads`` lists all begins, then all ends."""
    axes = len(kernel)
    strides, dilations = (_per_axis(call.params.get(name, 1), axes) for name in ("stride", "dilation"))
    if axes == 1 and not isinstance(padding, str):
        padding = (*_per_axis(padding, 1), 0)
    planes: Any = ((*values, 1)[:2] for values in (kernel, strides, dilations))
    pads = np.array(paddings(call.name, frozen(padding), *planes))[:axes]
    return {"kernel_shape": list(kernel), "strides": strides, "dilations": dilations, "pads": pads.T.reshape(-1).tolist()}


def _node_pads(node: OnnxNode, sizes: Sequence[int], kernel: Sequence[int], ceil: bool = False) -> list[tuple[int, int]]:
    """Return ``(begin, end)`` per axis from ``pads`` or ``auto_pad``.

    With ``ceil``, the end also covers the windows that ``ceil_mode`` adds, except windows that would start beyond the image.
    """
    axes, auto = len(kernel), node["auto_pad"]
    strides, dilations = (node[name] or [1] * axes for name in ("strides", "dilations"))
    flat, found = (node["pads"] if auto == "NOTSET" else None) or [0] * 2 * axes, []
    for i, (n, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
        begin, end, span = flat[i], flat[axes + i], d * (k - 1) + 1
        if auto.startswith("SAME"):
            total = max((-(-n // s) - 1) * s + span - n, 0)
            begin, end = (total // 2, total - total // 2) if auto == "SAME_UPPER" else (total - total // 2, total // 2)
        if ceil and node["ceil_mode"]:
            outs = -(-(n + begin + end - span) // s) + 1
            outs -= (outs - 1) * s >= n + begin
            end = max(end, (outs - 1) * s + span - n - begin)
        found.append((begin, end))
    return found


def _op(node: OnnxNode, x: Tensor, name: str) -> Any:
    """Return the op ``name`` for one, two or three spatial dimensions."""
    if x.ndim not in (3, 4, 5):
        raise node.fault("x must have 3 to 5 dimensions (batch, channels and one to three more)", shape=x.shape)
    return getattr(volume if x.ndim == 5 else ag, f"{name}{x.ndim - 2}d")


def _all_windows(node: OnnxNode, x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return all windows of ``x`` in any number of dimensions; the last axis holds the values of a window."""
    strides, dilations = (node[name] or [1] * len(kernel) for name in ("strides", "dilations"))
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        x = ag.unfold(x, 2 + i, d * (k - 1) + 1, s)
        x = x if d == 1 else ag.slice(x, x.ndim - 1, step=d)
    return ag.reshape(x, (*x.shape[: 2 + len(kernel)], -1))


def _one(values: Any) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _strides_of(node: OnnxNode, x: Tensor) -> dict[str, Any]:
    return {name: _one(node[f"{name}s"] or [1] * (x.ndim - 2)) for name in ("stride", "dilation")}


def _padded_input(x: Tensor, pads: list[tuple[int, int]], value: float) -> Tensor:
    return ag.pad(x, [side for pair in reversed(pads) for side in pair], value=value) if any(map(any, pads)) else x


# ---- convolutions


def _export_conv(graph: OnnxGraph, call: Call) -> Name:
    padding = call["padding"] if call.params.get("pad") is None else call["pad"]
    window = _window(call, call["w"].shape[2:], padding)
    kind = "Conv"
    if call.name.startswith("conv_transpose"):
        kind, window["output_padding"] = "ConvTranspose", _per_axis(call["output_padding"], len(window["strides"]))
    return graph.node(kind, [call["x"], call["w"], call["bias"]], call.out.dtype, group=call["groups"], **window)


def read_conv(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    op, pads = _op(node, x, "conv"), _node_pads(node, x.shape[2:], w.shape[2:])
    if any(begin != end for begin, end in pads):
        x, pads = _padded_input(x, pads, 0.0), [(0, 0)] * len(pads)
    return op(x, w, bias, padding=_one([begin for begin, _ in pads]), groups=node["group"], **_strides_of(node, x))


def conv_parts(node: OnnxNode, x: Tensor, w: Tensor, terms: int) -> Iterator[Tensor]:
    """Yield convolutions (not Winograd) that add up to that of ``x`` and ``w``. Except in float64, each sums at most ``terms`` products."""
    kernel, groups, axis = w.shape[2:], node["group"], max(2, x.ndim - 2)
    options, dilations = {"groups": groups, **_strides_of(node, x)}, node["dilations"] or [1] * len(kernel)
    plain = kernel[-2:] == (3, 3) and groups == max(node["strides"] or [1]) == max(dilations) == 1
    x, high, step = _padded_input(x, _node_pads(node, x.shape[2:], kernel), 0.0), w.shape[axis], dilations[axis - 2]
    if (taps := math.prod(kernel) // high) > terms:  # of one row
        x, w, terms = ag.cast(x, "float64"), ag.cast(w, "float64"), 2**53 // 255**2
    rows = 1 if plain else min(high, terms // taps)
    channels = terms // (rows * taps)
    for row in range(0, high, rows):
        height = min(rows, high - row)
        seen = ag.narrow(x, axis, row * step, x.shape[axis] - (high - height) * step)
        for first in range(0, w.shape[1], channels):
            size = min(channels, w.shape[1] - first)
            part = ag.narrow(ag.reshape(seen, (x.shape[0], groups, -1, *seen.shape[2:])), 2, first, size)
            part = ag.reshape(part, (x.shape[0], groups * size, *seen.shape[2:]))
            yield _op(node, x, "conv")(part, ag.narrow(ag.narrow(w, 1, first, size), axis, row, height), None, **options)


def byte_windows(node: OnnxNode, x: Tensor, kernel: Sequence[int], zero: Tensor | None) -> Tensor:
    """Return the windows of an 8-bit ``x`` with one or two spatial dimensions, computed by the op ``integer_columns``."""
    one, pads = [1] * (4 - x.ndim), _node_pads(node, x.shape[2:], kernel)
    strides, dilations = (node[name] or [1] * len(kernel) for name in ("strides", "dilations"))
    image, padding = ag.reshape(x, (*x.shape[:2], *one, *x.shape[2:])), tuple([(0, 0)] * len(one) + pads)
    return ag.integer_columns(image, zero, (*one, *kernel), (*one, *strides), padding, (*one, *dilations), node["group"])


def _conv_transpose(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run ``ConvTranspose``. With ``output_shape``, ``auto_pad="SAME_..."`` or unequal pads, compute without padding, then crop or pad."""
    axes, kernel = x.ndim - 2, w.shape[2:]
    strides, dilations, more = (node[name] or [usual] * axes for name, usual in (("strides", 1), ("dilations", 1), ("output_padding", 0)))
    flat, auto = node["pads"] or [0] * 2 * axes, node["auto_pad"]
    options = {"groups": node["group"], **_strides_of(node, x)}
    if auto in ("NOTSET", "VALID") and not node["output_shape"] and flat[:axes] == flat[axes:]:
        return _op(node, x, "conv_transpose")(x, w, bias, padding=_one(flat[:axes]), output_padding=_one(more), **options)
    out = _op(node, x, "conv_transpose")(x, w, bias, **options)
    for i, (n, k, s, d) in enumerate(zip(x.shape[2:], kernel, strides, dilations, strict=True)):
        full = s * (n - 1) + d * (k - 1) + 1
        begin, length = flat[i], full + more[i] - flat[i] - flat[axes + i]
        if node["output_shape"] or auto.startswith("SAME"):
            length = node["output_shape"][i] if node["output_shape"] else n * s
            total = max(full + more[i] - length, 0)
            begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
        if begin + length > full:
            sides = [0, 0] * (axes - 1 - i) + [0, begin + length - full]
            out = ag.pad(out, sides) if bias is None else ag.pad(out - _of_channels(bias, axes), sides) + _of_channels(bias, axes)
        out = ag.narrow(out, 2 + i, begin, length)
    return out


def _of_channels(bias: Tensor, axes: int) -> Tensor:
    return ag.reshape(bias, (-1, *[1] * axes))


# ---- pooling


def _export_pool(graph: OnnxGraph, call: Call) -> Name:
    """Export pooling. Windows that ``ceil_mode`` adds become padding at the end, because runtimes treat ``ceil_mode`` differently."""
    if call.params.get("return_indices"):
        raise Unsupported(f"{call.name}(return_indices=True)")
    kernel = _per_axis(call["kernel_size"], call["x"].ndim - 2)
    call.params["stride"] = kernel if call["stride"] is None else call["stride"]
    window, axes = _window(call, kernel, call["padding"]), len(kernel)
    pads = list(window["pads"])
    for i in range(axes) if call["ceil_mode"] else ():
        reach = (call.out.shape[2 + i] - 1) * window["strides"][i] + window["dilations"][i] * (kernel[i] - 1) + 1
        pads[axes + i] = max(pads[axes + i], reach - call["x"].shape[2 + i] - pads[i])
    include = call.params.get("count_include_pad")
    if include and pads != window["pads"]:
        raise Unsupported(f"{call.name}(ceil_mode=True, count_include_pad=True)")
    window["pads"] = pads
    if call.name.startswith("max"):
        return graph.node("MaxPool", [call["x"]], call.out.dtype, **window)
    del window["dilations"]
    return graph.node("AveragePool", [call["x"]], call.out.dtype, count_include_pad=include, **window)


def _max_pool(node: OnnxNode, x: Tensor) -> Any:
    kernel, kind = node["kernel_shape"], DTYPES[x.dtype]
    pads = _node_pads(node, x.shape[2:], kernel, ceil=True)
    padded = _padded_input(x, pads, -math.inf if kind.is_float else int(np.iinfo(kind.storage).min))
    if x.ndim in (3, 4, 5) and len(node.outputs) == 1 and kind.is_float:
        return _op(node, x, "max_pool")(padded, _one(kernel), **_strides_of(node, x))
    windows = _all_windows(node, padded, kernel)
    if len(node.outputs) == 1:
        return ag.amax(windows, -1)
    best = ag.argmax(windows, -1, keepdims=True)
    order = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:], order="F" if node["storage_order"] else "C")
    places = Tensor.from_host(x.queue, np.pad(order, pads)[None, None])
    indices = ag.gather(ag.expand(_all_windows(node, places, kernel), windows.shape), -1, best)
    planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * len(kernel)) * math.prod(x.shape[2:])
    return ag.squeeze(ag.gather(windows, -1, best), -1), ag.squeeze(indices, -1) + Tensor.from_host(x.queue, planes)


def _average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel, sizes = node["kernel_shape"], x.shape[2:]
    pads, wide = _node_pads(node, sizes, kernel), _node_pads(node, sizes, kernel, ceil=True)

    def average(values: Tensor) -> Tensor:
        if x.ndim in (3, 4, 5) and all(d == 1 for d in node["dilations"] or ()):
            return _op(node, x, "avg_pool")(values, _one(kernel), stride=_strides_of(node, x)["stride"])
        return ag.mean(_all_windows(node, values, kernel), -1)

    total = average(_padded_input(x, wide, 0.0))
    inside = pads if node["count_include_pad"] else [(0, 0)] * len(kernel)
    if inside == wide:
        return total
    rest = [(w[0] - i[0], w[1] - i[1]) for w, i in zip(wide, inside, strict=True)]
    shape = [n + sum(pair) for n, pair in zip(sizes, inside, strict=True)]
    counted = np.pad(np.ones((1, 1, *shape), np.float32), [(0, 0), (0, 0), *rest])
    return ag.div(total, average(Tensor.from_host(x.queue, counted, x.dtype)))


def _lp_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel, p = node["kernel_shape"], float(node["p"])
    padded = _padded_input(x, _node_pads(node, x.shape[2:], kernel, ceil=True), 0.0)
    return ag.pow(ag.sum(ag.pow(ag.abs(_all_windows(node, padded, kernel)), p), -1), 1 / p)


def _max_unpool(node: OnnxNode, x: Tensor, index: Tensor, shape: Any = None) -> Tensor:
    kernel, axes = node["kernel_shape"], x.ndim - 2
    strides, pads = node["strides"] or [1] * axes, node["pads"] or [0] * 2 * axes
    sizes = [(n - 1) * s + k - pads[i] - pads[axes + i] for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))]
    zeros = Tensor.zeros((math.prod(x.shape[:2]) * math.prod(sizes),), x.dtype, queue=x.queue)
    out = ag.reshape(ag.scatter(zeros, 0, ag.reshape(index, -1), ag.reshape(x, -1)), (*x.shape[:2], *sizes))
    more = [0] * axes if shape is None else [n - m for n, m in zip(shape.to_host().tolist()[2:], sizes, strict=True)]
    return ag.pad(out, [side for n in reversed(more) for side in (0, n)]) if any(more) else out


# ---- resizing

#: Whether ``interpolate`` is linear and its ``align_corners``: mode, coordinate transformation and rounding of ``Resize``.
_RESIZES = {
    (False, False): ("nearest", "asymmetric", "floor"),
    (True, False): ("linear", "half_pixel", ""),
    (True, True): ("linear", "align_corners", ""),
}


def _export_interpolate(graph: OnnxGraph, call: Call) -> Name:
    """Export ``interpolate``. Without ``align_corners``, the sampled points depend on ``scale_factor``, so it is exported if it is used."""
    factor, align, kind = call["scale_factor"], bool(call["align_corners"]), call["mode"]
    if kind == "area" or call["antialias"]:  # onnxruntime normalizes at the edges in another way
        raise Unsupported("interpolate(antialias=True)" if call["antialias"] else "interpolate(mode='area')")
    mode, moved, rounding = _RESIZES[not kind.startswith("nearest"), align and not kind.startswith("nearest")]
    if kind == "nearest-exact":
        moved, rounding = "half_pixel", "round_prefer_ceil"
    options = {"mode": "cubic" if kind == "bicubic" else mode, "coordinate_transformation_mode": moved, "nearest_mode": rounding or None}
    if factor is None or align or call["recompute_scale_factor"]:
        return graph.node("Resize", [call["x"], None, None, graph.sizes(call)], call.out.dtype, **options)
    scales = [1.0, 1.0, *([factor] * (call["x"].ndim - 2) if isinstance(factor, int | float) else factor)]
    return graph.node("Resize", [call["x"], None, np.array(scales, np.float32)], call.out.dtype, **options)


def _export_sample_images(graph: OnnxGraph, call: Call) -> Name:
    options = {"mode": "bilinear" if call["linear"] else "nearest", "padding_mode": "border" if call["border"] else "zeros"}
    return graph.node("GridSample", [call["x"], call["grid"]], call.out.dtype, align_corners=int(call["align"]), **options)


def _resize(node: OnnxNode, x: Tensor, region: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
    if node.opset < 11:
        region, scales = None, region
    by_size = bool(sizes)
    given = sizes if by_size else scales
    factors = [g / n for g, n in zip(given, x.shape, strict=False)] if by_size else given
    outs = [scaled_size(n, s) for n, s in zip(x.shape, factors, strict=False)]
    form = _resize_form(node, factors, outs[2:])
    same = len(given) == x.ndim and given[:2] == (list(x.shape[:2]) if by_size else [1.0, 1.0])
    aligned = form[1] == "align_corners"
    odd = not by_size and any(n * s != out if aligned else int(n * s) != out for n, s, out in zip(x.shape, given, outs, strict=False))
    known = [key for key, value in _RESIZES.items() if value == form] if x.ndim in (3, 4) and DTYPES[x.dtype].is_float else []
    plain = node["axes"] is None and node["keep_aspect_ratio_policy"] in (None, "stretch")
    if not known or not same or odd or node["antialias"] or not plain:
        return resized(node, x, region, scales, sizes)
    linear, align = known[0]
    target: dict[str, Any] = {"size": tuple(given[2:])} if by_size else {"scale_factor": tuple(given[2:])}
    return ag.interpolate(x, **target, mode=("linear" if x.ndim == 3 else "bilinear") if linear else "nearest", align_corners=align)


def _resize_form(node: OnnxNode, factors: Sequence[float], outs: Sequence[int]) -> tuple[str, str, str]:
    """Return mode, coordinate transformation and rounding. Some are replaced by an equivalent combination in :data:`_RESIZES`."""
    mode, (moved, rounding) = node["mode"], coordinates(node, min(factors))
    rounding = rounding if mode == "nearest" else ""
    if (moved, rounding) == ("half_pixel", "round_prefer_floor") and all(s == int(s) and s >= 1 for s in factors):
        return mode, "asymmetric", "floor"  # whole factors repeat pixels
    if (mode, moved) == ("linear", "pytorch_half_pixel") and 1 not in outs:
        moved = "half_pixel"  # they differ for outputs of size 1
    return mode, moved, rounding


EXPORTS |= {f"{name}{axes}d": _export_conv for name in ("conv", "conv_transpose") for axes in (1, 2)}
EXPORTS |= {f"{name}{axes}d": _export_pool for name in ("max_pool", "avg_pool") for axes in (1, 2)}
EXPORTS |= {"interpolate": _export_interpolate, "sample_images": _export_sample_images}
IMPORTS |= {
    "Conv": read_conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda node, x: ag.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    "GlobalMaxPool": lambda node, x: ag.amax(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    "LpPool": _lp_pool,
    "GlobalLpPool": lambda node, x: ag.norm(x, p=node["p"], axis=tuple(range(2, x.ndim)), keepdims=True),
    "MaxUnpool": _max_unpool,
    "Resize": _resize,
    "Upsample": lambda node, x, scales=None: resized(node, x, None, node["scales"] if scales is None else scales, None),
}
