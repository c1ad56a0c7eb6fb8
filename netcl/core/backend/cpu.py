"""The NumPy backend: used where there is no OpenCL device, or when ``"cpu"`` is selected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import DtypeError, ShapeError, message


class HostCopy:
    """A copy to the host that may still be running. ``wait()`` returns the array; ``array, event = copy`` unpacks the copy."""

    def __init__(self, array: np.ndarray, event: Any = None):
        self.array = array
        self.event = event

    def wait(self) -> np.ndarray:
        """Wait for the copy and return the array."""
        if self.event is not None:
            self.event.wait()
        return self.array

    def __iter__(self) -> Any:
        return iter((self.array, self.event))


def storage_of(array: Any, dtype: str | None, op: str = "from_host") -> tuple[np.ndarray, dtypes.DType]:
    """Return an array-like as a contiguous array in storage format, and its dtype; the array may share memory with the argument."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise DtypeError(message(op, "a masked array cannot be converted to a tensor", "pass array.filled(value)", shape=array.shape))
    given = array
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except ValueError as error:
            raise ShapeError(message(op, f"the values must form a rectangular array of numbers: {error}")) from None
    large = dtype is None and array is not given and array.dtype == np.float64 and np.abs(array).max(initial=0) >= 2**63
    if large and not any(isinstance(value, float | np.floating) for value in np.asarray(given, object).flat):
        # NumPy makes floats of integers that int64 does not hold.
        what = "integers must be representable in int64"
        raise DtypeError(message(op, what, "pass dtype=", lowest=array.min(), highest=array.max()))
    wanted = dtypes.lookup(dtype, op) if dtype is not None else dtypes.of_array(array, op)
    if array.dtype.kind not in "biuf":
        dtypes.of_array(array, op)  # raises for an unknown dtype, unless it is an ml_dtypes bfloat16
    elif array is not given and array.size and wanted.host.kind in "iu" and array.dtype != wanted.storage:
        limits, lowest, highest = np.iinfo(wanted.host), array.min().item(), array.max().item()
        if not (limits.min - 1 < lowest and highest < limits.max + 1):
            remedy = "choose a wider dtype; an array is wrapped around"
            raise DtypeError(message(op, f"numbers must be representable in {wanted.name}", remedy, lowest=lowest, highest=highest))
    return np.ascontiguousarray(dtypes.encode(array, wanted)).reshape(array.shape), wanted


def check_shared(array: Any, stored: np.ndarray) -> None:
    """Raise ``ShapeError`` unless ``stored`` is the writable memory of ``array`` itself, which ``share=True`` requires."""
    if stored.size and not (isinstance(array, np.ndarray) and np.may_share_memory(stored, array) and array.flags.writeable):
        what, flags = "share=True requires a contiguous, writable NumPy array of the tensor's dtype", getattr(array, "flags", None)
        seen = {name: getattr(flags, name, None) for name in ("c_contiguous", "writeable")} | {"dtype": getattr(array, "dtype", None)}
        raise ShapeError(message("from_host", what, "drop share=True to copy the values", array=type(array).__name__, **seen))


class CPUBackend:
    """Stores tensors as NumPy arrays.

    >>> be = CPUBackend()
    >>> be.from_shape((2, 2), dtype="float32").tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    name = "cpu"

    def from_host(self, array: Any, dtype: str | None = None, share: bool = False) -> np.ndarray:
        """Return the stored form of ``array``; it may share the caller's memory only if ``share``."""
        stored, _ = storage_of(array, dtype)
        return stored if share or not np.may_share_memory(stored, array) else stored.copy()

    def from_shape(self, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """Return an array of zeros."""
        return np.zeros(shape, dtypes.lookup(dtype, "from_shape").storage)

    def to_host(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return the values; for all dtypes but bfloat16, they share the memory of ``storage``."""
        return dtypes.decode(storage, dtypes.lookup(dtype)).reshape(shape)

    def to_host_async(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str) -> HostCopy:
        """Return the values as a :class:`HostCopy` that is already complete."""
        return HostCopy(self.to_host(storage, shape, dtype))

    def wait(self, pending: Any = None) -> None:
        """Do nothing: NumPy calls have finished when they return."""

    def reshape(self, storage: np.ndarray, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        """Return ``storage`` in another shape; a contiguous array is not copied."""
        del dtype
        if math.prod(shape) != storage.size:
            raise ShapeError(message("reshape", "the new shape must have as many elements as the tensor", size=storage.size, shape=shape))
        return storage.reshape(shape)
