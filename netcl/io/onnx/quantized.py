"""Quantized operators, and casts, including casts to types that are used only for storage.

Products and convolutions of 8-bit values are exact. If :func:`netcl.ops.integer.prefers_integers` is true, they use integer kernels.
Otherwise they are computed in float32, in parts whose sums float32 holds exactly, and the parts are added as int32.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.amp import autocast
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.library import NARROW, ONNX_TYPES, dtype_of, library
from netcl.io.onnx.table import OnnxNode
from netcl.io.onnx.windows import byte_windows, conv_parts
from netcl.ops.integer import prefers_integers

#: Terms whose sum float32 holds exactly: each is a product of two differences of 8-bit values.
_EXACT_TERMS = 2**24 // 255**2
_INT4_RANGES = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}


def cast_to(node: OnnxNode, x: Tensor, code: int) -> Any:
    """Convert ``x`` to an ONNX element type; values of a narrow type are rounded on the host and returned as an array."""
    if code not in NARROW:
        return ag.cast(x, dtype_of(code))
    onnx, kind, values = library(), library().helper.tensor_dtype_to_np_dtype(code), x.to_host()
    if kind.name == "float8_e8m0fnu":
        return onnx.numpy_helper.to_float8e8m0(values.astype(np.float32), bool(node["saturate"]), node["round_mode"] or "up").astype(kind)
    saturate = node["saturate"] in (None, 1) and kind.name.startswith("float8")
    with np.errstate(all="ignore"):
        return onnx.numpy_helper.saturate_cast(values, kind) if saturate else values.astype(kind)


def _code_of(node: OnnxNode, index: int, like: Tensor | None) -> int:
    """Return the element type of input ``index`` in the file or, if unknown, the type of ``like``; 0 if ``like`` is ``None``."""
    known = node.codes[index] if index < len(node.codes) else 0
    return 0 if like is None else known or ONNX_TYPES[like.dtype]


def _spread(node: OnnxNode, x: Tensor, values: Tensor) -> Tensor:
    """Return scales or zero points in a shape that broadcasts with ``x``: per tensor, per axis or per block."""
    axis = (1 if node["axis"] is None else node["axis"]) % max(x.ndim, 1)
    if node["block_size"]:
        return ag.narrow(ag.repeat_interleave(values, node["block_size"], axis), axis, 0, x.shape[axis])
    return ag.reshape(values, [-1 if i == axis else 1 for i in range(x.ndim)] if values.size != 1 else [])


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


def _centered(x: Tensor, zero: Tensor | None) -> Tensor:
    """Return quantized values minus their zero point, as float32."""
    return ag.cast(x, "float32") if zero is None else ag.sub(ag.cast(x, "float32"), ag.cast(zero, "float32"))


def _per_row(zero: Tensor | None, *shape: int) -> Tensor | None:
    """Return a vector of zero points reshaped to ``shape``; anything else is returned unchanged."""
    return zero if zero is None or zero.ndim != 1 or zero.size == 1 else ag.reshape(zero, shape)


@autocast(enabled=False)  # halves would round the sums
def _integer_matmul(a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    a_zero = _per_row(a_zero, -1, 1)
    if b.ndim == 2 and a.ndim > 1 and prefers_integers(a, b, a.size * b.shape[1]):
        return _integer_product(a, ag.transpose(b, 0, 1), a_zero, b_zero)
    a, b, terms = _centered(a, a_zero), _centered(b, b_zero), a.shape[-1]
    parts = [(start, min(_EXACT_TERMS, terms - start)) for start in range(0, max(terms, 1), _EXACT_TERMS)]
    cut = ((ag.narrow(a, a.ndim - 1, *part), ag.narrow(b, max(b.ndim - 2, 0), *part)) for part in parts)
    return reduce(ag.add, (ag.cast(ag.matmul(*pair), "int32") for pair in cut))


def _integer_product(a: Tensor, b: Tensor, p: Tensor | None, q: Tensor | None) -> Tensor:
    """Return the int32 product ``(a - p)(b - q)'``, computed as ``a b' - p sum(b) - q (sum(a) - K p)`` with rows of ``K`` elements."""
    product, p = ag.integer_dot(a, b), None if p is None else ag.cast(p, "int32")
    if p is not None:
        sums = ag.cast(ag.sum(b, axis=-1), "int32")
        product = ag.sub(product, ag.mul(p, sums if b.ndim == 2 else ag.unsqueeze(sums, -2)))
    if q is not None:
        sums = ag.cast(ag.sum(a, axis=-1, keepdims=True), "int32")
        product = ag.sub(product, ag.mul(sums if p is None else ag.sub(sums, ag.mul(p, b.shape[-1])), ag.cast(q, "int32")))
    return product


@autocast(enabled=False)
def _integer_conv(node: OnnxNode, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
    group = node["group"]
    if prefers_integer_conv(node, x, w):
        columns = byte_windows(node, x, w.shape[2:], x_zero)
        rows = ag.reshape(columns, (x.shape[0], group, -1, columns.shape[-1]))
        made = _integer_product(ag.reshape(w, (group, w.shape[0] // group, -1)), rows, _per_row(w_zero, group, -1, 1), x_zero)
        return ag.reshape(made, (x.shape[0], w.shape[0], *columns.shape[6 - x.ndim : 4]))
    x, w = _centered(x, x_zero), _centered(w, _per_row(w_zero, -1, *[1] * (w.ndim - 1)))
    return reduce(ag.add, (ag.cast(part, "int32") for part in conv_parts(node, x, w, _EXACT_TERMS)))


def prefers_integer_conv(node: OnnxNode, x: Tensor, w: Tensor, other: str = "exact") -> bool:
    """Whether this device runs a one- or two-dimensional convolution of quantized values on integers."""
    results = math.prod(x.shape[2:]) // math.prod(node["strides"] or [1])
    return x.ndim in (3, 4) and prefers_integers(x, w, x.shape[0] * results * w.size, other)


def _product_requantized(product: Tensor, scale: Tensor, y_scale: Tensor, zero: Tensor | None, code: int) -> Tensor:
    return _requantize(ag.mul(ag.cast(product, "float32"), ag.div(ag.cast(scale, "float32"), ag.cast(y_scale, "float32"))), zero, code)


def read_q_matmul(
    node: OnnxNode, a: Tensor, a_scale: Any, a_zero: Any, b: Tensor, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Tensor:
    if "float" in a.dtype or "float" in b.dtype:  # 8-bit floats, held as float32
        raise node.fault("operands must be integers; insert DequantizeLinear before a product of 8-bit floats", dtypes=(a.dtype, b.dtype))
    product = _integer_matmul(a, b, a_zero, b_zero)
    rows = ag.reshape(a_scale, (-1, 1)) if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    return _product_requantized(product, ag.mul(rows, b_scale), y_scale, y_zero, _code_of(node, 7, y_zero))


def read_q_conv(
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
    "QLinearConv": read_q_conv,
}
