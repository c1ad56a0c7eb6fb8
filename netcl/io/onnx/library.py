"""The ``onnx`` package, which is optional, and the names both formats have for dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.io.archive import refusal

#: The set of operators that exported models use: the first that has every norm and takes the axes of reductions as inputs.
OPSET = 18
IR_VERSION = 9
_TYPES = {
    "float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11, "bfloat16": 16,
}  # fmt: skip
_NAMES = {code: name for name, code in _TYPES.items()}
#: Integers that tensors cannot have: ONNX's number, and what they become.
_WIDENED = {"int8": (3, "int32"), "uint16": (4, "int32"), "int16": (5, "int32"), "uint32": (12, "int64"), "uint64": (13, "int64")}


def library() -> Any:
    """The package, or an ImportError that says how to get it."""
    try:
        import onnx
    except ImportError:
        raise ImportError(message("onnx", "the package onnx is needed", "pip install onnx")) from None
    return onnx


def type_of(dtype: str) -> int:
    """ONNX's number of a dtype."""
    return _TYPES[dtype]


def dtype_of(code: int, op: str = "import_onnx") -> str:
    """The dtype of ONNX's number; those that tensors cannot have are widened or refused."""
    known = _NAMES | dict(_WIDENED.values())
    if code in known:
        return known[code]
    raise refusal(op, "the model uses a type of elements that tensors cannot have", type=library().TensorProto.DataType.Name(code))


def numbers(array: Any) -> np.ndarray:
    """An array in a dtype that tensors can have."""
    return array.astype(_WIDENED[array.dtype.name][1]) if array.dtype.name in _WIDENED else array
