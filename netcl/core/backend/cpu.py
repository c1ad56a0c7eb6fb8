"""The NumPy transport: used where there is no OpenCL device, or when ``"cpu"`` is asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import DtypeError, ShapeError, message


class HostCopy:
    """A copy to the host under way: ``wait()`` gives the array; ``array`` and ``event``, which it also unpacks to."""

    def __init__(self, array: np.ndarray, event: Any = None):
        self.array = array
        self.event = event

    def wait(self) -> np.ndarray:
        """The array, complete."""
        if self.event is not None:
            self.event.wait()
        return self.array

    def __iter__(self) -> Any:
        return iter((self.array, self.event))


def storage_of(array: Any, dtype: str | None, op: str = "from_host") -> tuple[np.ndarray, dtypes.DType]:
    """Any array-like as contiguous stored bytes and their dtype; may still be the caller's memory."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise DtypeError(message(op, "masked arrays are not supported", "pass array.filled(value)", shape=array.shape))
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except ValueError as error:
            raise ShapeError(message(op, f"the values do not form an array: {error}")) from None
    wanted = dtypes.lookup(dtype, op) if dtype is not None else dtypes.of_array(array, op)
    if array.dtype.kind not in "biuf":
        dtypes.of_array(array, op)  # refuses it, unless it is an ml_dtypes bfloat16
    return np.ascontiguousarray(dtypes.encode(array, wanted)).reshape(array.shape), wanted


def check_shared(array: Any, stored: np.ndarray) -> None:
    """``ShapeError`` unless the stored form of an array is its own memory, and writable: what ``share=True`` promises."""
    if stored.size and not (isinstance(array, np.ndarray) and np.may_share_memory(stored, array) and array.flags.writeable):
        what = "share=True needs a contiguous, writable array of the tensor's dtype"
        raise ShapeError(message("from_host", what, "leave share out, which copies", shape=stored.shape, dtype=stored.dtype))


class CPUBackend:
    """Every method is a NumPy call.

    >>> be = CPUBackend()
    >>> be.from_shape((2, 2), dtype="float32").tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    name = "cpu"

    def from_host(self, array: Any, dtype: str | None = None, share: bool = False) -> np.ndarray:
        """The stored form of ``array``: a copy, unless ``share`` asks for the caller's own memory."""
        stored, _ = storage_of(array, dtype)
        return stored if share or not np.may_share_memory(stored, array) else stored.copy()

    def from_shape(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """Zeros."""
        return np.zeros(shape, dtypes.lookup(dtype, "from_shape").storage)

    def to_host(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The values; for all but bfloat16 this is the stored array itself."""
        return dtypes.decode(storage, dtypes.lookup(dtype)).reshape(shape)

    def to_host_async(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str) -> HostCopy:
        """The values, already there."""
        return HostCopy(self.to_host(storage, shape, dtype))

    def wait(self, pending: Any = None) -> None:
        """Nothing is ever pending."""

    def reshape(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """The same memory under another shape."""
        del dtype
        if math.prod(shape) != storage.size:
            raise ShapeError(message("reshape", "the sizes differ", size=storage.size, shape=shape))
        return storage.reshape(shape)
