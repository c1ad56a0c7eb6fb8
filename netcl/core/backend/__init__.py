"""Transports: what it means to hold bytes on a device. Two implementations of one protocol."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Backend(Protocol):
    """Storage of tensors: how values get in, how they come back, how a result is allocated."""

    name: str

    def from_host(self, array: Any, dtype: str | None = None) -> Any: ...

    def from_shape(self, shape: tuple[int, ...], dtype: str = "float32") -> Any: ...

    def to_host(self, storage: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray: ...

    def to_host_async(self, storage: Any, shape: tuple[int, ...], dtype: str) -> Any: ...

    def wait(self, pending: Any = None) -> None: ...

    def reshape(self, storage: Any, shape: tuple[int, ...], dtype: str = "float32") -> Any: ...
