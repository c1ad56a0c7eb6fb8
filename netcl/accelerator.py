"""Functions of ``torch.accelerator``, for OpenCL devices.

>>> from netcl import accelerator
>>> accelerator.is_available() == (accelerator.current_accelerator() is not None)
True
"""

from __future__ import annotations

from typing import Any

from netcl.core import device as core

__all__ = ["current_accelerator", "device_count", "is_available", "synchronize"]


def is_available() -> bool:
    """Whether the default device is an OpenCL device, not the NumPy backend."""
    return core.require("auto").backend == "cl"


def current_accelerator(check_available: bool = False) -> core.device | None:
    """Return the default device; ``None`` if it is the NumPy backend."""
    return core.device("auto") if is_available() else None


def device_count() -> int:
    """Return the number of OpenCL devices; 0 if the default device is the NumPy backend."""
    return len(core.manager.found()) if is_available() else 0


def synchronize(device: Any = None) -> None:
    """Wait until ``device``, by default every device, has finished its work."""
    core.synchronize(None if device is None else core.require(device))
