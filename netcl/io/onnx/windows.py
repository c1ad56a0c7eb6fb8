"""Convolutions, pooling and resizing between ONNX and netcl, both directions side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.archive import refusal
from netcl.io.onnx.exports import EXPORTS
from netcl.io.onnx.graph import Name, OnnxGraph
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.table import Node
from netcl.io.onnx.trace import Call, Unsupported
from netcl.ops.conv.geometry import frozen, paddings

# ---- windows: kernel, strides, dilations, padding


def _per_axis(value: Any, axes: int) -> list[int]:
    return [int(value)] * axes if isinstance(value, int | np.integer) else [int(n) for n in value]


def _window(call: Call, kernel: Sequence[int], padding: Any) -> dict[str, Any]:
    """The attributes of a window; ``pads`` are all begins, then all ends."""
    axes = len(kernel)
    strides, dilations = (_per_axis(call.params.get(name, 1), axes) for name in ("stride", "dilation"))
    if axes == 1 and not isinstance(padding, str):
        padding = (*_per_axis(padding, 1), 0)
    planes: Any = ((*values, 1)[:2] for values in (kernel, strides, dilations))
    pads = np.array(paddings(call.name, frozen(padding), *planes))[:axes]
    return {"kernel_shape": list(kernel), "strides": strides, "dilations": dilations, "pads": pads.T.reshape(-1).tolist()}


def _node_pads(node: Node, sizes: Sequence[int], kernel: Sequence[int], ceil: bool = False) -> list[tuple[int, int]]:
    """``(begin, end)`` per axis from ``pads`` or ``auto_pad``.

    With ``ceil``, enough for the windows that ``ceil_mode`` adds; windows that would start beyond the image are left out.
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


def _op(node: Node, x: Tensor, name: str) -> Any:
    """The op for signals or images."""
    if x.ndim not in (3, 4):
        raise node.fault("x must have 3 or 4 dimensions (batch, channels and one or two more)", shape=x.shape)
    return getattr(ag, f"{name}{x.ndim - 2}d")


def _one(values: Any) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _strides_of(node: Node, x: Tensor) -> dict[str, Any]:
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


def _conv(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    op, pads = _op(node, x, "conv"), _node_pads(node, x.shape[2:], w.shape[2:])
    if any(begin != end for begin, end in pads):
        x, pads = _padded_input(x, pads, 0.0), [(0, 0)] * len(pads)
    return op(x, w, bias, padding=_one([begin for begin, _ in pads]), groups=node["group"], **_strides_of(node, x))


def _conv_transpose(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    op, pads = _op(node, x, "conv_transpose"), _node_pads(node, x.shape[2:], w.shape[2:])
    if any(begin != end for begin, end in pads) or node["output_shape"] or node["auto_pad"] not in ("NOTSET", "VALID"):
        raise node.fault("pads must be symmetric, without output_shape and auto_pad", pads=node["pads"], auto_pad=node["auto_pad"])
    more = _one(node["output_padding"] or [0] * len(pads))
    return op(x, w, bias, padding=_one([p for p, _ in pads]), output_padding=more, groups=node["group"], **_strides_of(node, x))


# ---- pooling


def _export_pool(graph: OnnxGraph, call: Call) -> Name:
    """Windows that ``ceil_mode`` adds become padding at the end, which all runtimes treat alike."""
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


def _max_pool(node: Node, x: Tensor) -> Tensor:
    op, kernel, sizes = _op(node, x, "max_pool"), node["kernel_shape"], x.shape[2:]
    return op(_padded_input(x, _node_pads(node, sizes, kernel, ceil=True), -math.inf), _one(kernel), **_strides_of(node, x))


def _average_pool(node: Node, x: Tensor) -> Tensor:
    op, kernel, sizes, stride = _op(node, x, "avg_pool"), node["kernel_shape"], x.shape[2:], _strides_of(node, x)["stride"]
    if any(d != 1 for d in node["dilations"] or ()):
        raise node.fault("windows must not be dilated", dilations=node["dilations"])
    pads, wide = _node_pads(node, sizes, kernel), _node_pads(node, sizes, kernel, ceil=True)
    total = op(_padded_input(x, wide, 0.0), _one(kernel), stride=stride)
    inside = pads if node["count_include_pad"] else [(0, 0)] * len(kernel)
    if inside == wide:
        return total
    rest = [(w[0] - i[0], w[1] - i[1]) for w, i in zip(wide, inside, strict=True)]
    shape = [n + sum(pair) for n, pair in zip(sizes, inside, strict=True)]
    counted = np.pad(np.ones((1, 1, *shape), np.float32), [(0, 0), (0, 0), *rest])
    return ag.div(total, op(Tensor.from_host(x.queue, counted, x.dtype), _one(kernel), stride=stride))


# ---- resizing

#: Whether ``interpolate`` is linear and its ``align_corners``: mode, coordinate transformation and rounding of ``Resize``.
_RESIZES = {
    (False, False): ("nearest", "asymmetric", "floor"),
    (True, False): ("linear", "half_pixel", ""),
    (True, True): ("linear", "align_corners", ""),
}


def _export_interpolate(graph: OnnxGraph, call: Call) -> Name:
    """By the factor where one was given: the sampling points follow the factor, not the ratio of the sizes."""
    factor, align = call["scale_factor"], bool(call["align_corners"])
    if call["mode"] not in ("nearest", "linear", "bilinear") or call["antialias"] or call["x"].ndim == 5:
        what = "interpolate can be exported in modes nearest, linear and bilinear, without antialias"
        raise refusal("export_onnx", what, mode=repr(call["mode"]), shape=call["x"].shape)
    mode, moved, rounding = _RESIZES[call["mode"] != "nearest", align and call["mode"] != "nearest"]
    options = {"mode": mode, "coordinate_transformation_mode": moved, "nearest_mode": rounding or None}
    if factor is None or align:
        return graph.node("Resize", [call["x"], None, None, graph.sizes(call)], call.out.dtype, **options)
    scales = [1.0, 1.0, *([factor] * (call["x"].ndim - 2) if isinstance(factor, int | float) else factor)]
    return graph.node("Resize", [call["x"], None, np.array(scales, np.float32)], call.out.dtype, **options)


def _resize(node: Node, x: Tensor, region: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
    by_size = bool(sizes)
    given = sizes if by_size else scales
    factors = [g / n for g, n in zip(given, x.shape, strict=False)] if by_size else given
    form = _resize_form(node, factors, [int(n * s) for n, s in zip(x.shape, factors, strict=False)][2:])
    same = len(given) == x.ndim and given[:2] == (list(x.shape[:2]) if by_size else [1.0, 1.0])
    odd = form[1:2] == ("align_corners",) and not by_size and any(n * s % 1 for n, s in zip(x.shape, given, strict=False))
    known = [key for key, value in _RESIZES.items() if value == form] if x.ndim in (3, 4) else []
    if not known or not same or odd or node["antialias"] or node["axes"] is not None:
        what = "only nearest (asymmetric, floor) and linear resizing of images and signals is supported"
        raise node.fault(what, form=form, shape=x.shape)
    linear, align = known[0]
    target: dict[str, Any] = {"size": tuple(given[2:])} if by_size else {"scale_factor": tuple(given[2:])}
    return ag.interpolate(x, **target, mode=("linear" if x.ndim == 3 else "bilinear") if linear else "nearest", align_corners=align)


def _resize_form(node: Node, factors: Sequence[float], outs: Sequence[int]) -> tuple[str, str, str]:
    """Mode, coordinate transformation and rounding, with equal forms replaced by one of :data:`_RESIZES`."""
    mode, moved = node["mode"], node["coordinate_transformation_mode"]
    rounding = node["nearest_mode"] if mode == "nearest" else ""
    if (moved, rounding) == ("half_pixel", "round_prefer_floor") and all(s == int(s) and s >= 1 for s in factors):
        return mode, "asymmetric", "floor"  # whole factors repeat pixels
    if (mode, moved) == ("linear", "pytorch_half_pixel") and 1 not in outs:
        moved = "half_pixel"  # they differ for outputs of size 1
    return mode, moved, rounding


EXPORTS |= {f"{name}{axes}d": _export_conv for name in ("conv", "conv_transpose") for axes in (1, 2)}
EXPORTS |= {f"{name}{axes}d": _export_pool for name in ("max_pool", "avg_pool") for axes in (1, 2)}
EXPORTS["interpolate"] = _export_interpolate
IMPORTS |= {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda node, x: ag.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    "GlobalMaxPool": lambda node, x: ag.amax(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    "Resize": _resize,
}
