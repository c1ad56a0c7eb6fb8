"""Images ``(batch, channels, height, width)`` and signals ``(batch, channels, length)``, the inputs of ops over windows.

Signals become images of height 1, so that one-dimensional ops can use two-dimensional ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.ops.conv.geometry import frozen


def image(name: str, x: Any, allowed: Sequence[str] = launch.FLOATS, label: str = "x") -> Tensor:
    """Convert an argument to a tensor; raises unless it has the four axes of images and an allowed dtype."""
    (x,) = launch.as_tensors(name, x)
    if x.ndim != 4:
        raise ShapeError(message(name, f"{label} must have four dimensions: batch, channels, height, width", **{f"{label}.shape": x.shape}))
    launch.check_dtype(name, x, allowed, label)
    return x


def from_signal(F: Any, x: Any) -> Any:
    """Return a signal as an image of height 1."""
    return F.reshape(x, (*x.shape[:2], 1, x.shape[2]))


def to_signal(F: Any, y: Any) -> Any:
    """Return an image of height 1 as a signal."""
    return F.reshape(y, (*y.shape[:2], y.shape[3]))


def for_image(value: Any, high: int) -> Any:
    """Convert an option for signals to ``(high, value)`` for images; ``None`` and strings stay unchanged."""
    value = frozen(value)
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return value if value is None or isinstance(value, str) else (high, value)
