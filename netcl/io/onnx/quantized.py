"""Quantized operators and casts to types that are storage only.

Products of quantized values are computed in float32, in parts whose sums float32 holds exactly, and added as int32; or, where
:func:`netcl.ops.integer.prefers_integers` says so, as products of integers. Both are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.library import NARROW, ONNX_TYPES, dtype_of, library
from netcl.io.onnx.table import OnnxNode
from netcl.io.onnx.windows import read_conv
from netcl.ops.integer import prefers_integers

#: Terms whose sum float32 holds exactly: each is a product of two differences of 8-bit values.
_EXACT_TERMS = 2**24 // 255**2
_INT4_RANGES = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}


def cast_to(node: OnnxNode, x: Tensor, code: int) -> Any:
    """Convert ``x`` to an ONNX element type; values of a narrow type are rounded on the host and returned as an array."""
    if code not in NARROW:
        return ag.cast(x, dtype_of(code))
    onnx, kind, values = library(), library().helper.tensor_dtype_to_np_dtype(code), x.to_host()
    if code == ONNX_E8M0:
        return onnx.numpy_helper.to_float8e8m0(values.astype(np.float32), bool(node["saturate"]), node["round_mode"] or "up").astype(kind)
    saturate = node["saturate"] in (None, 1) and kind.name.startswith("float8")
    with np.errstate(all="ignore"):
        return onnx.numpy_helper.saturate_cast(values, kind) if saturate else values.astype(kind)


ONNX_E8M0 = 24


def _code_of(node: OnnxNode, index: int, like: Tensor | None) -> int:
    """Return the element type of input ``index``: the one in the file, else that of ``like``; 0 if ``like`` is ``None``."""
    known = node.codes[index] if index < len(node.codes) else 0
    return 0 if like is None else known or ONNX_TYPES[like.dtype]


def _spread(node: OnnxNode, x: Tensor, values: Tensor) -> Tensor:
    """Return scales or zero points in a shape that broadcasts with ``x``: per tensor, per axis or per block."""
    axis = (1 if node["axis"] is None else node["axis"]) % max(x.ndim, 1)
    if node["block_size"]:
        return ag.narrow(ag.repeat_interleave(values, node["block_size"], axis), axis, 0, x.shape[axis])
    return ag.reshape(values, [-1 if i == axis else 1 for i in range(x.ndim)] if values.size > 1 else [])


def _quantize(node: OnnxNode, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Any:
    code = _code_of(node, 2, zero) or node["output_dtype"] or ONNX_TYPES["uint8"]
    precise = dtype_of(node["precision"]) if node["precision"] else "float64" if "float64" in (x.dtype, scale.dtype) else "float32"
    scaled = ag.div(ag.cast(x, precise), ag.cast(_spread(node, x, scale), precise))
    scaled = ag.cast(scaled, "float32")
    if DTYPES[dtype_of(code)].is_float:
        return cast_to(node, scaled if zero is None else ag.add(scaled, ag.cast(_spread(node, x, zero), "float32")), code)
    return _requantize(scaled, None if zero is None else _spread(node, x, zero), code)


def _requantize(x: Tensor, zero: Tensor | None, code: int) -> Tensor:
    """Return ``x`` rounded half to even, plus the zero point, clamped to the range of an integer type."""
    limits = np.iinfo(DTYPES[dtype_of(code)].storage)
    low, high = _INT4_RANGES.get(code, (int(limits.min), int(limits.max)))
    moved = ag.round(x) if zero is None else ag.add(ag.round(x), ag.cast(zero, x.dtype))
    return ag.cast(ag.clamp(moved, low, high), dtype_of(code))


def _dequantize(node: OnnxNode, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    dtype = dtype_of(node["output_dtype"]) if node["output_dtype"] else scale.dtype
    wide = "float64" if dtype == "float64" else "float32"
    values = ag.cast(x, wide)
    if zero is not None:
        values = ag.sub(values, ag.cast(_spread(node, x, zero), wide))
    return ag.cast(ag.mul(values, ag.cast(_spread(node, x, scale), wide)), dtype)


def _centered(x: Tensor, zero: Tensor | None, shape: Any = None) -> Tensor:
    """Return quantized values minus their zero point, which is reshaped to ``shape`` unless scalar, as float32."""
    values = ag.cast(x, "float32")
    return (
        values if zero is None else ag.sub(values, ag.cast(zero if shape is None or zero.size == 1 else ag.reshape(zero, shape), "float32"))
    )


def _integer_matmul(a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    if b.ndim == 2 and a.ndim > 1 and prefers_integers(a, b):
        return _integer_product(a, b, a_zero, b_zero)
    a, b = _centered(a, a_zero, None if a_zero is None or a_zero.ndim != 1 else (-1, 1)), _centered(b, b_zero)
    terms, total = a.shape[-1], None
    if terms == 0:
        return ag.cast(ag.matmul(a, b), "int32")
    for start in range(0, terms, _EXACT_TERMS):
        size = min(_EXACT_TERMS, terms - start)
        part = ag.matmul(ag.narrow(a, a.ndim - 1, start, size), ag.narrow(b, max(b.ndim - 2, 0), start, size))
        part = ag.cast(part, "int32")
        total = part if total is None else ag.add(total, part)
    assert total is not None
    return total


def _integer_product(a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    """Return the int32 product of 8-bit matrices with zero points p and q: ``(a - p)(b - q) = a b - p sum(b) - q (sum(a) - K p)``."""
    product = ag.integer_dot(a, ag.transpose(b, 0, 1))
    row = None if a_zero is None else ag.cast(ag.reshape(a_zero, (-1, 1)) if a_zero.ndim == 1 else a_zero, "int32")
    if row is not None:
        product = ag.sub(product, ag.mul(row, ag.sum(ag.cast(b, "int32"), axis=0)))
    if b_zero is not None:
        sums = ag.sum(ag.cast(a, "int32"), axis=-1, keepdims=True)
        sums = sums if row is None else ag.sub(sums, ag.mul(row, b.shape[0]))
        product = ag.sub(product, ag.mul(sums, ag.cast(b_zero, "int32")))
    return ag.cast(product, "int32")


def _integer_conv(node: OnnxNode, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
    x, w = _centered(x, x_zero), _centered(w, w_zero, (-1, *[1] * (w.ndim - 1)))
    taps = math.prod(w.shape[2:])
    if w.shape[1] * taps <= _EXACT_TERMS:
        return ag.cast(read_conv(node, x, w), "int32")
    if node["group"] != 1 or taps > _EXACT_TERMS:
        return ag.cast(read_conv(node, ag.cast(x, "float64"), ag.cast(w, "float64")), "int32")
    total, step = None, _EXACT_TERMS // taps
    for start in range(0, w.shape[1], step):
        size = min(step, w.shape[1] - start)
        part = ag.cast(read_conv(node, ag.narrow(x, 1, start, size), ag.narrow(w, 1, start, size)), "int32")
        total = part if total is None else ag.add(total, part)
    assert total is not None
    return total


def _product_requantized(product: Tensor, scale: Tensor, y_scale: Tensor, zero: Tensor | None, code: int) -> Tensor:
    return _requantize(ag.mul(ag.cast(product, "float32"), ag.div(ag.cast(scale, "float32"), ag.cast(y_scale, "float32"))), zero, code)


def read_q_matmul(
    node: OnnxNode, a: Tensor, a_scale: Any, a_zero: Any, b: Tensor, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Tensor:
    product = _integer_matmul(a, b, a_zero, b_zero)
    rows = ag.reshape(a_scale, (-1, 1)) if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    return _product_requantized(product, ag.mul(rows, b_scale), y_scale, y_zero, _code_of(node, 7, y_zero))


def _q_conv(
    node: OnnxNode, x: Tensor, x_scale: Any, x_zero: Any, w: Tensor, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any, bias: Any = None
) -> Tensor:
    product, shape = _integer_conv(node, x, w, x_zero, w_zero), (-1, *[1] * (w.ndim - 2))
    if bias is not None:
        product = ag.add(product, ag.reshape(bias, shape))
    scale = ag.mul(x_scale, ag.reshape(w_scale, shape) if w_scale.size > 1 else w_scale)
    return _product_requantized(product, scale, y_scale, y_zero, _code_of(node, 7, y_zero))


def _bit_cast(node: OnnxNode, x: Tensor) -> np.ndarray:
    """Return the bits of ``x`` as an array of another type, on the host."""
    source = library().helper.tensor_dtype_to_np_dtype(_code_of(node, 0, x))
    values = x.to_host().astype(source)
    return values.view(library().helper.tensor_dtype_to_np_dtype(node["to"]))


IMPORTS |= {
    "Cast": lambda node, x: cast_to(node, x, node["to"]),
    "CastLike": lambda node, x, like: cast_to(node, x, _code_of(node, 1, like)),
    "BitCast": _bit_cast,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "MatMulInteger": lambda node, a, b, a_zero=None, b_zero=None: _integer_matmul(a, b, a_zero, b_zero),
    "ConvInteger": _integer_conv,
    "QLinearMatMul": read_q_matmul,
    "QLinearConv": _q_conv,
}
