"""``torch.testing``: comparing tensors, numbers and containers of them in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.core.tensor import Tensor

__all__ = ["assert_close"]

_TOLERANCES = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
_DTYPES_OF_NUMBERS = {bool: "bool", int: "int64", float: "float64"}


def assert_close(
    actual: Any, expected: Any, *, allow_subclasses: bool = True, rtol: float | None = None, atol: float | None = None,
    equal_nan: bool = False, check_device: bool = True, check_dtype: bool = True, check_layout: bool = True, check_stride: bool = False,
    msg: str | Callable[[str], str] | None = None,
) -> None:  # fmt: skip
    """Raise ``AssertionError`` unless ``|actual - expected| <= atol + rtol * |expected|`` everywhere, and dtypes and devices agree.

    Sequences and mappings are compared item by item. Default tolerances are torch's and follow the dtypes; give both or none.

    >>> import netcl
    >>> netcl.testing.assert_close({"x": netcl.tensor([1.0, 2.0])}, {"x": netcl.tensor([1.0, 2.000001])})
    >>> try:
    ...     netcl.testing.assert_close(netcl.tensor(1.0), netcl.tensor(3.0))
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[2])
    Expected 3.0 but got 1.0.
    """
    if (rtol is None) != (atol is None):
        raise ValueError(message("assert_close", "rtol and atol must be given together, or none of them", rtol=rtol, atol=atol))
    for where, a, b in _leaf_pairs(actual, expected, ""):
        problem = _text_of_difference(a, b, rtol, atol, equal_nan, check_device, check_dtype)
        if problem:
            text = problem + (f"\n\nThe failure occurred for item {where}" if where else "")
            raise AssertionError(msg(text) if callable(msg) else msg or text)


def _leaf_pairs(a: Any, b: Any, where: str) -> list[tuple[str, Any, Any]]:
    """Return the leaves of both arguments in pairs, with their places; raises if the structures differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys: Sequence[Any] = list(a)
        same = set(a) == set(b)
    elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        keys, same = range(len(a)), len(a) == len(b)
    else:
        return [(where, a, b)]
    if not same:
        what = f"{sorted(map(str, a))} and {sorted(map(str, b))}" if isinstance(a, Mapping) else f"{len(a)} and {len(b)}"
        raise AssertionError(f"The {'keys of the mappings' if isinstance(a, Mapping) else 'length of the sequences'} mismatch: {what}")
    return [pair for key in keys for pair in _leaf_pairs(a[key], b[key], f"{where}[{key!r}]")]


def _text_of_difference(
    a: Any, b: Any, rtol: float | None, atol: float | None, equal_nan: bool, check_device: bool, check_dtype: bool
) -> str:
    """Return how two leaves differ; an empty text if they are close."""
    if a is None or b is None:
        return "" if a is b else f"None mismatch: {a} is not {b}"
    a, b = (x.item() if isinstance(x, np.generic) else x for x in (a, b))
    kinds = [
        Tensor if isinstance(x, Tensor) else np.ndarray if isinstance(x, np.ndarray) else type(x) in _DTYPES_OF_NUMBERS for x in (a, b)
    ]
    if kinds[0] != kinds[1] or not kinds[0]:
        what = "values must be two tensors, two arrays, two numbers or None"
        raise TypeError(message("assert_close", what, actual=type(a).__name__, expected=type(b).__name__))
    dtypes = [str(x.dtype) if hasattr(x, "dtype") else _DTYPES_OF_NUMBERS[type(x)] for x in (a, b)]
    if kinds[0] is Tensor and check_device and a.device != b.device:
        return f"The values for attribute 'device' do not match: {a.device} != {b.device}."
    left, right = (x.to_host() if isinstance(x, Tensor) else np.asarray(x) for x in (a, b))
    for name, x, y in (("shape", left.shape, right.shape), ("dtype", *dtypes)):
        if x != y and (check_dtype or name == "shape"):
            return f"The values for attribute '{name}' do not match: {x} != {y}."
    defaults = [_TOLERANCES.get(dtype, (0.0, 0.0)) for dtype in dtypes]
    rtol, atol = (max(pair[i] for pair in defaults) if given is None else given for i, given in enumerate((rtol, atol)))
    left, right = (np.asarray(x, np.longdouble) for x in (left, right))  # which holds every integer
    with np.errstate(all="ignore"):
        off = np.abs(left - right)
        close = (left == right) | (np.isfinite(off) & (off <= atol + rtol * np.abs(right)))
        close |= equal_nan & (left != left) & (right != right)
        differences = {"absolute": (off, atol), "relative": (off / np.abs(right), rtol)}
    if close.all():
        return ""
    title = f"{'Tensor-likes' if left.shape else 'Scalars'} are not {'equal' if rtol == atol == 0 else 'close'}!\n"
    if not left.shape:
        lines = [title, f"Expected {float(right)} but got {float(left)}."]
        lines += [f"{name.capitalize()} difference: {float(x)} (up to {allowed} allowed)" for name, (x, allowed) in differences.items()]
        return "\n".join(lines)
    lines = [title, f"Mismatched elements: {(~close).sum()} / {close.size} ({(~close).mean():.1%})"]
    for name, (values, allowed) in differences.items():
        worst = np.unravel_index(np.argmax(np.where(close, 0, values)), close.shape)
        lines.append(f"Greatest {name} difference: {float(values[worst])} at index {tuple(map(int, worst))} (up to {allowed} allowed)")
    return "\n".join(lines)
