"""The exception classes of netcl and the common form of their messages.

``[op] what is wrong; name=value, name=value; remedy``
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any


def message(op: str, what: str, remedy: str = "", /, **values: object) -> str:
    """Build an error message of the form ``[op] what; name=value; remedy``.

    >>> message("matmul", "a has 5 columns and b has 4 rows", a=(3, 5), b=(4, 2))
    '[matmul] a has 5 columns and b has 4 rows; a=(3, 5), b=(4, 2)'
    """
    parts = [f"[{op}] {what}", ", ".join(f"{name}={value}" for name, value in values.items()), remedy]
    return "; ".join(part for part in parts if part)


def some(names: Sequence[str], most: int = 8) -> str:
    """Join names for an error message, shortened after ``most``.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "", most: int = 3) -> str:
    """Return the remedy for an unknown name: the nearest of the names in ``known``, or ``otherwise`` if none is near."""
    close = difflib.get_close_matches(str(name), [*known], most)
    return f"did you mean {', '.join(close)}?" if close else otherwise


def check_probability(op: str, name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(message(op, f"{name} must be a number from 0 to 1", **{name: repr(value)}))


def at_least(op: str, name: str, value: float, least: float = 0) -> float:
    """Return a number; raises ``ValueError`` unless it is at least ``least``."""
    if not value >= least:
        raise ValueError(message(op, f"{name} must be at least {least}", **{name: value}))
    return value


class ShapeError(ValueError, RuntimeError):
    """Raised when shapes, axes or sizes do not fit together."""


class DtypeError(TypeError):
    """Raised when a dtype is unknown or not supported by an op."""


class DeviceError(RuntimeError):
    """Raised when a device does not exist, tensors are on different devices, a device lacks a feature, or a driver call fails."""


class OutOfMemoryError(MemoryError, RuntimeError):
    """Raised when device memory is exhausted, or one allocation exceeds the device's limit."""


class KernelBuildError(RuntimeError):
    """Raised when a kernel is defined incorrectly or does not compile; a compiler error includes the log and numbered source lines."""


class AutogradError(RuntimeError):
    """Raised when gradients would be wrong or cannot be computed, for instance because a saved tensor was modified in place."""


class EnvironmentVariableError(ValueError):
    """Raised when a NETCL_* variable has an illegal value."""
