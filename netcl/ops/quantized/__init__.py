"""Products with weights that stay packed in device memory, in the block types of GGUF.

:mod:`netcl.ops.quantized.formats` has the block types, :mod:`netcl.ops.quantized.layout` the order in which devices hold them,
:mod:`netcl.ops.quantized.plans` the launches.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch
from netcl.engine.registry import S, op
from netcl.ops.quantized import plans
from netcl.ops.quantized.formats import dequantize, kind_of, quantize
from netcl.ops.quantized.layout import device_bytes, pack_strips, unpack_strips

__all__ = ["quantized_linear", "quantized_linear_grad", "quantized_rows"]

_ACTIVATION_FORMS = ("auto", "float", "int8")


def packed_problem(op: str, x: Tensor, weight: Tensor, kind: str, shape: tuple[int, int], activations: str = "auto") -> plans.Packed:
    """Check packed weights of ``shape`` (rows, columns) and return the product with x; raises if the bytes are not as many as it takes."""
    row = kind_of(kind, op)
    wanted = device_bytes(row, shape, op)
    if weight.dtype != "uint8" or weight.size != wanted:
        what = f"weight must be {wanted} bytes (uint8) for {shape[0]} rows and {shape[1]} columns"
        raise ShapeError(message(op, what, "make it with nn.QuantizedLinear", kind=row.name, size=weight.size, dtype=weight.dtype))
    p = plans.Packed(row, *shape, math.prod(x.shape[:-1]), x.dtype, activations)
    if activations not in _ACTIVATION_FORMS:
        raise ValueError(message(op, f"activations must be one of {', '.join(_ACTIVATION_FORMS)}", activations=repr(activations)))
    if activations == "int8" and not p.coded:
        raise ValueError(message(op, "int8 activations require a kind with integer codes", 'use activations="float"', kind=row.name))
    return p


def weight_values(weight: Any, kind: str, shape: tuple[int, int]) -> np.ndarray:
    return dequantize(unpack_strips(weight, kind, shape), kind, shape)


def _linear_cpu(x, weight, bias=None, *, kind, rows, activations="auto"):
    values = weight_values(weight, kind, (rows, x.shape[-1])).astype(x.dtype)
    out = np.matmul(plans.round_activations(x).astype(x.dtype) if activations == "int8" else x, values.T)
    return out if bias is None else out + bias


def _linear_vjp(F, g, x_shape, weight, bias_dtype, kind, needs):
    grad_x = F.quantized_linear_grad(g, weight, kind=kind, columns=x_shape[-1]) if needs[0] else None
    grad_bias = F.sum(F.reshape(g, (-1, g.shape[-1])), axis=0, widen=bias_dtype != g.dtype) if bias_dtype and needs[2] else None
    return grad_x, None, grad_bias


def packed_weight(rows: int, columns: int, kind: str) -> np.ndarray:
    """Return random packed weights for samples."""
    values = np.random.default_rng(rows).uniform(-1, 1, (rows, columns)).astype(np.float32)
    return pack_strips(quantize(values, kind), kind, (rows, columns))


def _packed_sample(x: tuple[int, ...], rows: int, kind: str, biased: bool = False, **more: Any) -> Any:
    weight = partial(packed_weight, rows, x[-1], kind)
    return S(x, weight, (rows,) if biased else None, kind=kind, rows=rows, **{"activations": "float", **more})


@op(
    vjp=_linear_vjp,
    ref=_linear_cpu,
    amp="half",
    bias_stays=True,
    samples=[
        _packed_sample((3, 64), 5, "Q4_0", True), _packed_sample((2, 3, 64), 33, "Q8_0"), _packed_sample((32,), 18, "F16", True),
        _packed_sample((1, 256), 16, "Q4_K"), _packed_sample((18, 256), 7, "Q6_K", True), _packed_sample((0, 32), 7, "Q4_0"),
    ],
    errors=[
        (_packed_sample((2, 32), 4, "Q4_0", activations="int4"), r"\[quantized_linear\] activations must be one of auto, float, int8"),
        (_packed_sample((2, 32), 4, "F16", activations="int8"), r"int8 activations require a kind with integer codes; kind=F16"),
        (S((2, 32), np.zeros(9, np.uint8), kind="Q4_0", rows=4),
         r"\[quantized_linear\] weight must be 288 bytes \(uint8\) for 4 rows and 32 columns; kind=Q4_0, size=9"),
        (S((2, 40), np.zeros(9, np.uint8), kind="Q4_0", rows=4), r"\[quantized_linear\] the columns of Q4_0 must be a multiple of 32"),
        (S((2, 32), np.zeros(9, np.uint8), kind="Q4", rows=4), r"\[quantized_linear\] kind must be one of F32, F16, .*; kind='Q4'"),
    ],
)  # fmt: skip
def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str, rows: int, activations: str = "auto") -> Tensor:
    """Compute ``x w' + bias`` with packed weights: ``weight`` holds the bytes of ``rows`` x ``x.shape[-1]`` weights of a GGUF ``kind``.

    :class:`netcl.nn.QuantizedLinear` packs weights. ``activations`` selects the arithmetic. ``float`` leaves x unchanged and sums in
    float32 (float64 for float64). ``int8`` rounds every 32 neighbors of x to int8 with one scale, as in llama.cpp; OpenCL devices
    raise for float64. ``auto`` selects ``int8`` on CPUs with instructions for it, if kind and dtype allow it. On ARM CPUs with arithmetic
    in float16, ``auto`` rounds one token for weights of F16 to 11 bits, with a power of two for every 32 neighbors, and sums every four
    products in float16. Otherwise ``auto`` is ``float``. Gradients with respect to x and bias are computed in floats. Weights have none.
    """
    x, weight, bias = launch.as_tensors("quantized_linear", x, weight, bias)
    launch.check_dtype("quantized_linear", x)
    p = packed_problem("quantized_linear", x, weight, kind, (rows, x.shape[-1] if x.shape else 1), activations)
    if bias is not None and bias.shape != (rows,):
        raise ShapeError(message("quantized_linear", f"bias must have shape ({rows},)", **{"bias.shape": bias.shape}))
    if x.array is not None:
        return launch.run_cpu(_linear_cpu, x, weight, bias, kind=kind, rows=rows, activations=activations)
    if activations == "int8" and x.dtype == "float64":
        what, remedy = "int8 activations require x of float32, float16 or bfloat16", 'use x.float() or activations="float"'
        raise DtypeError(message("quantized_linear", what, remedy, dtype=x.dtype))
    if activations == "int8" and not plans.has_dots(x.queue, p.kind):
        what, remedy = "int8 activations require a CPU with dot products of int8", 'use activations="auto"'
        raise DeviceError(message("quantized_linear", what, remedy, device=x.device.device_name))
    out = Tensor.empty((*x.shape[:-1], rows), x.dtype, queue=x.queue)
    if out.size:
        operands = plans.PackedOperands(with_shape(x, (p.tokens, p.columns)), weight, bias, with_shape(out, (p.tokens, rows)))
        plans.run_packed(x.queue, p, operands)
    return out


def _linear_grad_cpu(grad, weight, kind, columns):
    return np.matmul(grad, weight_values(weight, kind, (grad.shape[-1], columns)).astype(grad.dtype))


_WEIGHT = partial(packed_weight, 20, 64, "Q4_0")


@op(
    vjp=lambda F, g, weight, grad_shape, kind: (F.quantized_linear(g, weight, kind=kind, rows=grad_shape[-1], activations="float"), None),
    ref=_linear_grad_cpu,
    samples=[S((3, 20), _WEIGHT, kind="Q4_0", columns=64), S((2, 2, 20), _WEIGHT, kind="Q4_0", columns=64)],
)  # fmt: skip
def quantized_linear_grad(grad: Tensor, weight: Tensor, *, kind: str, columns: int) -> Tensor:
    """The gradient of :func:`quantized_linear` with respect to x: ``grad w``. Weights are unpacked in pieces."""
    grad, weight = launch.as_tensors("quantized_linear_grad", grad, weight)
    launch.check_dtype("quantized_linear_grad", grad, name="grad")
    p = packed_problem("quantized_linear_grad", grad, weight, kind, (grad.shape[-1], columns))
    if grad.array is not None:
        return launch.run_cpu(_linear_grad_cpu, grad, weight, kind=kind, columns=columns)
    shape = (*grad.shape[:-1], columns)
    if not grad.size:
        return Tensor.zeros(shape, grad.dtype, queue=grad.queue)
    return with_shape(plans.gradient(grad.queue, p, with_shape(grad, (p.tokens, p.rows)), weight), shape)


def _rows_cpu(weight, index, kind, shape):
    values = weight_values(weight, kind, shape)
    return values if index is None else values[index]


@op(
    vjp=None,
    ref=lambda weight, index=None, *, kind, shape: _rows_cpu(weight, index, kind, shape),
    samples=[
        S(_WEIGHT, kind="Q4_0", shape=(20, 64)), S(_WEIGHT, np.array([[3, 19, 0]]), kind="Q4_0", shape=(20, 64)),
        S(partial(packed_weight, 18, 256, "Q4_K"), kind="Q4_K", shape=(18, 256)),
    ],
)  # fmt: skip
def quantized_rows(weight: Tensor, index: Tensor | None = None, *, kind: str, shape: tuple[int, int], dtype: str = "float32") -> Tensor:
    r"""Unpack all rows of weights, or rows by ``index`` as (\*index.shape, columns). On devices, a bad index gives NaN. No gradient."""
    weight, index = launch.as_tensors("quantized_rows", weight, index)
    p = packed_problem("quantized_rows", weight, weight, kind, shape)
    if index is not None:
        launch.check_dtype("quantized_rows", index, launch.INTEGERS, "index")
    if weight.array is not None:
        return launch.run_cpu(_rows_cpu, weight, index, kind=kind, shape=tuple(shape), dtype=dtype)
    if index is None:
        return plans.unpack_rows(weight.queue, p, weight, dtype, 0, p.rows)
    if not index.size:
        return Tensor.empty((*index.shape, p.columns), dtype, queue=weight.queue)
    return with_shape(plans.unpack_rows(weight.queue, p, weight, dtype, 0, index.size, index), (*index.shape, p.columns))
