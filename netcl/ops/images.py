"""Images ``(batch, channels, height, width)`` and signals ``(batch, channels, length)``, the inputs of ops over windows.

Signals become images of height 1, so that one-dimensional ops can use two-dimensional ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def run_lines(cl_file: str, kernel: str, defines: Mapping[str, str], result: Tensor, *args: Any) -> None:
    """Launch a kernel of images.cl and ``cl_file`` that fills ``result``. A work-item computes a line on CPUs, an element on GPUs.

    Operands X and Y have the dtype of ``result``, I is int32. Arguments of the kernel: ``args``, and the elements of a work-item.
    """
    if not result.size:
        return
    queue, (*lines, across) = result.queue, result.shape
    span = across if launch.on_cpu_device(queue) else 1
    operands = {"X": result.dtype, "Y": result.dtype, "I": "int32"}
    built = launch.kernel(queue, __file__, f"images.cl {cl_file}", kernel, operands, defines)
    built(queue, (math.prod(lines) * -(-across // span),), (1 if span > 1 else launch.LOCAL_1D,), *args, span)


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
