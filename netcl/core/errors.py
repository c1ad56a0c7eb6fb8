"""Every error netcl raises on purpose, and the one form its message takes.

``[op] what is wrong; name=value, name=value; remedy``
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any


def message(op: str, what: str, remedy: str = "", /, **values: object) -> str:
    """Build an error text in the house's form.

    >>> message("matmul", "a has 5 columns and b has 4 rows", a=(3, 5), b=(4, 2))
    '[matmul] a has 5 columns and b has 4 rows; a=(3, 5), b=(4, 2)'
    """
    parts = [f"[{op}] {what}", ", ".join(f"{name}={value}" for name, value in values.items()), remedy]
    return "; ".join(part for part in parts if part)


def some(names: Sequence[str], most: int = 8) -> str:
    """Names for an error, the first few of many.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_probability(op: str, name: str, value: Any) -> None:
    """``ValueError`` unless ``value`` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(message(op, f"{name} must be a number from 0 to 1", **{name: repr(value)}))


class ShapeError(ValueError):
    """Shapes, axes or sizes that do not fit together."""


class DtypeError(TypeError):
    """A dtype that is unknown or that an op does not take."""


class DeviceError(RuntimeError):
    """No such device, tensors of different devices, or a device that cannot do what was asked."""


class OutOfMemoryError(MemoryError):
    """The device has no room left, or one allocation is larger than it allows."""


class KernelBuildError(RuntimeError):
    """OpenCL C that the driver refused; the text carries log, device and numbered source lines."""


class AutogradError(RuntimeError):
    """Gradients that cannot be right: what backward needs was changed in place."""


class EnvironmentVariableError(ValueError):
    """A NETCL_* variable holds something that is not one of its legal values."""
