"""The optional ``onnx`` package: its schemas, and the dtype names of ONNX and netcl."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from netcl.io.archive import refusal
from netcl.io.packages import optional_module

#: The opset of exported models: the first that has every norm and takes the axes of reductions as inputs.
OPSET = 18
IR_VERSION = 9
ONNX_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11,
    "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip
_TYPE_NAMES = {code: name for name, code in ONNX_TYPES.items()}
#: Types that are storage only: ONNX's number, the name in ``ml_dtypes``, and the dtype of the tensor that holds their values.
NARROW = {
    17: ("float8_e4m3fn", "float32"), 18: ("float8_e4m3fnuz", "float32"), 19: ("float8_e5m2", "float32"),
    20: ("float8_e5m2fnuz", "float32"), 21: ("uint4", "uint8"), 22: ("int4", "int8"), 23: ("float4_e2m1fn", "float32"),
    24: ("float8_e8m0fnu", "float32"), 25: ("uint2", "uint8"), 26: ("int2", "int8"),
}  # fmt: skip
_HELD_AS = dict(NARROW.values())


def library() -> Any:
    """Return the package ``onnx``; raises ``ImportError`` with the install command if it is missing."""
    return optional_module("onnx", "onnx")


class Formal(NamedTuple):
    """An input or output in the definition of an operator; inputs and outputs with the same ``variable`` have the same type."""

    name: str
    variable: str
    types: frozenset[str]


class Schema(NamedTuple):
    """ONNX's definition of an operator: its inputs, its outputs and the defaults of its attributes."""

    inputs: list[Formal]
    outputs: list[Formal]
    defaults: dict[str, Any]


@cache
def schema(kind: str, opset: int) -> Schema:
    """Return the definition of an operator in an opset; ``kind`` is ``Name``, or ``domain::Name`` outside the standard domain."""
    found = definition(kind, opset)
    inputs, outputs = ([Formal(x.name.lower(), x.type_str, frozenset(x.types)) for x in side] for side in (found.inputs, found.outputs))
    usual = {name: entry.default_value for name, entry in found.attributes.items()}
    return Schema(inputs, outputs, {name: attribute(value) for name, value in usual.items() if value.name})


def definition(kind: str, opset: int) -> Any:
    """Return the ``OpSchema`` of an operator; ``kind`` is as for :func:`schema`."""
    domain, _, name = kind.rpartition("::")
    return library().defs.get_schema(name, opset, domain)


def attribute(entry: Any) -> Any:
    """Return the value of an attribute as a Python value or an array."""
    value = library().helper.get_attribute_value(entry)
    if isinstance(value, library().TensorProto):
        return library().numpy_helper.to_array(value)
    if isinstance(value, list):
        return [item.decode("utf-8") if isinstance(item, bytes) else item for item in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value


def dtype_of(code: int) -> str:
    """Return the dtype of an ONNX element type; narrow types are held in a wider dtype, other types raise."""
    if code in _TYPE_NAMES:
        return _TYPE_NAMES[code]
    if code in NARROW:
        return NARROW[code][1]
    names = {value: name for name, value in library().TensorProto.DataType.items()}
    raise refusal("import_onnx", "the element type must be one that tensors support", type=names.get(code, code))


def numbers(array: Any) -> np.ndarray:
    """Return an array; narrow ONNX types, which tensors do not support, are cast to a wider dtype."""
    return array.astype(_HELD_AS[array.dtype.name]) if array.dtype.name in _HELD_AS else array
