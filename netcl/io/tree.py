"""Conversion of nested state, such as the result of a ``state_dict()``, to JSON and arrays, and back.

A state consists of dictionaries, lists, tuples, numbers, strings, ``None``, arrays and tensors. Arrays and tensors become entries of
a file, and the JSON refers to them by name. The name of an entry is its path in the state if that is a valid name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.io.archive import FileError, bad_name, refusal
from netcl.io.packages import optional_module

_NATIVE = "biufc"


def bits(array: np.ndarray) -> tuple[np.ndarray, str]:
    """Return an array in a form that NPY can store, and the name of its dtype: bfloat16 is stored as uint16."""
    name = array.dtype.name
    return (array.view(np.uint16) if name == "bfloat16" else array), name


def host_bits(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor in the form that files store: bfloat16 as uint16."""
    return dtypes.encode(tensor.to_host(), dtypes.DTYPES[tensor.dtype])


def from_bits(array: np.ndarray, name: str) -> np.ndarray:
    """Restore the array that :func:`bits` converted."""
    return array.view(bfloat16()) if name == "bfloat16" else array


def bfloat16() -> np.dtype:
    """Return NumPy's dtype of bfloat16; raises ``ImportError`` without ``ml_dtypes``."""
    return np.dtype(optional_module("ml_dtypes", "bfloat16", "ml_dtypes is required for bfloat16 arrays").bfloat16)


def tensor_of(array: np.ndarray, name: str, queue: Any = None) -> Tensor:
    """Return stored values as a tensor on a queue, or on the active device."""
    values = dtypes.decode(array, dtypes.lookup(name))
    return Tensor.from_host(values, dtype=name) if queue is None else Tensor.from_host(queue, values, name)


def pack(value: Any, prefix: str = "", op: str = "save") -> tuple[Any, dict[str, np.ndarray]]:
    """Return ``value`` as JSON, and the arrays that the JSON refers to by name.

    >>> pack({"step": 3, "m": np.zeros(2)}, "adam")
    ({'step': 3, 'm': {'$array': 'adam.m', 'dtype': 'float64'}}, {'adam.m': array([0., 0.])})
    """
    arrays: dict[str, np.ndarray] = {}

    def leaf(tag: str, stored: np.ndarray, dtype: str, where: str) -> dict[str, str]:
        numbered = (f"{prefix or 'array'}.{i}" for i in itertools.count(len(arrays)))
        name = next(name for name in itertools.chain([where] if not bad_name(where) else [], numbered) if name not in arrays)
        arrays[name] = stored
        return {tag: name, "dtype": dtype}

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return leaf("$tensor", host_bits(value), value.dtype, where)
        if isinstance(value, np.ndarray):
            stored, dtype = bits(value)
            if stored.dtype.kind not in _NATIVE:
                raise refusal(op, f"an array must hold numbers, got dtype {dtype}", "convert it to numbers", at=where)
            return leaf("$array", stored, dtype, where)
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: walk(item, _joined_path(where, key)) for key, item in value.items()}
            return {"$pairs": [[walk(key, where), walk(item, _joined_path(where, key))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [walk(item, _joined_path(where, i)) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        return _packed_plain(value, where, op)

    try:
        return walk(value, prefix), arrays
    except RecursionError:
        raise refusal(op, "the state must not be nested too deeply or contain itself", at=prefix) from None


def _joined_path(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _packed_plain(value: Any, where: str, op: str) -> Any:
    if isinstance(value, np.generic):
        if value.dtype.kind not in _NATIVE or value.dtype.kind == "c":
            raise refusal(op, f"a {value.dtype} scalar cannot be saved", "convert it to an int, a float or a string", at=where)
        return {"$number": _packed_plain(value.item(), where, op), "dtype": value.dtype.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    what = f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved"
    raise refusal(op, what, "convert it to dictionaries, lists, tuples, numbers, strings, None, arrays or tensors", at=where)


def unpack(value: Any, arrays: Mapping[str, np.ndarray], op: str = "load", tensor: Callable[[np.ndarray, str], Any] = tensor_of) -> Any:
    """Restore the value that :func:`pack` converted; ``tensor(stored, dtype)`` creates each tensor."""

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        return _TAKEN[tag](value, walk) if tag in _TAKEN else {key: walk(item) for key, item in value.items()}

    def array(value: dict[str, Any], walk: Any) -> Any:
        stored, name = arrays[value[next(iter(value))]], value["dtype"]
        if (stored.dtype.name != name) and not (name == "bfloat16" and stored.dtype == np.uint16):
            raise ValueError(f"an array declared as {name} must have that dtype, got {stored.dtype}")
        return from_bits(stored, name) if "$array" in value else tensor(stored, name)

    _TAKEN: dict[str, Callable[..., Any]] = {**_PLAIN_READERS, "$array": array, "$tensor": array}
    try:
        return walk(value)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as fault:
        if isinstance(fault, FileError):
            raise
        raise refusal(op, "the state of the file must have the form netcl writes", reason=f"{type(fault).__name__}: {fault}") from fault


def _numpy_number(value: dict[str, Any], walk: Callable[[Any], Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biuf":  # a void of NumPy takes as many bytes as its number says
        raise ValueError(f"a number must have a numeric dtype, got {dtype}")
    return dtype.type(walk(value["$number"]))


_PLAIN_READERS: dict[str, Callable[..., Any]] = {
    "$number": _numpy_number,
    "$float": lambda value, walk: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value["$float"]],
    "$tuple": lambda value, walk: tuple(walk(item) for item in value["$tuple"]),
    "$pairs": lambda value, walk: {walk(key): walk(item) for key, item in value["$pairs"]},
}
