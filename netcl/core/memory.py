"""Device memory: the pools every buffer comes from, and probes of how a device shares memory with the host.

A fresh buffer costs 4 to 11 times a reused one (page faults on CPUs, 60-120 us at first use on GPUs), so buffers are
recycled. A lease is the Python lifetime of its :class:`BufferHandle`; all tensors over one buffer share the handle.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from netcl.core import env, platforms
from netcl.core.errors import DeviceError, OutOfMemoryError, ShapeError, message
from netcl.core.kernels import program
from netcl.core.recording import active

SMALLEST_BUCKET = 1 << 10
LARGEST_BUCKET = 256 << 20


@dataclass
class PoolStats:
    """Counters of a pool: leases served from the free lists and from the driver, bytes held and bytes waiting."""

    hits: int = 0
    misses: int = 0
    bytes_allocated: int = 0
    bytes_cached: int = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class BufferHandle:
    """One lease of a buffer. ``release`` gives it back, once; dropping the last reference does the same."""

    __slots__ = ("__weakref__", "buffer", "bucket", "nbytes", "persistent", "pool")

    def __init__(self, pool: Any, buffer: Any, nbytes: int, bucket: int):
        self.pool = pool
        self.buffer = buffer
        self.nbytes = nbytes
        self.bucket = bucket
        self.persistent = False
        if active.recorder is not None:
            active.recorder.allocated(self)

    def release(self) -> None:
        """Return the buffer to its pool; a second call does nothing, and a persistent lease is left alone."""
        if self.buffer is not None and not self.persistent:
            buffer, self.buffer = self.buffer, None
            self.pool._take_back(buffer, self.bucket)

    def __del__(self) -> None:
        if self.buffer is not None:
            self.pool._take_back(self.buffer, self.bucket)
            self.buffer = None


def power_of_two(nbytes: int) -> int:
    """The bucket of :class:`BufferPool`."""
    return max(SMALLEST_BUCKET, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else SMALLEST_BUCKET


@lru_cache(maxsize=8192)
def eighth_steps(nbytes: int) -> int:
    """The bucket of :class:`PersistentBufferPool`: powers of two to 64 KB, then four steps per doubling (waste < 25 %)."""
    if nbytes <= 1 << 16:
        return power_of_two(nbytes)
    step = min(1 << (nbytes - 1).bit_length(), LARGEST_BUCKET) >> 3
    return -(-nbytes // step) * step


class BufferPool:
    """Free lists of device buffers keyed by power-of-two sizes; it grows as needed and shrinks by :meth:`clear`.

    Reuse is safe for work on one in-order queue: give every queue a pool of its own.

    >>> from netcl.core.device import manager
    >>> context = manager.default("cl").context  # doctest: +SKIP
    >>> handle = BufferPool(context).allocate(4096)  # doctest: +SKIP
    """

    bucket_of: Callable[[int], int] = staticmethod(power_of_two)

    def __init__(self, context: Any):
        cl = platforms.opencl()
        if not isinstance(context, cl.Context):
            raise DeviceError(
                message("BufferPool", "a pool needs an OpenCL context", "pass handle.context of an OpenCL device", context=context)
            )
        self.context = context
        self.stats = PoolStats()
        self._free: dict[int, list[Any]] = {}
        self._lock = threading.RLock()
        self._limit = int(context.devices[0].max_mem_alloc_size)
        self._create = cl.Buffer
        self._flags = cl.mem_flags.READ_WRITE
        _pools.add(self)

    def allocate(self, nbytes: int, flags: Any = None, what: str = "") -> BufferHandle:
        """Lease a buffer of at least ``nbytes``; ``what`` names the tensor in an out-of-memory message."""
        if nbytes < 0:
            raise ShapeError(message("allocate", "a size cannot be negative", nbytes=nbytes))
        if flags is not None and flags != self._flags:
            return BufferHandle(_Unpooled, self._new(nbytes, flags, what), nbytes, nbytes)
        bucket = self.bucket_of(nbytes)
        self._lock.acquire()  # by hand: every op comes here, and a with statement takes twice as long
        try:
            free = self._free.get(bucket)
            if free:
                stats = self.stats
                stats.hits += 1
                stats.bytes_cached -= bucket
                return BufferHandle(self, free.pop(), nbytes, bucket)
        finally:
            self._lock.release()
        buffer = self._new(bucket if bucket <= self._limit else nbytes, self._flags, what)
        with self._lock:
            self.stats.misses += 1
            self.stats.bytes_allocated += bucket
        return BufferHandle(self, buffer, nbytes, bucket)

    def reuse(self, nbytes: int) -> BufferHandle | None:
        """Lease the smallest free buffer that holds ``nbytes``, of whatever bucket; ``None`` if there is none."""
        with self._lock:
            bucket = min((bucket for bucket, free in self._free.items() if free and bucket >= nbytes), default=None)
            if bucket is None:
                return None
            self.stats.hits += 1
            self.stats.bytes_cached -= bucket
            return BufferHandle(self, self._free[bucket].pop(), nbytes, bucket)

    def release(self, handle: BufferHandle) -> None:
        """Give a lease back; the same as ``handle.release()``."""
        handle.release()

    def clear(self) -> None:
        """Return every free buffer to the driver. Leases are not touched."""
        with self._lock:
            self.stats.bytes_allocated -= self.stats.bytes_cached
            self.stats.bytes_cached = 0
            self._free.clear()

    def _take_back(self, buffer: Any, bucket: int) -> None:
        if platforms.forked_child:
            return  # the driver's state belongs to the parent; the lock may be held by a thread that is not here
        with self._lock:
            self._free.setdefault(bucket, []).append(buffer)
            self.stats.bytes_cached += bucket

    def _new(self, nbytes: int, flags: Any, what: str, values: np.ndarray | None = None) -> Any:
        platforms.check_process()
        if nbytes > self._limit:
            raise OutOfMemoryError(self._no_room(nbytes, what, "one allocation is larger than the device allows"))
        arguments = (self.context, flags, max(nbytes, 4)) if values is None else (self.context, flags, 0, values)
        try:
            return self._create(*arguments)
        except platforms.opencl().MemoryError:
            empty_cache()
        try:
            return self._create(*arguments)
        except platforms.opencl().MemoryError:
            raise OutOfMemoryError(self._no_room(nbytes, what, "the device has no room left")) from None

    def _no_room(self, nbytes: int, what: str, reason: str) -> str:
        stats, device = self.stats, self.context.devices[0]
        held = f"{_size(stats.bytes_allocated)} of which {_size(stats.bytes_cached)} free"
        remedy = "use a smaller batch, or drop tensors and call netcl.core.memory.empty_cache()"
        return message("allocate", reason, f"largest live tensors: {_largest_live(self) or 'none'}; {remedy}",
                       tensor=what or "buffer", bytes=nbytes, limit=self._limit, device=device.name, pool=held)  # fmt: skip

    def adopt_array(self, array: np.ndarray) -> BufferHandle:
        """A lease of a new buffer that holds a copy of ``array``, made by the driver without waiting for any queue.

        Returned to the driver afterwards: its size fits no bucket, and the C library recycles such memory well.
        """
        cl = platforms.opencl()
        buffer = self._new(array.nbytes, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, f"{array.shape} {array.dtype}", array)
        self.stats.bytes_allocated += array.nbytes
        return BufferHandle(_Adopted(self), buffer, array.nbytes, array.nbytes)

    def alias_array(self, queue: Any, array: np.ndarray) -> BufferHandle:
        """A lease of a buffer over the caller's own memory; giving it back waits for ``queue``, so that no kernel outlives the array."""
        buffer = create_zero_copy_buffer(queue, array)
        self.stats.bytes_allocated += array.nbytes
        return BufferHandle(_Adopted(self, queue), buffer, array.nbytes, array.nbytes)

    def buffers(self) -> list[Any]:
        """The free buffers, for the fork contract."""
        return [buffer for free in self._free.values() for buffer in free]


class _Adopted:
    """Where a buffer that no bucket fits goes back to: the driver, after ``queue`` if one is given."""

    def __init__(self, pool: BufferPool, queue: Any = None):
        self.pool = pool
        self.queue = queue

    def _take_back(self, buffer: Any, nbytes: int) -> None:
        if platforms.forked_child:
            return
        self.pool.stats.bytes_allocated -= nbytes
        if self.queue is not None:
            self.queue.finish()


class _Unpooled:
    """The pool of buffers that no pool keeps (special flags): a returned buffer goes back to the driver."""

    @staticmethod
    def _take_back(buffer: Any, bucket: int) -> None:
        del buffer, bucket


class PersistentBufferPool(BufferPool):
    """The pool tensors use: buckets from 1 KB to 256 MB, a cap on cached bytes and on buffers per bucket.

    Over the cap, buffers of the bucket that was used least recently go back to the driver first.
    """

    bucket_of = staticmethod(eighth_steps)

    def __init__(self, context: Any, max_cached_bytes: int | None = None, max_per_bucket: int = 4096):
        super().__init__(context)
        cap = env.value("NETCL_MAX_CACHED_GB") * (1 << 30) if max_cached_bytes is None else max_cached_bytes
        self.max_cached_bytes = int(cap)
        self.max_per_bucket = max_per_bucket

    def _take_back(self, buffer: Any, bucket: int) -> None:
        if platforms.forked_child:
            return
        self._lock.acquire()
        try:
            free = self._free.pop(bucket, None)
            if free is None:
                free = []
            self._free[bucket] = free  # last in the order: used most recently
            free.append(buffer)
            stats = self.stats
            stats.bytes_cached += bucket
            while stats.bytes_cached > self.max_cached_bytes or len(free) > self.max_per_bucket:
                self._evict(bucket if len(free) > self.max_per_bucket else next(b for b, kept in self._free.items() if kept))
        finally:
            self._lock.release()

    def _evict(self, bucket: int) -> None:
        self._free[bucket].pop(0)
        self.stats.bytes_cached -= bucket
        self.stats.bytes_allocated -= bucket

    def get_stats(self) -> dict[str, Any]:
        """Counters and the number of free buffers per bucket."""
        s = self.stats
        buckets = {bucket: len(free) for bucket, free in sorted(self._free.items()) if free}
        return {"hits": s.hits, "misses": s.misses, "hit_rate": s.hit_rate, "bytes_allocated": s.bytes_allocated,
                "bytes_cached": s.bytes_cached, "buckets": buckets}  # fmt: skip


class PinnedBufferPool:
    """Page-locked host memory for transfers: ALLOC_HOST_PTR buffers that stay mapped as NumPy byte arrays.

    A lease may be given back together with the event of the copy that still reads it; it is handed out again only
    after that event is complete.
    """

    def __init__(self, queue: Any):
        self.queue = queue
        self.stats = PoolStats()
        self._free: dict[int, deque[tuple[Any, Any]]] = {}
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, flags: Any = None) -> BufferHandle:
        """Lease page-locked memory; ``handle.buffer`` is a NumPy array of bytes."""
        del flags
        bucket = power_of_two(nbytes)
        with self._lock:
            free = self._free.get(bucket)
            if free and _complete(free[0][1]):
                self.stats.hits += 1
                self.stats.bytes_cached -= bucket
                return BufferHandle(self, free.popleft()[0], nbytes, bucket)
        mapped = _map_pinned(self.queue, bucket)
        with self._lock:
            self.stats.misses += 1
            self.stats.bytes_allocated += bucket
        return BufferHandle(self, mapped, nbytes, bucket)

    def release(self, handle: BufferHandle, event: Any = None) -> None:
        """Give a lease back; ``event`` is the copy that must end before the memory may be written again."""
        if handle.buffer is not None:
            buffer, handle.buffer = handle.buffer, None
            self._take_back(buffer, handle.bucket, event)

    def clear(self) -> None:
        """Unmap and free what is not leased."""
        with self._lock:
            self.stats.bytes_allocated -= self.stats.bytes_cached
            self.stats.bytes_cached = 0
            self._free.clear()

    def _take_back(self, buffer: Any, bucket: int, event: Any = None) -> None:
        if platforms.forked_child:
            return
        with self._lock:
            self._free.setdefault(bucket, deque()).append((buffer, event))
            self.stats.bytes_cached += bucket


def _complete(event: Any) -> bool:
    return event is None or event.command_execution_status == 0


def _map_pinned(queue: Any, nbytes: int) -> np.ndarray:
    cl = platforms.opencl()
    flags = cl.map_flags.READ | cl.map_flags.WRITE
    mapped, _ = cl.enqueue_map_buffer(queue, create_pinned_buffer(queue, nbytes), flags, 0, (nbytes,), np.uint8, is_blocking=True)
    return mapped


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _queue_attribute(queue: Any, name: str, make: Callable[[], Any]) -> Any:
    try:
        return getattr(queue, name)
    except AttributeError:
        with program.state(queue).lock:
            if not hasattr(queue, name):
                setattr(queue, name, make())
            return getattr(queue, name)


def get_persistent_pool(queue: Any) -> PersistentBufferPool:
    """The pool behind the tensors of a queue."""
    return _queue_attribute(queue, "_netcl_pool", lambda: PersistentBufferPool(queue.context))


def get_pinned_pool(queue: Any) -> PinnedBufferPool:
    """The staging memory of a queue."""
    return _queue_attribute(queue, "_netcl_pinned", lambda: PinnedBufferPool(queue))


def is_integrated_gpu(queue: Any) -> bool:
    """Whether host and device share memory: integrated GPUs, and every OpenCL CPU device."""
    return _queue_attribute(queue, "_netcl_unified", lambda: _shares_host_memory(queue.device))


def _shares_host_memory(device: Any) -> bool:
    cl = platforms.opencl()
    return bool(device.type & cl.device_type.CPU) or bool(device.host_unified_memory)


def has_svm_support(queue: Any) -> bool:
    """Whether the device offers shared virtual memory of any grain."""
    cl = platforms.opencl()
    try:
        return bool(queue.device.get_info(cl.device_info.SVM_CAPABILITIES))
    except cl.Error:
        return False  # OpenCL 1.x drivers do not know the question


def create_pinned_buffer(queue: Any, nbytes: int) -> Any:
    """A buffer in page-locked host memory (ALLOC_HOST_PTR)."""
    cl = platforms.opencl()
    platforms.check_process()
    return cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, max(int(nbytes), 4))


def create_zero_copy_buffer(queue: Any, array: np.ndarray) -> Any:
    """A buffer over the memory of ``array`` (USE_HOST_PTR): the caller keeps it alive and unchanged while it is in use."""
    cl = platforms.opencl()
    platforms.check_process()
    if not array.flags.writeable:
        raise ShapeError(message("create_zero_copy_buffer", "the array is read-only", "pass a copy", shape=array.shape))
    if not array.flags.c_contiguous:
        raise ShapeError(message("create_zero_copy_buffer", "the array is not contiguous", "pass numpy.ascontiguousarray(array)",
                                 shape=array.shape, strides=array.strides))  # fmt: skip
    return cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=array)


def empty_cache() -> None:
    """Return the free buffers of all pools to their drivers."""
    for pool in list(_pools):
        pool.clear()


def memory_stats() -> dict[str, int | float]:
    """The counters of all pools, summed."""
    pools = list(_pools)
    total = PoolStats(*(sum(getattr(p.stats, f) for p in pools) for f in ("hits", "misses", "bytes_allocated", "bytes_cached")))
    return {"hits": total.hits, "misses": total.misses, "hit_rate": total.hit_rate, "bytes_allocated": total.bytes_allocated,
            "bytes_cached": total.bytes_cached, "bytes_in_use": total.bytes_allocated - total.bytes_cached}  # fmt: skip


def memory_summary() -> str:
    """A table of all pools for people."""
    rows = [f"{'device':30} {'in use':>10} {'free':>10} {'hits':>10} {'misses':>8} {'rate':>6}"]
    for pool in sorted(_pools, key=lambda p: -p.stats.bytes_allocated):
        s, name = pool.stats, pool.context.devices[0].name[:30]
        used = s.bytes_allocated - s.bytes_cached
        rows.append(f"{name:30} {_size(used):>10} {_size(s.bytes_cached):>10} {s.hits:10d} {s.misses:8d} {s.hit_rate:6.1%}")
    return "\n".join(rows)


def live_buffers() -> list[Any]:
    """Every driver object the process holds through pools and leases; the fork contract keeps them from being destroyed twice."""
    leased = [o.buffer for o in gc.get_objects() if type(o) is BufferHandle and o.buffer is not None]
    return leased + [buffer for pool in list(_pools) for buffer in pool.buffers()]


def _largest_live(pool: BufferPool, count: int = 3) -> str:
    tensors = [o for o in gc.get_objects() if type(o).__name__ == "Tensor" and getattr(o, "pool_handle", None) is not None]
    mine = sorted((t for t in tensors if pool in (t.pool_handle.pool, getattr(t.pool_handle.pool, "pool", None))), key=lambda t: -t.nbytes)
    return ", ".join(f"{t.shape} {t.dtype} {_size(t.pool_handle.nbytes)}" for t in mine[:count])


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GB"


program.free_memory = empty_cache
