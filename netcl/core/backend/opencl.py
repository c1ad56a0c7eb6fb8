"""OpenCL transfers over one queue: asynchronous, pinned and zero-copy.

By default, values for discrete devices are copied to page-locked staging memory, and the copy to the device is enqueued. On devices that
share the host's memory, the driver copies the values into memory that kernels use directly, unless ``use_pinned=True`` selects staging
memory. Kernels use the memory of the user's array only with ``share=True``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import env, memory, platforms
from netcl.core.backend import lifecycle
from netcl.core.backend.cpu import HostCopy, storage_of
from netcl.core.backend.lifecycle import interruptible_finish
from netcl.core.errors import DeviceError, ShapeError, message
from netcl.core.kernels import program
from netcl.core.queue_state import queue_state
from netcl.core.recording import active
from netcl.core.waiting_runs import WaitingRun, flush_waiting, run_later, waiting

__all__ = ["OpenCLBackend", "Transfer", "backend_of", "interruptible_finish"]

#: Called with the queue, what is copied ("to device", "to host", "on device", "fill"), its bytes, when it began (``time.perf_counter``) and
#: its event, or ``None`` if it is done. Filled by profilers.
transfer_listeners: list[Callable[[Any, str, int, float, Any], None]] = []
_REMEMBERED = 1 << 14  # bytes: small tensors of any dtype
_REMEMBERED_LABELS = 1 << 20  # bytes of signed integers: the labels of a large batch, the targets of a language model
_FILL_STEP = 16  # bytes of the fill pattern; buckets are multiples of it


class _TransferFields(NamedTuple):
    buffer: Any
    event: Any
    pending_release: Callable[[], None] | None
    host_ref: np.ndarray | None


class Transfer(_TransferFields):
    """The result of a copy to the device, ``(buffer, event, pending_release, host_ref)``; ``handle`` is the pool's lease."""

    handle: memory.BufferHandle | None = None


@lru_cache(maxsize=256)
def _fill_pattern(dtype: str, value: float, sign: float) -> np.ndarray:
    del sign  # tells 0.0 from -0.0, which are equal as keys
    row = dtypes.DTYPES[dtype]
    return dtypes.encode(np.array([value] * (_FILL_STEP // row.itemsize), row.host), row)  # np.full of NumPy 2.0 wraps around


def _remembered(array: Any, stored: np.ndarray) -> np.ndarray | None:
    """Return a host copy of a small tensor, so that labels can be checked without waiting for the device; ``None`` for a large one."""
    if stored.nbytes > (_REMEMBERED_LABELS if stored.dtype.kind == "i" else _REMEMBERED):
        return None
    return stored.copy() if array is None or np.may_share_memory(stored, array) else stored


def _with_netcl_errors(enqueue: Callable[..., Any], failed: type[BaseException]) -> Callable[..., Any]:
    """Wrap a copy function: it converts the driver's exceptions ``failed`` to netcl's and reports each copy to ``transfer_listeners``."""

    def call(*args: Any, **options: Any) -> Any:
        if waiting:
            flush_waiting(args[0])
        began = time.perf_counter() if transfer_listeners else 0.0
        try:
            event = enqueue(*args, **options)
        except failed as error:
            raise program.failure("transfer", "to copy", error) from None
        if began:
            _report_transfer(args, options, began, event)
        return event

    return call


def _report_transfer(args: Sequence[Any], options: Mapping[str, Any], began: float, event: Any) -> None:
    queue, target, source, *rest = args
    if rest:  # a fill has a pattern for its source, an offset and a number of bytes
        name, nbytes = "fill", rest[1]
    elif isinstance(target, np.ndarray):
        name, nbytes = "to host", target.nbytes
    else:
        name, nbytes = ("to device", source.nbytes) if isinstance(source, np.ndarray) else ("on device", options["byte_count"])
    for listener in list(transfer_listeners):
        listener(queue, name, nbytes, began, event)


class OpenCLBackend:
    """Allocates, fills and copies memory over one queue.

    ``backend_of(queue)`` returns the shared instance of a queue.
    """

    name = "cl"

    def __init__(self, queue: Any):
        cl = platforms.opencl()
        if not isinstance(queue, cl.CommandQueue):
            raise DeviceError(message("OpenCLBackend", "queue must be a command queue of an OpenCL device", queue=queue))
        self.queue = queue
        self.context = queue.context
        self.pool = memory.get_persistent_pool(queue)
        self.integrated = memory.is_integrated_gpu(queue)
        self._copy = _with_netcl_errors(cl.enqueue_copy, cl.Error)
        self._fill = _with_netcl_errors(cl.enqueue_fill_buffer, cl.Error)
        self._simulated = "oclgrind" in queue.device.platform.name.lower()
        lifecycle.install_handlers()

    def from_host(
        self, array: Any, dtype: str | None = None, async_copy: bool | None = None, use_pinned: bool | None = None, share: bool = False
    ) -> Transfer:
        """Copy values to new memory of the device. ``async_copy`` and ``use_pinned`` default to NETCL_ASYNC_H2D and NETCL_PINNED_H2D.

        On devices that share the host's memory, the default of ``use_pinned`` is false.
        """
        stored, wanted = storage_of(array, dtype)
        return self.send(array, stored, wanted, async_copy, use_pinned, share)

    def send(
        self, array: Any, stored: np.ndarray, dtype: dtypes.DType, async_copy: bool | None, use_pinned: bool | None, share: bool
    ) -> Transfer:
        """Copy ``stored``, the values of ``array``, to the device. With ``share``, devices that share host memory use ``stored``."""
        if self.integrated and stored.nbytes and (share or not use_pinned):
            return self._in_place(array, stored, share)
        handle = self.pool.allocate(stored.nbytes, what=f"{stored.shape} {dtype.name}")
        return self.write(handle, array, stored, async_copy, use_pinned)

    def _in_place(self, array: Any, stored: np.ndarray, share: bool) -> Transfer:
        """Let the driver copy ``stored`` into memory of its own or, with ``share``, use the memory of ``stored`` directly.

        A copy must be in the driver's memory (COPY_HOST_PTR). A buffer over an array that netcl made (USE_HOST_PTR) is unsafe: running
        kernels keep the buffer alive, but not the array.
        """
        began = time.perf_counter()
        handle = self.pool.adopt_array(stored) if not share else self.pool.alias_array(self.queue, stored)
        for listener in list(transfer_listeners):
            listener(self.queue, "to device", stored.nbytes, began, None)
        if active.recorder is not None:
            active.recorder.upload(handle.buffer, stored)
        transfer = Transfer(handle.buffer, None, None, stored if share else _remembered(array, stored))
        transfer.handle = handle
        return transfer

    def write(
        self, handle: Any, array: Any, stored: np.ndarray, async_copy: bool | None = None, use_pinned: bool | None = None
    ) -> Transfer:
        """Copy stored bytes into the buffer of ``handle``, after all work enqueued before; waits unless the copy is asynchronous."""
        later = env.value("NETCL_ASYNC_H2D") if async_copy is None else async_copy
        pinned = env.value("NETCL_PINNED_H2D") and not self.integrated if use_pinned is None else use_pinned
        if active.recorder is not None:
            active.recorder.upload(handle.buffer, stored)
        if not stored.nbytes:
            transfer = Transfer(handle.buffer, None, None, None)
        elif pinned:
            transfer = self._staged(handle.buffer, stored, later)
        elif later and not np.may_share_memory(stored, array):
            event = self._copy(self.queue, handle.buffer, stored, is_blocking=False)
            transfer = Transfer(handle.buffer, event, None, stored)
        else:
            self._copy(self.queue, handle.buffer, stored, is_blocking=True)
            transfer = Transfer(handle.buffer, None, None, None)
        transfer.handle = handle
        return transfer

    def _staged(self, buffer: Any, stored: np.ndarray, later: bool) -> Transfer:
        """Copy through page-locked memory. With ``later``, do not wait: the result holds the event and a function that frees the memory."""
        pool = memory.get_pinned_pool(self.queue)
        lease = pool.allocate(stored.nbytes)
        staging = lease.buffer[: stored.nbytes]
        np.copyto(staging.view(stored.dtype), stored.reshape(-1))
        event = self._copy(self.queue, buffer, staging, is_blocking=not later)
        if later:
            return Transfer(buffer, event, pool.release_after(lease, event), _remembered(None, stored))
        pool.release(lease)
        return Transfer(buffer, None, None, _remembered(None, stored))

    def from_shape(self, shape: tuple[int, ...], dtype: str = "float32", fill: float = 0) -> memory.BufferHandle:
        """Lease memory filled with ``fill``, by default zeros."""
        handle = self.empty(shape, dtypes.lookup(dtype, "from_shape"))
        self.fill(handle.buffer, handle.nbytes, dtypes.lookup(dtype), fill)
        return handle

    def empty(self, shape: tuple[int, ...], dtype: dtypes.DType) -> memory.BufferHandle:
        """Lease uninitialized memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        # The name is for an error; small tensors, for which making it would take time, hardly ever cause one.
        return self.pool.allocate(nbytes) if nbytes < memory.LARGE else self.pool.allocate(nbytes, what=f"{shape} {dtype.name}")

    def fill(self, buffer: Any, nbytes: int, dtype: dtypes.DType, value: float = 0) -> None:
        """Set every element of the first ``nbytes`` of a buffer to ``value``."""
        pattern = _fill_pattern(dtype.name, value, math.copysign(1.0, value))
        whole = nbytes - nbytes % _FILL_STEP
        for part, start, count in ((pattern, 0, whole), (pattern[:1], whole, nbytes - whole)):
            if count:
                self.fill_bytes(buffer, part, start, count)

    def fill_bytes(self, buffer: Any, pattern: np.ndarray, start: int, count: int) -> None:
        """Repeat a pattern over ``count`` bytes, beginning at ``start``."""
        if active.recorder is not None:
            active.recorder.fill(buffer, pattern, start, count)
        # Oclgrind does not count a fill as initialization; NVIDIA's driver loses the queue at single bytes behind 2^31.
        if self._simulated or (pattern.nbytes < 4 and start >= 1 << 31):
            values = np.tile(pattern, count // pattern.nbytes)
            self._copy(self.queue, buffer, values, is_blocking=True, dst_offset=start)
        elif waiting:
            self._later(partial(self._fill, self.queue, buffer, pattern, start, count), buffer)
        else:
            self._fill(self.queue, buffer, pattern, start, count)

    def _later(self, enqueue: Callable[[], object], target: Any, *read: Any) -> None:
        """Append a command that no one waits for to the waiting runs."""
        run_later(WaitingRun(self.queue, enqueue, (target, *read), (target,)))

    def upload_bytes(self, target: Any, stored: np.ndarray) -> None:
        """Enqueue a copy of ``stored`` to the start of a buffer, without waiting; the array must not change afterwards."""
        self._copy(self.queue, target, stored, is_blocking=False)

    def copy_bytes(self, target: Any, source: Any, nbytes: int) -> None:
        """Copy the first ``nbytes`` of one buffer to another."""
        if active.recorder is not None:
            active.recorder.copy(target, source, nbytes)
        if waiting:
            self._later(partial(self._copy, self.queue, target, source, byte_count=nbytes), target, source)
        else:
            self._copy(self.queue, target, source, byte_count=nbytes)

    def to_host(self, storage: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Copy the values to a new array; waits for all work enqueued before."""
        wanted = dtypes.lookup(dtype, "to_host")
        if active.recorder is not None:
            active.recorder.read("to_host")
        stored = np.empty(shape, wanted.storage)
        if stored.nbytes:
            self._copy(self.queue, stored, getattr(storage, "buffer", storage), is_blocking=True)
        faults = getattr(self.queue.netcl, "faults", None)
        if faults is not None and faults.pending:
            faults.check()  # an index on the device was out of range: raise before a value can be used
        return dtypes.decode(stored, wanted)

    def to_host_async(self, storage: Any, shape: tuple[int, ...], dtype: str) -> HostCopy:
        """Start copying the values; ``wait()`` of the result returns the array. A bfloat16 copy blocks, because the host widens it."""
        wanted = dtypes.lookup(dtype, "to_host_async")
        if active.recorder is not None:
            active.recorder.read("to_host_async")
        stored = np.empty(shape, wanted.storage)
        if not stored.nbytes:
            return HostCopy(dtypes.decode(stored, wanted))
        # bfloat16 is widened on the host, which needs the bytes: that copy is waited for.
        widened = wanted.host != wanted.storage
        event = self._copy(self.queue, stored, getattr(storage, "buffer", storage), is_blocking=widened)
        return HostCopy(dtypes.decode(stored, wanted), event)

    def clone(self, storage: Any, shape: tuple[int, ...], dtype: dtypes.DType) -> memory.BufferHandle:
        """Copy the values to newly leased memory; returns the lease."""
        handle = self.empty(shape, dtype)
        if handle.nbytes:
            self.copy_bytes(handle.buffer, getattr(storage, "buffer", storage), handle.nbytes)
        return handle

    def wait(self, pending: Any = None) -> None:
        """Wait for an event or a pending copy. With ``None``, wait for the whole queue and handle Ctrl-C."""
        if pending is not None:
            pending.wait()
        else:
            while not interruptible_finish(self.queue):
                pass

    def reshape(self, storage: Any, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """Return the same buffer, because shapes belong to tensors; raises if the buffer is too small for ``shape``."""
        nbytes = math.prod(shape) * dtypes.lookup(dtype, "reshape").itemsize
        if nbytes > (size := getattr(storage, "buffer", storage).size):
            raise ShapeError(message("reshape", f"the buffer must have at least {nbytes} bytes, got {size}", shape=shape, dtype=dtype))
        return storage


def backend_of(queue: Any) -> OpenCLBackend:
    """Return the backend of a queue; it is created at first use and stored on the queue."""
    if platforms.forked_child:
        platforms.check_process()
    try:
        return queue.netcl.backend
    except AttributeError:
        made = OpenCLBackend(queue)  # raises if the argument is not a queue
        return queue_state(queue).part("backend", lambda _: made)
