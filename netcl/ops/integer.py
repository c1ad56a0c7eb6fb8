"""Products of 8-bit integers, summed exactly in int32."""

from __future__ import annotations

import math

import numpy as np

from netcl.core.device import profile_of
from netcl.core.errors import ShapeError, message
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, op

__all__ = ["integer_dot", "prefers_integers"]

_BYTE_TYPES = {"int8": "char", "uint8": "uchar"}
_SIDE_SUMS = 4  # RM and RN of integer.cl


def prefers_integers(a: Tensor, b: Tensor) -> bool:
    """Whether products of quantized values run as :func:`integer_dot` on this device.

    They do for 8-bit dtypes if ``selector.register("integer_dot", condition, "dot")`` selects it. No device does by default.
    """
    if a.array is not None or {a.dtype, b.dtype} - _BYTE_TYPES.keys():
        return False
    return get_kernel_selector().select("integer_dot", (a.shape, b.shape), profile_of(a.queue)) == "dot"


def _integer_dot_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.matmul(a.astype(np.int64), b.astype(np.int64).T).astype(np.int32)


@op(
    vjp=None,
    ref=_integer_dot_numpy,
    samples=[
        S((1, 1), (1, 1), dtypes="int8", low=-128, high=128),
        S((3, 5), (2, 5), dtypes=("uint8", "int8"), low=(0, -128), high=(256, 128)),
        S((2, 9, 33), (17, 33), dtypes=("int8", "uint8"), low=(-128, 0), high=(128, 256)),
        S((5, 600), (6, 600), dtypes="uint8", low=250, high=256),
        S((0, 4), (3, 4), dtypes="int8", low=-128, high=128),
        S((2, 0), (3, 0), dtypes="int8", low=-128, high=128),
    ],
    errors=[(S((3, 5), (2, 4), dtypes="int8"), r"\[integer_dot\] a must be \(\.\.\., K\) and b \(N, K\); a\.shape=\(3, 5\)")],
)
def integer_dot(a: Tensor, b: Tensor) -> Tensor:
    """``a b'`` over the last axis of int8 or uint8 tensors, exact in int32; b is a matrix of N rows. No gradient."""
    a, b = launch.as_tensors("integer_dot", a, b)
    for name, x in (("a", a), ("b", b)):
        launch.check_dtype("integer_dot", x, tuple(_BYTE_TYPES), name)
    if b.ndim != 2 or not a.shape or a.shape[-1] != b.shape[1]:
        raise ShapeError(message("integer_dot", "a must be (..., K) and b (N, K)", **{"a.shape": a.shape, "b.shape": b.shape}))
    if a.array is not None:
        return launch.run_cpu(_integer_dot_numpy, a, b, dtype="int32")
    out = Tensor.empty((*a.shape[:-1], b.shape[0]), "int32", queue=a.queue)
    if out.size:
        types = {
            f"{name}{end}": f"{_BYTE_TYPES[x.dtype]}{text}" for name, x in (("A", a), ("B", b)) for end, text in (("_T", ""), ("4", "4"))
        }
        rows, columns = math.prod(a.shape[:-1]), b.shape[0]
        kernel = launch.kernel(a.queue, __file__, "integer.cl", "integer_dot", defines=types)
        kernel(a.queue, (-(-columns // _SIDE_SUMS), -(-rows // _SIDE_SUMS)), None, a, b, out, rows, columns, b.shape[1])
    return out
