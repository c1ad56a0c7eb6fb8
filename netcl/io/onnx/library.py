"""The optional ``onnx`` package: its schemas, and the names both formats have for dtypes."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import message
from netcl.io.archive import refusal

#: The opset of exported models: the first that has every norm and takes the axes of reductions as inputs.
OPSET = 18
IR_VERSION = 9
ONNX_TYPES = {
    "float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11, "bfloat16": 16,
}  # fmt: skip
_TYPE_NAMES = {code: name for name, code in ONNX_TYPES.items()}
#: Integer types that tensors do not have: ONNX's number, and the dtype that replaces them.
_WIDENED = {"int8": (3, "int32"), "uint16": (4, "int32"), "int16": (5, "int32"), "uint32": (12, "int64"), "uint64": (13, "int64")}


def library() -> Any:
    """The package, or an ImportError that says how to get it."""
    try:
        import onnx
    except ImportError:
        raise ImportError(message("onnx", "the package onnx is needed", "pip install onnx")) from None
    return onnx


class Formal(NamedTuple):
    """An input or output in the definition of an operator; ``variable`` is equal for those of one type."""

    name: str
    variable: str
    types: frozenset[str]


class Schema(NamedTuple):
    """ONNX's definition of an operator."""

    inputs: list[Formal]
    outputs: list[Formal]
    defaults: dict[str, Any]


@cache
def schema(kind: str, opset: int) -> Schema:
    """The definition of an operator in an opset."""
    found = library().defs.get_schema(kind, opset, "")
    inputs, outputs = ([Formal(x.name.lower(), x.type_str, frozenset(x.types)) for x in side] for side in (found.inputs, found.outputs))
    usual = {name: entry.default_value for name, entry in found.attributes.items()}
    return Schema(inputs, outputs, {name: attribute(value) for name, value in usual.items() if value.name})


def attribute(entry: Any) -> Any:
    """The value of an attribute in Python."""
    value = library().helper.get_attribute_value(entry)
    if isinstance(value, library().TensorProto):
        return library().numpy_helper.to_array(value)
    return value.decode("utf-8") if isinstance(value, bytes) else value


def dtype_of(code: int) -> str:
    """The dtype of ONNX's number. Integers that tensors do not have are widened; other types raise."""
    known = _TYPE_NAMES | dict(_WIDENED.values())
    if code in known:
        return known[code]
    name = library().TensorProto.DataType.Name(code)
    raise refusal("import_onnx", "the model has an element type that tensors do not support", type=name)


def numbers(array: Any) -> np.ndarray:
    """An array in a dtype that tensors can have."""
    return array.astype(_WIDENED[array.dtype.name][1]) if array.dtype.name in _WIDENED else array
