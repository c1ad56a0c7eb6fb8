"""Import functions for arithmetic, normalization, attention, random numbers and signal transforms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.device import require
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.library import dtype_of
from netcl.io.onnx.table import STRUCTURED, OnnxNode


def _hardmax(node: OnnxNode, x: Tensor) -> Tensor:
    if not x.size:
        return x
    axis = node["axis"] % x.ndim
    flat = x if node.opset >= 13 else ag.reshape(x, [math.prod(part) for part in (x.shape[:axis], x.shape[axis:])])
    axis = axis if node.opset >= 13 else 1
    best = ag.argmax(flat, axis, keepdims=True)
    places = np.arange(flat.shape[axis]).reshape([-1 if i == axis else 1 for i in range(flat.ndim)])
    return ag.reshape(ag.cast(ag.eq(best, Tensor.from_host(x.queue, places)), x.dtype), x.shape)


def _cumulative_node(node: OnnxNode, x: Tensor, axis: Any) -> Tensor:
    """Run ``CumSum`` or ``CumProd``. For ``exclusive``, elements are shifted: subtracting each from its sum would cancel small ones."""
    if x.dtype == "bool":  # torch exports sums of bools, which it counts; the standard has none
        raise node.fault("the input must hold numbers", dtype=x.dtype)
    axis, (op, first) = int(np.asarray(axis).item()), (ag.cumsum, 0) if node.kind == "CumSum" else (ag.cumprod, 1)
    values = ag.flip(x, axis) if node["reverse"] else x
    if node["exclusive"]:
        start = Tensor.full([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], first, x.dtype, queue=x.queue)
        values = ag.narrow(ag.cat([start, values], axis), axis, 0, x.shape[axis])
    made = ag.cast(op(values, axis), x.dtype)
    return ag.flip(made, axis) if node["reverse"] else made


def _lp_normalization(node: OnnxNode, x: Tensor) -> Tensor:
    size = ag.norm(x, p=node["p"], axis=node["axis"], keepdims=True)
    return ag.where(ag.eq(size, 0), 0.0, ag.div(x, size))


def _layer_norm(node: OnnxNode, x: Tensor, *scales: Tensor | None) -> Any:
    """Run ``LayerNormalization`` with its weight and bias expanded to the normalized axes: exporters may leave out leading ones."""
    shape = x.shape[node["axis"] % x.ndim :]
    return STRUCTURED["layer_norm"][0].read(node, x, *(t if t is None or t.shape == shape else ag.expand(t, shape) for t in scales))


def _local_response(node: OnnxNode, x: Tensor) -> Tensor:
    size, rest = node["size"], [0, 0] * (x.ndim - 2)
    padded = ag.pad(ag.square(x), [*rest, (size - 1) // 2, size // 2])
    total = ag.sum(ag.unfold(padded, 1, size, 1), -1)
    return ag.div(x, ag.pow(ag.add(ag.mul(total, node["alpha"] / size), node["bias"]), node["beta"]))


def _reduced_extreme(node: OnnxNode, x: Tensor, axes: Any = None) -> Any:
    """Reduce an empty tensor to the dtype's lowest (``ReduceMax``) or highest value; ``NotImplemented`` for other tensors."""
    if x.size or (not axes and node["noop_with_empty_axes"]):
        return NotImplemented
    values, largest = x.to_host(), node.kind == "ReduceMax"
    limits = None if values.dtype.kind in "fb" else np.iinfo(values.dtype)
    ends = (limits.min, limits.max) if limits else (False, True) if values.dtype.kind == "b" else (-math.inf, math.inf)
    function = np.max if largest else np.min
    return function(values, axis=tuple(axes) if axes else None, keepdims=bool(node["keepdims"]), initial=ends[0 if largest else 1])


def _batch_norm(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    """Run batch norm in training mode and return the updated running statistics too; ``NotImplemented`` in inference mode."""
    if not node["training_mode"]:
        return NotImplemented
    axes, shape = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
    now = [ag.mean(x, axes), ag.var(x, axes, correction=0)]
    after = [ag.add(ag.mul(old, node["momentum"]), ag.mul(new, 1 - node["momentum"])) for old, new in zip((mean, var), now, strict=True)]
    center, spread, weight, bias = (ag.reshape(t, shape) for t in (*now, weight, bias))
    out = ag.add(ag.mul(ag.div(ag.sub(x, center), ag.sqrt(ag.add(spread, node["epsilon"]))), weight), bias)
    return ag.cast(out, x.dtype), *(ag.cast(new, old.dtype) for new, old in zip(after, (mean, var), strict=True))


def _dropout(node: OnnxNode, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    share = 0.5 if ratio is None else float(np.asarray(ratio).item())
    if training and share:
        kept = ag.ge(_uniform(node, x.shape, x.queue), share)
        made = ag.cast(ag.mul(ag.mul(x, kept), 1 / (1 - share)), x.dtype)
    else:
        kept, made = None, x
    return made if len(node.outputs) == 1 else (made, Tensor.ones(x.shape, "bool", queue=x.queue) if kept is None else kept)


def _attention_node(node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *cache: Any) -> Any:
    """Compute attention with netcl's op; ``NotImplemented`` for caches, windows, softcaps and additional outputs."""
    known = {*node.given} <= {"is_causal", "scale", "q_num_heads", "kv_num_heads", "qk_matmul_output_mode"}
    if not known or any(x is not None for x in cache) or any(node.outputs[1:]):
        return NotImplemented
    heads, shared = (node["q_num_heads"], node["kv_num_heads"]) if q.ndim == 3 else (0, 0)
    if heads:
        q, k, v = (ag.transpose(ag.reshape(x, (*x.shape[:2], n, -1)), 1, 2) for x, n in ((q, heads), (k, shared), (v, shared)))
    made = ag.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(node["is_causal"]), scale=node["scale"])
    return ag.reshape(ag.transpose(made, 1, 2), (q.shape[0], q.shape[2], -1)) if heads else made


def _uniform(node: OnnxNode, shape: Any, queue: Any = None) -> Tensor:
    """Return uniform numbers in [0, 1), from the generator of the device, or from NumPy's if the node has a seed."""
    queue = require("cpu").queue if queue is None else queue
    if node["seed"] is None:
        return ag.rand(tuple(shape), queue=queue)
    return Tensor.from_host(queue, np.random.default_rng(int(node["seed"])).random(tuple(shape), np.float32))


def _random(node: OnnxNode, *like: Tensor) -> Tensor:
    shape = like[0].shape if like else node["shape"]
    dtype = dtype_of(node["dtype"]) if node["dtype"] else like[0].dtype if like else "float32"
    queue = like[0].queue if like else None
    if "Uniform" in node.kind:
        return ag.cast(ag.add(ag.mul(_uniform(node, shape, queue), node["high"] - node["low"]), node["low"]), dtype)
    radius = ag.sqrt(ag.mul(ag.log(ag.sub(1.0, _uniform(node, (2, *shape), queue)[0])), -2.0))
    angle = ag.mul(_uniform(node, (2, *shape), queue)[1], 2 * math.pi)
    return ag.cast(ag.add(ag.mul(ag.mul(radius, ag.cos(angle)), node["scale"]), node["mean"]), dtype)


def _multinomial(node: OnnxNode, x: Tensor) -> Tensor:
    """Draw classes by unnormalized log-probabilities, with the Gumbel-max trick."""
    noise = _uniform(node, (x.shape[0], node["sample_size"], x.shape[1]), x.queue)
    moved = ag.sub(ag.unsqueeze(x, 1), ag.log(ag.neg(ag.log(ag.clamp(noise, 1e-30, 1.0 - 1e-7)))))
    return ag.cast(ag.argmax(moved, -1), dtype_of(node["dtype"] or 6))


def _sized(x: Tensor, axis: int, n: int) -> Tensor:
    """Return ``x`` with an axis cut, or padded with zeros, to ``n`` elements."""
    if x.shape[axis] >= n:
        return ag.narrow(x, axis, 0, n)
    return ag.pad(x, [*[0, 0] * (x.ndim - 1 - axis), 0, n - x.shape[axis]])


def _dft(node: OnnxNode, x: Tensor, length: Tensor | None = None, axis: Any = None) -> Tensor:
    axis = (-2 if axis is None else int(np.asarray(axis).item())) % x.ndim
    n, inverse, half = None if length is None else int(length.to_host().item()), bool(node["inverse"]), bool(node["onesided"])
    if inverse and half:
        n = n or 2 * (x.shape[axis] - 1)
        return ag.unsqueeze(ag.fft_to_real(_sized(x, axis, n // 2 + 1), n, axis, 1 / n), -1)
    n = n or x.shape[axis]
    pairs = _sized(x if x.shape[-1] == 2 else ag.pad(x, [0, 1]), axis, n)
    made = ag.fft_pairs(pairs, (axis,), not inverse, 1 / n if inverse else 1.0)
    return ag.narrow(made, axis, 0, n // 2 + 1) if half else made


def _stft(node: OnnxNode, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None) -> Tensor:
    size = window.shape[0] if window is not None else int(length.to_host().item()) if length is not None else x.shape[1]
    pairs = x if x.ndim == 3 and x.shape[-1] == 2 else ag.pad(ag.reshape(x, (*x.shape[:2], 1)), [0, 1])
    frames = ag.unfold(pairs, 1, size, int(step.to_host().item()))  # (batch, frames, 2, size)
    frames = ag.permute(frames if window is None else ag.mul(frames, window), (0, 1, 3, 2))
    made = ag.fft_pairs(frames, (2,))
    return ag.narrow(made, 2, 0, size // 2 + 1) if node["onesided"] else made


def _mel_weights(node: OnnxNode, *given: Tensor) -> np.ndarray:
    bins, length, rate, low, high = (x.to_host().item() for x in given)
    ends = [2595 * math.log10(1 + edge / 700) for edge in (low, high)]
    mels = ends[0] + np.arange(bins + 2) * ((ends[1] - ends[0]) / (bins + 2))
    edges = ((length + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(int)
    out, j = np.zeros((length // 2 + 1, bins)), np.arange(length // 2 + 1)
    for i, (left, center, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        rise = (j - left) / (center - left) if center > left else np.where(j == center, 1.0, 0.0)
        fall = (right - j) / max(right - center, 1)
        out[:, i] = np.where((j >= left) & (j <= center), rise, np.where((j > center) & (j < right), fall, 0))
    return np.asarray(out, dtype_of(node["output_datatype"] or 1))


IMPORTS |= {
    "Attention": _attention_node,
    "BitShift": lambda node, a, b: (ag.bitwise_left_shift if node["direction"] == "LEFT" else ag.bitwise_right_shift)(a, b),
    "Hardmax": _hardmax,
    "CumSum": _cumulative_node,
    "CumProd": _cumulative_node,
    "LpNormalization": _lp_normalization,
    "LRN": _local_response,
    "LayerNormalization": _layer_norm,
    "Det": lambda node, x: ag.linalg_det(x),
    "EyeLike": lambda node, x: Tensor.from_host(
        x.queue, np.eye(x.shape[0], x.shape[1], node["k"]), dtype_of(node["dtype"]) if node["dtype"] else x.dtype
    ),
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "BatchNormalization": _batch_norm,
    "Dropout": _dropout,
    "RandomUniform": _random,
    "RandomUniformLike": _random,
    "RandomNormal": _random,
    "RandomNormalLike": _random,
    "Multinomial": _multinomial,
    "DFT": _dft,
    "STFT": _stft,
    "MelWeightMatrix": _mel_weights,
}
